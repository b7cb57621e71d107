"""The meter of steps and the tables: numbers from clocks and counters that the test sets."""

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini_strategy.report import tables
from gemini_strategy.report.tables import StepMeter, bytes_text, count_tokens
from helpers.forked import Forks

GB = 10**9

ABOUT: dict[str, Any] = {
    "model": "OPTForCausalLM",
    "parameters": 3_440_000_000,
    "trainable": 3_400_000_000,
    "device": "cuda:0",
    "precision": "bf16-mixed",
    "policy": "auto",
    "device_budget": 24 * GB,
    "host_budget": 120 * GB,
}
STATS: dict[str, Any] = {
    "steps": 1200,
    "chunks": 108,
    "weight_bytes": 7 * GB,
    "host_bytes": 41 * GB,
    "device_peak_bytes": 18 * GB,
    "total_peak_bytes": 23 * GB,
    "outside_peak_bytes": 5 * GB,
    "tokens_per_step": 16384.0,
    "tokens_per_s": 16384.0,
    "step_seconds": 1.0,
    "stall_percent": 25.0,
    "h2d_gb_s": 40.0,
    "d2h_gb_s": 20.0,
    "host_adam_seconds": 0.5,
    "host_peak_bytes": 49 * GB,
}
RATES = {
    "h2d": 55e9,
    "d2h": 54e9,
    "h2d_both": 49e9,
    "d2h_both": 48e9,
    "h2d_beside": 45e9,
    "d2h_beside": 44e9,
    "host_adam": 4.8e9,
    "host_adam_beside": 3.4e9,
    "device_adam": 145e9,
}
PLAN: dict[str, Any] = {
    "step_seconds": 0.8,
    "compute_seconds": 0.75,
    "h2d_seconds": 0.7,
    "d2h_seconds": 0.3,
    "host_seconds": 0.4,
    "bound_seconds": 0.76,
    "device_bytes": 17 * GB,
    "h2d_bytes": 32 * GB,
    "d2h_bytes": 16 * GB,
    "n_blocks": 8500,
    "classes": ["R"] * 40 + ["S2"] + ["C2"] * 67,
    "n_of_class": {"R": 40, "S1": 0, "S2": 1, "C1": 0, "C2": 67},
    "bytes_of_class": {"R": 3 * GB, "S1": 0, "S2": GB // 10, "C1": 0, "C2": 4 * GB},
    "weight_ring_bytes": GB // 2,
    "state_ring_bytes": GB // 4,
    "grad_ring_bytes": 0,
    "resident_grad_bytes": 2 * GB,
    "prefetch": 3,
    "n_ops": 1000,
    "hash": 1,
    "when": "deferred",
}


def said(about: dict[str, Any], stats: dict[str, Any], plan: dict[str, Any]) -> dict[str, str]:
    return {row[0]: row[1] for row in tables.plan_rows(about, stats, plan)}


def test_the_first_plans_times_are_called_rough() -> None:
    for name in ("a step needs", "perfect overlap", "expected step", "what binds"):
        texts = [said(ABOUT, STATS | {"plans": n}, PLAN)[name] for n in (1, 2)]
        assert texts[0].startswith("rough: ") and "rough" not in texts[1]
    assert (
        "the next plan, after two more steps"
        in said(ABOUT, STATS | {"plans": 1}, PLAN)["expected step"]
    )


def test_the_host_device_is_called_a_simulation() -> None:
    for device, is_simulated in (("cuda:0", False), ("cpu", True)):
        about = ABOUT | {"device": device}
        assert ("simulated" in said(about, STATS, PLAN)["device"]) == is_simulated
        names = [row[0] for row in tables.result_rows(about, STATS, PLAN)]
        assert ("stall, simulated" in names, "stall" in names) == (is_simulated, not is_simulated)


def test_frozen_chunks_are_not_said_to_be_updated() -> None:
    frozen = {
        "n_frozen_of_class": {"R": 40, "C2": 60},
        "frozen_bytes_of_class": {"R": 3 * GB, "C2": 3 * GB},
    }
    rows = dict(tables.class_rows(PLAN | frozen))
    assert (
        rows["class R, frozen"]
        == "40 chunks, 3 GB of weights: weights on the device, never updated"
    )
    assert rows["class C2, frozen"] == "60 chunks, 3 GB of weights: weights streamed, never updated"
    assert rows["class C2"] == "7 chunks, 1 GB of weights: weights streamed, updated on the host"
    assert "class R" not in rows


# ---- tokens ----


@pytest.mark.parametrize(
    ("inputs", "tokens"),
    [
        ((torch.zeros(4, 8, dtype=torch.long),), 32),
        (
            {"input_ids": torch.zeros(2, 5, dtype=torch.int32), "labels": torch.zeros(2, 5).long()},
            10,
        ),
        # a mask of every pair of tokens is larger than the ids
        (((), {"input_ids": torch.zeros(2, 5).long(), "mask": torch.ones(2, 5, 5).long()}), 10),
        ({"mask": torch.ones(9, 9, dtype=torch.bool), "x": torch.zeros(3).long()}, 3),
        ([torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.uint8)], 2),  # images and labels
        ((torch.zeros(4, 8),), 0),
        ((None, "text", 3, {}), 0),
        ({"batch": [{"input_ids": torch.zeros(3, 3).long()}], "n": torch.ones(100).long()}, 9),
    ],
)
def test_tokens_are_the_ids(inputs: Any, tokens: int) -> None:
    assert count_tokens(inputs) == tokens


