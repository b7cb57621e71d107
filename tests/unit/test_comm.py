"""Communicators over gloo processes: the bits of each collective, and what the others see when a rank fails."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gemini_strategy as gs
from gemini_strategy import _C
from gemini_strategy.ranks import comm as comm_module
from gemini_strategy.ranks.comm import Communicator, communicator
from helpers.ranks import run_ranks, values

PATIENT = 900.0  # longer than run_ranks waits: whoever sits out this timeout fails
SHORT = 6.0
SLICE = 2**20  # elements, as in csrc/comm/host.c
GUARD = 3  # elements before and behind a range
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 2, 5, 64, 191, 4099)


# ---- numbers, the same ones on every rank --------------------------------------------------------


def numbers(rank: int, count: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
    seed = torch.Generator().manual_seed(1000 * rank + 7 * count + sum(map(ord, f"{dtype}{kind}")))
    if dtype in (torch.int64, torch.uint64):
        return torch.randint(-(2**63), 2**63 - 1, (count,), generator=seed).view(dtype)
    if kind == "exact":  # small integers times a power of two: any order of a sum gives the same
        return torch.randint(-8, 9, (count,), generator=seed).to(dtype) / 16
    x = torch.randn(count, generator=seed, dtype=torch.float64)
    x *= torch.exp2(torch.randint(-20, 20, (count,), generator=seed))
    x = x.to(dtype)
    if kind == "special":
        odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, 6e-8])
        where = torch.randint(0, 7, (count,), generator=seed)
        x = torch.where(torch.rand(count, generator=seed) < 0.5, x, odd.to(dtype)[where])
    return x


def sum_in_rank_order(terms: list[torch.Tensor]) -> torch.Tensor:
    dtype = terms[0].dtype
    if dtype == torch.uint64:
        return sum_in_rank_order([t.view(torch.int64) for t in terms]).view(dtype)
    wide = dtype if dtype == torch.int64 else torch.float32
    total = terms[0].to(wide, copy=True)
    for term in terms[1:]:
        total += term
    return total.to(dtype)


def greatest(terms: list[torch.Tensor]) -> torch.Tensor:
    lists = [t.view(torch.uint64).tolist() for t in terms]
    return torch.tensor([max(xs) for xs in zip(*lists, strict=True)], dtype=torch.uint64)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    if got.dtype.is_floating_point:  # every NaN is canonical, torch's may have a sign
        nan = want.isnan()
        assert bool((got.isnan() == nan).all())
        got, want = got.masked_fill(nan, 0), want.masked_fill(nan, 0)
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


class Range:
    """`content` between guards, at an address that is aligned to an element and no more."""

    def __init__(self, content: torch.Tensor) -> None:
        mark = torch.full((GUARD,), 77).to(content.dtype)
        self.all = torch.cat([mark, content, mark])
        self.content = self.all[GUARD:-GUARD]
        self.address = self.content.data_ptr()
        self.mark = mark

    def check_guards(self) -> None:
        assert torch.equal(self.all[:GUARD], self.mark)
        assert torch.equal(self.all[-GUARD:], self.mark)


# ---- bits ----------------------------------------------------------------------------------------


def check_all_gather(comm: Communicator, n_bytes: int) -> None:
    shards = [
        torch.randint(
            0, 256, (n_bytes,), generator=torch.Generator().manual_seed(100 * r + n_bytes)
        )
        for r in range(comm.size)
    ]
    shards = [shard.to(torch.uint8) for shard in shards]
    mine = [s if r == comm.rank else torch.zeros_like(s) for r, s in enumerate(shards)]
    place = Range(torch.cat(mine))
    comm.all_gather(place.address, n_bytes)
    assert torch.equal(place.content, torch.cat(shards))
    place.check_guards()


def check_reduce_scatter(comm: Communicator, count: int, dtype: torch.dtype, kind: str) -> None:
    terms = [numbers(r, count * comm.size, dtype, kind) for r in range(comm.size)]
    place = Range(terms[comm.rank])
    comm.reduce_scatter(place.address, count, dtype)
    own = slice(comm.rank * count, (comm.rank + 1) * count)
    if comm.size == 1:
        assert torch.equal(place.content.view(torch.uint8), terms[0].view(torch.uint8))
    else:
        assert_same_bits(place.content[own], sum_in_rank_order(terms)[own])
    if kind == "exact":
        exact = torch.stack([t.double() for t in terms]).sum(0).to(dtype)
        assert_same_bits(place.content[own] + 0, exact[own] + 0)  # + 0: either zero
    place.check_guards()


def check_all_reduce(comm: Communicator, count: int, dtype: torch.dtype, kind: str) -> None:
    terms = [numbers(r, count, dtype, kind) for r in range(comm.size)]
    for op, want in (("sum", sum_in_rank_order), ("max", greatest)):
        if op == "max" and dtype != torch.uint64:
            continue
        place = Range(terms[comm.rank])
        comm.all_reduce(place.address, count, dtype, op)
        if comm.size == 1:
            assert torch.equal(place.content.view(torch.uint8), terms[0].view(torch.uint8))
        else:
            assert_same_bits(place.content, want(terms))
        place.check_guards()


def check_bits(rank: int, size: int) -> None:
    with communicator(timeout=PATIENT) as comm:
        assert (comm.rank, comm.size) == (rank, size) == (comm.core.rank, comm.core.size)
        for count in SIZES:
            check_all_gather(comm, count)
            for kind in ("random", "special", "exact"):
                for dtype in FLOATS:
                    check_reduce_scatter(comm, count, dtype, kind)
                    check_all_reduce(comm, count, dtype, kind)
            for dtype in (torch.int64, torch.uint64):
                check_all_reduce(comm, count, dtype, "random")
        # More than one slice of a sum, and a range whose last ranks have fewer elements or none.
        check_reduce_scatter(comm, SLICE + 5, torch.bfloat16, "random")
        check_all_reduce(comm, 2 * SLICE + 1, torch.float32, "random")
        comm.all_gather(0, 0)  # nothing is a size, too
        comm.check()


def check_bits_and_ends(rank: int, size: int) -> None:
    check_bits(rank, size)
    for _ in range(size):  # its last collective may be over for one rank long before another
        with communicator(timeout=PATIENT) as comm:
            check_all_gather(comm, 5_000_003)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_bits(size: int, tmp_path: Path) -> None:
    values(run_ranks(size, tmp_path, check_bits_and_ends))


def check_in_a_row(rank: int, size: int) -> list[bytes]:
    """A step's worth of collectives without a wait in between, on two communicators; returns what is left."""
    count = 257
    with communicator(timeout=PATIENT) as comm, communicator(timeout=PATIENT) as second:
        weights = numbers(rank, count * size, torch.bfloat16, "random")
        gradient = numbers(rank, count * size, torch.float32, "random")
        norm = numbers(rank, 22, torch.uint64, "random")
        for _ in range(20):
            comm.reduce_scatter(gradient.data_ptr(), count, torch.float32)
            own = gradient[rank * count : (rank + 1) * count]
            weights[rank * count : (rank + 1) * count] = (own / size).bfloat16()
            second.all_reduce(norm.data_ptr(), 22, torch.uint64)
            comm.all_gather(weights.data_ptr(), 2 * count)
            gradient = weights.float()
        return [
            weights.view(torch.uint8).numpy().tobytes(),
            norm.view(torch.uint8).numpy().tobytes(),
        ]


