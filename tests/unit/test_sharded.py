"""Training on several ranks: the bits of one, whatever the number of ranks, and what ranks that differ are told."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini_strategy as gs
from helpers.ranks import run_ranks, values
from helpers.reference import (
    Managed,
    Outcome,
    Recipe,
    assert_same_outcome,
    drive,
    managed,
    plain,
    tightly,
)
from helpers.sharded import Exact, ExactCase
from helpers.zoo import CASES

PATIENT = 900.0  # longer than run_ranks waits: whoever sits out this timeout fails
RATES = "h2d=55e9,d2h=54e9"


@pytest.fixture(autouse=True)
def given_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", RATES)  # the ranks inherit it


def of_training(outcome: Outcome) -> Outcome:
    """Without the losses, which are those of one rank."""
    return dataclasses.replace(outcome, losses=[])


def reference(case: Any, recipe: Recipe) -> Outcome:
    run = plain(case.build, recipe)
    drive(run, case, recipe.steps)
    return of_training(run.outcome())


def sharded(rank: int, build: Any, recipe: Recipe, **how: Any) -> Managed:
    """The managed run; ranks begin with different values, of which rank 0's have to count."""
    own = dataclasses.replace(recipe, seed=recipe.seed + 100 * rank)
    how = {"timeout": PATIENT, "chunk_size": 4096} | how
    if how.pop("is_tight", False):
        return tightly(build, own, **how)
    return managed(build, own, **how)


# ---- bits ----------------------------------------------------------------------------------------

RUNS: tuple[tuple[Recipe, dict[str, Any]], ...] = (
    (Recipe("32-true", steps=6, clip=1.0, accumulate=2), {}),
    (Recipe("bf16-true", steps=8, clip=0.5), {"is_tight": True}),
    (Recipe("16-mixed", steps=6, clip=1.0), {"placement_policy": "cpu"}),
    (Recipe("bf16-mixed", steps=5, gradient_dtype=torch.float32), {"placement_policy": "cuda"}),
    (Recipe("bf16-mixed", steps=6, clip=1.0), {"enable_distributed_storage": False}),
)


def check_bits(rank: int, size: int) -> None:
    for recipe, how in RUNS:
        run = sharded(rank, Exact, recipe, **how)
        drive(run, ExactCase(rank, size), recipe.steps)
        assert_same_outcome(of_training(run.outcome()), reference(ExactCase(), recipe))
        stats = run.engine.stats()
        assert run.engine.ranks.size == size and stats["chunks"] > 3
        run.engine.close()


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.core), 3])
def test_bits(size: int, tmp_path: Path) -> None:
    values(run_ranks(size, tmp_path, check_bits))


def check_many_steps(rank: int, size: int) -> None:
    recipe = Recipe("bf16-true", steps=30, clip=1.0)
    for floor in (0.1, 1.5)[size == 8 :]:
        run = sharded(rank, Exact, recipe, is_tight=True, floor=floor)
        drive(run, ExactCase(rank, size), recipe.steps)
        assert_same_outcome(of_training(run.outcome()), reference(ExactCase(), recipe))
        assert run.engine.stats()["planned"] or floor < 1  # the least has no room for a ring
        run.engine.close()


@pytest.mark.parametrize("size", [3, 8])
def test_bits_of_many_steps(size: int, tmp_path: Path) -> None:
    values(run_ranks(size, tmp_path, check_many_steps))


