"""The optimizers that bench_offload.py trains with, by name; without torch, as a driver knows them before a run starts.

All have the same learning rate and weight decay, and AdamW's kin its betas and eps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


def _one(library: str, kind: str, model: nn.Module) -> list[Optimizer]:
    return [getattr(import_module(library), kind)(model.parameters(), **ADAM)]


def _foreign(model: nn.Module) -> list[Optimizer]:
    """torch's AdamW by a class that is not torch's: manage() has its step() called."""
    from torch.optim import AdamW

    return [type("ForeignAdamW", (AdamW,), {})(model.parameters(), **ADAM)]


def _muon(model: nn.Module) -> list[Optimizer]:
    """Muon for the blocks' matrices, and AdamW for embeddings, the head, norms and biases."""
    from torch.optim import AdamW, Muon

    ends = ("embed", "wte", "wpe", "lm_head")
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and not any(end in name for end in ends)
        (matrices if is_matrix else others).append(parameter)
    shared = {key: ADAM[key] for key in ("lr", "weight_decay")}
    return [Muon(matrices, adjust_lr_fn="match_rms_adamw", **shared), AdamW(others, **ADAM)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "adamw": partial(_one, "torch.optim", "AdamW"),
    "adamw_foreign": _foreign,
    "muon_adamw": _muon,
    "bnb_adamw8bit": partial(_one, "bitsandbytes.optim", "AdamW8bit"),
    "bnb_paged_adamw8bit": partial(_one, "bitsandbytes.optim", "PagedAdamW8bit"),
    "torchao_adamw8bit": partial(_one, "torchao.optim", "AdamW8bit"),
}
