# What the strategy says: figures to the trainer's loggers, and the two tables of report/tables.py.
#
# A class for the strategy of each Lightning tree to inherit from; nothing here imports Lightning.
#
# Invariants
#   1. Figures reach every logger at the steps at which Lightning logs its own, in the row of what the module logs.
#   2. A figure that is not known (NaN) is left out, and none is rounded on the way.

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from gemini_strategy.lightning.engine_strategy import EngineStrategy
from gemini_strategy.report import tables
from gemini_strategy.report.logged import logged
from gemini_strategy.weakly import WeakSet

# The hooks in which a step is logged: with manual optimization one may be taken anywhere, where Lightning refuses it.
_STEPPING = ("optimizer_step", "training_step")

# Engines whose plan has been shown.
_shown: "WeakSet[Any]" = WeakSet()


class StepLogs(EngineStrategy):
    """To be inherited from before the tree's own strategy."""

    _say: Callable[[str], None]  # the tree's rank_zero_info
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
            _log(self.lightning_module, engine)
        return result

    def on_train_end(self) -> None:
        super().on_train_end()  # type: ignore[misc]
        engine = self.engine
        if self.report and engine is not None and engine.stats()["steps"]:
            self._say(tables.result_table(engine._runtime))


def _log(module: Any, engine: Any) -> None:
    trainer = module.trainer
    if not trainer.loggers or not trainer._logger_connector.should_update_logs:
        return
    if module._current_fx_name not in _STEPPING:
        return
    # Lightning makes numbers fp32, which bytes do not fit.
    figures = {
        name: torch.tensor(value, dtype=torch.float64, device="cpu")
        for name, value in logged(engine.stats()).items()
    }
    # The batch size is of no use to what is not averaged, and looking for it may fail.
    module.log_dict(figures, on_step=True, on_epoch=False, batch_size=1)