def check_hybrid(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for recipe in (
        Recipe("32-true", steps=5, clip=1.0, accumulate=2),
        Recipe("bf16-true", steps=5),
    ):
        run = sharded(rank, Exact, recipe, mesh=mesh)
        assert (run.engine.ranks.shard.size, run.engine.ranks.replica.size) == (2, 2)
        drive(run, ExactCase(rank, size), recipe.steps)
        assert_same_outcome(of_training(run.outcome()), reference(ExactCase(), recipe))
        run.engine.close()


def test_hybrid(tmp_path: Path) -> None:
    values(run_ranks(4, tmp_path, check_hybrid))


def check_models(rank: int, size: int, names: list[str]) -> None:
    """The same batch on every rank: the mean of 2 or 4 is exact (but for fp16's smallest numbers)."""
    for case in CASES:
        if case.name in names:
            precisions = [p for p in case.precisions if p != "16-mixed"]
            recipe = Recipe(precisions[-1], steps=4, clip=1.0)
            run = sharded(rank, case.build, recipe, chunk_size=16384)
            drive(run, case, recipe.steps)
            try:
                assert_same_outcome(of_training(run.outcome()), reference(case, recipe))
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error
            run.engine.close()


MODELS = [
    "tied_weights",
    "lora",
    "batch_norm",
    "checkpoint_not_reentrant",
    "transformer_encoder",
    "lstm",
    "embedding_max_norm",
    "child_weight_in_parent",
    "gradient_penalty",
    "changing_sequence_length",
    "unused_parameters",
    "several_forwards_one_backward",
]


def test_models(tmp_path: Path) -> None:
    known = {case.name for case in CASES}
    assert known >= set(MODELS), set(MODELS) - known
    values(run_ranks(2, tmp_path, check_models, MODELS))


def check_step_in_backward(rank: int, size: int) -> None:
    recipe = Recipe("32-true", steps=6)
    want = plain(Exact, recipe)
    run = sharded(rank, Exact, recipe)
    case, own = ExactCase(), ExactCase(rank, size)
    for step in range(recipe.steps):
        loss = case.loss(want, case.batch(step))
        want.backward(loss)
        want.finish()
        run.engine.backward(own.loss(run, own.batch(step)), step=True)
        run.engine.step()
        run.engine.zero_grad()
    assert_same_outcome(of_training(run.outcome()), of_training(want.outcome()))
    run.engine.close()


@pytest.mark.core
def test_step_in_backward(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_step_in_backward))


def check_overflow(rank: int, size: int) -> list[float]:
    """An infinite gradient on the last rank alone: all skip."""
    recipe = Recipe("16-mixed", steps=6, clip=1.0)
    run = sharded(rank, Exact, recipe)
    case = ExactCase(rank, size)
    for step in range(recipe.steps):
        batch = case.batch(step)
        if step in (1, 4) and rank == size - 1:
            batch[1][3] = float("inf")
        before = run.engine.model_state_dict()
        run.backward(case.loss(run, batch))
        run.finish()
        after = run.engine.model_state_dict()
        names = [name for name in before if name != "count"]
        moved = [name for name in names if not torch.equal(before[name], after[name])]
        assert (moved == []) == (step in (1, 4)), (step, moved)
    assert run.engine.stats()["skipped_steps"] == 2
    run.engine.close()
    return run.scales


def test_overflow_on_one_rank(tmp_path: Path) -> None:
    scales = values(run_ranks(2, tmp_path, check_overflow))
    assert all(each == scales[0] for each in scales) and len(set(scales[0])) > 1


# ---- ranks that differ ---------------------------------------------------------------------------


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises((gs.GeminiError, ValueError)) as found:
        call(*args, **kwargs)
    return str(found.value)


def manage(model: nn.Module, lr: float = 1e-3, **how: Any) -> gs.Engine:
    how = {"timeout": PATIENT, "chunk_size": 4096} | how
    return gs.manage(model, gs.HybridAdam(model.parameters(), lr=lr), device="cpu", **how)


