# Scripts that start their ranks, by Lightning's launcher and by torchrun; and ranks that end early, which are forks of
# a process that has imported Lightning (helpers/program.py).

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.forked import Forks
from helpers.lean import without_unused
from lightning_case import cast_reference, fit_reference, reference_weights, same, summable

HERE = Path(__file__).parent
SCRIPT = HERE / "lightning_launch.py"
TIME_LIMIT = 300.0


def launch(folder: Path, size: int, prefix: Any) -> tuple[int, str]:
    """Exit code and the words of a script that has launched `size` ranks; none of them is left."""
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE")}
    paths = [without_unused(folder), str(HERE), str(HERE.parents[1])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["OMP_NUM_THREADS"] = "1"
    words = folder / "words"
    with words.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *prefix, SCRIPT, folder, str(size), "nothing", "0"],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
        )
        try:
            code = process.wait(TIME_LIMIT)
        finally:
            process.kill()
            process.wait()
            left = ranks_left(folder)
            for pid in left:
                os.kill(pid, 9)
    text = words.read_text()
    assert not left, f"processes {left} were left behind:\n{text}"
    return code, text


def ranks_left(folder: Path) -> list[int]:
    """Ranks that still run a while after their launcher; a rank that has ended is a zombie at most."""
    end = time.monotonic() + 60.0
    while True:
        left = [int(file.stem) for file in folder.glob("*.pid") if runs(int(file.stem))]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.2)


def runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks((HERE,), ("lightning.pytorch", "helpers.program"), has_had_engine=False) as forks:
        yield forks


def fork(forks: Forks, folder: Path, size: int, what: str, where: int) -> tuple[int, str]:
    """Like launch()."""
    words = [str(SCRIPT), str(folder), str(size), what, str(where)]
    paths = [str(HERE), str(HERE.parents[1])]
    said = folder / "words"
    try:
        (ended,) = forks.run(
            *("helpers.program:launched", str(folder), words, paths, {}, str(said)),
            timeout=TIME_LIMIT,
        )
    finally:
        left = ranks_left(folder)
        for pid in left:
            os.kill(pid, 9)
    text = said.read_text()
    assert not left, f"processes {left} were left behind:\n{text}"
    return ended.exit_code if ended.value is None else ended.value, text


@pytest.mark.parametrize(
    ("size", "prefix"),
    [
        (2, ()),
        # Three: tests/gpu/test_lightning_gpu.py.
        (2, ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")),
    ],
    ids=["launcher", "torchrun"],
)
def test_script_starts_its_ranks(size: int, prefix: Any, tmp_path: Path) -> None:
    code, text = launch(tmp_path, size, prefix)
    assert code == 0, text
    said = [torch.load(tmp_path / f"{rank}.said", weights_only=False) for rank in range(size)]
    assert len(list(tmp_path.glob("*.pid"))) == size
    module = summable("lightning", 0, n_ranks=size, is_reference=True)
    cast_reference(module, "bf16-mixed")
    trainer = fit_reference("lightning", module, precision="bf16-mixed")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)
    same(dict(saved["state_dict"]), reference_weights(module, trainer.optimizers[0]), "weights")
    assert all(rank["world_size"] == size for rank in said)
    assert all(rank["metrics"] == said[0]["metrics"] for rank in said)
    assert sorted(number for rank in said for number in rank["seen"]) == sorted(module.seen)


@pytest.mark.parametrize(
    ("what", "where"),
    [("raise", 0), ("raise", 1), ("reduce", 1), ("kill", 0), ("kill", 1), ("stop", 1)],
)
def test_a_rank_that_ends_early_ends_all(
    what: str, where: int, tmp_path: Path, forks: Forks
) -> None:
    code, text = fork(forks, tmp_path, 2, what, where)
    assert code != 0
    assert not list(tmp_path.glob("*.said"))
    if what == "raise":
        assert f"rank {where} said: ArithmeticError: this rank has had enough" in text
    elif what == "reduce":  # each is told where the other is
        assert "rank 1 said: rank 1 of 2, reduce (mean) of (3,): " in text
        assert "rank 0 said: all_gather number " in text
    elif where == 1:
        # Lightning ends the launcher, too, some seconds after it has seen that a process has gone.
        assert "rank 1" in text or (what == "kill" and "[rank: 1] Child process" in text), text
