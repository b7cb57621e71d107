"""What drivers of runs share: options, processes that end, one JSON line for each run, tables of them."""

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

# ---- what is asked for ------------------------------------------------------------------------


def parser_of(doc: str) -> argparse.ArgumentParser:
    """`doc`: what --help begins with."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)


def budget(text: str) -> str:
    """A device budget, as manage() reads it: a wrong one ends here, before anything starts."""
    from gemini_strategy.sizes import parse_bytes

    return text if parse_bytes(text, 0, "budget") else ""


def options(doc: str, presets: Mapping[str, Any], preset: str) -> argparse.ArgumentParser:
    """The options that every driver has; `preset`: the default."""
    parser = parser_of(doc)
    parser.add_argument("--preset", choices=tuple(presets), default=preset)
    parser.add_argument("--only", help="runs, separated by commas; default: the preset's")
    parser.add_argument("--steps", type=int, default=7, help="measured steps (default 7)")
    parser.add_argument(
        "--warmup",
        type=int,
        default=4,
        help="steps before them (default 4); Gemini takes more until its plan stays",
    )
    parser.add_argument(
        "--timeline", type=Path, help="a folder for Chrome traces and pictures of steps"
    )
    parser.add_argument("--out", type=Path, help="a .jsonl file to append to")
    return parser


def parse(
    parser: argparse.ArgumentParser,
    presets: Mapping[str, Any],
    parse_run: Callable[[str], dict[str, Any]],
) -> argparse.Namespace:
    """The command line, with the names of the runs; a wrong one ends here, before anything starts."""
    args = parser.parse_args()
    args.runs = args.only.split(",") if args.only else list(presets[args.preset].runs)
    for name in args.runs:
        try:
            parse_run(name)
        except ValueError as error:
            parser.error(str(error))
    if args.steps < 1 or args.warmup < 0:
        parser.error("--steps must be at least 1, --warmup at least 0")
    return args


def command(*outputs: Path | None) -> str:
    """The command line; of the paths of --out and its like the last part, which means something elsewhere too."""
    words = sys.argv
    for out in filter(None, outputs):
        words = [arg.replace(str(out), out.name) for arg in words]
    return shlex.join([Path(sys.executable).name, *words])


# ---- processes --------------------------------------------------------------------------------


class Process:
    """A run, or one rank of it: a process with a group of its own, what it says, and what it leaves."""

    def __init__(
        self, words: Sequence[str | Path], result: Path, enter: Callable[[str], None] | None
    ) -> None:
        """Starts Python on `words`; `enter` is told the phases that the run says it is in."""
        self._result = result
        self._errors = open(result.with_suffix(".stderr"), "w+", encoding="utf-8")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(
            target=self._follow, args=(self.process.stdout, enter), daemon=True
        )
        self._reader.start()

    @staticmethod
    def _follow(stream: IO[str], enter: Callable[[str], None] | None) -> None:
        """Passes on what is no phase."""
        for line in stream:
            if not line.startswith("@phase "):
                sys.stderr.write(line)
            elif enter:
                enter(line.split()[1])

    def result(self) -> dict[str, Any] | None:
        """What it has left."""
        if not self._result.exists():
            return None
        return json.loads(self._result.read_text(encoding="utf-8"))

    def say_where(self) -> None:
        """Lets it write, where it asked for that, what its threads are doing to its standard error."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)

    def end(self) -> str:
        """Ends it and whatever it started, which may outlive it; its standard error."""
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5.0)
        self._errors.seek(0)
        said = self._errors.read()
        self._errors.close()
        return said


# ---- lines ------------------------------------------------------------------------------------


def _nameable(value: Any) -> Any:
    """The value, with None for the numbers that JSON has no word for: infinities and NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _nameable(of) for key, of in value.items()}
    return [_nameable(of) for of in value] if isinstance(value, list | tuple) else value


def compare_with_plan(line: dict[str, Any]) -> None:
    """The measured figures as shares of what the engine foretold."""
    for of, measured, predicted in (
        ("of_bound", "step_seconds", "predicted_bound_seconds"),
        ("of_predicted_step", "step_seconds", "predicted_step_seconds"),
        ("of_predicted_device_peak", "device_peak_bytes", "predicted_device_peak_bytes"),
    ):
        value, base = line.get(measured), line.get(predicted)
        line[of] = value / base if value and base else None


def keep_line(line: dict[str, Any], out: Path | None) -> None:
    """Prints a run's line, and appends it to `out` if there is one."""
    text = json.dumps(_nameable(line), allow_nan=False)
    print(text, flush=True)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "a", encoding="utf-8") as file:
            file.write(text + "\n")


def has_failed(line: dict[str, Any]) -> bool:
    """Whether a run ended without figures that this machine could have given."""
    return line["available"] and line["error"] is not None


# ---- tables -----------------------------------------------------------------------------------


Column = tuple[str, str, Callable[[Any], str]]
"""Title, key of a line, and the text of what it has there."""


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.2f}"


def cells(line: dict[str, Any], columns: Sequence[Column]) -> list[str]:
    """One row of a table; a figure that the line lacks is nothing."""
    return ["" if line.get(key) is None else text(line[key]) for _, key, text in columns]


def show_lines(title: str, columns: Sequence[Column], lines: list[dict[str, Any]]) -> None:
    """The runs side by side."""
    show_rows(title, [name for name, *_ in columns], [cells(line, columns) for line in lines])


def show_rows(title: str, columns: Sequence[str], rows: list[list[str]]) -> None:
    """A table, in columns of text."""
    everything = [list(columns), *rows]
    widths = [max(map(len, cells)) for cells in zip(*everything, strict=True)]
    print(title, file=sys.stderr)
    for row in everything:
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(text.rstrip(), file=sys.stderr)


def show_errors(lines: list[dict[str, Any]]) -> int:
    """Why some runs have no figures; the exit status that this makes."""
    for line in lines:
        if line["error"]:
            print(f"{line['name']}: {line['error'].splitlines()[0]}", file=sys.stderr)
    return int(any(map(has_failed, lines)))
