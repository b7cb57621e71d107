"""cuda_memory_profiling beside what torch's allocator says of the same step: within 2 %, checkpointing on and off.

The step that is measured drops each gradient as soon as it is complete, so that its peak is that of everything else.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import gemini_strategy as gs
from gemini_strategy.elixir import cuda_memory_profiling

pytestmark = pytest.mark.gpu

PRECISION = {torch.float32: "32-true", torch.bfloat16: "bf16-mixed"}


def gpt2() -> nn.Module:
    """124 M parameters, tied, with dropout."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))


def llama() -> nn.Module:
    """309 M parameters, with grouped heads and an untied head."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=4,
            use_cache=False,
        )
    )


def bert() -> nn.Module:
    """An encoder of 110 M parameters, with dropout."""
    return transformers.BertForMaskedLM(transformers.BertConfig())


def tokens(rows: int, length: int, device: str) -> dict[str, Tensor]:
    ids = torch.zeros(rows, length, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids}


def step(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    loss = model(**inputs).loss
    loss.backward()
    return loss


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
@pytest.mark.parametrize(
    ("build", "rows", "length"), [(gpt2, 8, 1024), (llama, 8, 1024), (bert, 32, 512)]
)
def test_activations_are_foretold(
    build: Any, rows: int, length: int, checkpoints: bool, dtype: torch.dtype
) -> None:
    def made(device: str) -> nn.Module:
        with torch.device(device):
            model = build().train()
        if checkpoints:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        return model

    paper = tokens(rows, length, "meta")
    foretold = cuda_memory_profiling(made("meta"), paper, step, dtype).activation_occ
    model = made("cuda")
    found = measured(model, tokens(rows, length, "cuda"), dtype)
    off = foretold / found - 1
    print(f"{build.__name__} {checkpoints=} {dtype}: {found / 1e6:.1f} MB, {100 * off:+.2f} %")
    assert abs(off) <= 0.02