# ---- the meter ----


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ids(n: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(1, n, dtype=torch.long)}


def counters(h2d: float, d2h: float, host: float | None = None) -> dict[str, float]:
    stats = {"fetched_bytes": h2d, "evicted_bytes": d2h}
    return stats if host is None else stats | {"host_adam_seconds": host}


def test_meter_takes_differences_from_step_to_step() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    with meter.counting(ids(5)):
        pass
    meter.step(counters(100 * GB, 50 * GB, 7.0), 0.4)  # starts the clock; its tokens are not used
    assert math.isnan(meter.figures()["step_seconds"])
    for _ in range(2):
        with meter.counting(ids(60)):
            pass
    clock.now += 0.5
    meter.step(counters(104 * GB, 51 * GB, 7.125), 0.4)
    figures = meter.figures()
    assert figures["host_peak_bytes"] > 0
    assert {key: round(value, 9) for key, value in figures.items() if key != "host_peak_bytes"} == {
        "step_seconds": 0.5,
        "tokens_per_step": 120.0,
        "tokens_per_s": 240.0,
        "stall_percent": 20.0,
        "h2d_gb_s": 8.0,
        "d2h_gb_s": 2.0,
        "host_adam_seconds": 0.125,
    }


def test_meter_shows_the_median_of_the_last_32_steps() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    meter.step(counters(0, 0))
    for n_short, median in ((15, 9.0), (16, 5.5), (17, 2.0)):
        for seconds in [9.0] * 60 + [2.0] * n_short:
            clock.now += seconds
            meter.step(counters(0, 0))
        assert meter.figures()["step_seconds"] == median


def test_meter_says_nan_for_what_it_does_not_know() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    unknown = {k for k, v in meter.figures().items() if math.isnan(v)}
    assert unknown == set(meter.figures()) - {"host_peak_bytes"}
    for h2d in (0, 5 * GB):
        clock.now += 1.0
        meter.step({"fetched_bytes": h2d})
    unknown = {k for k, v in meter.figures().items() if math.isnan(v)}
    assert unknown == {
        "tokens_per_step",
        "tokens_per_s",
        "stall_percent",
        "d2h_gb_s",
        "host_adam_seconds",
    }
    clock.now += 1.0
    meter.step({"fetched_bytes": 0}, 3.0)  # a compute time beyond the step is no negative stall
    assert meter.figures()["stall_percent"] == 0.0


def test_meter_warns_once_of_a_plan_that_is_left_again_and_again() -> None:
    def play(breaks: list[int]) -> list[str]:
        meter, n_breaks = StepMeter(Clock()), 5
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for more in breaks:
                n_breaks += more
                meter.step({"plan_breaks": n_breaks})
        return [str(each.message) for each in caught]

    assert play([0, 1, 0, 1, 0, 1] + 8 * [0] + [1, 1, 1] + 9 * [0]) == []
    for breaks in ([0, 1, 1, 1, 1], [0] + 9 * [1, 0]):
        (text,) = play(breaks)
        assert "left 4 times in the last" in text and "raise device_budget" in text


