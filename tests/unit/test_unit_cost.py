"""What a unit costs, in calls: that it does not grow with the model, what takes the short way, NVTX ranges."""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy import _C
from gemini_strategy.parameters import absent

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

PACKAGE = str(Path(gs.__file__).parent)
WIDTH = 8


def linears(n: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(n)))


def manage(model: nn.Module, **options: Any) -> tuple[gs.Engine, torch.optim.Optimizer]:
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    return gs.manage(model, optimizer, device="cpu", **options), optimizer


def work_of(run: Callable[[], Any]) -> Counter[str]:
    """The functions of ours that Python enters in a call, and the functions of C that ours call."""
    seen: Counter[str] = Counter()

    def note(frame: FrameType, event: str, what: Any) -> None:
        if frame.f_code.co_filename.startswith(PACKAGE) and event in ("call", "c_call"):
            seen[frame.f_code.co_qualname if event == "call" else f"C {what.__qualname__}"] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


# ---- work: how long it takes is measured by benchmarks/bench_units.py ----


def test_a_unit_takes_no_python() -> None:
    """torch calls its hooks in C, and they the core: a model twice as long takes no call more."""
    x = torch.ones(1, WIDTH)
    of_n = {}
    for n in (10, 20):
        model = linears(n)
        engine, _ = manage(model)
        for _ in range(2):  # the second time nothing is new
            of_n[n] = work_of(functools.partial(model, x))
        engine.close()
    assert of_n[20] == of_n[10] and of_n[10]["RootForward.__call__"] == 1, of_n


def test_torch_searches_no_parameter_for_its_function_of_torch() -> None:
    """It asks at every operation: the first class in which it looks answers, and says that there is none."""
    model = linears(1)
    manage(model)
    own = vars(type(model[0].weight))
    assert own["__torch_function__"] is torch._C._disabled_torch_function_impl


def test_in_a_unit_and_after_it_subclasses_have_their_function_of_torch() -> None:
    seen = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch._C._is_torch_function_enabled())
            return super().forward(x)

    model = nn.Sequential(Looks(WIDTH, WIDTH))
    manage(model)
    model(torch.ones(1, WIDTH))
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, WIDTH + 1))
    assert seen == [True, True] and torch._C._is_torch_function_enabled()


def test_a_backward_of_ordinary_layers_takes_no_python() -> None:
    """Nodes that read weights, and gradients, go to the core in C."""
    model = linears(10)
    engine, _ = manage(model)
    losses = [model(torch.ones(1, WIDTH, requires_grad=True)).sum() for _ in range(2)]
    losses[0].backward()
    work = work_of(losses[1].backward)
    assert not work, work
    assert all(engine._runtime.core.has_grad(i) for i in range(20))


def test_the_work_of_a_unit_does_not_depend_on_the_number_of_parameters() -> None:
    """Every call of the core once walked the leases of all parameters."""
    x = torch.ones(1, WIDTH)

    def of_the_first_ten(n: int) -> tuple[Counter[str], int]:
        model = linears(n)
        engine, _ = manage(model)
        first = model[:10]
        with torch.no_grad():
            first(x)
            before = engine._runtime.core.stats()["leases_walked"]
            work = work_of(lambda: first(x))
            walked = engine._runtime.core.stats()["leases_walked"] - before
        engine.close()
        return work, walked

    assert of_the_first_ten(400) == of_the_first_ten(20)


def test_the_benchmark_of_these_times_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from bench_units import measure

    figures = measure(n=3, parameters=1, repeats=1, device="cpu")
    assert figures.keys() >= {"enter_leave", "touch", "gradient"}


# ---- the short way and the long one ----


def test_ordinary_gradients_go_to_the_core_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    model = linears(3)
    engine, _ = manage(model)
    asked = []
    monkeypatch.setattr(
        engine._runtime, "ordinary_grad", lambda slot, grad: asked.append(slot.name)
    )
    model(torch.ones(2, WIDTH)).sum().backward()
    assert not asked
    assert all(engine._runtime.core.has_grad(i) for i in range(6))