def test_ranks_and_runs_agree(tmp_path: Path) -> None:
    kept = []
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        kept += values(run_ranks(3, tmp_path / run, check_in_a_row))
    assert all(one == kept[0] for one in kept)


# ---- failures ------------------------------------------------------------------------------------

BUFFER = 48  # elements of fp32
WORDS = ("all_gather", "reduce_scatter", "all_reduce")


def issue(comm: Communicator, word: str, buffer: torch.Tensor) -> None:
    address, n = buffer.data_ptr(), buffer.numel()
    match word:
        case "all_gather":
            comm.all_gather(address, 4 * n // comm.size)
        case "reduce_scatter":
            comm.reduce_scatter(address, n // comm.size, torch.float32)
        case "all_reduce":
            comm.all_reduce(address, n, torch.float32)


def failure_of(comm: Communicator, word: str) -> str:
    """The words of what the collective raised."""
    with pytest.raises(gs.GeminiError) as raised:
        issue(comm, word, torch.ones(BUFFER))
    return str(raised.value)


def check_rank_that_goes(rank: int, size: int, word: str, how: str) -> str:
    comm = communicator(timeout=SHORT if how == "stopped" else PATIENT)
    for number, each in enumerate(WORDS, 1):
        comm.label(number)
        issue(comm, each, torch.ones(BUFFER))
    comm.label(11)
    if rank == size - 1:
        match how:
            case "exits":
                time.sleep(0.5)
                sys.exit(3)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0 and how == "exits":  # rank 1 is waiting for this one, which fails before it sends
        time.sleep(1.5)
    first = failure_of(comm, word)
    again = failure_of(comm, "all_reduce")  # the first failure stands
    assert first.startswith(again), (first, again)
    comm.close()
    comm.close()
    return first


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("exits", "all_gather"),
        ("killed", "reduce_scatter"),
        ("stopped", "all_reduce"),
        ("killed", "all_gather"),
    ],
)
def test_rank_that_goes(how: str, word: str, tmp_path: Path) -> None:
    ended = run_ranks(3, tmp_path, check_rank_that_goes, word, how)
    assert ended[2].value is None
    texts = values(ended[:2])
    for rank, text in enumerate(texts):
        assert f"{word} number 4 of" in text and f"rank {rank} of 3" in text
        assert "label 11), rank" in text
        assert "rank 2 said nothing" in text and "differ" not in text and "reached" not in text
    for text in texts:  # its own finding, or what the other rank said
        if how == "stopped":
            assert f"rank 2 has not sent its bytes after {SHORT:g} s" in text
        else:
            assert "rank 2 is gone" in text


