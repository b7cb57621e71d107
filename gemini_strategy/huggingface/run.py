"""`gemini-strategy run script.py ARGS`: a script that knows nothing of Gemini trains under a budget.

The script's own process is this one, so launchers work as they are:
`torchrun --nproc-per-node=2 -m gemini_strategy run train.py`, `accelerate launch -m gemini_strategy run train.py`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from gemini_strategy.choices import POLICIES
from gemini_strategy.huggingface.engines import all_made
from gemini_strategy.huggingface.install import install
from gemini_strategy.huggingface.plugin import GeminiPlugin, use


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
        default=None,
        help="print what is planned, and at the end what was measured beside it",
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT names a module")
    # One argument with all its words: argparse takes a "--" from between two.
    program = "a program that trains with Trainer, trl or accelerate, and its arguments"
    parser.add_argument("script", metavar="SCRIPT", nargs=argparse.PARSER, help=program)


def execute(arguments: argparse.Namespace) -> int:
    """Runs the script in this process; what it raises, its own exit included, goes on.

    Returns:
        0.
    """
    try:
        plugin = GeminiPlugin(
            device_budget=arguments.device_budget,
            host_budget=arguments.host_budget,
            placement_policy=arguments.policy,
            report=arguments.report,
        )
    except ValueError as error:
        sys.exit(f"gemini-strategy run: {error}")
    words = arguments.script[arguments.script[0] == "--" :]
    script = words[0]
    if not arguments.is_module and not (Path(script).is_file() or Path(script).is_dir()):
        sys.exit(f"gemini-strategy run: there is no file {script}")  # a pipe cannot be read twice
    use(plugin)
    install()
    sys.argv = words
    try:
        if arguments.is_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            if not sys.flags.safe_path:
                sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(str(Path(script).absolute()), run_name="__main__")
    except SystemExit:
        _tell(script)
        raise
    _tell(script)
    return 0


def _tell(script: str) -> None:
    """The script has ended: whether it met anything of ours."""
    if not all_made():
        print(
            f"gemini-strategy run: {script} gave no model to a Trainer (transformers, trl) or to an Accelerator: "
            "nothing ran under a budget. Other loops call gemini_strategy.manage(model, optimizer)",
            file=sys.stderr,
        )