class Strange(nn.Module):
    """Its gradient is a transposed matrix: not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Transposed.apply(self.weight) * x


class Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.t().contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.t()


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_of_another_layout_take_the_long_way_to_the_same_bits(passes: int) -> None:
    x = torch.randn(4, 3)
    plain, managed = Strange(), Strange()
    engine, _ = manage(managed)
    for _ in range(passes):
        plain(x).square().sum().backward()
        managed(x).square().sum().backward()
    assert torch.equal(managed.weight.grad.clone(), plain.weight.grad)
    engine._runtime.core.check()


def test_a_gradient_forgets_the_norm() -> None:
    model = linears(2)
    engine, _ = manage(model)
    x = torch.ones(2, WIDTH)
    model(x).sum().backward()
    before = engine.grad_norm()
    model(x).sum().backward()
    assert engine.grad_norm() == 2 * before


def test_no_hooks_and_no_gradient_of_torch_are_left() -> None:
    model = linears(2)
    engine, _ = manage(model)
    model(torch.ones(2, WIDTH)).sum().backward()
    for module in model:
        assert not module._forward_pre_hooks and not module._forward_hooks
        for parameter in module.parameters():
            assert torch.Tensor.grad.__get__(parameter) is None
    kept = model[0].weight._gm_slot
    assert type(model[0].weight) is kept.managed_class
    engine.close()
    assert "_compiled_call_impl" not in vars(model[0])


# ---- what goes wrong on the way ----


def test_where_torch_forbids_hooks_parameters_stay_absent() -> None:
    model = linears(2)
    engine, _ = manage(model)
    unit = engine._runtime.units[0]
    x = torch.ones(1, WIDTH)
    want = model(x)
    shown = []
    model[0].register_forward_pre_hook(
        lambda module, args: shown.append(absent.is_absent(module.weight))
    )
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
        loss = model(x)
    assert torch.equal(loss, want) and shown == [True]
    loss.sum().backward()
    assert not unit.n_entered
    assert all(slot.open_count == 0 for slot in unit.slots)
    engine._runtime.core.check()
    model(x).sum().backward()  # and all is well
    assert shown == [True, False]


@pytest.mark.parametrize("policy", ["cuda", "cpu"])
def test_a_unit_s_own_forward_may_forbid_hooks(policy: Any) -> None:
    """As torch.func does: what is saved then is held by its storage."""

    class Learns(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            grad = torch.func.grad(lambda w: (x.detach() @ w).square().mean())
            with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
                y = (x @ self.weight).tanh()
            return y @ (self.weight - 0.1 * grad(self.weight)) + self.bias

    def run(is_managed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = (nn.Linear(WIDTH, WIDTH), Learns(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model = nn.Sequential(*layers)
        if is_managed:
            engine, optimizer = manage(model, placement_policy=policy, chunk_size=512)
        else:
            optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
        for _ in range(5):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if is_managed:
            engine._runtime.core.check()
            assert not any(unit.n_entered for unit in engine._runtime.units)
            engine.close()
        return [p.detach().clone() for p in model.parameters()]

    for ours, plain in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, plain)
    model = linears(1)
    engine, _ = manage(model)
    model[0].forward = lambda x: torch.func.grad(lambda w: (x @ w).sum())(model[0].weight)  # type: ignore
    with (
        torch.autograd.graph.save_on_cpu(),
        pytest.raises(RuntimeError, match="saved tensor hooks"),
    ):
        model(torch.ones(1, WIDTH))  # the caller's own are torch's to refuse
    engine.close()


def test_leave_gives_the_first_error_and_still_unpins(monkeypatch: pytest.MonkeyPatch) -> None:
    class Writes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.mul_(2)
            return super().forward(x)

    model = nn.Sequential(Writes(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    engine, _ = manage(model)

    def fail(slot: Any) -> None:
        raise RuntimeError(f"no writes to {slot.name}")

    monkeypatch.setattr(engine._runtime, "note_write", fail)
    with pytest.raises(RuntimeError, match="no writes to 0.weight"), torch.no_grad():
        model(torch.ones(1, WIDTH))
    assert not any(unit.n_entered for unit in engine._runtime.units)
    assert absent.is_absent(model[0].weight)
    monkeypatch.undo()
    assert engine._runtime.core.shed(1 << 40)
    assert engine._runtime.core.stats()["device_bytes"] == 0  # nothing is pinned


def test_a_unit_before_its_start_and_a_foreign_saved_tensor_are_refused() -> None:
    with pytest.raises(RuntimeError, match="before its start"):
        _C.Unit().enter()
    _C.Unit().leave()  # nothing was entered
    net = _C.Net()
    with pytest.raises(TypeError, match="what pack has given"):
        net.unpack(torch.ones(1))
    net.pop_to(0)  # nothing was pushed
    with pytest.raises(TypeError):
        _C.Unit().start(net, (object(),))
    with pytest.raises(TypeError, match="Core"):
        net.start(None, object(), (), -1, None)


# ---- threads and memory ----


def test_saved_tensors_are_places_and_nothing_is_leaked() -> None:
    model = linears(4)
    engine, optimizer = manage(model)
    x = torch.ones(2, WIDTH, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    y = model(x)  # what it has saved are places: no storage stays
    for slot in engine._runtime.slots:
        assert torch._C._storage_Use_Count(slot.shown_storage) == slot.shown_count
    assert engine.stats()["leases"] == 0
    del y
    for _ in range(3):
        step()
    gc.collect()
    references = [sys.getrefcount(slot) for slot in engine._runtime.slots]
    n_objects = len(gc.get_objects())
    for _ in range(20):
        step()
    gc.collect()
    assert [sys.getrefcount(slot) for slot in engine._runtime.slots] == references
    assert len(gc.get_objects()) < n_objects + 20


# ---- NVTX ----


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What is told to NVTX, in order."""
    told: list[tuple[str, ...]] = []
    nvtx = torch.cuda.nvtx
    monkeypatch.setattr(nvtx, "range_push", lambda name: told.append(("push", name)))
    monkeypatch.setattr(nvtx, "range_pop", lambda: told.append(("pop",)))
    monkeypatch.setattr(nvtx, "mark", lambda name: told.append(("mark", name)))
    return told


def test_nvtx_shows_units_and_backward_nodes(
    monkeypatch: pytest.MonkeyPatch, ranges: list[tuple[str, ...]]
) -> None:
    monkeypatch.setenv("GEMINI_NVTX", "1")
    model = linears(2)
    manage(model)
    y = model(torch.ones(1, WIDTH, requires_grad=True)).sum()
    assert ranges == [("push", "0"), ("pop",), ("push", "1"), ("pop",)]
    ranges.clear()
    y.backward()
    assert ranges == [("mark", "backward 1.weight"), ("mark", "backward 0.weight")]


def test_nvtx_ranges_end_when_forward_fails(
    monkeypatch: pytest.MonkeyPatch, ranges: list[tuple[str, ...]]
) -> None:
    monkeypatch.setenv("GEMINI_NVTX", "1")
    model = linears(1)
    manage(model)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, WIDTH + 1))
    assert ranges == [("push", "0"), ("pop",)]


def test_without_nvtx_nothing_is_told(ranges: list[tuple[str, ...]]) -> None:
    model = linears(2)
    manage(model)
    model(torch.ones(1, WIDTH)).sum().backward()
    assert ranges == []
