"""Importing what needs a package of Hugging Face's: whoever lacks it is told what to install."""

from __future__ import annotations

import importlib
from types import ModuleType

_PACKAGES = ("accelerate", "safetensors", "transformers")  # of the extra


def imported(module: str, user: str) -> ModuleType:
    """The module.

    Args:
        module: its dotted name.
        user: what needs it, for the error.

    Raises:
        ImportError: a package of the extra is not installed; the text says how it is.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        raise ImportError(
            f"{user} needs {package}: pip install 'gemini-strategy[huggingface]'", name=package
        ) from error
