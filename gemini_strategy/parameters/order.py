"""The order in which a tensor's elements lie in memory: what its strides say."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one run of memory, each once, in whatever order of dimensions."""
    expected = 1
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] != 1):
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def is_same(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two dense tensors of one shape, with strides `a` and `b`, have one order."""
    sizes = zip(shape, a, b, strict=True)
    return 0 in shape or all(size == 1 or x == y for size, x, y in sizes)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def ordered(values: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """`values` in the order of dense strides; itself if it is so already."""
    if is_same(values.shape, values.stride(), strides):
        return values
    copy = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device)
    return copy.copy_(values)


def flat(values: torch.Tensor) -> torch.Tensor:
    """A view of a dense tensor's elements as they lie in memory."""
    return values.as_strided((values.numel(),), (1,))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors of one dtype, shape and order are equal to the bit."""
    return torch.equal(flat(a).view(torch.uint8), flat(b).view(torch.uint8))
