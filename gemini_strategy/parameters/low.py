"""What a 16-bit weight lacks to be its fp32 master: its low part, as optimizer states and checkpoints have it."""

from __future__ import annotations

import torch


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


def settled_low(p: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """`low` of the weight of now: where somebody wrote it, it is its own master (optim/adam.py, invariant 4)."""
    weight = p.detach()
    low = low.to(weight.device)  # the model may have been moved since
    if p.dtype is torch.float16:
        is_rounding = low.to(torch.float16).view(torch.int16) == weight.view(torch.int16)
        return torch.where(is_rounding, low, weight.float())
    seen = getattr(p, "_gm_seen", None)
    if seen is not None and seen.shape == weight.shape:
        return low.masked_fill(seen.to(weight).view(torch.int16) != weight.view(torch.int16), 0)
    # no weight has a master that is no number: such a remainder was another weight's
    return low.masked_fill(merge(weight, low).isnan(), 0)


def note_seen(p: torch.Tensor) -> None:
    """The weight and its low part are of each other now; see optim/adam.py, invariant 4."""
    if p.dtype is torch.bfloat16:
        try:
            p._gm_seen = p.detach().clone()
        except torch.OutOfMemoryError:
            p._gm_seen = p.detach().cpu()
