"""Tensors that have dispatch keys of ours: the dispatcher brings every operation on them to our kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gemini_strategy import _torch

MODES = _torch.DispatchKeySet(_torch.DispatchKey.Python)
set_data: Callable[[torch.Tensor, torch.Tensor], None] = _torch.TensorBase.data.__set__


class _Keyed(torch.Tensor):
    """Has the keys; its data gives them to others."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def tensor(
    keys: Any,
    storage: torch.UntypedStorage | None,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A torch.Tensor with these keys besides its own, from the storage's first byte on. storage: None: of no bytes."""
    with _torch.InferenceMode(False), torch.no_grad(), _torch.ExcludeDispatchKeyGuard(keys | MODES):
        keyed = _torch.make_wrapper_subclass(
            _Keyed, shape, strides=strides, dtype=dtype, device=device, _extra_dispatch_keys=keys
        )
        if storage is not None:
            torch.ops.aten.set_.source_Storage_storage_offset(keyed, storage, 0, shape, strides)
        result = torch.empty(0, dtype=dtype, device=device)
        set_data(result, keyed)
    return result


def with_bits(view: torch.Tensor, is_conj: bool, is_neg: bool) -> torch.Tensor:
    """A view whose elements are read as the conjugates, or negatives, of what lies in its memory; itself if neither."""
    if is_conj != view.is_conj():
        view = view.conj()
    if is_neg != view.is_neg():
        view = _torch.neg_view(view)
    return view
