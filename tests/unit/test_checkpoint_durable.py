"""engine.save: folders that are whole or not there, whatever fails or is killed, and what the host holds meanwhile."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.checkpoint import folder as folders
from gemini_strategy.checkpoint import one_file
from gemini_strategy.checkpoint.parts import MOST_ELEMENTS
from gemini_strategy.checkpoint.records import RecordFile
from helpers.forked import Ended, Forks
from helpers.saving import make, peak_resident_bytes, state_of, train

# ---- whole or not there --------------------------------------------------------------------------


def test_a_series_keeps_the_last(tmp_path: Path) -> None:
    with make() as engine:
        for step in range(1, 6):
            train(engine, 1)
            assert engine.save(tmp_path / "run", step, keep_last=2).name == f"step-{step:09d}"
            assert str((tmp_path / "run" / "latest").readlink()) == f"step-{step:09d}"
        assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
            "latest",
            "step-000000004",
            "step-000000005",
        ]
        assert engine.load(tmp_path / "run") == 5
        assert engine.load(tmp_path / "run" / "step-000000004") == 4
        with pytest.raises(ValueError, match="keep_last=0"):
            engine.save(tmp_path / "run", keep_last=0)


def die_in_a_series(folder: str) -> None:
    engine = make(build=Small)
    train(engine, 1)
    engine.save(folder, keep_last=1)
    train(engine, 1)
    folders.put = lambda draft, target: os.kill(os.getpid(), signal.SIGKILL)
    engine.save(folder, keep_last=1)


def test_a_series_keeps_nothing_of_a_killed_save(tmp_path: Path, forks: Forks) -> None:
    """The next save is of another step, and so has another name."""
    run = tmp_path / "run"
    assert forks.run(f"{__name__}:die_in_a_series", str(run))[0].exit_code == -signal.SIGKILL
    assert len(list(run.glob(".step-000000002.saving-*"))) == 1
    with make(build=Small) as engine:
        engine.load(run)
        train(engine, 2)
        engine.save(run, keep_last=1)
    assert sorted(p.name for p in run.iterdir()) == ["latest", "step-000000003"]


class _Calls:
    """Counts the calls that change files, and does something at the n-th."""

    NAMES = ("open", "fsync", "rename", "replace", "mkdir", "symlink", "rmdir", "unlink")

    def __init__(self, patch: pytest.MonkeyPatch, n: int, what: Callable[[], None]) -> None:
        self.count, self._n, self._what = 0, n, what
        for name in self.NAMES:
            patch.setattr(os, name, self._watched(getattr(os, name)))
        patch.setattr(folders, "rename_exchange", self._watched(folders.rename_exchange))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self._n:
                self._what()
            return call(*args, **kwargs)

        return watched


def _fail() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("is_new", [True, False])
def test_an_error_at_every_call(
    is_new: bool, can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old checkpoint stays, or the new one is there; nothing is left behind; training goes on to the same bits."""
    if not can_exchange:
        monkeypatch.setattr(folders, "rename_exchange", lambda a, b: False)
    target = tmp_path / "saved"
    with make() as engine, make(seed=8) as reader:
        train(engine, 1)
        if not is_new:
            engine.save(target, "old")
        train(engine, 1)
        n = outcomes = 0
        while True:
            n += 1
            random_numbers = torch.get_rng_state()
            with monkeypatch.context() as patch:
                calls = _Calls(patch, n, _fail)
                try:
                    engine.save(target, "new")
                    error = None
                except gs.GeminiError as raised:
                    error = raised
            assert torch.equal(torch.get_rng_state(), random_numbers)
            if error is None and calls.count < n:
                break
            outcomes += error is not None
            assert error is None or "No space left on device" in str(error), error
            found = None
            with contextlib.suppress(gs.GeminiError):
                found = reader.load(target)
            assert found in (("new", None) if is_new else ("new", "old")), (n, found)
            assert error is not None or found == "new"
            if is_new:
                shutil.rmtree(target, ignore_errors=True)
        assert n > 10 and outcomes > 8
        shutil.rmtree(target, ignore_errors=True)
        engine.save(target, "new")
        assert [p.name for p in tmp_path.iterdir()] == ["saved"]
        assert reader.load(target) == "new"


def test_the_order_in_which_it_becomes_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file, then the folder, then its name, then the folder that it is in; the manifest is the last file."""
    done: list[tuple[str, str]] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        done.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        real_fsync(descriptor)

    def rename(a: Any, b: Any) -> None:
        done.append(("rename", Path(b).name))
        assert {p.name for p in Path(a).iterdir()} == {n for what, n in done if what == "fsync"} - {
            Path(a).name
        }
        real_rename(a, b)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    with make() as engine:
        engine.save(tmp_path / "saved")
    names = [name for what, name in done]
    assert done[-2:] == [("rename", "saved"), ("fsync", tmp_path.name)]
    assert names[0] == "__0_0.distcp" and names[-4] == "manifest.json"
    assert names[-3].startswith(".saved.saving-")


# ---- kill -9 -------------------------------------------------------------------------------------

N_KILLS = int(os.environ.get("KILLS", "80"))  # in four runs


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks((Path(__file__).parent,), (Path(__file__).stem,)) as forks:
        yield forks


class Small(nn.Module):
    """An engine of it is made in a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(13, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(x)).square().sum()


