"""Tensors without bytes of their own: every operation is served from what a home holds at that moment."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["Home", "tensor"]


class Home(Protocol):
    """Where the values of an absent tensor are."""

    name: str  # for the texts of errors

    def open(self, writes: bool) -> torch.Tensor:
        """A plain tensor with the values of now."""
        ...

    def write(self, values: torch.Tensor) -> None:
        """Takes the values that an operation in place has changed."""
        ...


def tensor(
    home: Home,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A tensor that shows `home`, and through which it is written."""
    made = _Absent._make_wrapper_subclass(_Absent, shape, strides, 0, dtype=dtype, device=device)
    made._gm_home = home
    return made


class _Absent(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        named = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
        written = {
            id(item)
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for item in tree_flatten(named.get(argument.name))[0]
        }
        homes: dict[int, torch.Tensor] = {}
        shown: list[tuple[torch.Tensor, _Absent]] = []

        def open_home(item: Any) -> Any:
            if not isinstance(item, _Absent):
                return item
            home = item._gm_home
            if id(home) not in homes:
                homes[id(home)] = home.open(id(item) in written)
            whole = homes[id(home)]
            plain = whole.as_strided(item.size(), item.stride(), item.storage_offset())
            shown.append((plain, item))
            return plain

        args, kwargs = tree_map(open_home, (args, kwargs))
        result = func(*args, **kwargs)
        for _, item in shown:
            if id(item) in written:
                item._gm_home.write(homes[id(item._gm_home)])

        def close_home(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            for plain, item in shown:
                if value is plain:
                    return item
                if value.untyped_storage()._cdata == plain.untyped_storage()._cdata:
                    view = _Absent._make_wrapper_subclass(
                        _Absent,
                        value.size(),
                        value.stride(),
                        value.storage_offset(),
                        dtype=value.dtype,
                        device=value.device,
                    )
                    view._gm_home = item._gm_home
                    return view
            return value

        return tree_map(close_home, result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.clone())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)
