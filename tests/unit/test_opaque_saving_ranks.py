"""Checkpoints of states that ranks have in parts: any number of ranks saves, any other loads, with the bits of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.distributed as dist
import torchao
import transformers
from test_opaque_ranks import EVERY, Reference, Run, same
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import gemini_strategy as gs
from gemini_strategy.checkpoint.manifest import Manifest
from gemini_strategy.checkpoint.records import RecordFile
from helpers.ranks import run_ranks, values
from helpers.saving import Gate, contents

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions


# ---- optimizers ----------------------------------------------------------------------------------


class Halves(Tensor):
    """A tensor kept as its sign and its size, through a table that others have, too. It says its shape."""

    def __new__(cls, sign: Tensor, size: Tensor, table: Tensor, shape: Any) -> Halves:
        kind = {"dtype": torch.float32, "device": size.device}
        return Tensor._make_wrapper_subclass(cls, shape, **kind)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, sign: Tensor, size: Tensor, table: Tensor, shape: Any) -> None:
        self.sign_bits, self.size_bits, self.table = sign, size, table

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["sign_bits", "size_bits", "table"], (tuple(self.shape),)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Halves:
        return cls(inner["sign_bits"], inner["size_bits"], inner["table"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            inner = [getattr(args[0], name) for name in args[0].__tensor_flatten__()[0]]
            return cls(*(func(x) for x in inner), args[0].shape)
        raise NotImplementedError(func)

    def plain(self) -> Tensor:
        size = self.size_bits.float() * self.table[0]
        return torch.where(self.sign_bits, -size, size).view(self.shape)


class Wrapped(torch.optim.Optimizer):
    """Two momenta of another class of tensors with one table, and a number beside them."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    table = torch.tensor([2.0, 0.5], device=p.device)
                    for key in ("fast", "slow"):
                        flat = torch.zeros(p.numel(), dtype=torch.bfloat16, device=p.device)
                        state[key] = Halves(flat.bool(), flat, table, p.shape)
                    state["steps"] = {"done": 0}
                state["steps"]["done"] += 1
                for key, rate in (("fast", 0.5), ("slow", 0.9)):
                    kept = state[key]
                    now = kept.plain().mul_(rate).add_(p.grad.float())
                    kept.sign_bits.copy_(now.signbit().view(-1))
                    kept.size_bits.copy_((now.abs() / 2).view(-1))
                    p.sub_(now.to(p.dtype), alpha=group["lr"] / state["steps"]["done"])


def of_groups(kind: Any, **how: Any) -> Callable[[nn.Module], Any]:
    """Vectors and matrices in groups of their own; nothing that is empty, which some divide by."""

    def make(model: nn.Module) -> Any:
        given = [p for p in model.parameters() if p.numel() and p.requires_grad]
        sorts = [p for p in given if p.dim() < 2], [p for p in given if p.dim() > 1]
        return kind([{"params": sorts[0], "lr": 3e-3}, {"params": sorts[1]}], lr=1e-2, **how)

    return make


def eight_bits(model: nn.Module) -> Any:
    """It cannot step what lies column by column."""
    model.terms[0].p.requires_grad_(False)  # type: ignore[union-attr,index]
    return of_groups(bnb.optim.AdamW8bit)(model)


EVERYONE: dict[str, Callable[[nn.Module], Any]] = {
    **{name: EVERY[name] for name in ("own", "counting", "sgd", "blocks", "rows", "whole", "muon")},
    "nadam": of_groups(torch.optim.NAdam),
    "wrapped": lambda m: Wrapped(m.parameters()),
    "torchao": of_groups(torchao.optim.AdamW8bit),
    "bitsandbytes": eight_bits,
    "transformers": of_groups(
        transformers.Adafactor, scale_parameter=False, relative_step=False, warmup_init=False
    ),
}
SOME = ("own", "wrapped", "torchao", "rows", "muon")
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")
FIRST, LAST = 2, 4  # steps when it is saved, and in all


def precision_of(name: str) -> str:
    """Each has one of them."""
    if name in ("torchao", "bitsandbytes", "wrapped"):
        return "32-true"
    return PRECISIONS[[*EVERYONE].index(name) % len(PRECISIONS)]