def test_tokens_count_once_per_forward_that_trains() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    meter.step(counters(0, 0))
    with meter.counting(ids(10)), meter.counting(ids(99)):  # a forward inside a training step
        pass
    with torch.no_grad(), meter.counting(ids(1000)):
        pass
    with pytest.raises(KeyboardInterrupt), meter.counting(ids(3)):
        raise KeyboardInterrupt
    with meter.counting(ids(1)):
        pass
    clock.now += 2.0
    meter.step(counters(0, 0))
    assert meter.figures()["tokens_per_step"] == 14.0
    meter.tokens_per_step = 4096
    for _ in range(2):
        clock.now += 2.0
        meter.step(counters(0, 0))
    assert meter.figures()["tokens_per_step"] == 4096.0


def hold_more() -> list[int]:
    """The peak before, with, and after a block of 64 MiB."""
    before = tables.host_peak_bytes()
    # Beside what is held now: the peak was higher while something was imported.
    block = bytearray(before - tables.host_resident_bytes() + (64 << 20))
    block[::4096] = b"\1" * len(block[::4096])
    within = tables.host_peak_bytes()
    del block
    return [before, within, tables.host_peak_bytes()]


def test_host_peak_is_what_this_process_has_held() -> None:
    """In a fork, whose peak is what it begins with: this process may have held gigabytes.

    The kernel's figures lag behind by some pages of each core.
    """
    with Forks((Path(__file__).parent,)) as forks:
        (ended,) = forks.run("test_report:hold_more")
    assert ended.value is not None, ended.how
    before, within, after = ended.value
    for peak in (within, after):
        assert before + (48 << 20) < peak < before + (96 << 20)


# ---- text ----


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (19_800_000, "19.8 MB"),
        (999_499_999, "999 MB"),
        (999_600_000, "1 GB"),
        (24 * GB, "24 GB"),
        (3.2e12, "3.2 TB"),
        (5.123e15, "5,123 TB"),
        (math.nan, "-"),
        (None, "-"),
    ],
)
def test_bytes_have_three_digits(value: float | None, text: str) -> None:
    assert bytes_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (6.76e-7, "0.676 us"),
        (0.9994e-3, "999 us"),
        (0.9996e-3, "1 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.000 s"),
        (93.5, "93.500 s"),
        (math.nan, "-"),
    ],
)
def test_seconds_have_three_digits(value: float, text: str) -> None:
    assert tables.seconds_text(value) == text


# ---- the tables ----


def rows_of(plan: dict[str, Any] | None = PLAN, **stats: Any) -> dict[str, tuple[str, ...]]:
    rows = tables.result_rows(ABOUT, STATS | stats, plan)
    assert len({row[0] for row in rows}) == len(rows) and {len(row) for row in rows} == {4}
    return {row[0]: row[1:] for row in rows}


def test_plan_table_has_all_that_the_plan_decides() -> None:
    rows = dict(tables.plan_rows(ABOUT, STATS, PLAN | {"rates": RATES}))
    assert rows["model"] == "OPTForCausalLM, 3.44 G parameters, 3.4 G trained"
    assert rows["device"] == "cuda:0, precision bf16-mixed"
    assert rows["budget"] == 'device 24 GB, host 120 GB, placement_policy "auto"'
    assert rows["schedule"].startswith("deferred")
    assert rows["class R"].startswith("40 chunks, 3 GB of weights")
    assert rows["class S2"].startswith("1 chunk, 100 MB")
    assert rows["class C2"].startswith("67 chunks, 4 GB")
    assert "class S1" not in rows and "class C1" not in rows
    assert (
        rows["rings"]
        == "weights 500 MB, states 250 MB, resident gradients 2 GB; 3 chunks fetched ahead"
    )
    assert rows["device peak"] == "17 GB in blocks + 5 GB others = 22 GB of 24 GB (92 %)"
    assert rows["host memory"] == "41 GB of 120 GB (34 %)"
    assert rows["moved in a step"] == "to the device (H2D) 32 GB, to the host (D2H) 16 GB"
    assert rows["rate H2D"] == "55 GB/s alone, 49 both ways, 45 beside CPU Adam"
    assert "4.8 G alone, 3.4 G beside copies; device 145 G" in rows["rate Adam"]
    assert rows["a step needs"] == "compute 750 ms, H2D 700 ms, D2H 300 ms, Adam on the host 400 ms"
    assert rows["perfect overlap"].startswith("760 ms")
    assert rows["expected step"] == "800 ms; stall 6.2 %"


