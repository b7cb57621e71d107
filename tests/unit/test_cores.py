"""Cores and nodes read from made-up machines, and their split among ranks."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gemini_strategy.machine.cores import Core, cores, device_node, split

Rank = dict[str, Any]

# ---- reading ----


def put(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def read(root: Path) -> list[tuple[int, int, int]]:
    """(number, node, sibling) of each."""
    return [(core.number, core.node, core.sibling) for core in cores(str(root))]


def test_one_node(tmp_path: Path) -> None:
    assert read(tmp_path) == []  # no /sys at all
    put(tmp_path, {"sys/devices/system/cpu/online": "0-3\n"})
    assert read(tmp_path) == [(i, -1, i) for i in range(4)]  # no NUMA, no siblings told
    siblings = {
        f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": "0-1\n" for i in (0, 1)
    }
    nodes = {
        "sys/devices/system/node/online": "0\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
    }
    put(tmp_path, siblings | nodes)  # siblings are told for some only
    assert read(tmp_path) == [(0, 0, 0), (1, 0, 0), (2, 0, 2), (3, 0, 3)]


def test_two_nodes(tmp_path: Path) -> None:
    """Siblings far apart, some cores offline, and a node of memory alone."""
    system = "sys/devices/system"
    put(
        tmp_path,
        {
            f"{system}/cpu/online": "0-2,4-7\n",
            f"{system}/node/online": "0-2\n",
            f"{system}/node/node0/cpulist": "0-1,4-5\n",
            f"{system}/node/node1/cpulist": "2-3,6-7",
            f"{system}/node/node2/cpulist": "\n",
        },
    )
    for i in range(8):
        text = "7\n" if i % 4 == 3 else f"{i % 4},{i % 4 + 4}\n"
        put(tmp_path, {f"{system}/cpu/cpu{i}/topology/thread_siblings_list": text})
    assert read(tmp_path) == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 2),
        (4, 0, 0),
        (5, 0, 1),
        (6, 1, 2),
        (7, 1, 7),
    ]
    for wrong in ("", "\n", "x\n", "0-\n", "3-1\n", "0,,1\n", "0 1\n", "0-99999999\n", "-1\n"):
        put(tmp_path, {f"{system}/cpu/online": wrong})
        assert read(tmp_path) == []


def test_devices(tmp_path: Path) -> None:
    find = functools.partial(device_node, root=str(tmp_path))
    assert find("0000:1b:00.0") == -1  # no such device is told of
    devices = "sys/bus/pci/devices"
    put(tmp_path, {f"{devices}/0000:1b:00.0/numa_node": "1\n"})
    for name in ("0000:1b:00.0", "00000000:1B:00.0", "0:1b:0.0", "1b:00.0"):
        assert find(name) == 1
    put(tmp_path, {f"{devices}/10000:01:00.0/numa_node": "3\n"})
    assert find("10000:01:00.0") == 3
    for text in ("-1\n", "none\n"):
        put(tmp_path, {f"{devices}/0000:1b:00.0/numa_node": text})
        assert find("0000:1b:00.0") == -1
    for wrong in ("", "cuda:0", "1b:00", "0000:1b:00.0x", "0000:1b:00"):
        with pytest.raises(ValueError, match=f'"{wrong}" is no PCI device'):
            find(wrong)


def test_this_machine_can_be_read() -> None:
    numbers = [core.number for core in cores()]
    assert numbers == sorted(set(numbers))
    if Path("/sys/devices/system/cpu/online").exists():
        assert set(os.sched_getaffinity(0)) <= set(numbers)


# ---- splitting ----


def machine(n_nodes: int, each: int, n_threads: int, is_far: bool) -> list[Core]:
    """Physical cores in blocks for each node; with two threads for each, siblings are numbered either next to each
    other or one half of the numbers apart."""
    n_physical = n_nodes * each
    found = []
    for number in range(n_physical * n_threads):
        physical = number % n_physical if is_far else number // n_threads
        sibling = physical if is_far else physical * n_threads
        found.append(Core(physical // each, sibling, number))
    return found


def rank(first: int, count: int, node: int) -> Rank:
    """It may use `count` cores from `first` on, and its GPU is on `node`."""
    return {"mask": list(range(first, first + count)), "node": node}


def parts_of(known: Sequence[Core], ranks: Sequence[Rank]) -> list[list[int]]:
    parts = split(known, ranks)
    for part, own in zip(parts, ranks, strict=True):  # in order, and within the mask
        assert part and part == sorted(set(part)) and set(part) <= set(own["mask"])
    return parts


def assert_none_shared(parts: list[list[int]]) -> None:
    numbers = [number for part in parts for number in part]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("n_nodes", [1, 2, 8])
@pytest.mark.parametrize("kind", range(5))
def test_every_kind_of_machine(n_nodes: int, kind: int) -> None:
    """1 to 16 ranks: nothing shared where there is enough, the same for equals, every core on the right node."""
    known = machine(n_nodes, 7 if kind in (2, 4) else 16, 1 if kind < 1 else 2, kind >= 3)
    nodes = {core.number: core.node for core in known}
    for n_ranks in range(1, 17):
        for has_gpus in (False, True):
            ranks = [
                rank(0, len(known), r * n_nodes // n_ranks if has_gpus else -1)
                for r in range(n_ranks)
            ]
            parts = parts_of(known, ranks)
            if len(known) < n_ranks:
                continue
            assert_none_shared(parts)
            sizes = [len(part) for part in parts]
            if has_gpus and n_ranks > 1:
                for part, own in zip(parts, ranks, strict=True):
                    assert all(nodes[number] == own["node"] for number in part)
            if not has_gpus or n_ranks % n_nodes == 0:
                assert sum(sizes) == len(known) and max(sizes) - min(sizes) <= 1


def test_siblings() -> None:
    known = machine(2, 8, 2, True)  # cores 0-7, 16-23 on node 0; 8-15, 24-31 on node 1
    parts = parts_of(known, [rank(0, 32, 1 if r < 2 else 0) for r in range(4)])
    for part, first in zip(parts, (8, 12, 0, 4), strict=True):  # both threads of a physical core
        assert part == [*range(first, first + 4), *range(first + 16, first + 20)]


def test_alone() -> None:
    known = machine(2, 8, 1, False)
    assert parts_of(known, [rank(0, 16, 1)]) == [[*range(16)]]  # the other node's cores too
    assert parts_of(known, [rank(3, 2, 1)]) == [[3, 4]]


def test_bindings() -> None:
    known = machine(2, 8, 1, False)
    own = [[*range(4 * r, 4 * r + 4)] for r in range(4)]
    # The launcher gave each its own: left as it is, also where that is away from their GPUs.
    for nodes in ((0, 0, 1, 1), (1, 1, 0, 0)):
        assert parts_of(known, [rank(4 * r, 4, nodes[r]) for r in range(4)]) == own
    # Two and two: those with the same mask divide it.
    parts = parts_of(known, [rank(0, 6, -1)] * 2 + [rank(6, 8, -1)] * 2)
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13]]
    # One GPU's node is known, the other's is not: it takes what the first does not want.
    parts = parts_of(known, [rank(0, 16, 0), rank(0, 16, -1)])
    assert parts == [[*range(8)], [*range(8, 16)]]
    # One rank was bound to a few cores that the others may use too: they leave them to it.
    parts = parts_of(known, [rank(2, 2, -1), rank(0, 8, -1), rank(0, 8, -1)])
    assert_none_shared(parts)
    assert parts[0] == [2, 3] and [len(part) for part in parts[1:]] == [3, 3]
    # A rank whose only core others have in their masks keeps it.
    parts = parts_of(known, [rank(0, 3, -1), rank(0, 1, -1), rank(0, 2, -1)])
    assert parts == [[2], [0], [1]]


def test_container() -> None:
    """It sees the machine's /sys, but may use some cores only."""
    known = machine(2, 32, 2, True)  # 28-31 on node 0, 32-35 on node 1
    parts = parts_of(known, [rank(28, 8, 0 if r < 2 else 1) for r in range(4)])
    assert parts == [[28, 29], [30, 31], [32, 33], [34, 35]]
    ranks = [rank(0, 8, 1)] * 2  # none of them on the GPUs' node
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert parts_of(known, ranks) == halves
    assert parts_of([], ranks) == halves  # nothing told: numbers alone
    parts = parts_of(machine(1, 4, 1, False), ranks)  # cores that came online since
    assert_none_shared(parts)
    assert [len(part) for part in parts] == [4, 4]


