"""Communicators over NCCL: bits, order between streams, ranks that go, and how fast 64 MiB travel.

Each test runs on as many GPUs as there are, up to eight, and on fewer; where there is one, NCCL is loaded and met,
and nothing travels. The figures are printed as JSON (`pytest -s`).
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gemini_strategy as gs
from gemini_strategy.ranks.comm import Communicator, communicator
from helpers.ranks import run_ranks, values

pytestmark = pytest.mark.gpu

N_GPUS = min(torch.cuda.device_count(), 8)
SIZES = sorted({1, *(n for n in (2, 3, 4, 8) if n <= N_GPUS)})
LARGEST = SIZES[-1]
PATIENT = 120.0
SHORT = 8.0
MIB = 2**20


def here(rank: int) -> torch.device:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def exact_numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers times a power of two: every order of a sum gives the same bits."""
    seed = torch.Generator().manual_seed(100 * rank + count)
    return (torch.randint(-4, 5, (count,), generator=seed).double() / 8).to(dtype)


# ---- bits ----------------------------------------------------------------------------------------


def check_bits(rank: int, size: int) -> None:
    device = here(rank)
    with communicator(device=device, timeout=PATIENT) as comm:
        for count in (1, 7, 512, 4099, 1_000_003):
            check_sizes(comm, count, device)
        comm.check()


def check_sizes(comm: Communicator, count: int, device: torch.device) -> None:
    rank, size, stream = comm.rank, comm.size, current_stream()
    own = slice(rank * count, (rank + 1) * count)

    shards = [torch.full((count,), 17 * r + 3, dtype=torch.uint8) for r in range(size)]
    whole = torch.zeros(count * size, dtype=torch.uint8, device=device)
    whole[own] = shards[rank].to(device)
    comm.all_gather(whole.data_ptr(), count, stream)
    assert torch.equal(whole.cpu(), torch.cat(shards))

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        terms = [exact_numbers(r, count * size, dtype) for r in range(size)]
        want = torch.stack([t.double() for t in terms]).sum(0).to(dtype)
        x = terms[rank].to(device)
        comm.reduce_scatter(x.data_ptr(), count, dtype, stream)
        assert torch.equal(x.cpu()[own], want[own])
        x = terms[rank].to(device)
        comm.all_reduce(x.data_ptr(), count * size, dtype, "sum", stream)
        assert torch.equal(x.cpu(), want)

    words = [torch.arange(count) * (r + 1) - 2**62 for r in range(size)]
    x = words[rank].to(device)
    comm.all_reduce(x.data_ptr(), count, torch.int64, "sum", stream)
    assert torch.equal(x.cpu(), torch.stack(words).sum(0))  # both wrap at 2^64
    positive = [(torch.arange(count) * 7919 + 13 * r) % 1009 for r in range(size)]
    x = positive[rank].to(device)
    comm.all_reduce(x.data_ptr(), count, torch.int64, "max", stream)
    assert torch.equal(x.cpu(), torch.stack(positive).amax(0))


def check_order_between_streams(rank: int, size: int) -> None:
    """Two streams, ordered by events only, and the host far ahead."""
    device = here(rank)
    count = 3 * MIB
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    gradient = torch.zeros(count * size, device=device)
    whole = torch.zeros(count * size, device=device)
    kept = []
    torch.cuda.synchronize()
    with communicator(device=device, timeout=PATIENT) as comm:
        for step in range(10):
            with torch.cuda.stream(first):
                gradient.fill_(rank + step)
                comm.reduce_scatter(gradient.data_ptr(), count, torch.float32, first.cuda_stream)
            second.wait_stream(first)
            with torch.cuda.stream(second):
                own = slice(rank * count, (rank + 1) * count)
                whole[own] = gradient[own] + rank
                comm.all_gather(whole.data_ptr(), 4 * count, second.cuda_stream)
                kept.append(whole.view(size, count)[:, ::4097].clone())
            first.wait_stream(second)
        torch.cuda.synchronize()
        comm.check()
    for step, rows in enumerate(kept):
        total = float(step) if size == 1 else sum(r + step for r in range(size))
        for r in range(size):
            assert bool((rows[r] == total + r).all()), (step, r)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("body", [check_bits, check_order_between_streams])
def test_bits(body: Callable[[int, int], None], size: int, tmp_path: Path) -> None:
    values(run_ranks(size, tmp_path, body, timeout=280.0))


# ---- failures ------------------------------------------------------------------------------------


def run_ahead(x: torch.Tensor) -> None:
    """Fills the queue behind a collective, while another thread takes and returns memory: both wait in the driver."""

    def allocate() -> None:
        torch.cuda.set_device(x.device)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.empty(64 * MIB, device=x.device)
            torch.cuda.empty_cache()

    thread = threading.Thread(target=allocate)
    thread.start()
    for _ in range(5000):
        x.add_(1.0)
    thread.join()


def check_rank_that_goes(rank: int, size: int, how: str, word: str) -> tuple[float, str]:
    device = here(rank)
    comm = communicator(device=device, timeout=SHORT)
    x = torch.ones(size * MIB, device=device)

    def issue() -> None:
        if word == "all_gather":
            comm.all_gather(x.data_ptr(), 4 * MIB, current_stream())
        else:
            comm.all_reduce(x.data_ptr(), MIB, torch.float32, "sum", current_stream())

    for _ in range(3):
        issue()
    torch.cuda.synchronize()
    if rank == size - 1 and size > 1:
        match how:
            case "killed" | "killed, the others run ahead":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raised":
                comm.abort("KeyError: a parameter")
                return 0.0, ""
    began = time.monotonic()
    with pytest.raises((gs.GeminiError, ValueError)) as raised:
        if size == 1:
            comm.close()
        issue()
        if how.endswith("run ahead"):
            run_ahead(x)
        torch.cuda.current_stream().synchronize()  # the watching thread makes it come back
        comm.check()
    comm.close()
    return time.monotonic() - began, str(raised.value)


