"""Importing this lets torch.manual_seed leave out the devices that this machine lacks.

For each of them torch keeps the seed, with the text of the caller's whole stack, for the day when there is one. That
took a hundred times as long as to seed the CPU, and tests seed in each step.
"""

from __future__ import annotations

import torch
import torch.mtia
import torch.xpu

__all__: list[str] = []


def _nowhere(seed: int) -> None:
    """There is nothing to seed."""


for _device in (torch.cuda, torch.xpu, torch.mtia):
    if not _device.is_available():
        _device.manual_seed_all = _nowhere
