"""A signal that comes in a Trainer's backward: what its handler raises ends the training, which may go on later."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini_strategy.huggingface import GeminiTrainer
from helpers.interrupts import Stop, arriving, handled
from huggingface_case import (
    ReferenceTrainer,
    arguments,
    assert_same,
    make_model,
    masters,
    plugin,
    rows,
)


def _interrupt(module: nn.Module, call: int) -> None:
    """In the backward of the module's n-th call, from 0, a SIGINT arrives."""
    calls = iter(range(1000))

    def watch(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if next(calls) == call:
            output.register_hook(arriving())

    module.register_forward_hook(watch)


def _trained(make: Callable[[Any], Any], call: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = make_model()
    _interrupt(next(m for m in reversed(list(model.modules())) if isinstance(m, nn.Linear)), call)
    trainer = make(model)
    with handled(signal.SIGINT), pytest.raises(Stop):
        trainer.train()
    trainer.train()
    return masters(trainer)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("call", [0, 3, 5])
def test_an_interrupt_ends_a_training_that_can_go_on(
    call: int, precision: str, tmp_path: Path
) -> None:
    """In the first step, where nothing is planned, and later; in the first of two micro-batches, and the second."""
    args = arguments(tmp_path, precision)
    data = rows()
    got = _trained(
        lambda m: GeminiTrainer(m, args=args, train_dataset=data, gemini_plugin=plugin()), call
    )
    assert_same(got, _trained(lambda m: ReferenceTrainer(m, args, train_dataset=data), call))
