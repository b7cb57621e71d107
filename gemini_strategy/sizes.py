"""Sizes as people write them, and the sizes of chunks and blocks that follow from a model and a budget."""

from __future__ import annotations

import re

from gemini_strategy import _C

_MIB = 1 << 20
SIZES = (  # the arguments of ChunkSizes, which all that lay a model out take
    "chunk_size",
    "block_size",
    "chunk_search_range",
    "chunk_search_n_grids",
    "min_chunk_size",
)
_BLOCKS_PER_CHUNK = 128  # little is lost to rounding, and mapping stays cheap
_MOST_ROUNDED = 1.04  # weights, to whole blocks

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}{b}": 1000**i for i, p in enumerate("KMGT", 1) for b in ("", "B")},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)},
}
_LEAST_BUDGET = 1000  # bytes: who writes less has forgotten the unit
_SHARE_OF_GPU = 0.95
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | float | str, total: int | None = None, name: str = "size") -> int:
    """Returns `size` in bytes.

    Args:
        size: bytes as an int; a fraction of `total` in (0, 1], as a float or "0.5"; or text such as "24GB", "24G"
            (both 10^9) and "24GiB" (2^30), units up to T.
        total: bytes that a fraction refers to.
        name: the argument's name, for the error.

    Raises:
        ValueError: the size is not positive, cannot be read, is a fraction without a `total`, or is a budget (by its
            name) of less than 1000 bytes.
    """
    given = size
    fraction = "" if total is None else ", or a fraction in (0, 1]"
    hint = f'{name}: give bytes (int) or text such as "24GB" or "24GiB"{fraction}'
    if isinstance(size, str) and total and re.fullmatch(r"\s*[0-9]*\.[0-9]+\s*", size):
        size = float(size)  # a fraction on a command line
    if isinstance(size, str):
        match = _PATTERN.fullmatch(size)
        unit = match.group(2).upper() if match else None
        if match is None or unit not in _UNITS:
            raise ValueError(f"{hint}; cannot read {size!r}{_meant(size, total)}")
        size = round(float(match.group(1)) * _UNITS[unit])
    elif isinstance(size, bool) or not isinstance(size, int | float):
        raise ValueError(f"{hint}; got {size!r}")
    elif isinstance(size, float):
        if not 0.0 < size <= 1.0 or total is None:
            meant = f': did you mean "{size:g}GB"?' if 1.0 < size < 1e9 else ""
            raise ValueError(f"{hint}; got {size!r}{meant}")
        size = int(size * total)
    if not 0 < size < 1 << 63:
        raise ValueError(f"{hint}; got {size} bytes")
    if size < _LEAST_BUDGET and name.endswith("budget"):
        raise ValueError(f'{hint}; {given!r} is {size} bytes: did you mean "{size}GB"?')
    return size


def _meant(size: str, total: int | None) -> str:
    """What a text that is no size was probably to say: "50%", "24 gigs"."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%|[A-Za-z]+)\s*", size)
    number, unit = found.groups() if found else ("", "")
    if unit == "%" and total is not None and 0 < float(number) <= 100:
        return f": did you mean {float(number) / 100:g}?"
    if unit[:1].upper() in ("K", "M", "G", "T") and unit != "%":
        return f': did you mean "{number}{unit[0].upper()}B"?'
    return ""


def size_text(n_bytes: int, *, is_wanted: bool = False) -> str:
    """Bytes with four digits in powers of 1000, "1.053 MB", as the core has them in its texts (csrc/base/base.h).

    Args:
        is_wanted: rounded up, so that it suffices; else down: what there is.
    """
    units, whole = ("B", "kB", "MB", "GB", "TB", "PB"), 1
    while n_bytes // whole >= 1000:
        whole *= 1000
    digits = 3 - min(len(str(n_bytes // whole)) - 1, 2)
    step = max(whole // 10**digits, 1)
    n = -(-n_bytes // step) if is_wanted else n_bytes // step
    if step == whole:
        return f"{n} B"
    of_unit = whole // step
    return f"{n // of_unit}.{n % of_unit:0{digits}} {units[len(str(whole)) // 3]}"


def physical_memory() -> int:
    """Bytes of memory that the machine has, or that this process's control groups allow."""
    return int(_C.host_topology()["total"])


