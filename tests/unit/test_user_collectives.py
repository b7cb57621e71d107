"""Collectives of the user's own on what is absent: torch.distributed writes the bytes after its operation returned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

import gemini_strategy as gs
from helpers.ranks import run_ranks, values

SHORT = 60.0
# gloo gives an operation a copy and writes later; NCCL writes on a stream of its own.
BOTH = [
    "cpu",
    *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.device_count() >= 2 else []),
]


def of_rank(rank: int, device: str) -> tuple[torch.device, Any]:
    """Its device, and the group that moves tensors there."""
    if device == "cpu":
        return torch.device("cpu"), dist.group.WORLD
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank), dist.new_group(backend="cpu:gloo,cuda:nccl")


def managed(device: Any, mesh: Any = None) -> tuple[nn.Sequential, gs.HybridAdam, gs.Engine]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    engine = gs.manage(model, optimizer, device=device, mesh=mesh, timeout=SHORT)
    return model, optimizer, engine


def reduced(rank: int, size: int, kind: str, reduce: Callable[[Tensor, Any], None]) -> list[Tensor]:
    """What an engine of each rank alone makes of gradients, moments and entries that the loop itself sums."""
    device, group = of_rank(rank, kind)
    own = [dist.new_group([each]) for each in range(size)][rank]
    model, optimizer, engine = managed(device, mesh=own)
    weight = model[0].weight
    seen: list[Tensor] = []

    def sum_of(value: Tensor, again: Callable[[], Tensor]) -> None:
        want = value.clone()
        dist.all_reduce(want, group=group)
        reduce(value, group)
        seen.append(torch.stack([again().clone(), want]).cpu())

    for _ in range(2):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))
        model(x.to(device)).sum().backward()
        sum_of(weight.grad, lambda: weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    sum_of(optimizer.state[weight]["exp_avg"], lambda: optimizer.state[weight]["exp_avg"])
    entry = model.state_dict()["0.weight"]
    sum_of(entry, lambda: entry)
    seen.append(torch.stack([weight.detach().cpu(), entry.clone()]))
    sum_of(weight.detach(), lambda: weight.detach())
    engine.close()
    return seen


def at_once(value: Tensor, group: Any) -> None:
    dist.all_reduce(value, group=group)


def later(value: Tensor, group: Any) -> None:
    dist.all_reduce(value, group=group, async_op=True).wait()


def coalesced(value: Tensor, group: Any) -> None:
    dist.all_reduce_coalesced([value], group=group)


def functionally(value: Tensor, group: Any) -> None:
    name = group.group_name
    functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(value, "sum", name))


def check_sums(rank: int, size: int, device: str, name: str) -> None:
    for number, (got, want) in enumerate(reduced(rank, size, device, globals()[name])):
        assert torch.equal(got, want), (number, got.flatten()[:4], want.flatten()[:4])


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("name", ["at_once", "later", "coalesced", "functionally"])
def test_sums(name: str, device: str, tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_sums, device, name))


def check_gradients_of_one_engine(rank: int, size: int, kind: str) -> None:
    """Where ranks share the engine, the sum of equal gradients is their multiple."""
    device, group = of_rank(rank, kind)
    model, optimizer, engine = managed(device)
    model(torch.randn(4, 64).to(device)).sum().backward()
    for p in model.parameters():
        want = p.grad.clone() * size
        dist.all_reduce(p.grad, group=group)
        assert torch.equal(p.grad.clone(), want)
    optimizer.step()
    engine.close()


@pytest.mark.parametrize("device", BOTH)
def test_gradients_of_one_engine(device: str, tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_gradients_of_one_engine, device))


def check_messages(rank: int, size: int, kind: str) -> None:
    """Sending reads. A weight is received; a field that is a copy is refused by name, and nobody waits."""
    device, group = of_rank(rank, kind)
    own = [dist.new_group([each]) for each in range(size)][rank]
    torch.manual_seed(3)
    model = nn.Linear(64, 64)
    nn.init.constant_(model.weight, float(rank))
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    engine = gs.manage(model, optimizer, device=device, mesh=own, timeout=SHORT)
    model(torch.randn(4, 64).to(device)).sum().backward()
    gradient, received = model.weight.grad.clone(), torch.zeros(64, 64, device=device)
    if rank == 0:
        dist.isend(model.weight.grad, 1, group=group).wait()
    else:
        dist.recv(received, 0, group=group)
        assert torch.equal(received, gradient)
    with pytest.raises(gs.GuardError, match=r"^weight: c10d::recv_: .*copy_\(\)"):
        dist.irecv(model.weight.grad, 1 - rank, group=group)
    with torch.no_grad():
        if rank == 0:
            dist.send(model.weight, 1, group=group)
        else:
            dist.recv(model.weight, 0, group=group)
    assert not model.weight.detach().clone().any()
    engine.close()


@pytest.mark.parametrize("device", BOTH)
def test_messages(device: str, tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_messages, device))


def check_scatter(rank: int, size: int, kind: str) -> None:
    """It takes a list of lists, into which the dispatcher does not look."""
    device, group = of_rank(rank, kind)
    own = [dist.new_group([each]) for each in range(size)][rank]
    model, optimizer, engine = managed(device, mesh=own)
    for _ in range(2):
        model(torch.randn(4, 64).to(device)).sum().backward()
        optimizer.step()
    weight = model[0].weight
    state, entry = optimizer.state[weight]["exp_avg"], model.state_dict()["0.weight"]
    for value in (weight, weight.grad, state, entry.to(device)):
        want = value.detach().clone()
        dist.broadcast(want, 0, group=group)
        for parts in ([value, value], list(value.detach().chunk(2))):
            received = torch.zeros(parts[0].shape, device=device)
            dist.scatter(received, parts if rank == 0 else None, src=0, group=group)
            assert torch.equal(received, want if parts[0] is value else want.chunk(2)[rank])
    engine.close()


@pytest.mark.parametrize("device", BOTH)
def test_scatter(device: str, tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_scatter, device))


def check_broadcast_of_one_rank(rank: int, size: int, kind: str) -> None:
    """The root of a broadcast sends an entry of a state dict alone: its bytes stay what they are."""
    device, group = of_rank(rank, kind)
    model, optimizer, engine = managed(device)
    for _ in range(3):
        model(torch.randn(4, 64).to(device)).sum().backward()
        entry = model.state_dict()["0.weight"]
        sent = entry if rank == 0 else torch.empty_like(entry)
        dist.broadcast(sent, 0, group=group)
        assert torch.equal(sent.clone(), entry.clone())
        optimizer.step()
        optimizer.zero_grad()
    engine.close()


@pytest.mark.parametrize("device", BOTH)
def test_broadcast_of_one_rank(device: str, tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_broadcast_of_one_rank, device))


def check_broadcast_of_all_ranks(rank: int, size: int, kind: str, root: int) -> None:
    """Ranks that share the engine broadcast what all of them have: nothing changes, on the root and elsewhere."""
    device, group = of_rank(rank, kind)

    def trained(broadcasts: bool) -> list[Tensor]:
        model, optimizer, engine = managed(device)
        for number in range(3):
            model(torch.randn(4, 64).to(device)).sum().backward()
            moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()] if number else []
            entries = model.state_dict().values()
            for p in model.parameters() if broadcasts else ():
                dist.broadcast(p.grad, root, group=group)
                dist.broadcast(p.detach(), root, group=group, async_op=True).wait()
            for value in (*moments, *entries) if broadcasts else ():
                dist.broadcast(value, root, group=group)
            optimizer.step()
            optimizer.zero_grad()
        engine.close()
        return [p.detach().clone() for p in model.parameters()]

    for got, want in zip(trained(True), trained(False), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_of_all_ranks(root: int, device: str, tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_broadcast_of_all_ranks, device, root))
