"""Stand-ins for tensors: what other code makes of them says which of them it needed, and no byte is there.

Programs that rename, split and join tensors by name are run on stand-ins first. Their outputs have the right names,
shapes and dtypes, and the origins of each.
"""

from __future__ import annotations

from typing import Any

import torch

from gemini_strategy._torch import tree_flatten


class _StandIn(torch.Tensor):
    """On the meta device; what is computed from some has the origins of all of them."""

    origins: frozenset[str] = frozenset()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        given = tree_flatten((args, kwargs or {}))[0]
        found = frozenset[str]().union(*(t.origins for t in given if isinstance(t, _StandIn)))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, _StandIn) and not any(tensor is t for t in given):
                tensor.origins = found
        return result


def stand_in(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """For the tensor `name`."""
    result = torch.empty(shape, dtype=dtype, device="meta").as_subclass(_StandIn)
    result.origins = frozenset((name,))
    return result


def origins(tensor: torch.Tensor) -> frozenset[str]:
    """The names that it was made of; empty for what is no stand-in."""
    return tensor.origins if isinstance(tensor, _StandIn) else frozenset()
