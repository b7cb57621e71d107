"""GPUs by name: what their vendors' data sheets say, and what of it a training step gets.

Memory, its bandwidth, and dense products per second (bf16 with fp32 sums; fp32 without tensor cores) are NVIDIA's
figures: the data sheets of V100, T4, A10, A100, L4, L40S, H100, H200 and B200, and the whitepapers of the architectures
GA102 (RTX 3090, A6000), AD102 (RTX 4090, 6000 Ada) and GB202 (RTX 5090). Data sheets give twice the products where they
count zeros ("with sparsity"); here is the half. `lanes` is the generation of PCIe with 16 lanes, `nvlink` what a GPU
sends over its links at once, half of the figure that counts both ways; bridges between two cards do not count.

What of this a step gets is measured on one H200: 0.9 of the bandwidth (a copy), and 0.73 of the products, with which
the compute times that benchmarks/results/offload_h200.jsonl keeps come out (0.63 to 0.67 s; a product alone gets 0.8).
Other GPUs are assumed to get the same shares. Collectives get half of the links: on 4 H200 a gather of 256 MiB has
225 GB/s of 450 for each GPU (benchmarks/results/sharded_h200.jsonl, "nccl"). GPUs without NVLink are taken to get the
same share of PCIe, which has not been measured. Rates that were measured replace all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gemini_strategy import _C
from gemini_strategy.estimates.tensors import Work
from gemini_strategy.machine.rates import REFERENCE, completed
from gemini_strategy.report.tables import host_resident_bytes

_OF_PRODUCTS = 0.73
_OF_BANDWIDTH = 0.9
_OF_LINK = 0.5
_LEAST_SECONDS = 4e-6  # of one kernel, its launch included
_REFERENCE_LANES = 5  # the machine of REFERENCE
_REFERENCE_BANDWIDTH = 4.8e12
_REFERENCE_PCIE = 64e9  # bytes/s one way


@dataclass(frozen=True)
class _Gpu:
    memory: float  # bytes
    bandwidth: float  # bytes/s
    half: float  # products and sums per second, dense
    single: float
    lanes: int
    nvlink: float = 0.0  # bytes/s one way


GPUS: dict[str, _Gpu] = {
    "v100": _Gpu(32e9, 0.900e12, 125e12, 15.7e12, 3, 0.150e12),
    "t4": _Gpu(16e9, 0.320e12, 65e12, 8.1e12, 3),
    "a10": _Gpu(24e9, 0.600e12, 125e12, 31.2e12, 4),
    "a100-40gb": _Gpu(40e9, 1.555e12, 312e12, 19.5e12, 4, 0.300e12),
    "a100": _Gpu(80e9, 2.039e12, 312e12, 19.5e12, 4, 0.300e12),
    "a6000": _Gpu(48e9, 0.768e12, 154.8e12, 38.7e12, 4),
    "rtx3090": _Gpu(24e9, 0.936e12, 71e12, 35.6e12, 4),
    "rtx4090": _Gpu(24e9, 1.008e12, 165.2e12, 82.6e12, 4),
    "rtx5090": _Gpu(32e9, 1.792e12, 209.5e12, 104.8e12, 5),
    "rtx6000ada": _Gpu(48e9, 0.960e12, 364.2e12, 91.1e12, 4),
    "l4": _Gpu(24e9, 0.300e12, 121e12, 30.3e12, 4),
    "l40s": _Gpu(48e9, 0.864e12, 362e12, 91.6e12, 4),
    "h100-pcie": _Gpu(80e9, 2.0e12, 756e12, 51e12, 5),
    "h100": _Gpu(80e9, 3.35e12, 989e12, 67e12, 5, 0.450e12),
    "h200": _Gpu(141e9, 4.8e12, 989e12, 67e12, 5, 0.450e12),
    "b200": _Gpu(180e9, 8.0e12, 2250e12, 75e12, 5, 0.900e12),
}


@dataclass(frozen=True)
class Machine:
    """How fast one GPU with its host is.

    Attributes:
        name: for people.
        memory: bytes of the GPU; None: not known.
        rates: those of `machine.rates.REFERENCE`.
        half, single: products and sums per second that matrix products get, with 16-bit operands and with fp32 ones.
        bandwidth: bytes/s that other operations get.
        link: bytes/s that collectives get out of each GPU; 0: they are taken to cost no time.
        host_memory: bytes of its host that a process finds free; None: not known.
    """

    name: str
    memory: int | None
    rates: Mapping[str, float]
    half: float
    single: float
    bandwidth: float
    link: float = 0.0
    host_memory: int | None = None

    def collective_rate(self, n_ranks: int) -> float:
        """Bytes/s of all ranks' shards together that a gather or a reduction moves: each sends all but its own."""
        return self.link * n_ranks / (n_ranks - 1) if n_ranks > 1 else 0.0

    def seconds(self, work: Work) -> float:
        """Of one operation by itself: its products or its bytes, whichever takes longer."""
        products = work.flops / (self.half if work.is_half else self.single)
        return max(products, work.moved / self.bandwidth, _LEAST_SECONDS)


