"""A training script, as users write them: `python lightning_gpu.py FOLDER ACCELERATOR DEVICES NODES`, or by torchrun.

DEVICES: how many, or which ones, "1,3", on each of NODES machines; a replica on each, shared by its devices. Each rank
leaves what it saw of itself in FOLDER/RANK.said.
"""

import sys
from pathlib import Path

import torch

from gemini_strategy.lightning import GeminiStrategy
from lightning_case import make_trainer, summable


def main(folder: Path, accelerator: str, devices: str, n_nodes: int) -> None:
    which = [int(word) for word in devices.split(",") if word]
    is_list = len(which) > 1 or devices.endswith(",")
    per_node = len(which) if is_list else which[0]
    n_ranks = n_nodes * per_node
    module = summable("lightning", n_ranks=n_ranks)
    trainer = make_trainer(
        "lightning",
        GeminiStrategy(report=False, timeout=60.0, device_mesh="hybrid" if n_nodes > 1 else None),
        accelerator=accelerator,
        devices=which if is_list else per_node,
        num_nodes=n_nodes,
        precision="bf16-mixed",
    )
    trainer.fit(module)
    metrics = trainer.validate(module, verbose=False)[0]
    strategy = trainer.strategy
    said = {
        "metrics": metrics,
        "seen": module.seen,
        "device": str(strategy.root_device),
        "ranks": (trainer.global_rank, trainer.world_size),
        "mean": float(strategy.reduce(torch.tensor(float(trainer.global_rank)))),
        "gathered": strategy.all_gather(torch.tensor(trainer.global_rank)).tolist(),
        "word": strategy.broadcast(f"of rank {trainer.global_rank}", src=trainer.world_size - 1),
        "any": strategy.reduce_boolean_decision(trainer.global_rank == 0, all=False),
        "stats": {key: strategy.engine.stats()[key] for key in ("replicas", "shards")},
        "launcher": type(strategy.launcher).__name__ if strategy.launcher else None,
    }
    trainer.save_checkpoint(folder / "one.ckpt")
    strategy.engine.close()  # torch's memory on a GPU answers to one engine
    again = summable("lightning", seed=7, n_ranks=n_ranks)
    said["again"] = trainer.validate(again, ckpt_path=folder / "one.ckpt", verbose=False)[0]
    torch.save(said, folder / f"{trainer.global_rank}.said")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
