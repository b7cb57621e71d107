"""cuda_memory_profiling beside what torch's allocator says of the same step: within 2 %, checkpointing on and off.

The step that is measured drops each gradient as soon as it is complete, so that its peak is that of everything else.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import gemini_strategy as gs
from gemini_strategy.elixir import cuda_memory_profiling
from helpers.profiled import MODELS, PRECISION, made, step, tokens

pytestmark = pytest.mark.gpu


def drop(parameter: Tensor) -> None:
    parameter.grad = None


def measured(model: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype) -> int:
    """Bytes of a step beside weights, buffers, complete gradients and the workspaces that stay."""
    gs.cast_model_(model, PRECISION[dtype])
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    held = 0
    for _ in range(3):  # the first ones take the workspaces
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        del loss
    ids = inputs["input_ids"]
    return torch.cuda.max_memory_allocated() - held + ids.numel() * ids.element_size()


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "checkpoints"])
@pytest.mark.parametrize("name", MODELS)
def test_activations_are_foretold(name: str, checkpoints: bool, dtype: torch.dtype) -> None:
    paper = made(name, "meta", checkpoints=checkpoints)
    foretold = cuda_memory_profiling(paper, tokens(name, "meta"), step, dtype).activation_occ
    found = measured(made(name, "cuda", checkpoints=checkpoints), tokens(name, "cuda"), dtype)
    off = foretold / found - 1
    print(f"{name} {checkpoints=} {dtype}: {found / 1e6:.1f} MB, {100 * off:+.2f} %")
    assert abs(off) <= 0.02