def test_too_few() -> None:
    known = machine(1, 3, 1, False)
    assert parts_of(known, [rank(0, 3, 0)] * 8) == [[r % 3] for r in range(8)]
    # Three ranks, two cores, one rank with a choice.
    assert parts_of(known, [rank(0, 1, -1), rank(0, 1, -1), rank(0, 2, -1)]) == [[0], [0], [1]]


def test_an_empty_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="local rank 1 has an empty mask"):
        split(machine(1, 4, 1, False), [rank(0, 4, -1), rank(0, 0, -1)])


def is_enough(wanted: list[set[int]]) -> bool:
    """Whether every rank can have a wanted core that no other has."""
    owners: dict[int, int] = {}

    def match(r: int, tried: set[int]) -> bool:
        for number in sorted(wanted[r] - tried):
            if number not in tried:
                tried.add(number)
                if number not in owners or match(owners[number], tried):
                    owners[number] = r
                    return True
        return False

    found = [match(r, set()) for r in range(len(wanted))]
    return all(found)


def test_what_every_split_must_keep() -> None:
    """Masks, nodes and machines at random."""
    draw = random.Random(20).randrange
    n_enough = 0
    for turn in range(3000):
        n_nodes = 1 + draw(4)
        known = machine(n_nodes, 1 + draw(8), 1 + turn % 2, turn % 4 > 1)
        nodes = {core.number: core.node for core in known}
        n_kinds = 1 + draw(3)
        ranks = []
        for _ in range(1 + draw(8)):
            kind = draw(n_kinds)
            first = kind * len(known) // (2 * n_kinds)
            count = len(known) - first
            ranks.append(rank(first, 3 if kind % 2 and count > 3 else count, draw(n_nodes + 1) - 1))
        parts = parts_of(known, ranks)
        wanted = []
        for own in ranks:
            near = {number for number in own["mask"] if nodes[number] == own["node"]}
            wanted.append(near or set(own["mask"]))
        if is_enough(wanted):
            assert_none_shared(parts)
            n_enough += 1
        for a, own in enumerate(ranks):  # equals get the same, give or take one
            for b in range(a):
                if ranks[b] == own:
                    assert abs(len(parts[a]) - len(parts[b])) <= 1
    assert 1000 < n_enough < 3000  # both kinds were met
