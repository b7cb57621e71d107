"""Scripts with a Trainer on several GPUs, by Lightning's launcher and by torchrun; on the host device the same bodies.

Gradients are small integers, so weights have the bits of one process that sees all batches on the CPU.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import scripts
from helpers.lean import without_unused

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "integration"
sys.path.insert(0, str(CASES))

from lightning_case import (  # noqa: E402
    cast_reference,
    fit_reference,
    reference_weights,
    same,
    summable,
)

N_GPUS = torch.cuda.device_count()
TORCHRUN = ("-m", "torch.distributed.run")
SCRIPT = Path(__file__).with_name("lightning_gpu.py")


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


# accelerator, ranks of each of two nodes, and where they must be
NODES = [("cpu", 2, ["cpu"] * 4)]
if N_GPUS > 1:
    own = N_GPUS // 2
    NODES += [gpu("gpu", own, [f"cuda:{i}" for i in range(own)] * 2)]


def start(folder: Path, *agents: tuple[list[Any], dict[str, str]]) -> tuple[int, str]:
    """Exit code and words of Pythons that run together, each with its words and more of an environment."""
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (without_unused(folder), CASES, ROOT)))
    environment["OMP_NUM_THREADS"] = "1"
    started = []
    for number, (words, more) in enumerate(agents):
        with (folder / f"{number}.words").open("w") as file:
            command = [sys.executable, *map(str, words)]
            how = {"env": environment | more, "cwd": folder, "stdout": file, "stderr": file}
            started.append(subprocess.Popen(command, **how))
    try:
        codes = [process.wait(250.0) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    text = "\n".join((folder / f"{n}.words").read_text() for n in range(len(agents)))
    return max(map(abs, codes)), text


def fork(folder: Path, words: list[Any]) -> tuple[int, str]:
    """tests/integration/test_lightning_launch.py starts ranks on the CPU as a person does."""
    done = scripts.run(folder, words, imported=("lightning.pytorch",), paths=(CASES, ROOT))
    return done.returncode, done.stdout + done.stderr


def check(folder: Path, places: list[str], shape: tuple[int, int]) -> list[dict[str, Any]]:
    """What all ranks saw agrees, and their weights are those of one process. What each said is returned."""
    size = len(places)
    said = [torch.load(folder / f"{rank}.said", weights_only=False) for rank in range(size)]
    module = summable("lightning", 0, n_ranks=size, is_reference=True)
    if size == 1:  # Lightning gives it no sampler, which shuffles
        module.train_dataloader = lambda: module._loader(module.n_batches)
    cast_reference(module, "bf16-mixed")
    trainer = fit_reference("lightning", module, precision="bf16-mixed")
    saved = torch.load(folder / "one.ckpt", weights_only=False)
    same(dict(saved["state_dict"]), reference_weights(module, trainer.optimizers[0]), "weights")
    assert sorted(number for own in said for number in own["seen"]) == sorted(module.seen)
    for rank, own in enumerate(said):
        assert own["device"] == places[rank] and own["ranks"] == (rank, size)
        assert own["metrics"] == own["again"] == said[0]["metrics"]
        assert own["mean"] == (size - 1) / 2 and own["any"] is True
        assert own["gathered"] == (list(range(size)) if size > 1 else 0)
        assert own["word"] == f"of rank {size - 1}"
        assert (own["stats"]["replicas"], own["stats"]["shards"]) == shape
    return said


@pytest.mark.parametrize(("accelerator", "devices", "by_torchrun", "places"), SCRIPTS)
def test_script(
    accelerator: str, devices: str, by_torchrun: bool, places: list[str], tmp_path: Path
) -> None:
    size = len(places)
    prefix = (*TORCHRUN, "--standalone", f"--nproc-per-node={size}") if by_torchrun else ()
    words = [*prefix, SCRIPT, tmp_path, accelerator, devices, 1]
    code, text = start(tmp_path, (words, {})) if accelerator == "gpu" else fork(tmp_path, words)
    assert code == 0, text
    for own in check(tmp_path, places, (1, size)):
        assert (own["launcher"] is None) == (size == 1), own["launcher"]


@pytest.mark.parametrize(("accelerator", "per_node", "places"), NODES)
def test_two_nodes(accelerator: str, per_node: int, places: list[str], tmp_path: Path) -> None:
    """Two agents of torchrun, which share no GPU; NCCL is told that their host is two."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agents = []
    for node in range(2):
        where = [f"--nnodes=2 --node-rank={node} --master-addr=127.0.0.1", f"--master-port={port}"]
        words = [*TORCHRUN, *" ".join(where).split(), f"--nproc-per-node={per_node}"]
        own = ",".join(str(node * per_node + i) for i in range(per_node))
        more = {"CUDA_VISIBLE_DEVICES": own, "NCCL_HOSTID": f"node {node}"}
        agents.append(([*words, SCRIPT, tmp_path, accelerator, per_node, 2], more))
    code, text = start(tmp_path, *agents)
    assert code == 0, text
    check(tmp_path, places, (2, per_node))
