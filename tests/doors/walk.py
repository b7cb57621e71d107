"""Walking one program in a process of its own, and comparing what came out of it with the unmanaged run.

An outcome is plain data: tensors are their dtype, shape and bytes. It has what the program returned, the gradients that
it left, the losses of two further steps (a write that was lost shows there) and the weights after `close()`. Where the
managed program raised, the text has to name a parameter or its module, and training has to be possible afterwards.
"""

from __future__ import annotations

import functools
import gc
import importlib
import math
import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gemini_strategy as gs
from programs import SETUPS, TABLE, Door, Run, names_of, start

__all__ = ["difference", "doors", "judge", "walk", "walk_in_turn"]

WAY_OUT = re.compile(
    r"\bstate_dict\(\)|\bclos(e|ing)\b[^\n]*\bengine\b|\bengine\b[^\n]*\bclos(e|ing)\b",
    re.IGNORECASE,
)


@functools.cache
def doors() -> dict[str, Door]:
    """All rows."""
    for file in sorted(Path(__file__).parent.glob("programs_*.py")):
        importlib.import_module(file.stem)
    return TABLE


# ---- plain data ----------------------------------------------------------------------------------


def flat(value: Any) -> Any:
    """Plain data with every bit of `value`."""
    if isinstance(value, Tensor):
        return _flat_tensor(value)
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return flat(np.asarray(value))
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | str | bytes):
        return value
    if isinstance(value, float):
        return ("float", value.hex())
    if isinstance(value, dict):
        return {str(k): flat(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [flat(v) for v in value]
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    raise TypeError(f"a program returned a {type(value).__name__}")


def _flat_tensor(value: Tensor) -> Any:
    value = value.detach()
    if value.is_nested:
        return [flat(part) for part in value.unbind()]
    if value.layout is not torch.strided:
        value = value.to_dense()
    plain = value.cpu().contiguous().clone()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return ("tensor", str(plain.dtype), tuple(plain.shape), raw)


def _numbers(value: tuple) -> np.ndarray:
    dtype, raw = value[1].removeprefix("torch."), value[3]
    if dtype == "bfloat16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, np.bool_ if dtype == "bool" else np.dtype(dtype)).astype(np.float64)


def difference(got: Any, want: Any, where: str = "") -> str | None:
    """The first place where two outcomes differ, in words."""
    if type(got) is not type(want):
        return f"{where}: {_brief(got)} instead of {_brief(want)}"
    if isinstance(want, dict):
        if list(got) != list(want):
            return f"{where}: keys {list(got)} instead of {list(want)}"
        parts = ((f"{where}[{key}]", got[key], want[key]) for key in want)
    elif isinstance(want, list):
        if len(got) != len(want):
            return f"{where}: {len(got)} values instead of {len(want)}"
        parts = ((f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(got, want, strict=True)))
    else:
        return None if got == want else f"{where}: {_apart(got, want)}"
    return next((text for at, a, b in parts if (text := difference(a, b, at))), None)


def _brief(value: Any) -> str:
    if isinstance(value, tuple) and value[0] in ("tensor", "array"):
        return f"{value[0]} {value[1]} {value[2]}"
    return f"{value!r:.200}"


def _apart(got: Any, want: Any) -> str:
    is_like = isinstance(want, tuple) and len(want) == 4 and got[:3] == want[:3]
    if not is_like:
        return f"{_brief(got)} instead of {_brief(want)}"
    a, b = _numbers(got), _numbers(want)
    wrong = int((a != b).sum())
    gap = float(np.abs(a - b).max()) if a.size else 0.0
    nans = int(np.isnan(a).sum())
    return f"{wrong} of {a.size} elements differ, at most by {gap:g}" + (
        f", {nans} are NaN" if nans else ""
    )


# ---- one program ---------------------------------------------------------------------------------


def walk(name: str, setup_name: str, device: str, is_managed: bool) -> dict[str, Any]:
    """The outcome of a program, as plain data; in a process that nothing else uses."""
    row = doors()[name]
    setup = next(s for s in SETUPS if s.name == setup_name)
    torch.use_deterministic_algorithms(True, warn_only=True)
    run = start(row, setup, device, is_managed)
    try:
        torch.manual_seed(11)
        values = flat(row.walk(run))
        outcome: dict[str, Any] = {"values": values}
        if row.trains:
            outcome |= _go_on(run)
        return outcome
    except Exception as error:
        return {"error": _described(row, run, error)}


def walk_in_turn(
    rows: list[tuple[str, str]], device: str, is_managed: bool
) -> list[dict[str, Any] | None]:
    """Outcomes of programs and their set-ups in one process; None: the program left none."""
    outcomes: list[dict[str, Any] | None] = []
    for name, setup_name in rows:
        try:
            outcomes.append(walk(name, setup_name, device, is_managed))
        except Exception:
            outcomes.append(None)
        for engine in [one for one in gc.get_objects() if type(one) is gs.Engine]:
            engine.close()
        gc.collect()
    return outcomes


def _go_on(run: Run) -> dict[str, Any]:
    model, optimizer = run.model, run.optimizer
    more: dict[str, Any] = {}
    grads = {n: p.grad for n, p in model.named_parameters()}
    more["gradients"] = {n: flat(g) for n, g in grads.items()}
    del grads
    if optimizer is not None:
        optimizer.zero_grad()
        more["losses"] = flat(run.step(2))
    if run.engine is not None and not run.engine.closed:
        run.engine.close()
    more["weights"] = flat(dict(model.state_dict()))
    return more


def _described(row: Door, run: Run, error: BaseException) -> dict[str, Any]:
    """What was raised, whether it names what it is about, and whether training can go on."""
    text = f"{type(error).__name__}: {error}"
    names = sorted(names_of(run.model), key=len, reverse=True)
    named = next((n for n in names if re.search(rf"(?<![\w.]){re.escape(n)}(?![\w])", text)), None)
    if named is None and isinstance(error, ValueError) and "read-only" in text:
        named = "an array"  # NumPy's refusal of a write to one that cannot be written
    return {
        "type": type(error).__name__,
        "text": text,
        "named": named,
        "has_way_out": WAY_OUT.search(text) is not None,
        "is_memory": isinstance(error, gs.GeminiMemoryError),
        "trace": "".join(traceback.format_exception(error))[-2500:],
        "after": _after(row, run) if run.is_managed and named else "",
    }


def _after(row: Door, run: Run) -> str:
    """Empty if training goes on after a refusal, or is refused because the engine is closed; else why not."""
    if run.engine is None or run.optimizer is None or not row.trains:
        return ""
    try:
        run.optimizer.zero_grad()
        loss = run.step(1)[0]
    except gs.GeminiError:
        return ""
    except Exception as error:
        return f"then a step raised {type(error).__name__}: {error}"
    return "" if math.isfinite(loss) else f"then a step had the loss {loss}"


def judge(row: Door, setup: str, got: dict[str, Any], want: dict[str, Any]) -> str | None:
    """Why the managed outcome is wrong, or None."""
    if "error" in want:
        return f"no program: the unmanaged run raised {want['error']['text']}"
    if "error" not in got:
        return difference(got, want)
    error = got["error"]
    if error["after"]:
        return f"{error['text']}; {error['after']}"
    is_named = error["named"] or (row.whole and error["has_way_out"])
    if not is_named:
        return f"an error that names no parameter: {error['text']}\n{error['trace']}"
    has_no_room = row.needs_all and error["is_memory"] and setup != "room"
    if row.served and not has_no_room:
        return f"refused: {error['text']}"
    if error["is_memory"] and not has_no_room:
        return f"no room for a program that needs little: {error['text']}"
    return None
