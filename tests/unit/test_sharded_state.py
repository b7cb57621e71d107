"""What several ranks keep in parts and give whole: state in and out, first weights, loading, closing, failing."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gemini_strategy as gs
from gemini_strategy.weights import files as weights_module
from helpers.ranks import run_ranks, values
from helpers.reference import Recipe, assert_same_bits, drive, plain
from helpers.sharded import Exact, ExactCase

PATIENT = 900.0  # longer than run_ranks waits: whoever sits out this timeout fails
SHORT = 8.0  # asking the others what they know of it takes up to 5 s


@pytest.fixture(autouse=True)
def given_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", "h2d=55e9,d2h=54e9")  # the ranks inherit it


def manage(model: nn.Module, **how: Any) -> gs.Engine:
    how = {"timeout": PATIENT, "chunk_size": 4096, "precision": "bf16-true"} | how
    return gs.manage(model, gs.HybridAdam(model.parameters(), lr=1e-2), device="cpu", **how)


def train(engine: gs.Engine, rank: int, size: int, steps: range) -> None:
    case = ExactCase(rank, size)
    for step in steps:
        engine.backward(case.loss(engine.model, case.batch(step)))
        engine.clip_grad_norm_(1.0)
        engine.step()
        engine.zero_grad()


def assert_same(got: Any, want: Any, what: str = "state") -> None:
    """Of nested dicts, lists, numbers and tensors."""
    if isinstance(want, Tensor):
        assert_same_bits(got, want, what)
    elif isinstance(want, dict):
        assert list(got) == list(want), what
        for key in want:
            assert_same(got[key], want[key], f"{what}[{key}]")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), what
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, f"{what}[{i}]")
    else:
        assert got == want, what


# ---- state in and out ----------------------------------------------------------------------------


def check_state(rank: int, size: int, folder: str) -> None:
    torch.manual_seed(3)
    engine = manage(Exact())
    train(engine, rank, size, range(3))
    state = engine.state_dict()
    reference = torch.load(f"{folder}/state.pt", weights_only=False)  # of one rank
    assert_same(state, reference)
    assert_same(dict(engine.model.state_dict()), engine.model_state_dict())
    only = engine.state_dict(rank0_only=True)
    assert_same(only, state if rank == 0 else {})
    assert (engine.model_state_dict(rank0_only=True) == {}) == (rank > 0)
    train(engine, rank, size, range(3, 5))
    later = engine.state_dict()
    engine.load_state_dict(state)
    assert_same(engine.state_dict(), state)
    train(engine, rank, size, range(3, 5))
    assert_same(engine.state_dict(), later)
    # Single parameters and gradients: whole for whoever reads them; every rank writes the same.
    model, terms = engine.model, engine.model.terms
    full = state["model"]
    engine.load_state_dict(state)
    with engine.full_parameter(terms[1].p) as values:
        assert_same_bits(values, full["terms.1.p"])
        values[100:] = 0.1
    assert_same_bits(
        engine._runtime.slot_of(terms[1].p).read_master()[100:], torch.full((157,), 0.1)
    )
    assert_same_bits(terms[1].p.clone()[100:].detach(), torch.full((157,), 0.1).bfloat16())
    with torch.no_grad():
        terms[3].p.mul_(2)
    assert_same_bits(terms[3].p.data.clone(), (full["terms.3.p"].bfloat16() * 2))
    assert_same_bits(
        engine.model_state_dict(masters=False)["terms.3.p"], full["terms.3.p"].bfloat16() * 2
    )
    with engine.full_parameters(terms[5], writable=False):
        assert_same_bits(terms[5].p.detach().clone(), full["terms.5.p"].bfloat16())
    case = ExactCase(rank, size)
    batch = case.batch(7)
    engine.backward(case.loss(model, batch))
    for term, c in zip(terms, batch, strict=False):
        assert_same_bits(term.p.grad.clone(), c.bfloat16())
    assert_same_bits(model.tied.p.grad.clone(), (batch[7] + batch[8]).bfloat16())
    terms[0].p.grad.mul_(0.5)
    terms[2].p.grad = torch.full((1,), 4.0, dtype=torch.bfloat16)
    assert_same_bits(terms[0].p.grad.clone(), (batch[0] * 0.5).bfloat16())
    engine.clip_grad_value_(0.25)
    assert_same_bits(terms[2].p.grad.clone(), torch.full((1,), 0.25).bfloat16())
    assert_same_bits(terms[6].p.grad.clone(), batch[6].clamp(-0.25, 0.25).bfloat16())
    engine.load_state_dict(state)  # between a backward and its step
    engine.zero_grad()
    engine.close(torch.float32, with_states=True)
    assert_same(
        {n: p.detach() for n, p in model.named_parameters()},
        {n: full[n] for n, _ in model.named_parameters()},
    )
    moments = {i: e["exp_avg"] for i, e in engine.optimizer.state_dict()["state"].items()}
    assert_same(moments, {i: e["exp_avg"] for i, e in state["optimizer"]["state"].items()})


def test_state(tmp_path: Path) -> None:
    torch.manual_seed(3)
    engine = manage(Exact())
    train(engine, 0, 1, range(3))
    torch.save(engine.state_dict(), tmp_path / "state.pt")
    engine.close()
    (tmp_path / "run").mkdir()
    values(run_ranks(3, tmp_path / "run", check_state, str(tmp_path)))


def check_kept_entries(rank: int, size: int) -> None:
    """An entry of a state dict shows the weight of its time, and nothing once the weight has changed."""
    torch.manual_seed(3)
    engine = manage(Exact())
    train(engine, rank, size, range(1))
    kept = engine.model.state_dict()
    copied = {name: value.clone() for name, value in kept.items()}
    assert_same({name: value.clone() for name, value in kept.items()}, copied)
    train(engine, rank, size, range(1, 2))
    if size == 1:
        assert_same(kept["terms.1.p"].clone(), engine.model.state_dict()["terms.1.p"].clone())
        return
    for read in (lambda v: v.clone(), lambda v: v.numpy(force=True), lambda v: float(v.sum())):
        with pytest.raises(
            gs.GuardError, match=r"terms\.1\.p: .* call model\.state_dict\(\) again"
        ):
            read(kept["terms.1.p"])
    engine.model.load_state_dict(copied)
    assert_same(dict(engine.model.state_dict()), copied)


@pytest.mark.parametrize("size", (1, 2))
def test_entries_that_are_kept(size: int, tmp_path: Path) -> None:
    values(run_ranks(size, tmp_path, check_kept_entries))


def check_given_away(rank: int, size: int) -> None:
    """What one rank alone writes to memory that was given away starts no collective, and changes nothing."""
    torch.manual_seed(3)
    engine = manage(Exact())
    train(engine, rank, size, range(1))
    p = engine.model.terms[1].p
    ended = engine.model.state_dict()["terms.1.p"]
    train(engine, rank, size, range(1, 2))
    entry = engine.model.state_dict()["terms.1.p"]
    moment = engine.optimizer.state[p]["exp_avg"]
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="read-only"):
        moment.numpy()[:] = 1.0
    for value in (p.grad, moment, entry):
        with pytest.raises(gs.GuardError, match=r"terms\.1\.p.*__dlpack__.*clone"):
            torch.utils.dlpack.from_dlpack(value)
    for value in (p.grad, moment):
        with pytest.raises(gs.GuardError, match=r"terms\.1\.p.*data_ptr.*clone"):
            value.data_ptr()
    before = entry.clone()
    data, grad = (torch.full_like(before, n, dtype=p.dtype) for n in (0.5, 2.0))
    p.data, p.grad = data, grad
    if rank == 0:
        data.fill_(7.0)
        grad.fill_(7.0)
        for read in (lambda: p.detach().clone(), lambda: p.grad.clone()):
            with pytest.raises(gs.GuardError, match=r"terms\.1\.p.*has been written since"):
                read()  # once, and without a word to the other
    assert_same(p.detach().clone(), torch.full_like(before, 0.5, dtype=p.dtype))
    assert_same(p.grad.clone(), torch.full_like(before, 2.0, dtype=p.dtype))
    assert_same(entry.clone(), before)  # of the data from before
    with pytest.raises(gs.GuardError, match=r"call model\.state_dict\(\) again"):
        ended.clone()
    engine.model.load_state_dict({"terms.1.p": entry}, strict=False)
    assert_same(p.detach().clone(), before.to(p.dtype))
    engine.zero_grad()
    train(engine, rank, size, range(2, 4))


def test_memory_that_is_given_away(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_given_away))


class Keeps(nn.Linear):
    """Keeps what it sees of its weight in its first forward; rank 1 may drop it again."""

    def __init__(self) -> None:
        super().__init__(24, 24)
        self.views: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.views = self.views or [self.weight.detach(), self.weight.data[3]]
        return super().forward(x)


def check_views_that_units_keep(rank: int, size: int, is_dropped: bool) -> None:
    """A tensor that shows a weight shows the new one after a step, on whichever ranks there is one."""

    def run(is_managed: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(Keeps(), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, 4))
        optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
        how = {"device": "cpu", "timeout": PATIENT, "chunk_size": 1024, "device_budget": 40_000}
        engine = gs.manage(model, optimizer, **how) if is_managed else None
        seen = []
        for i in range(4):
            loss = model(torch.randn(5, 24)).square().mean()
            loss.backward() if engine is None else engine.backward(loss)
            if rank == 1 and is_dropped:
                model[0].views.clear()
            optimizer.step()
            optimizer.zero_grad()
            seen += [view.clone() for view in model[0].views]
            if i == 2:
                model[0].views.clear()
        return seen

    for got, want in zip(run(True), run(False), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_views_that_units_keep(is_dropped: bool, tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_views_that_units_keep, is_dropped))


def check_distributed_checkpoint(rank: int, size: int, folder: str) -> None:
    """Two ranks write with torch.distributed.checkpoint, another number reads."""
    for precision in ("bf16-true", "32-true"):
        path = f"{folder}/{precision}"
        torch.manual_seed(3 if size == 2 else 4)
        engine = manage(Exact(), precision=precision)
        optimizer = engine.optimizer
        train(engine, rank, size, range(3 if size == 2 else 1))
        before = engine.state_dict()
        # torch's own way (test_masters_saved.py has it in half precision), and the engine's
        if precision == "32-true":
            model_state, optimizer_state = get_state_dict(engine.model, optimizer)
            assert_same(engine.state_dict(), before)  # looking at it is no step
            state = {"model": model_state, "optimizer": optimizer_state}
        else:
            state = before
        if size == 2:
            dcp.save(state, checkpoint_id=path)
            if rank == 0:
                torch.save(before, f"{path}.pt")
        else:
            dcp.load(state, checkpoint_id=path)
            if precision == "32-true":
                set_state_dict(
                    engine.model,
                    optimizer,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                )
            else:
                engine.load_state_dict(state)
            assert_same(engine.state_dict(), torch.load(f"{path}.pt", weights_only=False))
        engine.close()


def test_distributed_checkpoint(tmp_path: Path) -> None:
    for size in (2, 3, 1):
        (tmp_path / str(size)).mkdir()
        values(run_ranks(size, tmp_path / str(size), check_distributed_checkpoint, str(tmp_path)))


def check_take_over(rank: int, size: int) -> None:
    """An optimizer that has a state when the model is managed, and one that gets it back."""
    recipe = Recipe("32-true", steps=3)
    want, run = plain(Exact, recipe), plain(Exact, recipe)
    drive(want, ExactCase(), 3)
    drive(run, ExactCase(), 3)
    engine = gs.manage(run.model, run.optimizer, device="cpu", timeout=PATIENT, chunk_size=4096)
    case = ExactCase(rank, size)
    for step in (3, 4):
        engine.backward(case.loss(run.model, case.batch(step)))
        engine.step()
        engine.zero_grad()
    drive(want, ExactCase(), 2, first=3)
    engine.close()
    assert type(run.optimizer) is gs.HybridAdam
    assert (run.optimizer.state == {}) == (size > 1)  # whole states on every rank only on request
    for (name, got), (_, expected) in zip(
        run.model.named_parameters(), want.model.named_parameters(), strict=True
    ):
        assert_same_bits(got.detach(), expected.detach(), name)


@pytest.mark.parametrize("size", (1, 3))
def test_take_over(size: int, tmp_path: Path) -> None:
    values(run_ranks(size, tmp_path, check_take_over))


# ---- first values --------------------------------------------------------------------------------


class Net(nn.Module):
    """With initial values that are random, and a buffer that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 37)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def of_model(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def check_first_values(rank: int, size: int) -> None:
    torch.manual_seed(0)
    want = of_model(Net())
    torch.manual_seed(rank)  # rank 0's count
    model = Net()
    model.norm.running_mean += rank
    engine = manage(model, precision=None)
    assert_same(engine.model_state_dict(), want)
    assert_same_bits(model.norm.running_mean, torch.zeros(12))
    engine.close()
    torch.manual_seed(0)
    cast = gs.cast_model_(Net(), "bf16-true")  # with low parts
    masters = want
    torch.manual_seed(rank)
    model = gs.cast_model_(Net(), "bf16-true")
    engine = manage(model)
    assert_same(engine.model_state_dict(), masters)
    assert_same_bits(
        engine.model_state_dict(masters=False)["head.weight"], cast.head.weight.detach()
    )
    engine.close()
    # On the meta device: initial values with rank 0's random numbers, wherever this rank's stand.
    torch.manual_seed(5)
    with torch.device("meta"):
        plain_model = Net()
    one = plain_model.to_empty(device="cpu")
    for module in one.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    torch.manual_seed(5 + rank)
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = Net()
    engine = manage(model, precision=None)
    assert_same(engine.model_state_dict(), of_model(one))
    if rank:
        assert torch.equal(torch.get_rng_state(), before)
    engine.close()
    torch.manual_seed(5)  # the same on all of them: they stay the same
    with torch.device("meta"):
        model = Net()
    engine = manage(model, precision=None)
    numbers = torch.get_rng_state().tolist()
    engine._runtime.ranks.agree({"random numbers": numbers})
    assert numbers != before.tolist()
    engine.close()


def test_first_values(tmp_path: Path) -> None:
    values(run_ranks(3, tmp_path, check_first_values))


def check_files(rank: int, size: int, path: str) -> tuple[int, int]:
    """Each rank reads its part of the file, and what it begins and ends in."""
    from safetensors.torch import save_file

    want = torch.load(f"{path}/want.pt")
    read = []
    begin, weights_module._BEGIN = weights_module._BEGIN, 1
    rows = weights_module.WeightFiles._rows

    def counting(self: Any, name: str, top: int, bottom: int) -> Tensor:
        values = rows(self, name, top, bottom)
        read.append(values.nbytes if name not in ("norm.running_mean", "norm.running_var") else 0)
        return values

    weights_module.WeightFiles._rows = counting
    with torch.device("meta"):
        model = Net()
    engine = manage(model, precision=None, weights=f"{path}/model.safetensors")
    assert_same(engine.model_state_dict(), want)
    own = sum(4 * slot.part()[1] for slot in engine._runtime.slots)
    total = sum(4 * p.numel() for p in model.parameters())
    engine.close()
    # A row at either end, and the first one, by which the ranks tell their files from each other's.
    assert sum(read) <= own + 3 * 48 * len(want), (sum(read), own)
    weights_module.WeightFiles._rows, weights_module._BEGIN = rows, begin
    assert own <= total / size + 512 * len(want)
    other = {name: value + (rank if name == "head.weight" else 0) for name, value in want.items()}
    save_file(other, f"{path}/{rank}.safetensors")
    with torch.device("meta"):
        model = Net()
    with pytest.raises(gs.GeminiError, match=r"differ in the values of head\.weight in weights="):
        manage(model, precision=None, weights=f"{path}/{rank}.safetensors")
    return own, total


def test_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(9)
    state = of_model(Net())
    save_file(state, str(tmp_path / "model.safetensors"))
    torch.save(state, tmp_path / "want.pt")
    (tmp_path / "run").mkdir()
    parts = values(run_ranks(3, tmp_path / "run", check_files, str(tmp_path)))
    assert sum(own for own, _ in parts) == parts[0][1]


# ---- closing and failing -------------------------------------------------------------------------


def expect_warning(call: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    texts = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(texts) == 1, texts
    return texts[0]


def check_closing(rank: int, size: int) -> None:
    # All of them meet the same error, and close while they handle it: nothing is lost.
    torch.manual_seed(1)
    engine = manage(Exact())
    state = engine.model_state_dict(masters=True)  # it came in fp32
    try:
        raise ValueError("the data is at its end")
    except ValueError:
        engine.close()
    assert_same({n: v.detach() for n, v in engine.model.state_dict().items()}, state)
    # One of them: the others are told, and it keeps its part.
    engine = manage(Exact())
    if rank == 1:
        try:
            raise KeyError("batch 7")
        except KeyError:
            text = expect_warning(engine.close)
        assert "KeyError: 'batch 7'" in text and "its part of the weights only" in text
        nans = [p.isnan() for p in engine.model.parameters()]
        assert any(bool(n.any()) for n in nans) and not all(
            bool(n.all()) for n in nans if n.numel()
        )
    else:
        with pytest.raises(gs.GeminiError) as found:
            train(engine, rank, size, range(1))
        assert "rank 1 said: " in str(found.value) and "KeyError: 'batch 7'" in str(found.value)
        expect_warning(engine.close)
    assert type(engine.model.terms[0].p) is nn.Parameter
    engine.close()
    # As a context: by the exception.
    engine = manage(Exact())
    if rank == 2:
        with pytest.raises(KeyError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with engine:
                raise KeyError("batch 8")
    else:
        with pytest.raises(gs.GeminiError, match="rank 2 said: KeyError: 'batch 8'"):
            train(engine, rank, size, range(1))
        expect_warning(engine.close)
    # None of it has hurt what comes.
    with manage(Exact()) as engine:
        train(engine, rank, size, range(2))
        assert engine.grad_norm() == 0.0
    assert engine.closed


def test_closing(tmp_path: Path) -> None:
    values(run_ranks(3, tmp_path, check_closing))


def check_rank_that_goes(rank: int, size: int, where: str, how: str) -> str:
    engine = manage(Exact(), timeout=SHORT if how == "stopped" else PATIENT)
    case = ExactCase(rank, size)
    train(engine, rank, size, range(2))

    def go() -> None:
        if rank == 1:
            match how:
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "exits":
                    sys.exit(3)

    with pytest.raises(gs.GeminiError) as found:
        if where == "forward":
            go()
        loss = case.loss(engine.model, case.batch(2))
        if where == "backward":
            go()
        engine.backward(loss)
        if where == "step":
            go()
        engine.step()
        if where == "state":
            go()
        state = engine.state_dict()
        if where == "load":
            go()
        engine.load_state_dict(state)
    expect_warning(engine.close)
    return str(found.value)


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("forward", "killed"),
        ("backward", "stopped"),
        ("step", "killed"),
        ("state", "stopped"),
        ("state", "exits"),
        ("load", "killed"),
    ],
)
def test_rank_that_goes(where: str, how: str, tmp_path: Path) -> None:
    ended = run_ranks(3, tmp_path, check_rank_that_goes, where, how, timeout=120.0)
    assert ended[1].value is None
    for text in values([ended[0], ended[2]]):
        assert "rank 1" in text
        what = {"backward": "", "step": "optimizer step", "state": "(every rank has to read it)"}
        assert what.get(where, "all_gather") in text, text
        assert f"after step {3 if where in ('state', 'load') else 2}" in text, text


def check_hybrid_that_goes(rank: int, size: int) -> str:
    """Rank 3 dies. Those that have a communicator with it name it by its number in the run."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    engine = manage(Exact(), timeout=PATIENT, mesh=mesh)
    train(engine, rank, size, range(2))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gs.GeminiError) as found:
        train(engine, rank, size, range(2, 3))
    expect_warning(engine.close)
    return str(found.value)


def test_rank_of_a_mesh_that_goes(tmp_path: Path) -> None:
    ended = run_ranks(4, tmp_path, check_hybrid_that_goes)
    texts = values(ended[:3])
    assert ended[3].value is None
    for rank, text in enumerate(texts):
        assert f"rank {rank} of 4: " in text and "rank 3 is gone" in text, text
        assert "rank 1 is gone" not in text and "rank 0 is gone" not in text, text


def check_survivors(rank: int, size: int) -> None:
    """Those that are left can begin again among themselves."""
    engine = manage(Exact())
    train(engine, rank, size, range(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gs.GeminiDeviceError, match="rank 1"):
        train(engine, rank, size, range(2, 3))
    expect_warning(engine.close)
    left = dist.new_group([0, 2], use_local_synchronization=True)
    torch.manual_seed(3)
    with manage(Exact(), mesh=left) as engine:
        train(engine, dist.get_rank(left), 2, range(3))
        got = engine.model_state_dict()
    torch.manual_seed(3)
    with manage(
        Exact(), mesh=dist.new_group([dist.get_rank()], use_local_synchronization=True)
    ) as engine:
        train(engine, 0, 1, range(3))
        want = engine.model_state_dict()
    assert_same(got, want)


def test_those_that_are_left(tmp_path: Path) -> None:
    ended = run_ranks(3, tmp_path, check_survivors)
    values([ended[0], ended[2]])
