"""`optimizer.state` of a managed optimizer: what a program does to it is what the engine steps with.

Also who counts: parameters that leave their group and come back, and new groups.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gemini_strategy as gs
from gemini_strategy.parameters import stand_in
from helpers.ranks import run_ranks, values
from helpers.reference import (
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    drive,
    managed,
    plain,
)
from helpers.sharded import Exact, ExactCase
from helpers.zoo import mlp_case

CASE = mlp_case(width=32, depth=3)
KEYS = ["step", "exp_avg", "exp_avg_sq"]


def _both(recipe: Recipe | None = None) -> tuple[Plain, Plain]:
    recipe = recipe or Recipe()
    run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=4096)
    return run, plain(CASE.build, recipe)


def _weight(run: Plain) -> nn.Parameter:
    return run.model.head.weight


def _moved(run: Plain) -> Tensor:
    """Something of a parameter's shape."""
    return torch.arange(_weight(run).numel()).reshape(_weight(run).shape) / 1e4


# ---- programs ----------------------------------------------------------------------------------------


def _clear(run: Plain) -> None:
    run.optimizer.state.clear()


def _assign_nothing(run: Plain) -> None:
    run.optimizer.state = defaultdict(dict)


def _assign_copy(run: Plain) -> None:
    kept = {p: copy.deepcopy(dict(e)) for p, e in run.optimizer.state.items()}
    del kept[_weight(run)]
    run.optimizer.state = defaultdict(dict, kept)


def _assign_itself(run: Plain) -> None:
    run.optimizer.state = run.optimizer.state


def _pop(run: Plain) -> None:
    run.optimizer.state.pop(_weight(run))
    run.optimizer.state.pop("no such key", None)


def _pop_and_put_back(run: Plain) -> None:
    entry = run.optimizer.state.pop(_weight(run))
    entry["exp_avg"] *= 2
    run.optimizer.state[_weight(run)] = entry


def _pop_all(run: Plain) -> None:
    while run.optimizer.state:
        run.optimizer.state.popitem()


def _delete(run: Plain) -> None:
    del run.optimizer.state[_weight(run)]


def _clear_one(run: Plain) -> None:
    run.optimizer.state[_weight(run)].clear()


def _empty_one(run: Plain) -> None:
    run.optimizer.state[_weight(run)] = {}


def _set_entry(run: Plain) -> None:
    moments = {"exp_avg": _moved(run), "exp_avg_sq": _moved(run).square()}
    run.optimizer.state[_weight(run)] = {"step": torch.tensor(3.0), **moments}


def _set_entry_piece_by_piece(run: Plain) -> None:
    entry = run.optimizer.state[_weight(run)]
    entry.clear()
    entry["step"] = torch.tensor(3.0)
    entry["exp_avg"] = _moved(run)
    entry.update(exp_avg_sq=_moved(run).square())


def _swap(run: Plain) -> None:
    state = run.optimizer.state
    a, b = run.model.blocks[0][1].weight, run.model.blocks[1][1].weight
    assert a.shape == b.shape
    state[a], state[b] = dict(state[b]), copy.deepcopy(dict(state[a]))


def _zero(run: Plain) -> None:
    for entry in run.optimizer.state.values():
        entry["exp_avg"].zero_()


def _zero_everything(run: Plain) -> None:
    for entry in run.optimizer.state.values():
        for value in entry.values():
            value.zero_()


def _scale(run: Plain) -> None:
    run.optimizer.state[_weight(run)]["exp_avg"].mul_(0.5)
    run.optimizer.state[_weight(run)]["exp_avg_sq"] *= 4


def _write_parts(run: Plain) -> None:
    moment = run.optimizer.state[_weight(run)]["exp_avg"]
    moment[...] = _moved(run)
    moment[0] = 0
    moment[1:, 2].fill_(0.25)
    moment.view(-1)[-1] += 1


def _steps(run: Plain) -> None:
    run.optimizer.state[_weight(run)]["step"] = torch.tensor(5.0)
    run.optimizer.state[run.model.head.bias]["step"].fill_(9)
    run.optimizer.state[run.model.stem.weight]["step"] += 2


def _move_to_device(run: Plain) -> None:
    for entry in run.optimizer.state.values():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                entry[key] = value.to("cpu")


def _average_moments(run: Plain) -> None:
    state = run.optimizer.state
    whole = [e["exp_avg"] for e in state.values() if e["exp_avg"].dim() == 2]
    mean = sum(m.mean() for m in whole) / len(whole)
    for m in whole:
        m.lerp_(mean.expand_as(m), 0.5)


def _beside(run: Plain) -> None:
    run.optimizer.state[_weight(run)]["ema"] = _moved(run)
    run.optimizer.state["of all"] = {"n": 3}


def _old_torch_step(run: Plain) -> None:
    run.optimizer.state[_weight(run)]["step"].copy_(torch.tensor(2.0))


