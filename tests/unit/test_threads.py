"""Threads that use a parameter while another enters and leaves its unit: its data stays while they do.

The order of what the threads do is not left to chance: an operation of our own waits in its kernel until the other
thread has changed the parameter's data, or waits for this one.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.parameters import gate

WIDTH = 32
_kernels: list[Callable[[torch.Tensor], list[float]]] = []  # the last one counts


@torch.library.custom_op("gemini_tests::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_kernels[-1](x))


def managed(budget: int = 3 * WIDTH * WIDTH * 4) -> tuple[nn.Sequential, gs.Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    engine = gs.manage(
        model,
        device_budget=budget,
        chunk_size=WIDTH * WIDTH * 4,
        device="cpu",
        placement_policy="cpu",
    )
    return model, engine


class Thread(threading.Thread):
    """Its work's result, or what it raised, when it is joined."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._done: tuple[Any, BaseException | None] = None, None
        self.start()

    def run(self) -> None:
        try:
            self._done = self._work(), None
        except BaseException as error:
            self._done = None, error

    def result(self) -> Any:
        self.join()
        if self._done[1] is not None:
            raise self._done[1]
        return self._done[0]


def until(*conditions: Callable[[], bool]) -> None:
    while not any(condition() for condition in conditions):
        time.sleep(0)


def numbers_at(address: int) -> list[float]:
    return list((ctypes.c_float * (WIDTH * WIDTH)).from_address(address))


def test_bytes_stay_while_another_thread_reads_them() -> None:
    """Its kernel has the address, the unit is left, and all others are entered."""
    model, engine = managed()
    weight = model[2].weight
    want = weight.detach().clone()
    started, gone = threading.Event(), threading.Event()

    def kernel(x: torch.Tensor) -> list[float]:
        address = x.data_ptr()
        started.set()
        until(gone.is_set, lambda: bool(gate._waiting))
        return numbers_at(address)

    _kernels.append(kernel)
    readers: list[Thread] = []

    def begin(*_: Any) -> None:
        readers.append(Thread(lambda: look(weight)))
        started.wait()

    handle = model[2].register_forward_hook(begin, prepend=True)
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
        handle.remove()
        model(torch.ones(1, WIDTH))
    gone.set()
    assert torch.equal(readers[0].result().view(WIDTH, WIDTH), want)
    engine.close()


@pytest.mark.parametrize("is_differentiated", [False, True])
def test_a_unit_is_entered_when_others_have_used_its_weight(is_differentiated: bool) -> None:
    """Autograd holds a lock of the weight's meanwhile, and may wait for the GIL in it."""
    model, engine = managed()
    weight = model[2].weight
    started, entered = threading.Event(), threading.Event()
    seen = []

    def kernel(x: torch.Tensor) -> list[float]:
        started.set()
        until(entered.is_set, lambda: bool(gate._waiting))
        seen.append(entered.is_set())
        return []

    _kernels.append(kernel)

    def use() -> None:
        with torch.set_grad_enabled(is_differentiated):
            look(weight)

    reader = Thread(use)
    started.wait()
    handle = model[2].register_forward_pre_hook(lambda *_: entered.set())
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    handle.remove()
    reader.result()
    assert seen == [False]
    engine.close()


def test_two_threads_inside_the_same_unit() -> None:
    """The second is served operation by operation, and what it saves for backward is right, too."""
    model, engine = managed(12 * WIDTH * WIDTH * 4)
    x = torch.randn(3, WIDTH)
    want = model(x).sum()
    want_grads = torch.autograd.grad(want, list(model.parameters()))
    found: list[Any] = []

    def evaluate() -> Any:
        out = model(x).sum()
        return out, torch.autograd.grad(out, list(model.parameters()))

    def begin(*_: Any) -> None:
        handle.remove()
        found.append(Thread(evaluate).result())

    handle = model[2].register_forward_hook(begin, prepend=True)
    out = model(x).sum()
    assert torch.equal(out, want)
    assert torch.equal(found[0][0], want)
    for got, wanted in zip(found[0][1], want_grads, strict=True):
        assert torch.equal(got, wanted)
    assert all(p.is_contiguous() and p._gm_slot.open_count == 0 for p in model.parameters())
    engine.close()


def test_a_compiled_module_is_refused_to_the_second() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].compile(backend="eager")
    engine = gs.manage(model, device="cpu")
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        want = model(x)

    def begin(*_: Any) -> None:
        handle.remove()
        with pytest.raises(gs.GuardError, match=r"module '1' is compiled"):
            Thread(lambda: model[1](x)).result()

    handle = model[0].register_forward_hook(begin, prepend=True)
    with torch.no_grad():
        assert torch.equal(model(x), want)
    assert torch.equal(Thread(lambda: model(x).detach()).result(), want)
    engine.close()


def test_an_interrupt_while_a_unit_waits_comes_when_it_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, engine = managed()
    weight = model[2].weight
    started, interrupted = threading.Event(), threading.Event()

    def kernel(x: torch.Tensor) -> list[float]:
        started.set()
        interrupted.wait()
        return []

    _kernels.append(kernel)
    real = gate.await_readers

    def interrupt(slot: Any) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        real(slot)

    monkeypatch.setattr(gate, "await_readers", interrupt)
    readers: list[Thread] = []

    def begin(*_: Any) -> None:
        readers.append(Thread(lambda: look(weight)))
        started.wait()

    handle = model[2].register_forward_hook(begin, prepend=True)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(torch.ones(1, WIDTH))
    handle.remove()
    readers[0].result()
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    assert all(slot.open_count == 0 for slot in engine._runtime.slots)
    engine.close()


# ---- steps, while another thread is inside a unit ----


def halves(policy: str) -> tuple[nn.Sequential, Any, gs.Engine | None]:
    """bf16 weights with gradients, after one step; policy "": not managed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    engine = None
    if policy:
        engine = gs.manage(
            model, optimizer, device="cpu", placement_policy=policy, precision="bf16-true"
        )
    else:
        gs.cast_model_(model, "bf16-true")
    for is_last in (False, True):
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
        if not is_last:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, engine


def finished(model: nn.Module, optimizer: Any, engine: gs.Engine | None) -> list[torch.Tensor]:
    """Two more steps; the weights."""
    for _ in range(2):
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    weights = [p.detach().clone() for p in model.parameters()]
    if engine is not None:
        engine.close()
    return weights


@pytest.mark.parametrize("policy", ["cpu", "cuda"])
def test_a_step_is_no_write_of_the_unit_that_another_thread_is_in(policy: str) -> None:
    plain = halves("")
    plain[1].step()
    model, optimizer, engine = halves(policy)

    def step(*_: Any) -> None:
        handle.remove()
        Thread(optimizer.step).result()

    handle = model[1].register_forward_hook(step, prepend=True)
    with torch.no_grad():
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16))
    for got, want in zip(finished(model, optimizer, engine), finished(*plain), strict=True):
        assert torch.equal(got, want)
