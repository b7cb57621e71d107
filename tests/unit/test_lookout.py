"""Calls that only some ranks make: a notice while the others may be slow, an error at once where ranks wait for each
other, and both begin with where every rank is, in the words of its program.

How long a rank waits before it asks is patched, and no test looks at a clock: a rank that sits out its timeout fails.
"""

from __future__ import annotations

import gc
import io
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini_strategy as gs
from gemini_strategy.ranks import lookout
from gemini_strategy.ranks.places import place_of
from helpers.ranks import run_ranks, values

PATIENT = 900.0  # longer than run_ranks waits: whoever sits out this timeout fails
FEW = "all ranks have to make the same calls in the same order, also those that only read"


def impatient(notice: float = PATIENT) -> None:
    lookout.LOOK_SECONDS, lookout.ASK_SECONDS, lookout.NOTICE_SECONDS = 0.05, 0.2, notice


class Run:
    """Two steps of training."""

    def __init__(self, timeout: float = PATIENT, **how: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        optimizer = torch.optim.AdamW(self.model.parameters())
        self.optimizer = optimizer
        self.engine = gs.manage(
            self.model, optimizer, device="cpu", device_budget="80kB", timeout=timeout, **how
        )
        for _ in range(2):
            self.step()

    def step(self) -> None:
        self.model(torch.ones(2, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            return self.model(torch.ones(2, 64))

    def read(self) -> None:
        self.model[0].weight.sum()

    def use_layer(self) -> None:
        self.model[2](torch.ones(2, 64))


CALLS: dict[str, tuple[Callable[[Run], Any], str]] = {
    "evaluate": (Run.evaluate, "rank 0 evaluates the model (test_lookout.py, line "),
    "read": (Run.read, "rank 0 reads or writes 0.weight (test_lookout.py, line "),
    "layer": (Run.use_layer, "rank 0 uses a module or a parameter of the model (test_lookout.py, "),
    "step": (Run.step, "rank 0 is in the model's forward (test_lookout.py, line "),
}


def check_call(rank: int, size: int, name: str) -> str:
    impatient()
    run = Run()
    with pytest.raises(gs.GeminiError) as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 0:
            CALLS[name][0](run)
        run.engine.close()
        # close() tells by a warning what kept it from the others: it is what this test wants as an error.
        run.engine.ranks.check()
    assert type(found.value) is gs.GeminiError
    return str(found.value)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_one_rank_while_the_other_closes(name: str, tmp_path: Path) -> None:
    found = values(run_ranks(2, tmp_path, check_call, name))
    assert found[0].startswith(CALLS[name][1])
    assert "rank 1 is in engine.close() (test_lookout.py, line " in found[0]
    assert found[1].startswith("rank 1 is in engine.close() (test_lookout.py, line ")
    for text in found:
        fact, _, numbers = text.partition(f": {FEW}")
        assert numbers and "all_gather" not in fact and "number" not in fact
        assert "close(), when each rank has the whole model" in numbers
        assert "all_gather number" in numbers


def check_backward(rank: int, size: int) -> str:
    """Gemini's part of it is under torch's own, which no call of ours surrounds."""
    impatient()
    run = Run()
    x = torch.ones(2, 64)
    losses = [run.model(x).sum() for _ in range(2)]
    losses[0].backward()
    with pytest.raises(gs.GeminiError) as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 0:
            losses[1].backward()
        run.engine.close()
        run.engine.ranks.check()
    return str(found.value)


def test_a_backward_of_one_rank(tmp_path: Path) -> None:
    first, second = values(run_ranks(2, tmp_path, check_backward))
    assert "rank 0 is in a backward (test_lookout.py, line " in first.partition(FEW)[0]
    assert second.startswith("rank 1 is in engine.close() (test_lookout.py, line ")


def check_barrier(rank: int, size: int) -> str:
    """`if rank == 0: evaluate()`, and a barrier of torch.distributed behind it, as many programs have it."""
    impatient()
    run = Run()
    text = ""
    if rank == 0:
        with pytest.raises(gs.GeminiError) as found:
            run.evaluate()
        text = str(found.value)
    dist.barrier()
    with pytest.warns(RuntimeWarning):
        run.engine.close()
    return text


def test_a_barrier_of_torch(tmp_path: Path) -> None:
    text, _ = values(run_ranks(2, tmp_path, check_barrier))
    assert text.startswith("rank 0 evaluates the model (test_lookout.py, line ")
    assert "rank 1 is in torch.distributed.barrier() (test_lookout.py, line " in text


class Told(io.StringIO):
    """Where a notice is written; others see that it has been."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def write(self, text: str) -> int:
        n = super().write(text)
        if "has waited for" in text:
            self.file.touch()
        return n


def do_something_else(until: Path, seconds: float = 0.0) -> None:
    """And for so long after it."""
    while not until.exists():
        time.sleep(0.01)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def check_slow(rank: int, size: int, folder: str) -> tuple[list[list[float]], str]:
    """Rank 1 comes after the notice: nothing else has happened. In a subgroup's barrier rank 0 has no part."""
    impatient(notice=0.3)
    run = Run()
    found, told = [], ""
    for turn in range(2):
        file = Path(folder) / f"told{turn}"
        sys.stderr = Told(file)
        if rank == 1:
            do_something_else(file, seconds=0.5)
        found.append(run.evaluate()[0].tolist())
        run.model.train()
        run.step()
        told += sys.stderr.getvalue()
        sys.stderr = sys.__stderr__
    run.engine.close()
    return found, told


def test_who_is_slow_is_waited_for(tmp_path: Path) -> None:
    (found, told), (other, _) = values(run_ranks(2, tmp_path, check_slow, str(tmp_path)))
    assert found == other
    # One for each wait; on a busy machine a step makes other waits long, too.
    assert told.count("in do_something_else: ") == 2
    assert told.startswith("Gemini: rank 0 has waited for ")
    assert "rank 0 evaluates the model (test_lookout.py, line " in told
    assert "rank 1 is outside Gemini (test_lookout.py, line " in told
    assert "in do_something_else: time.sleep(0.01)" in told


def check_timeout(rank: int, size: int, folder: str, timeout: float) -> str:
    """Rank 1 is outside Gemini for good: at the timeout, which is short here, the plain fact comes first."""
    impatient()
    run = Run(timeout=timeout)
    asked_for = lookout.Lookout.fact

    def looks_once_more(self: lookout.Lookout) -> str | None:
        self._look()  # its thread may, between the failure and its text
        return asked_for(self)

    lookout.Lookout.fact = looks_once_more  # type: ignore[method-assign]
    file = Path(folder) / "over"
    if rank == 1:
        do_something_else(file)
    text = ""
    if rank == 0:
        with pytest.raises(gs.GeminiDeviceError) as found:
            run.evaluate()
        text = str(found.value)
    file.touch()
    with pytest.warns(RuntimeWarning):
        run.engine.close()
    return text


def test_a_timeout_begins_with_the_fact(tmp_path: Path) -> None:
    """Where a machine is too busy for rank 1 to answer in so short a time, a longer one is taken."""
    for seconds in (2, 8, 32, 100):
        folder = tmp_path / f"{seconds}"
        folder.mkdir()
        text, _ = values(run_ranks(2, folder, check_timeout, str(folder), float(seconds)))
        assert f"rank 1 has not sent its bytes after {seconds} s" in text
        if f": {FEW}" in text:
            break
    assert text.startswith("rank 0 evaluates the model (test_lookout.py, line ")
    fact, _, rest = text.partition(f": {FEW}")
    assert "rank 1 is outside Gemini" in fact and "has not sent its bytes" in rest


def check_end(rank: int, size: int) -> None:
    """A lookout ends with its run: closed, or dropped."""
    impatient()

    def lookouts() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "gemini-lookout"]

    run = Run()
    (thread,) = lookouts()
    run.engine.close()
    thread.join()
    run = Run()
    (thread,) = lookouts()
    del run
    while thread.is_alive():
        gc.collect()
        thread.join(0.01)
    assert not lookouts()


def test_a_lookout_ends_with_its_run(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_end))


def test_places_are_of_the_program() -> None:
    here = place_of(None).words
    assert here.startswith("is outside Gemini (test_lookout.py, line ")
    assert here.endswith("in test_places_are_of_the_program: here = place_of(None).words)")
