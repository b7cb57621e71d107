"""Adam: parameters per second and GB/s of every implementation, beside a plain copy.

    python benchmarks/bench_adam.py [--format bf16] [--grad bf16] [--device cpu|cuda]

Prints one JSON line per variant. Bytes are what one update must move: bf16 with bf16 gradients
reads weight 2, low 2, m 4, v 4, gradient 2 and writes all but the gradient: 26 B per parameter. A
plain copy moves as many bytes, half read and half written, on the same threads ("copy": from one
array to another; "in_place": read and written where it is, as an update does it). All work on
memory larger than the caches, on huge pages, and the best of several rounds counts. With --device
cuda the update runs on the device; tests/gpu/test_kernels.py compares its bits with the host's.
"""

import argparse
import functools
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator

import torch
from lines import keep_line, parser_of

from gemini_strategy import _C
from gemini_strategy.machine.rates import cpu_name

FORMATS = {"fp32": (0, torch.float32), "bf16": (1, torch.bfloat16), "fp16": (2, torch.float16)}
LOW_DTYPES = {"fp32": None, "bf16": torch.int16, "fp16": torch.float32}


def bytes_per_parameter(fmt: str, grad: str) -> int:
    """Bytes that one update reads and writes per parameter."""
    low = LOW_DTYPES[fmt]
    state = FORMATS[fmt][1].itemsize + (low.itemsize if low else 0) + 8
    return 2 * state + FORMATS[grad][1].itemsize


def huge_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A zero tensor of its own mapping, on huge pages where the system grants them."""
    region = mmap.mmap(-1, max(numel * dtype.itemsize, mmap.PAGESIZE))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=dtype, count=numel).zero_()


class State:
    """Weight, low part, moments and gradient of `numel` parameters, with ordinary values."""

    def __init__(self, fmt: str, grad: str, numel: int, device: torch.device):
        def empty(dtype: torch.dtype) -> torch.Tensor:
            if device.type == "cpu":
                return huge_tensor(numel, dtype)
            return torch.zeros(numel, dtype=dtype, device=device)

        generator = torch.Generator(device).manual_seed(0)
        self.format, self.grad_dtype = FORMATS[fmt][0], FORMATS[grad][0]
        self.numel = numel
        self.weight = empty(FORMATS[fmt][1]).normal_(0.0, 0.02, generator=generator)
        low = LOW_DTYPES[fmt]
        self.low = empty(low) if low else None
        if low is torch.float32:
            self.low.copy_(self.weight)
        self.m, self.v = empty(torch.float32), empty(torch.float32)
        self.grad = empty(FORMATS[grad][1]).normal_(0.0, 1e-3, generator=generator)

    def addresses(self) -> tuple[int, ...]:
        """Arguments of _C.adam from the format up to the ranges."""
        parts = self.weight, self.low, self.m, self.v, self.grad
        addresses = (0 if part is None else part.data_ptr() for part in parts)
        return (self.format, self.grad_dtype, *addresses)

    def ranges(self, step: int) -> list[tuple[int, int, bytes]]:
        """One range over everything, AdamW with usual hyperparameters."""
        scalars = _C.adam_scalars(1e-4, 0.9, 0.999, 1e-8, 0.01, step, True, True, 1.0, 1.0)
        return [(0, self.numel, scalars)]


def best_seconds(actions: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The shortest run of each action in seconds, after one that does not count.

    The actions take turns, so that a busy moment of the machine does not fall on one of them alone.
    """
    best = dict.fromkeys(actions, math.inf)
    for turn in range(rounds + 1):
        for name, action in actions.items():
            begin = time.perf_counter()
            action()
            if turn:
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def variants() -> Iterator[str]:
    """The instruction sets that this processor has."""
    for name in ("scalar", "avx2", "avx512"):
        try:
            _C.isa_force(name)
        except NotImplementedError:
            continue
        yield name
    _C.isa_force(None)


