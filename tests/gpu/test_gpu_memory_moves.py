"""Device memory that others take, and needs that change: blocks are given back, plans made again, no bit changes.

The model is the small transformer of test_planned_gpu.py.  Others' memory is real: allocations of the driver beside
torch, in this process or in another one.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import gemini_strategy as gs
from helpers.reference import Plain, Recipe, assert_same_outcome, managed, plain
from test_gpu_exact import MIB, _deterministic, _peak, _release, _used
from test_planned_gpu import (
    CASE,
    FAST_HOST,
    budget_of,
    loss_of,
    recipe_of,
    tokens,
)

pytestmark = pytest.mark.gpu

__all__ = ["_deterministic"]

FEW = 10


@pytest.fixture(autouse=True)
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", FAST_HOST)


def step(run: Plain, number: int, sequences: int = 4, length: int = 64) -> None:
    """One optimizer step of two micro-batches."""
    torch.manual_seed(1000 + number)
    for micro in range(2):
        loss = loss_of(run, tokens(2 * number + micro, sequences, length).to("cuda"))
        run.losses.append(loss.detach().float().cpu().clone())
        run.backward(loss / 2)
    run.finish()


def total_bytes() -> int:
    return torch.cuda.mem_get_info()[1]


@contextlib.contextmanager
def hog(leave: int) -> Iterator[None]:
    """Device memory of the driver, beside torch: all but `leave` bytes."""
    driver = ctypes.CDLL("libcuda.so.1")
    torch.cuda.synchronize()
    size = torch.cuda.mem_get_info()[0] - leave
    address = ctypes.c_uint64()
    torch.cuda.current_stream().query()  # the context is current in this thread
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    try:
        yield
    finally:
        torch.cuda.synchronize()
        assert driver.cuMemFree_v2(address) == 0


HOG = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, free, total, address = (ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64())
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
size = ctypes.c_size_t(free.value - int(sys.argv[1]))
assert cuda.cuMemAlloc_v2(ctypes.byref(address), size) == 0
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def other_process(leave: int) -> Iterator[None]:
    """The same in another process; it ends with the context."""
    with subprocess.Popen(
        [sys.executable, "-c", HOG, str(leave)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.communicate()


@pytest.mark.parametrize("who", [hog, other_process], ids=["here", "there"])
def test_the_device_is_full_although_the_budget_is_not(who) -> None:
    """The batch grows when others hold all but little: torch's memory comes out of our blocks."""
    recipe = recipe_of(0.35, FEW)
    grows = [4, 4, 4, 4, 24, 24, 4, 4, 4, 4]
    reference = plain(CASE.build, recipe)
    for number, sequences in enumerate(grows):
        step(reference, number, sequences)
    want = reference.outcome()
    del reference
    _release()
    run = managed(CASE.build, recipe, device_budget=total_bytes(), chunk_size=2 * MIB)
    with contextlib.closing(run.engine):
        for number in range(4):
            step(run, number, grows[number])
        before = run.engine.stats()
        assert before["planned"]
        with who(leave=64 * MIB):
            step(run, 4, grows[4])
            squeezed = run.engine.stats()
            assert squeezed["plan_breaks"] > 0
            assert squeezed["device_bytes"] < before["device_bytes"]
            step(run, 5, grows[5])
            step(run, 6, grows[6])
        for number in range(7, FEW):
            step(run, number, grows[number])
        assert run.engine.stats()["planned"]
        assert_same_outcome(run.outcome(), want)


@pytest.mark.parametrize("share", [0.35, 0.8])
def test_longer_sequences_than_measured(share: float) -> None:
    recipe = recipe_of(0.35, FEW)
    lengths = [32, 32, 32, 32, 128, 32, 160, 32, 128, 32]
    reference = plain(CASE.build, recipe)
    for number, length in enumerate(lengths):
        step(reference, number, length=length)
    want = reference.outcome()
    del reference
    budget = budget_of(share)
    run = managed(CASE.build, recipe, device_budget=budget, chunk_size=2 * MIB)
    with contextlib.closing(run.engine):
        with _peak(0.005) as peak:
            for number, length in enumerate(lengths):
                step(run, number, length=length)
            torch.cuda.synchronize()
        stats = run.engine.stats()
        assert stats["planned"]
        assert peak[0] <= budget
        assert_same_outcome(run.outcome(), want)


def test_a_larger_evaluation_batch() -> None:
    recipe = recipe_of(0.35, FEW)

    def train(run: Plain) -> list[Tensor]:
        seen = []
        for number in range(FEW):
            step(run, number)
            if number % 4 == 3:
                run.model.eval()
                with torch.no_grad():
                    ids = tokens(9_000 + number, sequences=24, length=128).to("cuda")
                    seen.append(loss_of(run, ids).cpu())
                run.model.train()
        return seen

    reference = plain(CASE.build, recipe)
    want = train(reference)
    outcome = reference.outcome()
    del reference
    budget = budget_of(0.5)
    run = managed(CASE.build, recipe, device_budget=budget, chunk_size=2 * MIB)
    with contextlib.closing(run.engine):
        with _peak(0.005) as peak:
            got = train(run)
            torch.cuda.synchronize()
        assert torch.equal(torch.stack(got), torch.stack(want))
        assert peak[0] <= budget
        assert run.engine.stats()["planned"]
        assert_same_outcome(run.outcome(), outcome)


