"""Training on several ranks whose bits can be compared with training on one: models and the loop.

Two ways to know what the sum over ranks has to be. `Exact` has gradients that are small integers: rank r's is
`weight(r)` times that of one rank alone, and the weights of all ranks have the mean 1, so any order of any sum gives
the gradient of one rank, whatever the number of ranks. Any other model can be trained with the same batch on all
ranks: with 2, 4, ... of them the mean is exact, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Exact", "ExactCase", "weight"]


def weight(rank: int, size: int) -> int:
    """What rank's loss is multiplied by: different numbers whose mean is 1."""
    return 2 * size - 1 if rank == 0 else -1


class _Term(nn.Module):
    """sum(p * c): the gradient of p is c."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(shape))

    def forward(self, c: Tensor) -> Tensor:
        return (self.p * c).sum(dtype=torch.float32)


class Exact(nn.Module):
    """Parameters of sizes that do not divide, one that is tied, one that is frozen, one empty."""

    SIZES = ((3, 5), (257,), (1,), (2, 3, 7), (0,), (1031,), (64, 33))

    def __init__(self) -> None:
        super().__init__()
        self.terms = nn.ModuleList(_Term(*size) for size in self.SIZES)
        self.tied = _Term(7)
        self.again = _Term(7)
        self.again.p = self.tied.p
        self.frozen = _Term(41)
        self.frozen.p.requires_grad_(False)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, numbers: list[Tensor]) -> Tensor:
        if self.training:
            self.count += 1
        modules = [*self.terms, self.tied, self.again, self.frozen]
        return torch.stack([m(c) for m, c in zip(modules, numbers, strict=True)]).sum()


class ExactCase:
    """As tests/helpers/zoo.py has them, for one rank of `size`; (0, 1) is the reference."""

    build = Exact

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.factor = weight(rank, size) if size > 1 else 1

    def batch(self, step: int) -> list[Tensor]:
        seed = torch.Generator().manual_seed(step)
        sizes = (*Exact.SIZES, (7,), (7,), (41,))
        return [torch.randint(-4, 5, s, generator=seed).float() / 8 for s in sizes]

    def loss(self, run: Any, batch: list[Tensor]) -> Tensor:
        return run(batch) * self.factor
