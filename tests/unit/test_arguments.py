"""What a person mistypes: sizes without a unit, names of arguments that are nearly right, packages that lack."""

from __future__ import annotations

import inspect
import logging
import math
import os
import warnings
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.choices import POLICIES, PRECISIONS
from gemini_strategy.report.verdict import sentence, verdict
from gemini_strategy.sizes import ChunkSizes, physical_memory, size_text
from helpers import scripts


def test_a_unit_may_lack_its_b() -> None:
    assert gs.parse_bytes("24G") == gs.parse_bytes("24GB") == 24 * 10**9
    assert gs.parse_bytes("1.5t") == 15 * 10**11
    assert gs.parse_bytes("24GiB") == 24 << 30
    with pytest.raises(ValueError, match="cannot read '24Gi'"):
        gs.parse_bytes("24Gi")


def test_a_fraction_may_be_text() -> None:
    """As a command line and GEMINI_DEVICE_BUDGET have it."""
    assert gs.parse_bytes("0.5", 1000, "size") == gs.parse_bytes(0.5, 1000) == 500
    with pytest.raises(ValueError, match=r'got 2.5: did you mean "2.5GB"\?'):
        gs.parse_bytes("2.5", 1000)


@pytest.mark.parametrize("size", [1 << 63, "10000000TB"])
def test_a_size_beyond_all_memory_is_refused(size: int | str) -> None:
    with pytest.raises(ValueError, match=r"device_budget=.*: expected None, a positive int"):
        gs.manage(nn.Linear(2, 2), device="cpu", device_budget=size)


@pytest.mark.parametrize("name", ["device_budget", "host_budget"])
@pytest.mark.parametrize("size", [24, "24", 24.0])
def test_a_budget_without_a_unit_is_asked_about(name: str, size: Any) -> None:
    arguments: dict[str, Any] = {name: size}
    with pytest.raises(ValueError, match=rf'manage\({name}=.* Did you mean "24GB"\?'):
        gs.manage(nn.Linear(2, 2), device="cpu", **arguments)


@pytest.mark.parametrize(
    ("n_bytes", "wanted", "there"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1052672, "1.053 MB", "1.052 MB"),
        (24 * 10**9, "24.00 GB", "24.00 GB"),
        (25769803776, "25.77 GB", "25.76 GB"),
        (157_000_001, "157.1 MB", "157.0 MB"),
    ],
)
def test_sizes_in_texts(n_bytes: int, wanted: str, there: str) -> None:
    """Whoever types what is wanted has enough. The core's texts have the same (tests/c/test_base.c)."""
    assert size_text(n_bytes, is_wanted=True) == wanted and size_text(n_bytes) == there
    if n_bytes:
        assert gs.parse_bytes(wanted) >= n_bytes >= gs.parse_bytes(there)


def test_a_host_budget_is_believed_up_to_what_the_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = physical_memory()
    assert 0 < there <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for budget, counts in ((there, there), ("900TB", there), (1.0, there), ("1GB", 10**9)):
        model = nn.Linear(2, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = gs.manage(model, device="cpu", host_budget=budget)
        assert engine._runtime.settings.host_budget == counts
        engine.close()
        texts = [str(one.message) for one in caught]
        assert texts == (
            [
                "host_budget is 900.0 TB, and this machine, or the control group of this process, has "
                f"{size_text(there)}: that counts"
            ]
            if budget == "900TB"
            else []
        )
        assert all(one.filename == __file__ for one in caught)


def test_the_cpu_has_no_index() -> None:
    """accelerate gives it one where there are several ranks."""
    model = nn.Linear(2, 2)
    engine = gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu:0")
    assert model.weight.device == torch.device("cpu")
    model.weight.square().sum().backward()
    engine.close()


def test_small_sizes_of_other_things_stay() -> None:
    assert gs.parse_bytes(512, name="chunk_size") == 512


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("device_buget", "device_budget"),
        ("placment_policy", "placement_policy"),
        ("optimiser", "optimizer"),
    ],
)
def test_an_unknown_argument_names_the_near_one(wrong: str, right: str) -> None:
    arguments: dict[str, Any] = {wrong: "24GB"}
    text = rf"manage\(\) has no argument '{wrong}'; did you mean '{right}'\?"
    with pytest.raises(TypeError, match=text):
        gs.manage(nn.Linear(2, 2), **arguments)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("budget", "'device_budget' or 'host_budget'"), ("policy", "'placement_policy'")],
)
def test_a_part_of_a_name_names_those_that_have_it(wrong: str, right: str) -> None:
    arguments: dict[str, Any] = {wrong: "24GB"}
    with pytest.raises(TypeError, match=rf"has no argument '{wrong}'; did you mean {right}\?"):
        gs.manage(nn.Linear(2, 2), **arguments)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("device", "tpu", gs.GeminiError),
        ("device", "mps", gs.GeminiError),
        ("timeout", "5m", ValueError),
        ("timeout", None, ValueError),
        ("report", "yes", ValueError),
        ("convert_inputs", "no", ValueError),
    ],
)
def test_values_of_another_kind_are_refused_by_name(name: str, value: Any, kind: type) -> None:
    arguments: dict[str, Any] = {"device": "cpu", name: value}
    with pytest.raises(kind, match=rf"{name}={value!r}.*\W(use|expected|must be) "):
        gs.manage(nn.Linear(2, 2), **arguments)