def test_plan_table_with_everything_on_the_device() -> None:
    zero = dict.fromkeys(
        ("h2d_seconds", "d2h_seconds", "host_seconds", "h2d_bytes", "d2h_bytes", "prefetch")
        + ("weight_ring_bytes", "state_ring_bytes", "grad_ring_bytes", "resident_grad_bytes"),
        0,
    )
    plan = PLAN | zero | {"when": "immediate", "outside_bytes": 6 * GB}
    rows = dict(tables.plan_rows(ABOUT | {"device_budget": -1, "precision": None}, STATS, plan))
    assert rows["rings"] == "none" and "rate H2D" not in rows
    assert rows["device peak"] == "17 GB in blocks + 6 GB others = 23 GB, no budget given"
    assert rows["budget"].startswith("device what there is")
    assert rows["schedule"].startswith("immediate") and rows["device"].endswith("as built")


def test_plan_table_of_several_ranks() -> None:
    assert "ranks" not in dict(tables.plan_rows(ABOUT, STATS, PLAN))
    stats = STATS | {"shards": 4, "replicas": 2}
    plan = PLAN | {
        "comm_seconds": 0.12,
        "n_kept": 3,
        "kept_gathered_bytes": 2 * GB,
        "gathered_ring_bytes": GB,
        "unreduced_ring_bytes": GB // 2,
    }
    rows = dict(tables.plan_rows(ABOUT, stats, plan))
    assert (
        rows["ranks"]
        == "4 share each chunk, in each of 2 replicas; 120 ms of collectives in a step"
    )
    assert rows["whole chunks"] == (
        "3 stay gathered, 2 GB; rings: gathered 1 GB, gradients before their sum 500 MB"
    )
    free = dict(tables.plan_rows(ABOUT, stats, plan | {"comm_seconds": 0.0}))
    assert free["ranks"].endswith("collectives are taken to cost no time")


def test_plan_table_without_a_measured_step() -> None:
    unknown = dict.fromkeys(("step_seconds", "compute_seconds", "bound_seconds"), 0.0)
    rows = dict(tables.plan_rows(ABOUT, STATS, PLAN | unknown))
    assert rows["expected step"] == "-; stall -"
    assert rows_of(PLAN | unknown)["stall"] == ("-", "25.0 %", "-")


def test_plan_table_before_there_is_a_plan() -> None:
    rows = dict(tables.plan_rows(ABOUT, STATS | {"steps": 1}, None))
    assert rows["plan"] == "on demand: no plan yet"
    late = dict(tables.plan_rows(ABOUT, STATS, None))["plan"]  # the first step's end was its time
    assert late.startswith(rows["plan"]) and "raise device_budget" in late
    assert rows["chunks"] == "108, 7 GB of weights"


def test_result_table_sets_measured_beside_planned() -> None:
    rows = rows_of()
    assert rows["step"] == ("800 ms", "1.000 s", "+25.0 %")
    assert rows["of perfect overlap"] == ("1.05 x", "1.32 x", "-")
    assert rows["tokens/s"] == ("20,480", "16,384", "-20.0 %")
    assert rows["stall"] == ("6.2 %", "25.0 %", "+18.8 points")
    assert rows["H2D over the step"] == ("40 GB/s", "40 GB/s", "+0.0 %")
    assert rows["D2H over the step"] == ("20 GB/s", "20 GB/s", "+0.0 %")
    assert rows["CPU Adam in a step"] == ("400 ms", "500 ms", "+25.0 %")
    assert rows["device peak"] == ("22 GB", "23 GB", "+4.5 %")
    assert rows["host memory"] == ("41 GB", "41 GB", "+0.0 %")
    assert rows["host, whole process"] == ("-", "49 GB", "-")
    assert rows["of the device budget"] == ("-", "96 %", "-")