def check_raising(rank: int) -> None:
    """Rank 1 leaves by an exception; the others are told, and do not wait for the timeout."""
    if rank == 1:
        with pytest.raises(KeyError), communicator(timeout=PATIENT):
            raise KeyError("a parameter's name")
        return
    with communicator(timeout=PATIENT) as comm:
        text = failure_of(comm, "all_gather")
        assert "all_gather number 1 of 3 x 64 bytes" in text and f"rank {rank} of 3" in text
        assert 'rank 1 said: KeyError: "a parameter\'s name"' in text
        assert "rank 1 has not reached number 1, its last is none" in text
        with pytest.raises(gs.GeminiError, match="all_gather number 1"):
            comm.check()


def check_different_collectives(rank: int) -> None:
    with communicator(timeout=PATIENT) as comm:
        buffer = torch.full((BUFFER,), float(rank))
        issue(comm, "all_reduce", torch.ones(BUFFER))
        word = "reduce_scatter" if rank == 1 else "all_gather"
        with pytest.raises(gs.GeminiError) as raised:
            issue(comm, word, buffer)
        text = str(raised.value)
        assert f"{word} number 2 of 3 x 64 bytes" in text and "the same collectives" in text
        if rank == 1:
            assert "ranks 0, 2 are at all_gather number 2 of 3 x 64 bytes; " in text
        else:
            assert "rank 1 is at reduce_scatter number 2 of 3 x 64 bytes (sum of fp32); " in text
        assert text.startswith("the ranks run different modules, or in another order: every rank")
        assert bool((buffer == rank).all())