def check_arguments(rank: int, size: int) -> None:
    is_odd = rank == 1
    for field, how in (
        ("chunk_size: 4096 on ranks 0, 2, 8192 on rank 1", {"chunk_size": 4096 << is_odd}),
        ("placement_policy", {"placement_policy": "cpu" if is_odd else "auto"}),
        (
            'precision: null on ranks 0, 2, "bf16-true"',
            {"precision": "bf16-true" if is_odd else None},
        ),
        ("the shape of the mesh", {"enable_distributed_storage": not is_odd}),
        ("timeout", {"timeout": PATIENT + is_odd}),
        ("the loss scaler", {"initial_scale": 2.0 ** (10 + is_odd)}),
    ):
        text = refusal(manage, Exact(), **how)
        assert f"the ranks differ in {field}" in text, text
    for field, model in (
        ("tensor 0 of the model", nn.Linear(4 + is_odd, 3)),
        ("tensor 1 of the model", nn.Linear(4, 3).requires_grad_(True)),
        ("the numbers of parameters in its groups", nn.Linear(4, 3, bias=is_odd)),
        ("tensor 2 of the model", nn.BatchNorm1d(4, momentum=0.1)),
    ):
        if field.startswith("tensor 1"):
            model.bias.requires_grad_(not is_odd)
        if field.startswith("tensor 2") and is_odd:
            model.running_mean = model.running_mean.double()
        text = refusal(manage, model)
        assert f"the ranks differ in {field}" in text, text
    model = Exact()
    if is_odd:  # an error of one rank alone: the others hear of it
        text = refusal(manage, model, placement_policy="gpu")
        assert text.startswith('placement_policy="gpu"') or "'gpu'" in text
    else:
        assert "rank 1 said: manage(): ValueError: manage(placement_policy='gpu'" in refusal(
            manage, model
        )
    if is_odd:
        model.terms[0].p.grad = torch.zeros(3, 5)
    text = refusal(manage, model)
    assert "terms.0.p: (3, 5)" in text and "a gradient already (zero_grad() drops it)" in text, text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gemini_strategy.ranks.ranks._SAMPLES", 2)  # as few as of a large one
        model.terms[0].p.grad = torch.zeros(3, 5)
        model.terms[0].p.grad[0, 1] = is_odd
        assert "a gradient already" in refusal(manage, model)
    model.terms[0].p.grad = None
    case = ExactCase(rank, size)
    engine = manage(model)
    engine.backward(case.loss(model, case.batch(0)))
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    engine.close()
    engine = manage(model)  # goes on with what all ranks were given back
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in grads), name
        assert parameter.grad is None or torch.equal(parameter.grad, grads[name]), name
    engine.close()
    model.zero_grad()
    engine = manage(model, device_budget=2**20 << rank, host_budget=2**30 >> rank)
    settings = engine._runtime.settings
    assert (settings.device_budget, settings.host_budget) == (2**20, 2**28)  # the least
    engine.close()


