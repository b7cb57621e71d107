"""State dicts: torch's forms in and out, exact resume across layouts, ties, copies and strictness."""

from __future__ import annotations

import contextlib
import gc
import io
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.parameters import absent
from helpers.pairs import turns
from helpers.reference import (
    Outcome,
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    drive,
    managed,
    plain,
    start,
)
from helpers.zoo import CASES, mlp_case

CASE = mlp_case(width=32, depth=3)
BY_NAME = {case.name: case for case in CASES}
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")


def _started(recipe: Recipe, case: Any = CASE, **how: Any) -> Plain:
    return managed(case.build, recipe, **{"placement_policy": "cpu", "chunk_size": 4096, **how})


def _through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _same_state(got: Outcome, want: Outcome) -> None:
    """Equal but for the history of losses."""
    got.losses, got.norms, got.scales = want.losses, want.norms, want.scales
    got.skipped = want.skipped
    assert_same_outcome(got, want)


# ---- the model's ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "tied_weights",
        "batch_norm",
        "rope_buffers",
        "lora",
        "odd_sizes",
        "shared_module_under_two_names",
        "parameter_list_and_dict",
    ],
)
def test_model_state_dict(name: str) -> None:
    """Keys, order, shapes, buffers and bits as the unmanaged model's."""
    case = BY_NAME[name]
    precision = "bf16-true" if "bf16-true" in case.precisions else "32-true"
    recipe = Recipe(precision=precision)
    reference, run = plain(case.build, recipe), _started(recipe, case)
    try:
        for which in (run, reference):
            drive(which, case, 2)
        want = reference.outcome()
        for masters in (True, False):
            got = run.engine.model_state_dict(masters=masters)
            assert list(got) == list(run.model.state_dict()) == list(want.weights)
            for key, value in want.weights.items():
                expected = want.masters.get(key, value) if masters else value
                if key in want.masters or not masters:
                    assert_same_bits(got[key], expected, key)
                assert got[key].device.type == "cpu" and not got[key].requires_grad
    finally:
        run.engine.close()


def test_what_is_frozen_keeps_the_values_that_it_came_in() -> None:
    recipe = Recipe(precision="bf16-true")
    run = _started(recipe, BY_NAME["lora"])
    state = run.engine.model_state_dict(masters=True)
    assert (
        run.engine.model_state_dict(masters=False)["layers.0.base.weight"].dtype is torch.bfloat16
    )
    run.engine.close()
    came = start(BY_NAME["lora"].build, recipe, "cpu").state_dict()
    assert_same_bits(state["layers.0.base.weight"], came["layers.0.base.weight"])
    assert state["layers.0.up.weight"].dtype == torch.float32
    assert_same_bits(run.model.state_dict()["layers.0.base.weight"], came["layers.0.base.weight"])


def test_tied_keys_share_one_tensor() -> None:
    run = _started(Recipe(), BY_NAME["tied_weights"])
    state = run.engine.model_state_dict()
    run.engine.close()
    assert state["out.weight"].data_ptr() == state["embed.weight"].data_ptr()


def test_state_dicts_of_the_engine_are_copies() -> None:
    run = _started(Recipe())
    drive(run, CASE, 1)
    before = run.outcome()
    for value in run.engine.model_state_dict().values():
        value.zero_()
    for entry in run.engine.optimizer_state_dict()["state"].values():
        entry["exp_avg"].fill_(9.0)
        entry["step"].fill_(77.0)
    for value in run.engine.state_dict().values():
        if isinstance(value, dict):
            for inner in value.values():
                if isinstance(inner, torch.Tensor):
                    inner.fill_(1)
    assert_same_outcome(run.outcome(), before)
    drive(run, CASE, 1, first=1)
    reference = plain(CASE.build, Recipe())
    drive(reference, CASE, 2)
    assert_same_outcome(run.outcome(), reference.outcome())
    run.engine.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_model_state_round_trip(precision: str) -> None:
    """fp32 masters out, into a differently laid out engine: equal masters and weights."""
    recipe = Recipe(precision=precision)
    one = _started(recipe)
    drive(one, CASE, 3)
    state = _through_file(one.engine.model_state_dict())
    two = _started(Recipe(precision=precision, seed=99), chunk_size=30_000, placement_policy="cuda")
    keys = two.engine.load_model_state_dict(state)
    assert not keys.missing_keys and not keys.unexpected_keys
    a, b = one.outcome(), two.outcome()
    for name in a.masters:
        assert_same_bits(b.masters[name], a.masters[name], name)
    for name in a.weights:
        assert_same_bits(b.weights[name], a.weights[name], name)
    one.engine.close()
    two.engine.close()