def test_out_of_memory_and_on() -> None:
    """As a search for the batch size does it: double until torch says it, then train on."""
    from pytorch_lightning.utilities.memory import is_oom_error

    recipe = recipe_of(0.35, FEW)
    reference = plain(CASE.build, recipe)
    for number in range(FEW):
        step(reference, number)
    want = reference.outcome()
    del reference
    budget = budget_of(0.5)
    run = managed(CASE.build, recipe, device_budget=budget, chunk_size=2 * MIB)
    with contextlib.closing(run.engine):
        for number in range(4):
            step(run, number)
        kept, sequences, found = len(run.losses), 4, None
        with _peak(0.005) as peak:
            while found is None:
                sequences *= 2
                assert sequences < 1 << 16
                try:
                    run.engine.backward(loss_of(run, tokens(0, sequences).to("cuda")))
                except torch.OutOfMemoryError as error:
                    found = error
                run.zero_grad()
        assert is_oom_error(found)
        assert any("within device_budget" in note for note in getattr(found, "__notes__", ()))
        del found
        assert sequences > 8  # at least one was granted
        assert peak[0] <= budget
        assert len(run.losses) == kept
        for number in range(4, FEW):
            step(run, number)
        stats = run.engine.stats()
        assert stats["planned"]
        assert_same_outcome(run.outcome(), want)
        # what the attempt took has been given back
        assert run.engine._runtime.memory._on.torch.bytes() < 128 * MIB


@pytest.mark.parametrize("came_from", ["cuda", "cpu"])
def test_copies_lie_with_the_model_and_a_closed_model_where_it_came_from(came_from: str) -> None:
    recipe = recipe_of(None, FEW)
    model = CASE.build().to(came_from)
    optimizer = gs.HybridAdam(model.parameters())
    engine = gs.manage(
        model,
        optimizer,
        device="cuda",
        precision=recipe.precision,
        device_budget=budget_of(0.5),
        chunk_size=2 * MIB,
    )
    ids = tokens(0).to("cuda")
    for _ in range(3):
        engine.backward(loss_of(model, ids))
        optimizer.step()
        optimizer.zero_grad()
    want = {name: value.clone() for name, value in model.state_dict().items()}
    copied, host = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with engine.masters():
        masters = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied.eval()(ids), model.eval()(ids))
    engine.close()
    for other, place in ((copied, "cuda"), (host, "cpu"), (model, came_from)):
        for name, p in other.named_parameters():
            assert p.device.type == place
            assert torch.equal(p.cpu(), want[name])
    assert all(p.device.type == "cpu" for p in masters.parameters())
    for p in model.parameters():
        assert optimizer.state[p]["exp_avg"].device.type == came_from


def test_a_deep_copy_that_does_not_fit() -> None:
    """torch's own error with the way out, the budget holds, and training goes on with the same bits."""
    recipe = recipe_of(None, FEW)
    reference = plain(CASE.build, recipe)
    for number in range(FEW):
        step(reference, number)
    want = reference.outcome()
    del reference
    _release()
    budget = budget_of(0.5)
    run = managed(CASE.build, recipe, device_budget=budget, chunk_size=2 * MIB)
    with contextlib.closing(run.engine):
        for number in range(4):
            step(run, number)
        copies: list[nn.Module] = []
        with _peak(0.005) as peak, pytest.raises(torch.OutOfMemoryError) as caught:
            while True:
                assert len(copies) < 1000
                copies.append(copy.deepcopy(run.model))
        assert any("on the host" in note for note in caught.value.__notes__)
        del caught
        copies.clear()
        assert peak[0] <= budget
        for number in range(4, FEW):
            step(run, number)
        assert_same_outcome(run.outcome(), want)


def test_below_the_floor() -> None:
    """Numbers, and the way out, where a module's weights do not fit; the device is as before.

    The first time loads kernels, and takes cuBLAS's workspaces: those are torch's own.
    """
    _release()
    budget = _used() + 136 * MIB
    used = []
    for _ in range(2):
        with pytest.raises(
            gs.GeminiMemoryError, match=r"needs [\d.]+ [MG]B .* at least [\d.]+ [MG]B"
        ):
            managed(
                lambda: nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 16)),
                Recipe(device="cuda"),
                device_budget=budget,
            )
        _release()
        used.append(_used())
    assert used[1] <= used[0] + 4 * MIB


def test_torch_holds_what_a_step_needs() -> None:
    """Tensors of growing sizes, one after the other, do not leave a segment each.

    cuBLAS's workspaces, which stay for good and do not exist yet, are not to lie in one of the five.
    """

    class Growing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for size in (100, 150, 200, 250, 300):
                torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
            return super().forward(x)

    run = managed(lambda: Growing(256, 256), Recipe(device="cuda"))
    with contextlib.closing(run.engine):
        pool = run.engine._runtime.memory._on.torch._pool
        for _ in range(3):
            run(torch.ones(8, 256, device="cuda")).sum().backward()
            run.finish()
        assert pool.peak_bytes() >= 1000 * MIB
        assert pool.bytes() <= 420 * MIB
