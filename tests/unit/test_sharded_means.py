"""manage(model) without an optimizer on several ranks: torch's own optimizer steps with the mean of their gradients."""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.ranks.comm import _Gloo
from helpers.ranks import run_ranks, values
from helpers.sharded import Exact, ExactCase

PATIENT = 900.0  # longer than run_ranks waits: whoever sits out this timeout fails
STEPS = 4


@pytest.fixture(autouse=True)
def given_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", "h2d=55e9,d2h=54e9")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, foreach=False)


def train(
    model: nn.Module, make: Callable[..., torch.optim.Optimizer], case: ExactCase
) -> list[torch.Tensor]:
    """Of two micro-batches each; gradients and weights at the end."""
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            case.loss(model, case.batch(2 * step + part)).backward()
        optimizer.step()
    grads = [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
    return grads + [p.detach().clone() for p in model.parameters()]


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Exact()


def check_bits(rank: int, size: int) -> None:
    for make in (sgd, adam):
        want = train(built(1), make, ExactCase())
        for how in ({}, {"placement_policy": "cpu"}, {"enable_distributed_storage": False}):
            model = built(1 + rank)
            engine = gs.manage(
                model, device="cpu", device_budget="200kB", chunk_size=4096, timeout=PATIENT, **how
            )
            found = train(model, make, ExactCase(rank, size))
            assert len(found) == len(want) and all(map(torch.equal, found, want))
            engine.close()
            last = want[-len(list(model.parameters())) :]
            assert all(map(torch.equal, model.parameters(), last))


@pytest.mark.parametrize("size", [2, 3])
def test_bits_of_the_mean(size: int, tmp_path: Path) -> None:
    values(run_ranks(size, tmp_path, check_bits))


def check_what_needs_no_mean(rank: int, size: int) -> None:
    """Evaluation, frozen parameters, gradients of inputs, and torch.autograd.grad, which gives each rank its own."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plain[0].requires_grad_(False)
    model = copy.deepcopy(plain)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    other = x.detach().clone().requires_grad_()
    engine = gs.manage(model, device="cpu", device_budget="200kB", timeout=PATIENT)
    with torch.no_grad():
        assert torch.equal(model(x), plain(other))
    own = torch.autograd.grad(model(x).square().sum(), [x, *model[1].parameters()])
    want = torch.autograd.grad(plain(other).square().sum(), [other, *plain[1].parameters()])
    assert all(map(torch.equal, own, want))
    assert all(p.grad is None for p in model.parameters())
    model.requires_grad_(True)  # torch's optimizer needs no place of ours
    plain.requires_grad_(True)
    for each in range(size):  # integers, but for weights: the sum over rows is exact
        (plain(torch.full((4, 8), float(each))).sum() / size).backward()
    model(torch.full((4, 8), float(rank))).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    engine.close()


def test_what_needs_no_mean(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_what_needs_no_mean))


def check_others(rank: int, size: int) -> tuple[str, str, str]:
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    engine = gs.manage(model, device="cpu", device_budget="200kB", timeout=PATIENT)
    x = torch.ones(2, 8)
    with pytest.raises(gs.GeminiError) as graph:
        model[0](x).square().sum().backward(create_graph=True)
    y = (model[0](x) * (1 - rank) + model[1](x) * rank).sum()  # gathers both on both
    with pytest.raises(gs.GeminiError) as other:
        torch.autograd.backward(y, inputs=[model[rank].weight])
    with pytest.warns(RuntimeWarning):
        engine.close()
    bags = nn.Embedding(8, 4, sparse=True)
    engine = gs.manage(bags, device="cpu", device_budget="200kB", timeout=PATIENT)
    with pytest.raises(gs.GeminiError) as sparse:
        bags(torch.tensor([1, 2])).sum().backward()
    engine.close()
    return str(graph.value), str(other.value), str(sparse.value)


def test_what_cannot_be_averaged_is_named(tmp_path: Path) -> None:
    """A parameter that only some ranks use, though another one has its size, never gets the other's gradient."""
    for rank, (graph, other, sparse) in enumerate(values(run_ranks(2, tmp_path, check_others))):
        assert "create_graph=True" in graph and "torch.autograd.grad" in graph
        assert other.startswith(f"{rank}.weight: the mean of its gradients over the ranks: ")
        assert "the gradient of parameter 0" in other and "the gradient of parameter 1" in other
        assert (
            sparse.startswith("weight: its gradient is torch.sparse") and "sparse=False" in sparse
        )


HEADER_BYTES = 48  # of csrc/comm/host.c, which ranks compare before the bytes


def check_others_unseen(rank: int, size: int) -> str:
    """As with NCCL, which compares nothing: each rank takes the other's header for its own."""
    exchange, is_unseen = _Gloo.exchange, threading.Event()

    def exchange_unseen(self: _Gloo, out: Any, into: Any) -> None:
        exchange(self, out, into)
        for (mine, _), (theirs, n_bytes) in zip(out, into, strict=True):
            if is_unseen.is_set() and n_bytes == HEADER_BYTES:
                ctypes.memmove(theirs, mine, n_bytes)

    _Gloo.exchange = exchange_unseen
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    engine = gs.manage(model, device="cpu", device_budget="200kB", timeout=PATIENT)
    y = (model[0](torch.ones(2, 8)) * (1 - rank) + model[1](torch.ones(2, 8)) * rank).sum()
    is_unseen.set()
    with pytest.raises(gs.GeminiError) as other:
        torch.autograd.backward(y, inputs=[model[rank].weight])
    assert model[rank].weight.grad is None
    with pytest.warns(RuntimeWarning):
        engine.close()
    _Gloo.exchange = exchange
    return str(other.value)


def test_mean_of_different_parameters_is_found_behind_the_sum(tmp_path: Path) -> None:
    for rank, text in enumerate(values(run_ranks(2, tmp_path, check_others_unseen))):
        assert text.startswith(f"{rank}.weight: the mean of its gradients over the ranks: ")
        assert "the ranks have not issued the same collectives" in text, text
        assert "the gradient of parameter 0" in text and "the gradient of parameter 1" in text, text