def parse_device_budget(
    budget: int | float | str | None, is_cuda: bool, gpu_bytes: int | None = None
) -> int:
    """Bytes of a `device_budget`; -1: no limit, which the host device alone has.

    Args:
        budget: as `parse_bytes` takes it; None: 95 % of a GPU, no limit on the host device.
        is_cuda: the device is a GPU, else the host device.
        gpu_bytes: the memory of the GPU; None: not known, and `budget` has to be a size.

    Raises:
        ValueError: as parse_bytes.
    """
    if not is_cuda:
        return -1 if budget is None else parse_bytes(budget, physical_memory(), "device_budget")
    if budget is None and gpu_bytes:
        budget = _SHARE_OF_GPU
    return parse_bytes(budget, gpu_bytes, "device_budget")  # type: ignore[arg-type]  # None is refused there


def host_limit(host_budget: int | None, free: int) -> int:
    """Bytes of the host that homes may take; what has none beyond that stays on the device (csrc/plan/stay.h).

    Args:
        host_budget: as given; it is believed where the host has so much free.
        free: what this rank may take of the host. The process itself, loaders and checkpoints need a little of it.
    """
    return host_budget if host_budget is not None and host_budget <= free else free - free // 64


class ChunkSizes:
    """Chunk and block sizes as the caller gave them (see arguments.py), and what they become for a model."""

    def __init__(
        self,
        chunk_size: int | str | None,
        block_size: int | str | None,
        search_range: int | str | None,
        n_grids: int | None,
        min_chunk_size: int | str | None,
    ) -> None:
        self.searches = not (search_range is None and n_grids is None and min_chunk_size is None)
        self.chunk = None if chunk_size is None else parse_bytes(chunk_size, name="chunk_size")
        self.block = None if block_size is None else parse_bytes(block_size, name="block_size")
        self.n_grids = 4096 if n_grids is None else n_grids
        self.range = 64 * _MIB
        if search_range is not None:
            self.range = parse_bytes(search_range, name="chunk_search_range")
        self.minimum = 32 * _MIB
        if min_chunk_size is not None:
            self.minimum = parse_bytes(min_chunk_size, name="min_chunk_size")

    def choose(
        self, specs: list[tuple[int, int, int]], budget: int, is_cuda: bool, n_shards: int = 1
    ) -> tuple[int, int]:
        """(chunk bytes, block bytes) for parameters of (numel, weight bytes, kind); n_shards ranks share a chunk."""
        granule = 2 * _MIB if is_cuda else _C.HOST_GRANULARITY
        weights = sum(numel * width for numel, width, _ in specs)
        if self.searches:
            chunk = _C.chunk_search(specs, self.minimum, self.range, self.n_grids)
        elif self.chunk is not None:
            chunk = self.chunk
        else:  # many chunks, so that little is held beyond what a unit needs; each shard fills a block
            least = min(granule * n_shards, 64 * _MIB)
            chunk = min(max(weights // 32, least), 64 * _MIB)
            if budget > 0:
                chunk = max(min(chunk, budget // 32), least)
        least = max(granule, chunk // _BLOCKS_PER_CHUNK // granule * granule)
        if self.block is None and n_shards > 1:
            return chunk, _find_block(specs, chunk, least, budget, n_shards)
        return chunk, self.block or least


def _find_block(
    specs: list[tuple[int, int, int]], chunk: int, least: int, budget: int, n_shards: int
) -> int:
    """Bytes of a block: several processes wait for each other with each that they map, so four or two of the least."""
    weights: list[int] = []  # of each chunk, as csrc/plan/layout.c packs them, but for padding
    last: dict[int, int] = {}
    for numel, width, kind in specs:
        if kind not in last or weights[last[kind]] + numel * width > chunk:
            last[kind] = len(weights)
            weights.append(0)
        weights[last[kind]] += numel * width
    for block in (4 * least, 2 * least):
        rounded = sum(-(-size // (n_shards * block)) for size in weights) * n_shards * block
        if rounded <= _MOST_ROUNDED * sum(weights) and (budget < 0 or block <= budget // 1024):
            return block
    return least
