"""engine.save(folder, background=True): the bits of the step at which it was asked for, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.checkpoint import background, manifest
from gemini_strategy.checkpoint import folder as folders
from gemini_strategy.checkpoint.records import RecordFile
from helpers import chaos
from helpers.forked import Forks
from helpers.pairs import pairs, turns
from helpers.reference import Recipe, assert_same_outcome, drive, train_plain
from helpers.saving import Gate, contents, make, state_of, train
from helpers.scenario import RATES, budgeted
from helpers.scripts import run_to_the_end
from helpers.zoo import mlp_case

CASE = mlp_case(width=48, depth=4, p=0.1)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


# ---- the bits of its step ------------------------------------------------------------------------


HOWS: dict[str, dict[str, Any]] = {
    "streamed": {"share": 0.3},
    "half of it": {"share": 0.7},
    "resident": {"share": 1.5},
    "cpu": {"share": 0.6, "placement_policy": "cpu"},
    "cuda": {"share": 9.0, "placement_policy": "cuda"},
}
FAST, SLOW = RATES["as measured"], RATES["slow host"]
CASES = [  # all five classes, under both schedules
    *(("bf16-true", how, False, FAST) for how in HOWS),
    *(("bf16-true", how, True, SLOW) for how in HOWS if how != "cuda"),
    ("32-true", "streamed", False, FAST),
    ("32-true", "half of it", True, FAST),
    ("16-mixed", "cpu", False, FAST),
]


@pytest.mark.core
@pytest.mark.parametrize(("precision", "how", "says_step", "rates"), CASES)
def test_the_bits_are_those_of_the_call(
    precision: str,
    how: str,
    says_step: bool,
    rates: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gate: Gate,
) -> None:
    """Some pieces are written before the next step, some after each: on a device that runs late and out of order."""
    monkeypatch.setenv("GEMINI_RATES", rates)
    chaos.late(monkeypatch, 7)
    recipe = Recipe(precision=precision, steps=6)
    for name in ("front", "back"):  # of two engines: saving issues what waits
        run = budgeted(CASE, recipe, chunk_size=4096, **HOWS[how])
        engine = run.engine
        if says_step:
            run.backward = functools.partial(engine.backward, step=True)
        drive(run, CASE, 3)
        torch.manual_seed(5)
        if name == "front":
            engine.save(tmp_path / "front", {"mine": torch.ones(3)})
            engine.close()
    saving = engine.save(tmp_path / "back", {"mine": torch.ones(3)}, background=True)
    gate.reached.acquire()
    for step in range(3, 6):
        gate.let(1)
        drive(run, CASE, 1, step)
    assert not saving.done and not (tmp_path / "back").exists()
    gate.open()
    assert saving.wait() == tmp_path / "back"
    assert saving.copied_bytes > 0
    assert contents(tmp_path / "back") == contents(tmp_path / "front")
    assert chaos.faults() == (0, "")
    engine._runtime.core.check()
    assert_same_outcome(run.outcome(), train_plain(CASE, recipe)[1])
    engine.close()


def test_copies_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """Without room for a second copy a step waits until the first one has been written, and no longer."""
    monkeypatch.setattr(background, "_SHARE", 0.0)
    with make(chunk_size=2048) as engine:
        train(engine, 2)
        engine.save(tmp_path / "front")
        saving = engine.save(tmp_path / "back", background=True)
        gate.reached.acquire()
        ended = threading.Event()

        def go_on() -> None:
            with contextlib.suppress(Exception):
                while not ended.wait(0.001):
                    if engine._runtime.core.save_next() >= 0:
                        break
            gate.open()

        helper = threading.Thread(target=go_on)
        helper.start()
        train(engine, 2)
        ended.set()
        helper.join()
        saving.wait()
        assert saving.copied_bytes > saving.most_bytes > 0
        stats = engine.stats()
        assert saving.most_bytes * stats["chunks"] >= saving.copied_bytes
        assert contents(tmp_path / "back")[0] == contents(tmp_path / "front")[0]


def test_nothing_is_copied_that_does_not_change(tmp_path: Path, gate: Gate) -> None:
    with make(chunk_size=2048) as engine:
        train(engine, 2)
        saving = engine.save(tmp_path / "saved", background=True)
        gate.reached.acquire()
        engine.model.eval()
        engine.model(torch.randn(4, 13).bfloat16())
        engine.model_state_dict()
        float(engine.model.transposed.detach().float().sum())
        engine.model.transposed.detach().view(torch.int16).numpy()  # a copy
        gate.open()
        saving.wait()
        assert (saving.copied_bytes, saving.most_bytes, saving.waits) == (0, 0, 0)


def test_memory_that_is_shown_is_taken_for_changed(tmp_path: Path, gate: Gate) -> None:
    """Nobody would know that it was written."""
    with make(chunk_size=2048) as engine:
        train(engine, 2)
        engine.save(tmp_path / "front")
        saving = engine.save(tmp_path / "back", background=True)
        gate.reached.acquire()
        with engine.full_parameters():
            pass
        gate.open()
        saving.wait()
        assert saving.copied_bytes > 0
        assert contents(tmp_path / "back")[0] == contents(tmp_path / "front")[0]


def _write_full(engine: gs.Engine) -> None:
    with engine.full_parameter(engine.model.a.weight) as values:
        values.add_(1.0)


def _write_masters(engine: gs.Engine) -> None:
    with engine.masters(), torch.no_grad():
        engine.model.scalar.mul_(3.0)


def _write_moment(engine: gs.Engine) -> None:
    engine.optimizer.state[engine.model.a.weight]["exp_avg"].fill_(2.0)


def _write_outside(engine: gs.Engine) -> None:
    with torch.no_grad():
        engine.model.a.bias.fill_(4.0)
        engine.model.frozen.data.fill_(7.0)


def _write_shown(engine: gs.Engine) -> None:
    with engine.full_parameters(), torch.no_grad():
        engine.model.a.weight.zero_()


def _load_state(engine: gs.Engine) -> None:
    engine.load_state_dict({k: _other(v) for k, v in engine.state_dict().items()})


def _other(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value + 1 if value.is_floating_point() else value
    return {k: _other(v) for k, v in value.items()} if isinstance(value, dict) else value


def _change_buffers(engine: gs.Engine) -> None:
    engine.model.norm.running_mean.add_(1.0)
    engine.model.calls += 5
    engine.optimizer.param_groups[0]["lr"] = 9.0
    torch.manual_seed(77)


WRITES = [
    _write_full,
    _write_masters,
    _write_moment,
    _write_outside,
    _write_shown,
    _load_state,
    _change_buffers,
]


@pairs(write=WRITES, policy=["cpu", "cuda"], precision=["bf16-true", "32-true"])
def test_what_a_person_writes_meanwhile(
    write: Callable[[gs.Engine], None], precision: str, policy: str, tmp_path: Path, gate: Gate
) -> None:
    """Into masters, moments, buffers, groups: the checkpoint has what there was."""
    with make(precision=precision, placement_policy=policy, chunk_size=2048) as engine:
        train(engine, 2)
        torch.manual_seed(3)
        engine.save(tmp_path / "front", [1])
        mine = [1]
        saving = engine.save(tmp_path / "back", mine, background=True)
        mine.append(2)
        gate.reached.acquire()
        gate.let(2)
        try:
            before = state_of(engine)
            write(engine)
            assert state_of(engine) != before or write is _change_buffers
        finally:
            gate.open()
        saving.wait()
        assert contents(tmp_path / "back") == contents(tmp_path / "front")


class Renormed(nn.Module):
    """Writes its own weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(13, 1)  # it is read first, before the writer waits
        self.table = nn.Embedding(9, 13, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.table(torch.arange(9))).sum()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(5))

    def forward(self) -> float:
        with torch.no_grad():
            self.count.add_(1.0)
        return float(self.count.detach().numpy().sum())