def check_different_sizes(rank: int) -> None:
    with communicator(timeout=PATIENT) as comm:
        n_bytes = 96 if rank == 2 else 64
        who = "ranks 0, 1 are" if rank == 2 else "rank 2 is"
        with pytest.raises(gs.GeminiError, match=f"{who} at all_gather number 1 of 3 x"):
            comm.all_gather(torch.zeros(300, dtype=torch.uint8).data_ptr(), n_bytes)


def check_abort_wakes_a_waiting_thread(rank: int) -> None:
    comm = communicator(timeout=PATIENT)
    if rank == 0:
        timer = threading.Timer(0.5, comm.abort, ["the user has had enough"])
        timer.start()
        assert "the user has had enough" in failure_of(comm, "all_gather")
        timer.join()
    else:
        time.sleep(1.5)
        text = failure_of(comm, "all_gather")
        assert "rank 0" in text and "the user has had enough" in text
    comm.close()


def check_missing_at_the_start(rank: int) -> None:
    if rank == 2:
        time.sleep(2.5 * SHORT)
        return
    with pytest.raises(gs.GeminiDeviceError, match="new communicator.*: rank 2 did not come"):
        communicator(timeout=SHORT)


def gathers(comm: Communicator, labels: Iterable[int]) -> str:
    """Gathers the chunks, and one more; the text of what that raised."""
    buffer = torch.full((BUFFER,), float(comm.rank))
    with pytest.raises(gs.GeminiError) as raised:
        for label in labels:
            comm.label(label)
            comm.all_gather(buffer.data_ptr(), 4)
            buffer.fill_(comm.rank)
        comm.label(20)
        comm.all_gather(buffer.data_ptr(), 8)
    assert bool((buffer == comm.rank).all())
    return str(raised.value)


def check_control_flow(rank: int, size: int) -> None:
    """One rank does something else, of the same kind and size: every rank says what each was at."""
    odd = size - 1
    rest = "rank 0" if size == 2 else f"ranks {', '.join(map(str, range(odd)))}"
    verb = "is" if size == 2 else "are"
    with communicator(timeout=PATIENT) as comm:  # another chunk
        text = gathers(comm, [1, 2, 9 if rank == odd else 3, 4])
    theirs = f"all_gather number 3 of {size} x 4 bytes (label 3)"
    its = f"all_gather number 3 of {size} x 4 bytes (label 9)"
    mine, others = (its, theirs) if rank == odd else (theirs, its)
    who = f"{rest} {verb} at" if rank == odd else f"rank {odd} is at"
    assert text.startswith("the ranks run different modules, or in another order: every rank")
    assert f": {mine}, rank {rank} of {size}: {who} {others}; all ranks must" in text

    with communicator(timeout=PATIENT) as comm:  # one is left out
        text = gathers(comm, [1, 2, 4, 5] if rank == odd else [1, 2, 3, 4, 5])
    assert f"all_gather number 3 of {size} x 4 bytes (label 3)" in text
    assert f"all_gather number 3 of {size} x 4 bytes (label 4)" in text

    with communicator(timeout=PATIENT) as comm:  # the last one is
        text = gathers(comm, [1, 2] if rank == odd else [1, 2, 3])
    assert f"all_gather number 3 of {size} x 4 bytes (label 3)" in text
    assert f"all_gather number 3 of {size} x 8 bytes (label 20)" in text

    with communicator(timeout=PATIENT) as comm:  # none is, and much has gone before
        buffer = torch.ones(BUFFER)
        for i in range(600):
            comm.label(i % 20 + 1)
            comm.all_gather(buffer.data_ptr(), 4)
        history = comm.core.history()
        assert [number for number, _ in history] == list(range(89, 601))
        last = f"all_gather number 600 of {size} x 4 bytes (label 20)"
        assert history[-1] == (600, last) and comm.core.failed_at == 0


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_whose_control_flow_differs(size: int, tmp_path: Path) -> None:
    values(run_ranks(size, tmp_path, check_control_flow))


