"""Sizes as people write them: bytes, "24GB", "24GiB", or a fraction of what there is."""

from __future__ import annotations

import re

__all__ = ["parse_bytes"]

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)},
}
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | float | str, total: int | None = None, name: str = "size") -> int:
    """Returns `size` in bytes.

    Args:
        size: bytes as an int; a fraction of `total` as a float in (0, 1]; or text such as "24GB"
            (10^9) and "24GiB" (2^30), units up to T.
        total: bytes that a fraction refers to.
        name: the argument's name, for the error.

    Raises:
        ValueError: the size is not positive, cannot be read, or is a fraction without a `total`.
    """
    hint = f'{name}: give bytes (int), text such as "24GB" or "24GiB", or a fraction in (0, 1]'
    if isinstance(size, str):
        match = _PATTERN.fullmatch(size)
        unit = match.group(2).upper() if match else None
        if match is None or unit not in _UNITS:
            raise ValueError(f"{hint}; cannot read {size!r}")
        size = int(float(match.group(1)) * _UNITS[unit])
    elif isinstance(size, bool) or not isinstance(size, int | float):
        raise ValueError(f"{hint}; got {size!r}")
    elif isinstance(size, float):
        if not 0.0 < size <= 1.0 or total is None:
            raise ValueError(f"{hint}; got {size!r}")
        size = int(size * total)
    if size <= 0:
        raise ValueError(f"{hint}; got {size} bytes")
    return size
