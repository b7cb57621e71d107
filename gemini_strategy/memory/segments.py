"""Few segments of device memory out of which torch's caching allocator can serve a whole step.

Left alone, that allocator asks for a segment of each tensor's own size, and later cuts what is free to serve
smaller ones. In a pool that gives nothing back (torch_pool.py) the sizes add up: a step of OPT with 3.4 billion
parameters holds 12.3 GB of tensors at most, out of segments of 16.0 GB. Out of two segments of 12.8 GB together,
made beforehand, the same step is served whole. Which two is found by replaying the step's allocations.

The replay knows of that allocator: the smallest free block that is large enough is taken, the lower address
first; the rest stays free when it is larger than 1 MiB; neighbours that are free become one. Tensors of at most
1 MiB live elsewhere. Where the replay errs, torch asks for one more segment, as it always does.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from typing import Any

_GRANULE = 2 << 20
_SMALL = 1 << 20
_PARTS = 24  # sizes are tried in steps of the peak by this,
_FINER = 4  # and below the first that serves in steps of this part of one
_MOST_EVENTS = 1_000_000  # are replayed in a search: a second or two

Event = tuple[int, int]
"""(tensor, bytes): it begins; (tensor, 0): it ends."""

_ROUNDS = 3  # what the second leaves lies elsewhere than what the first left


def events_of(entries: Iterable[dict[str, Any]], stream: int) -> list[Event]:
    """What a recorded history of allocations says about the large tensors of one stream that began in it.

    Args:
        entries: of one device, from `torch.cuda.memory._snapshot()["device_traces"]`.
        stream: the raw handle.
    """
    events: list[Event] = []
    begun: dict[int, int] = {}
    for entry in entries:
        address, size = entry["addr"], entry["size"]
        if entry["action"] == "alloc" and size > _SMALL and entry["stream"] == stream:
            begun[address] = len(events)
            events.append((len(events), -(-size // 512) * 512))
        elif entry["action"] == "free_completed" and address in begun:
            events.append((begun.pop(address), 0))
    return events


def staying_bytes(segments: Iterable[dict[str, Any]], device: int) -> int:
    """Bytes of a device's segments outside torch's own pool that are not given back: a tensor lives in each.

    One that is gone counts no more, also where another stream has used it: torch waits for that before it gives back.

    Args:
        segments: as in `torch.cuda.memory._snapshot()["segments"]`.
        device: its index.
    """
    return sum(
        segment["total_size"]
        for segment in segments
        if segment["device"] == device
        and tuple(segment["segment_pool_id"]) != (0, 0)
        and segment["allocated_size"] > 0
    )


def _repeated(events: list[Event]) -> list[Event]:
    """The step again and again; a tensor that it leaves lives until the end of the next one."""
    left = dict.fromkeys(tensor for tensor, size in events if size)
    for tensor, size in events:
        if not size:
            del left[tensor]
    if not left:
        return events  # each begins with nothing
    n = 1 + max(tensor for tensor, _ in events)
    steps: list[Event] = []
    for first in range(0, _ROUNDS * n, n):
        steps += [(first + tensor, size) for tensor, size in events]
        if first:
            steps += [(first - n + tensor, 0) for tensor in left]
    return steps


class _Blocks:
    """Free blocks, by size and by place."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int, int]] = []  # (size, segment, offset)
        self._size: dict[tuple[int, int], int] = {}  # (segment, offset) -> size
        self._begin: dict[tuple[int, int], int] = {}  # (segment, end) -> offset

    def _drop(self, segment: int, offset: int, size: int) -> None:
        del self._size[segment, offset], self._begin[segment, offset + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, segment, offset))]

    def give(self, segment: int, offset: int, size: int) -> None:
        if (segment, offset) in self._begin:
            before = self._begin[segment, offset]
            self._drop(segment, before, offset - before)
            offset, size = before, size + offset - before
        after = self._size.get((segment, offset + size))
        if after is not None:
            self._drop(segment, offset + size, after)
            size += after
        bisect.insort(self._by_size, (size, segment, offset))
        self._size[segment, offset] = size
        self._begin[segment, offset + size] = offset

    def take(self, size: int) -> tuple[int, int, int] | None:
        index = bisect.bisect_left(self._by_size, (size, -1, -1))
        if index == len(self._by_size):
            return None
        whole, segment, offset = self._by_size[index]
        self._drop(segment, offset, whole)
        if whole - size > _SMALL:
            self.give(segment, offset + size, whole - size)
            whole = size
        return segment, offset, whole


def _replay(events: list[Event], segments: list[int], most: float) -> tuple[int, int]:
    """Bytes that lack, up to the first that are more than `most`, and how many events were replayed."""
    blocks = _Blocks()
    for number, size in enumerate(segments):
        blocks.give(number, 0, size)
    held: dict[int, tuple[int, int, int]] = {}
    missing, n_segments = 0, len(segments)
    for number, (tensor, size) in enumerate(events):
        if size == 0:
            blocks.give(*held.pop(tensor))
            continue
        place = blocks.take(size)
        if place is None:
            more = 10 * _GRANULE if size < 5 * _GRANULE else -(-size // _GRANULE) * _GRANULE
            blocks.give(n_segments, 0, more)
            n_segments, missing = n_segments + 1, missing + more
            if missing > most:
                return missing, number
            place = blocks.take(size)
            assert place is not None
        held[tensor] = place
    return missing, len(events)


def missing_bytes(events: list[Event], segments: list[int]) -> int:
    """Bytes of the segments that torch would ask for beyond these."""
    return _replay(events, segments, math.inf)[0]


def _peak(events: list[Event]) -> int:
    sizes: dict[int, int] = {}
    now = most = 0
    for tensor, size in events:
        now += size or -sizes[tensor]
        sizes[tensor] = size
        most = max(most, now)
    return most


class _Search:
    """For one or two segments that serve all events. It ends after _MOST_EVENTS of them, whatever it has found."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._left = _MOST_EVENTS

    def first(self, unit: float, totals: range) -> list[int]:
        """The first that serve, of `totals` units cut in two anywhere; [] if none."""
        for total in totals:
            for part in range(total // 2 + 1):
                sizes = [
                    -(-int(unit * n) // _GRANULE) * _GRANULE for n in (total - part, part) if n
                ]
                if self._left < 0:
                    return []
                missing, replayed = _replay(self._events, sizes, 0)
                self._left -= replayed
                if not missing:
                    return sizes
        return []


def choose_segments(events: list[Event]) -> list[int]:
    """One or two segments that serve all events, the smallest found, largest first; [] if torch itself does as well.

    It takes some seconds at most, for the longest record.
    """
    events = _repeated(events)
    peak, limit = _peak(events), missing_bytes(events, [])
    if not peak:
        return []
    search, unit = _Search(events), peak / _PARTS
    coarse = search.first(unit, range(_PARTS, min(2 * _PARTS, math.ceil(limit / unit))))
    if not coarse:
        return []
    total = round(sum(coarse) / unit)
    finer = range((total - 1) * _FINER + 1, total * _FINER)
    return min((coarse, search.first(unit / _FINER, finer) or coarse), key=sum)