def check_behind(rank: int, size: int) -> None:
    """Rank 2 fails by itself between two chunks; the others say how far it came."""
    with contextlib.suppress(KeyError), communicator(timeout=PATIENT) as comm:
        for label in (1, 2):
            comm.label(label)
            issue(comm, "all_gather", torch.ones(BUFFER))
        if rank == 2:
            raise KeyError("a batch")
        comm.label(3)
        text = failure_of(comm, "reduce_scatter")
        assert "reduce_scatter number 3 of 3 x 64 bytes (sum of fp32; label 3)" in text
        assert "rank 2 has not reached number 3, its last is all_gather number 2 of" in text
        assert "(label 2)" in text and "rank 2 said: KeyError: 'a batch'" in text


def check_lost_store(rank: int, size: int) -> None:
    """Without notes a failure costs a few seconds, and blames nobody for saying nothing."""

    class Lost:
        def set(self, *words: object) -> None:
            raise RuntimeError("connection reset")

    comm = communicator(timeout=PATIENT)
    comm._notes.store = Lost()
    if rank == 0:
        comm.abort("enough")
    else:
        text = failure_of(comm, "all_gather")
        assert "the group's store does not answer" in text and "said nothing" not in text
    comm.close()


def check_failures(rank: int, size: int) -> None:
    check_raising(rank)
    check_different_collectives(rank)
    check_different_sizes(rank)
    check_abort_wakes_a_waiting_thread(rank)
    with communicator(timeout=PATIENT) as comm:  # none of it has hurt the group
        check_all_gather(comm, 100)
    check_behind(rank, size)
    check_lost_store(rank, size)
    check_missing_at_the_start(rank)


def check_slow_to_connect(rank: int, size: int) -> None:
    """No rank has it before all have: one that goes at once would break what others are still making."""
    make = comm_module._host
    store = torch.distributed.distributed_c10d._get_default_store()

    def slowly(*arguments: object) -> object:
        made = make(*arguments)
        if rank == 0:
            time.sleep(0.5)
            store.set("made by rank 0", "")
        return made

    comm_module._host = slowly  # type: ignore[assignment]
    with communicator(timeout=PATIENT):
        assert store.check(["made by rank 0"])

    def broken(*arguments: object) -> object:
        made = make(*arguments)
        if rank == 1:
            raise RuntimeError("no port is left")
        if rank == 0:  # as gloo does when rank 1 has closed what rank 0 is connecting to
            raise RuntimeError("connection closed by peer")
        return made

    comm_module._host = broken  # type: ignore[assignment]
    with pytest.raises(gs.GeminiDeviceError, match="no port is left") as raised:
        communicator(timeout=PATIENT)
    assert ("rank 1 said: no port is left" in str(raised.value)) == (rank != 1)


def test_all_ranks_have_it_or_none(tmp_path: Path) -> None:
    values(run_ranks(3, tmp_path, check_slow_to_connect))


def test_failures_of_ranks_that_live(tmp_path: Path) -> None:
    values(run_ranks(3, tmp_path, check_failures))


# ---- one process ---------------------------------------------------------------------------------


def test_without_torch_distributed() -> None:
    with pytest.raises(gs.GeminiError, match="torch.distributed is not initialised"):
        communicator()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "alone"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_arguments_by_name(alone: None) -> None:
    with pytest.raises(ValueError, match="timeout is 0.0 s"):
        communicator(timeout=0.0)
    with pytest.raises(ValueError, match="device is meta"):
        communicator(device="meta")
    comm = communicator()
    x = torch.zeros(64)
    with pytest.raises(ValueError, match="dtype is torch.int32"):
        comm.all_reduce(x.data_ptr(), 64, torch.int32)
    with pytest.raises(ValueError, match="reduce_scatter, rank 0 of 1: the dtype must be fp32"):
        comm.reduce_scatter(x.data_ptr(), 64, torch.uint64)
    with pytest.raises(ValueError, match="op is 'min'"):
        comm.all_reduce(x.data_ptr(), 64, torch.float32, "min")
    with pytest.raises(ValueError, match="all_reduce, rank 0 of 1: the operation must be sum"):
        comm.all_reduce(x.data_ptr(), 64, torch.float32, "max")
    with pytest.raises(ValueError, match="all_gather, rank 0 of 1: the address"):
        comm.all_gather(0, 64)
    with pytest.raises(ValueError, match="longer than the address space"):
        comm.all_gather(x.data_ptr(), -1)
    comm.all_gather(x.data_ptr(), 64)
    comm.close()
    comm.close()
    comm.abort("too late to matter")
    with pytest.raises(ValueError, match="communicator is closed"):
        comm.all_gather(x.data_ptr(), 64)
    with pytest.raises(ValueError, match="communicator is closed"):
        comm.check()
    with pytest.raises(TypeError):
        _C.Comm()


