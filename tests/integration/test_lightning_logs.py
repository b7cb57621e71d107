# What Lightning's loggers and its console get: figures at the steps that Lightning logs, tables at the end.

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from gemini_strategy.engine import Engine
from gemini_strategy.report import tables
from gemini_strategy.report.logged import LOGGED
from lightning_case import fit, load_tree, make, module_class, same

KEYS = {
    "gemini/tokens_per_s",
    "gemini/stall_percent",
    "gemini/h2d_gb_s",
    "gemini/d2h_gb_s",
    "gemini/host_adam_seconds",
    "gemini/device_peak_bytes",
    "gemini/host_peak_bytes",
}
BATCH_TOKENS = 32  # 4 sequences of 8


def memory_logger(tree: str) -> Any:
    """A logger of the tree that keeps what it is given."""
    pl = load_tree(tree)

    class Memory(pl.loggers.logger.Logger):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[tuple[int, dict[str, float]]] = []

        @property
        def name(self) -> str:
            return "memory"

        @property
        def version(self) -> int:
            return 0

        def log_hyperparams(self, params: Any) -> None:
            return

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.rows.append((step, dict(metrics)))

        def steps_with(self, key: str) -> list[int]:
            return [step for step, metrics in self.rows if key in metrics]

    return Memory()


@pytest.mark.parametrize("every", [1, 3])
def test_figures_are_logged_where_lightning_logs(tree: str, every: int) -> None:
    logger = memory_logger(tree)
    fit(tree, make(tree), logger=logger, log_every_n_steps=every)  # 11 steps
    assert len(logger.steps_with("train_loss")) == 11 // every
    assert logger.steps_with("gemini/device_peak_bytes") == logger.steps_with("train_loss")
    ours = [metrics for _, metrics in logger.rows if "gemini/device_peak_bytes" in metrics]
    for metrics in ours:
        assert set(metrics) <= KEYS | {"train_loss", "epoch"}  # the module's row, and no other key
        assert not any(math.isnan(value) for value in metrics.values())
    # The first step only starts the clock.
    assert all("gemini/tokens_per_s" in metrics for metrics in ours[1 if every == 1 else 0 :])
    assert set(LOGGED.values()) == KEYS


def test_figures_are_those_of_the_engine(tree: str) -> None:
    logger = memory_logger(tree)
    module = make(tree)
    trainer = fit(tree, module, logger=logger, log_every_n_steps=11)  # the last one
    stats = trainer.strategy.engine.stats()
    (metrics,) = (metrics for _, metrics in logger.rows if "gemini/tokens_per_s" in metrics)
    for key, name in LOGGED.items():
        if name in metrics and key != "host_peak_bytes":
            assert metrics[name] == stats[key]
    assert stats["tokens_per_step"] == BATCH_TOKENS
    assert metrics["gemini/tokens_per_s"] == BATCH_TOKENS * (1.0 / stats["step_seconds"])


@pytest.mark.parametrize("manual", [False, True])
def test_a_step_has_one_row(tree: str, manual: bool, tmp_path: Path) -> None:
    """For loggers that take a step's figures once: as many rows as without the engine, and the same figures in them."""
    rows = []
    for strategy in ("auto", "gemini"):
        pl = load_tree(tree)
        loggers = [memory_logger(tree), pl.loggers.CSVLogger(tmp_path / strategy)]
        module = make(tree, steps_are_manual=manual)
        options = {"log_every_n_steps": 1, "limit_val_batches": 0, "max_epochs": 2}
        fit(tree, module, strategy, logger=loggers, **options)
        rows.append([step for step, _ in loggers[0].rows])
        (file,) = (tmp_path / strategy).rglob("metrics.csv")
        assert len(file.read_text().splitlines()) == 1 + len(rows[-1])
    theirs, ours = rows
    assert ours == theirs == list(range(22))
    metrics = loggers[0].rows[-1][1]
    assert metrics["train_loss"] == module.losses[-1]
    assert {"gemini/tokens_per_s", "gemini/device_peak_bytes"} <= set(metrics)


