"""Where to compute: the device that was asked for, or what there is, and why that is no GPU."""

from __future__ import annotations

import os
import warnings

import torch

from gemini_strategy import _C
from gemini_strategy.errors import GeminiError

_has_told = False  # once in a process: every model of it has the same device


def find_device(device: torch.device | str | int | None, *, tells: bool = True) -> torch.device:
    """The device with its number.

    Args:
        device: None: CUDA, or the host device where there is none, which is said.
        tells: whether this process is the one to say it.

    Raises:
        GeminiError: it is not there, or cannot be.
    """
    if device is None:
        is_there = torch.cuda.is_available()
        if not is_there and tells:
            _tell()
        device = "cuda" if is_there else "cpu"
    if isinstance(device, int):
        device = f"cuda:{device}"
    if str(device).partition(":")[0] not in ("cpu", "cuda"):
        raise GeminiError(f'device={device!r} is not supported; use "cuda" or "cpu"')
    device = torch.device(device)
    if device.type != "cuda":
        return torch.device("cpu")  # a tensor of "cpu:0" says "cpu", and autograd compares them
    if not torch.cuda.is_available():
        raise GeminiError(
            f'device "cuda" was asked for, but torch sees no CUDA device ({why_no_cuda()}); use device="cpu" (the host '
            "device), or a machine with a driver and a CUDA build of torch"
        )
    if not _C.BUILT_WITH_CUDA:
        raise GeminiError(
            "this build of gemini_strategy has no CUDA kernels: build it again with nvcc present"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", index)


def why_no_cuda() -> str:
    """Why torch sees no CUDA device, in the words of torch or of the driver."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        why = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    else:
        why = "torch.cuda.is_available() says so"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return why if visible is None else f"{why}; CUDA_VISIBLE_DEVICES is {visible!r}"


def _tell() -> None:
    global _has_told
    if not _has_told:
        _has_told = True
        warnings.warn(
            f"there is no CUDA device here ({why_no_cuda()}): the model trains on the CPU, and its device memory is "
            'simulated in host memory. device="cpu" (accelerator="cpu" in Lightning, use_cpu=True in a Trainer) says '
            "that this is meant",
            RuntimeWarning,
            stacklevel=6,
        )
