"""Scripts with a Trainer on several GPUs, by Lightning's launcher and by torchrun; on the host device the same bodies.

Gradients are small integers, so weights have the bits of one process that sees all batches on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini_strategy as gs
from helpers import scripts
from helpers.lean import without_unused

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "integration"
sys.path.insert(0, str(CASES))

from lightning_case import fit_reference, reference_weights, same, summable  # noqa: E402

N_GPUS = torch.cuda.device_count()
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def gpu(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.gpu)


# accelerator, devices, whether torchrun starts the ranks, and where they must be
SCRIPTS = [
    ("cpu", "1", False, ["cpu"]),
    ("cpu", "2", False, ["cpu"] * 2),
    ("cpu", "3", True, ["cpu"] * 3),
]
SCRIPTS += [gpu("gpu", "1", False, ["cuda:0"])] if N_GPUS else []
if N_GPUS > 1:
    everywhere = [f"cuda:{i}" for i in range(N_GPUS)]
    SCRIPTS += [
        gpu("gpu", "1,", False, ["cuda:1"]),
        gpu("gpu", str(N_GPUS), False, everywhere),
        gpu("gpu", str(N_GPUS), True, everywhere),
    ]
if N_GPUS > 3:
    SCRIPTS += [gpu("gpu", "1,3", False, ["cuda:1", "cuda:3"])]


def start(folder: Path, words: list[Any]) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (without_unused(folder), CASES, ROOT)))
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, *words],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250.0,
    )


def fork(folder: Path, words: list[Any]) -> subprocess.CompletedProcess[str]:
    """tests/integration/test_lightning_launch.py starts ranks on the CPU as a person does."""
    return scripts.run(folder, words, imported=("lightning.pytorch",), paths=(CASES, ROOT))


@pytest.mark.parametrize(("accelerator", "devices", "by_torchrun", "places"), SCRIPTS)
def test_script(
    accelerator: str, devices: str, by_torchrun: bool, places: list[str], tmp_path: Path
) -> None:
    size = len(places)
    prefix = (*TORCHRUN, f"--nproc-per-node={size}") if by_torchrun else ()
    script = Path(__file__).with_name("lightning_gpu.py")
    words = [*prefix, script, tmp_path, accelerator, devices]
    done = start(tmp_path, words) if accelerator == "gpu" else fork(tmp_path, words)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [torch.load(tmp_path / f"{rank}.said", weights_only=False) for rank in range(size)]

    module = summable("lightning", 0, n_ranks=size, is_reference=True)
    if size == 1:  # Lightning gives it no sampler, which shuffles
        module.train_dataloader = lambda: module._loader(module.n_batches)
    gs.cast_model_(module, "bf16-mixed")
    trainer = fit_reference("lightning", module, precision="bf16-mixed")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)
    same(dict(saved["state_dict"]), reference_weights(module, trainer.optimizers[0]), "weights")
    assert sorted(number for own in said for number in own["seen"]) == sorted(module.seen)
    for rank, own in enumerate(said):
        assert own["device"] == places[rank] and own["ranks"] == (rank, size)
        assert own["metrics"] == own["again"] == said[0]["metrics"]
        assert own["mean"] == (size - 1) / 2 and own["any"] is True
        assert own["gathered"] == (list(range(size)) if size > 1 else 0)
        assert own["word"] == f"of rank {size - 1}"
        assert (own["launcher"] is None) == (size == 1), own["launcher"]
