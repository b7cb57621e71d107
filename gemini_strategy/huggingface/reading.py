"""Models of transformers from a folder without a copy of their own: each weight is read when manage() places it.

transformers builds the model, renames, ties and initializes what the files lack, as it always does. It asks
safetensors for slices of a file. Inside `loading()` these give unread tensors (weights/unread.py) for all that is to be
on the CPU as it is in the file, but for its dtype.

Invariants
    1. The model has the bits of the ordinary from_pretrained(), whoever reads it, managed or not.
    2. What transformers computes (experts that it joins, quantized weights) and what has another device is read at
       once.
    3. Buffers are read at once: nobody places them later.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gemini_strategy.huggingface.extras import imported
from gemini_strategy.parameters import doors
from gemini_strategy.weights import unread

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Inside, `from_pretrained` of every class of transformers reads no weights of safetensors files.

    They are read by `gemini_strategy.manage()`, each straight into its place, so that the host never holds the model
    twice; until then by whoever uses them. The files must not change before that. Under `gemini-strategy run` all
    models are loaded so.

        with gemini_strategy.huggingface.loading():
            model = AutoModelForCausalLM.from_pretrained("folder", dtype="bfloat16")
        engine = gemini_strategy.manage(model, optimizer)

    Raises:
        ImportError: transformers is not installed; the text says how it is.
    """
    utils = imported("transformers.modeling_utils", "gemini_strategy.huggingface.loading()")
    safe_open = utils.safe_open
    finalize = utils.PreTrainedModel.__dict__["_finalize_model_loading"]
    leave_unread(utils)
    try:
        yield
    finally:
        utils.safe_open = safe_open
        utils.PreTrainedModel._finalize_model_loading = finalize


def leave_unread(utils: ModuleType) -> None:
    """What loading() does, for good.

    Args:
        utils: transformers.modeling_utils.
    """
    doors.install()
    finalize = utils.PreTrainedModel.__dict__["_finalize_model_loading"]

    @functools.wraps(finalize.__func__)
    def finalize_read(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for module in model.modules():  # invariant 3
            for key, buffer in module._buffers.items():
                if buffer is not None and unread.home(buffer) is not None:
                    values = buffer.clone()
                    values.__dict__.update(buffer.__dict__)
                    module._buffers[key] = values
        return finalize.__func__(model, *args, **kwargs)

    utils.safe_open = functools.partial(_File, utils.safe_open)
    utils.PreTrainedModel._finalize_model_loading = staticmethod(finalize_read)


class _File:
    """An open safetensors file whose slices may stay unread."""

    def __init__(self, safe_open: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        self._file = safe_open(path, *args, **kwargs)
        device = kwargs.get("device", args[1] if len(args) > 1 else "cpu")
        self._unread = unread.UnreadFile(path) if torch.device(device).type == "cpu" else None

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *args: object) -> Any:
        return self._file.__exit__(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_slice(self, key: str) -> Any:
        found = self._file.get_slice(key)
        is_float = found.get_dtype() in _DTYPES
        return found if self._unread is None or not is_float else _Slice(found, self._unread, key)


class _Part:
    """What safetensors has found in a file, under a key."""

    def __init__(self, found: Any, files: unread.UnreadFile, key: str) -> None:
        self._found = found
        self._files = files
        self._key = key


class _Slice(_Part):
    """A slice of a file; the whole of it stays unread."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def __getitem__(self, index: Any) -> Any:
        return (
            self._found[index] if index is not ... else _Whole(self._found, self._files, self._key)
        )


class _Whole(_Part):
    """A tensor of a file before anybody has said which dtype and device it is to have."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found[...], name)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As torch.Tensor.to."""
        is_here = device is None or torch.device(device).type == "cpu"
        dtype = _DTYPES[self._found.get_dtype()] if dtype is None else dtype
        if not is_here or not dtype.is_floating_point:
            return self._found[...].to(device=device, dtype=dtype)  # type: ignore[no-any-return]
        return unread.tensor(self._files, self._key, dtype)
