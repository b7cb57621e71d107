"""What the layer under Hugging Face's libraries gives to `manage()`: one plugin per program, or per Accelerator."""

from __future__ import annotations

import os
from dataclasses import asdict, field, make_dataclass
from typing import TYPE_CHECKING, Any, Unpack

from gemini_strategy.arguments import arguments_of, described
from gemini_strategy.inherited import told
from gemini_strategy.settings import Calls, Chunks, check


class Plugged(Chunks, Calls, total=False):
    """The arguments of GeminiPlugin."""


class _Checked:
    def __post_init__(self) -> None:
        check("GeminiPlugin", asdict(self), Plugged)  # type: ignore[call-overload]


_Fields = make_dataclass(
    "_Fields",
    [(name, kind, field(default=a.default)) for name, (kind, a) in arguments_of(Plugged).items()],
    bases=(_Checked,),
    frozen=True,
    kw_only=True,
)


class GeminiPlugin(_Fields):  # type: ignore[misc, valid-type]
    """The budgets and the policy of the models that an Accelerator or a Trainer trains.

    Device, precision and ranks are accelerate's: where it computes, its `mixed_precision` and its processes; fp16's
    loss scale is what its GradScalerKwargs say. Budgets are of each model.

    Args:
        given: Plugged; as in `gemini_strategy.manage`.

    Raises:
        ValueError: a value out of its range.
    """

    if TYPE_CHECKING:

        def __init__(self, **given: Unpack[Plugged]) -> None: ...

    def arguments(self) -> dict[str, Any]:
        """Those of manage()."""
        return asdict(self)


GeminiPlugin.__doc__ = described(GeminiPlugin.__doc__, Plugged)
_current: GeminiPlugin | None = None


def use(plugin: GeminiPlugin | None) -> None:
    """Makes it the plugin of every Accelerator and Trainer that is given none; None: what the environment says."""
    global _current
    _current = plugin


def current() -> GeminiPlugin:
    """The plugin of who is given none: what `use` was given, else what the run was told that this process comes of,
    else one with GEMINI_DEVICE_BUDGET, if that is set."""
    if _current is not None:
        return _current
    budget = os.environ.get("GEMINI_DEVICE_BUDGET") or None
    return GeminiPlugin(**told().get("plugin", {"device_budget": budget}))