def check_optimizers(rank: int, size: int) -> None:
    """Members of groups, and what each rank is given to keep its part of."""
    is_odd = rank == size - 1
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def groups(order: list[nn.Parameter], lrs: tuple[float, float]) -> gs.HybridAdam:
        halves = (order[:2], order[2:])
        return gs.HybridAdam(
            [{"params": p, "lr": lr} for p, lr in zip(halves, lrs, strict=True)], lr=1e-3
        )

    parameters = list(model.parameters())
    order = parameters[::-1] if is_odd else parameters
    optimizer = groups(order, (1e-3, 1e-1))
    text = refusal(gs.manage, model, optimizer, device="cpu", timeout=PATIENT)
    assert "the ranks differ in parameter 0 of param group 0 of the optimizer: " in text, text
    assert '"0.weight" on rank' in text and '"1.bias" on rank' in text, text
    model.register_buffer("a", torch.zeros(1))
    for name in "bc" if is_odd else "":
        model.register_buffer(name, torch.zeros(1))
    text = refusal(manage, model)
    assert "the ranks differ in tensor 5 of the model: null on rank" in text, text

    written = "the ranks differ in what was written since the last step"

    def check_writes(*writes: Any, words: str) -> None:
        """Each in a step of its own; all but the last are the same on all ranks."""
        model = Exact()
        engine = manage(model)
        batch = ExactCase().batch(0)
        for write in (None, *writes):
            engine.backward(model(batch))
            if write is not None:
                write(engine, is_odd)
                engine.backward(model(batch))
            if write is writes[-1]:
                for _ in range(2):  # what is mixed stays so
                    text = refusal(engine.step)
                    assert words in text, text
            else:
                engine.step()
                engine.zero_grad()
        if words.startswith(written):  # the end: nobody can save what is mixed
            refusal(engine.state_dict)
            with pytest.warns(RuntimeWarning, match="part of the weights only"):
                engine.close()
            return
        engine.zero_grad(set_to_none=False)
        engine.backward(model(batch))
        engine.step()
        engine.close()

    def load(engine: gs.Engine, extra: float, part: str) -> None:
        state = engine.state_dict()
        for entry in state["optimizer"]["state"].values():
            entry["exp_avg"] += extra
        state["model"]["terms.1.p"] += extra
        if part == "optimizer":
            engine.load_optimizer_state_dict(state["optimizer"])
        else:
            engine.load_model_state_dict(state["model"])

    def same(engine: gs.Engine, is_odd: bool) -> None:
        load(engine, 0.5, "optimizer")
        load(engine, 0.5, "model")

    def alone(engine: gs.Engine, is_odd: bool) -> None:
        state = engine.state_dict()
        if is_odd:
            engine.load_optimizer_state_dict(state["optimizer"])

    def dropped(engine: gs.Engine, is_odd: bool) -> None:
        if is_odd:  # the first of two micro-batches, thrown away
            engine.zero_grad()

    check_writes(same, alone, words=f'{written} (number 0): null on rank 0, "')
    moment = f'{written} (number 0): "exp_avg at step 1 of terms.0.p'
    check_writes(lambda e, o: load(e, float(o), "optimizer"), words=moment)
    master = f'{written} (number 1): "loaded weight of terms.1.p'
    check_writes(lambda e, o: load(e, float(o), "model"), words=master)
    check_writes(dropped, words="terms.0.p got its gradient in other backward passes on rank 1")

    def other(engine: gs.Engine, is_odd: bool) -> None:
        engine.model.terms[1].p.grad.mul_(2.0 + is_odd)

    words = 'the ranks differ in what was written to gradients (number 0): "gradient of terms.1.p'
    check_writes(other, words=words)


def test_optimizers_that_differ(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_optimizers))


def test_arguments_that_differ(tmp_path: Path) -> None:
    values(run_ranks(3, tmp_path, check_arguments))


class Choosy(Exact):
    """Its first parameter counts only if it is told so."""

    wants_first, is_reversed = True, False

    def forward(self, numbers: list[torch.Tensor]) -> torch.Tensor:
        modules = [*self.terms, self.tied, self.again, self.frozen]
        pairs = list(zip(modules, numbers, strict=True))
        terms = [m(c) for m, c in (pairs[::-1] if self.is_reversed else pairs)]
        terms = terms[::-1] if self.is_reversed else terms
        return torch.stack(terms if self.wants_first else [terms[0].detach(), *terms[1:]]).sum()


