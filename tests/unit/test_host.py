"""The ranks of a host share its cores and memory: the split on made-up machines, the threads on this one."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini_strategy as gs
from gemini_strategy import _C
from gemini_strategy.machine import cores as kernel_cores
from gemini_strategy.machine import host
from helpers.ranks import run_ranks, values
from helpers.reference import (
    Recipe,
    assert_same_outcome,
    assert_trained,
    drive,
    managed,
    train_plain,
)
from helpers.zoo import mlp_case

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[2]


class Machine:
    """A /proc and /sys of `n_nodes` nodes with 8 cores each, two threads for each core, the second half a machine
    further; and GPUs, spread evenly over the nodes."""

    def __init__(self, root: Path, n_nodes: int, n_gpus: int, quota: str = "max") -> None:
        self.root = root
        half = 8 * n_nodes
        self.n_cores = 2 * half
        self._put("proc/meminfo", f"MemTotal: {GIB // 1024} kB\nMemAvailable: {GIB // 1024} kB\n")
        self._put("proc/self/cgroup", "0::/\n")
        self._put("proc/self/mountinfo", "31 22 0:28 / /sys/fs/cgroup rw - cgroup2 none rw\n")
        self._put("sys/fs/cgroup/cpu.max", f"{quota} 100000\n")
        self._put("sys/devices/system/cpu/online", f"0-{2 * half - 1}\n")
        for core in range(2 * half):
            siblings = f"{core % half},{core % half + half}\n"
            self._put(f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list", siblings)
        self._put("sys/devices/system/node/online", f"0-{n_nodes - 1}\n")
        self.nodes = []
        for node in range(n_nodes):
            first = range(8 * node, 8 * node + 8)
            text = f"{first[0]}-{first[-1]},{half + first[0]}-{half + first[-1]}\n"
            self._put(f"sys/devices/system/node/node{node}/cpulist", text)
            self.nodes.append({*first, *(half + core for core in first)})
        self.gpus = [f"0000:{16 + gpu:02x}:00.0" for gpu in range(n_gpus)]
        for index, gpu in enumerate(self.gpus):
            self._put(
                f"sys/bus/pci/devices/{gpu}/numa_node", f"{n_nodes and index * n_nodes // n_gpus}\n"
            )

    def _put(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def places(
        self, mask: range | None = None, *, on_gpus: bool = True, memory: int = GIB
    ) -> list[dict[str, Any]]:
        """One rank for each GPU, all with the same mask."""
        here = [host.place(gpu if on_gpus else None, str(self.root)) for gpu in self.gpus]
        assert all(place["memory"] == GIB for place in here)
        cores = list(mask or range(self.n_cores))
        return [{**place, "mask": cores, "memory": memory} for place in here]

    def shares(self, places: list[dict[str, Any]], **how: Any) -> list[host.Share]:
        return [
            host.share_of_host(places, rank, root=str(self.root), **how)
            for rank in range(len(places))
        ]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("GEMINI_THREADS", raising=False)
    yield
    _C.host_use((), 0)


def assert_disjoint(shares: list[host.Share]) -> None:
    cores = [core for share in shares for core in share.cores]
    assert len(cores) == len(set(cores))


# ---- the split ----


@pytest.mark.parametrize("n_nodes", [1, 2, 8])
@pytest.mark.parametrize("on_gpus", [True, False])
def test_every_rank_has_cores_of_its_own(tmp_path: Path, n_nodes: int, on_gpus: bool) -> None:
    machine = Machine(tmp_path, n_nodes, 8)
    places = machine.places(on_gpus=on_gpus)
    shares = machine.shares(places, has_gpu=on_gpus)
    assert_disjoint(shares)
    for rank, share in enumerate(shares):
        assert len(share.cores) == machine.n_cores // 8
        assert set(share.cores) <= machine.nodes[rank * n_nodes // 8]
        # Both threads of a physical core are one rank's.
        half = machine.n_cores // 2
        assert {core % half for core in share.cores if core >= half} == {
            core for core in share.cores if core < half
        }
        feeding = 2 if on_gpus and len(share.cores) > 4 else 0
        assert share.threads == len(share.cores) - feeding
        assert share.memory == GIB // 8


def test_gpus_of_one_node_share_that_node(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2, 4)
    places = machine.places()[:2]  # node 0's GPUs
    shares = machine.shares(places, has_gpu=True)
    assert_disjoint(shares)
    assert [len(share.cores) for share in shares] == [8, 8]
    assert {core for share in shares for core in share.cores} == machine.nodes[0]


def test_a_container_has_its_cores_only(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2, 4)
    shares = machine.shares(machine.places(range(6, 12)))  # 6, 7 on node 0
    assert [share.cores for share in shares] == [(6,), (7,), (8, 9), (10, 11)]


def test_bindings_of_a_launcher_stand(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2, 4)
    places = machine.places()
    for rank, place in enumerate(places):
        place["mask"] = list(range(4 * rank, 4 * rank + 4))
    assert [s.cores for s in machine.shares(places)] == [tuple(p["mask"]) for p in places]


def test_nothing_known(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 8 kB\nMemAvailable: 4 kB\n")
    place = host.place("0000:10:00.0", str(tmp_path))
    assert place == {"mask": sorted(os.sched_getaffinity(0)), "node": -1, "memory": 4096}
    assert kernel_cores.cores(str(tmp_path)) == []
    others = [{**place, "mask": [3, 5, 8, 9]}] * 2
    shares = [host.share_of_host(others, rank, root=str(tmp_path)) for rank in range(2)]
    assert shares == [host.Share((3, 5), 2, 2048), host.Share((8, 9), 2, 2048)]


def test_more_ranks_than_cores(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1, 8)
    shares = machine.shares(machine.places(range(3)))
    assert [len(share.cores) for share in shares] == [1] * 8
    assert all(share.threads == 1 for share in shares)


# ---- the number of threads, and memory ----


def test_a_quota_is_for_all_ranks_together(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1, 4, quota="1100000")
    for share in machine.shares(machine.places()):
        assert (
            len(share.cores) == 4
        )  # where they run is not narrowed, as others may have a quota, too
        assert share.threads == 2
    tight = Machine(tmp_path / "tight", 1, 4, quota="200000")
    assert [share.threads for share in tight.shares(tight.places())] == [1] * 4


def test_memory_is_what_the_first_to_look_could_take(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1, 4)
    places = machine.places()
    places[2]["memory"] = GIB // 2
    assert [share.memory for share in machine.shares(places)] == [GIB // 8] * 4


def test_wishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, 1, 2)
    places = machine.places()
    assert [share.threads for share in machine.shares(places, threads=3)] == [3, 3]
    monkeypatch.setenv("GEMINI_THREADS", "5")
    assert [share.threads for share in machine.shares(places, has_gpu=True)] == [5, 5]
    assert [share.threads for share in machine.shares(places, threads=3)] == [3, 3]
    monkeypatch.setenv("GEMINI_THREADS", "many")
    with pytest.raises(ValueError, match="GEMINI_THREADS"):
        machine.shares(places)
    monkeypatch.setenv("GEMINI_THREADS", "")
    assert [share.threads for share in machine.shares(places)] == [8, 8]


def test_alone_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without other ranks: every core, not bound, and what the core does by default."""
    machine = Machine(tmp_path, 2, 2)
    (place, _) = machine.places()

    def alone(**how: Any) -> host.Share:
        return host.share_of_host([place], 0, root=str(tmp_path), **how)

    assert alone() == host.Share((), 0, None)
    assert alone(threads=3) == host.Share((), 3, None)
    assert alone(has_gpu=True) == host.Share((), 30, None)
    place["mask"] = [0, 1, 2, 3]
    assert alone(has_gpu=True) == host.Share((), 0, None)  # too few to leave some out
    place["mask"] = [0, 1, 2, 3, 4]
    assert alone(has_gpu=True) == host.Share((), 3, None)
    monkeypatch.setenv("GEMINI_THREADS", "2")
    assert alone(has_gpu=True) == host.Share((), 0, None)


