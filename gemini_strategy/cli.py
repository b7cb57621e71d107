"""The command `gemini-strategy`, which `python -m gemini_strategy` is too: one module per subcommand.

A subcommand's module has `add_arguments(parser)` and `execute(arguments)`, which returns the exit
status. Only the module that is asked for is imported, and torch not before it needs it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from gemini_strategy._version import __version__

# Name: the module, and the line that `gemini-strategy --help` shows.
COMMANDS: dict[str, tuple[str, str]] = {
    "estimate": (
        "gemini_strategy.estimates.command",
        "What training a model will take: device and host memory, seconds per step. Allocates nothing.",
    ),
    "profile": (
        "gemini_strategy.tools.profile",
        "How fast this machine copies and updates, with one rank and with several at once, in a table, JSON or a plot.",
    ),
    "run": (
        "gemini_strategy.huggingface.run",
        "runs a script that uses Trainer, trl or accelerate under a budget, as it is",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand with `argv` (the process's own arguments where None); its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="gemini-strategy", description="Trains models larger than the GPU's memory."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    listed = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        one = listed.add_parser(name, help=text, description=text)
        if words[:1] == [name]:
            importlib.import_module(module).add_arguments(one)
    arguments = parser.parse_args(words)
    command = importlib.import_module(COMMANDS[arguments.command][0])
    return int(command.execute(arguments))
