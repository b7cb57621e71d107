"""The figures that a framework's loggers get beside its own, at the steps that it logs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_FIGURES = """
    tokens_per_s stall_percent h2d_gb_s d2h_gb_s host_adam_seconds device_peak_bytes host_peak_bytes
"""
# Key of engine.stats() -> the name that loggers get.
LOGGED = {key: f"gemini/{key}" for key in _FIGURES.split()}


def logged(stats: Mapping[str, Any]) -> dict[str, float]:
    """Those of an engine's stats() by the names that loggers get; a figure that is not known (NaN) is left out."""
    return {name: stats[key] for key, name in LOGGED.items() if not math.isnan(stats[key])}