def test_refusals(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1, 2)
    places = machine.places()
    for rank in (2, -1):
        with pytest.raises(ValueError, match="local rank"):
            host.share_of_host(places, rank, root=str(tmp_path))
    places[1]["mask"] = []
    with pytest.raises(ValueError, match="local rank 1 has an empty mask"):
        host.share_of_host(places, 0, root=str(tmp_path))
    with pytest.raises(ValueError, match="no PCI device"):
        host.place("cuda:0", str(tmp_path))
    for wrong in ([-1], ["x"], [1 << 30], 3):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            _C.host_use(wrong, 0)


def test_the_bus_id_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    assert host.pci_bus_id(torch.device("cuda", 0)) == "0000:1b:02.0"
    assert host.pci_bus_id(torch.device("cpu")) is None


def test_this_machine() -> None:
    here = _C.host_topology()
    mask = sorted(os.sched_getaffinity(0))
    assert here["mask"] == mask
    assert here["quota"] >= 0 and here["memory"] > 0
    assert 1 <= _C.host_threads() <= len(mask)
    place = host.place()
    assert place["mask"] == mask and place["node"] == -1
    assert json.loads(json.dumps(place)) == place  # it travels as JSON


# ---- threads ----


def worker_masks() -> list[set[int]]:
    """The cores of every worker thread of this process."""
    masks = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == "gemini-worker":
                masks.append(os.sched_getaffinity(int(task.name)))
        except (FileNotFoundError, ProcessLookupError):  # it ended
            continue
    return masks


