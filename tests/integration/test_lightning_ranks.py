# What the ranks of a Trainer say to each other and begin with, without an engine: several processes, gloo.

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gemini_strategy as gs
from gemini_strategy.lightning import strategy_class
from gemini_strategy.lightning.ranks import load_mapped
from gemini_strategy.lightning.trainer_ranks import end_processes
from helpers.ranks import run_ranks, values
from lightning_case import load_tree, ranked_trainer, same


def talk(trainer: Any, tree: str, what: Any) -> Any:
    """what(strategy), in a module's hook: where the ranks are connected."""
    found = []

    class Talk(load_tree(tree).LightningModule):
        def setup(self, stage: str) -> None:
            found.append(what(self.trainer.strategy))

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            return None

    trainer.predict(Talk(), DataLoader(torch.zeros(trainer.world_size, 1)))
    return found[0]


# ---- collectives ---------------------------------------------------------------------------------


def check_collectives(rank: int, size: int, tree: str) -> None:
    trainer = ranked_trainer(rank, size, tree)
    assert (trainer.global_rank, trainer.local_rank, trainer.world_size) == (rank, rank, size)
    assert trainer.is_global_zero == (rank == 0)
    pair = dist.new_group([0, 1])
    talk(trainer, tree, lambda strategy: check_collectives_of(strategy, rank, size, pair))


def check_collectives_of(strategy: Any, rank: int, size: int, pair: Any) -> None:
    everyone = range(size)
    mine = torch.tensor([1.0, 2.0]) * (rank + 1)
    mean = torch.tensor([1.0, 2.0]) * sum(r + 1 for r in everyone) / size
    kept = mine.clone()
    same(strategy.reduce(mine), mean)
    same(strategy.reduce(mine, reduce_op="AVG"), mean)
    same(strategy.reduce(mine, reduce_op=None), mean)
    same(strategy.reduce(mine, reduce_op="sum"), mean * size)
    same(strategy.reduce(mine, reduce_op=dist.ReduceOp.SUM), mean * size)
    same(strategy.reduce(mine, reduce_op=dist.ReduceOp.AVG), mean)
    same(strategy.reduce(mine, reduce_op="max"), torch.tensor([1.0, 2.0]) * size)
    same(mine, kept, "what was given")
    same(strategy.reduce(torch.tensor(rank), reduce_op="min"), torch.tensor(0))
    # 2^9 + 1 is no bf16 number: a sum in bf16 would lose the ones.
    halves = torch.tensor(513.0 - 512.0 * (rank > 0)).bfloat16()
    total = float(torch.tensor(513.0).bfloat16()) + (size - 1)
    same(strategy.reduce(halves, reduce_op="sum"), torch.tensor(total).bfloat16())
    assert strategy.reduce(float(rank), reduce_op="sum") == sum(everyone)
    assert strategy.reduce(rank) == sum(everyone) / size
    assert strategy.reduce("text") == "text"
    with pytest.raises(ValueError, match="reduce_op='middle'.*'mean', 'sum'"):
        strategy.reduce(mine, reduce_op="middle")
    leaf = torch.tensor(2.0 * rank, requires_grad=True)
    assert not strategy.reduce(leaf).requires_grad
    if rank < 2:
        same(strategy.reduce(mine, pair, "sum"), torch.tensor([3.0, 6.0]))
        assert strategy.reduce(rank + 1, pair, "sum") == 3
        same(strategy.all_gather(torch.tensor(rank), pair), torch.tensor([0, 1]))

    gathered = strategy.all_gather(mine)
    same(gathered, torch.stack([torch.tensor([1.0, 2.0]) * (r + 1) for r in everyone]))
    same(strategy.all_gather(torch.tensor(rank)), torch.tensor(list(everyone)))
    leaf = mine.clone().requires_grad_()
    assert not strategy.all_gather(leaf).requires_grad
    gathered = strategy.all_gather(leaf, sync_grads=True)
    weight = torch.arange(2.0 * size).view(size, 2) + 10 * rank
    (gathered * weight).sum().backward()
    # Each rank's row of every rank's weight, added up.
    same(leaf.grad, sum(torch.arange(2.0 * size).view(size, 2)[rank] + 10 * r for r in everyone))

    source = size - 1
    told = strategy.broadcast({"from": rank, "tensor": mine}, source)
    same(told, {"from": source, "tensor": torch.tensor([1.0, 2.0]) * size})
    assert strategy.broadcast(rank) == 0
    for decisions in ([True] * size, [False] * size, [r == source for r in everyone]):
        assert strategy.reduce_boolean_decision(decisions[rank]) is all(decisions)
        assert strategy.reduce_boolean_decision(decisions[rank], all=False) is any(decisions)
    store = dist.distributed_c10d._get_default_store()
    if rank == source:
        time.sleep(1.0)
        store.set("the last has come", "")
    strategy.barrier("late")
    assert store.check(["the last has come"]), "the barrier did not wait"


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size: int, tree: str, tmp_path: Path) -> None:
    values(run_ranks(size, tmp_path, check_collectives, tree))