def check_steps(rank: int, size: int) -> None:
    model = Choosy()
    engine = manage(model, chunk_size=2**20)  # one chunk: its reduction is the same on all ranks
    batch = ExactCase().batch(0)
    before = engine.model_state_dict()
    model.wants_first = False  # on all of them: as with one rank it keeps its value
    engine.backward(model(batch))
    engine.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank)
    text = refusal(engine.step)
    assert "the ranks differ in the hyperparameters of param group 0: [0.001, " in text, text
    engine.optimizer.param_groups[0]["lr"] = 1e-3
    engine.clip_grad_norm_(1e-3 if rank == 0 else 1e3)
    text = refusal(engine.step)
    assert "the ranks differ in the clip factor: [" in text and "[1.0] on ranks 1, 2" in text, text
    engine._runtime.coming_step.drop_clip()
    engine._runtime.coming_step.clips.clear()
    after = engine.model_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "count")
    engine.step()
    after = engine.model_state_dict()
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert {"terms.0.p", "frozen.p"} <= set(same) and "terms.1.p" not in same
    engine.zero_grad()
    model.wants_first = rank != 1
    engine.backward(model(batch))
    text = refusal(engine.step)
    assert text.startswith("optimizer step: terms.0.p has no gradient on rank 1, but one"), text
    text = refusal(engine.grad_norm)
    assert text.startswith("gradient norm: terms.0.p has no gradient on rank 1"), text
    engine.zero_grad()
    for micro in range(2):  # in one of two micro-batches only: it has a gradient all the same
        model.wants_first = rank != 1 or micro == 0
        engine.backward(model(batch))
    text = refusal(engine.step)
    assert text.startswith("optimizer step: terms.0.p got its gradient in other backward"), text
    assert "on rank 1 than on rank 0" in text, text
    engine.zero_grad()
    for micro in range(2):  # on all of them, and a step that is right
        model.wants_first = micro == 1
        engine.backward(model(batch))
    assert torch.equal(model.terms[0].p.grad, batch[0])
    engine.step()
    engine.zero_grad()
    # Different calls: by name, not after the timeout.
    text = refusal(engine.grad_norm if rank == 2 else engine.model_state_dict)
    assert "the ranks are at different places: " in text and "gradient norm on rank 2" in text, text
    assert "at different places" in refusal(engine.grad_norm)  # it stands
    with pytest.warns(RuntimeWarning, match="each rank has its part of the weights only"):
        engine.close()
    # Where the others' weights have been updated inside backward, nobody can go on with them.
    model = Choosy()
    engine = manage(model, chunk_size=2**20)
    for step in range(4):
        model.wants_first = step < 3 or rank != 1
        engine.backward(model(batch), step=True)
        if step < 3:
            engine.step()
            engine.zero_grad()
    text = refusal(engine.step)
    assert "terms.0.p has no gradient on rank 1" in text, text
    if rank != 1:
        assert "failed after it had updated" in text and "load a checkpoint" in text, text
        assert "closed" in refusal(engine.zero_grad)
    refusal(engine.model_state_dict)  # nobody waits for those that are closed
    with pytest.warns(RuntimeWarning, match="part of the weights only"):
        engine.close()
    # Units in another order, which in one chunk needs no other collectives.
    model = Choosy()
    engine = manage(model, chunk_size=2**20)
    text = ""
    for step in range(5):
        model.is_reversed = step >= 3 and rank == 1
        engine.backward(model(batch))
        if step < 3:
            engine.step()
        else:
            text = text or refusal(engine.step)
            break
        engine.zero_grad()
    words = "unit terms.0 is entered on ranks 0, 2, unit frozen is entered on rank 1; every rank"
    assert f"different passes since the last step, from tick 0 on: {words}" in text, text
    with pytest.warns(RuntimeWarning, match="part of the weights only"):
        engine.close()
    # A collective too many: nothing of this step has been done when the ranks are told.
    model = Exact()
    engine = manage(model)
    engine.backward(model(batch))
    if rank == 1:  # without bytes, so that the others do not wait for it
        engine.ranks._comms[0].core.label(77)
        engine.ranks._comms[0].core.all_gather(0, 0, 0)
    before = engine.stats()["steps"]
    text = refusal(engine.step)
    assert text.startswith("optimizer step: the ranks have not issued the same collectives"), text
    assert re.search(r"rank 2 has not reached number \d+ \(all_gather of 3 x 0 bytes", text), text
    assert engine.stats()["steps"] == before
    with pytest.warns(RuntimeWarning, match="part of the weights only"):
        engine.close()