def test_plain_state_dict_loads_and_is_loadable() -> None:
    """An fp32 checkpoint of the unmanaged model goes in, and what comes out goes into it."""
    recipe = Recipe(precision="bf16-true")
    torch.manual_seed(5)
    other = CASE.build()
    run = _started(recipe)
    run.engine.load_model_state_dict(other.state_dict())
    masters = run.engine.model_state_dict()
    for name, value in other.state_dict().items():
        assert_same_bits(masters[name], value, name)
    drive(run, CASE, 2)
    fresh = CASE.build()
    fresh.load_state_dict(run.engine.model_state_dict())
    assert_same_bits(fresh.head.weight.detach(), run.outcome().masters["head.weight"])
    run.engine.close()


def test_strictness() -> None:
    run = _started(Recipe())
    drive(run, CASE, 1)
    before = run.outcome()
    state = run.engine.model_state_dict()
    missing = {k: v for k, v in state.items() if k != "head.bias"}
    extra = {**state, "tail.weight": torch.ones(2)}
    wrong = {**state, "head.weight": torch.ones(3, 3)}
    with pytest.raises((RuntimeError, KeyError), match=r"head\.bias"):
        run.engine.load_model_state_dict(missing)
    with pytest.raises((RuntimeError, KeyError), match=r"tail\.weight"):
        run.engine.load_model_state_dict(extra)
    with pytest.raises((RuntimeError, ValueError), match=r"head\.weight"):
        run.engine.load_model_state_dict(wrong)
    assert_same_outcome(run.outcome(), before)
    keys = run.engine.load_model_state_dict({**missing, "tail.weight": torch.ones(2)}, strict=False)
    assert list(keys.missing_keys) == ["head.bias"]
    assert list(keys.unexpected_keys) == ["tail.weight"]
    run.engine.close()


# ---- the optimizer's --------------------------------------------------------------------------------------


def test_optimizer_state_has_torchs_form() -> None:
    recipe = Recipe(precision="bf16-true")
    run = _started(recipe)
    theirs = torch.optim.AdamW(CASE.build().parameters())
    for p in theirs.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    theirs.step()
    want = theirs.state_dict()
    drive(run, CASE, 2)
    for got in (run.optimizer.state_dict(), run.engine.optimizer_state_dict()):
        assert set(got) >= {"state", "param_groups"}
        assert list(got["state"]) == list(want["state"])
        for index, entry in want["state"].items():
            mine = got["state"][index]
            assert set(mine) >= set(entry)
            for key in entry:
                assert mine[key].shape == entry[key].shape, key
                assert mine[key].dtype == torch.float32 and mine[key].device.type == "cpu"
            assert mine["step"].item() == 2
        assert got["param_groups"][0]["params"] == want["param_groups"][0]["params"]
    run.engine.close()


def test_torch_adamw_takes_our_state_and_back() -> None:
    """Managed -> torch.optim.AdamW on a plain model -> managed, all keeping moments and steps."""
    recipe = Recipe(lr=1e-3, weight_decay=0.01)
    run = _started(recipe)
    drive(run, CASE, 3)
    model = CASE.build()
    model.load_state_dict(run.engine.model_state_dict())
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    theirs.load_state_dict(_through_file(run.engine.optimizer_state_dict()))
    outcome = run.outcome()
    for i, p in enumerate(model.parameters()):
        assert_same_bits(theirs.state[p]["exp_avg"], outcome.exp_avg[i])
        assert_same_bits(theirs.state[p]["exp_avg_sq"], outcome.exp_avg_sq[i])
        assert theirs.state[p]["step"].item() == 3
    again = _started(Recipe(lr=7.0, seed=3), chunk_size=30_000)
    again.engine.load_model_state_dict(model.state_dict())
    again.engine.load_optimizer_state_dict(_through_file(theirs.state_dict()))
    assert again.optimizer.param_groups[0]["lr"] == 1e-3
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.01
    for which in (run, again):
        which.losses.clear()
        drive(which, CASE, 3, first=3)
    assert_same_outcome(again.outcome(), run.outcome())
    run.engine.close()
    again.engine.close()


def test_plain_hybrid_adam_state_loads() -> None:
    """The unmanaged reference's optimizer state moves into an engine, bf16 included."""
    recipe = Recipe(precision="bf16-true")
    reference = plain(CASE.build, recipe)
    drive(reference, CASE, 3)
    run = _started(Recipe(precision="bf16-true", seed=55))
    run.engine.load_model_state_dict(reference.outcome().masters, strict=False)
    run.optimizer.load_state_dict(_through_file(reference.optimizer.state_dict()))
    _same_state(run.outcome(), reference.outcome())
    run.losses = list(reference.losses)
    for which in (run, reference):
        drive(which, CASE, 3, first=3)
    assert_same_outcome(run.outcome(), reference.outcome())
    run.engine.close()


