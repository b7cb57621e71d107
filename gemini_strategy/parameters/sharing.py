"""Memory of a model's parameters that something else shows, too: found before the parameters leave it.

A managed parameter moves into a chunk. Whatever shows its old memory (another parameter, a buffer, a tensor that
somebody keeps) would go on without it, and a tie would be cut without a word.

Invariants
    1. What is refused shares bytes with a parameter. Slices of one storage that do not overlap are no tie.
    2. Nothing is refused for what only the cycle collector has not freed yet.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError
from gemini_strategy.parameters import absent, quantized


@dataclass
class _Shown:
    """A tensor of the model and the bytes that it shows."""

    name: str
    tensor: torch.Tensor
    is_parameter: bool
    begin: int
    end: int


def check_sharing(model: nn.Module) -> None:
    """Refuses parameters whose memory is not theirs alone.

    Raises:
        GeminiError: names both, or the parameter and what is known of the other; and the way out.
    """
    shown = list(_tensors(model))
    _check_ties(shown)
    _check_absent_ties(model)
    shown += list(_aliases(model))
    found = _find_others(shown)
    if found is not None:
        gc.collect()
        found = _find_others(shown)
    if found is not None:
        raise _refusal(model, shown, *found)


def _tensors(model: nn.Module) -> Iterator[_Shown]:
    """Parameters and buffers with memory of their own to be shown; each once, by its first name."""
    seen: set[int] = set()
    parameters = {id(p) for p in model.parameters()}
    for name, tensor in itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        inner = list(quantized.parts(tensor)) if id(tensor) in parameters else []
        for rest, each in inner or [("", tensor)]:
            span = _span(each)
            if span is not None:
                label = f"{name}.{rest}" if rest else name
                yield _Shown(label, each, id(tensor) in parameters, *span)


def _aliases(model: nn.Module) -> Iterator[_Shown]:
    """Tensors that a quantized parameter's class has for its data, and that follow it."""
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            for alias in () if parameter is None else quantized.aliases(module, parameter):
                span = _span(alias)
                if span is not None:
                    yield _Shown(f"{prefix}.{key}", alias, False, *span)


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """(first byte, behind the last); None where there is no memory."""
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return None
    if absent.is_absent(tensor):
        return None
    try:
        begin = tensor.data_ptr()
    except RuntimeError:  # of a subclass that keeps other tensors
        return None
    if not begin:
        return None
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _check_ties(shown: list[_Shown]) -> None:
    """No parameter shows what another parameter or a buffer does."""
    furthest: dict[bool, _Shown] = {}  # of the parameters, of the buffers before this one
    for item in sorted(shown, key=lambda each: (str(each.tensor.device), each.begin)):
        for is_parameter, other in furthest.items():
            is_same_device = other.tensor.device == item.tensor.device
            if is_same_device and item.begin < other.end and (is_parameter or item.is_parameter):
                raise _tie(other, item)
        longest = furthest.get(item.is_parameter)
        is_further = longest is None or longest.end < item.end
        if is_further or longest.tensor.device != item.tensor.device:
            furthest[item.is_parameter] = item


def _check_absent_ties(model: nn.Module) -> None:
    """Nor are parameters whose bytes nobody has read yet the same ones, or shown elsewhere."""
    unread = {name: p for name, p in model.named_parameters() if absent.is_absent(p)}
    first: dict[int, str] = {}
    for name, parameter in unread.items():
        other = first.setdefault(id(absent.home_of(parameter)), name)
        if other != name:
            raise _two(other, name)
    if any(absent.n_users(parameter) > 1 for parameter in unread.values()):
        gc.collect()
    for name, parameter in unread.items():
        if absent.n_users(parameter) > 1:
            raise _kept(name, "a tensor that is kept elsewhere shows")


def _tie(a: _Shown, b: _Shown) -> GeminiError:
    if a.is_parameter and b.is_parameter:
        return _two(a.name, b.name)
    owner, buffer = (a, b) if a.is_parameter else (b, a)
    return GeminiError(
        f"buffer {buffer.name} shows the memory of parameter {owner.name}; managed, the parameter would have its own, "
        f"and the buffer its values of now: compute it from {owner.name} where it is used, or clone it"
    )


