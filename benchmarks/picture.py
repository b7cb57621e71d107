"""Draws README's picture: speed against GPU memory, from the lines that benchmarks/results/ keeps.

    python benchmarks/picture.py            prints the SVG
    python benchmarks/picture.py --write    puts it into docs/speed.svg

A speed is a share of the run with everything on the GPU that the same command made, as the hosts of two machines differ
by up to a factor of two; a clipped run's is of the clipped one. Memory is the driver's figure. benchmarks/table.py says
which command of a file counts.
"""

import argparse
from dataclasses import dataclass
from html import escape

from table import ROOT, Run, latest

PICTURE = ROOT / "docs" / "speed.svg"
WIDTH, HEIGHT = 880, 350
TOP, BOTTOM = 64, 292  # of the panels, from above
FONT = "font-family='Helvetica, Arial, sans-serif'"
OURS, OTHERS, WHOLE = "#0b7a4b", "#b4540a", "#555555"


@dataclass(frozen=True)
class Point:
    """A run: its memory in GB, its share of the speed, and on which side of it the label stands."""

    label: str
    run: Run
    beside: Run  # everything on the GPU
    color: str
    is_hollow: bool = False
    is_left: bool = False
    down: float = 4.0

    @property
    def gigabytes(self) -> float:
        return float(self.run["device_peak_bytes"]) / 1e9

    @property
    def share(self) -> float:
        return float(self.beside["step_seconds"] / self.run["step_seconds"])


@dataclass(frozen=True)
class Panel:
    """Points on axes of their own; `left` and `right` are columns of the picture."""

    title: str
    left: int
    right: int
    most_gigabytes: int
    points: tuple[Point, ...]

    def x(self, gigabytes: float) -> float:
        return self.left + (self.right - self.left) * gigabytes / self.most_gigabytes

    @staticmethod
    def y(share: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * share / 1.1


def text(x: float, y: float, words: str, size: int = 12, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' {FONT} {more}>{escape(words)}</text>"


def line(x1: float, y1: float, x2: float, y2: float, color: str, more: str = "") -> str:
    ends = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {ends} stroke='{color}' {more}/>"


def drawn(panel: Panel) -> list[str]:
    parts = [text(panel.left, TOP - 16, panel.title, 13, "font-weight='bold' fill='#222222'")]
    for percent in (0, 25, 50, 75, 100):
        y = panel.y(percent / 100)
        parts.append(line(panel.left, y, panel.right, y, "#dddddd"))
        parts.append(
            text(panel.left - 6, y + 4, f"{percent} %", 11, "text-anchor='end' fill='#555555'")
        )
    for gigabytes in range(0, panel.most_gigabytes + 1, 20):
        x = panel.x(gigabytes)
        parts.append(line(x, BOTTOM, x, BOTTOM + 4, "#555555"))
        parts.append(
            text(x, BOTTOM + 18, str(gigabytes), 11, "text-anchor='middle' fill='#555555'")
        )
    for point in panel.points:
        x, y = panel.x(point.gigabytes), panel.y(point.share)
        fill = "white" if point.is_hollow else point.color
        parts.append(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='5.5' fill='{fill}' stroke='{point.color}' "
            "stroke-width='2'/>"
        )
        side = "end" if point.is_left else "start"
        words = f"{point.label}: {100 * point.share:.0f} %"
        place = x + (-11 if point.is_left else 11), y + point.down
        for look in ("fill='white' stroke='white' stroke-width='4'", f"fill='{point.color}'"):
            parts.append(
                text(*place, words, 12, f"text-anchor='{side}' {look}")
            )  # lines stay behind
    return parts


def title(run: Run, tokens: str) -> str:
    """What ran where."""
    gpu = run["environment"]["gpu"].removeprefix("NVIDIA ").partition(" ")[0]
    return f"{run['parameters'] / 1e9:.1f}B parameters{tokens}, one {gpu}"


def panels() -> tuple[Panel, Panel]:
    peers, offload = "offload_h100.jsonl", "offload_h200.jsonl"
    whole, ours, torchao, zero2, whole_clip, ours_clip, zero2_clip = latest(
        peers,
        "A",
        *("resident", "gemini-auto", "torchao", "deepspeed-z2"),
        *("resident-clip", "gemini-auto-clip", "deepspeed-z2-clip"),
    )
    short_whole, short = latest(offload, "B", "resident", "gemini-auto")
    long_whole, long = latest(offload, "C", "resident", "gemini-auto")
    assert whole["tokens_per_step"] == 16384
    assert (short["tokens_per_step"], long["tokens_per_step"]) == (8192, 32768)
    assert {run["budget"] for run in (ours, ours_clip, short, long)} == {"24GB"}
    all_on_it = "everything on the GPU"
    small = Panel(
        title(whole, ", 16,384 tokens per step"),
        60,
        440,
        80,
        (
            Point(all_on_it, whole, whole, WHOLE, is_left=True, down=-9),
            Point("Gemini, 24 GB", ours, whole, OURS, down=6),
            Point("torchao, no fp32 masters", torchao, whole, OTHERS),
            Point("Gemini, when each step is clipped", ours_clip, whole_clip, OURS, is_hollow=True),
            Point("DeepSpeed ZeRO-2 offload", zero2, whole, OTHERS, down=-1),
            Point("the same, clipped", zero2_clip, whole_clip, OTHERS, is_hollow=True, down=14),
        ),
    )
    large = Panel(
        title(short, ""),
        520,
        860,
        120,
        (
            Point(all_on_it, short_whole, short_whole, WHOLE, is_left=True, down=-9),
            Point("Gemini, 24 GB, 32,768 tokens per step", long, long_whole, OURS),
            Point("Gemini, 24 GB, 8,192 tokens per step", short, short_whole, OURS),
        ),
    )
    return small, large


def picture() -> str:
    both = panels()
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' "
        f"width='{WIDTH}' height='{HEIGHT}'>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        text(
            16,
            26,
            "Training speed, in percent of the run that has everything on the GPU",
            15,
            "fill='#222222'",
        ),
    ]
    for panel in both:
        parts += drawn(panel)
        middle = (panel.left + panel.right) / 2
        parts.append(
            text(
                middle,
                BOTTOM + 42,
                "GPU memory that was used, GB",
                12,
                "text-anchor='middle' fill='#222222'",
            )
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"into {PICTURE.relative_to(ROOT)}")
    if parser.parse_args().write:
        PICTURE.write_text(picture())
    else:
        print(picture(), end="")


if __name__ == "__main__":
    main()
