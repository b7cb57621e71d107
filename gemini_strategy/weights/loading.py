"""Loading: the values of a model that was built without any (meta device), or that come from files of weights.

Values go straight into the parameters' homes, so the host never holds the model twice: the engine's memory, and one
piece of a file or one module's initial values.

Invariants
    1. The model does not change before its values are all there. original.py puts back what was changed, the global
       random numbers included, if anything is raised.
    2. A parameter keeps its identity: the optimizer that was made over it stays right.
    3. The bits are those of `load_state_dict` on an ordinary CPU model, managed then.
"""

from __future__ import annotations

import itertools
import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError
from gemini_strategy.parameters.original import HOOKS, Original
from gemini_strategy.parameters.slot import Slot
from gemini_strategy.ranks.ranks import Ranks
from gemini_strategy.report.progress import Done, nothing
from gemini_strategy.roots import roots, title
from gemini_strategy.weights import unread
from gemini_strategy.weights.files import WeightFiles
from gemini_strategy.weights.initial_values import InitialValues
from gemini_strategy.weights.transformers import (
    base_prefix,
    declared_ties,
    ignores_missing,
    ignores_unused,
    is_transformer,
    renaming,
)

Weights = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]
_log = logging.getLogger("gemini_strategy")


def _some(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class Loading:
    """Where the values of one model come from.

    Args:
        model: the model; parameters on the meta device get values, others only from the files.
        weights: None, a path, or paths by the name of the submodule that a file is of.
        missing: "refuse" or "init": what a parameter without a name in the files is.

    Raises:
        GeminiError: something has no values, by name; nothing has changed.
    """

    def __init__(self, model: nn.Module, weights: Weights | None, missing: str) -> None:
        self._model = model
        self._sources: dict[int, tuple[WeightFiles, str]] = {}  # of parameters and buffers
        self._names: dict[int, str] = {}
        self._buffers: dict[int, torch.Tensor] = {}  # new values of buffers
        self._files: list[WeightFiles] = []
        self._unused: list[tuple[nn.Module, WeightFiles, list[str]]] = []
        self._unread: set[unread.UnreadFile] = set()
        self._tensors: dict[int, torch.Tensor] = {}
        for name, tensor in itertools.chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        ):
            self._names.setdefault(id(tensor), name)
            self._tensors[id(tensor)] = tensor
        blank = {key for key, tensor in self._tensors.items() if tensor.is_meta}
        self._parameters = {id(p) for p in model.parameters()}
        for key in self._parameters:
            found = unread.home(self._tensors[key])
            if found is not None:
                self._sources[key] = found.files, found.entry
                self._unread.add(found.files)
        if blank:
            self._check_blank(blank)
        if weights is not None:
            for prefix, path in _by_prefix(model, weights):
                self._files.append(WeightFiles(path))
                self._match(prefix, self._files[-1])
        blank -= self._sources.keys()
        wanted = {key: self._names[key] for key in self._tensors if key in blank}
        if weights is not None and missing == "refuse":
            self._check_missing(wanted)
        self._initial = InitialValues(model, wanted) if wanted else None
        for module, files, names in self._unused:  # as transformers does
            unused = [name for name in names if not ignores_unused(module, name)]
            if unused:
                warnings.warn(
                    f"{files.path} has {len(unused)} tensors that {type(module).__name__} has no place for, and that "
                    f"are not used: {_some(unused)}",
                    stacklevel=1,
                )
        self._n_random = sum(key in self._parameters for key in wanted)

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether the values of `parameter` are not its own."""
        return parameter.is_meta or id(parameter) in self._sources

    def dtype(self, parameter: torch.Tensor) -> torch.dtype | None:
        """In which a file has the values of `parameter`; None: none has."""
        files, name = self._sources.get(id(parameter), (None, ""))
        return None if files is None else files.dtypes[name]

    # ---- what can be found ----

    def _check_blank(self, blank: set[int]) -> None:
        for key in blank & self._parameters:
            with _torch.DisableTorchFunctionSubclass():
                if self._tensors[key].grad is not None:
                    raise GeminiError(
                        f"{self._names[key]} is on the meta device and has a gradient: zero_grad() first"
                    )
        for name, module in self._model.named_modules():
            for key, value in module.__dict__.items():
                is_meta = isinstance(value, torch.Tensor) and value.is_meta
                if is_meta and id(value) not in self._tensors:
                    raise GeminiError(
                        f"{f'{name}.' if name else ''}{key} is a tensor on the meta device that is neither a parameter "
                        "nor a buffer, so nothing says what is in it: register it as a buffer, or build "
                        f'{name or "the model"!r} on the CPU (torch.device("cpu") around it)'
                    )

    def _match(self, prefix: str, files: WeightFiles) -> None:
        """Finds a tensor of the model for each name in the files."""
        module = self._model.get_submodule(prefix)
        known = _state_names(module)
        if not prefix and not known.keys() & files.shapes.keys():
            inner = [name for name, part in module.named_modules() if is_transformer(part)]
            tops = [n for n in inner if not any(n.startswith(f"{other}.") for other in inner)]
            if len(tops) == 1 and tops[0] and len(roots(module)) == 1:
                self._match(tops[0], files)  # a module around one transformers model
                return
        rename = renaming(module)
        own = {name: rename(name) for name in files.shapes}
        converted = [name for name, now in own.items() if now is None]
        if converted:
            raise GeminiError(
                f"{files.path} keeps {_some(converted, 2)} in another form than {type(module).__name__} does, and "
                "transformers converts it while it loads: load the model with from_pretrained() and manage that"
            )
        found = {name: name for name in files.shapes if name in known}
        taken = set(found.values())
        for name, now in own.items():
            other = None if name in found else _with_other_prefix(module, str(now), known)
            if other is not None and other not in taken:
                found[name] = other
                taken.add(other)
        if not found and known and files.shapes:
            raise GeminiError(
                f"none of the {len(files.shapes)} names in {files.path} is one of {title(module)} (the file "
                f"has {_some(files.shapes, 2)}; the model {_some(known, 2)}): if they are those of a submodule, give "
                'weights={"name.of.the.submodule": path}, of several models weights={"0": path, "1": other}'
            )
        wrong = []
        order = {name: number for number, name in enumerate(known)}
        for name in sorted(found, key=lambda name: order[found[name]]):
            tensor, shape = known[found[name]], files.shapes[name]
            if tuple(tensor.shape) != shape and not (tensor.ndim == 0 and shape == (1,)):
                wrong.append(
                    f"{found[name]}: {shape} in the file, {tuple(tensor.shape)} in the model"
                )
                continue
            # Of several names of one tensor load_state_dict takes the last.
            self._sources[id(tensor)] = (files, name)
        if wrong:
            raise GeminiError(
                f"{files.path} does not fit {type(module).__name__}: {_some(wrong)}: build the model with the "
                "configuration of the file"
            )
        self._unused.append((module, files, [name for name in files.shapes if name not in found]))

    def _check_missing(self, wanted: dict[int, str]) -> None:
        """What the files lack and no argument asks to initialize."""
        persistent = {id(t) for t in _state_names(self._model).values()}
        lacking = {key: name for key, name in wanted.items() if key in persistent}
        for prefix, part in self._model.named_modules():
            start = f"{prefix}." if prefix else ""
            for key, name in list(lacking.items()):
                if name.startswith(start) and ignores_missing(part, name.removeprefix(start)):
                    del lacking[key]
        if not lacking:
            return
        for name, source in declared_ties(self._model).items():
            if name in lacking.values():
                raise GeminiError(
                    f"{name} is not in {self._files[0].path}: the model's configuration ties it to {source}, but the "
                    "two are different parameters: call model.tie_weights() before the optimizer is made"
                )
        where = ", ".join(str(files.path) for files in self._files)
        raise GeminiError(
            f"not in {where}: {_some(lacking.values(), 8)}; give missing='init' to begin these with their modules' own "
            "initial values; where the file keeps them under other names, load the model with "
            "from_pretrained() and manage that"
        )

    # ---- values ----

    def fill(self, slots: list[Slot], ranks: Ranks, done: Done = nothing) -> None:
        """Writes the values of every parameter that `has` says; the model stays as it is.

        Of several ranks each reads its part of the files. Initial values are made on every rank, one parameter at a
        time, with rank 0's random numbers. `done` is told the bytes of each part, as Slot.part_bytes counts them.

        Raises:
            GeminiError: a file cannot be read, or an initializer does not set what it should.
        """
        by_parameter = {id(slot.parameter): slot for slot in slots}
        ready: set[int] = set()
        begins: dict[str, str] = {}
        try:
            for file in self._unread:
                file.check()
            for slot in slots:
                if id(slot.parameter) in self._sources:
                    files, name = self._sources[id(slot.parameter)]
                    if ranks.size > 1:
                        where = "from_pretrained()" if files in self._unread else "weights="
                        begins[f"the values of {slot.name} in {where}"] = files.fingerprint(name)
                    begin, n = slot.part()
                    if slot.is_row_major:  # as files are
                        for first, values in files.pieces(name, begin, begin + n):
                            slot.fill_part(first, values)
                            done(values.numel() * slot.dtype.itemsize)
                    else:
                        slot.fill_whole(files.tensor(name).reshape(slot.shape))
                        done(slot.part_bytes)
                    ready.add(id(slot.parameter))
            for key in self._sources.keys() - by_parameter.keys():
                files, name = self._sources[key]
                tensor = self._tensors[key]
                self._buffers[key] = files.tensor(name).to(tensor.dtype).reshape(tensor.shape)
        finally:
            for files in (*self._files, *self._unread):
                files.close()
        if self._files or self._unread:  # each rank has read its part of its own
            ranks.agree(begins, "the beginning of each weight in the files")
        if self._initial is not None:
            if self._n_random and ranks.rank == 0:
                has_files = self._files or self._unread
                _log.info(
                    "%d parameters on the meta device begin with their modules' own initial values, as %s",
                    self._n_random,
                    "the files have none" if has_files else "no weights= was given",
                )
            self._fill_initial(by_parameter, ready, ranks, done)

    def _fill_initial(
        self, by_parameter: dict[int, Slot], ready: set[int], ranks: Ranks, done: Done
    ) -> None:
        def read(tensor: torch.Tensor) -> torch.Tensor | None:
            slot = by_parameter.get(id(tensor))
            if slot is not None and id(tensor) in ready:  # of what is frozen, as it was rounded
                return slot.read_master().to(tensor.dtype)
            if id(tensor) in self._buffers:
                return self._buffers[id(tensor)].clone()
            return None if tensor.is_meta else tensor.detach().to("cpu", copy=True)

        def keep(tensor: torch.Tensor, values: torch.Tensor) -> None:
            slot = by_parameter.get(id(tensor))
            if slot is None:
                self._buffers[id(tensor)] = values
                return
            slot.fill_whole(values)
            if id(tensor) not in ready:  # a parent may set it again
                done(slot.part_bytes)
            ready.add(id(tensor))

        numbers = torch.get_rng_state()
        common = numbers.clone()
        ranks.share(common, 0, common.numel(), "random numbers of initial values")
        is_common = torch.equal(common, numbers)
        if not is_common:
            torch.set_rng_state(common)
        self._initial.make(read, keep)
        if not (self._n_random and is_common):  # weights from files draw no random numbers
            torch.set_rng_state(numbers)

    # ---- the model ----

    def show(self, parameter: nn.Parameter, data: torch.Tensor, original: Original) -> None:
        """Makes a parameter on the meta device one on `data`: the same object, with its hooks."""
        with _torch.InferenceMode(False), _torch.DisableTorchFunctionSubclass():
            home = _torch.make_subclass(type(parameter), data, parameter.requires_grad)

            def take_back() -> None:
                if not parameter.is_meta:
                    _swap(parameter, home)

            original.on_restore(take_back)
            _swap(parameter, home)

    def commit(self, original: Original) -> None:
        """Gives buffers their values."""
        for module in self._model.modules():
            for key, tensor in list(module._buffers.items()):
                values = None if tensor is None else self._buffers.get(id(tensor))
                if values is None:
                    continue
                if not tensor.is_meta:  # as load_state_dict does
                    original.keep_values(tensor)
                    with torch.no_grad():
                        tensor.copy_(values)
                    continue
                module._buffers[key] = values
                for attribute, value in list(module.__dict__.items()):
                    if value is tensor:  # another name of the buffer
                        module.__dict__[attribute] = values

    def finish(self) -> None:
        """The engine stands: forgets values that it will not need any more."""
        self._buffers.clear()
        self._tensors.clear()
        self._initial = None


def _swap(parameter: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges what two tensors are; each object stays who it is, with its hooks."""
    _torch.swap_tensor_impl(parameter, other)
    for name in HOOKS:  # torch keeps them in both places
        hooks = getattr(parameter, name)
        if hooks is not None:
            setattr(parameter, name, hooks)


