"""What several engines have of one CUDA device, and who answers for torch's memory; with a device of numbers."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gemini_strategy as gs
from gemini_strategy.memory import budget as budgets
from gemini_strategy.memory.budget import (
    DRIVER_RESERVE,
    DeviceMemory,
    first_reserve,
    parts_of,
    slack,
)

MIB = 1 << 20
TOTAL = 80_000 * MIB
DRIVER = 500 * MIB  # the context


class _Torch:
    """Torch's memory of a device."""

    held = 0

    def __init__(self, device: torch.device) -> None:
        self.trims = 0

    def bytes(self) -> int:
        return _Torch.held

    def tidy(self) -> bool:
        return True

    def give_cached(self) -> bool:
        self.trims += 1
        return True


class _Core:
    """An engine that fills what it may have, as far as it has something to put there."""

    def __init__(self, device: _Machine, budget: int, weights: int, pinned: int = 0) -> None:
        self.device, self.budget, self.weights, self.pinned = device, budget, weights, pinned
        self.external = self.held = 0
        self.answers = self.closed = False
        device.cores.append(self)

    def limit(self) -> int:
        beside = self.external + (_Torch.held if self.answers else 0)
        return max(self.budget - beside, 0) if self.budget >= 0 else TOTAL

    def stats(self) -> dict[str, int]:
        if self.closed:
            raise gs.GeminiError("closed")
        return {"device_bytes": self.held, "weight_bytes": self.weights, "state_bytes": 0}

    def set_external_bytes(self, n: int) -> None:
        self.external = n

    def reserve(self, n: int) -> bool:
        self.held = max(min(self.held, self.limit() - n), min(self.pinned, self.held))
        self.device.check()
        return self.held <= self.limit() - n

    def answer_for_torch(self, yes: bool) -> None:
        self.answers = yes
        assert sum(core.answers for core in self.device.cores) <= 1

    def fill(self) -> None:
        self.held = max(self.held, min(self.weights, self.limit()))
        self.device.check()

    def close(self) -> None:
        self.closed, self.held, self.answers = True, 0, False


class _Machine:
    def __init__(self) -> None:
        self.cores: list[_Core] = []
        self.others = DRIVER

    def used(self) -> int:
        return self.others + _Torch.held + sum(core.held for core in self.cores)

    def info(self, device: Any) -> tuple[int, int]:
        return TOTAL - self.used(), TOTAL

    def check(self) -> None:
        """What is held fits the budget of whoever answers."""
        for core in self.cores:
            assert not core.answers or core.budget < 0 or self.used() <= core.budget

    def join(
        self, name: str, budget: int, weights: int, least: int, trains: bool, pinned: int = 0
    ) -> _Open:
        memory = DeviceMemory(torch.device("cuda", 0))
        core = _Core(self, budget, weights, pinned)
        try:
            memory.join(core, name, budget, least, trains)
        except gs.GeminiMemoryError:
            core.close()
            memory.close()
            raise
        core.external = memory.external_bytes(0) if budget >= 0 else 0
        return _Open(memory, core)


class _Open:
    def __init__(self, memory: DeviceMemory, core: _Core) -> None:
        self.memory, self.core = memory, core

    def close(self) -> None:
        self.core.close()
        self.memory.close()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Machine]:
    machine = _Machine()
    monkeypatch.setattr(budgets, "TorchMemory", _Torch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", machine.info)
    monkeypatch.setattr(_Torch, "held", 0)
    yield machine
    gc.collect()
    assert not any(reference() for reference in budgets._devices.values())


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=5),
    st.integers(0, 700),
)
def test_parts_use_the_room_and_no_more(needs: list[tuple[int, int]], room: int) -> None:
    needs = [(least, least + more) for least, more in needs]
    room = max(room, sum(least for least, _ in needs))
    parts = parts_of(room, needs)
    assert all(least <= part <= most for part, (least, most) in zip(parts, needs, strict=True))
    assert sum(parts) <= room
    left = min(room, sum(most for _, most in needs)) - sum(parts)
    assert left < len(needs)  # rounding


def test_one_engine_has_the_device(machine: _Machine) -> None:
    one = machine.join("One", 1000 * MIB, 5000 * MIB, 10 * MIB, trains=False)
    assert one.core.answers
    assert one.memory.external_bytes(0) == DRIVER + DRIVER_RESERVE
    one.core.fill()
    assert machine.used() == 1000 * MIB - DRIVER_RESERVE
    assert one.memory.tidy()
    one.close()


