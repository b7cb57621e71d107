"""All-gathers alone and beside matrix products: `python3 benchmarks/bench_gather.py --gpus N --out FILE`.

Every way gathers bf16 buffers in place, between N processes of one GPU each:

    usual       ncclAllGather on memory of torch's
    copies      NCCL's gathers by copy engines (2.28 and newer): memory of ncclMemAlloc in a symmetric window, a
                communicator whose policy is to take no multiprocessor
    copies-out  the same in one window, with the own shard copied in before and the whole copied out behind
    ours        the communicator of the engine

The ways take turns, --rounds times, each time in new processes. A line for each way, size and turn has the figures of
the slowest rank, in seconds and bytes per second (of those that a rank receives):

    alone_seconds, alone_bytes_per_s      of one gather with nothing else on the GPU
    product_seconds                       of one matrix product with nothing else
    slowdown                              how many times as long a product takes while gathers run all the time
    beside_seconds, beside_bytes_per_s    of one gather meanwhile
    cost_seconds                          what a gather takes from the products: their delay over the gathers meanwhile
    kernels, copies                       per gather, as torch's profiler saw them; is_right: every byte came
    is_covered                            whether gathers ran until the last product's end, as they should

NVLink multicast stays off, whatever the environment says.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lines import Process, command, keep_line, parser_of, show_errors, show_lines

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
WAYS = ("usual", "copies", "copies-out", "ours")
REPEATS, SAMPLES = 20, 6  # gathers between two events; samples, of which the first does not count
PRODUCTS = 40  # in one sample
GATE_CYCLES = 10_000_000  # some 5 ms in which the host issues what is to run at one time
MOST_GATHERS = 4000  # in one sample
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}

# ---- NCCL ----

COPIES_FROM = 22800  # the first version with gathers by copy engines
UNDEFINED = -(1 << 31)
POLICY_ZERO, WINDOW_SYMMETRIC, UINT8 = 2, 1, 1


class Id(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """ncclConfig_t of 2.28, which later versions read by the version that it names."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("blocking", "cga_size", "least_ctas", "most_ctas")),
        ("net_name", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in ("split_share", "traffic_class")),
        ("comm_name", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in ("collnet", "policy", "shrink_share", "nvls_ctas")),
        *((name, ctypes.c_int) for name in ("net_channels", "nvlink_schedule")),
    )


def config_of(policy: int) -> Config:
    """All values NCCL's own but for the policy and that calls wait."""
    config = Config(size=ctypes.sizeof(Config), magic=0xCAFEBEEF, version=COPIES_FROM + 9)
    for name, kind in Config._fields_[3:]:
        if kind is ctypes.c_int:
            setattr(config, name, UNDEFINED)
    config.blocking, config.policy = 1, policy
    return config


