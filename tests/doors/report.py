"""Runs the table of programs, each in a process of its own; as a program it prints what fails.

python tests/doors/report.py [--only words] [--jobs 2] [--out file.jsonl]
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [p for p in (str(HERE), str(HERE.parent)) if p not in sys.path]

from helpers.forked import Forks  # noqa: E402
from programs import SETUPS  # noqa: E402
from walk import doors, judge  # noqa: E402

PRELOAD = (
    "walk",
    *(file.stem for file in sorted(HERE.glob("programs_*.py"))),
    "torch.export",
    "torch.fx.experimental.proxy_tensor",
    "torch._subclasses.fake_tensor",
    "torch.nn.utils.parametrizations",
    "torch.nn.utils.prune",
)


class Walker:
    """Walks programs one after the other; unmanaged runs are kept, and their processes have never had an engine."""

    def __init__(self, device: str | None = None) -> None:
        self.device = device or os.environ.get("GEMINI_DOORS_DEVICE", "cpu")
        self._forks = {
            is_managed: Forks((HERE,), PRELOAD, has_had_engine=is_managed)
            for is_managed in (False, True)
        }
        self._kept: dict[tuple[str, int], dict[str, Any]] = {}
        self._warm = {setup.name: setup.warm for setup in SETUPS}

    def __enter__(self) -> Walker:
        return self

    def __exit__(self, *_: object) -> None:
        for forks in self._forks.values():
            forks.close()

    def _walk(self, door: str, setup: str, is_managed: bool) -> tuple[dict[str, Any] | None, str]:
        (ended,) = self._forks[is_managed].run("walk:walk", door, setup, self.device, is_managed)
        return ended.value, ended.how

    def walk_in_turn(
        self, rows: list[tuple[str, str]], is_managed: bool
    ) -> list[dict[str, Any] | None]:
        """Outcomes of programs that share a process; all None if it dies."""
        job = "walk:walk_in_turn"
        (ended,) = self._forks[is_managed].run(job, rows, self.device, is_managed, timeout=240.0)
        return [None] * len(rows) if ended.value is None else ended.value

    def verdict(self, door: str, setup: str) -> str | None:
        """Why a program under a set-up is wrong, or None."""
        key = (door, self._warm[setup])
        if key not in self._kept:
            want, how = self._walk(door, setup, False)
            assert want is not None, f"the unmanaged run of {door}: {how}"
            self._kept[key] = want
        got, how = self._walk(door, setup, True)
        return how if got is None else judge(doors()[door], setup, got, self._kept[key])


def main() -> int:
    """The table on the terminal; 1 if anything fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a program's name or item")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--progress", action="store_true", help="rows as they end, on stderr")
    parser.add_argument("--full", action="store_true", help="whole texts")
    args = parser.parse_args()
    work: queue.SimpleQueue[str] = queue.SimpleQueue()
    chosen = [n for n, d in doors().items() if args.only in n or args.only == d.item]
    for name in chosen:
        work.put(name)
    found: dict[str, dict[str, str | None]] = {}

    def run() -> None:
        with Walker() as walker:
            while True:
                try:
                    name = work.get_nowait()
                except queue.Empty:
                    return
                verdicts = {}
                for setup in doors()[name].setups:
                    try:
                        verdicts[setup] = walker.verdict(name, setup)
                    except Exception as error:
                        verdicts[setup] = str(error)
                found[name] = verdicts
                if args.progress:
                    print(name, {k: v and v[:80] for k, v in verdicts.items()}, file=sys.stderr)

    threads = [threading.Thread(target=run) for _ in range(args.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count = collections.Counter()
    for name in chosen:
        wrong = {setup: text for setup, text in found[name].items() if text}
        count["wrong" if wrong else "right"] += 1
        item = doors()[name].item
        print(f"{'WRONG' if wrong else 'ok   '} {name}  [{item}]")
        for setup, text in wrong.items():
            print(f"      {setup}: {text if args.full else ' '.join(text.split())[:260]}")
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps({"program": name, "item": item, "wrong": wrong}) + "\n")
    print(f"{count['right']} of {len(chosen)} programs have the same bits or an error that names")
    return int(count["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
