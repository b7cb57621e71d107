"""Several processes of one gloo group, for tests: of their own, bounded in time, none left behind.

They are forked from one process, which starts with the first call and has imported what the tests have, as importing
torch takes a rank longer than most tests. It has trained one small model, see helpers/warm.py. Environment, folder,
paths and chaos device of a rank are those of the caller.
"""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.forkserver
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers import chaos, forked
from helpers.forked import Ended
from helpers.forked import values as values

PRELOADED = (
    *forked.PRELOADED,
    "helpers.ranks",
    "helpers.zoo",
    "helpers.warm",
    "helpers.huge_pages",
)
LARGE = (  # where the tests have them
    "lightning.pytorch",
    "pytorch_lightning",
    "transformers",
    "torchao.optim",
    "bitsandbytes",
)
GROUP_TIMEOUT = 120.0  # of what the tests do not measure: the group's own start


def _rank_main(
    body: Callable[..., Any],
    rank: int,
    size: int,
    folder: str,
    args: tuple[Any, ...],
    environment: dict[str, str],
    device: str | None,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    chaos.use(device)
    forked.let_finish()
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )
    ended = Ended(0)
    try:
        ended.value = body(rank, size, *args)
    except SystemExit:
        raise
    except BaseException:  # pytest's own failures are no Exception
        ended.error = traceback.format_exc()
    partial = Path(folder) / f"{rank}.part"
    partial.write_bytes(pickle.dumps(ended))
    partial.rename(Path(folder) / f"{rank}.done")
    os._exit(0)  # the other ranks may be gone, and an orderly end would wait for them


def fork_context() -> Any:
    """Of processes that are forked from one that has imported torch and the package; beside a GPU of fresh ones."""
    if torch.cuda.is_available():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    large = [name for name in LARGE if name in sys.modules]
    context.set_forkserver_preload([*large, *PRELOADED])
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    os.environ["GEMINI_RATES"] = forked.RATES  # a test may have set what it wants to be refused
    try:
        mp.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def run_ranks(
    size: int, folder: Path, body: Callable[..., Any], *args: Any, timeout: float = 200.0
) -> list[Ended]:
    """body(rank, size, *args) on `size` processes; a rank that runs longer than `timeout` seconds is killed."""
    context = fork_context()
    environment, device = dict(os.environ), chaos.in_use()
    processes = [
        context.Process(
            target=_rank_main, args=(body, rank, size, str(folder), args, environment, device)
        )
        for rank in range(size)
    ]
    end = time.monotonic() + timeout
    for process in processes:
        process.start()
    done = [folder / f"{rank}.done" for rank in range(size)]
    try:
        # A stopped rank neither ends nor answers: all the others must be done without it.
        while time.monotonic() < end:
            is_settled = [
                file.exists() or not process.is_alive() or _is_stopped(process.pid)
                for file, process in zip(done, processes, strict=True)
            ]
            if all(is_settled):
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.join(5.0 if not _is_stopped(process.pid) else 0.0)
            process.kill()
            process.join()
    return [
        pickle.loads(file.read_bytes()) if file.exists() else Ended(process.exitcode)
        for file, process in zip(done, processes, strict=True)
    ]


def _is_stopped(pid: int | None) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"
