"""A rank's share of its host: which cores its worker threads use, how many there are, how much memory it may take.

The ranks of a host are processes of their own. Each tells the others where it is (`place`), and each computes the
same split from what all of them said (`share_of_host`), so that nothing has to be handed out:

* A rank wants the cores that it may use on its GPU's NUMA node, or all that it may use where the node is not known,
  where it may use none there, and on the host device. Ranks that want the same cores get equal parts of them.
  Bindings by a launcher (taskset, SLURM) stand: no rank gets a core outside of its own.
* Worker threads, and only they, are bound to these cores. They touch the host's memory first, so that it lies on
  their node, near the GPU that copies it.
* A quota of processor time is divided by the ranks, and so is the memory that the host has left.
* `OMP_NUM_THREADS`, which torchrun sets to 1, is about torch's threads. It has no say here.

Pinning needs nothing besides: every rank pins its own memory, and the drivers of several processes do not meet.
A rank that is alone on its host has all of it, and its threads are not bound.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemini_strategy import _C
from gemini_strategy.machine.cores import cores, device_node, split

_FEEDERS = 2  # threads that feed a GPU: Python's and autograd's


@dataclass(frozen=True)
class Share:
    """What one rank may use of its host.

    Attributes:
        cores: for its worker threads; empty: any.
        threads: how many worker threads; 0: the core's default, which is GEMINI_THREADS or every core.
        memory: bytes of host memory; None: whatever there is.
    """

    cores: tuple[int, ...]
    threads: int
    memory: int | None

    def use(self) -> None:
        """Makes it this process's: pools of threads that are made from now on have it."""
        _C.host_use(self.cores, self.threads)


def place(pci_bus_id: str | None = None, root: str = "") -> dict[str, Any]:
    """Where this process is, to be told to the other ranks of its host; made of what JSON can say.

    Args:
        pci_bus_id: of its GPU, see `pci_bus_id`; None: not known, or the host device.
        root: the folder to read /proc and /sys below.

    Raises:
        ValueError: `pci_bus_id` is none.
    """
    here = _C.host_topology(root)
    node = -1 if pci_bus_id is None else device_node(pci_bus_id, root)
    return {"mask": here["mask"], "node": node, "memory": here["memory"]}


def pci_bus_id(device: torch.device) -> str | None:
    """As in "0000:1b:00.0"; None for the host device."""
    if device.type != "cuda":
        return None
    about = torch.cuda.get_device_properties(device)
    return f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"


def share_of_host(
    places: Sequence[Mapping[str, Any]],
    local_rank: int,
    *,
    threads: int | None = None,
    has_gpu: bool = False,
    root: str = "",
) -> Share:
    """The share of one rank.

    Args:
        places: what `place` gave on every rank of this host, by local rank. All ranks have told theirs before any
            takes memory, or the memory that is left does not count for all alike.
        local_rank: whose share.
        threads: worker threads of this rank, as the user wants it; None: GEMINI_THREADS, else one for each of its
            cores, or for what its part of the quota is worth; beside a GPU two less, if there are more than four, as
            one worker that waits for a core holds up the whole update.
        has_gpu: it computes on a GPU.
        root: the folder to read /proc and /sys below.

    Raises:
        ValueError: GEMINI_THREADS is no number, `local_rank` is none of these ranks, or one has an empty mask.
    """
    here = _C.host_topology(root)
    if not 0 <= local_rank < len(places):
        raise ValueError(f"local rank {local_rank} of {len(places)}: it must be less")
    own = tuple(split(cores(root), places)[local_rank])
    is_alone = len(places) == 1
    wished = threads or 0
    if not wished and os.environ.get("GEMINI_THREADS"):
        wished = 0 if is_alone else _C.host_threads()
    elif not wished:
        count = _C.host_threads(len(own), here["quota"] / len(places))
        is_feeding = has_gpu and count > 2 * _FEEDERS
        wished = count - _FEEDERS if is_feeding else 0 if is_alone else count
    if is_alone:
        return Share((), wished, None)
    return Share(own, wished, min(other["memory"] for other in places) // len(places))