def test_exception_of_the_transport_is_the_cause() -> None:
    def refuse(out: object, into: object) -> None:
        raise OSError("no route to rank 1")

    def interrupt(out: object, into: object) -> None:
        raise KeyboardInterrupt

    closed = []
    x = torch.zeros(64)
    comm = _C.comm_host(refuse, lambda: closed.append(1), 0, 2)
    with pytest.raises(gs.GeminiDeviceError, match="number 1.*no route to rank 1") as raised:
        comm.all_gather(x.data_ptr(), 64, 0)
    assert isinstance(raised.value.__cause__, OSError) and closed
    comm.close()
    comm = _C.comm_host(interrupt, lambda: None, 0, 2)
    with pytest.raises(KeyboardInterrupt):
        comm.all_gather(x.data_ptr(), 64, 0)
    with pytest.raises(gs.GeminiDeviceError, match="number 1.*KeyboardInterrupt"):  # and stands
        comm.all_gather(x.data_ptr(), 64, 0)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        _C.comm_host(refuse, lambda: None, 2, 2)


def test_nccl_needs_cuda() -> None:
    """In a build without CUDA, and in one with it on a machine that has no NCCL or no driver."""
    if _C.BUILT_WITH_CUDA:
        with pytest.raises(ValueError, match="id has 3 bytes"):
            _C.comm_nccl(None, 0, b"abc", 0, 1, 1.0)
        return
    with pytest.raises(NotImplementedError, match="no CUDA support"):
        _C.comm_nccl_id(None)
    with pytest.raises(NotImplementedError, match="no CUDA support"):
        _C.comm_nccl(None, 0, bytes(128), 0, 1, 1.0)


def test_cuda_communicator_says_why_it_cannot(alone: None) -> None:
    if not _C.BUILT_WITH_CUDA:
        with pytest.raises(NotImplementedError, match="no CUDA support"):
            communicator(device="cuda:0")


def test_forked_child_has_no_communicator(alone: None) -> None:
    comm = communicator()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            comm.check()
        except gs.GeminiError as error:
            code = 0 if "forked" in str(error) else 2
        comm.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    comm.check()
    comm.close()


def test_a_rank_that_is_late_is_not_called_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gloo drops parts of milliseconds of the time that it is given."""
    now = [0.0]

    def monotonic() -> float:
        now[0] += 0.0003
        return now[0]

    class Late:
        def wait(self, timeout: timedelta) -> None:
            now[0] += timeout // timedelta(milliseconds=1) / 1000
            raise RuntimeError("Timed out")

    def issue(*_: Any) -> Late:
        return Late()

    monkeypatch.setattr(comm_module, "time", SimpleNamespace(monotonic=monotonic))
    gloo = comm_module._Gloo(None, 0, 1, 2.0, ["0", "1"])
    gloo.group = SimpleNamespace(recv=issue, send=issue, abort=lambda: None)
    data = torch.zeros(8, dtype=torch.uint8)
    piece = data.data_ptr(), data.numel()
    with pytest.raises(gs.GeminiDeviceError, match="rank 1 has not sent its bytes after 2 s"):
        gloo.exchange([(0, 0), (0, 0)], [(0, 0), piece])
