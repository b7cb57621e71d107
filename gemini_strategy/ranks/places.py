"""Where a rank is, in the words of the program that runs on it.

They are read from the stack of its thread, so that no call has to say where it begins.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
#: What is not the program: packages where torch is, Python's own, and this one.
_LIBRARIES = (
    str(Path(torch.__file__).parents[1]) + "/",
    str(Path(os.__file__).parent) + "/",
    _PACKAGE,
    "<",
)
#: What every member of a group has to call before one of them returns.
_OF_ALL = ("barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_object")
_MOST = 80  # characters of a line


@dataclass(frozen=True)
class Place:
    """Where a thread is.

    Attributes:
        words: "evaluates the model (eval.py, line 12, in evaluate: `loss = model(x)`)".
        waits_for: ranks, in torch.distributed's numbers, that a call of torch.distributed waits for; empty: in none.
        mark: tells this moment of the program from others.
    """

    words: str
    waits_for: tuple[int, ...] = ()
    mark: str = ""


def place_of(thread: int | None) -> Place:
    """Of a thread, or of the main one."""
    main = threading.main_thread().ident
    found = sys._current_frames().get(main if thread is None else thread)  # type: ignore[arg-type]
    frames: list[FrameType] = []
    while found is not None:
        frames.insert(0, found)
        found = found.f_back
    at, words = _call(frames)
    lines = [frame for frame in frames[:at] if _is_program(frame)]
    lines = lines or [frame for frame in frames if _is_program(frame)]
    group = _waiting_group(frames)
    mark = f"{id(frames[-1])}.{frames[-1].f_lasti}" if frames else ""
    return Place(words + (f" ({_line(lines[-1])})" if lines else ""), group, mark)


def _call(frames: list[FrameType]) -> tuple[int, str]:
    """The first frame that is Gemini's or torch's part of the program's call, and what that does."""
    for at, frame in enumerate(frames):
        words = _words(frame)
        if words:
            return at, words
    for at, frame in enumerate(frames):
        if frame.f_code.co_filename == __file__.replace("places.py", "comm.py"):
            return at, "uses a module or a parameter of the model"
    return len(frames), "is outside Gemini"


def _words(frame: FrameType) -> str:
    file, name, own = frame.f_code.co_filename, frame.f_code.co_name, frame.f_locals.get("self")
    if file == _PACKAGE + "manage.py" and name == "manage":
        return "is in manage()"
    if file == _PACKAGE + "engine.py" and not name.startswith("_"):
        return f"is in engine.{name}()"
    if file == _PACKAGE + "engine.py" and name == "__exit__":
        return "is in engine.close()"
    if file == _PACKAGE + "parameters/hooks.py" and name == "__call__":
        trains = getattr(getattr(own, "model", None), "training", True)
        return "is in the model's forward" if trains else "evaluates the model"
    if file.startswith(_PACKAGE + "optim/managed") and name == "step":
        return "is in optimizer.step()"
    if file == _PACKAGE + "parameters/slot.py" and own is not None:
        return f"reads or writes {getattr(own, 'name', 'a parameter')}"
    if file.endswith("torch/autograd/graph.py") and name == "_engine_run_backward":
        return "is in a backward"
    if file.endswith("torch/distributed/distributed_c10d.py") and not name.startswith("_"):
        return f"is in torch.distributed.{name}()"
    return ""


def _waiting_group(frames: list[FrameType]) -> tuple[int, ...]:
    for frame in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("torch/distributed/distributed_c10d.py") and name in _OF_ALL:
            group: Any = frame.f_locals.get("group") or dist.group.WORLD
            return tuple(dist.get_process_group_ranks(group))
    return ()


def _is_program(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_LIBRARIES)


def _line(frame: FrameType) -> str:
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    source = linecache.getline(file, frame.f_lineno).strip()
    source = source if len(source) <= _MOST else source[: _MOST - 3] + "..."
    where = f"{Path(file).name}, line {frame.f_lineno}"
    where += "" if name == "<module>" else f", in {name}"
    return f"{where}: {source}" if source else where
