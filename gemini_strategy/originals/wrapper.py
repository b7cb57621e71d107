"""A model and an optimizer inside objects of their own, as the originals' programs expect.

The module comes first and its optimizer later, so the engine is made when the optimizer is wrapped, or at the first
forward where there is none. Nothing is decided here: what a wrapper was given goes to manage().

Invariants
    1. The wrapped module and the wrapped optimizer stay who they are; schedulers may hold either optimizer.
    2. `step` leaves no gradient: what the wrappers of the originals did, and programs written for them count on.
    3. State dicts have the keys of the module inside, and its fp32 masters.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

import gemini_strategy as gs
from gemini_strategy.originals.arguments import Only, takes

# The arguments of the loss scale, and those of clipping.
SCALING = {name: p.default for name, p in inspect.signature(gs.LossScaler).parameters.items()}
CLIPPING = {"max_norm": 0.0, "norm_type": Only(2.0, "gradients are clipped by their 2-norm")}
_VARS = Only(False, "the parameters' bytes are in chunks; use module.parameters()")


def place(group: Any = None) -> tuple[int, int]:
    """This process among the ranks of the group (None: all), and their number; without torch.distributed 0, 1."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


class WrappedModule(nn.Module):
    """A module that an engine manages, in place, as `module`; `arguments` are those of manage()."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.module = module
        self._arguments = arguments
        self._engine: gs.Engine | None = None

    @property
    def engine(self) -> gs.Engine | None:
        """The engine that manages the module; None before the optimizer was wrapped and before the first forward."""
        return None if self._engine is None or self._engine.closed else self._engine

    def manage(self, optimizer: torch.optim.Optimizer | None, **more: Any) -> gs.Engine:
        """Makes the engine; one that had no optimizer is closed before, one that has is a GeminiError."""
        if self.engine is not None:
            if self.engine.optimizer is not None:
                raise gs.GeminiError(
                    f"{type(self).__name__} has an optimizer already: one engine has one; put the parameters into "
                    "several groups of it"
                )
            self.engine.close(torch.float32)
        self._engine = gs.manage(self.module, optimizer, **self._arguments, **more)
        return self._engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.engine is None:
            self.manage(None)
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, with the loss scale of fp16."""
        (self.engine or self.manage(None)).backward(loss)

    def unwrap(self) -> nn.Module:
        """The module; still managed."""
        return self.module

    def close(self) -> nn.Module:
        """The module, ordinary again, with the trained weights."""
        if self.engine is not None:
            self.engine.close()
        return self.module

    @takes(destination=None, prefix="", keep_vars=_VARS, only_rank_0=False, from_param=False)
    def state_dict(  # type: ignore[override]
        self, destination: Any, prefix: str, only_rank_0: bool, from_param: bool
    ) -> dict[str, Any]:
        """What the module's own has, on the CPU: fp32 masters; with from_param weights as they are computed with."""
        found = self.module.state_dict
        if self.engine is not None:
            found = functools.partial(
                self.engine.model_state_dict, not from_param, rank0_only=only_rank_0
            )
        state = OrderedDict() if destination is None else destination
        state.update((prefix + name, value) for name, value in found().items())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:  # type: ignore[override]
        """Parameters and buffers, on every rank the whole; fp32 values become the masters exactly."""
        if self.engine is None:
            return self.module.load_state_dict(state_dict, strict=strict)
        return self.engine.load_model_state_dict(dict(state_dict), strict)


class WrappedOptimizer(torch.optim.Optimizer):
    """An optimizer that an engine has taken over, as `optim`; it makes the engine, with `more` of manage()'s arguments.

    With max_norm each step clips to this 2-norm; ends_step: a step follows each backward (Engine.ends_step).
    """

    def __init__(
        self, module: WrappedModule, optimizer: Any, *, max_norm: float = 0.0, ends_step: bool = False, **more: Any
    ) -> None:  # fmt: skip
        # The base's own __init__ would make groups of their own: these are the optimizer's.
        call, kind = type(self).__name__, type(module)
        if not isinstance(module, WrappedModule):
            raise TypeError(f"{call}: the module must be wrapped before, got {kind.__name__}")
        if not max_norm >= 0:
            raise ValueError(f"{call}(max_norm={max_norm!r}): expected a number of at least 0.")
        self.module = module
        self.optim = optimizer
        self.max_norm = float(max_norm)
        self.ends_step = ends_step and not max_norm
        self.engine = module.manage(optimizer, **more)

    def __getattr__(self, name: str) -> Any:  # param_groups, state, defaults
        if name in ("optim", "engine"):  # not made yet
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __reduce__(self) -> Any:
        return copy.copy(self.engine)  # which refuses, with the way out

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.optim!r}"

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with; 1 without fp16."""
        return 1.0 if self.engine.scaler is None else self.engine.scaler.scale

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, scaled where that is needed."""
        self.engine.backward(loss, step=self.ends_step)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Clips if it was told to, updates, and drops the gradients."""
        if closure is not None and self.max_norm:
            raise ValueError(
                f"{type(self).__name__}.step(closure=...): with max_norm={self.max_norm} the gradients are clipped "
                "before the step: call the closure before it"
            )
        if self.max_norm:
            self.engine.clip_grad_norm_(self.max_norm)
        result = self.engine.step(closure)
        self.engine.zero_grad()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops every gradient, or zeroes it."""
        self.engine.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own."""
        self.optim.add_param_group(param_group)

    def state_dict(self, only_rank_0: bool = False) -> dict[str, Any]:
        """The optimizer's, in torch's form, and beside it the loss scaler's, so that fp16 goes on exactly."""
        state = self.engine.optimizer_state_dict(rank0_only=only_rank_0)
        if state and self.engine.scaler is not None:
            state["loss_scaler"] = self.engine.scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """What `state_dict` gave, or torch's optimizer, which has no loss scaler."""
        state = dict(state_dict)
        scaler = state.pop("loss_scaler", None)
        self.engine.load_optimizer_state_dict(state)
        if scaler is not None and self.engine.scaler is not None:
            self.engine.scaler.load_state_dict(scaler)