def _by_prefix(model: nn.Module, weights: Weights) -> list[tuple[str, str | os.PathLike[str]]]:
    """(submodule, path) for each of `weights`."""
    if not isinstance(weights, Mapping):
        return [("", weights)]
    for prefix in weights:
        try:
            model.get_submodule(prefix)
        except AttributeError:
            raise GeminiError(
                f"weights: the model has no submodule {prefix!r}; its parts are "
                f"{_some(name for name, _ in model.named_children())}"
            ) from None
    return list(weights.items())


def _state_names(module: nn.Module) -> dict[str, torch.Tensor]:
    """What files hold: parameters and persistent buffers, by their names in a model that is not compiled."""
    known: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        own = {
            **part._parameters,
            **{k: b for k, b in part._buffers.items() if k not in part._non_persistent_buffers_set},
        }
        for key, tensor in own.items():
            if tensor is not None:
                known[f"{prefix}.{key}".lstrip(".").replace("_orig_mod.", "")] = tensor
    return known


def _with_other_prefix(module: nn.Module, name: str, known: Mapping[str, Any]) -> str | None:
    """The model's name of a tensor that was saved without the head of the model, with it, or from a compiled one."""
    name = name.replace("_orig_mod.", "")
    base = base_prefix(module)
    names = [name, *([name.removeprefix(f"{base}."), f"{base}.{name}"] if base else [])]
    return next((other for other in names if other in known), None)
