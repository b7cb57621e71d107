# What the strategy says: figures to the trainer's loggers, and the two tables of report/tables.py.
#
# A class for the strategy of each Lightning tree to inherit from; nothing here imports Lightning.
#
# Invariants
#   1. Figures reach every logger at the steps at which Lightning logs its own, under the same step number.
#   2. A figure that is not known (NaN) is left out.

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

from gemini_strategy.report import tables

# Key of engine.stats() -> the name that loggers get.
LOGGED = {
    "tokens_per_s": "gemini/tokens_per_s",
    "stall_percent": "gemini/stall_percent",
    "h2d_gb_s": "gemini/h2d_gb_s",
    "d2h_gb_s": "gemini/d2h_gb_s",
    "host_adam_s": "gemini/host_adam_s",
    "device_peak_bytes": "gemini/device_peak_bytes",
    "host_peak_bytes": "gemini/host_peak_bytes",
}

# Engines whose plan has been shown.
_shown: "WeakSet[Any]" = WeakSet()


class StepLogs:
    """To be inherited from before the tree's own strategy, by a class with the attribute `engine`."""

    _say: Callable[[str], None]  # the tree's rank_zero_info
    engine: Any
    lightning_module: Any
    report: bool  # whether tables are told
    deferred_because: str | None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Here and not only in `forward`, which many modules do not call in their training_step.
        engine = self.engine
        with nullcontext() if engine is None else engine.meter.counting((args, kwargs)):
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        engine = self.engine
        if engine is not None:
            if self.report and engine not in _shown and tables.plan_of(engine._runtime) is not None:
                _shown.add(engine)
                self._say(tables.plan_table(engine._runtime))
                if self.deferred_because is not None:
                    self._say(f"Updates run under the next forward: {self.deferred_because}.")
            _log(self.lightning_module.trainer, engine)
        return result

    def on_train_end(self) -> None:
        super().on_train_end()  # type: ignore[misc]
        engine = self.engine
        if self.report and engine is not None and engine.stats()["steps"]:
            self._say(tables.result_table(engine._runtime))


def _log(trainer: Any, engine: Any) -> None:
    if not trainer.loggers or not trainer._logger_connector.should_update_logs:
        return
    stats = engine.stats()
    figures = {name: stats[key] for key, name in LOGGED.items() if not math.isnan(stats[key])}
    for logger in trainer.loggers:
        logger.log_metrics(figures, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
