"""A signal inside a backward of Lightning's trainer is raised by it, and it can train on."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from helpers.interrupts import Stop, arriving, handled
from lightning_case import load_tree, make, make_trainer


class Arrival:
    """A signal arrives in the second backward that it is told of."""

    def __init__(self) -> None:
        self.n = 0

    def note(self, tensor: torch.Tensor) -> None:
        self.n += 1
        if self.n == 2:
            tensor.register_hook(arriving())


def test_lightning_trainer() -> None:
    arrival = Arrival()
    tree = load_tree("lightning")

    class Interrupts(tree.callbacks.Callback):
        def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
            arrival.note(loss)

    module = make("lightning")
    trainer = make_trainer("lightning", callbacks=[Interrupts()])
    with handled(signal.SIGINT), pytest.raises(Stop):
        trainer.fit(module)
    assert arrival.n == 2 and trainer.global_step == 1
    again = make_trainer("lightning")
    again.fit(module)
    assert again.global_step > 2