def test_result_table_without_a_plan_or_a_measurement() -> None:
    for row in rows_of(None).values():
        assert row[0] == row[2] == "-" and row[1] != "-"
    rows = rows_of(step_seconds=math.nan, tokens_per_step=math.nan, tokens_per_s=math.nan)
    assert rows["step"] == ("800 ms", "-", "-")
    assert (
        "of perfect overlap" not in rows and "tokens/s" not in rows
    )  # neither planned nor measured
    rows = rows_of(PLAN | {"host_seconds": 0.0}, host_adam_seconds=0.0)
    assert rows["CPU Adam in a step"] == ("0 s", "0 s", "-")  # no percent of nothing


def reasons_of(plan: dict[str, Any] | None = PLAN, **stats: Any) -> dict[str, str]:
    return dict(tables.reason_rows(ABOUT, STATS | stats, plan))


def as_planned(seconds: float) -> dict[str, float]:
    """Of a step of so many seconds that moves the planned bytes."""
    return {
        "step_seconds": seconds,
        "tokens_per_s": 16384.0 / seconds,
        "stall_percent": 100 * max(0.0, 1 - 0.75 / seconds),
        "h2d_gb_s": 32 / seconds,
        "d2h_gb_s": 16 / seconds,
        "host_adam_seconds": 0.4,
    }


def test_what_is_near_the_plan_needs_no_reason() -> None:
    assert reasons_of(**as_planned(0.8)) == reasons_of(**as_planned(0.87)) == {}
    assert reasons_of(None) == {}
    nan = dict.fromkeys(as_planned(1.0), math.nan)
    assert reasons_of(**nan) == {}
    assert reasons_of(PLAN | {"host_seconds": 0.0}, **as_planned(0.8)) == {}


def test_a_longer_step_has_its_reasons() -> None:
    found = reasons_of(**as_planned(1.0))
    assert set(found) == {"step", "tokens/s", "stall", "H2D over the step", "D2H over the step"}
    assert "what else the loop does" in found["step"]  # nothing else shows a cause
    assert "CPU" not in found["step"]
    assert found["H2D over the step"] == "the planned bytes in a longer step"
    found = reasons_of(
        **as_planned(1.0) | {"host_adam_seconds": 0.6, "h2d_gb_s": 48.0},
        plan_breaks=3,
        deviations=0,
    )
    assert found["step"] == (
        "the plan was left 3 times since the beginning, and then steps are served on demand; "
        "CPU Adam took 50 % longer; 1.5 times the planned bytes went to the device"
    )
    assert found["CPU Adam in a step"].startswith("Adam ran at 67 % of the speed")
    assert found["H2D over the step"].startswith("1.50 times the planned bytes: what the plan did")
    on_cpu = dict(tables.reason_rows(ABOUT | {"device": "cpu"}, STATS | as_planned(1.0), PLAN))
    assert "take cores from compute" in on_cpu["step"]


def test_a_host_that_did_not_update_has_a_reason() -> None:
    found = reasons_of(**as_planned(0.8) | {"host_adam_seconds": 0.0})
    assert found["CPU Adam in a step"].startswith("nothing was updated on the host")


def test_what_is_many_times_the_plan_is_no_percentage() -> None:
    """A step of a tiny model, in which Adam's arithmetic is nothing and its calls are."""
    tiny, stats = PLAN | {"host_seconds": 1e-6}, as_planned(0.8) | {"host_adam_seconds": 138e-6}
    assert rows_of(tiny, **stats)["CPU Adam in a step"] == ("1 us", "138 us", "138 x")
    assert reasons_of(tiny, **stats)["CPU Adam in a step"].startswith(
        "Adam took under 1 % of the step"
    )


def test_what_is_no_cause_is_not_named() -> None:
    """Adam that took 0.05 s more is not why a step took 1 s more, nor are copies of which none were planned."""
    found = reasons_of(**as_planned(1.8) | {"host_adam_seconds": 0.45})
    assert "what else the loop does" in found["step"] and "CPU Adam" not in found["step"]
    found = reasons_of(**as_planned(1.8) | {"host_adam_seconds": 0.6})  # a fifth of it
    assert found["step"].startswith("CPU Adam took 50 % longer; besides, it lasts from")
    still = PLAN | {"h2d_bytes": 0, "d2h_bytes": 0}
    found = reasons_of(still, **as_planned(1.0) | {"h2d_gb_s": 0.0, "d2h_gb_s": 0.0})
    assert "times the planned bytes" not in found["step"]


