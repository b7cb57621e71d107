"""`gemini-strategy run PROGRAM ARGS`: a program that knows nothing of Gemini trains under a budget.

A script's own process is this one, so launchers work as they are:
`torchrun --nproc-per-node=2 -m gemini_strategy run train.py`, `accelerate launch -m gemini_strategy run train.py`.

What was said here reaches every process of this Python that comes of the program, by the environment (inherited.py) and
a sitecustomize (startup/): `gemini-strategy run torchrun --nproc-per-node=2 train.py` is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from gemini_strategy.choices import POLICIES
from gemini_strategy.huggingface.install import install
from gemini_strategy.huggingface.plugin import GeminiPlugin, use
from gemini_strategy.huggingface.programs import find, run_beside, staying
from gemini_strategy.inherited import telling
from gemini_strategy.report.measured import tell_all

NOTHING = 1  # the status of a run in which nothing trained
_TOLD = ("device_budget", "host_budget", "placement_policy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device-budget",
        metavar="BYTES",
        default=os.environ.get("GEMINI_DEVICE_BUDGET") or None,
        help="device memory, '24GB' or a fraction of the device (default: GEMINI_DEVICE_BUDGET, else what there is)",
    )
    parser.add_argument(
        "--host-budget",
        metavar="BYTES",
        help="host memory of each process (default: what there is)",
    )
    parser.add_argument("--policy", choices=tuple(POLICIES), default="auto", help="default: auto")
    parser.add_argument(
        "--report",
        action="store_true",
        help="print what is planned, and at the end what was measured beside it",
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT names a module")
    # One argument with all its words: argparse takes a "--" from between two.
    program = "a program that trains with Trainer, trl or accelerate, and its arguments"
    parser.add_argument("script", metavar="SCRIPT", nargs=argparse.PARSER, help=program)


def execute(arguments: argparse.Namespace) -> int:
    """Runs the script in this process; what it raises, its own exit included, goes on.

    A program that is not this Python's runs in a process of its own.

    Returns:
        0, or how that program ended.
    """
    try:
        plugin = GeminiPlugin(
            device_budget=arguments.device_budget,
            host_budget=arguments.host_budget,
            placement_policy=arguments.policy,
        )
    except ValueError as error:
        sys.exit(f"gemini-strategy run: {_as_option(str(error))}")
    words = arguments.script[arguments.script[0] == "--" :]
    run = _Run(words[0])
    if arguments.is_module:
        act = functools.partial(_run_module, words)
    else:
        try:
            path, is_python = find(words[0])
        except FileNotFoundError:  # a pipe cannot be read twice
            sys.exit(f"gemini-strategy run: there is no file {words[0]}, and no such program")
        act = functools.partial(_run_file if is_python else run.beside, path, words)
    use(plugin)
    install()
    with run.telling(plugin, arguments.report):
        try:
            act()
        except SystemExit as end:
            if run.status(end.code) != end.code:
                return NOTHING
            raise
        finally:
            tell_all()  # before the traceback of what it raises
        return run.status(0)


def _as_option(text: str) -> str:
    """What GeminiPlugin says of an argument, as a person gave it."""
    name, equals, rest = text.removeprefix("GeminiPlugin(").partition("=")
    return f"--{name.replace('_', '-')} {rest.replace('):', ':', 1)}" if equals else text


def _run_module(words: list[str]) -> None:
    sys.argv = words
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _run_file(path: str, words: list[str]) -> None:
    sys.argv = words
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")


class _Run:
    """One run, and whether anything trained in it.

    Args:
        script: what it is called.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self._marks: Path | None = None
        self._number = (
            -1
        )  # of the open file, which is there even when someone has cleared the folder

    @contextlib.contextmanager
    def telling(self, plugin: GeminiPlugin, reports: bool) -> Iterator[None]:
        """Inside, what comes of this process is told of the plugin, and a program that replaces it stays beside it.

        Args:
            reports: each of these processes prints its tables.
        """
        self._number, name = tempfile.mkstemp(prefix="gemini-run-")
        self._marks = Path(name)
        startup = Path(__file__).parent / "startup"
        told = {name: getattr(plugin, name) for name in _TOLD}
        try:
            with telling(told, reports, self._marks, startup), staying(self._end):
                yield
        finally:
            os.close(self._number)
            self._marks.unlink(missing_ok=True)

    def beside(self, path: str, words: list[str]) -> NoReturn:
        """Runs a program that is not this Python's."""
        try:
            status = run_beside(path, words)
        except OSError as error:
            sys.exit(f"gemini-strategy run: {path} cannot be started: {error.strerror}")
        sys.exit(status if status >= 0 else 128 - status)

    def _end(self, status: int) -> int:
        """Of a program that has taken this process's place."""
        status = self.status(status)
        assert self._marks is not None
        self._marks.unlink(missing_ok=True)
        return status

    def status(self, status: Any) -> Any:
        """The run has ended with it: what it ends with, as a run in which nothing trained has failed."""
        if os.fstat(self._number).st_size:
            return status
        print(
            f"gemini-strategy run: {self._script} gave no model to a Trainer (transformers, trl) or to an Accelerator, "
            "nor did a process that it started: nothing ran under the budget. Other loops call "
            "gemini_strategy.manage(model, optimizer); a process of another Python environment, or without this one's "
            "environment variables, is not reached: there start the training program itself with `gemini-strategy run`",
            file=sys.stderr,
        )
        return status or NOTHING
