"""A signal that comes in the backward of a fit: what its handler raises ends the fit, and another one trains on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.interrupts import Stop, arriving, handled
from lightning_case import fit, fit_reference, make, make_reference, same


def _trained(module: Any, run: Callable[[Any], Any], call: int) -> dict[str, torch.Tensor]:
    """In the backward of its last linear layer's n-th call, from 0, a SIGINT arrives; then it is fitted again."""
    calls = iter(range(1000))

    def watch(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if next(calls) == call:
            output.register_hook(arriving())

    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    linears[-1].register_forward_hook(watch)
    with handled(signal.SIGINT), pytest.raises(Stop):
        run(module)
    run(module)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("call", [0, 4])
def test_an_interrupt_ends_a_fit_that_can_go_on(call: int) -> None:
    """In the first step, where nothing is planned, and later."""
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    got = _trained(make("lightning"), lambda m: fit("lightning", m, **options), call)
    reference = make_reference("lightning", "32-true")
    want = _trained(reference, lambda m: fit_reference("lightning", m, **options), call)
    same(got, want)