def test_empty_state_resets() -> None:
    recipe = Recipe(precision="bf16-true")
    run = _started(recipe)
    drive(run, CASE, 3)
    state = run.engine.optimizer_state_dict()
    run.engine.load_optimizer_state_dict({**state, "state": {}})
    outcome = run.outcome()
    assert outcome.counts == {}
    fresh = _started(recipe)
    fresh.engine.load_model_state_dict(outcome.masters, strict=False)
    for which in (run, fresh):
        which.losses.clear()
        drive(which, CASE, 2)
    assert_same_outcome(run.outcome(), fresh.outcome())
    run.engine.close()
    fresh.engine.close()


def test_optimizer_state_that_does_not_fit_is_refused_whole() -> None:
    run = _started(Recipe())
    drive(run, CASE, 2)
    before = run.outcome()
    state = run.engine.optimizer_state_dict()
    short = {
        "state": state["state"],
        "param_groups": [{**state["param_groups"][0], "params": [0, 1]}],
    }
    with pytest.raises((ValueError, gs.GeminiError)):
        run.engine.load_optimizer_state_dict(short)
    wrong = _through_file(state)
    last = max(wrong["state"])
    wrong["state"][last]["exp_avg"] = torch.ones(5, 5)
    with pytest.raises((ValueError, gs.GeminiError), match=r"head\.bias|shape"):
        run.engine.load_optimizer_state_dict(wrong)
    assert_same_outcome(run.outcome(), before)
    run.engine.close()


def test_groups_are_restored() -> None:
    def groups(model: nn.Module) -> list[dict]:
        return [
            {"params": list(model.blocks.parameters()), "lr": 1e-3, "weight_decay": 0.1},
            {"params": [*model.head.parameters(), *model.stem.parameters()], "betas": (0.8, 0.9)},
        ]

    recipe = Recipe(groups=groups)
    one = _started(recipe)
    drive(one, CASE, 2)
    one.optimizer.param_groups[0]["lr"] = 0.125
    two = _started(recipe)
    two.optimizer.load_state_dict(_through_file(one.optimizer.state_dict()))
    for a, b in zip(one.optimizer.param_groups, two.optimizer.param_groups, strict=True):
        for key in ("lr", "betas", "eps", "weight_decay"):
            assert a[key] == b[key], key
        assert all(type(p).__name__ and p.shape is not None for p in b["params"])
    one.engine.close()
    two.engine.close()


# ---- exact resume --------------------------------------------------------------------------------------


@turns(
    precision=PRECISIONS,
    save_how=[{"placement_policy": policy} for policy in ("cpu", "auto", "cuda")],
    load_how=[
        {"placement_policy": "cuda", "chunk_size": 30_000},
        {"placement_policy": "cpu"},
        {"placement_policy": "auto", "chunk_size": 9_000},
    ],
)
def test_resume_is_exact(precision: str, save_how: dict, load_how: dict) -> None:
    recipe = Recipe(
        precision=precision, clip=0.5, initial_scale=2.0**21, growth_interval=3, hysteresis=2
    )
    run = _started(recipe, **save_how)
    drive(run, CASE, 5)
    state = _through_file(run.engine.state_dict())
    middle = run.outcome()
    drive(run, CASE, 5, first=5)
    resumed = _started(Recipe(**{**recipe.__dict__, "seed": 1234}), **load_how)
    resumed.engine.load_state_dict(state)
    _same_state(resumed.outcome(), middle)
    resumed.losses, resumed.norms = list(middle.losses), list(middle.norms)
    resumed.scales, resumed.skipped = list(middle.scales), middle.skipped
    drive(resumed, CASE, 5, first=5)
    assert_same_outcome(resumed.outcome(), run.outcome())
    run.engine.close()
    resumed.engine.close()


def test_load_then_save_is_identical() -> None:
    recipe = Recipe(precision="bf16-true")
    one, two = _started(recipe), _started(Recipe(precision="bf16-true", seed=2))
    drive(one, CASE, 3)
    two.engine.load_state_dict(one.engine.state_dict())

    def compare(a: Any, b: Any, path: str) -> None:
        assert type(a) is type(b), path
        if isinstance(a, torch.Tensor):
            assert_same_bits(a, b, path)
        elif isinstance(a, dict):
            assert list(a) == list(b), path
            for key in a:
                compare(a[key], b[key], f"{path}.{key}")
        elif isinstance(a, (list, tuple)):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                compare(x, y, f"{path}.{i}")
        else:
            assert a == b, path

    compare(two.engine.state_dict(), one.engine.state_dict(), "state")
    one.engine.close()
    two.engine.close()