def save_until_killed(folder: str, seed: int) -> None:
    """Goes on from what is there, trains and saves until a timer ends the process at a random moment of three saves."""
    engine = make(seed=1, build=Small)
    target = Path(folder) / "saved"
    step = 0
    with contextlib.suppress(gs.GeminiError):
        step = engine.load(target)
    began = time.monotonic()
    engine.save(Path(folder) / "scratch")
    seconds = time.monotonic() - began
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process at once, wherever it is
    signal.setitimer(signal.ITIMER_REAL, 3 * seconds * random.Random(seed).random() + 1e-4)
    while True:
        torch.manual_seed(step)
        train(engine, 1)
        step += 1
        engine.save(target, step)


def digest_of(engine: gs.Engine) -> str:
    return hashlib.sha256(repr(state_of(engine)[2:]).encode()).hexdigest()


def digests(n: int) -> list[str]:
    """Of the uninterrupted run, before each step and after the last. In a fork, as the others: with one thread."""
    engine = make(1, Small)
    result = [digest_of(engine)]
    for step in range(n):
        torch.manual_seed(step)
        train(engine, 1)
        result.append(digest_of(engine))
    return result


def _drafts(folder: Path) -> set[Path]:
    return set(folder.glob(".saved.saving-*"))


def _moment(new: set[Path]) -> str:
    """At which a process was killed, by the folders that it has left."""
    if not new:
        return "between saves"
    is_whole = any((draft / "manifest.json").exists() for draft in new)
    return "beside a whole folder" if is_whole else "beside an unfinished folder"


@pytest.mark.parametrize("part", range(4))
def test_kill_at_any_moment_loses_no_checkpoint(part: int, tmp_path: Path, forks: Forks) -> None:
    """Each process goes on from what the one before has left: the state of the step that it says, to the bit.

    Prints (`pytest -rP`) at which moments the kills came.
    """
    n = N_KILLS // 4
    moments: Counter[str] = Counter()
    ended = forks.run(f"{__name__}:digests", 4 * n + 4)[0]
    assert ended.value is not None, ended.how
    want, reached = ended.value, 0
    with make(2, Small) as reader:
        for kill in range(part * n, part * n + n):
            before = _drafts(tmp_path)
            ended = forks.run(f"{__name__}:save_until_killed", str(tmp_path), kill)[0]
            assert ended.exit_code == -signal.SIGALRM, ended.how
            moments[_moment(_drafts(tmp_path) - before)] += 1
            try:
                step = reader.load(tmp_path / "saved")
            except gs.GeminiError:
                assert reached == 0, "a checkpoint is lost"
                continue
            assert step >= reached
            assert digest_of(reader) == want[step], f"after kill {kill}, at step {step}"
            reached = step
        assert reached > n // 4, reached
        left = [p for p in tmp_path.iterdir() if p.name.startswith(".")]
        assert len(left) <= 2  # of the last one, and of its scratch
    print(
        f"{n} kills, at step {reached} in the end, 0 checkpoints lost:",
        dict(sorted(moments.items())),
    )


def kill_at_call(folder: str, n: int, can_exchange: bool) -> int:
    engine = make(build=Small)
    patch = pytest.MonkeyPatch()
    if not can_exchange:
        patch.setattr(folders, "rename_exchange", lambda a, b: False)
    train(engine, 2)
    calls = _Calls(patch, n, lambda: os.kill(os.getpid(), signal.SIGKILL))
    engine.save(Path(folder) / "saved", "new")
    return calls.count


@pytest.mark.parametrize("can_exchange", [True, False])
def test_kill_at_every_call(can_exchange: bool, tmp_path: Path, forks: Forks) -> None:
    with make(build=Small) as engine:
        train(engine, 1)
        engine.save(tmp_path / "old", "old")
        found = set()
        for n in range(1, 1000):
            shutil.rmtree(tmp_path / "saved", ignore_errors=True)
            for left in tmp_path.glob(".saved*"):
                folders.remove(left)
            shutil.copytree(tmp_path / "old", tmp_path / "saved")
            ended: Ended = forks.run(f"{__name__}:kill_at_call", str(tmp_path), n, can_exchange)[0]
            found.add(engine.load(tmp_path / "saved"))
            if ended.exit_code == 0:
                break
            assert ended.exit_code == -9, ended.how
        assert n > 10 and found == {"old", "new"}


def kill_file_at_call(folder: str, n: int, can_exchange: bool) -> int:
    patch = pytest.MonkeyPatch()
    if not can_exchange:
        patch.setattr(folders, "rename_exchange", lambda a, b: False)
    calls = _Calls(patch, n, lambda: os.kill(os.getpid(), signal.SIGKILL))
    one_file.write({"new": torch.ones(3)}, Path(folder) / "saved")
    return calls.count