def check_missing_rank(rank: int, size: int) -> str:
    trainer = ranked_trainer(rank, size, strategy=strategy_class("lightning")(timeout=2.0))

    def meet(strategy: Any) -> None:
        dist.barrier()  # a rank that starts late is not what is missing
        if rank == 2:
            time.sleep(6.0)
        strategy.barrier("second")

    with pytest.raises(gs.GeminiDeviceError) as error:
        talk(trainer, "lightning", meet)
    return str(error.value)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    said = values(run_ranks(3, tmp_path, check_missing_rank))
    assert "rank 0 of 3, barrier 'second'" in said[0] and "Ranks 2 failed" in said[0]
    assert "rank 1 of 3, barrier 'second'" in said[1]


# ---- data, logs ----------------------------------------------------------------------------------


def seen_and_logged(rank: int, size: int, tree: str, use_sampler: bool) -> Any:
    pl = load_tree(tree)

    class Count(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            numbers = batch[0].flatten()
            self.seen += numbers.int().tolist()
            self.log("mean", numbers.mean(), sync_dist=True, on_epoch=True)
            self.log("sum", numbers.sum(), sync_dist=True, reduce_fx="sum", on_epoch=True)

    module = Count()
    trainer = ranked_trainer(rank, size, tree, use_distributed_sampler=use_sampler)
    data = DataLoader(TensorDataset(torch.arange(12.0)[:, None]), batch_size=2)
    metrics = trainer.validate(module, data, verbose=False)[0]
    return module.seen, {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_has_its_own_data_and_logs_are_of_all(size: int, tmp_path: Path) -> None:
    found = values(run_ranks(size, tmp_path, seen_and_logged, "lightning", True))
    assert sorted(number for seen, _ in found for number in seen) == list(range(12))
    assert all(len(seen) == 12 // size for seen, _ in found)
    assert all(metrics == {"mean": 5.5, "sum": 66.0} for _, metrics in found)


def test_without_the_sampler_each_rank_has_all_data(tmp_path: Path) -> None:
    found = values(run_ranks(2, tmp_path, seen_and_logged, "pytorch_lightning", False))
    assert all(seen == list(range(12)) for seen, _ in found)
    assert all(metrics == {"mean": 5.5, "sum": 132.0} for _, metrics in found)


# ---- files, processes ----------------------------------------------------------------------------


def test_mapped_checkpoints_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    module = nn.Sequential(nn.Linear(600, 600), nn.BatchNorm1d(600))
    large = torch.randn(600, 600)
    checkpoint = {
        "state_dict": module.state_dict(),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0), "exp_avg": large}}}],
        "callbacks": {"mine": {"large": large.clone(), "best": torch.tensor(1.0)}},
        "epoch": 2,
    }
    torch.save(checkpoint, path)
    loaded = load_mapped(path, weights_only=True)
    same(loaded, dict(checkpoint))
    assert loaded["state_dict"]._metadata == checkpoint["state_dict"]._metadata
    with path.open("r+b") as file:  # what stays mapped, sees it; what others may keep, does not
        file.write(b"\0" * path.stat().st_size)
    assert torch.equal(loaded["state_dict"]["0.weight"], torch.zeros(600, 600))
    state = loaded["optimizer_states"][0]["state"][0]
    assert torch.equal(state["exp_avg"], torch.zeros(600, 600)) and state["step"] == 3
    same(loaded["callbacks"], checkpoint["callbacks"])
    same(loaded["state_dict"]["1.weight"], module.state_dict()["1.weight"])


def test_launched_processes_are_not_left_behind() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.kill(stopped.pid, signal.SIGSTOP)
    began = time.monotonic()
    end_processes([ended, stopped], grace=2.0)
    assert time.monotonic() - began > 1.5, "the grace was not given"
    assert (ended.returncode, stopped.returncode) == (0, -signal.SIGKILL)
