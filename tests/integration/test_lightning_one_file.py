# One ordinary file: what torch.save would write of the same values, streamed from the engine, whole or not there.

import copy
import errno
import io
import os
import pickle
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.checkpoint import one_file
from gemini_strategy.errors import GuardError
from gemini_strategy.lightning import fabric_strategy_class, strategy_class
from gemini_strategy.optim.state_dicts import state_dict as optimizer_state_dict
from gemini_strategy.parameters import absent
from gemini_strategy.state import model_state_dict
from helpers.forked import Forks
from helpers.ranks import run_ranks, values
from lightning_case import (
    fit,
    load_fabric,
    load_tree,
    make,
    make_trainer,
    ranked_trainer,
    same,
    summable,
)

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")


def trained(tree: str = "lightning", precision: str = "bf16-mixed", **options: Any) -> Any:
    if precision == "16-mixed":
        options["plugins"] = [load_tree(tree).plugins.MixedPrecision("16-mixed", "cpu")]
    else:
        options["precision"] = precision
    return fit(tree, make(tree, optimizer="AdamW", schedule="step"), **options)


def ordinary(value: Any) -> Any:
    """In place, so that pickle meets the same objects: tensors with memory of their own for stand-ins."""
    known: dict[int, torch.Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            for key in value:
                value[key] = walk(value[key])
        elif isinstance(value, list):
            value[:] = map(walk, value)
        elif absent.is_absent(value):
            if id(value) not in known:
                known[id(value)] = value.clone()
            return known[id(value)]
        return value

    return walk(value)


def records(file: Any) -> dict[str, bytes]:
    """By name, without the archive's own; reading compares checksums."""
    with zipfile.ZipFile(file) as archive:
        found = {n.partition("/")[2]: archive.read(n) for n in archive.namelist()}
    del found[".data/serialization_id"]  # of all checksums: torch makes it before there are any
    return found


def same_file(path: Path, checkpoint: Any) -> None:
    """The file is, record by record and byte by byte, what torch.save makes of the same values."""
    buffer = io.BytesIO()
    torch.save(ordinary(checkpoint), buffer)
    assert records(path) == records(buffer)
    with zipfile.ZipFile(path) as ours, zipfile.ZipFile(buffer) as theirs:
        assert [(i.filename, i.CRC, i.header_offset) for i in ours.infolist()][:-1] == [
            (i.filename, i.CRC, i.header_offset) for i in theirs.infolist()
        ][:-1]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("weights_only", [False, True])
def test_the_file_is_what_torch_saves(
    tree: str, precision: str, weights_only: bool, tmp_path: Path
) -> None:
    trainer = trained(tree, precision)
    trainer.save_checkpoint(tmp_path / "one.ckpt", weights_only=weights_only)
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only)
    same_file(tmp_path / "one.ckpt", checkpoint)
    found = torch.load(tmp_path / "one.ckpt", weights_only=True)
    engine = trainer.strategy.engine
    same(found["state_dict"], engine.model_state_dict(), "masters")
    assert all(v.dtype == torch.float32 for k, v in found["state_dict"].items() if k != "frozen")
    if not weights_only:
        state = engine.optimizer_state_dict(with_lows=False)
        same(found["optimizer_states"], [state], "states")
        assert all(
            entry[key].dtype == torch.float32
            for entry in found["optimizer_states"][0]["state"].values()
            for key in ("exp_avg", "exp_avg_sq")
        )


def test_a_plain_trainer_takes_it_and_gives_it_back(tmp_path: Path) -> None:
    ours = trained(precision="32-true")
    ours.save_checkpoint(tmp_path / "ours.ckpt")
    plain = fit(
        "lightning",
        make("lightning", seed=3, optimizer="AdamW", schedule="step"),
        "auto",
        ckpt_path=tmp_path / "ours.ckpt",
    )
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    again = fit(
        "lightning",
        make("lightning", seed=4, optimizer="AdamW", schedule="step"),
        ckpt_path=tmp_path / "plain.ckpt",
    )
    again.save_checkpoint(tmp_path / "again.ckpt")
    first, last = (torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in ("ours", "again"))
    same(last["state_dict"], first["state_dict"], "weights")
    same(last["optimizer_states"][0]["state"], first["optimizer_states"][0]["state"], "states")


