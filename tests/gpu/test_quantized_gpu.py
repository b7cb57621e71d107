"""Quantized frozen bases under adapters on a GPU, by the kernels that their libraries have there: the plain run's bits.

The models are those of the CPU's tests, wide enough for several chunks of 2 MiB. Deterministic kernels on both sides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import gemini_strategy as gs
from helpers import quantized_models
from helpers.quantized_models import KINDS, Case, trained
from helpers.reference import (
    Managed,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    drive,
    plain,
    start,
)
from test_gpu_exact import AROUND, MIB, _deterministic, _peak, _release, _used

pytestmark = pytest.mark.gpu

__all__ = ["_deterministic"]

STEPS = 6
RECIPE = Recipe("bf16-true", steps=STEPS, clip=1.0, groups=trained, lr=1e-2, device="cuda")


def _llama() -> nn.Module:
    """17 million parameters."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)


def _plain_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """State dicts have wrappers as they are."""
    return {name: tensor for name, tensor in weights.items() if type(tensor) is Tensor}


def _logits(model: Any, case: Case) -> Tensor:
    with torch.no_grad():
        return model(input_ids=case.batch(99).to("cuda")).logits.cpu()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits(
    kind: str, precision: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_models, "llama", _llama)
    case, recipe = Case(kind, checkpointing), replace(RECIPE, precision=precision)
    reference = plain(case.build, recipe)
    drive(reference, case, STEPS)
    want, logits = reference.outcome(), _logits(reference.model.eval(), case)
    del reference
    _release()
    budget = _used() + AROUND
    how: dict[str, Any] = {"placement_policy": "cpu", "chunk_size": 2 * MIB}
    model = start(case.build, recipe)  # quantized on the GPU, as from_pretrained does it
    optimizer = gs.HybridAdam(trained(model), lr=recipe.lr, weight_decay=recipe.weight_decay)
    how |= {"precision": precision, "device": "cuda", "device_budget": budget}
    run = Managed(gs.manage(model, optimizer, **how), recipe)
    with _peak() as peak:
        drive(run, case, STEPS)
        torch.cuda.synchronize()
    stats = run.engine.stats()
    assert peak[0] <= budget
    assert stats["evictions"] > STEPS and stats["leases"] == 0
    assert stats["device_peak_bytes"] < stats["weight_bytes"]
    have = run.outcome()
    for outcome in (want, have):
        outcome.weights = _plain_tensors(outcome.weights)
    assert_same_outcome(have, want)
    assert_same_bits(_logits(run.engine.model.eval(), case), logits)
    run.engine.close()
