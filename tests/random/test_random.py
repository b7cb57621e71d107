"""Random programs, managed and unmanaged: the same bits, or a refusal by name where the program is unusual.

The seeds are fixed, and some are fresh: a fresh one that fails is printed with its program, as any other. More of them,
offline: `python -m tests.random.run --count 10000 --jobs 2 --out failures.jsonl`, and with `--sequences` of operations.
GEMINI_RANDOM_COUNT is the number of fixed seeds (default 240), GEMINI_RANDOM_FRESH of fresh ones (default 40);
GEMINI_RANDOM_SEQUENCES that of sequences (default 150).
"""

from __future__ import annotations

import collections
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import random_sequences
from helpers.forked import Forks
from random_campaign import (
    FAILED,
    INVALID,
    LEFT_ALONE,
    REFUSED,
    RIGHT,
    failing_seed,
    shrink,
    try_program,
)
from random_programs import Program, generate, script

COUNT = int(os.environ.get("GEMINI_RANDOM_COUNT", "240"))
N_SEQUENCES = int(os.environ.get("GEMINI_RANDOM_SEQUENCES", "150"))
N_FRESH = int(os.environ.get("GEMINI_RANDOM_FRESH", "40"))
BATCH = 20
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks((HERE,), ("random_campaign", "random_support")) as forks:
        yield forks


def _run(forks: Forks, seeds: list[int], make: Callable[[int], Program] = generate) -> None:
    """Fails with the smallest program that was found for the first seed that fails."""
    results: collections.Counter[str] = collections.Counter()
    failed = []
    for seed in seeds:
        verdict, program = failing_seed(forks, seed, make)
        results[verdict.result] += 1
        if verdict.result == FAILED:
            failed.append((seed, verdict, program))
    if failed:
        _, verdict, program = failed[0]
        text = script(shrink(forks, program, verdict, 20.0), verdict.why)
        listed = "\n".join(f"seed {s}: {v.why.splitlines()[0][:200]}" for s, v, _ in failed)
        raise AssertionError(
            f"of {seeds[0]} to {seeds[-1]} {len(failed)} fail:\n{listed}\n\n{text}"
        )
    # Programs that show nothing would pass, too.
    assert results[INVALID] <= len(seeds) // 5, results
    assert results[REFUSED] <= len(seeds) // 2, results
    assert results[RIGHT] >= len(seeds) // 3, results


@pytest.mark.parametrize("first", range(0, COUNT, BATCH))
def test_fixed_seeds(first: int, forks: Forks) -> None:
    _run(forks, list(range(first, first + BATCH)))


@pytest.mark.parametrize("first", range(0, N_SEQUENCES, 30))
def test_sequences(first: int, forks: Forks) -> None:
    _run(forks, list(range(first, first + 30)), random_sequences.generate)


@pytest.mark.parametrize("part", range(2))
def test_fresh_seeds(part: int, forks: Forks) -> None:
    first = random.SystemRandom().randrange(10**6, 10**9)
    print(f"seeds {first} to {first + N_FRESH // 2 - 1}")
    _run(forks, list(range(first, first + N_FRESH // 2)))


def test_a_failing_program_is_found_and_made_smaller(forks: Forks) -> None:
    """A program with a part whose sums differ under an engine; its script fails by itself."""
    import dataclasses
    import subprocess
    import sys
    import tempfile

    from random_campaign import try_program
    from random_programs import Action, generate

    program = generate(1)
    bad = Action("train", ("run.see(1.0 if run.engine is None else 2.0)",))
    program = dataclasses.replace(
        program, actions=(*program.actions[:3], bad, *program.actions[3:])
    )
    program = dataclasses.replace(program, how=program.how | {"ranks": 1})
    verdict = try_program(forks, program)
    assert verdict.result == FAILED and verdict.why.startswith("other bits"), verdict
    small = shrink(forks, program, verdict, 60.0)
    assert small.actions == (bad,) and not small.parts
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(script(small, verdict.why))
        done = subprocess.run(
            [sys.executable, str(file)], capture_output=True, text=True, check=False
        )
    assert done.returncode == 1 and "Differs: seen[0]" in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize(("other", "expected"), [(REFUSED, REFUSED), (RIGHT, FAILED)])
def test_a_rank_that_was_left_alone(other: str, expected: str) -> None:
    """It fails, unless the one that went did not end well."""
    ends = [(FAILED, f"raised: rank 1 {LEFT_ALONE}"), (other, "")]
    forks: Any = SimpleNamespace(run=lambda *_, **__: [SimpleNamespace(value=v) for v in ends])
    assert try_program(forks, generate(0)).result == expected