PROGRAMS = [
    _clear,
    _assign_nothing,
    _assign_copy,
    _assign_itself,
    _pop,
    _pop_and_put_back,
    _pop_all,
    _delete,
    _clear_one,
    _empty_one,
    _set_entry,
    _set_entry_piece_by_piece,
    _swap,
    _zero,
    _zero_everything,
    _scale,
    _write_parts,
    _steps,
    _move_to_device,
    _average_moments,
    _beside,
    _old_torch_step,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__.strip("_"))
def test_what_a_program_does_to_the_state(program: Callable[[Plain], None]) -> None:
    run, want = _both()
    for each in (run, want):
        drive(each, CASE, 3)
        program(each)
        drive(each, CASE, 3, first=3)
    got, expected = ([k for k in e.optimizer.state if isinstance(k, str)] for e in (run, want))
    assert got == expected
    extra = [e.optimizer.state[_weight(e)].get("ema") for e in (run, want)]
    assert (extra[0] is None) == (extra[1] is None)
    run.optimizer.state.pop("of all", None)
    want.optimizer.state.pop("of all", None)
    assert_same_outcome(run.outcome(), want.outcome())
    run.engine.close()
    drive(want, CASE, 1, first=6)
    rest = Plain(run.model, run.optimizer, run.recipe)
    rest.losses = run.losses
    drive(rest, CASE, 1, first=6)
    assert_same_outcome(rest.outcome(), want.outcome())


@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed"])
@pytest.mark.parametrize(
    "program", [_zero_everything, _scale, _assign_copy, _swap, _move_to_device]
)
def test_with_what_16_bit_weights_lack(program: Callable[[Plain], None], precision: str) -> None:
    """It is in the state as in HybridAdam's; no write to it changes a weight."""
    run, want = _both(Recipe(precision=precision))
    for each in (run, want):
        drive(each, CASE, 3)
        before = {n: p.detach().clone() for n, p in each.model.named_parameters()}
        keys = list(each.optimizer.state[_weight(each)])
        assert keys == [*KEYS, "remainder" if precision == "bf16-true" else "master"]
        program(each)
        for name, p in each.model.named_parameters():
            assert_same_bits(p.detach().clone(), before[name], name)
        if program is not _assign_copy:  # alone, HybridAdam forgets what the weight lacks, too
            drive(each, CASE, 3, first=3)
    if program is not _assign_copy:
        assert_same_outcome(run.outcome(), want.outcome())
    run.engine.close()


# ---- what is shown -------------------------------------------------------------------------------


def test_what_is_shown() -> None:
    """The same keys and values at the same times, from the first update on."""
    run, want = _both()
    for step in range(3):
        for each in (run, want):
            state = each.optimizer.state
            assert bool(state) == (step > 0) and len(state) == (22 if step else 0)
            assert (_weight(each) in state) == (step > 0)
            assert state.get(_weight(each), 5) == 5 or step
        for ours, theirs in zip(
            run.optimizer.state.items(), want.optimizer.state.items(), strict=True
        ):
            assert list(ours[1]) == list(theirs[1]) == KEYS
            assert {**ours[1]}.keys() == dict(ours[1]).keys() == set(KEYS)
            assert isinstance(ours[1], dict) and len(ours[1]) == 3 and "step" in ours[1]
            for key, value in theirs[1].items():
                assert ours[1][key].shape == value.shape and ours[1][key].dtype is value.dtype
                assert_same_bits(ours[1][key].clone(), value, key)
        for each in (run, want):
            drive(each, CASE, 1, first=step)
    entry = run.optimizer.state[_weight(run)]
    assert entry is run.optimizer.state[_weight(run)]
    moment, step = entry["exp_avg"], entry["step"]
    assert moment is entry["exp_avg"] and step is entry["step"]
    drive(run, CASE, 1, first=3)
    drive(want, CASE, 1, first=3)
    assert_same_bits(moment.clone(), want.optimizer.state[_weight(want)]["exp_avg"])
    assert int(step) == 4
    assert isinstance(run.optimizer.state, defaultdict)
    assert dict(run.optimizer.state).keys() == {*run.optimizer.state}
    run.engine.close()
    with pytest.raises(gs.GeminiError, match=r"head\.weight: exp_avg: it was dropped.*clone"):
        moment.sum()


def test_an_entry_that_was_looked_at_is_no_state() -> None:
    run, want = _both()
    for each in (run, want):
        assert each.optimizer.state[_weight(each)] == {} and len(each.optimizer.state) == 1
        drive(each, CASE, 2)
    assert_same_outcome(run.outcome(), want.outcome())
    run.engine.close()