class Experts(nn.Module):
    """The batch decides which module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(40, 40) for _ in range(2))

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self.experts[choice](x).square().mean()


def check_experts(rank: int, size: int) -> None:
    """Another module on one rank: the rank, the unit and the collective are named, with a plan and without."""
    unraised: list[str] = []
    sys.unraisablehook = lambda what: unraised.append(f"{what.object}: {what.exc_value}")
    for steps, is_sharded in ((0, True), (4, True), (0, False)):  # replicas meet in the backward
        engine = manage(Experts(), enable_distributed_storage=is_sharded)
        for _ in range(steps):
            engine.backward(sum(engine.model(torch.ones(2, 40), choice) for choice in (0, 1)))
            engine.step()
            engine.zero_grad()
        with pytest.raises(gs.GeminiError) as found:
            loss = engine.model(torch.ones(2, 40, requires_grad=True), int(rank == 1))
            engine.backward(loss)
            engine.step()
        text = str(found.value)
        if steps == 0 and is_sharded:
            each = [
                f"(gathering the weights of chunk {2 * i} (unit experts.{i}) after step 0)"
                for i in (0, 1)
            ]
            assert text.startswith("the ranks run different modules, or in another order"), text
            own = f"all_gather number 1 of 3 x 2560 bytes {each[rank == 1]}, rank {rank} of 3: "
            assert own in text and each[rank != 1] in text.partition(own)[2], text
        assert "rank 1" in text and "unit experts." in text and "after step" in text, text
        end = "part of the weights only" if is_sharded else "weights are of no single step"
        with pytest.warns(RuntimeWarning, match=end):
            engine.close()
    gc.collect()
    assert not unraised, unraised  # beside the error nothing is printed


def test_modules_that_differ(tmp_path: Path) -> None:
    values(run_ranks(3, tmp_path, check_experts))


def test_steps_that_differ(tmp_path: Path) -> None:
    values(run_ranks(3, tmp_path, check_steps))


# ---- rates ---------------------------------------------------------------------------------------


def check_rates(rank: int, size: int, folder: str) -> None:
    """Ranks of a host measure together or not at all, and keep the lowest; another host has its own."""
    from gemini_strategy import _C
    from gemini_strategy.machine import rates
    from gemini_strategy.ranks import ranks as ranks_module

    os.environ["XDG_CACHE_HOME"] = f"{folder}/{rank // 2}"
    del os.environ["GEMINI_RATES"]
    here = ranks_module._host()
    ranks_module._host = lambda: [*here, str(rank // 2)]
    measured = []

    def measure(*args: Any) -> dict[str, float]:
        measured.append(args)
        return dict.fromkeys(rates.REFERENCE, 10.0 + (rank - 1) ** 2)

    _C.rates_measure, original = measure, _C.rates_measure
    ranks = ranks_module.Ranks(timeout=PATIENT)
    assert (ranks.local_rank, ranks.local_size) == ((rank % 2), 2 if rank < 2 else 1)
    assert set(rates.machine_rates(None, 2, ranks=ranks).values()) == {10.0}
    assert len(measured) == 1
    kept = rates._measured.copy()
    assert set(next(iter(kept.values())).values()) == {11.0 if rank == 2 else 10.0}
    assert rates.machine_rates(None, 2, ranks=ranks)["h2d"] == 10.0 and len(measured) == 1
    if rank == 1:  # one of a host has forgotten: from the file
        rates._measured.clear()
    assert rates.machine_rates(None, 2, ranks=ranks)["h2d"] == 10.0 and len(measured) == 1
    ranks.gather("all have read")
    if rank == 0:
        for file in Path(folder).glob("0/gemini/*"):
            file.unlink()
    ranks.gather("the file is gone")
    if rank == 1:
        rates._measured.clear()
    assert rates.machine_rates(None, 2, ranks=ranks)["h2d"] == 10.0
    assert len(measured) == (1 if rank == 2 else 2)
    rates.machine_rates(None, 2)  # alone: figures of its own
    assert len(rates._measured) == (1 if rank == 2 else 2)
    os.environ["GEMINI_RATES"] = f"h2d={100 - rank}"
    assert rates.machine_rates(None, 2, ranks=ranks)["h2d"] == 98.0
    _C.rates_measure = original
    ranks.close()


def test_rates(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    values(run_ranks(3, tmp_path / "run", check_rates, str(tmp_path)))