def unused(model: nn.Module) -> None:
    """Some have no gradient, ever."""
    for number in (1, 3):
        model.terms[number].p.grad = None  # type: ignore[union-attr,index]


def train(run: Run, first: int, last: int) -> Run:
    for step in range(first, last):
        run.engine.backward(run.loss(step))
        unused(run.engine.model)
        run.finish()
    return run


def go_on(want: Reference, first: int, last: int) -> Reference:
    for step in range(first, last):
        want.backward(step)
        unused(want.model)
        want.finish()
    return want


def referred(name: str, last: int) -> Reference:
    return go_on(Reference(EVERYONE[name], precision_of(name)), 0, last)


def made(name: str, rank: int, size: int, **how: Any) -> Run:
    torch.compile = lambda step, **_: step  # type: ignore[assignment]  # torchao's, in each process
    return Run(EVERYONE[name], precision_of(name), rank, size, **how)


WAYS: list[dict[str, Any]] = [
    {"placement_policy": "cpu"},
    {"placement_policy": "cuda", "chunk_size": 1 << 16},
    {"device_budget": 1 << 20, "chunk_size": 1 << 15},
]


# ---- from any number of ranks to any other -------------------------------------------------------


def check_chain(
    rank: int, size: int, source: str, target: str, names: tuple[str, ...], last: int = LAST
) -> None:
    """Goes on with what others have saved, if they have, saves and takes two more steps.

    Some engines that load are fresh, and some have taken steps.
    """
    first = FIRST if source else 0
    for number, name in enumerate(names):
        how, want = WAYS[(number + size) % len(WAYS)], referred(name, first)
        try:
            run = train(made(name, rank, size, **how), 10, 10 + (number % 3 if source else 0))
            if source:
                run.engine.load(f"{source}/{name}")
                want.check(run.engine, precision_of(name))
            train(run, first, FIRST).engine.save(f"{target}/{name}", {"rank": rank})
            train(run, FIRST, last)
            go_on(want, first, last).check(run.engine, precision_of(name))
            run.engine.close()
        except AssertionError as error:
            raise AssertionError(f"{name}, {how}: {error}") from error


@pytest.mark.parametrize("half", [0, 1])
def test_any_number_loads_what_any_other_has_saved(half: int, tmp_path: Path) -> None:
    source = ""
    for number, size in enumerate((2, 1, 4, 3)):
        (folder := tmp_path / str(number)).mkdir()
        names = tuple(EVERYONE)[half::2]
        values(run_ranks(size, folder, check_chain, source, str(folder), names))
        source = str(folder)


def of_whole(folder: Path, name: str) -> tuple[dict[str, Any], Any]:
    """What there is in a checkpoint: tensors by name, and what is beside the ranks' own."""
    manifest = Manifest(folder / name)
    manifest.open_files()
    found = {key: manifest.whole(key) for key in manifest.tensors if not key.startswith("rank ")}
    manifest.close()
    return found, manifest.rest["optimizer"]


def test_it_has_what_one_rank_saves(tmp_path: Path) -> None:
    """Names, shapes, orders of elements and bytes, and what tools make of it. (Ranks share no tables.)"""
    names = "own", "sgd", "wrapped", "torchao", "rows", "muon"
    for size in (1, 4):
        (folder := tmp_path / str(size)).mkdir()
        values(run_ranks(size, folder, check_chain, "", str(folder), names, FIRST))
    one, four = tmp_path / "1", tmp_path / "4"
    for name in names:
        (tensors, rest), (wanted, other) = of_whole(four, name), of_whole(one, name)
        same(dict(sorted(tensors.items())), dict(sorted(wanted.items())), name)
        orders = [{k: s.order for k, s in Manifest(f / name).tensors.items()} for f in (one, four)]
        assert all(orders[0][key] == orders[1][key] for key in tensors), name
        assert json.dumps(rest, sort_keys=True) == json.dumps(other, sort_keys=True), name
        for folder in (one, four):
            dcp_to_torch_save(folder / name, folder / "one.pt")
        got, want = (torch.load(f / "one.pt", weights_only=False) for f in (four, one))
        assert got["model"].keys() == want["model"].keys()
        same(got, want, name)


