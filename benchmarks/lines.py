"""What drivers of runs share: processes that end, one JSON line for each run, tables of them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def command(out: Path | None) -> str:
    """The command line; of the path of --out the last part, which means something elsewhere too."""
    words = [arg.replace(str(out), out.name) if out else arg for arg in sys.argv]
    return shlex.join([Path(sys.executable).name, *words])


def end(process: subprocess.Popen[str]) -> None:
    """Ends a run and whatever it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def keep_line(line: dict[str, Any], out: Path | None) -> None:
    """Prints a run's line, and appends it to `out` if there is one."""
    text = json.dumps(line)
    print(text, flush=True)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "a", encoding="utf-8") as file:
            file.write(text + "\n")


def has_failed(line: dict[str, Any]) -> bool:
    """Whether a run ended without figures that this machine could have given."""
    return line["available"] and line["error"] is not None


def show_rows(title: str, columns: Sequence[str], rows: list[list[str]]) -> None:
    """A table by rich where there is rich, else columns of text."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [list(columns), *rows]) for i in range(len(columns))]
        for row in [[title], list(columns), *rows]:
            text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
            print(text.rstrip(), file=sys.stderr)
        return
    table = Table(title=title)
    for column in columns:
        table.add_column(column, no_wrap=column == "run")
    for row in rows:
        table.add_row(*row)
    Console(stderr=True, width=None if sys.stderr.isatty() else 160).print(table)
