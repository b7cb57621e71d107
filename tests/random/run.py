"""Runs many random programs and writes what fails.

    python -m tests.random.run --count 10000 --jobs 2 --out failures.jsonl [--first 0] [--shrink 60] [--seed 17]
        [--sequences]

The last line of the file is the count; each other line is a failure with a program that reproduces it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# This folder's name is that of a standard module: what is here is found by its own names.
sys.path[:0] = [p for p in (str(HERE), str(HERE.parent)) if p not in sys.path]

import random_programs  # noqa: E402
import random_sequences  # noqa: E402
from helpers.forked import Forks  # noqa: E402
from random_campaign import FAILED, failing_seed, shrink  # noqa: E402
from random_programs import script  # noqa: E402


def main() -> int:
    """1 if anything fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shrink", type=float, default=0.0, help="seconds for making one smaller")
    parser.add_argument("--seed", type=int, help="this one alone; prints its script")
    parser.add_argument("--sequences", action="store_true", help="those of random_sequences.py")
    args = parser.parse_args()
    make = random_sequences.generate if args.sequences else random_programs.generate
    seeds = [args.seed] if args.seed is not None else range(args.first, args.first + args.count)
    work: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in seeds:
        work.put(seed)
    results: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    lock, begun = threading.Lock(), time.monotonic()

    def write(entry: dict) -> None:
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def run() -> None:
        with Forks((HERE,), ("random_campaign", "random_support")) as forks:
            while True:
                try:
                    seed = work.get_nowait()
                except queue.Empty:
                    return
                verdict, program = failing_seed(forks, seed, make)
                if verdict.result == FAILED and args.shrink:
                    program = shrink(forks, program, verdict, args.shrink)
                with lock:
                    results[verdict.result] += 1
                    if verdict.result == FAILED:
                        kinds[verdict.kind] += 1
                        text = script(program, verdict.why)
                        write(
                            {
                                "seed": seed,
                                "why": verdict.why,
                                "how": program.how,
                                "script": text.partition("# ---- seed")[2],
                            }
                        )
                        if args.seed is not None:
                            print(text)

    threads = [threading.Thread(target=run) for _ in range(args.jobs)]
    for thread in threads:
        thread.start()

    def tell() -> None:
        seconds = round(time.monotonic() - begun)
        total = {"count": sum(results.values()), **results, "seconds": seconds}
        write({**total, "kinds": dict(kinds.most_common())})
        print(json.dumps(total))
        for kind, n in kinds.most_common(40):
            print(f"{n:6} {kind}", flush=True)

    def stop(*_: object) -> None:
        """What was run counts, although something ends this."""
        tell()
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    for thread in threads:
        thread.join()
    tell()
    return int(results[FAILED] > 0)


if __name__ == "__main__":
    sys.exit(main())
