"""Adapters of peft on a managed model: the bits of the run without Gemini, and a base that only travels one way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import gemini_strategy as gs
from gemini_strategy.checkpoint.contents import Field
from gemini_strategy.parameters.slot import Slot
from helpers.pairs import turns
from helpers.reference import (
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    drive,
    managed,
    plain,
)

TASK = {"task_type": "CAUSAL_LM"}
TIGHT: dict[str, Any] = {"chunk_size": 4096, "placement_policy": "cpu", "device_budget": "120KB"}


def llama(**changes: Any) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2} | changes
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes, **heads))


def mixtral() -> nn.Module:
    """Its experts are parameters of three dimensions."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=64, **sizes, **heads)
    )


def lora(*targets: str, **how: Any) -> peft.LoraConfig:
    named = {"target_modules": list(targets or ("q_proj", "v_proj"))}
    return peft.LoraConfig(**{"r": 4, "init_lora_weights": False} | named | how | TASK)


KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": lambda: lora(lora_dropout=0.1),
    "all linear": lambda: lora(target_modules="all-linear"),
    "DoRA": lambda: lora(use_dora=True),
    "rsLoRA": lambda: lora(use_rslora=True),
    "modules to save": lambda: lora(modules_to_save=["lm_head"]),
    "token indices": lambda: lora(trainable_token_indices=[1, 5]),
    "target parameters": lambda: lora(
        target_parameters=["mlp.up_proj.weight", "mlp.down_proj.weight"]
    ),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **TASK
    ),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **TASK),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **TASK),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=4, encoder_hidden_size=16, **TASK
    ),
    "experts": lambda: lora(target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
}


@dataclass(frozen=True)
class Case:
    """A model with an adapter, and batches."""

    kind: str
    size: int = 48

    def build(self) -> nn.Module:
        base = mixtral() if self.kind == "experts" else llama(intermediate_size=self.size)
        return peft.get_peft_model(base, KINDS[self.kind]())

    def build_in_bf16(self) -> nn.Module:
        return self.build().bfloat16()

    def batch(self, step: int) -> Tensor:
        return torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))

    def loss(self, run: Plain, batch: Tensor) -> Tensor:
        return run(input_ids=batch, labels=batch).loss


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def of_adapters(model: nn.Module) -> list[nn.Parameter]:
    named = model.named_parameters()
    return [p for name, p in named if "lora_" in name or "modules_to_save" in name]


def recipe(precision: str, groups: Any = trained) -> Recipe:
    return Recipe(precision, steps=3, clip=1.0, groups=groups, lr=1e-2)


# ---- kinds of adapters ---------------------------------------------------------------------------


@turns(kind=KINDS, precision=["bf16-mixed", "32-true", "bf16-true"])
def test_training_has_the_bits_of_the_plain_run(kind: str, precision: str) -> None:
    case, how = Case(kind), recipe(precision)
    reference, run = plain(case.build, how), managed(case.build, how, **TIGHT)
    for each in (reference, run):
        drive(each, case, how.steps)
    assert run.engine.stats()["evictions"] > 0
    assert_same_outcome(run.outcome(), reference.outcome())
    run.engine.close()


@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "modules to save", "target parameters", "IA3"])
def test_merging_has_the_bits_of_the_plain_run(kind: str) -> None:
    """merge_and_unload() takes modules away from a managed model, and writes frozen weights."""
    case, how = Case(kind), recipe("bf16-true")
    tokens, results = case.batch(9), []
    run = managed(case.build_in_bf16, how, **TIGHT)
    for each in (plain(case.build_in_bf16, how), run):
        drive(each, case, how.steps)
        merged = each.model.merge_and_unload()
        with torch.no_grad():
            logits = merged(input_ids=tokens).logits
        results.append((logits, {name: t.clone() for name, t in merged.state_dict().items()}))
    run.engine.close()
    with torch.no_grad():
        results.append((merged(input_ids=tokens).logits, dict(merged.state_dict())))
    assert not any(hasattr(parameter, "_gm_slot") for parameter in merged.parameters())
    (want, state), *others = results
    for logits, its in others:
        assert_same_bits(logits, want)
        assert list(its) == list(state)
        for name, value in state.items():
            assert_same_bits(its[name], value, name)


@turns(
    kind=["LoRA", "DoRA", "modules to save", "target parameters", "IA3"],
    precision=["bf16-true", "bf16-mixed", "16-mixed"],
)
def test_a_model_that_came_in_fp32_merges_in_fp32(kind: str, precision: str) -> None:
    """Masters of the adapters into the base's own values: what a plain fp32 model with both would give."""
    case = Case(kind)
    run = managed(case.build, recipe(precision), **TIGHT)
    drive(run, case, 3)
    want = case.build()
    want.load_state_dict(run.engine.model_state_dict())
    merged, want = run.model.merge_and_unload(), want.merge_and_unload()
    for _ in ("while it is managed", "closed"):
        state = merged.state_dict()
        assert list(state) == list(want.state_dict())
        for name, value in want.state_dict().items():
            assert_same_bits(state[name].clone(), value, name)
        run.engine.close()
    with torch.no_grad():
        logits = [m.eval()(input_ids=case.batch(9)).logits for m in (merged, want)]
    assert_same_bits(*logits)


# ---- several adapters ----------------------------------------------------------------------------


def two_adapters() -> nn.Module:
    model = peft.get_peft_model(llama(), lora())
    model.add_adapter("b", lora("q_proj", "up_proj", r=2, modules_to_save=["lm_head"]))
    return model