def test_a_step_outside_of_training_step_is_taken(tree: str) -> None:
    """With manual optimization, in a hook in which Lightning takes no figures of a step."""

    class Late(module_class(tree)):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))

        def on_train_epoch_end(self) -> None:
            self.optimizers().step()

    logger = memory_logger(tree)
    options = {"logger": logger, "log_every_n_steps": 1, "limit_val_batches": 0}
    trainer = fit(tree, Late(steps_are_manual=True), **options)
    assert trainer.strategy.engine.stats()["steps"] == 1


def test_bytes_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own numbers are fp32, in which 2**24 + 1 is another number."""
    logger = memory_logger("lightning")
    stats = Engine.stats
    monkeypatch.setattr(
        Engine, "stats", lambda self: {**stats(self), "host_peak_bytes": 5 * 2**33 + 1}
    )
    fit("lightning", make("lightning"), logger=logger, log_every_n_steps=1, limit_val_batches=0)
    assert {m["gemini/host_peak_bytes"] for _, m in logger.rows} == {5 * 2**33 + 1}


def test_accumulated_batches_are_one_step(tree: str) -> None:
    logger = memory_logger(tree)
    trainer = fit(
        tree, make(tree), logger=logger, log_every_n_steps=1, accumulate_grad_batches=2, max_steps=5
    )
    stats = trainer.strategy.engine.stats()
    assert stats["steps"] == 5 and stats["tokens_per_step"] == 2 * BATCH_TOKENS
    assert len(logger.steps_with("gemini/device_peak_bytes")) == 5


def test_manual_optimization_is_logged_too(tree: str) -> None:
    logger = memory_logger(tree)
    module = make(tree, steps_are_manual=True)
    trainer = fit(tree, module, logger=logger, log_every_n_steps=1)
    assert len(logger.steps_with("gemini/tokens_per_s")) == 10
    assert trainer.strategy.engine.stats()["tokens_per_step"] == BATCH_TOKENS


def test_several_loggers_or_none(tree: str) -> None:
    loggers = [memory_logger(tree), memory_logger(tree)]
    first, second, third = (make(tree) for _ in range(3))
    fit(tree, first, logger=loggers, log_every_n_steps=1)
    for logger in loggers:
        assert len(logger.steps_with("gemini/tokens_per_s")) == 10
    fit(tree, second, logger=False)
    off = memory_logger(tree)
    fit(tree, third, logger=off, log_every_n_steps=0)  # never
    assert not off.steps_with("gemini/device_peak_bytes")
    same(first.losses, second.losses)  # saying things changes nothing
    same(first.losses, third.losses)


def test_validation_between_steps_is_no_training(tree: str) -> None:
    trainer = fit(tree, make(tree), val_check_interval=2)
    assert trainer.strategy.engine.stats()["tokens_per_step"] == BATCH_TOKENS


def test_the_result_is_told_at_the_end(tree: str, caplog: pytest.LogCaptureFixture) -> None:
    module, idle = make(tree), make(tree)
    idle.training_step = lambda batch, batch_idx: None
    with caplog.at_level(logging.INFO):
        fit(tree, idle)
        assert "Gemini: " not in caplog.text  # nothing was trained
        fit(tree, module)
    tables = [record.getMessage() for record in caplog.records if "Gemini: " in record.getMessage()]
    results = [table for table in tables if "Gemini: the result" in table]
    assert len(results) == 1 and "after 11 steps" in results[0]
    assert results[0] == tables[-1]


def test_the_plan_is_told_once(
    tree: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step on which there is a plan."""
    asked: list[Any] = []

    def plan_of(engine: Any) -> Any:
        asked.append(engine)
        return None if len(asked) < 3 else {"a": "plan"}

    monkeypatch.setattr(tables, "plan_of", plan_of)
    monkeypatch.setattr(tables, "plan_table", lambda engine: f"the plan at {len(asked)}")
    monkeypatch.setattr(tables, "result_table", lambda engine: "the result")
    module = make(tree)
    with caplog.at_level(logging.INFO):
        fit(tree, module)
    told = [message for message in caplog.messages if message.startswith("the ")]
    assert told == ["the plan at 3", "the result"] and len(asked) == 3