def test_a_shorter_step_has_its_reasons() -> None:
    assert "slower runs of the passes" in reasons_of(**as_planned(0.6))["step"]
    found = reasons_of(PLAN | {"compute_seconds": 0.5}, **as_planned(0.6) | {"d2h_gb_s": 12.0})
    assert "faster than when they were measured" in found["step"]
    assert found["D2H over the step"].startswith("0.45 times the planned bytes: what was in its")


def test_peaks_have_their_reasons() -> None:
    found = reasons_of(**as_planned(0.8), total_peak_bytes=30 * GB, predicted_host_peak_bytes=GB)
    assert set(found) == {"device peak", "host, whole process"}
    assert (
        "other processes" in found["device peak"]
        and "since manage()" in found["host, whole process"]
    )
    found = reasons_of(**as_planned(0.8), total_peak_bytes=10 * GB)
    assert found == {"device peak": "less was held at one time than the plan allows"}


def test_the_reasons_stand_below_the_result() -> None:
    result = tables.result_table(FakeEngine(PLAN, 7))
    table, why = result.split("Gemini: why more than 10 % lie between")
    assert "+25.0 %" in table and "CPU Adam took 25 % longer" in " ".join(why.split())
    assert not [line for line in result.splitlines() if len(line) > 100]


def test_tables_are_plain_aligned_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    about = ABOUT | {"model": "Model[bold]"}  # not markup
    text = tables.render("A title", None, tables.plan_rows(about, STATS, PLAN))
    assert text.startswith("A title\n") and "Model[bold]" in text and "\x1b" not in text
    assert not [line for line in text.splitlines() if len(line) > 100]
    said = " ".join(text.split())
    assert all(" ".join(row[1].split()) in said for row in tables.plan_rows(about, STATS, PLAN))
    head = ("after 3 steps", "planned", "measured", "difference")
    text = tables.render("A title", head, tables.result_rows(ABOUT, STATS, PLAN))
    lines = text.splitlines()
    assert not [line for line in lines if line != line.rstrip() or len(line) > 100]
    ends = [len(line) for line in lines if line.endswith(("difference", "+25.0 %", "points"))]
    assert len(ends) == 4 and len(set(ends)) == 1
    (step,) = (line for line in lines if line.split()[0:1] == ["step"])
    assert step.split() == ["step", "800", "ms", "1.000", "s", "+25.0", "%"]


# ---- an engine ----


class FakeCore:
    def __init__(self, plan: dict[str, Any] | None) -> None:
        self.plan = plan

    def plan_info(self) -> dict[str, Any] | None:
        return self.plan


class FakeSettings:
    policy = "cpu"
    device_budget = 24 * GB
    host_budget = -1


class FakeEngine:
    """What report/tables.py asks of an engine."""

    def __init__(self, plan: dict[str, Any] | None, steps: int) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 10))
        self.model[1].requires_grad_(False)
        self.device = torch.device("cpu")
        self.precision = None
        self.core = FakeCore(plan)
        self.settings = FakeSettings()
        self._steps = steps

    def stats(self) -> dict[str, Any]:
        return STATS | {"steps": self._steps}


def test_about_an_engine() -> None:
    assert tables.about(FakeEngine(None, 0)) == {
        "model": "Sequential",
        "parameters": 220,
        "trainable": 110,
        "device": "cpu",
        "precision": None,
        "policy": "cpu",
        "device_budget": 24 * GB,
        "host_budget": -1,
    }


@pytest.mark.parametrize("plan", [None, PLAN | {"rates": RATES}])
def test_report_has_the_result_once_there_is_one(plan: dict[str, Any] | None) -> None:
    before, after = (tables.report(FakeEngine(plan, steps)) for steps in (0, 7))
    assert "Gemini: the plan" in before and "Gemini: the result" not in before
    assert (after.startswith(before) or plan is None) and "after 7 steps" in after
    assert ("CPU 4.8 G alone" in before) == (plan is not None)  # rates, each under its own name


def test_a_table_begins_below_what_stands_in_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    print("a bar at 25 %", end="", file=sys.stderr)
    tables.show("the table")
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == "a bar at 25 %\nthe table\n"
