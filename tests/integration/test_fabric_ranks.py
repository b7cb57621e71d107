# Fabric with several processes: the bits of one that sees all batches, files, collectives, and scripts that launch.

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, TensorDataset

import gemini_strategy as gs
from fabric_case import make_fabric, ranked_fabric
from gemini_strategy.lightning import fabric_strategy_class
from helpers import scripts
from helpers.lean import without_unused
from helpers.ranks import run_ranks, values
from lightning_case import (
    RANK_BATCH,
    cast_reference,
    load_fabric,
    reference_weights,
    same,
    same_adam,
    summable,
)

STEPS = 4
HERE = Path(__file__).parent


def numbers(step: int, size: int) -> torch.Tensor:
    """The batches of all ranks, one after the other."""
    return torch.arange(RANK_BATCH * size) * 7 + 3 + step


def train(fabric: Any, module: Any, model: Any, optimizer: Any, first: int = 0) -> None:
    for step in range(first, first + STEPS):
        mine = numbers(step, fabric.world_size).split(RANK_BATCH)[fabric.global_rank]
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            fabric.backward(model.loss(mine))
        if step % 2:
            module.norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
            optimizer.step()
            optimizer.zero_grad()


def ready(fabric: Any, tree: str, seed: int, in_two_steps: bool = False) -> Any:
    module = summable(tree, seed, n_ranks=fabric.world_size)
    module.norms = []
    if in_two_steps:
        model = fabric.setup_module(module)
        optimizer = fabric.setup_optimizers(module.configure_optimizers())
    else:
        model, optimizer = fabric.setup(module, module.configure_optimizers())
    model.mark_forward_method("loss")
    return module, model, optimizer


def trained(rank: int, size: int, tree: str, precision: str, how: Any, folder: Path) -> Any:
    strategy = fabric_strategy_class(tree)(chunk_size=4096, initial_scale=16.0, **how)
    fabric = ranked_fabric(rank, size, tree, strategy=strategy, precision=precision)
    module, model, optimizer = ready(fabric, tree, seed=rank, in_two_steps=size == 3)
    train(fabric, module, model, optimizer)
    engine = gs.engine_of(model)
    weights = fabric.strategy.get_module_state_dict(model._forward_module)
    adam = optimizer.state_dict()
    fabric.save(folder / "ranks.ckpt", {"model": model, "optimizer": optimizer, "step": STEPS})
    part = sum(engine._runtime.core.part(slot.id)[1] for slot in engine._runtime.slots)

    again, its_model, its_optimizer = ready(fabric, tree, seed=9)
    state = {"model": its_model, "optimizer": its_optimizer, "step": 0}
    assert fabric.load(folder / "ranks.ckpt", state) == {} and state["step"] == STEPS
    if precision == "16-mixed":
        gs.engine_of(its_model).scaler.load_state_dict(engine.scaler.state_dict())
    train(fabric, again, its_model, its_optimizer, first=STEPS)
    train(fabric, module, model, optimizer, first=STEPS)
    same(gs.engine_of(its_model).state_dict(), engine.state_dict(), "resumed")
    gs.engine_of(its_model).close()
    engine.close()
    return weights, adam, module.norms, part