def _two(name: str, other: str) -> GeminiError:
    return GeminiError(
        f"{name} and {other} are two parameters with the same memory; managed, each would have its own, and "
        "they would be tied no more: register the same Parameter object under both names (and transpose it "
        f"where it is used), or cut the tie with {other}.data = {other}.data.clone()"
    )


def _find_others(shown: list[_Shown]) -> tuple[_Shown, int] | None:
    """The first parameter whose storage somebody else refers to, and how many do."""
    storages: dict[int, list[_Shown]] = {}
    for item in shown:
        storages.setdefault(item.tensor.untyped_storage()._cdata, []).append(item)
    own = {id(item.tensor) for item in shown}
    grads: dict[int, int] = {}  # of the model's gradients, by storage
    for item in shown:
        grad = item.tensor.grad if item.tensor.is_leaf else None
        if grad is not None and grad.layout is torch.strided and id(grad) not in own:
            key = grad.untyped_storage()._cdata
            grads[key] = grads.get(key, 0) + 1
    for key, items in storages.items():
        first = next((item for item in items if item.is_parameter), None)
        if first is None:
            continue
        expected = _alone() + len(items) - 1 + grads.get(key, 0)
        others = _references(first.tensor) - expected
        # Of slices of one storage, others may be no concern of ours.
        if others > 0:
            bystanders = sum(1 for t in _visible(key, own) if not _overlaps(t, items))
            if others > bystanders:
                return first, others - bystanders
    return None


@functools.cache
def _alone() -> int:
    with _torch.DisableTorchFunctionSubclass():
        return _references(torch.empty(1, device="cpu"))


def _references(tensor: torch.Tensor) -> int:
    """How many tensors, graphs and Python objects refer to its storage, more or less a constant."""
    storage = tensor.untyped_storage()
    return _torch.storage_use_count(storage._cdata) + sys.getrefcount(storage)


def n_others(tensor: torch.Tensor) -> int:
    """How many refer to its storage beside it.

    torch's wrapper of a storage, once made, stays and is a user of it: so that is not one of them.
    """
    with _torch.DisableTorchFunctionSubclass():
        return _references(tensor) - _alone()


def _visible(storage: int, known: set[int]) -> Iterator[torch.Tensor]:
    """The tensors of Python on a storage, but for those that are known."""
    for item in gc.get_objects():
        if not issubclass(type(item), torch.Tensor) or id(item) in known:
            continue
        try:
            is_on_it = _torch.storage_address(item) == storage
        except Exception:  # it has none
            continue
        if is_on_it:
            yield item


def _overlaps(tensor: torch.Tensor, items: list[_Shown]) -> bool:
    with _torch.DisableTorchFunctionSubclass():
        span = _span(tensor)
    return span is not None and any(
        item.is_parameter and span[0] < item.end and item.begin < span[1] for item in items
    )


def _refusal(model: nn.Module, shown: list[_Shown], parameter: _Shown, count: int) -> GeminiError:
    own = {id(item.tensor) for item in shown}
    key = parameter.tensor.untyped_storage()._cdata
    tensors = [t for t in _visible(key, own) if _overlaps(t, shown)]
    # Views first: what they were taken from lives because of them.
    with _torch.DisableTorchFunctionSubclass():
        tensors.sort(key=lambda tensor: tensor._base is None)
    attributes = [
        f"{f'{name}.' if name else ''}{attribute}"
        for name, module in model.named_modules()
        for attribute, value in module.__dict__.items()
        if any(value is tensor for tensor in tensors)
    ]
    if attributes:
        what = f"{', '.join(attributes)} shows"
    elif tensors:
        what = f"a tensor of shape {tuple(tensors[0].shape)} that is kept elsewhere shows"
    else:
        what = "a storage, or the graph of a forward whose output is still alive, shows"
    return _kept(parameter.name, what, f" ({count} in all)" if count > 1 else "")


def _kept(name: str, what: str, more: str = "") -> GeminiError:
    return GeminiError(
        f"{name}: {what} its memory{more}; managed, the parameter leaves it, and what is kept would show old "
        f"values: delete what is kept (del), or make it a clone, or cut the tie with {name}.data = "
        f"{name}.data.clone() before manage()"
    )