def manage_small(**how: Any) -> gs.Engine:
    model = nn.Linear(8, 8)
    return gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu", **how)


def _one_rank(rank: int, size: int) -> dict[str, Any]:
    before = os.sched_getaffinity(0)
    places: list[Any] = [None] * size
    dist.all_gather_object(places, host.place())
    share = host.share_of_host(places, rank)
    share.use()
    engine = manage_small(threads=share.threads)
    masks = worker_masks()
    engine.close()
    return {"share": share, "masks": masks, "is_kept": before == os.sched_getaffinity(0)}


def test_workers_are_bound_and_nobody_else(tmp_path: Path) -> None:
    ranks = values(run_ranks(2, tmp_path, _one_rank))
    for rank in ranks:
        assert len(rank["masks"]) == rank["share"].threads >= 1
        assert all(mask == set(rank["share"].cores) for mask in rank["masks"])
        assert rank["is_kept"]
    if len(os.sched_getaffinity(0)) > 1:
        assert_disjoint([rank["share"] for rank in ranks])


def test_bound_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.Share, "use", lambda share: None)  # one rank alone would bind nothing
    case = mlp_case(width=512, depth=2, p=0.1)
    recipe = Recipe(precision="bf16-true", steps=4, clip=0.35)
    before, after = train_plain(case, recipe)
    assert_trained(before, after)
    mask = sorted(os.sched_getaffinity(0))
    for cores, threads in (([], 2), (mask, 2), (mask[:1], 1), (mask[:1], 3)):
        _C.host_use(cores, threads)
        gc.collect()  # an engine before this one has its workers until it is collected
        n_before = len(worker_masks())
        run = managed(case.build, recipe, placement_policy="cpu", threads=threads)
        try:
            drive(run, case, recipe.steps)
            assert_same_outcome(run.outcome(), after)
            assert len(worker_masks()) == n_before + threads - (not cores)
        finally:
            run.engine.close()
            del run


NUMBERS = """
import json, os, sys
sys.path.insert(0, "tests")
sys.path.insert(0, "tests/unit")
import torch, torch._dynamo
from gemini_strategy import _C
from gemini_strategy.machine import host
from test_host import manage_small, worker_masks
for environment in map(json.loads, sys.argv[1:]):
    if os.fork() == 0:
        os.environ |= environment
        break
    assert os.wait()[1] == 0
else:
    os._exit(0)  # an orderly end takes modules apart
alone = host.share_of_host([host.place()], 0)
alone.use()
engine = manage_small(threads=alone.threads or None)
n_workers = 1 + len(worker_masks())  # the calling thread works, too
places = [{**host.place(), "mask": list(range(8))}] * 2
shares = [host.share_of_host(places, rank).threads for rank in range(2)]
print(json.dumps([torch.get_num_threads(), _C.host_threads(), n_workers, shares]), flush=True)
os._exit(0)
"""


def numbers(n_torch: int, *environments: dict[str, str]) -> list[Any]:
    """One for each, of processes of which torch has found the first number of threads in theirs."""
    others = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "GEMINI_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", NUMBERS, *map(json.dumps, environments)],
        env={**others, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(n_torch)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_omp_num_threads_is_not_about_workers() -> None:
    """torchrun sets it to 1; torch obeys it, the workers of Adam do not."""
    n = _C.host_threads()
    each = _C.host_threads(4, _C.host_topology()["quota"] / 2)
    plain, three = numbers(1, {}, {"GEMINI_THREADS": "3"})
    assert plain == [1, n, n, [each, each]] and three == [1, 3, 3, [3, 3]]
    (seven,) = numbers(7, {})
    assert seven[1:] == [n, n, [each, each]]