@pytest.mark.parametrize("is_reference_first", [True, False])
def test_the_one_that_trains_leads(machine: _Machine, is_reference_first: bool) -> None:
    budget = 8000 * MIB
    made = {}
    for trains in (False, True) if is_reference_first else (True, False):
        made[trains] = machine.join(
            f"Trains {trains}", budget, (16000 if trains else 2000) * MIB, 100 * MIB, trains
        )
        made[trains].core.fill()
    reference, policy = made[False], made[True]
    assert policy.core.answers and not reference.core.answers
    assert policy.memory.tidy() and not reference.memory.tidy()
    most = [n * MIB + slack(budget) for n in (2000, 16000)]
    room = budget - DRIVER - DRIVER_RESERVE - slack(budget) - first_reserve(budget)
    part = parts_of(room, [(100 * MIB, n) for n in most])[0]
    assert reference.memory.part == part
    reference.core.fill()
    assert reference.core.held == part < 2000 * MIB
    assert policy.memory.first_reserve_bytes(budget, budget)
    assert not reference.memory.first_reserve_bytes(budget, budget)
    # Torch takes from the leader alone.
    _Torch.held = 1000 * MIB
    policy.core.reserve(0)
    assert reference.core.held == part
    policy.core.external = policy.memory.external_bytes(policy.core.held)
    policy.core.fill()
    assert machine.used() == budget - DRIVER_RESERVE
    # Who is left has the rest.
    policy.close()
    assert reference.core.answers
    reference.core.fill()
    assert reference.core.held == 2000 * MIB
    reference.close()


def test_all_are_whole_where_all_fit(machine: _Machine) -> None:
    budget = 30_000 * MIB
    reference = machine.join("Reference", budget, 2000 * MIB, 100 * MIB, trains=False)
    policy = machine.join("Policy", budget, 16_000 * MIB, 100 * MIB, trains=True)
    for one in (reference, policy):
        one.core.fill()
        assert one.core.held == one.core.weights
    policy.close()
    reference.close()


def test_a_budget_of_its_own_bounds_a_part(machine: _Machine) -> None:
    first = machine.join("First", 20_000 * MIB, 40_000 * MIB, 100 * MIB, trains=True)
    second = machine.join("Second", 3000 * MIB, 40_000 * MIB, 100 * MIB, trains=True)
    for one in (first, second, first):
        one.core.fill()
    assert machine.used() == 20_000 * MIB - DRIVER_RESERVE
    assert second.core.held == second.memory.part
    budget = 20_000 * MIB
    room = budget - DRIVER - DRIVER_RESERVE - slack(budget) - first_reserve(budget)
    least = 100 * MIB
    needs = [(least, 40_000 * MIB + slack(budget)), (least, 3000 * MIB)]
    assert second.memory.part == parts_of(room, needs)[1]
    first.close()
    second.close()


def test_what_does_not_fit_together_changes_nothing(machine: _Machine) -> None:
    one = machine.join("One", 1000 * MIB, 5000 * MIB, 200 * MIB, trains=False)
    one.core.fill()
    held = one.core.held
    with pytest.raises(gs.GeminiMemoryError, match=r"One 209\.8 MB and Two 314\.6 MB") as error:
        machine.join("Two", 1000 * MIB, 5000 * MIB, 300 * MIB, trains=True)
    assert (one.core.held, one.core.answers) == (held, True)
    enough = 1000 * MIB + 500 * MIB - (1000 * MIB - DRIVER - DRIVER_RESERVE)
    assert f"({enough} bytes)" in str(error.value)
    one.close()
    one = machine.join("One", enough, 5000 * MIB, 200 * MIB, trains=False)
    two = machine.join("Two", enough, 5000 * MIB, 300 * MIB, trains=True)
    one.close()
    two.close()


def test_who_cannot_make_room_is_named(machine: _Machine) -> None:
    one = machine.join("One", 4000 * MIB, 5000 * MIB, 200 * MIB, trains=False, pinned=3000 * MIB)
    one.core.fill()
    with pytest.raises(gs.GeminiMemoryError, match="One holds .* cannot make room for Two"):
        machine.join("Two", 4000 * MIB, 5000 * MIB, 300 * MIB, trains=True)
    assert one.core.answers and one.memory.part is None
    one.core.fill()
    assert machine.used() == 4000 * MIB - DRIVER_RESERVE
    one.close()


def test_who_is_garbage_has_nothing(machine: _Machine) -> None:
    one = machine.join("One", 4000 * MIB, 5000 * MIB, 200 * MIB, trains=True)
    one.core.close()
    one.cycle = one  # type: ignore[attr-defined]
    del one
    two = machine.join("Two", 4000 * MIB, 5000 * MIB, 200 * MIB, trains=False)
    assert two.core.answers and two.memory.part is None
    two.close()


def test_another_engine_leaves_the_reserve_of_a_first_step(machine: _Machine) -> None:
    budget = 24_000 * MIB
    policy = machine.join("Policy", budget, 40_000 * MIB, 100 * MIB, trains=True)
    policy.memory.reserve = policy.memory.first_reserve_bytes(budget, budget)
    assert policy.memory.reserve == 384 * MIB
    reference = machine.join("Reference", budget, 2000 * MIB, 100 * MIB, trains=False)
    for one in (policy, reference):
        one.core.fill()
    assert machine.used() == budget - DRIVER_RESERVE - 384 * MIB
    policy.memory.reserve = 0  # the step is over
    policy.core.external = policy.memory.external_bytes(policy.core.held)
    policy.core.fill()
    assert machine.used() == budget - DRIVER_RESERVE
    policy.close()
    reference.close()