@pytest.mark.parametrize("can_exchange", [True, False])
def test_kill_where_a_file_takes_a_folders_place(
    can_exchange: bool, tmp_path: Path, forks: Forks
) -> None:
    """The folder is whole, or the file is; what was there before anything else goes."""
    target = tmp_path / "run" / "saved"
    with make(build=Small) as engine:
        train(engine, 1)
        engine.save(tmp_path / "old", "old")
        found = set()
        for n in range(1, 1000):
            shutil.rmtree(target.parent, ignore_errors=True)
            shutil.copytree(tmp_path / "old", target)
            ended: Ended = forks.run(
                f"{__name__}:kill_file_at_call", str(target.parent), n, can_exchange
            )[0]
            if target.is_file():
                assert torch.equal(torch.load(target)["new"], torch.ones(3))
                found.add("new")
            else:
                found.add(engine.load(target))
            if ended.exit_code == 0:
                break
            assert ended.exit_code == -9, ended.how
        assert n > 5 and found == {"old", "new"}
        assert [p.name for p in target.parent.iterdir()] == ["saved"]
        engine.save(tmp_path / "old", "old")  # and the other way round
        with pytest.raises(gs.GeminiError, match="is no checkpoint folder"):
            one_file.write({}, tmp_path / "run")


# ---- one at a time -------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_last", [None, 2])
def test_two_engines_under_one_name(
    keep_last: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused by name while the first one writes, and disturbs nothing."""
    target = tmp_path / "saved"
    refused = []
    with make() as engine, make(seed=8) as other:
        train(engine, 1)
        finish = RecordFile.finish

        def beside(self: RecordFile) -> None:
            with pytest.raises(gs.GeminiError, match="is being saved by another engine") as error:
                other.save(target, "other", keep_last=keep_last)
            refused.append(str(error.value))
            other.save(tmp_path / "another")
            finish(self)

        with monkeypatch.context() as patch:
            patch.setattr(RecordFile, "finish", lambda self: (patch.undo(), beside(self)))
            engine.save(target, "first", keep_last=keep_last)
        assert len(refused) == 1 and str(target) in refused[0]
        assert other.load(target) == "first"
        assert state_of(other)[2:] == state_of(engine)[2:]
        other.save(target, "other", keep_last=keep_last)
        assert engine.load(target) == "other"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["another", "saved"]


def claim_and_die(path: str) -> None:
    folders.Claim(Path(path))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_process_holds_no_name(tmp_path: Path, forks: Forks) -> None:
    assert forks.run(f"{__name__}:claim_and_die", str(tmp_path / "saved"))[0].exit_code == -9
    assert [p.name for p in tmp_path.iterdir()] == [".saved.lock"]
    with make(build=Small) as engine:
        engine.save(tmp_path / "saved")
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_before_anybody_has_a_claim(tmp_path: Path) -> None:
    def interrupted() -> None:
        folders.Claim(tmp_path / "saved")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with make(build=Small) as engine:
        engine.save(tmp_path / "saved")
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_a_series_of_an_engine_that_never_steps(tmp_path: Path) -> None:
    with make() as engine:
        for number in range(4):
            engine.save(tmp_path / "run", number, keep_last=2)
            assert engine.load(tmp_path / "run") == number
        names = sorted(p.name for p in (tmp_path / "run").iterdir() if not p.is_symlink())
        assert len(names) == 2 and len(set(names)) == 2
        assert {engine.load(tmp_path / "run" / name) for name in names} == {2, 3}


# ---- memory --------------------------------------------------------------------------------------


def peaks(folder: str) -> tuple[int, int, int]:
    """(of training, of saving, of loading), bytes of this process."""
    engine = make(build=lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24))))
    runtime = engine._runtime

    def step() -> None:
        engine.backward(engine.model(torch.randn(2, 1024).bfloat16()).float().square().mean())
        engine.step()
        engine.zero_grad()

    for _ in range(3):
        step()
    training = peak_resident_bytes(step)
    saving = peak_resident_bytes(lambda: engine.save(Path(folder) / "saved"))
    loading = peak_resident_bytes(lambda: engine.load(Path(folder) / "saved"))
    assert runtime.core.stats()["state_bytes"] > 250e6
    return training, saving, loading


def test_the_host_holds_two_chunks_more(tmp_path: Path, forks: Forks) -> None:
    """300 MB of state; a chunk is 2 MiB of weights here, and a piece of 4 Mi elements is as large as any."""
    ended = forks.run(f"{__name__}:peaks", str(tmp_path))[0]
    assert ended.value is not None, ended.how
    training, saving, loading = ended.value
    piece = 4 * MOST_ELEMENTS
    assert saving < training + 3 * piece + (16 << 20)
    assert loading < training + 3 * piece + (16 << 20)


def test_files_are_for_those_who_may_read_new_files(tmp_path: Path) -> None:
    """As any file that this process makes (umask)."""
    with make() as engine:
        folder = engine.save(tmp_path / "saved")
    (tmp_path / "plain").write_text("")
    want = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {want}
