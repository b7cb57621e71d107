"""Communicators over NCCL without a GPU: tests/c plays NCCL and the driver, under the sanitizers.

What NCCL is asked, and each way in which it can fail to answer.
cuda.h is the one of the package nvidia-cuda-runtime, so that every machine builds against the same.
"""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import files
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMM = ("comm", "nccl", "nccl_call", "nccl_load")
CORE = ["csrc/base/base.c", "csrc/device/cuda/driver.c", *(f"csrc/comm/{name}.c" for name in COMM)]


def compile_c(*words: str) -> None:
    header = next(f for f in files("nvidia-cuda-runtime") or () if f.name == "cuda.h").locate()
    flags = ["-std=c11", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
    flags += ["-DGM_WITH_CUDA", "-DGM_DEBUG", "-Icsrc", "-isystem", str(Path(header).parent)]
    subprocess.run(["cc", *flags, *words], cwd=ROOT, check=True)


@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_communicator_against_a_played_nccl(sanitize: str, tmp_path: Path) -> None:
    how = [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-ldl", "-lm"]
    library, program = tmp_path / "libnccl.so.2", tmp_path / "fake_comm"
    played = ["tests/c/fake_nccl.c", "tests/c/fake_driver.c"]
    compile_c("-shared", "-fPIC", *played, "-o", str(library), *how)
    (tmp_path / "libcuda.so.1").symlink_to(library)
    compile_c("tests/c/fake_comm.c", *CORE, "-o", str(program), *how)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "fake_comm: ok" in done.stdout, done.stdout + done.stderr


def test_core_compiles_for_cuda_without_a_toolkit() -> None:
    """Each file that has a part for CUDA; the kernels need nvcc."""
    parts = [p for p in (ROOT / "csrc").rglob("*.c") if "GM_WITH_CUDA" in p.read_text("utf-8")]
    assert len(parts) >= len(CORE) - 1
    compile_c("-fsyntax-only", *(str(p) for p in parts if p.parent.name != "binding"))