def test_copies_are_ordinary() -> None:
    run, _ = _both()
    drive(run, CASE, 2)
    want = copy.deepcopy(run.optimizer.state_dict()["state"])
    file = io.BytesIO()
    torch.save({"state": list(run.optimizer.state.values())}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)["state"]
    copies = [copy.deepcopy(entry) for entry in run.optimizer.state.values()]
    for some in (saved, copies):
        for index, entry in enumerate(some):
            assert type(entry) is dict
            for key in KEYS:
                assert type(entry[key]) is Tensor
                assert_same_bits(entry[key], want[index][key])
    copies[0]["exp_avg"].zero_()
    assert_same_bits(run.optimizer.state_dict()["state"][0]["exp_avg"], want[0]["exp_avg"])
    run.engine.close()


def test_torch_s_own_way_of_loading() -> None:
    """Optimizer.load_state_dict assigns the state through __setstate__."""
    run, want = _both()
    for each in (run, want):
        drive(each, CASE, 2)
        saved = copy.deepcopy(each.optimizer.state_dict())
        drive(each, CASE, 2, first=2)
        torch.optim.Optimizer.load_state_dict(each.optimizer, saved)
        drive(each, CASE, 2, first=4)
    assert_same_outcome(run.outcome(), want.outcome())
    run.engine.close()


def test_what_cannot_be_a_state_is_refused_by_name() -> None:
    run, want = _both()
    drive(run, CASE, 2)
    drive(want, CASE, 2)
    state, p = run.optimizer.state, _weight(run)
    good = {key: value.clone() for key, value in state[p].items()}
    for bad, kind, text in (
        ({**good, "exp_avg": torch.zeros(3)}, ValueError, r"head\.weight: exp_avg.*shape \(3,\)"),
        ({"step": torch.tensor(1.0)}, ValueError, r"head\.weight: .*lacks exp_avg and exp_avg_sq"),
        ({**good, "step": torch.tensor(1.5)}, ValueError, r"head\.weight: .*step 1\.5"),
        ({**good, "exp_avg_sq": 3}, TypeError, r"head\.weight: exp_avg_sq"),
        ([1], TypeError, r"head\.weight"),
    ):
        with pytest.raises(kind, match=text):
            state[p] = bad
        with pytest.raises(kind, match=text):
            run.optimizer.state = {p: bad}
    with pytest.raises(gs.GeminiError, match=r"head\.weight: step, exp_avg and exp_avg_sq"):
        del state[p]["exp_avg"]
    a, b = run.model.blocks[0][1].weight, run.model.blocks[1][1].weight
    with pytest.raises(gs.GeminiError, match=r"blocks\.0\.1\.weight: .*dict of blocks\.1\.1"):
        state[a], state[b] = state[b], state[a]
    with pytest.raises(TypeError, match=r"optimizer\.state"):
        run.optimizer.state = 3
    for each in (run, want):
        drive(each, CASE, 2, first=2)
    assert_same_outcome(run.outcome(), want.outcome())
    run.engine.close()


def test_a_tensor_of_the_state_keeps_no_engine() -> None:
    run, _ = _both()
    drive(run, CASE, 1)
    moment = run.optimizer.state[_weight(run)]["exp_avg"]
    gone = weakref.ref(run.engine)
    del run
    gc.collect()
    assert gone() is None
    with pytest.raises(gs.GeminiError, match="model that it was a part of is gone"):
        moment.sum()


# ---- who counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.5])
def test_parameters_that_leave_their_group_and_come_back(clip: float | None) -> None:
    """They are neither measured nor stepped meanwhile; their states wait for them."""
    run, want = _both(Recipe(clip=clip))
    for each in (run, want):
        params = each.optimizer.param_groups[0]["params"]
        drive(each, CASE, 2)
        out = [params.pop(5), params.pop(0)]
        drive(each, CASE, 2, first=2)
        params[:] = [out[1], *params[:4], out[0], *params[4:]]
        drive(each, CASE, 2, first=4)
        out = params.pop(3)
        each.optimizer.add_param_group({"params": [out], "lr": 0.01})
        drive(each, CASE, 2, first=6)
    assert_same_outcome(run.outcome(), want.outcome())
    run.engine.close()
    assert [len(g["params"]) for g in run.optimizer.param_groups] == [21, 1]


