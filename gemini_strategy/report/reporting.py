"""What a runtime says of itself: figures, the tables at their time, a timeline that is being recorded."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from gemini_strategy.report import tables
from gemini_strategy.report.first_step import FirstStep
from gemini_strategy.report.measured import Measured
from gemini_strategy.report.timeline import Recording

# What stats() has, group after group; docs/tuning.md says what each is. The last of "memory" is there on CUDA only, the
# last group with a plan.
_NAMES = {
    "steps": """
        steps skipped_steps loss_scale step_seconds tokens_per_step tokens_per_s stall_percent host_adam_seconds
        h2d_gb_s d2h_gb_s
    """,
    "model": "parameters weight_bytes state_bytes chunks blocks layout_hash",
    "memory": """
        device_budget_bytes device_bytes device_peak_bytes outside_peak_bytes host_bytes host_peak_bytes spare_bytes
        staying_bytes leases total_peak_bytes
    """,
    "since manage()": """
        fetches fetched_bytes evictions evicted_bytes host_pin_seconds mapping_seconds
    """,
    "plan": """
        planned settling plans plan_breaks traces deviations replay_waits host_waits chunks_with_states
        pending_updates immediate_updates speculated_updates taken_updates redone_updates
    """,
    "ranks": "rank shards replicas gathers gathered_bytes reduces reduced_bytes",
    "foretold": """
        predicted_step_seconds predicted_bound_seconds predicted_compute_seconds predicted_device_peak_bytes
        predicted_host_peak_bytes
    """,
}
STATS = {group: tuple(names.split()) for group, names in _NAMES.items()}

_log = logging.getLogger("gemini_strategy")


class Reporting:
    """What an engine says of itself: a base of Runtime.

    Of the engine it uses core, device, ranks, slots, units, choose_way() and settings.report: True, the first plan
    and, at close() or when the process ends, the result are printed; None, with GEMINI_REPORT=1; False, never.

    Attributes:
        measured: what the table of the result needs; it outlives the engine.
        meter: counts steps; `meter.tokens_per_step = n` replaces the count from the model's inputs.
        recording: the timeline that is being recorded, or None.
        first_step: its bar, until it has ended; or None.
    """

    first_step: FirstStep | None = None

    def __init__(self, device: torch.device) -> None:
        self.measured = Measured(device.type == "cpu")
        self.meter = self.measured.meter
        self.recording: Recording | None = None
        self._has_plan = False  # the first one has been told, or would have been

    def note_model(self) -> None:
        """The slots are there, and the parameters as they came."""
        self.measured.model_bytes = sum(
            slot.parameter.numel() * slot.original_dtype.itemsize
            for slot in self.slots
            if slot.original_device.type == "cpu"
        )

    def watch_first_step(self) -> None:
        first_step = FirstStep(self.units, self.ranks.rank)
        if first_step.is_watched:
            self.first_step = first_step
            self.choose_way()

    def interrupt_first_step(self) -> None:
        """An error has ended one of its passes."""
        if self.first_step is not None:
            self.first_step.interrupt()

    def end_first_step(self) -> None:
        """It has ended, or never will. Idempotent."""
        if self.first_step is not None:
            self.first_step.end()
            self.first_step = None
            self.choose_way()

    def note_step(self, stats: Mapping[str, Any]) -> None:
        """An optimizer step has been issued, or skipped by the loss scaler; stats: core.stats()."""
        self.end_first_step()
        self.meter.step(stats, stats["planned_compute_seconds"])
        is_wanted = self._is_report_wanted()
        if stats["planned"] and not self._has_plan:
            self._has_plan = True
            if self.ranks.rank == 0:
                _log.info("%s", tables.headline(self))
            if is_wanted:
                tables.show(tables.plan_table(self))
        if is_wanted and self.steps:
            self.measured.facts = self.measured.facts or tables.about(self)
            self.measured.keep(self.steps, stats, self.core.plan_info())
        if self.recording is not None:
            self.recording.after_step()

    def _is_report_wanted(self) -> bool:
        wanted = self.settings.report
        if wanted is None:
            wanted = os.environ.get("GEMINI_REPORT") == "1"
        return wanted and self.ranks.rank == 0

    def sample_device(self) -> None:
        """Before anything is given back between steps: what the passes have left is about their peak."""
        free, total = torch.cuda.mem_get_info(self.device)
        self.measured.total_peak_bytes = max(self.measured.total_peak_bytes, total - free)

    def figures(self) -> dict[str, float]:
        """What stats() says beside the core's counts: see STATS."""
        return self.measured.figures(self.core.stats(), self.core.plan_info())