class Holder:
    """An object that pickle takes apart by itself."""

    def __init__(self, value: Any) -> None:
        self.value = value


def test_hooks_use_stand_ins_as_tensors(tmp_path: Path) -> None:
    """They read, compute, replace, cut, write in place; what they leave is what the file has."""
    module = make("lightning", optimizer="AdamW", schedule="step")
    seen: dict[str, Any] = {}

    def on_save_checkpoint(checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        seen["state"] = dict(state)
        seen["before"] = {name: value.clone() for name, value in state.items()}
        weight = state["body.1.weight"]
        assert type(weight) is torch.Tensor and weight.device.type == "cpu"
        assert torch.isfinite(weight).all() and float(weight.norm()) > 0
        state["body.5.weight"] = state["body.5.weight"].half()
        state["unused"].mul_(3)
        state["gain"].numpy()[0] = 7.0
        checkpoint["more"] = {
            "tied": weight,
            "view": weight[2:5].t(),
            "bits": weight.view(torch.int32)[0].clone(),
            "copy": copy.deepcopy(state["body.3.bias"]),
            "array": np.asarray(state["body.3.weight"]).copy(),
            "holder": Holder([state["body.1.bias"], weight.expand(2, *weight.shape)]),
            "moment": checkpoint["optimizer_states"][0]["state"][0]["exp_avg"].double().sum(),
        }

    module.on_save_checkpoint = on_save_checkpoint
    trainer = fit("lightning", module, precision="bf16-mixed")
    weights = trainer.strategy.engine.model_state_dict()
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    found = torch.load(tmp_path / "one.ckpt", weights_only=False)
    same(seen["before"], weights, "as read")
    expected = dict(weights)
    expected["body.5.weight"] = weights["body.5.weight"].half()
    expected["unused"] = weights["unused"] * 3
    expected["gain"] = weights["gain"].clone()
    expected["gain"][0] = 7.0
    same(found["state_dict"], expected, "as left")
    more, weight = found["more"], weights["body.1.weight"]
    assert more["tied"] is found["state_dict"]["body.1.weight"]
    same(more["view"], weight[2:5].t())
    same(more["bits"], weight.view(torch.int32)[0])
    same(more["copy"], weights["body.3.bias"])
    assert np.array_equal(more["array"], weights["body.3.weight"].numpy())
    same(more["holder"].value, [weights["body.1.bias"], weight.expand(2, *weight.shape)])
    assert more["view"].untyped_storage().data_ptr() == more["tied"].untyped_storage().data_ptr()
    same(trainer.strategy.engine.model_state_dict(), weights, "the engine's")


def kept_by(change: Callable[[Any], Any]) -> None:
    trainer = trained()
    engine = trainer.strategy.engine
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(False)
    view = checkpoint["state_dict"]["body.1.weight"][1:3]
    weights, states = engine.model_state_dict(), engine.optimizer_state_dict(with_lows=False)
    change(trainer)
    same(checkpoint["state_dict"], weights, "weights")
    same(checkpoint["optimizer_states"], [states], "states")
    same(view, weights["body.1.weight"][1:3], "a view")
    assert not absent.is_absent(checkpoint["state_dict"]["gain"])


def step(trainer: Any) -> None:
    module = trainer.lightning_module
    batch = next(iter(module.train_dataloader()))
    trainer.strategy.engine.backward(module.loss(batch))
    trainer.strategy.engine.step()


@torch.no_grad()
def write_a_weight(trainer: Any) -> None:
    trainer.lightning_module.body[1].weight.zero_()


@pytest.mark.parametrize(
    "change",
    [
        step,
        write_a_weight,
        lambda trainer: trainer.strategy.engine.close(),
        lambda trainer: trainer.lightning_module.load_state_dict(
            {k: torch.zeros_like(v) for k, v in trainer.lightning_module.state_dict().items()}
        ),
        lambda trainer: trainer.optimizers[0].state.clear(),
    ],
    ids=["step", "write", "close", "load", "clear"],
)
def test_who_keeps_a_checkpoint_keeps_its_values(change: Callable[[Any], Any]) -> None:
    kept_by(change)


def test_a_changed_value_is_no_wrong_number(tmp_path: Path) -> None:
    """By somebody who did not say so before."""
    trainer = trained()
    state = trainer._checkpoint_connector.dump_checkpoint()["state_dict"]
    weight = trainer.lightning_module.body[1].weight
    weight._gm_slot.note_change()
    with pytest.raises(GuardError, match=r"body\.1\.weight: master in a checkpoint.*changed"):
        state["body.1.weight"].clone()
    (tmp_path / "one.ckpt").write_text("old")
    with pytest.raises(GuardError, match=r"body\.1\.weight"):
        one_file.write(state, tmp_path / "one.ckpt")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def test_other_ways_of_writing_get_ordinary_tensors(tmp_path: Path) -> None:
    """Of this moment: nobody knows when they read."""
    kept: list[Any] = []

    class Keeping(load_tree("lightning").plugins.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            kept.append(checkpoint)

    trainer = trained(plugins=[Keeping()])
    weights = trainer.strategy.engine.model_state_dict()
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    found = kept.pop()
    assert not any(map(absent.is_absent, found["state_dict"].values()))
    step(trainer)
    same(found["state_dict"], weights)


def test_pickled_by_others(tmp_path: Path) -> None:
    trainer = trained()
    weights = trainer.strategy.engine.model_state_dict()
    torch.save(trainer._checkpoint_connector.dump_checkpoint()["state_dict"], tmp_path / "one.pt")
    same(torch.load(tmp_path / "one.pt"), weights, "torch.save")
    raw = pickle.dumps(trainer._checkpoint_connector.dump_checkpoint()["state_dict"])
    same(pickle.loads(raw), weights, "pickle")
    trainer.save_checkpoint("memory://one.ckpt")
    found = load_fabric("lightning").utilities.cloud_io._load("memory://one.ckpt")
    same(found["state_dict"], weights, "another file system")


def test_fabric(tree: str, tmp_path: Path) -> None:
    fabric = load_fabric(tree).Fabric(
        accelerator="cpu", strategy=fabric_strategy_class(tree)(), precision="bf16-mixed"
    )
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    model[0].weight.data = model[0].weight.data.t().contiguous().t()  # in another order
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        fabric.backward(model(torch.ones(3, 6)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer, "n": 3, "more": torch.arange(5)}
    fabric.save(tmp_path / "one.ckpt", state)
    engine = gs.engine_of(model.module)
    expected = {
        "model": model_state_dict(engine._runtime, True, None),
        "optimizer": optimizer_state_dict(engine._runtime, engine.optimizer, with_lows=False),
        "n": 3,
        "more": torch.arange(5),
    }
    found = torch.load(tmp_path / "one.ckpt", weights_only=True)
    same(found, expected)
    assert found["model"]["0.weight"].stride() == (1, 5)
    assert zipfile.ZipFile(tmp_path / "one.ckpt").testzip() is None


# ---- old or new --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks((Path(__file__).parent,), ("lightning.pytorch", Path(__file__).stem)) as forks:
        yield forks


def killed_at(path: str, n: int) -> int:
    """Saves anew; dies at the n-th call that writes, makes durable or renames. Gives how many there are."""
    trainer = trained()
    trainer.strategy.engine.step = None
    left = n

    def count(original: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return called

    os.fsync = count(os.fsync)
    Path.replace = count(Path.replace)  # type: ignore[method-assign]
    one_file.zlib.crc32 = count(one_file.zlib.crc32)
    trainer.save_checkpoint(path)
    return n - left


def test_killed_while_it_writes(forks: Forks, tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    total = forks.run(f"{__name__}:killed_at", str(tmp_path / "other.ckpt"), 10**6)[0].value
    new = (tmp_path / "other.ckpt").read_bytes()
    assert total > 30
    torch.save("old", path)
    old = path.read_bytes()
    for n in {1, 2, total // 2, total - 2, total - 1, total}:
        path.write_bytes(old)
        ended = forks.run(f"{__name__}:killed_at", str(path), n)[0]
        assert ended.exit_code == -signal.SIGKILL, ended.how
        assert path.read_bytes() == (new if n == total else old), n
    forks.run(f"{__name__}:killed_at", str(path), 10**6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.ckpt", "other.ckpt"]
    assert path.read_bytes() == new


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained()
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    old = (tmp_path / "one.ckpt").read_bytes()
    step(trainer)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left.*one\.ckpt") as caught:
            trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert caught.value.errno == errno.ENOSPC
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [old]
    step(trainer)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert (tmp_path / "one.ckpt").read_bytes() != old


# ---- memory ------------------------------------------------------------------------------------------


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def build(tree: str = "lightning") -> Any:
    class Wide(load_tree(tree).LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.body(batch).float().square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.randn(4, 1024), batch_size=2)

    torch.manual_seed(0)
    return Wide()


def peaks(folder: str) -> dict[str, int]:
    """Bytes by which each work needs more than there was before it."""
    path = Path(folder) / "one.ckpt"
    trainer = make_trainer("lightning", precision="bf16-mixed")
    trainer.fit(build())
    assert trainer.strategy.engine._runtime.core.stats()["state_bytes"] > 250e6
    trainer.save_checkpoint(
        Path(folder) / "first.ckpt", weights_only=True
    )  # imports, and torch's own buffers
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    trainer.save_checkpoint(path)
    found = {"saving": status("VmHWM") - before}
    before = status("RssAnon")
    loaded = trainer.strategy.load_checkpoint(path)
    found["loading"] = status("RssAnon") - before
    assert path.stat().st_size > 290e6 and len(loaded["state_dict"]) == 48
    return found


def test_no_second_copy_in_memory(forks: Forks, tmp_path: Path) -> None:
    """300 MB of state; what is mapped of a file is no memory of its own."""
    ended = forks.run(f"{__name__}:peaks", str(tmp_path))[0]
    assert ended.value is not None, ended.how
    print(ended.value)
    assert ended.value["saving"] < 2 * one_file.MOST_BYTES + (16 << 20)
    assert ended.value["loading"] < 8 << 20


# ---- several ranks -----------------------------------------------------------------------------------


def saved_by_ranks(rank: int, size: int, folder: str) -> list[Any]:
    found = []
    for name, how in (("sharded", {}), ("replicas", {"enable_distributed_storage": False})):
        module = summable("lightning", 0, n_ranks=size)
        strategy = strategy_class("lightning")(report=False, **how)
        trainer = ranked_trainer(rank, size, "lightning", strategy, precision="bf16-mixed")
        trainer.fit(module)
        path = Path(folder) / f"{name}.ckpt"
        trainer.save_checkpoint(path)
        engine = trainer.strategy.engine
        weights = engine.model_state_dict()
        states = engine.optimizer_state_dict(with_lows=False)
        found.append((weights, states))
        engine.close()
    return found


def test_two_ranks(tmp_path: Path) -> None:
    for weights, states in values(run_ranks(2, tmp_path, saved_by_ranks, str(tmp_path)))[1]:
        ours = [
            torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in ("sharded", "replicas")
        ]
        for each in ours:
            same(each["state_dict"], weights)
            same(each["optimizer_states"], [states])


def go_on_without_it(rank: int, size: int, folder: str) -> tuple[str, Any]:
    """Rank 0 cannot write a file in the middle of an epoch. The loop catches that, and saves elsewhere later on."""
    module = summable("lightning", 0, n_ranks=size)
    said: list[str] = []

    def save(outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            with pytest.raises((OSError, gs.GeminiError)) as error:
                module.trainer.save_checkpoint(Path(folder) / "file" / "one.ckpt")
            said.append(str(error.value))
        elif batch_idx == 1:
            module.trainer.save_checkpoint(Path(folder) / "saved" / "one.ckpt")

    if folder:
        module.on_train_batch_end = save
    strategy = strategy_class("lightning")(report=False, timeout=20.0)
    ranked_trainer(rank, size, "lightning", strategy, precision="bf16-mixed").fit(module)
    engine = gs.engine_of(module)
    weights = engine.model_state_dict()
    engine.close()
    return "".join(said), weights


def test_a_file_that_rank_0_cannot_write_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "file").touch()
    said = values(run_ranks(2, tmp_path / "a", go_on_without_it, str(tmp_path)))
    assert str(tmp_path / "file") in said[0][0]
    path = str(tmp_path / "file" / "one.ckpt")
    assert said[1][0].startswith(f"rank 0 could not write the checkpoint {path}")
    assert (tmp_path / "saved" / "one.ckpt").is_file()
    same(said[1][1], values(run_ranks(2, tmp_path / "b", go_on_without_it, ""))[1][1])