def check_groups_of_ranks(rank: int, size: int) -> None:
    model = Exact()
    engine = gs.manage(
        model, gs.HybridAdam(model.parameters(), lr=1e-2), device="cpu", timeout=90.0
    )
    case, params = ExactCase(rank, size), engine.optimizer.param_groups[0]["params"]
    out = params.pop(1)
    for step in range(2):  # all without it, then all with it
        engine.backward(case.loss(model, case.batch(step)))
        assert torch.isfinite(engine.clip_grad_norm_(1.0))
        engine.step()
        assert (out in engine.optimizer.state) == (step > 0)
        engine.zero_grad()
        params.insert(1, out) if step == 0 else None
    assert int(engine.optimizer.state[out]["step"]) == 1
    engine.optimizer.state[out]["exp_avg"].zero_()
    assert not engine.optimizer.state_dict()["state"][1]["exp_avg"].any()
    engine.backward(case.loss(model, case.batch(3)))
    if rank == 1:
        params.pop(1)
    for act in (engine.grad_norm, engine.step):
        with pytest.raises(
            gs.GeminiError, match=r"terms\.1\.p is in no param group on rank 1, but in one"
        ):
            act()
    if rank == 1:
        params.insert(1, out)
    engine.step()
    engine.zero_grad()
    engine.close(with_states=True)
    assert int(engine.optimizer.state[out]["step"]) == 2


def test_groups_of_ranks(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_groups_of_ranks))


def test_the_norm_follows_the_groups_between_two_questions() -> None:
    run, want = _both()
    norms: dict[int, list[float]] = {0: [], 1: []}
    for i, each in enumerate((run, want)):
        torch.manual_seed(1)
        each.backward(CASE.loss(each, CASE.batch(0)))
        params = each.optimizer.param_groups[0]["params"]
        whole = list(params)
        for n in (22, 3, 22, 0):
            params[:] = whole[:n]
            norms[i].append(float(each.optimizer.clip_grad_norm_(1e9)))
    assert norms[0] == norms[1] and norms[0][1] < norms[0][0] == norms[0][2] and not norms[0][3]
    run.engine.close()


def test_states_of_parameters_that_left_are_given_back() -> None:
    run, want = _both()
    for each in (run, want):
        drive(each, CASE, 2)
        out = each.optimizer.param_groups[0]["params"].pop(2)
        if each is run:
            each.engine.close()
        assert set(each.optimizer.state) == {*each.model.parameters()}
        each.optimizer.param_groups[0]["params"].insert(2, out)
    rest = Plain(run.model, run.optimizer, run.recipe)
    rest.losses = run.losses
    drive(rest, CASE, 2, first=2)
    drive(want, CASE, 2, first=2)
    assert_same_outcome(rest.outcome(), want.outcome())


def test_groups_that_cannot_be_added_are_refused_by_name() -> None:
    model = CASE.build()
    model.head.bias.requires_grad_(False)
    grouped = [p for n, p in model.named_parameters() if not n.startswith("stem")]
    optimizer = torch.optim.AdamW(grouped)
    engine = gs.manage(model, optimizer, device="cpu")
    for params, text in (
        (model.stem.weight, r"add_param_group.*stem\.weight was in no param group"),
        ([("stem.bias", model.stem.bias)], r"stem\.bias was in no param group"),
        ([nn.Parameter(torch.ones(2))], r"shape \(2,\) is not the model's"),
    ):
        with pytest.raises(gs.GeminiError, match=text):
            optimizer.add_param_group({"params": params})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model.head.weight]})
    optimizer.param_groups[0]["params"].append(model.stem.weight)
    CASE.loss(model, CASE.batch(0)).backward()
    with pytest.raises(gs.GeminiError, match=r"stem\.weight was in no param group"):
        optimizer.step()
    optimizer.param_groups[0]["params"].pop()
    optimizer.step()
    engine.close()


def test_no_two_optimizers_have_one_name() -> None:
    """Whoever looks them up by module and name (jsonargparse, for a command line) finds one of each."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(model, optimizer, device="cpu")
    assert isinstance(optimizer, torch.optim.AdamW) and type(optimizer).__name__ == "AdamW"
    found, kinds = [], [torch.optim.Optimizer]
    while kinds:
        kind = kinds.pop()
        kinds += type.__subclasses__(kind)
        path = f"{kind.__module__}.{kind.__qualname__}"
        if "._" not in path and kind.__module__.startswith(("torch.optim", "gemini_strategy")):
            found.append(path.rpartition(".")[2])
    assert found.count("AdamW") == found.count("HybridAdam") == 1
    engine.close()
    assert type(optimizer) is torch.optim.AdamW


def test_a_checkpoints_stand_in_that_is_assigned_is_the_state() -> None:
    """The state has the values of the assignment; a write to the stand-in after it is refused, once."""
    run = _both()[0]
    drive(run, CASE, 1)
    entry = run.optimizer.state[_weight(run)]
    given = stand_in.moments(_weight(run)._gm_slot, None)[0]
    entry["exp_avg"] = given
    kept = given.clone()
    assert torch.equal(entry["exp_avg"], kept)
    given.mul_(0.5)
    with pytest.raises(gs.GuardError, match=r"head\.weight.* has been written since"):
        entry["exp_avg"].clone()
    assert torch.equal(entry["exp_avg"], kept)
    drive(run, CASE, 1)
    assert torch.equal(given, kept * 0.5) and not torch.equal(entry["exp_avg"], kept)
    run.engine.close()
