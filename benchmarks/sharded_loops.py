"""One rank of a run of bench_sharded.py: `sharded_loops.py run.json RANK`.

The ranks meet through a file that the specification names. Both loops train the same model from the same bf16 values,
each rank on batches of its own, with AdamW on fp32-precision masters and bf16 for compute and reduction.
"""

import ctypes
import faulthandler
import gzip
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from first_values import draw_on_demand, fill_sharded
from loops import TIMELINE_STEPS, FullyShard, Gemini, Loop, end, keep, run, say_phase
from measure import environment
from models import Batches, build_model
from overlap import overlap
from shapes import SHAPES
from torch import Tensor

MIB = 1 << 20
REPEATS = 20  # collectives in one measurement


class Ranked(Loop):
    """A loop on one of several ranks."""

    def build(self) -> torch.nn.Module:
        spec = self.spec
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        home, checkpointing = torch.device("meta"), spec["checkpointing"]
        return build_model(SHAPES[spec["model"]], home, self.device, self.dtype, checkpointing)

    def batches(self) -> Batches:
        spec = self.spec
        size = spec["sequences"], spec["length"], spec["micro_batches"]
        return Batches(SHAPES[spec["model"]], *size, self.device, self.rank)

    def is_any(self, here: bool) -> bool:
        """Whether it is so on any rank; over gloo, on the host."""
        flag = torch.tensor(int(here))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def watch(self, step: Callable[[], None]) -> dict[str, Any]:
        try:
            figures = super().watch(step)
            if self.device.type == "cuda" and self.spec["profile"]:
                figures |= self._profile(step)
            return figures
        except Exception as error:  # the measured figures stand
            traceback.print_exc()
            return {"watch_error": f"{type(error).__name__}: {error}"}

    def _profile(self, step: Callable[[], None]) -> dict[str, Any]:
        """What of the communication is exposed, and with a timeline folder the kernels as a trace."""
        from torch.profiler import ProfilerActivity, profile

        step()
        torch.cuda.synchronize()
        self.is_any(False)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(TIMELINE_STEPS):
                step()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            seen.export_chrome_trace(str(path))
            trace = path.read_bytes()
        if self.spec["kernels"]:
            Path(self.spec["kernels"]).write_bytes(gzip.compress(trace))
        events = json.loads(trace)["traceEvents"]
        return overlap(events, TIMELINE_STEPS) or {}


class ShardedGemini(Ranked, Gemini):
    """manage() over all ranks; under a device budget if there is one."""

    def build(self) -> torch.nn.Module:
        model = super().build()
        draw_on_demand(model, self.device)
        return model

    def prepare(self) -> None:
        super().prepare()
        if self.device.type == "cuda":  # what drawing took
            torch.cuda.empty_cache()

    def still_changes(self) -> bool:
        return self.is_any(super().still_changes())


class FSDP2(Ranked, FullyShard):
    """Everything on the devices."""

    arithmetic = "torch.optim.AdamW(fused) on fp32 shards, bf16 compute and reduction"

    def prepare(self) -> None:
        self.shard(self.model.model.layers, self.size)
        self.model.to_empty(device=self.device)
        fill_sharded(self.model, self.device)
        self.make_optimizer()


LOOPS: dict[str, type[Loop]] = {"gemini": ShardedGemini, "fsdp2": FSDP2}


# ---- collectives alone ----


def seconds_each(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, median over runs of REPEATS that all ranks begin together."""
    found = []
    for _ in range(6):
        dist.all_reduce(torch.zeros(1))  # over gloo, on the host
        if device.type == "cuda":
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPEATS):
                work()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3 / REPEATS)
        else:
            began = time.perf_counter()
            work()
            found.append(time.perf_counter() - began)
    return median(found[1:])


def collectives(spec: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Bytes per second that each rank sends, in place on bf16 chunks: torch's group and our communicator in turn."""
    from gemini_strategy.ranks.comm import communicator

    rank, size = dist.get_rank(), dist.get_world_size()
    stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
    figures: dict[str, Any] = {}
    with communicator(device=device, timeout=spec["timeout"]) as comm:
        for chunk in spec["chunk_bytes"]:
            shard = chunk // size // 512 * 512
            own = slice(rank * shard // 2, (rank + 1) * shard // 2)
            x = torch.zeros(shard * size // 2, dtype=torch.bfloat16, device=device)

            def gather(x: Tensor = x, shard: int = shard) -> None:
                comm.all_gather(x.data_ptr(), shard, stream)

            def gather_by_torch(x: Tensor = x, own: slice = own) -> None:
                dist.all_gather_into_tensor(x, x[own])

            def reduce(x: Tensor = x, shard: int = shard) -> None:
                comm.reduce_scatter(x.data_ptr(), shard // 2, torch.bfloat16, stream)

            def reduce_by_torch(x: Tensor = x, own: slice = own) -> None:
                dist.reduce_scatter_tensor(x[own], x)

            ways = {
                "all_gather": (gather, gather_by_torch),
                "reduce_scatter": (reduce, reduce_by_torch),
            }
            of_chunk: dict[str, float] = {}
            for name, (ours, theirs) in ways.items():
                for key, work in (("gemini", ours), ("torch", theirs)):
                    speed = shard * (size - 1) / seconds_each(work, device)
                    of_chunk[f"{name}_{key}_bytes_per_s"] = speed
                ratio = (
                    of_chunk[f"{name}_gemini_bytes_per_s"] / of_chunk[f"{name}_torch_bytes_per_s"]
                )
                of_chunk[f"{name}_ratio"] = ratio
            figures[str(chunk)] = of_chunk
        comm.check()
    return {"collectives": figures}


def run_collectives(spec: dict[str, Any], device: torch.device) -> None:
    """As loops.run, for collectives alone."""
    result: dict[str, Any] = {"available": True, "error": None}
    say_phase("train")
    try:
        result |= collectives(spec, device)
    except Exception as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
    keep(spec, result | {"environment": environment(device)})


# ---- the process ----


def end_with_driver(driver: int) -> None:
    """The system kills this process when the driver ends, however that ends."""
    set_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_signal, signal.SIGKILL)
    if os.getppid() != driver:  # it ended before
        os._exit(1)


def main() -> None:
    """Meets the other ranks, runs, leaves its result."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank = int(sys.argv[2])
    end_with_driver(spec["driver"])
    faulthandler.register(signal.SIGUSR1)  # of a run that is late
    spec["result"] = str(Path(spec["folder"], f"result-{rank}.json"))
    for key, suffix in (("timeline", ".json"), ("kernels", "-kernels.json.gz")):
        if spec[key] and rank:  # all ranks record, one keeps it
            spec[key] = str(Path(spec["folder"], f"{rank}{suffix}")) if key == "timeline" else None
    device = torch.device("cpu")
    if spec["device"] == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    spec["device"] = str(device)
    torch.set_num_threads(spec["threads"])
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=dist.FileStore(str(Path(spec["folder"], "store")), spec["gpus"]),
        rank=rank,
        world_size=spec["gpus"],
        timeout=timedelta(seconds=spec["timeout"]),
    )
    if spec["system"] == "nccl":
        run_collectives(spec, device)
    else:
        run(spec, LOOPS)
    end()


if __name__ == "__main__":
    main()