class Nccl:
    """A communicator by the copy of NCCL that torch has loaded."""

    def __init__(self, rank: int, size: int, policy: int | None) -> None:
        import torch.distributed as dist

        self._library = ctypes.CDLL("libnccl.so.2")
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        version = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value
        if policy is not None and self.version < COPIES_FROM:
            raise NotImplementedError(f"NCCL {self.version} has no gathers by copy engines")
        made = Id()
        if rank == 0:
            self._call("ncclGetUniqueId", ctypes.byref(made))
        box = [ctypes.string_at(ctypes.byref(made), ctypes.sizeof(made))]
        dist.broadcast_object_list(box)
        ctypes.memmove(ctypes.byref(made), box[0], ctypes.sizeof(made))
        self._rank = rank
        self._handle = ctypes.c_void_p()
        where = ctypes.byref(self._handle)
        if policy is None:
            self._call("ncclCommInitRank", where, size, made, rank)
        else:
            config = config_of(policy)
            self._call("ncclCommInitRankConfig", where, size, made, rank, ctypes.byref(config))

    def _call(self, name: str, *args: Any) -> None:
        result = getattr(self._library, name)(*args)
        if result:
            raise RuntimeError(f"{name}: {self._library.ncclGetErrorString(result).decode()}")

    def window(self, n_bytes: int) -> int:
        """The address of new memory that the ranks have registered together."""
        address, window = ctypes.c_void_p(), ctypes.c_void_p()
        size = ctypes.c_size_t(n_bytes)
        self._call("ncclMemAlloc", ctypes.byref(address), size)
        where = ctypes.byref(window)
        self._call("ncclCommWindowRegister", self._handle, address, size, where, WINDOW_SYMMETRIC)
        if not window.value or not address.value:
            raise NotImplementedError("NCCL made no window: symmetric memory is not supported here")
        return address.value

    def all_gather(self, address: int, shard: int, stream: int) -> None:
        """In place, as Communicator.all_gather."""
        own = ctypes.c_void_p(address + self._rank * shard)
        where, count = ctypes.c_void_p(address), ctypes.c_size_t(shard)
        args = own, where, count, UINT8, self._handle, ctypes.c_void_p(stream)
        self._call("ncclAllGather", *args)