def test_engines_without_a_budget_are_others(machine: _Machine) -> None:
    whole = machine.join("Whole", -1, 3000 * MIB, 10 * MIB, trains=True)
    whole.core.fill()
    assert whole.core.answers
    bounded = machine.join("Bounded", 8000 * MIB, 9000 * MIB, 100 * MIB, trains=False)
    assert bounded.core.answers and not whole.core.answers
    bounded.core.fill()
    assert machine.used() == 8000 * MIB - DRIVER_RESERVE
    bounded.close()
    assert whole.core.answers
    whole.close()


def test_every_order_of_coming_and_going(machine: _Machine) -> None:
    kinds = {"a": (9000, True), "b": (2000, False), "c": (12_000, True)}
    for come, go in itertools.product(itertools.permutations(kinds), repeat=2):
        held = {}
        for name in come:
            weights, trains = kinds[name]
            held[name] = machine.join(name, 10_000 * MIB, weights * MIB, 500 * MIB, trains)
            for one in held.values():
                one.core.fill()
                one.core.reserve(0)
        assert sum(one.core.answers for one in held.values()) == 1
        for name in go:
            held.pop(name).close()
            for one in held.values():
                one.core.fill()
            assert sum(one.core.answers for one in held.values()) == bool(held)


def _wide() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))


def test_an_engine_that_only_evaluates_uses_what_it_gets_back() -> None:
    inputs = torch.ones(2, 64)
    with gs.manage(
        _wide(), device="cpu", device_budget=1 << 20, chunk_size=1 << 14, block_size=4096
    ) as engine:
        core = engine._runtime.core

        def held() -> int:
            with torch.no_grad():
                for _ in range(3):
                    engine.model(inputs)
            assert engine.stats()["planned"]
            return int(engine.stats()["device_bytes"])

        whole = held()
        core.set_external_bytes((1 << 20) - 100_000)
        assert core.reserve(0)
        least = held()
        assert least <= 100_000 < whole
        plans = engine.stats()["plans"]
        core.set_external_bytes((1 << 20) - 200_000)  # less than 64 MiB more is not worth a plan
        assert held() == least and engine.stats()["plans"] == plans


@pytest.mark.parametrize("trains", [False, True])
def test_a_plan_follows_when_the_room_grows(trains: bool) -> None:
    """By more than 64 MiB; outcomes are those of a run that had the room from the start."""
    budget = 200 << 20

    def outcome(taken: list[int]) -> tuple[list[int], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = _wide()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1) if trains else None
        how: dict[str, Any] = {"device": "cpu", "chunk_size": 1 << 14, "block_size": 4096}
        with gs.manage(model, optimizer, device_budget=budget, **how) as engine:
            core, held = engine._runtime.core, []
            for external in taken:
                core.set_external_bytes(external)
                assert core.reserve(0)
                for _ in range(4):
                    with torch.set_grad_enabled(trains):
                        loss = model(torch.ones(2, 64)).square().sum()
                    if optimizer is not None:
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                assert engine.stats()["planned"]
                held.append(int(engine.stats()["device_bytes"]))
            return held, engine.model_state_dict()

    held, states = outcome([budget - 200_000, 0])
    assert held[0] <= 200_000 < held[1]
    free, wanted = outcome([0, 0])
    assert held[1] == free[1]
    for name, value in wanted.items():
        assert torch.equal(states[name], value)


def test_what_torch_holds_is_not_left_for_chunks(machine: _Machine) -> None:
    """Nor does the reserve of the first step take what activations need: half of what is left is theirs."""
    budget, least = 2000 * MIB, 100 * MIB
    _Torch.held = 300 * MIB
    one = machine.join("One", budget, 5000 * MIB, least, trains=True)
    left = budget - DRIVER - DRIVER_RESERVE - 300 * MIB
    assert one.memory.left_bytes(budget, 0) == left
    assert one.memory.first_reserve_bytes(budget, left - least) == budget // 32
    for spare in (10 * MIB, 1, 0, -MIB):
        assert one.memory.first_reserve_bytes(budget, spare) == max(spare // 2, 0)
    other = machine.join("Other", budget, 5000 * MIB, least, trains=False)
    assert other.memory.left_bytes(budget, 0) == other.memory.part  # torch takes nothing of a part


def test_the_host_device_has_no_parts() -> None:
    memory = DeviceMemory(torch.device("cpu"))
    memory.join(None, "One", 1000, 10, True)
    assert (
        memory.external_bytes(0)
        == memory.first_reserve_bytes(1000, 1000)
        == memory.slack_bytes(1000)
        == 0
    )
    assert memory.left_bytes(1000, 0) == 1000
    assert not (memory.tidy() or memory.recover() or memory.give_cached())
    memory.close()
