"""Gemini: chunk-based memory management for PyTorch training.

`manage(model, optimizer, device_budget=...)` puts a model's parameters, gradients and optimizer states
into chunks that move between device and host, so that a training state larger than the device budget trains
to the same bits as if it had fitted. See README.md.

Importing this imports no torch, so that the command can look at its words first (cli.py). What is named here comes from
its module when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gemini_strategy._version import __version__ as __version__

if TYPE_CHECKING:
    from gemini_strategy.engine import Engine
    from gemini_strategy.errors import GeminiDeviceError, GeminiError, GeminiMemoryError, GuardError
    from gemini_strategy.estimates.forecast import Estimate, estimate
    from gemini_strategy.management import engine_of, manage
    from gemini_strategy.optim.adam import CPUAdam, HybridAdam, cast_model_, grad_norm
    from gemini_strategy.precision import LossScaler
    from gemini_strategy.sizes import parse_bytes

# No module has the name of something that is public: Python makes each that is imported an attribute of the package.
_HOMES = {
    "CPUAdam": "optim.adam",
    "Engine": "engine",
    "Estimate": "estimates.forecast",
    "GeminiDeviceError": "errors",
    "GeminiError": "errors",
    "GeminiMemoryError": "errors",
    "GuardError": "errors",
    "HybridAdam": "optim.adam",
    "LossScaler": "precision",
    "cast_model_": "optim.adam",
    "engine_of": "management",
    "estimate": "estimates.forecast",
    "grad_norm": "optim.adam",
    "manage": "management",
    "parse_bytes": "sizes",
}
_MODULES = ("errors", "optim")

__all__ = [
    "CPUAdam",
    "Engine",
    "Estimate",
    "GeminiDeviceError",
    "GeminiError",
    "GeminiMemoryError",
    "GuardError",
    "HybridAdam",
    "LossScaler",
    "cast_model_",
    "engine_of",
    "estimate",
    "grad_norm",
    "manage",
    "parse_bytes",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What is for use. Python makes every module of a package that is imported an attribute of it, these besides."""
    return sorted([*__all__, "__doc__", "__version__", *_MODULES])
