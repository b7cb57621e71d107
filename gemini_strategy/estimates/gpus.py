"""GPUs by name, and the hosts around them: what data sheets say. Needs no torch.

Memory, its bandwidth, and dense products per second (bf16 with fp32 sums; fp32 without tensor cores) are NVIDIA's
figures: the data sheets of V100, T4, A10, A100, L4, L40S, H100, H200 and B200, and the whitepapers of the architectures
GA102 (RTX 3090, A6000), AD102 (RTX 4090, 6000 Ada) and GB202 (RTX 5090). Data sheets give twice the products where they
count zeros ("with sparsity"); here is the half. `lanes` is the generation of PCIe with 16 lanes, `nvlink` what a GPU
sends over its links at once, half of the figure that counts both ways; bridges between two cards do not count.

A host is a server, whose figures are those of machine.rates.REFERENCE, or a desktop: two channels of DDR5-5600 carry
89.6 GB/s, of which 70 GB/s are taken to be had. Adam on the host and the copies of the GPU share them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = "a server of 16 cores"
DESKTOP = "a desktop with two channels of DDR5"
DESKTOP_BANDWIDTH = 70e9  # bytes/s, of its host's memory


@dataclass(frozen=True)
class Gpu:
    memory: float  # bytes
    bandwidth: float  # bytes/s
    half: float  # products and sums per second, dense
    single: float
    lanes: int
    nvlink: float = 0.0  # bytes/s one way
    host: str = SERVER


GPUS: dict[str, Gpu] = {
    "v100": Gpu(32e9, 0.900e12, 125e12, 15.7e12, 3, 0.150e12),
    "t4": Gpu(16e9, 0.320e12, 65e12, 8.1e12, 3),
    "a10": Gpu(24e9, 0.600e12, 125e12, 31.2e12, 4),
    "a100-40gb": Gpu(40e9, 1.555e12, 312e12, 19.5e12, 4, 0.300e12),
    "a100": Gpu(80e9, 2.039e12, 312e12, 19.5e12, 4, 0.300e12),
    "a6000": Gpu(48e9, 0.768e12, 154.8e12, 38.7e12, 4),
    "rtx3090": Gpu(24e9, 0.936e12, 71e12, 35.6e12, 4, host=DESKTOP),
    "rtx4090": Gpu(24e9, 1.008e12, 165.2e12, 82.6e12, 4, host=DESKTOP),
    "rtx5090": Gpu(32e9, 1.792e12, 209.5e12, 104.8e12, 5, host=DESKTOP),
    "rtx6000ada": Gpu(48e9, 0.960e12, 364.2e12, 91.1e12, 4),
    "l4": Gpu(24e9, 0.300e12, 121e12, 30.3e12, 4),
    "l40s": Gpu(48e9, 0.864e12, 362e12, 91.6e12, 4),
    "h100-pcie": Gpu(80e9, 2.0e12, 756e12, 51e12, 5),
    "h100": Gpu(80e9, 3.35e12, 989e12, 67e12, 5, 0.450e12),
    "h200": Gpu(141e9, 4.8e12, 989e12, 67e12, 5, 0.450e12),
    "b200": Gpu(180e9, 8.0e12, 2250e12, 75e12, 5, 0.900e12),
}

NO_GPU = f"gpu: none is here, so name the one that is meant: {', '.join(GPUS)}"


def may_be_here() -> bool:
    """Whether this machine has the driver of a GPU (/dev/dxg: under Windows), which torch may not be able to use."""
    return any(Path("/dev").glob("nvidia*")) or Path("/dev/dxg").exists()


def plain(name: str) -> str:
    """Without what does not count in a GPU's name."""
    return re.sub(r"nvidia|geforce|[\s_-]", "", name.lower())


def name_of(gpu: str) -> str:
    """The name in GPUS; case, spaces and "NVIDIA", "GeForce" do not count.

    Raises:
        ValueError: no GPU has that name.
    """
    names = {plain(name): name for name in GPUS}
    if plain(gpu) not in names:
        raise ValueError(f"no figures for the GPU {gpu!r}: known are {', '.join(GPUS)}")
    return names[plain(gpu)]


def read_rates(path: str | Path) -> Mapping[str, Any]:
    """The figures of a file that `gemini-strategy profile --json`, or a person, has written.

    Raises:
        ValueError: it cannot be read, or holds no object.
    """
    try:
        figures = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"rates: {path} cannot be read as JSON: {error}") from error
    if not isinstance(figures, Mapping):
        raise ValueError(f"rates: {path} holds no object of figures")
    return figures