def reference(size: int, tree: str, precision: str) -> Any:
    module = summable(tree, 0, n_ranks=size)
    cast_reference(module, precision)
    optimizer = module.configure_optimizers()
    norms = []
    power = 2 ** (size.bit_length() - 1)
    kept: dict[Any, torch.Tensor] = {}
    for step in range(STEPS):
        module.loss(numbers(step, size)).backward()
        for parameter in module.parameters():  # each backward is averaged, then added
            if parameter.grad is not None:
                mean = parameter.grad.div_(power).div_(size / power)
                kept[parameter] = kept[parameter] + mean if parameter in kept else mean
                parameter.grad = None
        if step % 2:
            for parameter in list(kept):
                parameter.grad = kept.pop(parameter)
            norms.append(float(optimizer.clip_grad_norm_(0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return reference_weights(module, optimizer), optimizer.state_dict(), norms


@pytest.mark.parametrize(
    ("size", "tree", "precision", "how"),
    [
        (2, "lightning", "32-true", {}),
        (2, "pytorch_lightning", "bf16-mixed", {"enable_distributed_storage": False}),
        (2, "lightning", "bf16-true", {"placement_policy": "cpu"}),
        (3, "lightning", "32-true", {}),
    ],
)
def test_ranks_have_the_bits_of_one(
    size: int, tree: str, precision: str, how: Any, tmp_path: Path
) -> None:
    found = values(run_ranks(size, tmp_path, trained, tree, precision, how, tmp_path))
    weights, adam, norms = reference(size, tree, precision)
    same(dict(found[0][0]), weights, "weights")
    same_adam(found[0][1], adam)
    assert found[0][2][: len(norms)] == norms
    assert all(not rank[0] and not rank[1] for rank in found[1:])
    if how.get("enable_distributed_storage", True):
        n = sum(value.numel() for value in weights.values())
        assert all(rank[3] < n for rank in found)

    # One process goes on from their file.
    fabric = make_fabric(tree, precision=precision)
    _, model, _ = ready(fabric, tree, seed=5)
    fabric.load(tmp_path / "ranks.ckpt", {"model": model})
    same(dict(gs.engine_of(model).model_state_dict()), weights)
    gs.engine_of(model).close()


def talk(rank: int, size: int, tree: str) -> Any:
    fabric = ranked_fabric(rank, size, tree)
    assert (fabric.global_rank, fabric.local_rank, fabric.world_size) == (rank, rank, size)
    value = torch.tensor([1.0, 2.0]) * (rank + 1)
    shared = fabric.all_reduce(value, reduce_op="sum")
    assert shared is value
    same(value, torch.tensor([3.0, 6.0]))
    same(fabric.all_reduce(torch.tensor(float(rank))), torch.tensor(0.5))
    same(fabric.all_reduce({"n": float(rank)}), {"n": torch.tensor(0.5)})
    same(fabric.all_gather(torch.tensor(rank)), torch.tensor([0, 1]))
    leaf = torch.tensor(1.0, requires_grad=True)
    (fabric.all_gather(leaf, sync_grads=True) * torch.tensor([1.0, 10.0])).sum().backward()
    assert leaf.grad == (2.0 if rank == 0 else 20.0)
    assert fabric.broadcast({"rank": rank}, src=1) == {"rank": 1}
    fabric.barrier("here")
    assert fabric.strategy.reduce_boolean_decision(rank == 0, all=False)
    assert not fabric.strategy.reduce_boolean_decision(rank == 0)
    data = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    return [int(n) for (batch,) in fabric.setup_dataloaders(data) for n in batch]


def test_ranks_talk_and_share_the_data(tree: str, tmp_path: Path) -> None:
    seen = values(run_ranks(2, tmp_path, talk, tree))
    assert sorted(seen[0] + seen[1]) == list(range(8)) and len(seen[0]) == 4


def save_in_vain(rank: int, size: int, folder: Path) -> str:
    fabric = ranked_fabric(rank, size)
    module, model, optimizer = ready(fabric, "lightning", seed=0)
    path = folder / "file" / "one.ckpt"
    (folder / "file").touch()
    with pytest.raises((OSError, RuntimeError)) as error:
        fabric.save(path, {"model": model})
    train(fabric, module, model, optimizer)  # all go on
    gs.engine_of(model).close()
    return str(error.value)


def test_a_file_that_rank_0_cannot_write_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    said = values(run_ranks(2, tmp_path, save_in_vain, tmp_path))
    path = str(tmp_path / "file" / "one.ckpt")
    assert str(tmp_path / "file") in said[0]
    assert said[1].startswith(f"rank 0 could not write the checkpoint {path}")


def test_devices_must_fit_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    # The rank is Lightning's for the whole process: what is set here goes with the test.
    for only in (rank_zero_only, load_fabric("lightning").utilities.rank_zero.rank_zero_only):
        monkeypatch.setattr(only, "rank", getattr(only, "rank", 0))
    error = load_fabric("lightning").utilities.exceptions.MisconfigurationException
    strategy = fabric_strategy_class("lightning")(device_mesh=(2, 3))
    with pytest.raises(error, match=r"GeminiFabricStrategy\(device_mesh=.* the Fabric has 1"):
        make_fabric(strategy=strategy)
    for name, value in {
        "TORCHELASTIC_RUN_ID": "1",
        "WORLD_SIZE": "4",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=r"Fabric\(devices=2, num_nodes=1\) is for 2 processes.*4"):
        make_fabric(devices=2)


SCRIPT = """
import sys
import torch
import lightning
import gemini_strategy as gs
import gemini_strategy.lightning

fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="gemini")
fabric.launch()
torch.manual_seed(fabric.global_rank)
model = torch.nn.Linear(4, 4)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
for step in range(3):
    if sys.argv[1:] == ["raise", str(fabric.global_rank)] and step == 1:
        raise ArithmeticError("this rank has had enough")
    fabric.backward(model(torch.ones(2, 4) * fabric.global_rank).square().mean())
    optimizer.step()
    optimizer.zero_grad()
fabric.save("launched.ckpt", {"model": model})
fabric.print("world size", fabric.world_size)
"""


def run_script(folder: Path) -> tuple[int, str]:
    (folder / "script.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join([without_unused(folder), str(HERE.parents[1])])
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_script_launches_its_ranks(tmp_path: Path) -> None:
    code, text = run_script(tmp_path)
    assert code == 0, text
    assert text.count("world size 2") == 1
    assert set(torch.load(tmp_path / "launched.ckpt")["model"]) == {"weight", "bias"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_ends_the_script(rank: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["script.py", "raise", rank]
    done = scripts.run(tmp_path, words, imported=("lightning.pytorch",))
    code, text = done.returncode, done.stdout + done.stderr
    assert code != 0 and "this rank has had enough" in text
    assert not (tmp_path / "launched.ckpt").exists()
