"""Running random programs, each in a process of its own; judging, and making a failing one smaller."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from helpers import chaos
from helpers.forked import Forks
from random_programs import Program, generate, play_source

chaos.load()  # once for all programs that are forked from here

__all__ = ["Verdict", "play_program", "shrink", "try_program"]

SECONDS = 60.0  # for one program

LEFT_ALONE = "is gone or has closed its end"  # of an error's text: another rank has ended

#: What the unmanaged run cannot do is no program; what is refused by name is no failure.
RIGHT, REFUSED, INVALID, FAILED = "right", "refused", "invalid", "failed"


@dataclass
class Verdict:
    """What came of a program."""

    result: str
    why: str = ""
    kind: str = ""  # the first words, to count failures by


def play_program(rank_or_source: Any, source: str | None = None) -> tuple[str, str]:
    """In a fork: both runs of a program; (result, why). With several ranks the first argument is the rank."""
    import random_support as support

    text = rank_or_source if source is None else source
    names: dict[str, Any] = {**vars(support), "__name__": "program"}
    exec(compile(text, "<program>", "exec"), names)
    net, play, how = names["Net"], names["play"], names["HOW"]
    try:
        support.run_unmanaged(net, play, how)
    except Exception as error:
        return INVALID, f"{type(error).__name__}: {error}"
    try:
        support.both(net, play, how)
    except support.Differs as error:
        return FAILED, f"other bits: {error}"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        parameters = [n for n, _ in net().named_parameters(remove_duplicate=False)]
        is_named = any(re.search(rf"(?<![\w.]){re.escape(n)}(?!\w)", text) for n in parameters)
        if isinstance(error, support.gs.GeminiError) and is_named:
            # A plain program has to be served: nothing in it is unusual.
            is_failure = isinstance(error, MemoryError) or not how["may_refuse"]
            return (FAILED if is_failure else REFUSED), f"refused: {text}"
        return FAILED, f"raised: {text}\n{traceback.format_exc()[-1500:]}"
    return RIGHT, ""


def try_program(forks: Forks, program: Program) -> Verdict:
    """Runs a program on its ranks."""
    job = "random_campaign:play_program"
    ranks = program.how["ranks"]
    ended = forks.run(job, play_source(program), ranks=ranks, timeout=SECONDS)
    worst = Verdict(RIGHT)
    verdicts = [
        (rank, *(end.value if end.value is not None else (FAILED, f"died: {end.how}")))
        for rank, end in enumerate(ended)
    ]
    # A rank that was left alone by one that did not end well is judged by that one, which may be a step ahead.
    first = [v for v in verdicts if LEFT_ALONE not in v[2]]
    if all(result == RIGHT for _, result, _ in first):
        first = verdicts
    for rank, result, why in first:
        if [RIGHT, REFUSED, INVALID, FAILED].index(result) > [
            RIGHT,
            REFUSED,
            INVALID,
            FAILED,
        ].index(worst.result):
            where = f"rank {rank}: " if ranks > 1 else ""
            worst = Verdict(result, where + why, _kind(why))
    return worst


def _kind(why: str) -> str:
    """The first line without what varies: names of parameters and numbers."""
    words = why.strip().splitlines()[0] if why.strip() else ""
    words = re.sub(r"\b(p\d+|stem|head)(\.\w+)*\b", "P", words)
    return re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?", "N", words)[:90]


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with a piece less, the largest pieces first."""
    actions, parts = program.actions, program.parts
    for size in (8, 4, 2, 1):
        for i in range(0, len(actions), size):
            if size < len(actions) or size == 1:
                yield replace(program, actions=actions[:i] + actions[i + size :])
    for i in range(len(parts)):
        yield replace(program, parts=parts[:i] + parts[i + 1 :])
    how = program.how
    for key, plain in (("chaos", None), ("ranks", 1), ("precision", "32-true"), ("policy", "cpu")):
        if how[key] != plain:
            yield replace(program, how=how | {key: plain})


def shrink(forks: Forks, program: Program, verdict: Verdict, seconds: float = 60.0) -> Program:
    """The smallest that was found that fails in the same way."""
    end = time.monotonic() + seconds
    found = True
    while found and time.monotonic() < end:
        found = False
        for candidate in _smaller(program):
            if time.monotonic() > end:
                break
            tried = try_program(forks, candidate)
            if tried.result == FAILED and tried.kind.split(":")[0] == verdict.kind.split(":")[0]:
                program, found = candidate, True
                break
    return program


def failing_seed(
    forks: Forks, seed: int, make: Callable[[int], Program] = generate
) -> tuple[Verdict, Program]:
    """A seed's verdict and program."""
    program = make(seed)
    return try_program(forks, program), program
