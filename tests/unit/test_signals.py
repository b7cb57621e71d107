"""What a signal's handler raises reaches the caller, wherever it comes, and the engine works on."""

from __future__ import annotations

import ctypes
import gc
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy import _C
from helpers.interrupts import Stop, arriving, handled, interrupted, places
from helpers.pairs import pairs
from helpers.ranks import run_ranks, values

WIDTH = 32
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


class _Stop(BaseException):
    """What a handler raises that nobody else does."""


class _LateError(Exception):
    """What the handler of an alarm raises."""


KINDS = [_LateError, _Stop]


@pytest.fixture
def handle() -> Iterator[Callable[[type[BaseException]], None]]:
    """Sets what the handler of SIGINT raises."""
    before = signal.getsignal(signal.SIGINT)

    def set_kind(kind: type[BaseException]) -> None:
        def raise_it(*_: Any) -> None:
            raise kind("of a handler")

        signal.signal(signal.SIGINT, raise_it)

    yield set_kind
    signal.signal(signal.SIGINT, before)


def layers() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def managed(policy: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer, gs.Engine]:
    model, optimizer = layers()
    engine = gs.manage(
        model,
        optimizer,
        device_budget="24kB",
        device="cpu",
        chunk_size=WIDTH * (WIDTH + 1),
        placement_policy=policy,
    )
    return model, optimizer, engine


def loss_with(model: nn.Module, place: int | None, hook: Any = None) -> torch.Tensor:
    """A loss at whose layer `place` the hook is called in the backward."""
    hidden = X
    for i, layer in enumerate(model):
        hidden = layer(hidden)
        if i == place:
            hidden.register_hook(hook)
    return hidden.square().mean()


WAYS: dict[str, Callable[[gs.Engine, torch.Tensor], None]] = {
    "loss.backward": lambda engine, loss: loss.backward(),
    "engine.backward": lambda engine, loss: engine.backward(loss),
    "step=True": lambda engine, loss: engine.backward(loss, step=True),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, engine: gs.Engine, way: str) -> None:
    WAYS[way](engine, loss_with(model, None))
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def uninterrupted(way: str, policy: str, n: int) -> list[torch.Tensor]:
    model, optimizer, engine = managed(policy)
    for _ in range(n):
        step(model, optimizer, engine, way)
    engine.close()
    return weights(model)


# ---- a signal that arrives inside torch's C++ ----


@pairs(place=[0, 1, 3], way=["loss.backward", "engine.backward"], kind=KINDS)
def test_what_a_handler_raises_in_a_backward_is_raised_by_it(
    place: int, way: str, kind: type[BaseException], handle: Any
) -> None:
    handle(kind)
    model, optimizer, engine = managed()
    for _ in range(3):
        step(model, optimizer, engine, way)
    loss = loss_with(model, place, arriving())
    with pytest.raises(kind, match="of a handler"):
        WAYS[way](engine, loss)
    optimizer.zero_grad()
    step(model, optimizer, engine, way)
    engine.close()
    for got, want in zip(weights(model), uninterrupted(way, "cpu", 4), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("place", [0, 2])
def test_an_update_inside_the_backward_that_is_interrupted_is_finished_or_said(
    place: int, handle: Any
) -> None:
    handle(KeyboardInterrupt)
    model, optimizer, engine = managed("auto")
    for _ in range(3):
        step(model, optimizer, engine, "step=True")
    loss = loss_with(model, place, arriving())
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.backward(loss, step=True)
    if notes := getattr(caught.value, "__notes__", []):
        assert "backward(step=True) failed" in notes[0] and "engine.close()" in notes[0]
        with pytest.warns(
            RuntimeWarning, match=r"ended inside a step: backward\(step=True\) failed"
        ):
            engine.close()
        return
    optimizer.zero_grad()
    step(model, optimizer, engine, "step=True")
    engine.close()
    for got, want in zip(weights(model), uninterrupted("step=True", "auto", 4), strict=True):
        assert torch.equal(got, want)


def test_an_interrupt_while_a_unit_is_left_is_not_hidden_by_an_error() -> None:
    model, _, engine = managed()

    def fail(*_: Any) -> None:
        raise ValueError("first")

    call = model[1]._compiled_call_impl
    leave, left = call.leave, []

    def interrupt() -> None:
        leave()
        left.append(True)
        raise KeyboardInterrupt

    handle, call.leave = model[1].register_forward_hook(fail), interrupt
    with pytest.raises(KeyboardInterrupt) as caught:
        model(X)
    assert isinstance(caught.value.__context__, ValueError) and left
    handle.remove()
    call.leave = leave
    model(X)
    engine.close()


# ---- what is not to be left half done ----


def signals_in(act: Callable[[], Any]) -> tuple[list[str], BaseException | None]:
    """What `act` and a SIGINT inside it do, in their order, and what comes of that."""
    done = []

    def both() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("in")
        act()
        done.append("end")

    try:
        _C.uninterrupted(both)
    except BaseException as error:
        return done, error
    return done, None


def test_a_signal_waits_until_the_call_has_returned(handle: Any) -> None:
    handle(_Stop)
    done, error = signals_in(lambda: None)
    assert done == ["in", "end"] and isinstance(error, _Stop)
    with pytest.raises(_Stop):  # and handlers are where they were
        signal.raise_signal(signal.SIGINT)
    assert _C.uninterrupted(max, 3, 7) == 7
    inner: list[Any] = []
    done, error = signals_in(lambda: inner.append(signals_in(lambda: None)))
    assert inner == [(["in", "end"], None)] and isinstance(error, _Stop)  # inside another one


def test_an_error_of_the_call_is_raised() -> None:
    def fail() -> None:
        raise ValueError("of the call")

    with pytest.raises(ValueError, match="of the call"):
        _C.uninterrupted(fail)


def test_a_handler_that_the_call_sets_stays() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    try:
        signal.signal(signal.SIGUSR2, lambda *_: None)
        seen = []
        _C.uninterrupted(signal.signal, signal.SIGUSR2, lambda *_: seen.append(1))
        signal.raise_signal(signal.SIGUSR2)
        assert seen == [1]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_handler_that_puts_ours_back() -> None:
    """As LLVM's: put there inside the call, it goes at its first signal, and raises that again."""
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))
    try:
        ours = _C.uninterrupted(libc.signal, signal.SIGUSR2, None)  # None: the default, which kills
        libc.signal(signal.SIGUSR2, ours)
        for n in (1, 2):
            signal.raise_signal(signal.SIGUSR2)
            assert len(seen) == n
        _C.uninterrupted(signal.raise_signal, signal.SIGUSR2)
        assert len(seen) == 3
        signal.raise_signal(signal.SIGUSR2)
        assert len(seen) == 4
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_on_another_thread_it_is_an_ordinary_call() -> None:
    result = []
    thread = threading.Thread(target=lambda: result.append(_C.uninterrupted(max, 1, 2)))
    thread.start()
    thread.join()
    assert result == [2]