def check_replicas(rank: int, size: int, folder: str) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ways: list[dict[str, Any]] = [{"mesh": mesh}, {"enable_distributed_storage": False}]
    for name in ("own", "wrapped", "muon"):
        for number, how in enumerate(ways):
            run = train(made(name, rank, size, **how), 0, FIRST)
            run.engine.save(f"{folder}/{name}{number}")
            run.engine.close()
        for number, how in enumerate(ways):
            run = made(name, rank, size, **how)
            run.engine.load(f"{folder}/{name}{1 - number}")
            train(run, FIRST, LAST)
            referred(name, LAST).check(run.engine, precision_of(name))
            run.engine.close()


def test_replicas(tmp_path: Path) -> None:
    values(run_ranks(4, tmp_path, check_replicas, str(tmp_path)))


# ---- in the background, and what fails -----------------------------------------------------------


def check_background(rank: int, size: int, folder: str) -> int:
    copied = 0
    for number, name in enumerate(SOME):
        with pytest.MonkeyPatch.context() as patch:
            gate = Gate(patch)
            run = train(made(name, rank, size, **WAYS[number % 3]), 0, FIRST)
            run.engine.save(f"{folder}/{name} now")
            saving = run.engine.save(f"{folder}/{name} later", background=True)
            train(run, FIRST, LAST)
            gate.open()
            saving.wait()
        copied += saving.copied_bytes
        assert contents(Path(f"{folder}/{name} later")) == contents(Path(f"{folder}/{name} now"))
        referred(name, LAST).check(run.engine, precision_of(name))
        run.engine.load(f"{folder}/{name} later")
        referred(name, FIRST).check(run.engine, precision_of(name))
        run.engine.close()
    return copied


@pytest.mark.parametrize("size", [2, 4])
def test_in_the_background(size: int, tmp_path: Path) -> None:
    """The bits of the call, though steps come before anything is written."""
    assert all(values(run_ranks(size, tmp_path, check_background, str(tmp_path))))


def check_full(rank: int, size: int, folder: str, is_background: bool) -> list[str]:
    """The disk of rank 1 is full after some records: nobody has a new checkpoint, all train on."""
    said = []
    for name in ("own", "blocks", "whole"):
        run = train(made(name, rank, size), 0, 2)
        run.engine.save(f"{folder}/{name}")
        before = contents(Path(f"{folder}/{name}"))
        train(run, 2, 3)
        add, left = RecordFile.add, [7]

        def full(file: RecordFile, value: Tensor, add: Any = add, left: Any = left) -> Any:
            left[0] -= 1
            if left[0] < 0 and rank == 1:
                raise OSError("no space left")
            return add(file, value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RecordFile, "add", full)
            with pytest.raises(gs.GeminiError) as caught:
                saving = run.engine.save(f"{folder}/{name}", background=is_background)
                saving.wait() if is_background else None
        said.append(str(caught.value))
        assert contents(Path(f"{folder}/{name}")) == before
        train(run, 3, LAST)
        referred(name, LAST).check(run.engine, precision_of(name))
        run.engine.save(f"{folder}/{name}")
        run.engine.close()
    return said


@pytest.mark.parametrize("is_background", [False, True])
def test_a_disk_that_is_full_on_one_rank(is_background: bool, tmp_path: Path) -> None:
    for said in values(run_ranks(2, tmp_path, check_full, str(tmp_path), is_background)):
        assert all("rank 1: no space left" in text for text in said), said


# ---- what does not fit ---------------------------------------------------------------------------


