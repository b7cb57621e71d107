"""A GPU with its host, as an estimate counts on it: what of the data sheets' figures (gpus.py) a training step gets.

That share is measured on one H200: 0.9 of the bandwidth (a copy), and 0.73 of the products, with which the times of
compute that benchmarks/results/offload_h200.jsonl keeps come out (0.63 to 0.67 s; a product alone gets 0.8). Other GPUs
are assumed to get the same shares. Collectives get half of the links: on 4 H200 a gather of 256 MiB has 225 GB/s of 450
for each GPU (benchmarks/results/sharded_h200.jsonl, "nccl"). GPUs without NVLink are taken to get the same share of
PCIe, which has not been measured. Rates that were measured replace all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gemini_strategy import _C
from gemini_strategy.estimates.gpus import (
    DESKTOP,
    DESKTOP_BANDWIDTH,
    GPUS,
    NO_GPU,
    name_of,
    plain,
    read_rates,
)
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
# Bytes of the host's memory that Adam reads and writes for a bf16 parameter: weight, remainder and moments both ways,
# and the gradient.
_ADAM_BYTES = 26


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
        host: what kind of host the rates are of, for people; "": not said.
        measured: of the names of rates and "half", "single", "bandwidth", "link" those that are no assumption.
    """

    name: str
    memory: int | None
    rates: Mapping[str, float]
    half: float
    single: float
    bandwidth: float
    link: float = 0.0
    host_memory: int | None = None
    host: str = ""
    measured: frozenset[str] = frozenset()

    def collective_rate(self, n_ranks: int) -> float:
        """Bytes/s of all ranks' shards together that a gather or a reduction moves: each sends all but its own."""
        return self.link * n_ranks / (n_ranks - 1) if n_ranks > 1 else 0.0

    def seconds(self, work: Work) -> float:
        """Of one operation by itself: its products or its bytes, whichever takes longer."""
        products = work.flops / (self.half if work.is_half else self.single)
        return max(products, work.moved / self.bandwidth, _LEAST_SECONDS)


def _within(rates: dict[str, float], bandwidth: float) -> dict[str, float]:
    """The rates of a host whose memory carries so much, of which Adam and the copies that run at once have each its
    part of the whole."""
    whole = dict(rates)
    for together in (
        ("h2d",),
        ("d2h",),
        ("host_adam",),
        ("h2d_both", "d2h_both"),
        ("h2d_beside", "d2h_beside", "host_adam_beside"),
    ):
        used = sum(rates[n] * (_ADAM_BYTES if n.startswith("host_adam") else 1) for n in together)
        for name in together:
            whole[name] *= min(bandwidth / used, 1.0)
    return whole


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
        _within(rates, DESKTOP_BANDWIDTH) if gpu.host == DESKTOP else rates,
        gpu.half * _OF_PRODUCTS,
        gpu.single * _OF_PRODUCTS,
        gpu.bandwidth * _OF_BANDWIDTH,
        _OF_LINK * (gpu.nvlink or _REFERENCE_PCIE * 2.0**by_link),
        host=gpu.host,
    )


_OWN = ("half", "single", "bandwidth", "link")  # a Machine's figures beside its rates


def _present() -> tuple[Any, str | None]:
    """What torch says of the GPU that this process has, and its name in GPUS."""
    about = torch.cuda.get_device_properties(torch.cuda.current_device())
    near = [name for name in GPUS if plain(name) in plain(about.name)]
    return about, max(near, key=len, default=None)


def is_here(gpu: str | None) -> bool:
    """Whether this process has such a GPU; gpu: as for machine_of, which knows it."""
    if gpu is None or not torch.cuda.is_available():
        return gpu is None
    _, known = _present()
    return known is not None and plain(known) == plain(gpu)


def with_host(machine: Machine) -> Machine:
    """The same with the memory of this host: what is free, and what this process has, as the one that trains is another
    or this one."""
    free = int(_C.host_topology()["memory"])
    return replace(machine, host_memory=free + host_resident_bytes())


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
            raise ValueError(NO_GPU)
        about, known = _present()
        if known is None:
            raise ValueError(f"no figures for this GPU, {about.name}: known are {', '.join(GPUS)}")
        machine = replace(_of_gpu(known), name=about.name, memory=about.total_memory)
    else:
        machine = _of_gpu(name_of(gpu))
    if rates is None:
        return machine
    figures = rates if isinstance(rates, Mapping) else read_rates(rates)
    figures = dict(figures.get("rates", figures))
    measured = frozenset(figures)
    own = {name: float(figures.pop(name)) for name in _OWN if name in figures}
    if any(not value > 0 for value in own.values()):
        raise ValueError(f"rates: {own}: positive numbers are wanted")
    given = completed(figures, machine.rates) if figures else machine.rates
    return replace(machine, rates=given, measured=measured, **own)
