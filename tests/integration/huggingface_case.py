"""What the tests of Hugging Face's libraries share: a tiny model, quiet arguments, and the unmanaged reference.

The reference is the same Trainer loop without a budget, with our Adam and its clip on ordinary tensors:
`gs.cast_model_` and `gs.HybridAdam`.
"""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import gemini_strategy as gs
from gemini_strategy.huggingface import GeminiPlugin

torch.set_num_threads(1)

VOCABULARY = 64
BUDGET = "90KB"  # of 100 kB of weights in fp32, and thrice that of states
PRECISIONS = (
    "no",
    "bf16",
    "bf16 weights",
)  # mixed_precision; the last: "no", of a model that came in bf16


@functools.cache
def _plain_model() -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            attention_dropout=0.1,
        )
    )


def make_model(precision: str = "no") -> Any:
    model = copy.deepcopy(_plain_model())
    return model.to(torch.bfloat16) if precision == "bf16 weights" else model


def rows(n: int = 32, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens, of several lengths of what counts."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(n):
        tokens = torch.randint(0, VOCABULARY, (12,), generator=generator)
        labels = tokens.clone()
        labels[: i % 5] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def plugin(**given: Any) -> GeminiPlugin:
    return GeminiPlugin(**{"device_budget": BUDGET, "block_size": "4KiB", **given})


def options(folder: Path, precision: str = "no", **given: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.7,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "log_level": "error",
        **given,
    }


def arguments(folder: Path, precision: str = "no", **given: Any) -> TrainingArguments:
    return TrainingArguments(**options(folder, precision, **given))


class Reference:
    """To be inherited from before a Trainer: trains without a budget."""

    def __init__(self, model: Any, args: Any, **given: Any) -> None:
        if args.bf16:
            gs.cast_model_(model, "bf16-mixed")
        super().__init__(model, args=args, **given)

    def create_optimizer(self, model: Any = None) -> Any:
        args = self.args
        self.optimizer_cls_and_kwargs = (
            gs.HybridAdam,
            {
                "lr": args.learning_rate,
                "betas": (args.adam_beta1, args.adam_beta2),
                "eps": args.adam_epsilon,
            },
        )
        return super().create_optimizer(model)

    def _clip_grad_norm(self, model: Any) -> Any:
        return self.optimizer.optimizer.clip_grad_norm_(self.args.max_grad_norm)


class ReferenceTrainer(Reference, Trainer):
    pass


def masters(trainer_or_model: Any, optimizer: Any = None) -> dict[str, torch.Tensor]:
    """The fp32 masters of a managed model, or of one that HybridAdam has trained."""
    model = trainer_or_model
    if isinstance(trainer_or_model, Trainer):
        model, optimizer = trainer_or_model.model, trainer_or_model.optimizer.optimizer
    engine = gs.engine_of(model)
    if engine is not None:
        return engine.model_state_dict()
    found = {}
    for name, parameter in model.named_parameters():
        low = optimizer.state.get(parameter, {}).get("remainder")
        value = parameter.detach()
        if low is not None:
            high = value.view(torch.int16).to(torch.int32) << 16
            value = (high + low.to(torch.int32)).view(torch.float32)
        found[name] = value
    return found


def losses(trainer: Any) -> list[dict[str, float]]:
    """What was logged, but times."""
    keys = ("loss", "eval_loss", "grad_norm", "learning_rate", "step", "train_loss")
    return [{k: entry[k] for k in keys if k in entry} for entry in trainer.state.log_history]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(other) <= set(one)
    for name, value in other.items():
        assert value.dtype is one[name].dtype, name
        own, its = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one[name], value))
        differ = int((own != its).sum())
        assert differ == 0, f"{name}: {differ} bytes differ"