def bench_host(args: argparse.Namespace) -> None:
    """Every instruction set and the plain copy, on host memory."""
    numel = args.parameters or 32 << 20
    state = State(args.format, args.grad, numel, torch.device("cpu"))
    moved = bytes_per_parameter(args.format, args.grad) * numel
    hardware = {
        "device": cpu_name(),
        "threads": int(os.environ.get("GEMINI_THREADS") or len(os.sched_getaffinity(0))),
    }
    words = moved // 8
    source, target = huge_tensor(words, torch.float32), huge_tensor(words, torch.float32)

    def copy() -> None:
        _C.merge_host(0, source.data_ptr(), 0, target.data_ptr(), words)

    def in_place() -> None:
        _C.isa_force(None)
        _C.grad_add_host(target.data_ptr(), 0, target.data_ptr(), 0, words, False)

    ranges = state.ranges(step=10)

    def update(isa: str) -> None:
        _C.isa_force(isa)
        _C.adam(-1, 0, *state.addresses(), ranges)

    actions = {"copy": copy, "in_place": in_place}
    actions |= {isa: functools.partial(update, isa) for isa in variants()}
    best = best_seconds(actions, args.rounds)
    _C.isa_force(None)
    for name, seconds in best.items():
        share = round(best["in_place"] / seconds, 3)
        report(args, name, numel, moved, seconds, best["copy"], hardware, of_in_place=share)


def report(
    args: argparse.Namespace,
    variant: str,
    numel: int,
    moved: int,
    seconds: float,
    copy_seconds: float,
    hardware: dict[str, object],
    **more: object,
) -> None:
    """One JSON line."""
    line = {
        "benchmark": "adam",
        "variant": variant,
        "format": args.format,
        "grad": args.grad,
        "parameters": numel,
        "bytes_per_parameter": bytes_per_parameter(args.format, args.grad),
        "seconds": round(seconds, 6),
        "parameters_per_s": round(numel / seconds),
        "gb_per_s": round(moved / seconds / 1e9, 2),
        "of_copy": round(copy_seconds / seconds, 3),
        **hardware,
        **more,
    }
    keep_line(line, None)


def bench_cuda(args: argparse.Namespace) -> None:
    """The kernel and a device-to-device copy, timed with events."""
    device = torch.device("cuda", torch.cuda.current_device())
    numel = args.parameters or 512 << 20
    moved = bytes_per_parameter(args.format, args.grad) * numel
    stream = torch.cuda.current_stream(device).cuda_stream

    def timed(action: Callable[[], object]) -> float:
        best = math.inf
        for _ in range(args.rounds + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            action()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3)
        return best

    def update_seconds() -> float:
        state = State(args.format, args.grad, numel, device)
        ranges = state.ranges(step=10)
        return timed(lambda: _C.adam(device.index, stream, *state.addresses(), ranges))

    def plain_copy_seconds() -> float:
        source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return timed(lambda: target.copy_(source))

    seconds, copy_seconds = update_seconds(), plain_copy_seconds()
    hardware = {"device": torch.cuda.get_device_name(device)}
    report(args, "copy", numel, moved, copy_seconds, copy_seconds, hardware)
    report(args, "cuda", numel, moved, seconds, copy_seconds, hardware)


def main() -> None:
    """Parses the command line and runs one benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--format", choices=tuple(FORMATS), default="bf16")
    parser.add_argument("--grad", choices=tuple(FORMATS), default=None, help="default: the format")
    parser.add_argument(
        "--parameters", type=int, default=0, help="default: 32 Mi (cpu), 512 Mi (cuda)"
    )
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    args.grad = args.grad or args.format
    if args.grad not in (args.format, "fp32"):
        parser.error(f"--grad {args.grad} does not go with --format {args.format}")
    (bench_cuda if args.device == "cuda" else bench_host)(args)


if __name__ == "__main__":
    main()