class Added(nn.Module):
    """It writes a weight, and looks at it before its module ends: what is copied then are not the old bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(13, 1)  # it is read first, before the writer waits
        self.counter = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(torch.ones(2, 13)).sum() * self.counter()


@pytest.mark.parametrize("policy", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("build", "name", "precision"),
    [
        (Renormed, "table.weight", "bf16-true"),
        (Renormed, "table.weight", "32-true"),
        (Added, "counter.count", "32-true"),
    ],
)
def test_weights_that_a_module_writes_itself(
    build: Callable[[], nn.Module],
    name: str,
    precision: str,
    policy: str,
    tmp_path: Path,
    gate: Gate,
) -> None:
    """The bits of the call, or an error with the parameter's name; from the second time on the bits."""
    with make(build=build, precision=precision, placement_policy=policy) as engine:
        outcomes = []
        for time in range(3):
            with engine.full_parameter(engine.model.get_parameter(name)) as values:
                values.fill_(3.0 + time)
            engine.save(tmp_path / "front")
            saving = engine.save(tmp_path / f"back{time}", background=True)
            gate.reached.acquire()
            engine.model(torch.zeros(1))
            gate.open()
            try:
                saving.wait()
                assert contents(tmp_path / f"back{time}") == contents(tmp_path / "front")
                outcomes.append("right")
            except gs.GeminiError as error:
                assert f"{name}: its module wrote it in place" in str(error)
                outcomes.append("refused")
            gate.close()
        assert outcomes[1:] == ["right", "right"]
        has_home = policy == "cpu"  # all fits: only there the old bytes are somewhere else
        assert outcomes[0] == "right" or (precision == "32-true" and not has_home)


