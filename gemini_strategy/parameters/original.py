"""A model and its optimizer as they were before `manage()`: what is kept until an engine stands, and put back if none
does.

Whatever manage() changes is one of: a class, an attribute, a table of a module (parameters, buffers, hooks), the data,
the gradient or the hooks of a parameter, the state of the optimizer, values of a buffer, the random numbers. All of
these are recorded, however the change is made; nothing has to be undone step by step.

Invariants
    1. Recording changes nothing.
    2. What is put back is the very objects: tables, gradients, and the storages of parameters.
    3. After `restore` nothing here, and no frame of ours in the error's traceback, refers to a parameter's memory.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gemini_strategy import _torch
from gemini_strategy.parameters import quantized

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_PACKAGE = __name__.partition(".")[0]


class _Table:
    """A dict, set or list, and what was in it, in its order."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._items = table.copy()

    def restore(self) -> None:
        table, items = self._table, self._items
        if isinstance(table, set):
            is_same = table == items
        else:
            now, then = (list(t.values() if isinstance(t, dict) else t) for t in (table, items))
            is_same = list(map(id, now)) == list(map(id, then))
            is_same = is_same and (isinstance(table, list) or list(table) == list(items))
        if is_same:
            return
        table.clear()
        (table.extend if isinstance(table, list) else table.update)(items)


class _Parameter:
    """One parameter, but for its data."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self._class = type(parameter)
        self._attributes = _Table(parameter.__dict__)
        with _torch.DisableTorchFunctionSubclass():
            self._grad = parameter.grad if parameter.is_leaf else None
            self._requires_grad = parameter.requires_grad
            hooks = [(name, getattr(parameter, name)) for name in HOOKS]
        self._hooks = [(n, table, None if table is None else _Table(table)) for n, table in hooks]
        self.data: torch.Tensor | None = None  # once it is about to change

    def keep_data(self) -> None:
        with _torch.DisableTorchFunctionSubclass():
            self.data = self.parameter.detach()

    def restore(self) -> None:
        parameter = self.parameter
        if type(parameter) is not self._class:
            parameter.__class__ = self._class
        self._attributes.restore()
        with _torch.DisableTorchFunctionSubclass():
            if self.data is not None:
                parameter.grad = None  # it may have another dtype than the data that comes
                parameter.data = self.data
            if parameter.is_leaf:
                if parameter.grad is not self._grad:
                    parameter.grad = self._grad
                if parameter.requires_grad != self._requires_grad:
                    parameter.requires_grad_(self._requires_grad)
            for name, table, items in self._hooks:
                now = getattr(parameter, name)
                if items is not None:
                    items.restore()
                elif now is not None:
                    now.clear()  # torch keeps calling what is in it
                if now is not table:
                    setattr(parameter, name, table)


class Original:
    """What manage() found; `restore` puts it back, `forget` lets it go.

    Args:
        model: as manage() got it; not changed yet.
        optimizers: likewise; what is none is left as it is.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        known = nn.Module().__dict__
        self._tables: list[_Table] = []
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):  # nobody changes it
                continue
            own = module.__dict__
            self._tables.append(_Table(own))
            tables = [own[n] for n in known if isinstance(own.get(n), dict | set | list)]
            self._tables += [_Table(table) for table in tables]
        self._parameters = {id(p): _Parameter(p) for p in model.parameters()}
        for parameter in model.parameters():
            for _, part in quantized.parts(parameter):
                self._parameters[id(part)] = _Parameter(part)
        self._optimizers = [
            (each, type(each)) for each in optimizers if isinstance(each, torch.optim.Optimizer)
        ]
        for optimizer, _ in self._optimizers:
            state, groups = optimizer.state, optimizer.param_groups
            inner = [*groups, *(group["params"] for group in groups), *state.values()]
            tables = [optimizer.__dict__, state, groups, *inner]
            self._tables += [_Table(t) for t in tables if isinstance(t, dict | set | list)]
        self._random = torch.get_rng_state()
        self._acts: list[Callable[[], object]] = []

    def keep_data(self, parameter: nn.Parameter) -> None:
        """Before a parameter's data is replaced by `p.data = `; its old storage lives on until `forget`."""
        self._parameters[id(parameter)].keep_data()

    def keep_alias(self, tensor: torch.Tensor) -> None:
        """Before the data of a tensor that is no parameter is replaced."""
        data = tensor.detach()
        self._acts.append(lambda: setattr(tensor, "data", data))

    def keep_values(self, tensor: torch.Tensor) -> None:
        """Before a tensor is written in place."""
        values = tensor.detach().clone()

        @torch.no_grad()
        def write() -> None:
            tensor.copy_(values)

        self._acts.append(write)

    def on_restore(self, act: Callable[[], object]) -> None:
        """`act` is called by `restore`, last come first; it finds the parameters with their own classes."""
        self._acts.append(act)

    def restore(self, error: BaseException) -> None:
        """Puts everything back; `error` is what has happened."""
        for parameter in self._parameters.values():
            parameter.restore()
        for optimizer, kind in self._optimizers:
            if type(optimizer) is not kind:
                optimizer.__class__ = kind
        for table in self._tables:
            table.restore()
        while self._acts:
            self._acts.pop()()
        torch.set_rng_state(self._random)
        self.forget()
        _clear_frames(error)

    def forget(self) -> None:
        self._tables.clear()
        self._parameters.clear()
        self._acts.clear()
        self._optimizers = []


def _clear_frames(error: BaseException | None) -> None:
    """Our own frames below the one that handles `error` hold tensors that show parameters: their locals go.

    Otherwise a second manage(), tried where the first one's error is handled, would find them.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        trace: types.TracebackType | None = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
                with contextlib.suppress(RuntimeError):  # it runs: the one that handles it
                    trace.tb_frame.clear()
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
