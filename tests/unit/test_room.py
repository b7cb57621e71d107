"""The least budget that `manage()` accepts, and names where it accepts none, is enough for every pass of the model."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gemini_strategy as gs
from helpers.ranks import run_ranks, values
from helpers.reference import Recipe, assert_same_outcome, plain
from helpers.room import at_floor, program, run_program

RATES = "h2d=55e9,d2h=54e9"
SEEDS = (*range(24), 117, 130, 368)
RANK_SEEDS = (3, 63, 0, 5)  # without fp16: its halves of gradients lose bits


@pytest.fixture(autouse=True)
def given_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", RATES)


def check_program(seed: int, **how: object) -> None:
    """The reference's bits, under the least budget."""
    case = program(seed)
    reference = plain(case.build, case.recipe)
    want = run_program(reference, case)
    run = at_floor(
        case.build,
        case.recipe,
        case.above * gs._C.HOST_GRANULARITY,
        chunk_size=case.chunk_size,
        placement_policy=case.policy,
        **how,
    )
    try:
        got = run_program(run, case)
        run.engine._runtime.core.check()
        assert_same_outcome(run.outcome(), reference.outcome())
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
    finally:
        run.engine.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_least_budget_is_enough(seed: int) -> None:
    check_program(seed)


def _on_ranks(rank: int, size: int, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        check_program(seed, timeout=60.0)


def test_the_least_budget_is_enough_for_two_ranks(tmp_path: Path) -> None:
    """Seed 3: chunks that never get their last gradient wait while a checkpointed block is computed again. Seed 63: a
    plan for the passes into which re-entrant checkpointing cuts the forward keeps gathered weights into the backward.
    """
    values(run_ranks(2, tmp_path, _on_ranks, RANK_SEEDS))


class _Short(nn.Module):
    """Two large layers whose backward nodes, of one saved weight each, are neighbours in the order of creation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("first", [0, 1])
def test_neighbouring_nodes_are_two(first: int) -> None:
    """One held the other's chunk: two nodes whose numbers differ in the last bit counted as one."""
    model = nn.Sequential(_Short(), _Short())
    engine = gs.manage(model, device="cpu", chunk_size=4096, device_budget=4096)
    x = torch.ones(2, 32, requires_grad=True)
    for _ in range(first):
        x = x * 2  # a node more
    model(x).sum().backward()
    engine.close()


def test_two_gradients_of_one_graph_with_checkpointing() -> None:
    """The last node of the first task stayed the reader of its chunk during all of the second."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 32, bias=False))
    engine = gs.manage(model, device="cpu", chunk_size=4096, device_budget=4096)
    x = torch.ones(2, 32, requires_grad=True)
    loss = checkpoint(model, x, use_reentrant=False).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    engine.close()


class _Twice(nn.Module):
    """Two blocks that call the same module, the larger of which is not where it has its name."""

    def __init__(self, tail: int) -> None:
        super().__init__()
        inner = nn.Linear(33, 33)
        self.first = _Block(33, 1, inner)
        self.second = _Block(33, tail, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class _Block(nn.Module):
    def __init__(self, width: int, height: int, inner: nn.Module) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(height * width, width) / 8)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(x), self.up).unflatten(-1, (-1, 33)).sum(-2)


def test_a_module_that_two_others_have_runs_inside_both() -> None:
    """Its name is in the small one; under the budget for that, there was no room inside the large one."""
    recipe = Recipe(steps=2)
    run = at_floor(lambda: _Twice(5), recipe, chunk_size=4096, placement_policy="cpu")
    assert run.engine.stats()["device_budget_bytes"] == sum(
        {
            c: size for c, size, *_ in map(run.engine._runtime.core.chunk, _ids(run, "second"))
        }.values()
    )
    for _ in range(2):
        run.model(torch.randn(2, 33)).square().sum().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.engine.close()


def _ids(run: object, prefix: str) -> list[int]:
    """The slots of a block, and of what it calls."""
    return [
        slot.id
        for slot in run.engine._runtime.slots
        if any(name.startswith((prefix, "first.inner")) for name in slot.names)
    ]


def test_the_named_budget_is_that_of_the_largest_module() -> None:
    """Not that of the first that does not fit."""
    sizes = (16, 64, 128, 32)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)))
    with pytest.raises(gs.GeminiMemoryError, match=r"module '1' .*at least") as error:
        gs.manage(model, device="cpu", chunk_size=4096, device_budget=1024)
    named = re.search(r"at least ([\d.]+ kB) \((\d+) bytes\)", str(error.value))
    assert named and named[1] == "32.77 kB" and int(named[2]) == 64 * 128 * 4
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(model, optimizer, device="cpu", chunk_size=4096, device_budget=named[1])
    for _ in range(2):  # it suffices for every module
        model(torch.randn(2, 16)).sum().backward()
        optimizer.step()
    engine.close()


def test_a_refusal_of_torch_says_what_fills_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own text knows the whole device, most of which may be free."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    engine = gs.manage(model, torch.optim.AdamW(model.parameters()), device_budget="64KB")
    memory = engine._runtime.memory
    refused = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.54 GiB.")

    def fail(*_: object) -> None:
        raise refused

    class Pool:
        def bytes(self) -> int:
            return 43_210

        def recover(self) -> bool:
            return False

    class Device:
        """With the parts of other models."""

        torch = Pool()

        def lead(self) -> object:
            return memory

        def parts(self) -> int:
            return 1_500

    x = torch.ones(2, 32)
    engine.backward(model(x).sum())
    model[2].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as caught, monkeypatch.context() as patch:
        patch.setattr(memory, "_on", Device())
        patch.setattr(memory, "budget", 64_000)
        patch.setattr(memory, "core", engine._runtime.core)
        model(x)
    assert caught.value is refused
    (note,) = refused.__notes__
    held = gs.sizes.size_text(int(engine.stats()["device_bytes"]))
    assert (
        f"within device_budget, 64.00 kB, chunks of parameters hold {held}, parts of other models 1.500 kB and torch "
        "43.21 kB" in note
    )
    engine.close()


class Full:
    """`Tensor.to` of a device that has no room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
        self.to, self.device = torch.Tensor.to, device
        monkeypatch.setattr(torch.Tensor, "to", lambda *args, **how: self.move(*args, **how))

    def move(self, tensor: Tensor, where: object, *more: object, **how: object) -> Tensor:
        if where is self.device:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.to(tensor, where, *more, **how)


def test_a_closed_model_that_has_no_room_is_whole_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    optimizer = gs.HybridAdam(model.parameters())
    engine = gs.manage(model, optimizer, device="cpu", precision="bf16-true")
    engine.backward(engine.model(torch.ones(2, 32)).sum())
    optimizer.step()
    want = engine.model_state_dict()
    elsewhere = torch.device("meta")  # stands for a device that is full now
    for slot in engine._runtime.slots[2:]:
        slot.original_device = elsewhere
    with monkeypatch.context() as patch:
        Full(patch, elsewhere)
        with pytest.warns(RuntimeWarning, match="the model is on the host, since it does not fit"):
            engine.close()
    for name, p in model.named_parameters():
        assert p.device.type == "cpu"
        assert torch.equal(p, want[name])
        assert p.grad is None or p.grad.device.type == "cpu"
        assert optimizer.state[p]["exp_avg"].device.type == "cpu"
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()


def test_a_deep_copy_without_room_says_how_to_copy_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    engine = gs.manage(model, device="cpu")
    with monkeypatch.context() as patch:
        full = Full(patch, torch.device("cpu"))
        patch.setattr(type(model[0].weight), "device", property(lambda p: full.device))
        with pytest.raises(torch.OutOfMemoryError) as caught:
            copy.deepcopy(model)
    assert any("0.weight" in n and "on the host" in n for n in caught.value.__notes__)
    assert torch.equal(copy.deepcopy(model)[0].weight, model[0].weight)
    engine.close()
