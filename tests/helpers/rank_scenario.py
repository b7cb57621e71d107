"""Random training by several ranks, and the reference that gives its bits on one.

The reference computes each rank's gradients in turn, in ordinary torch memory, and joins them as the engine
says it does (csrc/engine/gradient.c, csrc/comm/host.c): each is divided by the power of two in the number of ranks and
kept in its dtype; the sum is taken in fp32 in the order of the ranks and rounded once; it is divided by the rest
of the number of ranks and added to what earlier micro-batches left.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from helpers import chaos
from helpers.reference import Managed, Plain, bits, plain, state_bytes
from helpers.scenario import Played, RandomNet, Scenario, act, budgeted, case_of, scenario

__all__ = ["play_ranks_plain", "play_sharded", "sharded_scenario"]


def sharded_scenario(seed: int) -> Scenario:
    """A scenario in which each gradient arrives once in a backward: otherwise sums are taken in parts, which rounds
    more often than the reference does."""
    draw = random.Random(seed)
    net = seed
    while "reentrant" in RandomNet(net).ways:
        net += 10_007
    s = scenario(seed)
    case = case_of(net)
    precision = s.recipe.precision if s.recipe.precision in case.precisions else "32-true"
    recipe = replace(s.recipe, precision=precision, gradient_dtype=None, steps=4)
    return replace(
        s,
        case=case,
        recipe=recipe,
        between=s.between[: recipe.steps],
        share=draw.choice((0.25, 0.5, 0.8, 1.0, 3.0)),
    )


def _seed(step: int, micro: int, rank: int) -> None:
    torch.manual_seed(1_000_000 + 10_000 * step + 100 * micro + rank)


def _loss(run: Plain, s: Scenario, step: int, micro: int, rank: int, size: int) -> Tensor:
    """A rank's loss: with a third of the seeds on batches of different sizes, with a third one rank's counts for
    nothing in its turn."""
    index = (step * s.recipe.accumulate + micro) * size + rank
    x, y, _ = s.case.batch(index)
    if s.seed % 3 == 1:
        x, y = x[: len(x) - rank % len(x)], y[: len(x) - rank % len(x)]
    # The last element chooses which blocks are skipped: the same ones on all ranks.
    loss = s.case.loss(run, (x, y, step * s.recipe.accumulate + micro))
    return loss * 0 if s.seed % 3 == 2 and (step + micro) % size == rank else loss


def _budgeted(s: Scenario, **how: Any) -> Managed:
    """The engine with room for whole chunks beside its share: a lack of memory later on would end all ranks."""
    whole = state_bytes(s.case.build, s.recipe)
    return budgeted(
        s.case,
        s.recipe,
        s.share,
        room=4096 + 8 * min(s.chunk_size, whole),
        chunk_size=s.chunk_size,
        placement_policy=s.policy,
        **how,
    )


def play_sharded(s: Scenario, rank: int, size: int, **how: Any) -> tuple[Played, dict, tuple]:
    """One rank's run under an engine that shares its chunks with the others; the engine is closed."""
    run = _budgeted(s, **how)
    seen: list[Tensor] = []
    with contextlib.closing(run.engine):
        for step in range(s.recipe.steps):
            for micro in range(s.recipe.accumulate):
                _seed(step, micro, rank)
                loss = _loss(run, s, step, micro, rank, size)
                run.losses.append(loss.detach().float().clone())
                part = loss / s.recipe.accumulate
                if s.says_step and micro == s.recipe.accumulate - 1:
                    run.engine.backward(part, step=True)
                else:
                    run.backward(part)
            run.finish()
            act(run, s.between[step], s, step, seen)
        run.engine._runtime.core.check()
        played = Played(run.outcome(), [bits(t).clone() for t in seen])
        return played, run.engine.stats(), chaos.faults()


def _joined(parts: list[Tensor], before: Tensor | None) -> Tensor:
    """The mean of the ranks' gradients as the engine computes it, added to what is there."""
    size, dtype = len(parts), parts[0].dtype
    power = 1 << (size.bit_length() - 1)
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for rank, part in enumerate(parts):
        kept = (part.float() / power).to(dtype).float()
        total = kept if rank == 0 else total + kept
    share = total.to(dtype).float() / (size / power)
    return share.to(dtype) if before is None else (before.float() + share).to(dtype)


def play_ranks_plain(s: Scenario, size: int) -> list[Played]:
    """What every rank must see, computed by one process without an engine."""
    run = plain(s.case.build, s.recipe)
    losses: list[list[Tensor]] = [[] for _ in range(size)]
    seen: list[Tensor] = []
    for step in range(s.recipe.steps):
        sums: dict[nn.Parameter, Tensor] = {}
        for micro in range(s.recipe.accumulate):
            parts: dict[nn.Parameter, list[Tensor]] = {}
            for rank in range(size):
                run.model.zero_grad()
                _seed(step, micro, rank)
                loss = _loss(run, s, step, micro, rank, size)
                losses[rank].append(loss.detach().float().clone())
                run.backward(loss / s.recipe.accumulate)
                for p in run.model.parameters():
                    if p.grad is not None:
                        parts.setdefault(p, []).append(p.grad)
            for p, of_ranks in parts.items():
                assert len(of_ranks) == size
                sums[p] = _joined(of_ranks, sums.get(p))
        for p in run.model.parameters():
            p.grad = sums.get(p)
        run.finish()
        act(run, s.between[step], s, step, seen)
    looks = [bits(t).clone() for t in seen]
    outcome = run.outcome()
    return [Played(replace(outcome, losses=losses[rank]), looks) for rank in range(size)]
