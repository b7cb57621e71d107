"""The ordinary way of saving, `model.state_dict()` and `optimizer.state_dict()`, loses no bit of a 16-bit run.

What 16-bit weights lack to be their fp32 masters is in the optimizer's state, in HybridAdam's form, and is found again
whatever is loaded first. Every weight, master and later step is that of the run that went on.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import gemini_strategy as gs
from helpers.pairs import pairs, turns
from helpers.ranks import run_ranks, values
from helpers.reference import Plain, Recipe, assert_same_bits, assert_same_outcome, drive
from helpers.sharded import Exact, ExactCase

KINDS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "HybridAdam": lambda p: gs.HybridAdam(p, lr=1e-2),
}
PRECISIONS = ("bf16-mixed", "bf16-true", "16-mixed")


class Net(nn.Module):
    """One layer has no gradient in the first steps, one never, one begins with zeros, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(33, 48)
        self.late = nn.Linear(48, 48)
        self.never = nn.Linear(48, 5)
        self.frozen = nn.Linear(48, 48).requires_grad_(False)
        self.head = nn.Linear(48, 7)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor, is_late: bool) -> Tensor:
        x = torch.tanh(self.frozen(torch.tanh(self.stem(x))))
        return self.head(x + torch.tanh(self.late(x)) if is_late else x)


class _Case:
    build = Net

    @staticmethod
    def batch(step: int) -> tuple[Tensor, Tensor, bool]:
        seed = torch.Generator().manual_seed(step)
        return torch.randn(6, 33, generator=seed), torch.randn(6, 7, generator=seed), step >= 4

    @staticmethod
    def loss(run: Plain, batch: Any) -> Tensor:
        return F.mse_loss(run(batch[0], batch[2]).float(), batch[1])


def _run(kind: str, precision: str, seed: int = 3, before: Callable | None = None) -> Any:
    from helpers.reference import Managed

    torch.manual_seed(seed)
    model = Net()
    optimizer = KINDS[kind](model.parameters())
    if before is not None:
        before(model, optimizer)
    engine = gs.manage(
        model,
        optimizer,
        device="cpu",
        precision=precision,
        placement_policy="cpu",
        chunk_size=4096,
        initial_scale=2.0**8,
    )
    return Managed(engine, Recipe(precision=precision))


def _saved(run: Any) -> dict[str, Any]:
    """Through a file, as programs save it."""
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    if run.scaler is not None:
        state["scaler"] = run.scaler.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _load(run: Any, state: dict[str, Any], order: str) -> None:
    for which in ("model", "optimizer") if order == "weights first" else ("optimizer", "model"):
        getattr(run, which).load_state_dict(state[which])
    if run.scaler is not None:
        run.scaler.load_state_dict(state["scaler"])


def _same(run: Any, want: Any) -> None:
    run.losses, run.norms, run.scales = list(want.losses), list(want.norms), list(want.scales)
    run.skipped = want.skipped
    assert_same_outcome(run.outcome(), want.outcome())
    for each in (run, want):
        drive(each, _Case, 4, first=3)
    assert_same_outcome(run.outcome(), want.outcome())


@pairs(
    kind=list(KINDS),
    precision=PRECISIONS,
    trained=[0, 2],
    order=["weights first", "optimizer first"],
)
def test_resume(kind: str, precision: str, trained: int, order: str) -> None:
    """Into an engine that has just been made, and into one that has trained something else."""
    want = _run(kind, precision)
    drive(want, _Case, 3)
    state = _saved(want)
    run = _run(kind, precision, seed=4)
    drive(run, _Case, trained, first=50)
    _load(run, state, order)
    _same(run, want)
    for each in (run, want):
        each.engine.close()