class Columns(torch.optim.Optimizer):
    """A momentum whose elements lie column by column, of what may be cut between rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() < 2:
                    p.sub_(p.grad, alpha=group["lr"] * float(p.norm()))
                    continue
                zeros = torch.zeros(p.shape[::-1], device=p.device, dtype=p.dtype)
                m = self.state[p].setdefault("columns", zeros.transpose(0, -1))
                rows = p.grad.float().flatten(1)
                norms = torch.stack([row.square().sum() for row in rows])
                m.mul_(0.9).add_(p.grad / (norms + 1).view(-1, *[1] * (p.dim() - 1)).to(p.dtype))
                p.sub_(m, alpha=group["lr"])


def refused(run: Run, call: Callable[[], Any]) -> str:
    """The call fails, and nothing has changed."""
    before = [run.engine.state_dict(), run.engine.model_state_dict()]
    with pytest.raises((gs.GeminiError, ValueError)) as caught:
        call()
    same([run.engine.state_dict(), run.engine.model_state_dict()], before, "state")
    return str(caught.value)


def check_others(rank: int, size: int, folder: str) -> list[str]:
    said = []
    for name in ("own", "rmsprop"):
        train(Run(EVERY[name], "32-true", rank, size), 0, 2).engine.save(f"{folder}/{name}")
    rmsprop = lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2, centered=True)  # noqa: E731
    for make, name, precision in (
        (EVERY["own"], "rmsprop", "32-true"),
        (rmsprop, "rmsprop", "32-true"),
        (EVERY["rmsprop"], "rmsprop", "bf16-true"),
        (lambda m: torch.optim.AdamW(m.parameters()), "own", "32-true"),
        (EVERY["own"], "nothing", "32-true"),
    ):
        run = Run(make, precision, rank, size)
        for n_steps in (0, 2):
            train(run, 0, n_steps)
            text = refused(run, lambda run=run, name=name: run.engine.load(f"{folder}/{name}"))
        said.append(text)
        run.engine.close()
    return said


def test_what_does_not_fit(tmp_path: Path) -> None:
    """It is named on all ranks."""
    for said in values(run_ranks(2, tmp_path, check_others, str(tmp_path))):
        wanted = (
            ("RMSprop", "Elementwise", "model_only=True"),
            ("the state of", "grad_avg"),
            ("the state of", "float32", "bfloat16"),
            ("Elementwise", "AdamW"),
            ("nothing",),
        )
        for text, parts in zip(said, wanted, strict=True):
            assert all(part in text for part in parts), text


def check_columns(rank: int, size: int, folder: str) -> list[str]:
    make = lambda m: Columns(m.parameters(), {"lr": 0.01})  # noqa: E731
    run = train(Run(make, "32-true", rank, size), 0, 2)
    said = [refused(run, lambda: run.engine.save(f"{folder}/parts"))] if size > 1 else []
    if size == 1:
        run.engine.save(f"{folder}/one")
    else:
        said += [refused(run, lambda: run.engine.load(f"{folder}/one"))]
    train(run, 2, 3).engine.close()
    return said


def test_elements_that_lie_column_by_column(tmp_path: Path) -> None:
    for size in (1, 2):
        (folder := tmp_path / str(size)).mkdir()
        found = values(run_ranks(size, folder, check_columns, str(tmp_path)))
    assert all("columns" in text and "row by row" in text for said in found for text in said)
    assert not (tmp_path / "parts").exists()


def check_program(rank: int, size: int, folder: str) -> None:
    """What a program has put into states and groups, and has dropped, is saved and loaded, too."""
    make = lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9)  # noqa: E731
    run = train(Run(make, "32-true", rank, size), 0, 2)
    parameters = [p for p in run.engine.model.parameters() if p.requires_grad]
    run.made.state[parameters[2]]["mine"] = {"number": 7, "scale": torch.tensor(0.5)}
    run.made.state[parameters[5]]["momentum_buffer"].mul_(2)
    run.made.param_groups[0]["lr"] = 5e-3
    del run.made.state[parameters[6]]
    run.engine.save(f"{folder}/program")
    want = run.made.state_dict()
    other = train(Run(make, "32-true", rank, size, **WAYS[1]), 4, 6)
    other.engine.load(f"{folder}/program")
    same(other.made.state_dict(), want, "states")
    train(run, 2, 4)
    train(other, 2, 4)
    same(other.made.state_dict(), run.made.state_dict(), "states")
    same(other.engine.model_state_dict(), run.engine.model_state_dict(), "model")
    run.engine.close()
    other.engine.close()


@pytest.mark.parametrize("size", [2, 4])
def test_what_a_program_has_put_there(size: int, tmp_path: Path) -> None:
    values(run_ranks(size, tmp_path, check_program, str(tmp_path)))
