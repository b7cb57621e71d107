"""A model and an optimizer inside objects of their own, for programs that expect such: elixir/ and colossalai/.

The module comes first and its optimizer later, so the engine is made when the optimizer is wrapped, or at the first
forward where there is none. Nothing is decided here: what a wrapper was given goes to manage().

Invariants
    1. The wrapped module and the wrapped optimizer stay who they are; schedulers may hold either optimizer.
    2. `step` leaves no gradient: what the wrappers of the originals did, and programs written for them count on.
    3. State dicts have the keys of the module inside, and its fp32 masters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

import gemini_strategy as gs
from gemini_strategy.arguments import Arguments
from gemini_strategy.runtime import Uncopied


def refuse(call: str, given: Mapping[str, Any], fixed: Mapping[str, tuple[Any, str]]) -> None:
    """Refuses by name what has one value here.

    Args:
        call: what was called.
        given: its arguments by name.
        fixed: for each such argument the one value that is taken, and why there is no other and the way out.

    Raises:
        ValueError: another value.
    """
    for name, (value, reason) in fixed.items():
        found = given[name]
        # True is not 1, but 1 is 1.0.
        kinds = [int if type(each) is float else type(each) for each in (found, value)]
        if found is not value and not (kinds[0] is kinds[1] and found == value):
            raise ValueError(f"{call}({name}={found!r}): only {value!r} is taken: {reason}.")


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks of torch.distributed; by itself it does."""
    return not _is_grouped() or torch.distributed.get_rank() == 0


def group_size(group: ProcessGroup | None = None) -> int:
    """Ranks of the group (None: all); without torch.distributed 1."""
    return torch.distributed.get_world_size(group) if _is_grouped() else 1


def _is_grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class WrappedModule(nn.Module):
    """A module that an engine manages, in place, as `module`.

    Args:
        module: the model.
        arguments: for manage(), as they are.
    """

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
        """Makes the engine; one that had no optimizer is closed before.

        Raises:
            GeminiError: there is an optimizer already.
        """
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
        if self.engine is None:
            self.manage(None)
        self.engine.backward(loss)

    def unwrap(self) -> nn.Module:
        """The module; still managed."""
        return self.module

    def close(self) -> nn.Module:
        """The module, ordinary again, with the trained weights."""
        if self.engine is not None:
            self.engine.close()
        return self.module

    def state_dict(  # type: ignore[override]
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        only_rank_0: bool = False,
        from_param: bool = False,
    ) -> dict[str, Any]:
        """What the module's own has, on the CPU; all ranks call it.

        Args:
            destination, prefix, keep_vars: as torch has them; keep_vars is refused.
            only_rank_0: the other ranks get an empty dict.
            from_param: trained parameters in their compute dtype instead of the fp32 masters.
        """
        reason = "the parameters' bytes are in chunks; use module.parameters()"
        refuse(f"{type(self).__name__}.state_dict", locals(), {"keep_vars": (False, reason)})
        if self.engine is None:
            found = self.module.state_dict()
        else:
            found = self.engine.model_state_dict(not from_param, rank0_only=only_rank_0)
        state = OrderedDict() if destination is None else destination
        state.update((prefix + name, value) for name, value in found.items())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:  # type: ignore[override]
        """Parameters and buffers, on every rank the whole; fp32 values become the masters exactly."""
        if self.engine is None:
            return self.module.load_state_dict(state_dict, strict=strict)
        return self.engine.load_model_state_dict(dict(state_dict), strict)


def _of_optim(name: str) -> Any:
    return property(lambda self: getattr(self.optim, name))


class WrappedOptimizer(Uncopied, torch.optim.Optimizer):
    """An optimizer that an engine has taken over, as `optim`; it makes the engine.

    Args:
        module: the wrapper of the model.
        optimizer: torch.optim.AdamW, Adam, HybridAdam or CPUAdam over parameters of the model.
        max_norm: clip to this 2-norm in every step; 0: not.
        ends_step: every backward is followed by its step, so updates may run inside it; see Engine.ends_step.
        scaling: arguments of manage() for the loss scale.
    """

    def __init__(
        self,
        module: WrappedModule,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float = 0.0,
        ends_step: bool = False,
        **scaling: Any,
    ) -> None:
        # The base's own __init__ would make groups of their own: these are the optimizer's.
        call = type(self).__name__
        if not isinstance(module, WrappedModule):
            raise TypeError(
                f"{call}: the module must be wrapped before, got {type(module).__name__}"
            )
        Arguments(call, {"max_norm": max_norm}).check_number("max_norm", 0, None)
        self.module = module
        self.optim = optimizer
        self.max_norm = float(max_norm)
        self.ends_step = ends_step and not max_norm
        self.engine = module.manage(optimizer, **scaling)

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not made yet
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.optim!r}"

    param_groups, state, defaults = map(_of_optim, ("param_groups", "state", "defaults"))

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
