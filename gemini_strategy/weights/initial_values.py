"""Initial values of parameters and buffers on the meta device: each module's own, one module after the other.

A module says how it begins: transformers by `_init_weights(module)` of the model around it, torch by
`reset_parameters()`. These run on the CPU, with the global random numbers, children before their parents, in the order
of registration. While one runs, each parameter and buffer that it touches is replaced by an ordinary tensor.

Invariants
    1. The modules' own parameters and buffers are not changed: values go to the caller that asked for them.
    2. Only what was asked for is kept; whatever else an initializer writes is forgotten.
    3. A parameter with several owners keeps the value of the first. The others draw their random numbers all the same,
       as they do where a model is built first and tied then.
    4. What no initializer has written is an error, by name.
    5. Memory of values is used again only when no other object has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gemini_strategy._torch import storage_address, storage_use_count, tree_map
from gemini_strategy.errors import GeminiError
from gemini_strategy.weights.transformers import is_transformer

_LARGE = 1 << 20  # bytes; smaller memory is malloc's to keep

# Answered by the tensor itself, without values.
_GETTERS = ("shape", "ndim", "dtype", "layout", "requires_grad", "is_leaf", "itemsize")
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "__len__")
_FACTS: set[Any] = {getattr(torch.Tensor, name).__get__ for name in _GETTERS}
_FACTS |= {getattr(torch.Tensor, name) for name in _METHODS}


def _walk(
    name: str, module: nn.Module, owner: nn.Module | None, seen: set[int]
) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """(name, module, the transformers model around it), children first, each module once."""
    if id(module) in seen:
        return
    seen.add(id(module))
    owner = module if is_transformer(module) else owner
    for child_name, child in module.named_children():
        yield from _walk(f"{name}.{child_name}" if name else child_name, child, owner, seen)
    yield name, module, owner


def _initializers(module: nn.Module, owner: nn.Module | None) -> list[Callable[[], Any]]:
    """What may set a module's values, in the order in which it is tried."""
    found: list[Callable[[], Any]] = []
    if owner is not None:
        found.append(functools.partial(owner._init_weights, module))
    if isinstance(module, nn.MultiheadAttention):
        found.append(module._reset_parameters)
    elif callable(getattr(module, "reset_parameters", None)):
        found.append(module.reset_parameters)
    rotary: Any = module  # embeddings that keep the function which computes their frequencies
    if callable(getattr(rotary, "rope_init_fn", None)) and hasattr(rotary, "config"):
        host = torch.device("cpu")
        found.append(lambda: rotary.inv_freq.copy_(rotary.rope_init_fn(rotary.config, host)[0]))
    return found


def silent_modules(model: nn.Module) -> list[nn.Module]:
    """The modules with tensors on the meta device that say nothing about initial values."""
    return [
        module
        for _, module, owner in _walk("", model, None, set())
        if any(t.is_meta for t in _own_tensors(module).values())
        and not _initializers(module, owner)
    ]


