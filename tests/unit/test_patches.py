"""What manage() patches in torch is torch's own again after the last close()."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx.experimental.proxy_tensor
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

import gemini_strategy
from gemini_strategy import Engine, GeminiError, GuardError
from gemini_strategy.parameters import absent, gate, patches

PACKAGE = str(Path(gemini_strategy.__file__).parent)


@pytest.fixture(autouse=True)
def nothing_before() -> Iterator[None]:
    """Engines and tensors that an earlier test has left do not count, while these tests run."""
    gc.collect()
    homes, nets = dict(absent._homes), list(absent.nets)
    absent._homes.clear()
    for net in nets:
        absent.nets.discard(net)
    patches.take_off()
    assert not left()
    yield
    absent._homes.update(homes)
    for net in nets:
        absent.nets.add(net)


def managed(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Engine]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, gemini_strategy.manage(model, optimizer, device="cpu")


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def is_ours(value: Any) -> bool:
    """By the very type: some objects of torch's modules import, or warn, when they are looked at."""
    kind = type(value)
    if kind is property:
        return is_ours(value.fget) or is_ours(value.fset)
    if kind in (staticmethod, classmethod):
        return is_ours(value.__func__)
    if kind in (tuple, list):
        return any(
            issubclass(type(each), type) and hasattr(each, "_gm_plain_copy") for each in value
        )
    return kind is types.FunctionType and value.__code__.co_filename.startswith(PACKAGE)


def owners() -> Iterator[tuple[str, Any]]:
    seen = set()
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(module, types.ModuleType):
            yield name, module
            for value in list(vars(module).values()):
                if issubclass(type(value), type) and value not in seen:
                    seen.add(value)
                    yield f"{value.__module__}.{value.__qualname__}", value


def left() -> set[str]:
    """What of torch is code of this package, whichever way it came there."""
    found = {
        f"{name}.{key}"
        for name, owner in owners()
        for key, value in list(vars(owner).items())
        if is_ours(value)
    }
    if any(is_ours(cell.cell_contents) for cell in disable_saved_tensors_hooks.__closure__ or ()):
        found.add("the generator of disable_saved_tensors_hooks")
    return found


def objects() -> dict[tuple[int, str], Any]:
    """The very objects of what is patched."""
    owned = (torch.Tensor, nn.Parameter, nn.Module, saved_tensors_hooks, torch, torch.utils)
    found = {(id(owner), key): value for owner in owned for key, value in vars(owner).items()}
    modules = types.ModuleType, type(None)
    return {key: value for key, value in found.items() if not isinstance(value, modules)}


def test_torch_is_itself_again_and_a_second_engine_works() -> None:
    managed()[2].close()  # what torch imports for it is there
    before = objects()
    ends = []
    for _ in range(2):
        model, optimizer, engine = managed()
        on = left()
        assert {
            "torch.Tensor.numpy",
            "torch.Tensor.data",
            "torch.nn.parameter.Parameter.__new__",
        } <= on
        assert {"torch.compile", "the generator of disable_saved_tensors_hooks"} <= on
        step(model, optimizer)
        engine.close()
        assert not left()
        now = objects()
        assert now.keys() == before.keys()
        assert [key for key in before if now[key] is not before[key]] == []
        step(model, optimizer)  # an ordinary one
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_the_first_close_of_two_engines_leaves_them() -> None:
    first, second = managed()[2], managed(1)
    on = left()
    first.close()
    assert left() == on
    weight = second[0].get_parameter("0.weight")
    assert not weight.detach().numpy().flags.writeable
    second[2].close()
    assert not left()
    assert weight.detach().numpy().flags.writeable


def test_a_manage_that_fails_leaves_nothing() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    with pytest.raises(GeminiError, match="complex"):
        gemini_strategy.manage(model, device="cpu")
    assert not left()


def ask() -> None:
    """As a program that goes on without an engine does now and then."""
    for _ in range(50):
        torch.zeros(1).numpy()


def test_what_outlives_its_engine_has_its_doors_for_as_long() -> None:
    model, _, engine = managed()
    state = model.state_dict()
    model(torch.ones(3, 6)).sum().backward()
    gradient = model[0].weight.grad
    engine.close()
    assert left()
    with pytest.raises(GuardError, match=r"0\.weight.*closed"):
        gradient.numpy()
    assert torch.equal(torch.from_numpy(state["0.weight"].numpy()), model[0].weight)
    del gradient
    ask()
    assert left()
    del state
    ask()
    assert not left()


class Other:
    """Another program's patch of torch.Tensor.numpy."""

    def __init__(self) -> None:
        self.below = torch.Tensor.numpy
        self.calls = 0

        def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.below(tensor, *args, **kwargs)

        self.own = numpy
        torch.Tensor.numpy = numpy  # type: ignore[method-assign]

    def leave(self) -> None:
        torch.Tensor.numpy = self.below  # type: ignore[method-assign]


