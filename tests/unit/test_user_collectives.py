"""Collectives of the user's own on what is absent: torch.distributed writes the bytes after its operation returned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

import gemini_strategy as gs
from helpers.ranks import run_ranks, values

SHORT = 60.0


def reduced(rank: int, size: int, reduce: Callable[[Tensor], None]) -> list[Tensor]:
    """What an engine of each rank alone makes of gradients, moments and entries that the loop itself sums."""
    own = [dist.new_group([each]) for each in range(size)][rank]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    engine = gs.manage(model, optimizer, device="cpu", mesh=own, timeout=SHORT)
    weight = model[0].weight
    seen: list[Tensor] = []

    def sum_of(value: Tensor, again: Callable[[], Tensor]) -> None:
        want = value.clone()
        dist.all_reduce(want)
        reduce(value)
        seen.append(torch.stack([again().clone(), want]))

    for _ in range(2):
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))).sum().backward()
        sum_of(weight.grad, lambda: weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    sum_of(optimizer.state[weight]["exp_avg"], lambda: optimizer.state[weight]["exp_avg"])
    entry = model.state_dict()["0.weight"]
    sum_of(entry, lambda: entry)
    seen.append(torch.stack([weight.detach().clone(), entry.clone()]))
    sum_of(weight.detach(), lambda: weight.detach())
    engine.close()
    return seen


def at_once(value: Tensor) -> None:
    dist.all_reduce(value)


def later(value: Tensor) -> None:
    dist.all_reduce(value, async_op=True).wait()


def coalesced(value: Tensor) -> None:
    dist.all_reduce_coalesced([value])


def functionally(value: Tensor) -> None:
    group = dist.group.WORLD.group_name
    functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(value, "sum", group))


def check_sums(rank: int, size: int, name: str) -> None:
    for got, want in reduced(rank, size, globals()[name]):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["at_once", "later", "coalesced", "functionally"])
def test_sums(name: str, tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_sums, name))


def check_gradients_of_one_engine(rank: int, size: int) -> None:
    """Where ranks share the engine, the sum of equal gradients is their multiple."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    engine = gs.manage(model, optimizer, device="cpu", timeout=SHORT)
    model(torch.randn(4, 64)).sum().backward()
    for p in model.parameters():
        want = p.grad.clone() * size
        dist.all_reduce(p.grad)
        assert torch.equal(p.grad.clone(), want)
    optimizer.step()
    engine.close()


def test_gradients_of_one_engine(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_gradients_of_one_engine))


def check_messages(rank: int, size: int) -> None:
    """Sending reads. A weight is received; a field that is a copy is refused by name, and nobody waits."""
    own = [dist.new_group([each]) for each in range(size)][rank]
    model = nn.Linear(64, 64)
    nn.init.constant_(model.weight, float(rank))
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    engine = gs.manage(model, optimizer, device="cpu", mesh=own, timeout=SHORT)
    model(torch.randn(4, 64)).sum().backward()
    sending = dist.isend(model.weight.grad, 1 - rank)
    received = torch.empty(64, 64)
    dist.recv(received, 1 - rank)
    sending.wait()
    with pytest.raises(gs.GuardError, match=r"^weight: c10d::recv_: .*copy_\(\)"):
        dist.irecv(model.weight.grad, 1 - rank)
    with torch.no_grad():
        if rank == 0:
            dist.send(model.weight, 1)
        else:
            dist.recv(model.weight, 0)
    assert torch.equal(model.weight.detach().clone(), torch.zeros(64, 64))
    engine.close()


def test_messages(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_messages))
