"""Several ranks on devices whose streams run late and out of order: the bits of the reference on every rank.

Each case trains random scenarios (tests/helpers/rank_scenario.py) in 2 to 4 processes on the chaos device, which also
reports accesses that nothing orders, and in 2 over the host device, in order. `GEMINI_RANKS_CASES` is the number of
scenarios for each number of ranks (default 6); seeds start at `GEMINI_RANKS_FIRST`.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from helpers import chaos
from helpers.rank_scenario import play_ranks_plain, play_sharded, sharded_scenario
from helpers.ranks import run_ranks, values
from helpers.scenario import Played, assert_same_played

N_CASES = int(os.environ.get("GEMINI_RANKS_CASES", "6"))
FIRST = int(os.environ.get("GEMINI_RANKS_FIRST", "0"))


def _play(rank: int, size: int, seeds: list[int], is_late: bool) -> list[Any]:
    played = []
    for seed in seeds:
        s = sharded_scenario(seed)
        os.environ["GEMINI_RATES"] = s.rates
        os.environ["GEMINI_TUNE"] = str(seed % 2)
        chaos.use(17 * seed + rank if is_late else None)
        try:
            played.append(play_sharded(s, rank, size))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {s}: {error}") from error
    return played


@functools.cache
def _wanted(seed: int, size: int) -> list[Played]:
    """What every rank must see, in order or late."""
    return play_ranks_plain(sharded_scenario(seed), size)


@pytest.mark.parametrize(("size", "is_late"), [(2, False), (2, True), (3, True), (4, True)])
def test_random_scenarios(size: int, is_late: bool, tmp_path: Path) -> None:
    seeds = list(range(FIRST + 100 * size, FIRST + 100 * size + N_CASES))
    of_ranks = values(run_ranks(size, tmp_path, _play, seeds, is_late, timeout=500.0))
    n_planned = 0
    for i, seed in enumerate(seeds):
        for rank, want in enumerate(_wanted(seed, size)):
            got, stats, faults = of_ranks[rank][i]
            where = f"seed {seed}, rank {rank}: {sharded_scenario(seed)}"
            assert faults == (0, ""), where
            try:
                assert_same_played(got, want)
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from error
            assert stats["shards"] == size
        n_planned += of_ranks[0][i][1]["plans"] >= 1
    assert n_planned > len(seeds) // 3, f"only {n_planned} of {len(seeds)} scenarios met a plan"