# ---- at the n-th place, whatever it is ----

N = 8  # places that are tried of each call


def some(n_places: int) -> list[int]:
    """Places that are spread, none of them at the same distance."""
    return sorted({1 + (n_places * i + i * i) // N for i in range(N)} | {n_places})


def whole_step(run: Any, way: str) -> None:
    model, optimizer, engine = run
    WAYS[way](engine, loss_with(model, None))
    if way != "step=True":
        engine.clip_grad_norm_(0.05)
    optimizer.step()
    optimizer.zero_grad()


def trained(way: str, n: int) -> Any:
    run = managed("auto")
    for _ in range(n):
        whole_step(run, way)
    return run


def flat(state: Any) -> list[Any]:
    """Tensors and numbers of a state, in its order."""
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in flat(value)]
    if isinstance(state, list | tuple):
        return [leaf for value in state for leaf in flat(value)]
    return [state.clone() if isinstance(state, torch.Tensor) else state]


def same(got: list[Any], want: list[Any]) -> bool:
    return len(got) == len(want) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(got, want, strict=True)
    )


def states_of(way: str, numbers: list[int]) -> list[list[Any]]:
    run, states = trained(way, min(numbers)), []
    for n in numbers:
        states.append(flat(run[2].state_dict()))
        if n < max(numbers):
            whole_step(run, way)
    run[2].close()
    return states


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_anywhere_in_a_step(way: str) -> None:
    before, after, last = states_of(way, [3, 4, 5])
    run = trained(way, 3)
    n_places = places(lambda: whole_step(run, way))
    run[2].close()
    for n in some(n_places):
        run = trained(way, 3)
        _, optimizer, engine = run
        interrupted(lambda run=run: whole_step(run, way), n)
        try:
            state = flat(engine.state_dict())
        except gs.GeminiError as error:
            assert "backward(step=True)" in str(error)  # which says what to do
            if "call optimizer.step()" not in str(error):
                with pytest.warns(RuntimeWarning, match="ended inside a step"):
                    engine.close()
                continue
            optimizer.step()
            state = flat(engine.state_dict())
        is_done = same(state, after)
        assert is_done or same(state, before), n
        assert engine.stats()["steps"] == 3 + is_done
        optimizer.zero_grad()
        for _ in range(1 if is_done else 2):
            whole_step(run, way)
        assert same(flat(engine.state_dict()), last), n
        engine.close()