def test_state_before_the_first_step() -> None:
    recipe = Recipe(precision="bf16-mixed")
    reference = plain(CASE.build, recipe)
    one, two = _started(recipe), _started(Recipe(precision="bf16-mixed", seed=2))
    two.engine.load_state_dict(_through_file(one.engine.state_dict()))
    for which in (two, reference):
        drive(which, CASE, 3)
    assert_same_outcome(two.outcome(), reference.outcome())
    one.engine.close()
    two.engine.close()


def test_resume_of_another_model_is_refused() -> None:
    run = _started(Recipe())
    other = _started(Recipe(), mlp_case(width=16, depth=2))
    with pytest.raises((gs.GeminiError, ValueError, KeyError, RuntimeError)) as error:
        run.engine.load_state_dict(other.engine.state_dict())
    assert "weight" in str(error.value) or "bias" in str(error.value)
    drive(run, CASE, 2)
    reference = plain(CASE.build, Recipe())
    drive(reference, CASE, 2)
    assert_same_outcome(run.outcome(), reference.outcome())
    run.engine.close()
    other.engine.close()


def test_a_state_without_a_model_says_what_is_missing() -> None:
    run = _started(Recipe(precision="bf16-true"))
    before = run.engine.state_dict()
    with pytest.raises(ValueError, match="'model' is missing, the state has nothing"):
        run.engine.load_state_dict({})
    with pytest.raises(ValueError, match="'model' is missing, the state has 'optimizer'"):
        run.engine.load_state_dict({"optimizer": before["optimizer"]})
    with pytest.raises(ValueError, match="engine.load_model_state_dict"):
        run.engine.load_state_dict(run.model.state_dict())
    after = run.engine.state_dict()["model"]
    for name, value in before["model"].items():
        assert_same_bits(after[name], value, name)


def test_unmanaged_start_is_the_recipes() -> None:
    """Guards the tests above: seeds make different models."""
    a, b = start(CASE.build, Recipe()), start(CASE.build, Recipe(seed=99))
    assert not torch.equal(a.head.weight, b.head.weight)


def test_state_dicts_that_are_dropped_are_let_go() -> None:
    """Their memory is as large as the model: it goes with the next step, and not before whoever has a part of it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with contextlib.closing(gs.manage(model, optimizer, device="cpu")) as engine:

        def step() -> None:
            engine.backward(model(torch.ones(2, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        step()
        gc.collect()
        absent.sweep()
        before = len(absent._heavy)
        states = [model.state_dict(), optimizer.state_dict()]
        row = states[0]["0.weight"][1]
        assert len(absent._heavy) == before + 4 + 8
        del states
        gc.collect()
        step()
        assert len(absent._heavy) == before + 1
        assert torch.equal(row.clone(), model[0].weight[1].detach().clone())
        del row
        step()
        assert len(absent._heavy) == before


def test_fields_are_read_on_the_host_whatever_the_default_device_is(tmp_path: Any) -> None:
    """A tensor without memory, or on a GPU, was given to the core as its own address on the host."""
    run, twin = (_started(Recipe()) for _ in range(2))
    for each in (run, twin):
        drive(each, CASE, 2)
        each.backward(CASE.loss(each, CASE.batch(2)))
    with torch.device("meta"):
        states = run.optimizer.state_dict(), run.engine.state_dict(), dict(run.model.state_dict())
        run.engine.save(tmp_path / "saved")
        run.engine.load(tmp_path / "saved")
        pickled = _through_file(run.model.head.weight)
        run.engine.close()
    assert states[0]["state"][0]["exp_avg"].device == pickled.device == torch.device("cpu")
    twin.engine.close()
    for a, b in zip(run.model.parameters(), twin.model.parameters(), strict=True):
        assert_same_bits(a, b)
        assert_same_bits(a.grad, b.grad)


def test_the_time_of_a_state_dict_is_linear_in_its_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who still has an entry is not asked of all before for each one: 5,000 parameters took ten seconds."""
    model = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(400))
    with contextlib.closing(gs.manage(model, device="cpu")):
        asked: list[int] = []
        drop = absent._drop
        monkeypatch.setattr(absent, "_drop", lambda a: (asked.append(len(a)), drop(a)))
        states = [model.state_dict(), model.state_dict()]
        del states
        assert len(model.state_dict()) == 400
        assert sum(asked) < 400 * 60  # quadratic: 400 * 1000 and more
