"""What `gemini-strategy run` told this process, or one that it comes of: in the environment, which goes on to all.

Invariants
    1. A process outside of any run finds nothing, and does nothing here.
    2. Each run has a file, which it makes and removes; a process of it that manages a model leaves a mark there. Where
       the file is gone, the run is over, and there is nobody to tell.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIABLE = "GEMINI_RUN"

_noted_in = 0  # the process that has left its marks


def told() -> dict[str, Any]:
    """What the innermost run said; empty outside of runs.

    Keys: prefix (of the Python that this goes for), package (the folder of Gemini's), marks (the files of this run and
    of those around it), plugin (arguments of a GeminiPlugin).
    """
    try:
        found = json.loads(os.environ.get(VARIABLE, ""))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def telling(plugin: dict[str, Any], reports: bool, marks: Path, startup: Path) -> Iterator[None]:
    """Inside, this process and all that come of it are told; after it, the environment is as it was.

    Args:
        plugin: arguments of a GeminiPlugin.
        reports: every engine that is not told otherwise prints its tables.
        marks: the file of this run.
        startup: the folder whose sitecustomize a Python that starts is to run.
    """
    global _noted_in
    outer = told().get("marks", [])
    said = {
        "prefix": sys.prefix,
        "package": str(Path(__file__).absolute().parent),
        "marks": [*outer, str(marks)],
        "plugin": plugin,
    }
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p != str(startup)]
    paths = os.pathsep.join([str(startup), *(others if others != [""] else [])])
    here = {VARIABLE: json.dumps(said), "PYTHONPATH": paths}
    if reports:
        here["GEMINI_REPORT"] = "1"
    before = {name: os.environ.get(name) for name in here}
    os.environ |= here
    _noted_in = 0
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def note(model: str, is_trained: bool, budget: str, rank: int, ranks: int) -> None:
    """This process manages a model: the runs that it comes of know so, and rank 0 says so, once.

    Args:
        model: the name of its class.
        is_trained: it has an optimizer.
        budget: of the device, as text.
        rank, ranks: of this process among those that share the model.
    """
    global _noted_in
    marks = told().get("marks")
    if marks is None or _noted_in == os.getpid():
        return
    for path in marks:
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.write(file, b"+")
            os.close(file)
    if is_trained:
        _noted_in = os.getpid()
        if rank == 0:
            others = f", with {ranks} ranks" if ranks > 1 else ""
            print(
                f"gemini-strategy run: process {os.getpid()} trains {model}{others}; device budget: {budget}",
                file=sys.stderr,
                flush=True,
            )