def test_calls_of_an_engine_name_what_they_were_given(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with gs.manage(model, optimizer, device="cpu") as engine:
        calls: list[tuple[str, type, Any]] = [
            (
                "max_norm=<gen.*parameters are not given",
                ValueError,
                lambda: engine.clip_grad_norm_(model.parameters(), 1.0),
            ),  # type: ignore[arg-type]
            ("max_norm=None: expected a number", ValueError, lambda: engine.clip_grad_norm_(None)),  # type: ignore[arg-type]
            ("value=-1: expected a number", ValueError, lambda: engine.clip_grad_value_(-1)),
            ("weight is not managed", gs.GeminiError, engine.full_parameter("weight").__enter__),  # type: ignore[arg-type]
            (
                "keep_last='2' must be an int",
                ValueError,
                lambda: engine.save(tmp_path / "a", keep_last="2"),
            ),  # type: ignore[call-overload]
            (
                "steps=1.5 must be an int",
                ValueError,
                lambda: engine.timeline(tmp_path / "t", steps=1.5),
            ),  # type: ignore[arg-type]
            ("is a folder", IsADirectoryError, lambda: engine.timeline(tmp_path)),
            ("has 'a.pt'", ValueError, lambda: engine.load_state_dict("a.pt")),  # type: ignore[arg-type]
            (
                "it has nothing",
                ValueError,
                lambda: engine.load_optimizer_state_dict({}),
            ),
            (
                'or text such as "24GB" or "24GiB"; cannot',
                ValueError,
                lambda: engine.save_pretrained(tmp_path, max_shard_size="x"),
            ),
        ]
        for text, kind, call in calls:
            with pytest.raises(kind, match=text):
                call()
    for function in (gs.engine_of, lambda model: gs.estimate(model, torch.ones(2))):
        with pytest.raises(TypeError, match=r"model must be a torch.nn.Module.*got str"):
            function("my-model")


def test_an_argument_like_none_gets_the_list() -> None:
    arguments: dict[str, Any] = {"xyzzy": 1}
    with pytest.raises(
        TypeError, match=r"estimate\(\) has no argument 'xyzzy'; there are model, inputs"
    ):
        gs.estimate(nn.Linear(2, 2), torch.randn(1, 2), **arguments)


def test_strategies_name_the_near_one_too() -> None:
    from gemini_strategy import lightning

    for strategy in (lightning.GeminiStrategy, lightning.GeminiFabricStrategy):
        text = rf"{strategy.__name__}\(\) has no argument 'device_buget'; did you mean 'device_budget'\?"
        with pytest.raises(TypeError, match=text):
            strategy(device_buget="24GB")


@pytest.mark.parametrize("name", ["GeminiStrategy", "GeminiFabricStrategy"])
def test_a_strategy_derived_with_arguments_of_its_own(name: str) -> None:
    from gemini_strategy import lightning

    class Mine(getattr(lightning, name)):  # type: ignore[misc]
        def __init__(self, mine: int, **given: Any) -> None:
            super().__init__(**given)
            self.mine = mine

    strategy = Mine(3, device_budget="64MiB")
    assert (strategy.mine, strategy.engine_arguments["device_budget"]) == (3, "64MiB")
    with pytest.raises(TypeError, match=rf"{name}\(\) has no argument 'device_buget'"):
        Mine(3, device_buget="64MiB")


def test_each_argument_is_documented_where_it_is_taken() -> None:
    from gemini_strategy import lightning
    from gemini_strategy.huggingface import GeminiPlugin

    doors = (gs.manage, gs.LossScaler, GeminiPlugin)
    for door in (*doors, lightning.GeminiStrategy, lightning.GeminiFabricStrategy):
        assert door.__doc__ is not None and "given:" not in door.__doc__
        for name, parameter in inspect.signature(door).parameters.items():
            assert parameter.kind is not parameter.VAR_KEYWORD
            assert door.__doc__.count(f"\n        {name}: ") == 1, (door, name)


def test_choices_are_types() -> None:
    hints = get_type_hints(gs.manage)
    assert set(get_args(hints["placement_policy"])) == set(POLICIES)
    literals, none = get_args(hints["precision"])
    assert get_args(literals) == PRECISIONS
    assert none is type(None)


def test_without_lightning_the_error_names_the_extra(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["lightning_utilities"] = None
import gemini_strategy.lightning
"""
    (tmp_path / "program.py").write_text(program)
    done = scripts.run(tmp_path, ["program.py"])
    assert done.returncode == 1
    assert "pip install 'gemini-strategy[lightning]'" in done.stderr.splitlines()[-1]


def test_without_packages_of_hugging_face_the_error_names_the_extra(
    tmp_path: Path,
) -> None:
    program = """
import sys
sys.modules["transformers"] = sys.modules["accelerate"] = None
import gemini_strategy.huggingface as hf
def tell(act):
    try:
        act()
    except ImportError as error:
        print(error)
def load():
    with hf.loading():
        pass
for act in (lambda: hf.GeminiTrainer, lambda: hf.GeminiAccelerator, load):
    tell(act)
hf.GeminiPlugin(device_budget="1MB")  # needs neither
"""
    (tmp_path / "program.py").write_text(program)
    done = scripts.run(tmp_path, ["program.py"])
    assert done.returncode == 0, done.stderr
    trainer, accelerator, loading = done.stdout.splitlines()
    way = ": pip install 'gemini-strategy[huggingface]'"
    assert trainer.startswith("gemini_strategy.huggingface.GeminiTrainer needs ")
    assert accelerator == f"gemini_strategy.huggingface.GeminiAccelerator needs accelerate{way}"
    assert loading == f"gemini_strategy.huggingface.loading() needs transformers{way}"
    assert trainer.endswith(way)


def trained(steps: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    engine = gs.manage(
        model, torch.optim.AdamW(model.parameters()), device="cpu", device_budget="1MB"
    )
    for _ in range(steps):
        engine.backward(model(torch.randn(4, 64)).square().mean())
        engine.step()
        engine.zero_grad()
    return engine


def test_one_line_says_that_training_has_begun(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gemini_strategy"):
        engine = trained(3)
    engine.close()
    lines = [record.getMessage() for record in caplog.records if record.name == "gemini_strategy"]
    assert len(lines) == 1
    for said in (
        "Sequential: 8.32 k parameters",
        'policy "auto"',
        "device budget 1 MB",
        "bound by",
    ):
        assert said in lines[0]


def test_the_report_says_what_binds() -> None:
    engine = trained(2)
    assert "what binds" in engine.report()
    engine.close()


def plan(**seconds: float) -> dict[str, float]:
    rest = dict.fromkeys(("compute", "h2d", "d2h", "host", "comm"), 0.0) | seconds
    return {f"{name}_seconds": value for name, value in rest.items()}


def test_verdicts() -> None:
    bound = plan(step=2.0, compute=1.0, h2d=0.5, host=1.9)
    assert verdict(bound).resource == "host"
    assert "Adam on the host binds, the step is 100 % longer than compute alone" in sentence(bound)
    assert "device_budget" in sentence(bound)
    assert "binds, the step takes 2,000 times as long as" in sentence(
        bound | {"compute_seconds": 1e-3}
    )
    # A copy that is longest but hidden is no reason to change anything.
    free = plan(step=1.04, compute=1.0, h2d=1.02)
    assert verdict(free).is_compute
    assert sentence(free).startswith("compute binds: more memory buys little")


@pytest.mark.parametrize(
    ("sides", "budget", "n_shards", "mib"),
    [
        ([(4096, 4096), (4096, 14336)], -1, 2, 8),  # shards of 16 and 56 MiB: nothing is lost
        ([(4096, 4096), (4096, 14336)], 8 << 30, 2, 8),
        ([(4096, 4096), (4096, 14336)], (8 << 30) - 1, 2, 4),  # too large for so small a budget
        ([(4096, 4096), (4096, 14336)], -1, 16, 2),  # of 2 and 7 MiB
        ([(4096, 4096), (4096, 14336)], -1, 1, 2),  # one process waits for nobody
        ([(5120, 2560), (5120, 10240)], -1, 2, 2),  # of 12.5 and 50 MiB: blocks of four lose 9 %
        ([(4096, 8192), (4096, 29184)], -1, 2, 4),  # of 32 and 114 MiB: 4.1 and 1.4 %
        ([(100,)], -1, 2, 2),
    ],
)
def test_blocks_are_large_where_little_is_lost_to_rounding(
    sides: list[tuple[int, ...]], budget: int, n_shards: int, mib: int
) -> None:
    sizes = ChunkSizes("80MiB", None, None, None, None)
    specs = [(math.prod(side), 2, 0) for side in sides]
    assert sizes.choose(specs, budget, True, n_shards) == (80 << 20, mib << 20)
    given = ChunkSizes("80MiB", "2MiB", None, None, None)
    assert given.choose(specs, budget, True, n_shards)[1] == 2 << 20
