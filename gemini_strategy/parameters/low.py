"""What a 16-bit weight lacks to be its fp32 master: its low part, as optimizer states and checkpoints have it."""

from __future__ import annotations

import torch

__all__ = ["merge", "split_low"]


def merge(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a 16-bit weight and its low part (csrc/arith/arith.h); CPU tensors.

    An fp16 weight that is not its master's rounding was written since, and is the master.
    """
    if low.dtype is torch.float32:
        is_rounding = low.half().view(torch.int16) == weight.view(torch.int16)
        return torch.where(is_rounding, low, weight.float())
    bits = weight.contiguous().view(torch.int16).to(torch.int32) << 16
    return (bits + low.to(torch.int32)).view(torch.float32)


def split_low(weight: torch.Tensor, master: torch.Tensor) -> tuple[str, torch.Tensor]:
    """(key in HybridAdam's state, what `weight` lacks to be `master`): the inverse of merge."""
    if weight.dtype is torch.float16:
        return "master", master
    bits = weight.view(torch.int16).to(torch.int32) << 16
    return "remainder", (master.view(torch.int32) - bits).to(torch.int16)