class _Stage(TorchFunctionMode):
    """Inside, a model's tensors are replaced by ordinary ones on the CPU, made when they are first used."""

    def __init__(
        self, known: dict[int, torch.Tensor], read: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self._known = known
        self._read = read
        self._staged: dict[int, tuple[torch.Tensor, int]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._staged:
            values = self._read(tensor)
            self._staged[id(tensor)] = (values, values._version)
        return self._staged[id(tensor)][0]

    def written(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(the model's tensor, its new values)."""
        for key, (values, version) in self._staged.items():
            if values._version != version:
                yield self._known[key], values

    def _shown(self, item: Any) -> Any:
        is_known = isinstance(item, torch.Tensor) and self._known.get(id(item)) is item
        return self.of(item) if is_known else item

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            return func(*args, **kwargs)
        args, kwargs = tree_map(self._shown, (args, kwargs))
        if func == torch.Tensor.data.__get__:
            return args[0].detach()  # `.data` would hide what is written through it
        if func == torch.Tensor.data.__set__:
            return args[0].copy_(args[1])
        return func(*args, **kwargs)


class _Memory:
    """Of the values of one parameter after the other: the pages of fresh memory take longer than its values."""

    def __init__(self) -> None:
        self._latest = torch.empty(0, dtype=torch.uint8, device="cpu")

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the CPU, with any values."""
        if tensor.nbytes < _LARGE:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        is_ours = storage_use_count(storage_address(self._latest)) == 1
        if not is_ours or self._latest.nbytes < tensor.nbytes:
            self._latest = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
        return self._latest[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class InitialValues:
    """Initial values for some of a model's parameters and buffers; nothing runs before `make`.

    Args:
        model: the model.
        wanted: the parameters and buffers to be given values, with their names.

    Raises:
        GeminiError: the module of one of them says nothing about initial values.
    """

    def __init__(self, model: nn.Module, wanted: dict[int, str]) -> None:
        self._wanted = wanted
        self._modules: list[tuple[nn.Module, list[Callable[[], Any]]]] = []
        self._owner_of: dict[int, nn.Module] = {}  # the first one (invariant 3)
        self._known: dict[int, torch.Tensor] = {}
        below: set[int] = set()  # modules with something wanted in them
        for name, module, owner in _walk("", model, None, set()):
            own = _own_tensors(module)
            self._known.update((id(t), t) for t in own.values())
            missing = {key: t for key, t in own.items() if id(t) in wanted}
            for tensor in own.values():
                self._owner_of.setdefault(id(tensor), module)
            is_above = any(id(child) in below for child in module.children())
            if missing or is_above:
                below.add(id(module))
            found = _initializers(module, owner)
            if missing and not found:
                key = next(iter(missing))
                kind = "buffer" if key in module._buffers else "parameter"
                raise GeminiError(
                    f"{wanted[id(missing[key])]} is a {kind} on the meta device, and its module {name or 'model'!r} "
                    f"({type(module).__name__}) has no reset_parameters() to give it its first values: add that "
                    'method, build this module on the CPU (torch.device("cpu") around it), or give weights= with '
                    "this name in the file"
                )
            # Only in transformers a parent sets what its children own.
            if missing or (is_above and owner is not None):
                self._modules.append((module, found))

    def make(
        self,
        read: Callable[[torch.Tensor], torch.Tensor | None],
        keep: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """Runs the modules' initializers.

        Args:
            read: gives the present values of a tensor of the model, a copy in its dtype; None: there are none yet.
            keep: takes the values of a wanted tensor; called again when a parent changes them.

        Raises:
            GeminiError: something wanted was not given a value.
        """

        memory = _Memory()

        def present(tensor: torch.Tensor) -> torch.Tensor:
            values = read(tensor)
            return memory.like(tensor) if values is None else values

        # Apart, so that nothing here has the last values when the next module wants their memory.
        def offer(module: nn.Module, own: dict[str, torch.Tensor], stage: _Stage) -> None:
            for tensor, values in stage.written():
                is_own = any(tensor is t for t in own.values())
                is_tied = is_own and self._owner_of[id(tensor)] is not module
                if id(tensor) in self._wanted and not is_tied:
                    keep(tensor, values)

        done: set[int] = set()
        for module, found in self._modules:
            own = _own_tensors(module)
            stage = _Stage(self._known, present)
            for number, initialize in enumerate(found):
                lacking = [t for t in own.values() if id(t) in self._wanted and id(t) not in done]
                if number and not lacking:
                    break
                _run(module, own, stage, initialize)
                done.update(id(tensor) for tensor, _ in stage.written())
            offer(module, own, stage)
        for key, name in self._wanted.items():
            tensor = self._known[key]
            if key not in done and tensor.numel() > 0:
                module = self._owner_of[key]
                raise GeminiError(
                    f"{name} is on the meta device, and neither a file of weights nor the initial values of its "
                    f"module ({type(module).__name__}) set it: set it in reset_parameters(), build this module on "
                    'the CPU (torch.device("cpu") around it), or give weights= with this name in the file'
                )


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters and buffers."""
    own = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in own.items() if tensor is not None}


def _run(
    module: nn.Module, own: dict[str, torch.Tensor], stage: _Stage, initialize: Callable[[], Any]
) -> None:
    """Runs one initializer; what it replaces instead of writing it becomes a value, too."""
    tables = (module._parameters, module._buffers)
    before = [dict(table) for table in tables]
    try:
        with torch.no_grad(), stage:
            initialize()
        for key, tensor in own.items():
            now = module._parameters.get(key, module._buffers.get(key))
            if now is None or now is tensor or now.is_meta:
                continue
            if now.shape != tensor.shape:
                raise GeminiError(
                    f"{type(module).__name__}: its initial values give {key} the shape {tuple(now.shape)}, which was "
                    f"{tuple(tensor.shape)} when the model was built"
                )
            with torch.no_grad():
                stage.of(tensor).copy_(now)
    finally:
        for table, items in zip(tables, before, strict=True):
            table.clear()
            table.update(items)