@turns(precision=["32-true", "bf16-true", "bf16-mixed"], step=[False, True])
def test_adapters_are_switched_while_they_are_managed(precision: str, step: bool) -> None:
    """One that was frozen at manage() is trained from its fp32 values; the other one's states wait for it."""
    case, outcomes = Case("LoRA"), []
    how = Recipe(precision, clip=None if step else 1.0, groups=of_adapters, lr=1e-2)

    def ready() -> nn.Module:  # cast_model_ keeps what 16 bits lack of what is trained
        model = two_adapters()
        for parameter in of_adapters(model):
            parameter.requires_grad_(True)
        return model

    for run in (plain(ready, how), managed(two_adapters, how, **TIGHT)):
        model = run.model
        for number, name in enumerate(["default", "b", "default", "b"]):
            model.set_adapter(name)
            for index in (2 * number, 2 * number + 1):
                loss = case.loss(run, case.batch(index))
                run.losses.append(loss.detach().clone())
                if step and run.engine is not None:
                    run.engine.backward(loss, step=True)
                else:
                    run.backward(loss)
                run.finish()
        with model.disable_adapter():
            run.losses.append(case.loss(run, case.batch(8)).detach().clone())
        for parameter in of_adapters(model):
            parameter.requires_grad_(True)  # outcomes have the masters of what is trained
        outcomes.append(run.outcome())
    assert_same_outcome(*reversed(outcomes))
    assert set(outcomes[0].counts.values()) == {4}
    run.engine.close()
    assert not any(hasattr(parameter, "_gm_slot") for parameter in model.parameters())


def test_an_adapter_that_was_in_no_group_joins_one() -> None:
    model = two_adapters()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    engine = gs.manage(model, optimizer, precision="bf16-true", device="cpu")
    model.set_adapter("b")
    optimizer.add_param_group({"params": trained(model), "lr": 1e-3})
    tokens = Case("LoRA").batch(0)
    engine.backward(model(input_ids=tokens, labels=tokens).loss)
    before = {p: p._gm_slot.read_master() for p in of_adapters(model)}
    optimizer.step()
    moved = {p for p in before if not torch.equal(p._gm_slot.read_master(), before[p])}
    assert moved == set(trained(model))


def test_what_is_added_later_is_not_left_out_in_silence() -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(model, optimizer, precision="32-true", device="cpu")
    model = peft.get_peft_model(model, lora())
    tokens = Case("LoRA").batch(0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    with pytest.raises(gs.GeminiError, match=r"lora_A.default.weight has a gradient.*manage\(\)"):
        optimizer.step()
    with pytest.raises(gs.GeminiError, match="not the model's; engine.close"):
        optimizer.add_param_group({"params": trained(model)})
    engine.close()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    engine = gs.manage(model, optimizer, precision="32-true", device="cpu")
    before = engine.model_state_dict()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    after = engine.model_state_dict()
    assert {n for n in before if not torch.equal(before[n], after[n])} == {
        n for n in before if "lora_" in n
    }


# ---- the base ------------------------------------------------------------------------------------


def test_a_frozen_base_never_travels_back_and_has_no_states() -> None:
    """Whatever the base's size, as many bytes travel back, and there are as many of states."""
    figures = {}
    for size in (48, 480):
        case = Case("LoRA", size)
        run = managed(case.build_in_bf16, recipe("bf16-true"), **TIGHT)
        drive(run, case, 4)
        stats, slots = run.engine.stats(), run.engine._runtime.slots
        figures[size] = (stats["evicted_bytes"], stats["state_bytes"] - stats["weight_bytes"])
        frozen = {run.engine._runtime.core.chunk(s.id)[0] for s in slots if not s.has_moments}
        active = {run.engine._runtime.core.chunk(s.id)[0] for s in slots if s.has_moments}
        assert frozen and active and not frozen & active
        n_elements = sum(math.prod(s.shape) for s in slots if s.has_moments)
        # A low part of 2 bytes, moments of 8, a gradient of 2; chunks are padded.
        assert figures[size][1] >= 12 * n_elements
        assert stats["fetched_bytes"] > 4 * stats["weight_bytes"]
        run.engine.close()
    assert figures[48] == figures[480]


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The parameters that are read from now on."""
    names: set[str] = set()
    real_field, real_slot = Field.read, Slot._read

    def read_field(self: Field, *args: Any) -> Tensor:
        names.add(self.slot.name)
        return real_field(self, *args)

    def read_slot(self: Slot, *args: Any) -> Tensor:
        names.add(self.name)
        return real_slot(self, *args)

    monkeypatch.setattr(Field, "read", read_field)
    monkeypatch.setattr(Slot, "_read", read_slot)
    return names


def saved_and_resumed(folder: Path, reads: set[str]) -> None:
    case, how = Case("modules to save"), recipe("bf16-true")
    run = managed(case.build, how, **TIGHT)
    drive(run, case, 2)
    reads.clear()
    run.engine.save(folder, {"step": 2}, frozen=False)
    assert reads == {slot.name for slot in run.engine._runtime.slots if slot.has_moments}
    drive(run, case, 2, first=2)
    again = managed(case.build, how, device_budget="200KB", chunk_size=8192)
    assert again.engine.load(folder) == {"step": 2}
    drive(again, case, 2, first=2)
    again.losses[:0], again.norms[:0] = run.losses[:2], run.norms[:2]
    assert_same_outcome(again.outcome(), run.outcome())


def test_a_checkpoint_without_the_base_resumes(tmp_path: Path, reads: set[str]) -> None:
    """It reads none of the base, and is refused where a part of the base is trained."""
    saved_and_resumed(tmp_path / "saved", reads)

    def build() -> nn.Module:
        model = Case("modules to save").build()
        model.base_model.model.model.norm.requires_grad_(True)
        return model

    other = managed(build, recipe("bf16-true"))
    with pytest.raises(gs.GeminiError, match=r"it lacks base_model.model.model.norm.weight"):
        other.engine.load(tmp_path / "saved", model_only=True)