# ---- handles, errors and ends --------------------------------------------------------------------


def test_a_series_moves_when_it_is_on_the_disk(tmp_path: Path, gate: Gate) -> None:
    with make() as engine:
        train(engine, 1)
        engine.save(tmp_path / "run", 1, keep_last=1)
        train(engine, 1)
        saving = engine.save(tmp_path / "run", 2, keep_last=1, background=True)
        gate.reached.acquire()
        latest = tmp_path / "run" / "latest"
        assert not saving.done and latest.readlink().name == "step-000000001"
        assert "being written" in repr(saving)
        gate.open()
        assert saving.wait() == saving.folder == tmp_path / "run" / "step-000000002"
        assert saving.done and "on the disk" in repr(saving)
        assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["latest", "step-000000002"]
        assert engine.load(tmp_path / "run") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


NEXT: dict[str, Callable[[gs.Engine, Path], Any]] = {
    "save": lambda engine, path: engine.save(path / "next"),
    "background": lambda engine, path: engine.save(path / "next", background=True),
    "load": lambda engine, path: engine.load(path / "old"),
    "close": lambda engine, path: engine.close(),
}


@pytest.mark.parametrize("what", NEXT)
def test_what_comes_next_waits(what: str, tmp_path: Path, gate: Gate) -> None:
    """Whatever it is: what was being written is there before it."""
    engine = make()
    train(engine, 1)
    engine.save(tmp_path / "old", "old")
    saving = engine.save(tmp_path / "saved", "new", background=True)
    gate.reached.acquire()
    helper = threading.Timer(0.05, gate.open)
    helper.start()
    NEXT[what](engine, tmp_path)
    assert saving.done and saving.wait() == tmp_path / "saved"
    engine.close()
    with make(seed=6) as other:
        assert other.load(tmp_path / "saved") == "new"
        assert what in ("load", "close") or other.load(tmp_path / "next") is None


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("what", ["wait", *NEXT])
def test_an_interrupted_wait_ends_nothing(what: str, tmp_path: Path, gate: Gate) -> None:
    """Who waits again waits for the writer, which has gone on."""
    engine = make()
    train(engine, 1)
    engine.save(tmp_path / "old", "old")
    saving = engine.save(tmp_path / "saved", "new", background=True)
    gate.reached.acquire()
    ask = NEXT.get(what, lambda *_: saving.wait())
    before = signal.signal(signal.SIGALRM, _interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            ask(engine, tmp_path)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not saving.done and not (tmp_path / "saved").exists()
    threading.Timer(0.05, gate.open).start()
    assert saving.wait() == tmp_path / "saved"
    engine.close()
    with make(seed=6) as other:
        assert other.load(tmp_path / "saved") == "new"


@turns(what=NEXT, where=["piece", "fsync", "manifest", "rename"])
def test_an_error_is_raised_once(
    what: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """By what comes next, with the file; the old checkpoint is whole, training goes on, nothing is left."""
    full = OSError(28, "No space left on device", "there")

    def fail(*_: Any, **__: Any) -> None:
        raise full

    engine, other = make(), make(seed=3)
    train(engine, 1)
    engine.save(tmp_path / "old", "old")
    engine.save(tmp_path / "saved", "before")
    before = contents(tmp_path / "saved")
    with monkeypatch.context() as patch:
        if where == "fsync":
            patch.setattr(RecordFile, "finish", fail)
        elif where == "manifest":
            patch.setattr(manifest, "write", fail)
        elif where == "rename":
            patch.setattr(folders, "rename_exchange", fail)
        saving = engine.save(tmp_path / "saved", "new", background=True)
        gate.reached.acquire()
        train(engine, 1)
        gate.open(full if where == "piece" else None)
        saving.join()
        gate.error = None
    text = r"saving .*saved: .*No space left on device: 'there'"
    with pytest.raises(gs.GeminiError, match=text):
        NEXT[what](engine, tmp_path)
    assert saving.done and engine.closed == (what == "close")
    assert contents(tmp_path / "saved") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old", "saved"]
    with pytest.raises(gs.GeminiError, match=text):
        saving.wait()
    if what != "close":
        train(engine, 1)
        assert engine.save(tmp_path / "saved", "again", background=True).wait().name == "saved"
        engine.close()
        assert other.load(tmp_path / "saved") == "again"
    other.close()


def test_an_error_while_another_is_handled(tmp_path: Path, gate: Gate) -> None:
    with (
        pytest.warns(RuntimeWarning, match=r"a checkpoint was not written: .*No space left"),
        pytest.raises(KeyError, match="mine"),
        make() as engine,
    ):
        engine.save(tmp_path / "saved", background=True)
        gate.reached.acquire()
        gate.open(OSError(28, "No space left on device"))
        raise KeyError("mine")
    assert engine.closed and not list(tmp_path.iterdir())


def test_what_cannot_begin_leaves_nothing(tmp_path: Path) -> None:
    with make() as engine:
        train(engine, 1)
        with pytest.raises(gs.GeminiError, match="extra"):
            engine.save(tmp_path / "saved", object(), background=True)
        assert not list(tmp_path.iterdir()) and engine._runtime.saving is None
        train(engine, 1)
        engine.save(tmp_path / "saved", background=True).wait()


# ---- the end of the process ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks((Path(__file__).parent,), (Path(__file__).stem,)) as forks:
        yield forks


def killed_at_piece(folder: str, n: int) -> None:
    """Trains on while it writes, and is killed at the n-th piece, or after the rename."""
    engine = make()
    train(engine, 2)
    add, done = RecordFile.add, [0]

    def counted(file: RecordFile, value: torch.Tensor) -> Any:
        done[0] += threading.current_thread() is not threading.main_thread()
        if done[0] == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return add(file, value)

    RecordFile.add = counted  # type: ignore[method-assign]
    saving = engine.save(Path(folder) / "saved", "new", background=True)
    train(engine, 3)
    saving.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def test_kill_while_it_writes(tmp_path: Path, forks: Forks) -> None:
    with make() as engine:
        train(engine, 1)
        engine.save(tmp_path / "saved", "old")
        old = contents(tmp_path / "saved")
        for n in (1, 2, 5, 11, 10**6):
            ended = forks.run(f"{__name__}:killed_at_piece", str(tmp_path), n)[0]
            assert ended.exit_code == -9, ended.how
            assert engine.load(tmp_path / "saved") == ("new" if n == 10**6 else "old")
            assert (contents(tmp_path / "saved") == old) == (n < 10**6)


IMPORTS = """
import sys, threading
import torch._dynamo, torch.distributed.checkpoint
from helpers.saving import make, train
from gemini_strategy.checkpoint.records import RecordFile
"""
PROGRAM = """
folder, fails = {given}
engine = make()
train(engine, 2)
engine.save(folder + "/front")
add = RecordFile.add
leaving = threading.Event()
threading._register_atexit(leaving.set) if hasattr(threading, "_register_atexit") else leaving.set()

def late(file, value):
    if threading.current_thread() is not threading.main_thread():
        leaving.wait()
        if fails:
            raise OSError(28, "No space left on device")
    return add(file, value)

RecordFile.add = late
engine.save(folder + "/back", background=True)
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, Any]]:
    folders = {fails: tmp_path_factory.mktemp(f"fails_{fails}") for fails in (False, True)}
    programs = {
        str(fails): PROGRAM.replace("{given}", repr((str(folder), fails)))
        for fails, folder in folders.items()
    }
    ended = run_to_the_end(tmp_path_factory.mktemp("ends"), programs, IMPORTS)
    return {fails: (folder, ended[str(fails)]) for fails, folder in folders.items()}


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_the_program_waits(fails: bool, ends: dict[bool, tuple[Path, Any]]) -> None:
    """It writes while the interpreter ends; an error that nobody has asked for is said."""
    folder, ended = ends[fails]
    assert ended.returncode == 0, ended.stderr
    if fails:
        assert "a checkpoint was not written" in ended.stderr and "No space left" in ended.stderr
        assert [p.name for p in folder.iterdir()] == ["front"]
    else:
        assert contents(folder / "back") == contents(folder / "front")
