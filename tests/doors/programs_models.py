"""Programs that train models of transformers and peft: what scripts do with them between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import gemini_strategy as gs
from programs import Run, door, left

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**TINY, intermediate_size=48, max_position_embeddings=64))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**TINY, intermediate_size=48, num_labels=2))


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


def mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            **TINY,
            intermediate_size=24,
            num_key_value_heads=1,
            num_local_experts=4,
            output_router_logits=True,
        )
    )


def whisper() -> nn.Module:
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
             (("layers", 2), ("attention_heads", 2), ("ffn_dim", 48))}  # fmt: skip
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 0)
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=64,
            num_mel_bins=8,
            d_model=32,
            max_source_positions=8,
            max_target_positions=16,
            encoder_layerdrop=0.4,
            decoder_layerdrop=0.4,
            eos_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **sizes,
            **ids,
        )
    )


class Loop:
    """A loop over batches of tokens: the same verbs managed and not, in every precision."""

    def __init__(self, run: Run, model: nn.Module, precision: str | None, **how: Any) -> None:
        self.run, self.precision, self.i = run, precision, 0
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = gs.HybridAdam(how.get("groups") or trained, lr=1e-2)
        scale = {"initial_scale": how.get("scale", 2.0**12), "hysteresis": 1, "growth_interval": 3}
        self.scaler = gs.LossScaler(**scale) if precision == "16-mixed" else None
        run.manage(model, self.optimizer, precision=precision, **scale)
        if run.is_managed:
            self.scaler = run.engine.scaler
        self.model = model
        for _ in range(run.setup.warm // 2):
            self.step()

    def ids(self, seed: int, n: int = 8) -> Tensor:
        return torch.randint(2, 60, (2, n), generator=torch.Generator().manual_seed(seed)).to(
            self.run.device
        )

    def cast(self) -> torch.autocast:
        is_mixed = (self.precision or "").endswith("-mixed") and not self.run.is_managed
        dtype = torch.float16 if self.precision == "16-mixed" else torch.bfloat16
        return torch.autocast(torch.device(self.run.device).type, dtype=dtype, enabled=is_mixed)

    def call(self, **inputs: Any) -> Any:
        if self.precision == "bf16-true" and not self.run.is_managed:
            inputs = {k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v
                      for k, v in inputs.items()}  # fmt: skip
        with self.cast():
            return self.model(**inputs)

    def loss(self, seed: int) -> Tensor:
        ids = self.ids(seed)
        if isinstance(self.model, BertForSequenceClassification):
            return self.call(input_ids=ids, labels=ids[:, 0] % 2).loss
        if isinstance(self.model, WhisperForConditionalGeneration):
            sound = self.run.randn(2, 8, 16, seed=seed)
            return self.call(input_features=sound, labels=ids).loss
        return self.call(input_ids=ids, labels=ids).loss

    def back(self, loss: Tensor) -> Tensor:
        if self.run.engine is not None:
            self.run.engine.backward(loss)
        else:
            (loss if self.scaler is None else loss * self.scaler.scale).backward()
        return loss.detach().float().clone()

    def finish(self, clip: float | None = 1.0) -> Any:
        norm, divisor = None, 1.0
        if self.run.engine is not None or self.scaler is None:
            norm = None if clip is None else self.run.clip(clip)
            self.optimizer.step()
        else:
            divisor = self.scaler.scale
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            is_over = not all(g.isfinite().all() for g in grads)
            if not is_over:
                norm = self.optimizer.clip_grad_norm_(clip or 1e9, grad_divisor=divisor)
                self.optimizer.step(grad_divisor=divisor)
            self.scaler.update(is_over)
        self.optimizer.zero_grad()
        is_plain = norm is None or self.scaler is not None
        return self.scaler and self.scaler.scale if is_plain else norm

    def step(self, clip: float | None = 1.0) -> Any:
        self.i += 1
        torch.manual_seed(self.i)
        return [self.back(self.loss(100 + self.i)), self.finish(clip)]

    @torch.no_grad()
    def generate(self, **how: Any) -> Tensor:
        was = self.model.training
        self.model.eval()
        torch.manual_seed(3)
        with self.cast():
            out = self.model.generate(
                input_ids=self.ids(7, 4), max_new_tokens=5, pad_token_id=0, **how
            )
        self.model.train(was)
        return out


def each(
    name: str, build: Callable[[], nn.Module], *precisions: str | None, **how: Any
) -> Callable[[Callable[[Loop], Any]], Callable[[Loop], Any]]:
    """A row for each precision."""

    def add(body: Callable[[Loop], Any]) -> Callable[[Loop], Any]:
        for precision in precisions or (None, "bf16-true"):

            def walk(run: Run, precision: str | None = precision) -> Any:
                torch.manual_seed(5)
                loop = Loop(run, build(), precision, **how)
                return [body(loop), left(run)]

            row = {"model": None, "trains": False, "needs_all": True}
            door(f"models/{name}, {precision or '32-true'}", **row)(walk)
        return body

    return add


@each("leftover micro-batch", gpt2, "bf16-mixed", "16-mixed")
def _(loop: Loop) -> Any:
    out = []
    for i in range(5):
        out.append(loop.back(loop.loss(i) / 2))
        if i % 2 or i == 4:
            out.append(loop.finish())
    return out


@each("states dropped", gpt2, "16-mixed")
def _(loop: Loop) -> Any:
    out = [loop.step() for _ in range(3)]
    loop.optimizer.state.clear()
    return [out, loop.step(), loop.optimizer.state.pop(loop.model.lm_head.weight) and loop.step()]


@each("overflow of the loss scale", gpt2, "16-mixed", scale=2.0**30)
def _(loop: Loop) -> Any:
    return [loop.step() for _ in range(18)]


for _kind, _how in {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 8},
    "beams": {"num_beams": 2, "do_sample": False},
    "static cache": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
    "no cache": {"do_sample": False, "use_cache": False},
}.items():

    @each(f"generate, {_kind}", llama, "bf16-true" if _kind != "beams" else "bf16-mixed")
    def _(loop: Loop, how: Any = _how) -> Any:
        out = [loop.step(), loop.generate(**how)]
        out.append(loop.back(loop.loss(1) / 2))
        out.append(loop.generate(**how))
        out.append(loop.back(loop.loss(2) / 2))
        return [out, loop.finish(), loop.generate(**how), loop.step()]


@each("T5, generate", t5)
def _(loop: Loop) -> Any:
    return [loop.step(), loop.generate(do_sample=False), loop.step(), loop.generate(num_beams=2)]


@each("Whisper with LayerDrop", whisper, None, "bf16-true", "bf16-mixed")
def _(loop: Loop) -> Any:
    return [loop.step() for _ in range(4)]


@each("Mixtral, evaluation between micro-batches", mixtral, "bf16-mixed", "bf16-true")
def _(loop: Loop) -> Any:
    out = []
    for i in range(3):
        out.append(loop.back(loop.loss(i) / 2))
        loop.model.eval()
        with torch.inference_mode():
            out.append(loop.loss(50).float().clone())
        loop.model.train()
        out.append(loop.back(loop.loss(9 + i) / 2))
        out.append(loop.finish())
    return out


@each("REINFORCE with a cache of keys", llama)
def _(loop: Loop) -> Any:
    out = []
    for _ in range(3):
        text = loop.generate(do_sample=True)
        first = loop.call(input_ids=text[:, :4], use_cache=True)
        rest = loop.call(input_ids=text[:, 4:], past_key_values=first.past_key_values)
        logp = rest.logits[:, :-1].float().log_softmax(-1)
        chosen = logp.gather(-1, text[:, 5:, None])[..., 0].sum(1)
        reward = (text[:, 4:] % 2).float().mean(1)
        out += [text, loop.back(-(reward * chosen).mean()), loop.finish()]
    return out


@each("frozen and thawed, classifier made anew", bert, "16-mixed", "bf16-true")
def _(loop: Loop) -> Any:
    encoder = loop.model.bert.encoder
    encoder.layer[0].requires_grad_(False)
    out = [loop.step(), loop.step()]
    encoder.layer[0].requires_grad_(True)
    loop.model.bert.embeddings.requires_grad_(False)
    out.append(loop.step())
    loop.model.classifier.weight.data.normal_(0.0, 0.02)
    loop.model.classifier.bias.data.zero_()
    return [out, loop.step()]


@each("FGM: embeddings attacked and put back", bert, None, "bf16-true", "bf16-mixed")
def _(loop: Loop) -> Any:
    out, words = [], loop.model.bert.embeddings.word_embeddings.weight
    for i in range(3):
        out.append(loop.back(loop.loss(i)))
        kept = words.data.clone()
        norm = words.grad.norm()
        if norm != 0 and not torch.isnan(norm):
            words.data.add_(0.5 * words.grad / norm)
        out.append(loop.back(loop.loss(i)))
        words.data = kept
        out.append(loop.finish())
    return out


@each("R-Drop", bert, "bf16-mixed")
def _(loop: Loop) -> Any:
    out = []
    for i in range(3):
        a, b = (loop.call(input_ids=loop.ids(i)).logits.float().log_softmax(-1) for _ in range(2))
        loss = F.kl_div(a, b, log_target=True) + F.kl_div(b, a, log_target=True) - a[:, 0].mean()
        out += [loop.back(loss), loop.finish()]
    return out


def _resized() -> nn.Module:
    model = gpt2()
    model.resize_token_embeddings(70, mean_resizing=False)
    return model


@each("embeddings resized before", _resized, "bf16-mixed")
def _(loop: Loop) -> Any:
    return [loop.step(), loop.generate(do_sample=False), loop.step()]


@each("embeddings resized midway, managed again", gpt2, None, "bf16-true")
def _(loop: Loop) -> Any:
    out = [loop.step()]
    if loop.run.engine is not None:
        loop.run.engine.close()
    loop.model.to(loop.run.device)  # it came from the host
    loop.model.resize_token_embeddings(70, mean_resizing=False)
    again = Loop(loop.run, loop.model, loop.precision)
    return [out, again.step(), again.step()]


for _reentrant in (False, True):

    @each(f"checkpointing midway, {_reentrant}", llama, "bf16-true", "16-mixed")
    def _(loop: Loop, reentrant: bool = _reentrant) -> Any:
        out = [loop.step()]
        loop.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        loop.model.enable_input_require_grads()
        out += [loop.step(), loop.step()]
        loop.model.gradient_checkpointing_disable()
        loop.model.disable_input_require_grads()
        return [out, loop.step()]


@each("cross entropy in pieces with the head's weight", llama, "bf16-true")
def _(loop: Loop) -> Any:
    def piece(h: Tensor, w: Tensor, want: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w).float(), want, reduction="sum")

    out = []
    for i in range(3):
        ids = loop.ids(i)
        hidden = loop.model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        weight, want = loop.model.lm_head.weight, ids[:, 1:].flatten()
        parts = zip(hidden.split(5), want.split(5), strict=True)
        loss = sum(checkpoint(piece, h, weight, w, use_reentrant=False) for h, w in parts)
        out += [loop.back(loss / 14), loop.finish()]
    return out


@each("LISA: layers at random", llama, "bf16-mixed")
def _(loop: Loop) -> Any:
    out, draw = [], torch.Generator().manual_seed(2)
    for _ in range(4):
        chosen = int(torch.randint(2, (), generator=draw))
        for i, layer in enumerate(loop.model.model.layers):
            layer.requires_grad_(i == chosen)
        out.append(loop.step())
    return out


@each("DPO with a copy made midway", llama, "bf16-true")
def _(loop: Loop) -> Any:
    out = [loop.step()]
    reference = copy.deepcopy(loop.model).eval().requires_grad_(False)
    for i in range(2):
        ids = loop.ids(i)
        mine = loop.call(input_ids=ids).logits.float().log_softmax(-1)[..., 5].sum(1)
        with torch.no_grad():
            its = reference(input_ids=ids).logits.float().log_softmax(-1)[..., 5].sum(1)
        apart = mine - its
        out += [loop.back(-F.logsigmoid(apart[0] - apart[1])), loop.finish()]
    return out


@each("warmup by layers' rates", llama, "bf16-mixed")
def _(loop: Loop) -> Any:
    schedule = transformers.get_cosine_schedule_with_warmup(loop.optimizer, 2, 6)
    out = []
    for _ in range(4):
        out += [loop.step(), schedule.get_last_lr()]
        schedule.step()
    return out


# ---- peft ----------------------------------------------------------------------------------------


def _lora() -> nn.Module:
    return peft.get_peft_model(llama(), peft.LoraConfig(**LORA))


def _two() -> nn.Module:
    model = _lora()
    model.add_adapter("b", peft.LoraConfig(**LORA | {"r": 2}))
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    return model


@each("merge and unmerge midway", _lora, None, "bf16-true", "bf16-mixed")
def _(loop: Loop) -> Any:
    out = [loop.step(), loop.step()]
    loop.model.merge_adapter()
    out.append(loop.generate(do_sample=False))
    loop.model.unmerge_adapter()
    return [out, loop.step()]


@each("DPO with disable_adapter", _lora)
def _(loop: Loop) -> Any:
    out = []
    for i in range(3):
        ids = loop.ids(i)
        mine = loop.call(input_ids=ids).logits.float().log_softmax(-1)[..., 5].sum(1)
        with torch.no_grad(), loop.model.disable_adapter():
            its = loop.call(input_ids=ids).logits.float().log_softmax(-1)[..., 5].sum(1)
        apart = mine - its
        out += [loop.back(-F.logsigmoid(apart[0] - apart[1])), loop.finish()]
    return out


@each("two adapters in turn", _two)
def _(loop: Loop) -> Any:
    out = []
    for name in ("default", "b", "default"):
        loop.model.set_adapter(name)
        out.append(loop.step())
    return out


@each("adapters added together midway", _two, "bf16-true")
def _(loop: Loop) -> Any:
    out = [loop.step()]
    loop.model.add_weighted_adapter(["default", "b"], [0.5, 0.5], "c", combination_type="cat")
    loop.model.set_adapter("c")
    out.append(loop.generate(do_sample=False))
    return out


def _saves() -> nn.Module:
    return peft.get_peft_model(llama(), peft.LoraConfig(**LORA, modules_to_save=["lm_head"]))


@each("an adapter put back", _saves)
def _(loop: Loop) -> Any:
    loop.step()
    kept = {k: v.clone() for k, v in peft.get_peft_model_state_dict(loop.model).items()}
    out = [loop.step(), loop.step()]
    peft.set_peft_model_state_dict(loop.model, kept)
    return [out, loop.step()]


def _prompts() -> nn.Module:
    how = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(llama(), how)


@each("prompt tuning and generate", _prompts, "bf16-true")
def _(loop: Loop) -> Any:
    return [loop.step(), loop.generate(do_sample=False), loop.step()]