def test_a_signal_anywhere_in_manage() -> None:
    want = states_of("loss.backward", [2])[0]
    n_places = places(lambda: managed("auto")[2].close())
    for n in some(n_places)[:-1]:
        model, optimizer = layers()
        optimizer_class, parameters = type(optimizer), list(model.parameters())
        values, addresses = weights(model), [p.data_ptr() for p in parameters]
        made: list[gs.Engine] = []

        def act(model: nn.Module = model, optimizer: Any = optimizer, made: Any = made) -> None:
            engine = gs.manage(
                model, optimizer, device_budget="24kB", device="cpu", chunk_size=WIDTH * (WIDTH + 1)
            )
            made.append(engine)

        if not interrupted(act, n):
            made[0].close()
            continue
        assert gs.engine_of(model) is None and type(optimizer) is optimizer_class
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert [p.data_ptr() for p in parameters] == addresses
        assert same(weights(model), values)
        act()
        run = model, optimizer, made[0]
        for _ in range(2):
            whole_step(run, "loss.backward")
        assert same(flat(run[2].state_dict()), want)
        run[2].close()


def test_a_signal_anywhere_in_close() -> None:
    model, optimizer, engine = trained("loss.backward", 2)
    n_places = places(engine.close)
    want = flat([weights(model), list(optimizer.state.values())])
    for n in some(n_places):
        model, optimizer, engine = trained("loss.backward", 2)
        interrupted(engine.close, n)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.close()
        assert gs.engine_of(model) is None and type(optimizer) is torch.optim.AdamW
        assert not any(hasattr(p, "_gm_slot") for p in model.parameters())
        assert same(flat([weights(model), list(optimizer.state.values())]), want), n


def test_a_signal_anywhere_in_save(tmp_path: Path) -> None:
    before, after = states_of("loss.backward", [2, 3])
    folder = tmp_path / "checkpoint"
    run = trained("loss.backward", 2)
    engine, other = run[2], managed("cpu")[2]
    engine.save(folder, extra=2)
    first = tmp_path / "first"
    folder.rename(first)
    whole_step(run, "loss.backward")
    n_places = places(lambda: engine.save(folder, extra=3))
    for n in some(n_places):
        for path in folder.iterdir():
            path.unlink()
        for path in first.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        interrupted(lambda: engine.save(folder, extra=3), n)
        extra = other.load(folder)
        assert same(flat(other.state_dict()), after if extra == 3 else before), n
        assert same(flat(engine.state_dict()), after)
    engine.save(folder, extra=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "first"]
    engine.close()
    other.close()


def test_a_signal_anywhere_in_load(tmp_path: Path) -> None:
    before, after = states_of("loss.backward", [2, 3])
    run = trained("loss.backward", 2)
    engine = run[2]
    engine.save(tmp_path / "two")
    whole_step(run, "loss.backward")
    engine.save(tmp_path / "three")
    n_places = places(lambda: engine.load(tmp_path / "two"))
    for n in some(n_places):
        engine.load(tmp_path / "three")
        interrupted(lambda: engine.load(tmp_path / "two"), n)
        try:
            state = flat(engine.state_dict())
        except gs.GeminiError as error:
            assert "was interrupted" in str(error)
        else:
            assert same(state, before) or same(state, after), n
        engine.load(tmp_path / "two")
        assert same(flat(engine.state_dict()), before)
    whole_step(run, "loss.backward")
    assert same(flat(engine.state_dict()), after)
    engine.close()


# ---- several ranks ----


def of_rank(rank: int, size: int) -> tuple[bool, str]:
    """A backward of all ranks is interrupted, in a collective or beside it: whether it raised that; what follows."""
    run = model, optimizer, engine = managed("cpu")
    for _ in range(2):
        whole_step(run, "loss.backward")
    was_raised, said = False, ""
    with handled(signal.SIGINT):
        try:
            loss_with(model, 1 + rank, arriving()).backward()
        except Stop:
            was_raised = True
        except gs.GeminiError as error:  # the other rank was first
            said = str(error)
    try:
        optimizer.zero_grad()
        whole_step(run, "loss.backward")
    except gs.GeminiError as error:
        said = said or str(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.close()
    return was_raised, said


def test_signals_on_ranks_are_raised_or_named(tmp_path: Path) -> None:
    found = values(run_ranks(2, tmp_path, of_rank))
    # Inside a collective it is an error of the ranks, which names it.
    assert any(was_raised or "Stop" in said for was_raised, said in found), found
    assert all(was_raised or said for was_raised, said in found), found


# ---- what nobody has any more ----


@pytest.mark.parametrize("steps", [0, 2])
def test_a_dropped_engine_is_collected_at_once(steps: int) -> None:
    """By the first run of the cycle collector: nothing of it has a finalizer, whose objects wait for the second."""

    def dropped() -> tuple[weakref.ref[Any], int]:
        run = trained("loss.backward", steps)
        storage = run[2]._runtime.slots[0].absent.untyped_storage()
        return weakref.ref(storage), id(run[2]._runtime)

    gc.collect()
    gc.disable()
    try:
        reference, _ = dropped()
        gc.collect()
        assert reference() is None
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_closed_engine_that_is_dropped_waits_for_no_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        model, optimizer, engine = trained("loss.backward", 1)
        engine.close()
        reference = weakref.ref(model[0].weight)
        del model, optimizer, engine
        assert reference() is None
    finally:
        gc.enable()
