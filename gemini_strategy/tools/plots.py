"""Rates as a picture, by matplotlib, which nothing else here imports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMATS = (".svg", ".png")
_PANELS = (("copies of all ranks", "GB/s"), ("Adam of all ranks", "G parameters/s"))


def figure() -> Any:
    """An empty figure, of no window.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'gemini-strategy[plots]'") from error
    return Figure(figsize=(11, 4.5), layout="constrained")


def draw(
    empty: Any,
    totals: Mapping[int, Mapping[str, float | None]],
    titles: Mapping[str, str],
    path: Path,
) -> None:
    """Draws a line for each rate over the number of ranks, and writes the picture; what was not measured has no line.

    Args:
        empty: of `figure`.
        totals: by the number of ranks, in bytes/s and parameters/s.
        titles: of the rates.
        path: ends in one of FORMATS.
    """
    panels = empty.subplots(1, 2)
    for panel, (title, unit) in zip(panels, _PANELS, strict=True):
        panel.set(title=title, xlabel="ranks at once", ylabel=unit, xticks=sorted(totals))
    for name, title in titles.items():
        known = {n: rates[name] for n, rates in totals.items() if rates[name] is not None}
        if known:
            panel = panels[1 if "adam" in name else 0]
            values = [rate / 1e9 for rate in known.values()]
            panel.plot([*known], values, marker="o", label=title.rpartition(",")[0])
    for panel in panels:
        panel.set_ylim(bottom=0)
        panel.legend(fontsize="small")
    empty.savefig(path)