@pytest.mark.parametrize("order", ["weights first", "optimizer first"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_resume_from_before_the_first_step(precision: str, order: str) -> None:
    want = _run("AdamW", precision)
    state = _saved(want)
    names = [n for n, _ in want.model.named_parameters()]
    lacking = {names[i] for i in state["optimizer"]["state"]}
    assert "stem.weight" in lacking and not lacking & {"head.bias", "frozen.weight"}
    run = _run("AdamW", precision, seed=4)
    _load(run, state, order)
    _same(run, want)


@turns(kind=KINDS, precision=PRECISIONS)
def test_load_then_manage(kind: str, precision: str) -> None:
    want = _run(kind, precision)
    drive(want, _Case, 3)
    state = _saved(want)

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    run = _run(kind, precision, seed=4, before=load)
    if run.scaler is not None:
        run.scaler.load_state_dict(state["scaler"])
    _same(run, want)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_weights_lacked_before_they_trained_on_in_fp32_is_forgotten(precision: str) -> None:
    """A plain AdamW carries along what it does not know: it is of weights that are no more."""
    want = _run("AdamW", precision)
    drive(want, _Case, 3)
    state = _saved(want)
    torch.manual_seed(4)
    model = Net()
    optimizer = KINDS["AdamW"](model.parameters())
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for step in range(2):
        batch = _Case.batch(step)
        F.mse_loss(model(batch[0], True), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    exact = {n: p.detach().clone() for n, p in model.named_parameters()}
    later = copy.deepcopy(optimizer.state_dict())
    taken = gs.manage(model, optimizer, device="cpu", precision=precision)
    loaded = _run("AdamW", precision, seed=5).engine
    loaded.model.load_state_dict(exact)
    loaded.optimizer.load_state_dict(later)
    for engine in (taken, loaded):
        masters = engine.model_state_dict()
        for name, p in exact.items():
            if not name.startswith(("frozen", "never")):  # what has not trained on
                assert_same_bits(masters[name], p, name)


@turns(precision=["32-true", *PRECISIONS], kind=["AdamW", "Adam"])
def test_plain_optimizers_of_torch_load_it(precision: str, kind: str) -> None:
    """And go on as with a state that has nothing of ours in it."""
    run = _run(kind, precision)
    drive(run, _Case, 3)
    state = _saved(run)
    entries = state["optimizer"]["state"].values()
    bare = copy.deepcopy(state["optimizer"])
    bare["state"] = {
        i: {k: v for k, v in e.items() if k in ("step", "exp_avg", "exp_avg_sq")}
        for i, e in bare["state"].items()
        if e["step"] > 0
    }
    if precision == "32-true":
        assert all(list(e) == ["step", "exp_avg", "exp_avg_sq"] for e in entries)
    results = []
    for optimizer_state in (state["optimizer"], bare):
        model = Net()
        model.load_state_dict(state["model"])
        optimizer = KINDS[kind](model.parameters())
        optimizer.load_state_dict(optimizer_state)
        for step in range(3, 7):
            batch = _Case.batch(step)
            F.mse_loss(model(batch[0], batch[2]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.state_dict())
    for name, value in results[0].items():
        assert_same_bits(value, results[1][name], name)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_hybrid_adam_alone_loads_it(precision: str) -> None:
    """Managed, then alone, through files and through close()."""
    run, want = _run("HybridAdam", precision), _run("HybridAdam", precision)
    for each in (run, want):
        drive(each, _Case, 3)
    state = _saved(run)
    torch.manual_seed(9)
    model = Net()  # it came in fp32, and so do its files
    model.load_state_dict(state["model"])
    gs.cast_model_(model, precision)
    alone = Plain(model, KINDS["HybridAdam"](model.parameters()), Recipe(precision=precision))
    alone.scaler = gs.LossScaler(initial_scale=2.0**8) if run.scaler is not None else None
    alone.optimizer.load_state_dict(state["optimizer"])
    run.engine.close()
    gs.cast_model_(run.model, precision)
    closed = Plain(run.model, run.optimizer, run.recipe)
    closed.scaler = gs.LossScaler(initial_scale=2.0**8) if run.scaler is not None else None
    for each in (closed, alone, want):
        each.losses, each.scales = [], []
        drive(each, _Case, 4, first=3)
    expected = want.outcome()
    for each in (closed, alone):
        got = each.outcome()
        for name, value in expected.weights.items():
            assert_same_bits(got.weights[name], value, name)
        for name, value in expected.masters.items():
            assert_same_bits(got.masters[name], value, name)


def test_masters_are_saved_once() -> None:
    """Beside fp32 masters there is nothing to add, and fp32 weights lack nothing."""
    run = _run("AdamW", "bf16-true")
    drive(run, _Case, 3)
    whole = run.engine.state_dict()
    assert all(len(entry) == 3 for entry in whole["optimizer"]["state"].values())
    assert "remainder" in run.engine.optimizer_state_dict()["state"][0]
    other = _run("AdamW", "bf16-true", seed=4)
    other.engine.load_state_dict(whole)
    _same(other, run)


def test_weights_that_are_loaded_alone_are_whole() -> None:
    """A remainder that was loaded goes with the weights of the next update, and no others."""
    came_in = {"before": lambda model, optimizer: model.bfloat16()}
    run = _run("AdamW", "bf16-true", **came_in)
    drive(run, _Case, 3)
    state = _saved(run)
    other = {name: value * 2 for name, value in state["model"].items()}
    run = _run("AdamW", "bf16-true", seed=4, **came_in)
    _load(run, state, "optimizer first")
    masters = run.engine.model_state_dict()
    run.model.load_state_dict(other)
    run.model.load_state_dict(state["model"])
    for name, value in run.engine.model_state_dict().items():
        assert_same_bits(value, masters[name], name)
    drive(run, _Case, 1, first=3)
    weights, masters = copy.deepcopy(run.model.state_dict()), run.engine.model_state_dict()
    run.model.load_state_dict(other)
    for name, value in run.engine.model_state_dict().items():
        if name.split(".")[0] not in ("frozen", "late", "never"):  # which no update has found
            is_same = other[name].view(torch.int16) == weights[name].view(torch.int16)
            expected = torch.where(is_same, masters[name].float(), other[name].float())
            assert_same_bits(value.float(), expected, name)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_loading_what_is_there_changes_nothing(precision: str) -> None:
    """A 16-bit load is a write like any other: the master stays where the weight is the one that it was."""
    run = _run("AdamW", precision)
    drive(run, _Case, 3)
    masters, state = run.engine.model_state_dict(), copy.deepcopy(run.model.state_dict())
    run.model.load_state_dict(state)
    for name, value in run.engine.model_state_dict().items():
        assert_same_bits(value, masters[name], name)
    for value in state.values():
        value[..., ::2] *= 2
    run.model.load_state_dict(state)
    for name, value in run.engine.model_state_dict().items():
        whole = state[name].float()
        expected = torch.where(
            whole == masters[name].to(state[name].dtype).float(), masters[name].float(), whole
        )
        assert_same_bits(value.float(), expected, name)


@pytest.mark.parametrize("order", ["weights", "optimizer"])
def test_resume_of_weights_in_another_order(order: str) -> None:
    """Low parts go to their elements where a weight lies transposed in memory."""

    def begin(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, gs.Engine]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(19, 23), nn.Tanh(), nn.Linear(23, 5))
        model[0].weight = nn.Parameter(torch.randn(19, 23).t() / 5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        how = {"precision": "bf16-true", "device": "cpu", "device_budget": 2**20}
        return model, optimizer, gs.manage(model, optimizer, **how)

    model, optimizer, engine = begin(1)
    for _ in range(3):
        engine.backward(model(torch.randn(7, 19).bfloat16()).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert model[0].weight.stride() == (1, 23)
    parts = [copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())]
    want = engine.model_state_dict()
    engine.close()
    model, optimizer, engine = begin(2)
    loads = list(zip((model.load_state_dict, optimizer.load_state_dict), parts, strict=True))
    for load, part in loads if order == "weights" else reversed(loads):
        load(part)
    for name, value in engine.model_state_dict().items():
        assert_same_bits(value, want[name], name)
    engine.close()


# ---- several ranks, and torch's checkpoints ------------------------------------------------------


def _train(engine: gs.Engine, rank: int, size: int, steps: range) -> None:
    case = ExactCase(rank, size)
    for step in steps:
        engine.backward(case.loss(engine.model, case.batch(step)))
        engine.step()
        engine.zero_grad()


def _manage(precision: str) -> gs.Engine:
    model = Exact()
    how = {"timeout": 90.0, "chunk_size": 4096, "precision": precision, "device": "cpu"}
    return gs.manage(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **how)


def _assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name, value in want["model"].items():
        assert_same_bits(got["model"][name], value, name)
    for index, entry in want["optimizer"]["state"].items():
        for key, value in entry.items():
            assert_same_bits(got["optimizer"]["state"][index][key], value, f"{index}.{key}")


def check_resume(rank: int, size: int, order: str) -> None:
    for precision in ("bf16-true", "16-mixed"):
        torch.manual_seed(3)
        engine = _manage(precision)
        _train(engine, rank, size, range(3))
        state = copy.deepcopy((engine.model.state_dict(), engine.optimizer.state_dict()))
        whole = engine.state_dict()
        scale = engine.scaler.state_dict() if engine.scaler is not None else None
        _train(engine, rank, size, range(3, 6))
        later = engine.state_dict()
        engine.close()
        torch.manual_seed(4)
        engine = _manage(precision)
        loads = [engine.model.load_state_dict, engine.optimizer.load_state_dict]
        for load, part in list(zip(loads, state, strict=True))[:: 1 if order == "weights" else -1]:
            load(part)
        _assert_same(engine.state_dict(), whole)
        if scale is not None:
            engine.scaler.load_state_dict(scale)
        _train(engine, rank, size, range(3, 6))
        _assert_same(engine.state_dict(), later)
        engine.close()


@turns(size=[2, 3], order=["weights", "optimizer"])
def test_resume_on_ranks(size: int, order: str, tmp_path: Path) -> None:
    values(run_ranks(size, tmp_path, check_resume, order))


def check_checkpoint(rank: int, size: int, folder: str) -> None:
    for precision in PRECISIONS:
        for is_flat in (False, True):
            options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
            torch.manual_seed(3 if size == 2 else 4)
            engine = _manage(precision)
            _train(engine, rank, size, range(3 if size == 2 else 0))
            before = engine.state_dict() if size == 2 else None
            model, optimizer = get_state_dict(engine.model, engine.optimizer, options=options)
            state = {"model": model, "optimizer": optimizer}
            path = f"{folder}/{precision}-{is_flat}"
            if size == 2:
                _assert_same(engine.state_dict(), before)  # looking at it is no step
                dcp.save(state, checkpoint_id=path)
                if rank == 0:
                    torch.save(before, f"{path}.pt")
            else:
                dcp.load(state, checkpoint_id=path)
                set_state_dict(
                    engine.model,
                    engine.optimizer,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                    options=options,
                )
                _assert_same(engine.state_dict(), torch.load(f"{path}.pt", weights_only=False))
            engine.close()


def test_distributed_checkpoint(tmp_path: Path) -> None:
    for size in (2, 1):
        (tmp_path / str(size)).mkdir()
        values(run_ranks(size, tmp_path / str(size), check_checkpoint, str(tmp_path)))
