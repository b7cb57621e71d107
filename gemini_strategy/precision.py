"""What a precision string means: the dtype of each weight, the inputs' dtype, autocast, loss scaling."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, Unpack

import torch
from torch import nn

from gemini_strategy import _C, _torch
from gemini_strategy._torch import tree_map
from gemini_strategy.arguments import (
    Argument,
    Arguments,
    check_table,
    number,
    table,
    taking,
)
from gemini_strategy.choices import PRECISIONS

FORMATS: dict[torch.dtype, int] = {getattr(torch, name): n for name, n in _C.FORMATS.items()}
"""The dtypes that the core computes with, and its numbers for them."""
_RUNNING_STATISTICS = (_torch.BatchNormBase,)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_forwards = threading.local()


@contextlib.contextmanager
def in_forward() -> Iterator[None]:
    """Inside, this thread runs a forward that has autocast, or switches it off by itself."""
    before = is_in_forward()
    _forwards.is_inside = True
    try:
        yield
    finally:
        _forwards.is_inside = before


def is_in_forward() -> bool:
    """Whether this thread is inside `in_forward`."""
    return getattr(_forwards, "is_inside", False)


def to_fp32(value: Any) -> Any:
    """A half-precision tensor in fp32; anything else as it is."""
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value


@dataclass(frozen=True)
class Precision:
    """One precision. `name` is None when parameters keep the dtypes that they have."""

    name: str | None

    def __post_init__(self) -> None:
        if self.name is not None and self.name not in PRECISIONS:
            allowed = ", ".join(repr(p) for p in PRECISIONS)
            raise ValueError(f"precision={self.name!r} is not supported; choose one of {allowed}")

    @property
    def dtype(self) -> torch.dtype | None:
        """The compute dtype of weights; None keeps each parameter's own."""
        if self.name is None:
            return None
        return {"32": torch.float32, "bf": torch.bfloat16, "16": torch.float16}[self.name[:2]]

    @property
    def is_mixed(self) -> bool:
        return self.name is not None and self.name.endswith("-mixed")

    def convert_inputs(self, inputs: Any) -> Any:
        """Casts floating-point tensors of a *-true precision; *-mixed leaves them to autocast."""
        dtype = self.dtype
        if dtype is None or self.is_mixed:
            return inputs

        def cast(x: Any) -> Any:
            is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
            return x.to(dtype) if is_float and x.dtype is not dtype else x

        return tree_map(cast, inputs)

    @contextlib.contextmanager
    def forward_context(self, device_type: str) -> Iterator[None]:
        """Autocast for *-mixed, nothing otherwise."""
        if not self.is_mixed:
            yield
            return
        with in_forward(), torch.autocast(device_type, dtype=self.dtype):
            yield


def weight_dtype(module: nn.Module, parameter: torch.Tensor, precision: str | None) -> torch.dtype:
    """The dtype in which `parameter` of `module` is computed with.

    Floating-point parameters take the precision's dtype, except: normalisation with running statistics
    keeps fp32 (its buffers are fp32, and torch wants both alike), and with *-mixed every torch
    normalisation keeps fp32, because autocast computes them so. Other dtypes stay as they are.
    """
    target = Precision(precision).dtype
    if target is None or not parameter.is_floating_point():
        return parameter.dtype
    kept = _RUNNING_STATISTICS + (_NORMS if Precision(precision).is_mixed else ())
    return torch.float32 if isinstance(module, kept) else target


def weight_dtypes(model: nn.Module, precision: str | None) -> dict[nn.Parameter, torch.dtype]:
    """`weight_dtype` of every parameter; fp32 where modules that share one disagree."""
    dtypes: dict[nn.Parameter, torch.dtype] = {}
    for module in model.modules():
        for p in (p for p in module._parameters.values() if p is not None):
            dtype = weight_dtype(module, p, precision)
            dtypes[p] = dtype if dtypes.get(p, dtype) is dtype else torch.float32
    return dtypes


@table
class LossScaling(TypedDict, total=False):
    """The arguments of LossScaler, which all that make one take too.

    Args:
        initial_scale: the first loss scale of "16-mixed".
        min_scale: the loss scale never falls below this.
        growth_factor: multiplies the scale after `growth_interval` steps without overflow, more
            than 1.
        backoff_factor: multiplies the scale on overflow, once `hysteresis` overflows have come
            since the last growth (or start); between 0 and 1.
        growth_interval: steps without overflow in a row.
        hysteresis: overflows to tolerate; 1 backs off at once.
        max_scale: the loss scale never rises above this.
    """

    initial_scale: Annotated[float, Argument(2.0**16, number(0, None, True))]
    min_scale: Annotated[float, Argument(1.0, number(0, None))]
    growth_factor: Annotated[float, Argument(2.0, number(1, None, True))]
    backoff_factor: Annotated[float, Argument(0.5, number(0, 1, True))]
    growth_interval: Annotated[int, Argument(1000, Arguments.check_count)]
    hysteresis: Annotated[int, Argument(2, Arguments.check_count)]
    max_scale: Annotated[float, Argument(2.0**32, number(0, None))]


LOSS_SCALING = tuple(LossScaling.__annotations__)


def check_loss_scaling(call: str, given: Mapping[str, Any]) -> None:
    """The arguments of LossScaler together, after each by itself."""
    arguments = Arguments(call, given)
    low, high = given["min_scale"], given["max_scale"]
    arguments.check_number("max_scale", low, None)
    within = f"a number at least {low} (min_scale) and at most {high} (max_scale)"
    arguments.check(low <= given["initial_scale"] <= high, "initial_scale", within)


@taking(LossScaling, LOSS_SCALING)
class LossScaler:
    """Dynamic loss scale for fp16 gradients.

    With hysteresis=1, min_scale=0 and max_scale=inf the sequence of scales equals that of
    `torch.amp.GradScaler` with the same initial scale, factors and interval. The scale that a step
    uses is the one its loss was multiplied with; `update` changes it afterwards.

    Args:
        given: LossScaling.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(self, **given: Unpack[LossScaling]) -> None:
        check_table("LossScaler", given, LossScaling)
        check_loss_scaling("LossScaler", given)
        self.min_scale = float(given["min_scale"])
        self.max_scale = float(given["max_scale"])
        self.growth_factor = float(given["growth_factor"])
        self.backoff_factor = float(given["backoff_factor"])
        self.growth_interval = int(given["growth_interval"])
        self.hysteresis = int(given["hysteresis"])
        self.scale = float(given["initial_scale"])
        self._growth_steps = 0
        self._overflows = 0

    def update(self, found_overflow: bool) -> None:
        """Tells the outcome of one step."""
        if found_overflow:
            self._growth_steps = 0
            self._overflows += 1
            if self._overflows >= self.hysteresis:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self._growth_steps += 1
        if self._growth_steps >= self.growth_interval:
            self._growth_steps = 0
            self._overflows = 0
            self.scale = min(self.scale * self.growth_factor, self.max_scale)

    def state_dict(self) -> dict[str, float | int]:
        """Keys as in torch.amp.GradScaler, and ours beside them."""
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._growth_steps,
            "hysteresis": self.hysteresis,
            "overflows": self._overflows,
        }

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Also takes the state of a torch.amp.GradScaler (an empty one changes nothing)."""
        if not state:
            return
        self.scale = float(state["scale"])
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self._growth_steps = int(state["_growth_tracker"])
        self.hysteresis = int(state.get("hysteresis", self.hysteresis))
        self._overflows = int(state.get("overflows", 0))