@pytest.fixture
def numpy_of_torch() -> Iterator[Callable[..., Any]]:
    plain = vars(torch.Tensor).get("numpy")
    yield torch.Tensor.numpy
    if plain is None:
        vars(torch.Tensor).get("numpy") and delattr(torch.Tensor, "numpy")
    else:
        torch.Tensor.numpy = plain  # type: ignore[method-assign]


def test_a_patch_on_top_of_ours_stays(numpy_of_torch: Callable[..., Any]) -> None:
    engine = managed()[2]
    other = Other()
    engine.close()
    assert torch.Tensor.numpy is other.own
    assert torch.ones(2).numpy().flags.writeable
    assert other.calls == 1
    for _ in range(3):  # engines come and go above it
        model, _, engine = managed()
        assert not model[0].weight.detach().numpy().flags.writeable
        engine.close()
        assert torch.Tensor.numpy is other.own
    other.leave()
    # What it has put back is ours, beneath which torch's own is. The next engine has it, and takes it off.
    assert torch.ones(2).numpy().flags.writeable
    model, _, engine = managed()
    assert not model[0].weight.detach().numpy().flags.writeable
    engine.close()
    assert not left()
    assert torch.Tensor.numpy is numpy_of_torch


def test_a_patch_that_was_there_before_is_there_after(numpy_of_torch: Callable[..., Any]) -> None:
    other = Other()
    managed()[2].close()
    assert torch.Tensor.numpy is other.own
    other.leave()
    assert torch.Tensor.numpy is numpy_of_torch


def test_hooks_that_are_entered_under_an_engine_and_left_after_it() -> None:
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    engine = managed()[2]
    hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
    hooks.__enter__()
    engine.close()
    hooks.__exit__(None, None, None)
    torch.ones(2, requires_grad=True).square().sum().backward()
    assert not packed


def in_fork(act: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("module", [patches, gate], ids=["patches", "gate"])
def test_a_child_does_not_wait_for_a_thread_that_it_lacks(module: types.ModuleType) -> None:
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with module._lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def take() -> None:
        assert module._lock.acquire(blocking=False)

    try:
        assert in_fork(take) == 0
    finally:
        over.set()
        thread.join()


def test_a_child_forgets_the_operations_and_engines_of_other_threads() -> None:
    model, _, engine = managed()
    slot = model[0].weight._gm_slot
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with patches.opening(), gate.passing(slot):
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def look() -> None:
        assert slot.readers is None
        assert not gate._passed
        assert not patches._opening

    try:
        with gate.passing(slot):
            assert slot.readers is not None
        assert in_fork(look) == 0
    finally:
        over.set()
        thread.join()
    engine.close()
    assert not left()


def test_an_error_in_the_last_line_of_manage_leaves_no_patch() -> None:
    def stop(frame: Any, event: str, _: Any) -> None:
        names = [each.f_code.co_name for each in (frame, frame.f_back) if each is not None]
        if event == "call" and names == ["discard", "opening"]:
            sys.setprofile(None)
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            try:
                sys.setprofile(stop)
                managed()
            finally:
                sys.setprofile(None)
        gc.collect()
        managed()[2].close()
        assert not left()


# A class that is made of another tensor, and torch before 2.13 as this package knows it.
OLD = """
import torch
import torch.fx.experimental.proxy_tensor
import gemini_strategy
from gemini_strategy.parameters import before_213

before_213.is_needed = lambda: True

class Around(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = [each.inner if isinstance(each, Around) else each for each in args]
        return function(*args, **kwargs or {})

own = vars(Around)["__torch_dispatch__"]
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
before = model.weight.detach() + 1
engine = gemini_strategy.manage(model, optimizer, device="cpu")
around = Around(model.weight.detach())
assert vars(Around)["__torch_dispatch__"] is not own
assert torch.equal(around + 1, before)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
del around
engine.close()
assert vars(Around)["__torch_dispatch__"] is own
assert "_make_wrapper_subclass" not in vars(torch.Tensor)
"""


def test_what_is_patched_for_an_older_torch_goes_too() -> None:
    subprocess.run([sys.executable, "-c", OLD], check=True)


def test_parameters_of_two_classes_are_known_once_and_unknown_after_the_last_close() -> None:
    class Mine(nn.Parameter):
        """Of the script."""

    first, _, engine = managed()
    own = nn.Linear(4, 4)
    own.weight = Mine(own.weight.detach())
    optimizer = torch.optim.AdamW(own.parameters())
    other = gemini_strategy.manage(own, optimizer, device="cpu")
    _, _, last = managed(1)  # all patches are looked at again
    known = vars(torch.fx.experimental.proxy_tensor)["HANDLED_TYPES"]
    assert type(first[0].weight) in known and type(own.weight) in known
    assert len(set(known)) == len(known)
    for each in (engine, other, last):
        each.close()
    assert not left()