class Driver:
    """Copies by the driver, which know any memory."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def copy(self, into: int, out_of: int, n_bytes: int, stream: int | None = None) -> None:
        """Waits for it where no stream is given."""
        words = ctypes.c_uint64(into), ctypes.c_uint64(out_of), ctypes.c_size_t(n_bytes)
        if stream is None:
            result = self._library.cuMemcpy(*words)
        else:
            result = self._library.cuMemcpyAsync(*words, ctypes.c_void_p(stream))
        if result:
            raise RuntimeError(f"cuMemcpy: error {result}")


# ---- the ways ----

Gather = Callable[[int], None]  # issued on a stream


class Way:
    """How buffers are gathered, and the memory that it wants them in."""

    def __init__(self, name: str, rank: int, size: int, device: torch.device, most: int) -> None:
        self.name, self.rank, self.size, self.device = name, rank, size, device
        self.most = most  # bytes of the largest buffer
        self.nccl: Nccl | None = None
        self.comm: Any = None
        self._kept: list[Any] = []
        self._window = 0
        self.driver = Driver()
        if name == "ours":
            from gemini_strategy.ranks.comm import communicator

            self.comm = communicator(device=device, timeout=60)
        else:
            self.nccl = Nccl(rank, size, None if name == "usual" else POLICY_ZERO)
        if name == "copies-out":
            self._window = self._made().window(most)

    def _made(self) -> Nccl:
        assert self.nccl is not None
        return self.nccl

    def prepare(self, n_bytes: int) -> tuple[int, Gather]:
        """The address of a buffer, and its gather."""
        import torch

        shard = n_bytes // self.size
        if self.name == "copies":
            address = self._made().window(n_bytes)
        else:
            kept = torch.zeros(n_bytes, dtype=torch.uint8, device=self.device)
            self._kept.append(kept)
            address = kept.data_ptr()
        if self.name == "ours":
            return address, lambda stream: self.comm.all_gather(address, shard, stream)
        nccl = self._made()
        if self.name != "copies-out":
            return address, lambda stream: nccl.all_gather(address, shard, stream)
        window, own = self._window, self.rank * shard

        def gather(stream: int) -> None:
            self.driver.copy(window + own, address + own, shard, stream)
            nccl.all_gather(window, shard, stream)
            self.driver.copy(address, window, n_bytes, stream)

        return address, gather

    def check(self) -> None:
        if self.comm is not None:
            self.comm.check()


# ---- one rank ----


class Rank:
    """Measures one way; every rank does the same at the same time."""

    def __init__(self, way: Way, products: int, side: int) -> None:
        import torch

        self.way, self.products = way, products
        self.compute, self.comm = torch.cuda.Stream(), torch.cuda.Stream()
        make = {"dtype": torch.bfloat16, "device": way.device}
        self.a, self.b = (torch.randn(side, side, **make) for _ in range(2))
        self.c = torch.empty(side, side, **make)

    def meet(self, value: float = 0.0) -> float:
        """The largest value of all ranks, once nothing runs on any."""
        import torch
        import torch.distributed as dist

        torch.cuda.synchronize()
        box = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(box, dist.ReduceOp.MAX)
        return float(box)

    @staticmethod
    def events(n: int) -> list[Any]:
        import torch

        return [torch.cuda.Event(enable_timing=True) for _ in range(n)]

    def multiply(self) -> None:
        """On the stream of the products."""
        import torch

        with torch.cuda.stream(self.compute):
            for _ in range(self.products):
                torch.mm(self.a, self.b, out=self.c)

    def products_alone(self) -> float:
        self.meet()
        begin, end = self.events(2)
        begin.record(self.compute)
        self.multiply()
        end.record(self.compute)
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    def gathers_alone(self, gather: Gather) -> float:
        found = []
        for _ in range(SAMPLES):
            self.meet()
            begin, end = self.events(2)
            begin.record(self.comm)
            for _ in range(REPEATS):
                gather(self.comm.cuda_stream)
            end.record(self.comm)
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e-3 / REPEATS)
        return median(found[1:])

    def beside(self, gather: Gather, n: int) -> tuple[float, list[float]]:
        """Seconds of the products, and when each of n gathers ended, both since one moment."""
        import torch

        self.meet()
        begin, end = self.events(2)
        ends = self.events(n)
        with torch.cuda.stream(self.compute):
            torch.cuda._sleep(GATE_CYCLES)
        begin.record(self.compute)
        self.comm.wait_event(begin)
        self.multiply()
        end.record(self.compute)
        for event in ends:
            gather(self.comm.cuda_stream)
            event.record(self.comm)
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3, [begin.elapsed_time(e) * 1e-3 for e in ends]

    def seen(self, gather: Gather) -> dict[str, Any]:
        """What the GPU did for a gather, by the profiler."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        n = 10
        self.meet()
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            for _ in range(n):
                gather(self.comm.cuda_stream)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            prof.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        kernels = [e["name"] for e in events if e.get("cat") == "kernel"]
        copies = [e for e in events if e.get("cat") == "gpu_memcpy"]
        names = sorted(set(kernels))
        return {"kernels": len(kernels) / n, "copies": len(copies) / n, "kernel_names": names}

    def is_right(self, address: int, gather: Gather, n_bytes: int) -> bool:
        """Whether a gather brings each rank's bytes, and leaves the own ones."""
        import torch

        size, shard = self.way.size, n_bytes // self.way.size
        on_host = torch.arange(shard, dtype=torch.int64) * 31
        want = torch.cat([((on_host + 7 * r + 1) % 251).to(torch.uint8) for r in range(size)])
        given = want.to(self.way.device)
        own = self.way.rank * shard
        self.way.driver.copy(address, torch.zeros_like(given).data_ptr(), n_bytes)
        self.way.driver.copy(address + own, given.data_ptr() + own, shard)
        self.meet()
        gather(self.comm.cuda_stream)
        torch.cuda.synchronize()
        self.way.check()
        came = torch.empty_like(given)
        self.way.driver.copy(came.data_ptr(), address, n_bytes)
        return bool(torch.equal(came, given))

    def measure(self, n_bytes: int, address: int, gather: Gather) -> dict[str, Any]:
        """The times of one size on this rank."""
        is_right = self.is_right(address, gather, n_bytes)
        alone = self.gathers_alone(gather)
        products = self.products_alone()
        n = min(math.ceil(2.5 * self.meet(products / alone)) + 4, MOST_GATHERS)
        samples = []
        for _ in range(SAMPLES):
            products = self.products_alone()
            seconds, ends = self.beside(gather, n)
            meanwhile = [at for at in ends if at <= seconds]
            samples.append(
                {
                    "product_seconds": products / self.products,
                    "slowdown": seconds / products,
                    "beside_seconds": meanwhile[-1] / len(meanwhile) if meanwhile else ends[0],
                    "cost_seconds": (seconds - products) / max(len(meanwhile), 1),
                    "is_covered": ends[-1] >= seconds,
                }
            )
        samples = samples[1:]
        figures: dict[str, Any] = {
            key: median(s[key] for s in samples) for key in samples[0] if key != "is_covered"
        }
        figures |= {
            "alone_seconds": alone,
            "gathers": n,
            "is_covered": all(s["is_covered"] for s in samples),
            "is_right": is_right,
        }
        self.way.check()
        received = n_bytes // self.way.size * (self.way.size - 1)
        for key in ("alone", "beside"):
            figures[f"{key}_bytes_per_s"] = received / figures[f"{key}_seconds"]
        return figures


