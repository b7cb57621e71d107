"""Gemini: chunk-based memory management for PyTorch training.

`manage(model, optimizer, device_budget=...)` puts a model's parameters, gradients and optimizer states
into chunks that move between device and host, so that a training state larger than the device budget trains
to the same bits as if it had fitted. See README.md.
"""

# Before all else: whether this torch will do. The core looks functions up in the libtorch that this loads.
from gemini_strategy import _torch  # noqa: F401
from gemini_strategy.errors import GeminiDeviceError, GeminiError, GeminiMemoryError, GuardError

from gemini_strategy import _C  # isort: skip

_C.torch_abi_init()

from gemini_strategy._version import __version__ as __version__  # noqa: E402
from gemini_strategy.engine import Engine  # noqa: E402
from gemini_strategy.estimates.forecast import Estimate, estimate  # noqa: E402
from gemini_strategy.manage import engine_of, manage  # noqa: E402
from gemini_strategy.optim.adam import CPUAdam, HybridAdam, cast_model_, grad_norm  # noqa: E402
from gemini_strategy.precision import LossScaler  # noqa: E402
from gemini_strategy.sizes import parse_bytes  # noqa: E402

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


def __dir__() -> list[str]:
    """What is for use. Python makes every module of a package that is imported an attribute of it, these besides."""
    return sorted([*__all__, "__doc__", "__version__", "errors", "optim"])