@pytest.mark.parametrize("word", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("how", ["killed", "stopped", "raised", "killed, the others run ahead"])
def test_rank_that_goes(how: str, word: str, tmp_path: Path) -> None:
    size = min(LARGEST, 3)
    ended = run_ranks(size, tmp_path, check_rank_that_goes, how, word, timeout=200.0)
    for rank, (seconds, text) in enumerate(values(ended[: max(size - 1, 1)])):
        assert seconds < 4 * SHORT + 10
        if size > 1:
            shards = f"{size} x " if word == "all_gather" else ""
            assert f"{word} number 4 of {shards}{4 * MIB} bytes" in text, text
            assert f"rank {rank} of {size}" in text, text
            silent = f"rank {size - 1} said nothing"
            assert ("KeyError: a parameter" if how == "raised" else silent) in text, text


def check_agreement(rank: int, size: int) -> None:
    """The gradient of another parameter of the same size: NCCL sums both, and every rank is told behind the sum."""
    device = here(rank)
    model = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(2)).to(device)
    engine = gs.manage(model, timeout=PATIENT)
    x, mine = torch.ones(2, 64, device=device), rank % 2
    y = (model[0](x) * (1 - mine) + model[1](x) * mine).sum()
    if size == 1:
        torch.autograd.backward(y, inputs=[model[mine].weight])
        engine.close()
        return
    began = time.monotonic()
    with pytest.raises(gs.GeminiError) as raised:
        torch.autograd.backward(y, inputs=[model[mine].weight])
    text = str(raised.value)
    assert time.monotonic() - began < 30
    assert "the ranks have not issued the same collectives" in text, text
    assert "the gradient of parameter 0" in text and "the gradient of parameter 1" in text, text
    with pytest.warns(RuntimeWarning):
        engine.close()


@pytest.mark.parametrize("size", SIZES)
def test_agreement(size: int, tmp_path: Path) -> None:
    values(run_ranks(size, tmp_path, check_agreement, timeout=200.0))


def check_missing_at_the_start(rank: int, size: int) -> None:
    device = here(rank)
    began = time.monotonic()
    if rank == 0 and size > 1:
        time.sleep(2 * SHORT + 10)
        return
    if size > 1:
        with pytest.raises(gs.GeminiDeviceError, match="rank 0 did not come"):
            communicator(device=device, timeout=SHORT)
    assert time.monotonic() - began < 2 * SHORT + 10


def check_last_missing_at_the_start(rank: int, size: int) -> None:
    device = here(rank)
    began = time.monotonic()
    if rank == size - 1 and size > 1:
        time.sleep(3 * SHORT + 10)
        return
    if size > 1:
        with pytest.raises(gs.GeminiDeviceError, match=f"rank {size - 1} did not come"):
            communicator(device=device, timeout=SHORT)
    assert time.monotonic() - began < 3 * SHORT + 10


@pytest.mark.parametrize("body", [check_missing_at_the_start, check_last_missing_at_the_start])
def test_missing_at_the_start(body: Callable[[int, int], None], tmp_path: Path) -> None:
    values(run_ranks(min(LARGEST, 2), tmp_path, body, timeout=200.0))


# ---- speed ---------------------------------------------------------------------------------------

CHUNK = 64 * MIB
REPEATS = 20


def seconds_each(work: Callable[[], object]) -> tuple[float, float]:
    """Least seconds of one call on the device over five runs of REPEATS, and of the host to issue it."""
    best, issued = float("inf"), float("inf")
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        began = time.perf_counter()
        for _ in range(REPEATS):
            work()
        issued = min(issued, (time.perf_counter() - began) / REPEATS)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / REPEATS)
    return best, issued


def measure(rank: int, size: int) -> dict[str, float]:
    device = here(rank)
    plain = dist.new_group(backend="nccl")
    shard = CHUNK // size // 512 * 512
    own = slice(rank * shard // 2, (rank + 1) * shard // 2)
    x = torch.zeros(shard * size // 2, dtype=torch.bfloat16, device=device)
    figures = {"ranks": float(size), "shard_bytes": float(shard)}
    with communicator(device=device, timeout=PATIENT) as comm:
        stream = current_stream()
        ours = {
            "all_gather": lambda: comm.all_gather(x.data_ptr(), shard, stream),
            "reduce_scatter": lambda: comm.reduce_scatter(
                x.data_ptr(), shard // 2, torch.bfloat16, stream
            ),
        }
        theirs = {
            "all_gather": lambda: dist.all_gather_into_tensor(x, x[own], group=plain),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(x[own], x, group=plain),
        }
        for word in ours:
            theirs[word]()  # torch's communicator is made at its first use
            for name, work in (("ours", ours[word]), ("nccl", theirs[word])):
                device_seconds, host_seconds = seconds_each(work)
                figures[f"{word}_{name}_gb_s"] = shard * (size - 1) / device_seconds / 1e9
                figures[f"{word}_{name}_issue_us"] = host_seconds * 1e6
        comm.check()
    return figures


def test_bandwidth_of_a_chunk(tmp_path: Path) -> None:
    """In place on 64 MiB: at least 0.9 of what NCCL alone reaches (torch's calls, the same ranges)."""
    figures = values(run_ranks(LARGEST, tmp_path, measure, timeout=280.0))[0]
    print(json.dumps({"device": torch.cuda.get_device_name(0), **figures}))
    if LARGEST > 1:
        for word in ("all_gather", "reduce_scatter"):
            assert figures[f"{word}_ours_gb_s"] >= 0.9 * figures[f"{word}_nccl_gb_s"], figures