def slowest(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One line's figures: each from the rank that did worst in it."""
    found: dict[str, Any] = {}
    for key, value in of_ranks[0].items():
        each = [figures[key] for figures in of_ranks]
        if isinstance(value, bool):
            found[key] = all(each)
        elif isinstance(value, list):
            found[key] = value
        else:
            found[key] = min(each) if key.endswith("_per_s") else max(each)
    return found


def run_rank(spec: dict[str, Any], rank: int) -> None:
    """Leaves a list of figures by size, or why there are none."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    size = spec["gpus"]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(spec["folder"], "store")), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=spec["timeout"]),
    )
    result: dict[str, Any] = {"error": None, "available": True, "sizes": []}
    path = Path(spec["folder"], f"result-{rank}.json")
    try:
        sizes = [mib * MIB // (size * 4096) * (size * 4096) for mib in spec["sizes"]]
        way = Way(spec["way"], rank, size, device, max(sizes))
        measured = Rank(way, spec["products"], spec["side"])
        result["gpu"] = torch.cuda.get_device_name(device)
        result["torch"] = torch.__version__
        result["nccl"] = way.nccl.version if way.nccl else None
        prepared = [(n_bytes, *way.prepare(n_bytes)) for n_bytes in sizes]
        for n_bytes, address, gather in prepared:
            box: list[Any] = [None] * size
            dist.all_gather_object(box, measured.measure(n_bytes, address, gather))
            result["sizes"].append({"bytes": n_bytes, **slowest(box), "each": box})
            path.write_text(json.dumps(result), encoding="utf-8")  # stands if a later size fails
        for line, (_, _, gather) in zip(result["sizes"], prepared, strict=True):
            line |= measured.seen(gather)  # last: a profiler leaves its hooks in the driver
    except Exception as error:
        traceback.print_exc()
        result["available"] = not isinstance(error, NotImplementedError)
        result["error"] = f"{type(error).__name__}: {error}"
    path.write_text(json.dumps(result), encoding="utf-8")
    sys.stderr.flush()
    os._exit(0)  # a communicator whose other ranks have failed may not end


# ---- the driver ----


def run_way(way: str, turn: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs one way in new processes; its lines."""
    with tempfile.TemporaryDirectory() as folder:
        spec = {"way": way, "folder": folder, "gpus": args.gpus, "timeout": args.timeout}
        spec |= {"sizes": args.sizes, "products": args.products, "side": args.side}
        told = Path(folder, "run.json")
        told.write_text(json.dumps(spec), encoding="utf-8")
        ranks = [
            Process(
                [__file__, "--rank", str(rank), "--spec", told],
                Path(folder, f"result-{rank}.json"),
                None,
            )
            for rank in range(args.gpus)
        ]
        end = time.monotonic() + args.timeout
        while any(r.process.poll() is None for r in ranks) and time.monotonic() < end:
            time.sleep(0.1)
        is_late = any(r.process.poll() is None for r in ranks)
        said = [r.end() for r in ranks]
        results = [r.result() or {} for r in ranks]
    first = results[0]
    errors = [
        f"rank {number}: {result.get('error') or 'ended without a result'}"
        for number, result in enumerate(results)
        if result.get("error") or not result
    ]
    if is_late:
        errors.append(f"not done after {args.timeout:g} s")
    if errors:
        for rank, text in enumerate(said):
            sys.stderr.write(f"---- {way}, rank {rank} ----\n{text[-3000:]}\n")
    common = {"benchmark": "gather", "name": way, "turn": turn, "gpus": args.gpus}
    common |= {key: first.get(key) for key in ("gpu", "torch", "nccl")}
    common |= {"side": args.side, "products": args.products, "command": command(args.out)}
    fine = {"available": True, "error": None}
    lines = [{**common, **figures, **fine} for figures in first.get("sizes", [])]
    if errors:
        available = all(result.get("available", True) for result in results)
        lines.append({**common, "available": available, "error": "; ".join(errors)})
    return lines


COLUMNS = (
    ("way", "name", str),
    ("turn", "turn", str),
    ("MiB", "bytes", lambda n: f"{n / MIB:g}"),
    ("alone ms", "alone_seconds", lambda s: f"{s * 1e3:.3f}"),
    ("GB/s", "alone_bytes_per_s", lambda b: f"{b / 1e9:.1f}"),
    ("beside ms", "beside_seconds", lambda s: f"{s * 1e3:.3f}"),
    ("GB/s", "beside_bytes_per_s", lambda b: f"{b / 1e9:.1f}"),
    ("product ms", "product_seconds", lambda s: f"{s * 1e3:.3f}"),
    ("slowdown", "slowdown", "{:.3f}".format),
    ("cost ms", "cost_seconds", lambda s: f"{s * 1e3:.3f}"),
    ("kernels", "kernels", "{:g}".format),
    ("copies", "copies", "{:g}".format),
    ("right", "is_right", str),
    ("covered", "is_covered", str),
)


def main() -> int:
    """Runs what was asked for; 1 if a way failed that this machine could have gone."""
    os.environ.update(NO_MULTICAST)
    parser = parser_of(__doc__ or "")
    add = parser.add_argument
    add("--gpus", type=int, default=0, help="ranks, at least 2")
    add("--out", type=Path, help="a .jsonl file to append to")
    add("--ways", default=",".join(WAYS), help="separated by commas")
    add("--sizes", default="16,64,256", help="MiB of all shards together (16,64,256)")
    add("--rounds", type=int, default=2, help="how often each way takes its turn (2)")
    add("--products", type=int, default=PRODUCTS, help=f"matrix products in a sample ({PRODUCTS})")
    add("--side", type=int, default=8192, help="of their square bf16 matrices (8192)")
    add("--timeout", type=float, default=90.0, help="seconds for a turn of a way (90)")
    add("--rank", type=int, help=argparse.SUPPRESS)
    add("--spec", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.spec:
        run_rank(json.loads(args.spec.read_text(encoding="utf-8")), args.rank)
    ways = args.ways.split(",")
    args.sizes = [int(text) for text in args.sizes.split(",")]
    if args.gpus < 2 or not set(ways) <= set(WAYS):
        parser.error(f"--gpus must be at least 2, and ways are {', '.join(WAYS)}")
    lines = []
    for turn in range(args.rounds):
        for way in ways:
            print(f"turn {turn}: {way} on {args.gpus}", file=sys.stderr, flush=True)
            for line in run_way(way, turn, args):
                lines.append(line)
                keep_line(line, args.out)
    show_lines(
        f"all-gathers on {args.gpus} GPUs", COLUMNS, [line for line in lines if not line["error"]]
    )
    return show_errors(lines)


if __name__ == "__main__":
    sys.exit(main())
