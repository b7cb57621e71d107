"""Plain data as JSON: what a person gives to be kept beside a model (`extra`), param groups, random numbers.

None, bool, int, float, str, bytes, lists, tuples, mappings and tensors (NumPy's arrays, too). Mappings come back as
dicts, NumPy's scalars as Python's. Loading makes nothing else, so a file cannot run code.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gemini_strategy.errors import GeminiError

_SIMPLE = (bool, int, float, str)


def encode(value: Any, where: str, tensors: list[torch.Tensor]) -> Any:
    """`value` in JSON's types; its tensors are put into `tensors`, and named by their place in it.

    Args:
        where: what the value is, for errors.

    Raises:
        GeminiError: something in it is not plain.
    """
    if value is None or type(value) in _SIMPLE:
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, io.BytesIO):  # as some modules' extra state is
        return {"file": base64.b64encode(value.getvalue()).decode()}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        items = [
            [encode(k, f"a key of {where}", tensors), encode(v, f"{where}[{k!r}]", tensors)]
            for k, v in value.items()
        ]
        return {"dict": items}
    if isinstance(value, list | tuple):
        items = [encode(v, f"{where}[{i}]", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return encode(value.item(), where, tensors)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype != object:
        tensors.append(torch.from_numpy(value))
        return {"array": len(tensors) - 1}
    if isinstance(value, _SIMPLE) and not hasattr(value, "name"):  # an enum has a name
        return next(kind(value) for kind in _SIMPLE if isinstance(value, kind))
    raise GeminiError(
        f"{where} is a {type(value).__name__}, and a checkpoint keeps plain data only: numbers, strings, bytes, lists, "
        "tuples, dicts and tensors (most objects have a state_dict() that is)"
    )


def decode(code: Any, tensor: Callable[[int], torch.Tensor]) -> Any:
    """What `encode` was given; `tensor` gives its tensors.

    Raises:
        ValueError: this is no such code.
    """
    if code is None or type(code) in _SIMPLE:
        return code
    if isinstance(code, list):
        return [decode(item, tensor) for item in code]
    if not isinstance(code, dict) or len(code) != 1:
        raise ValueError(f"no plain data: {str(code)[:60]}")
    ((kind, content),) = code.items()
    if kind == "tensor" and type(content) is int:
        return tensor(content)
    if kind == "array" and type(content) is int:
        return tensor(content).numpy()
    if kind in ("bytes", "file") and isinstance(content, str):
        raw = base64.b64decode(content, validate=True)
        return raw if kind == "bytes" else io.BytesIO(raw)
    if kind == "tuple" and isinstance(content, list):
        return tuple(decode(item, tensor) for item in content)
    if kind == "dict" and isinstance(content, list):
        return {decode(k, tensor): decode(v, tensor) for k, v in content}
    raise ValueError(f"no plain data: {kind!r}")
