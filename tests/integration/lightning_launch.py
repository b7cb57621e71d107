"""A training script, as users write them: `python lightning_launch.py FOLDER N WHAT RANK`, or the same with torchrun.

WHAT happens in the third batch on RANK: nothing, raise, reduce (alone), kill or stop.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from gemini_strategy.lightning import GeminiStrategy
from lightning_case import make_trainer, summable


def main(folder: Path, size: int, what: str, where: int) -> None:
    module = summable("lightning", int(os.environ.get("LOCAL_RANK", 0)), n_ranks=size)

    def act(batch: Any, batch_idx: int) -> None:
        if batch_idx != 2 or module.global_rank != where:
            return
        if what == "raise":
            raise ArithmeticError("this rank has had enough")
        if what == "reduce":
            module.trainer.strategy.reduce(torch.ones(3))
        elif what != "nothing":
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])

    module.on_train_batch_start = act
    trainer = make_trainer(
        "lightning",
        GeminiStrategy(report=False, timeout=10.0 if what in ("reduce", "stop") else 20.0),
        devices=size,
        precision="bf16-mixed",
    )
    (folder / f"{os.getpid()}.pid").touch()
    trainer.fit(module)
    metrics = trainer.validate(module, verbose=False)[0]
    trainer.save_checkpoint(folder / "one.ckpt")
    said = {"world_size": trainer.world_size, "metrics": metrics, "seen": module.seen}
    torch.save(said, folder / f"{trainer.global_rank}.said")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
