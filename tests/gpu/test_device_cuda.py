"""The CUDA device, its kernels, host calls and torch's allocator, exercised from C (tests/c/gpu_device.c)."""

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


def test_device_program():
    subprocess.run(["bash", ROOT / "tests/c/run_gpu.sh", "--build-only"], check=True)
    done = subprocess.run([ROOT / "build/gpu/gpu_device"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [line.removesuffix(": ok") for line in done.stdout.splitlines()]
    assert parts == [
        "mapping errors",
        "poison",
        "threads",
        "aliasing",
        "host calls",
        "elapsed",
        "adam",
        "grad_add",
        "sumsq",
        "clip",
        "torch_alloc",
        "long sumsq",
    ]
