"""What was measured, for the table at the end: kept apart from the engine, which may be gone by then.

Many scripts end without `close()`, and what a function has made is gone when it returns. So each step leaves here what
the table needs, and the table is told once: by close(), at the end of a Trainer's training, or when the process ends.

Invariants
    1. Nothing here refers to an engine, its model or its core: their memory is free when nothing else has them.
    2. Steps are told of once; more steps after that are told of again.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from typing import Any

from gemini_strategy.report import tables

# Engines' measurements with steps that have not been told of, in the order of their first steps.
_untold: dict[int, Measured] = {}
_registered_in = 0  # the process that tells of them when it ends: a fork does so for itself


class Measured:
    """The figures of one engine.

    Attributes:
        meter: counts steps.
        facts: tables.about of the engine, once there is a table to be told.
        total_peak_bytes: the most that the driver has seen in use, or 0.
    """

    def __init__(self, on_host: bool) -> None:
        self.meter = tables.StepMeter()
        self.facts: Mapping[str, Any] = {}
        self.total_peak_bytes = 0
        self.model_bytes = 0  # of the host, of the model as it came
        self._on_host = on_host  # the device's memory is the host's
        self._host_before_bytes = tables.host_resident_bytes()  # with the model as it came
        self._core: Mapping[str, Any] = {}
        self._plan: Mapping[str, Any] | None = None
        self._steps = self._pid = 0

    def figures(self, core: Mapping[str, Any], plan: Mapping[str, Any] | None) -> dict[str, float]:
        """What stats() says beside the core's counts.

        Args:
            core: core.stats().
            plan: core.plan_info().
        """
        figures: dict[str, float] = self.meter.figures()
        if self.total_peak_bytes:
            figures["total_peak_bytes"] = self.total_peak_bytes
        if plan is not None:
            figures |= {
                "predicted_step_seconds": plan["step_seconds"],
                "predicted_bound_seconds": plan["bound_seconds"],
                "predicted_device_peak_bytes": plan["device_bytes"] + core["outside_peak_bytes"],
                "predicted_host_peak_bytes": self._host_peak_bytes(plan, core),
                "predicted_compute_seconds": plan["compute_seconds"],
            }
        return figures

    def _host_peak_bytes(self, plan: Mapping[str, Any], core: Mapping[str, Any]) -> int:
        """Of the whole process: manage() takes the homes while the model's own tensors are still there."""
        device_bytes = plan["device_bytes"] if self._on_host else 0
        spares = core["spare_bytes"]  # which come when the model's own tensors have gone
        beside = max(spares - self.model_bytes, 0)
        before: int = self._host_before_bytes
        return before + core["host_bytes"] - spares + beside + device_bytes

    def keep(self, steps: int, core: Mapping[str, Any], plan: Mapping[str, Any] | None) -> None:
        """A step has ended, of which the table is to be told: see `figures`."""
        global _registered_in
        self._steps, self._core, self._plan = steps, core, plan
        self._pid = os.getpid()
        _untold[id(self)] = self
        if _registered_in != self._pid:
            _registered_in = self._pid
            atexit.register(tell_all)

    def tell(self) -> None:
        """Prints the table, if there are steps that have not been told of."""
        if _untold.pop(id(self), None) is not None:
            stats = {**self._core, "steps": self._steps, **self.figures(self._core, self._plan)}
            tables.show(tables.result_text(self.facts, stats, self._plan))

    def forget(self) -> None:
        """Nothing is to be told of these steps."""
        _untold.pop(id(self), None)


def tell_all() -> None:
    """The process ends, or the script in it: what has not been told yet is, but for steps of another process."""
    for each in list(_untold.values()):
        if each._pid == os.getpid():
            each.tell()
