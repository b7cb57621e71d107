"""The state of a process's random number generators: torch's on the CPU and on the device, Python's, NumPy's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Plain data for `set_random_state`. NumPy's is in it if NumPy has been imported."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """What this process has no use for (a device that it does not use) is left out."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