def _of_gpu(name: str) -> Machine:
    gpu = GPUS[name]
    by_link = gpu.lanes - _REFERENCE_LANES  # each generation of PCIe doubles
    rates = {}
    for key, value in REFERENCE.items():
        if key.startswith(("h2d", "d2h")):
            value *= 2.0**by_link
        elif key == "device_adam":
            value *= gpu.bandwidth / _REFERENCE_BANDWIDTH
        rates[key] = value
    return Machine(
        name,
        int(gpu.memory),
        rates,
        gpu.half * _OF_PRODUCTS,
        gpu.single * _OF_PRODUCTS,
        gpu.bandwidth * _OF_BANDWIDTH,
        _OF_LINK * (gpu.nvlink or _REFERENCE_PCIE * 2.0**by_link),
    )


_OWN = ("half", "single", "bandwidth", "link")  # a Machine's figures beside its rates


def _present() -> tuple[Any, str | None]:
    """What torch says of the GPU that this process has, and its name in GPUS."""
    about = torch.cuda.get_device_properties(torch.cuda.current_device())
    near = [name for name in GPUS if _plain(name) in _plain(about.name)]
    return about, max(near, key=len, default=None)


def is_here(gpu: str | None) -> bool:
    """Whether this process has such a GPU; gpu: as for machine_of, which knows it."""
    if gpu is None or not torch.cuda.is_available():
        return gpu is None
    _, known = _present()
    return known is not None and _plain(known) == _plain(gpu)


def with_host(machine: Machine) -> Machine:
    """The same with the memory of this host: what is free, and what this process has, as the one that trains is another
    or this one."""
    free = int(_C.host_topology()["memory"])
    return replace(machine, host_memory=free + host_resident_bytes())


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|[\s_-]", "", name.lower())


def machine_of(gpu: str | None, rates: str | Path | Mapping[str, Any] | None = None) -> Machine:
    """A machine from the table, with rates that were measured in the place of the table's.

    Args:
        gpu: a name of GPUS; case, spaces and "NVIDIA", "GeForce" do not count. None: the one that is here.
        rates: figures by name, or a JSON file of them: those of `GEMINI_RATES` (h2d, d2h, host_adam, ...; the files in
            ~/.cache/gemini have them under "rates"), and of the GPU's own work "half", "single" (products and sums per
            second of matrix products), "bandwidth" and, between ranks, "link" (bytes/s).

    Raises:
        ValueError: no GPU has that name, or a figure is unknown or not positive.
    """
    if gpu is None:
        if not torch.cuda.is_available():
            raise ValueError(f"gpu: none is here, so name the one that is meant: {', '.join(GPUS)}")
        about, known = _present()
        if known is None:
            raise ValueError(f"no figures for this GPU, {about.name}: known are {', '.join(GPUS)}")
        machine = replace(_of_gpu(known), name=about.name, memory=about.total_memory)
    else:
        names = {_plain(name): name for name in GPUS}
        if _plain(gpu) not in names:
            raise ValueError(f"no figures for the GPU {gpu!r}: known are {', '.join(GPUS)}")
        machine = _of_gpu(names[_plain(gpu)])
    if rates is None:
        return machine
    figures = rates
    if not isinstance(rates, Mapping):
        try:
            figures = json.loads(Path(rates).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"rates: {rates} cannot be read as JSON: {error}") from error
    if not isinstance(figures, Mapping):
        raise ValueError(f"rates: {rates} holds no object of figures")
    figures = dict(figures.get("rates", figures))
    own = {name: float(figures.pop(name)) for name in _OWN if name in figures}
    if any(not value > 0 for value in own.values()):
        raise ValueError(f"rates: {own}: positive numbers are wanted")
    given = completed(figures, machine.rates) if figures else machine.rates
    return replace(machine, rates=given, **own)
