"""The cores and NUMA nodes of this host, as the kernel tells them in text, and what each of its ranks may take of them.

A core here is what the kernel schedules on (a hardware thread), by the kernel's number. What the kernel does not tell
(a container without /sys) is left out: no cores at all, no nodes, no siblings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_MOST = 1 << 16  # of a core's or node's number: more is no list of the kernel's
_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_PCI = re.compile(
    r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-9a-f])", re.IGNORECASE
)


class Core(NamedTuple):
    """In the order in which cores are given out, and so that neighbours are near each other.

    Attributes:
        node: NUMA node, -1: not known.
        sibling: the lowest number of those that share its execution units, it included.
    """

    node: int
    sibling: int
    number: int


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return ""


def _numbers(path: Path) -> list[int]:
    """Of a list like "0-3,8,10-11"; [] if it is none."""
    text = _read(path)
    found: list[int] = []
    for part in text.split(",") if _LIST.fullmatch(text) else ():
        first, _, last = part.partition("-")
        if not int(first) <= int(last or first) < _MOST:
            return []
        found += range(int(first), int(last or first) + 1)
    return found


def cores(root: str = "") -> list[Core]:
    """The cores that are online. root: the folder to read /sys below."""
    system = Path(f"{root}/sys/devices/system")
    nodes = {
        number: node
        for node in _numbers(system / "node/online")
        for number in _numbers(system / f"node/node{node}/cpulist")
    }
    found = []
    for number in _numbers(system / "cpu/online"):
        siblings = _numbers(system / f"cpu/cpu{number}/topology/thread_siblings_list")
        found.append(Core(nodes.get(number, -1), min([number, *siblings[:1]]), number))
    return found


def device_node(pci_bus_id: str, root: str = "") -> int:
    """The NUMA node of the PCI device "domain:bus:device.function"; -1 where it is not known.

    Raises:
        ValueError: `pci_bus_id` is none.
    """
    match = _PCI.fullmatch(pci_bus_id)
    if match is None:
        raise ValueError(
            f'"{pci_bus_id:.40}" is no PCI device: write domain:bus:device.function, as in 0000:1b:00.0'
        )
    domain, bus, device, function = (int(text or "0", 16) for text in match.groups())
    name = f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"
    text = _read(Path(f"{root}/sys/bus/pci/devices/{name}/numa_node"))
    return int(text) if text.isdecimal() else -1


class _Group:
    """Ranks that want the same cores."""

    def __init__(self, wanted: frozenset[int]) -> None:
        self.wanted = wanted  # numbers
        self.ranks: list[int] = []
        self.n_held = 0

    def need(self) -> tuple[float, int]:
        """The least is the neediest."""
        return self.n_held / len(self.ranks), len(self.wanted)


def split(known: Sequence[Core], ranks: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The cores of each rank of this host, in ascending order. Each rank computes it, and takes its own part.

    A rank wants the cores of its mask that are on its GPU's node, or its whole mask where there are none or the node is
    not known. Ranks that want the same cores get equal, neighbouring parts of them in the order of nodes, siblings and
    numbers; a core that is wanted by several such groups goes to the one that has the fewest for each of its ranks. A
    rank that would go without shares a core with another. A rank that is alone on its host keeps its mask.

    Args:
        known: what `cores` gives; others have no known node.
        ranks: of each its "mask" of cores and the "node" of its GPU, -1: not known.

    Raises:
        ValueError: a rank has an empty mask.
    """
    for rank, own in enumerate(ranks):
        if not own["mask"]:
            raise ValueError(f"local rank {rank} has an empty mask of cores")
    by_number = {core.number: core for core in known}
    everything = {number for own in ranks for number in own["mask"]}
    ordered = sorted(by_number.get(n, Core(-1, n, n)) for n in everything)
    groups: dict[frozenset[int], _Group] = {}
    for rank, own in enumerate(ranks):
        mask = set(own["mask"])
        is_any = len(ranks) == 1 or own["node"] < 0
        near = {core.number for core in ordered if is_any or core.node == own["node"]} & mask
        wanted = frozenset(near or mask)
        groups.setdefault(wanted, _Group(wanted)).ranks.append(rank)
    owners = _given_out([core.number for core in ordered], list(groups.values()))
    parts: list[list[int]] = [[] for _ in ranks]
    for group in groups.values():
        pool = [n for n, owner in owners.items() if owner is group]
        pool = pool or [core.number for core in ordered if core.number in group.wanted]
        n_held, n_ranks = group.n_held, len(group.ranks)
        for place, rank in enumerate(group.ranks):
            begin, end = place * n_held // n_ranks, (place + 1) * n_held // n_ranks
            if n_held < n_ranks:  # not enough for all: one core that others have too
                begin = place % len(pool)
                end = begin + 1
            parts[rank] = sorted(pool[begin:end])
    return parts


def _given_out(numbers: list[int], groups: list[_Group]) -> dict[int, _Group]:
    """Whose each core is, in the order of `numbers`: those that few want come first, each goes to the neediest."""
    wanting = {n: [group for group in groups if n in group.wanted] for n in numbers}
    owners: dict[int, _Group] = {}
    for n in sorted(numbers, key=lambda n: len(wanting[n])):
        if wanting[n]:
            owners[n] = min(wanting[n], key=_Group.need)
            owners[n].n_held += 1
    owners = {n: owners[n] for n in numbers if n in owners}
    for group in groups:  # may be short of what it need not be
        while group.n_held < len(group.ranks) and _refill(group, owners, set()):
            pass
    return owners


def _refill(group: _Group, owners: dict[int, _Group], asked: set[_Group]) -> bool:
    """One more core, from a group that can spare one, or can itself get one from another."""
    asked.add(group)
    for number, owner in owners.items():
        if number not in group.wanted or owner in asked:
            continue
        if owner.n_held > len(owner.ranks) or _refill(owner, owners, asked):
            owners[number] = group
            owner.n_held -= 1
            group.n_held += 1
            return True
    return False
