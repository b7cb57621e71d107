"""communicator(): the ranks of a torch.distributed group, as collectives that the core can issue.

On CUDA it is an NCCL communicator of its own, made from C; the group's store carries the id. On the host device bytes
travel through a gloo process group of its own, point to point, so that a rank that is missing has a name; sums are
taken in C (csrc/comm/host.c). Neither disturbs the user's group, and neither is disturbed by its timeouts.

When a rank fails or aborts it leaves a note in the store: its text, and the last collectives that it has issued. A rank
that fails later, or sees that another has gone, reads the notes and says what the others said, the first collective
in which the ranks differ, who has not reached the one that failed, and who said nothing.
"""

from __future__ import annotations

import base64
import ctypes
import importlib.util
import json
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gemini_strategy import _C
from gemini_strategy.errors import GeminiDeviceError, GeminiError
from gemini_strategy.precision import FORMATS

# The core's numbers (gm_comm_dtype); 64-bit integers are summed and compared without a sign.
COMM_DTYPES = {**FORMATS, torch.uint64: 3, torch.int64: 3}
DEFAULT_TIMEOUT = 300.0
_TAG = 0
_PROBE_BYTES, _PROBE_RUNS = 64 << 20, 6
_DIFFERENT = "all ranks must issue the same collectives in the same order"  # csrc/comm/host.c
_WAY_OUT = (
    "the ranks run different modules, or in another order: every rank has to run all of them, as often and in the same "
    "order (let a batch pass all experts, and multiply what is to count nothing by zero)"
)
_GONE = "is gone or has closed its end"
_Made = TypeVar("_Made")
_made: dict[str, int] = {}  # communicators made so far, by the name of the group


def communicator(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> Communicator:
    """A communicator between the ranks of `group` (default: all). Every rank of the group calls this, in one order.

    It returns when all of them have come, and raises `GeminiDeviceError` naming those that have not after
    `timeout` seconds. The same timeout holds for each collective.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise GeminiError(
            "communicator: torch.distributed is not initialised; start with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    if not 0 < timeout <= 1e9:
        raise ValueError(f"communicator: timeout is {timeout} s; it must be positive")
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("communicator: this rank is not in the group")
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"communicator: device is {device}; it must be cpu or cuda")
    name = group.group_name
    number = _made[name] = _made.get(name, 0) + 1
    store = dist.PrefixStore(f"gemini/comm/{number}", group.get_group_store())
    return connect(store, group.rank(), group.size(), device, timeout)


def connect(
    store: dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    timeout: float,
    names: Sequence[int] = (),
    n_named: int = 0,
) -> Communicator:
    """The same between ranks that have a store in common: one that nobody else uses, with a prefix of its own.

    names: what texts call the ranks, where they are a part of `n_named` ranks.
    """
    notes = _Notes(store, rank, size, names, patience=patience_of(timeout))
    make = _host if device.type == "cpu" else _nccl
    core = notes.meet(
        "new communicator", device.type, timeout, lambda: make(device, notes, rank, size, timeout)
    )
    core.name_ranks(notes.names, n_named or size)
    return Communicator(core, notes, timeout)


@dataclass(eq=False)
class Wait:
    """A thread waits for other ranks, or their collectives are under way, since a time of time.monotonic().

    has_ended: well; what was found out for one that failed is for the text of its failure.
    """

    since: float
    thread: int | None = None
    has_ended: bool = False


class Communicator:
    """One rank's end. Addresses are device memory; streams are CUstream as int, 0 the default.

    Leaving a `with` block by an exception aborts it, so that the other ranks raise instead of waiting.
    """

    def __init__(self, core: _C.Comm, notes: _Notes, timeout: float) -> None:
        self.core = core  # for the engine; its collectives raise without the other ranks' notes
        self.rank, self.size = core.rank, core.size
        self._notes = notes
        self._timeout = timeout
        self._is_reported = False
        self._under_way: tuple[int, Wait] | None = None  # with how many were issued

    def wait(self) -> Wait | None:
        """That of now, if there is one. On CUDA it is seen when this is called, and ends when something is issued."""
        if self._notes.gloo is not None:
            return self._notes.gloo.wait
        n_issued, _ = self.core.calls()
        is_over, before = self.core.is_over(), self._under_way
        if before is not None and (is_over or before[0] != n_issued):
            before[1].has_ended = not self.core.failed_at
            self._under_way = None
        if self._under_way is None and not is_over:
            self._under_way = n_issued, Wait(time.monotonic())
        return None if self._under_way is None else self._under_way[1]

    def all_gather(self, address: int, shard_bytes: int, stream: int = 0) -> None:
        """Rank r's shard is at address + r * shard_bytes; afterwards every rank has all of them."""
        self._run(self.core.all_gather, address, shard_bytes, stream)

    def reduce_scatter(
        self, address: int, shard_count: int, dtype: torch.dtype, stream: int = 0
    ) -> None:
        """Leaves the sum of shard r in place on rank r; float32, bfloat16 or float16."""
        self._run(self.core.reduce_scatter, address, shard_count, _number(dtype), stream)

    def all_reduce(
        self, address: int, count: int, dtype: torch.dtype, op: str = "sum", stream: int = 0
    ) -> None:
        """op: "sum", or "max" of unsigned 64-bit integers."""
        if op not in ("sum", "max"):
            raise ValueError(f'all_reduce: op is {op!r}; it must be "sum" or "max"')
        self._run(self.core.all_reduce, address, count, _number(dtype), int(op == "max"), stream)

    def label(self, label: int) -> None:
        """Says what the collectives from here on are for; the same on every rank. 0: nothing."""
        self.core.label(label)

    def rates(self, device: torch.device) -> tuple[float, float]:
        """Bytes/s of all ranks' shards together that an all-gather and a reduce-scatter of bf16 move, in large pieces.

        A collective. (0, 0) on the host device, whose figures say nothing of a network.
        """
        if device.type != "cuda" or self.size == 1:
            return 0.0, 0.0
        count = _PROBE_BYTES // 2 // self.size
        with torch.cuda.device(device):
            buffer = torch.zeros(count * self.size, dtype=torch.bfloat16, device=device)
            stream = torch.cuda.current_stream()
            where = (buffer.data_ptr(), stream.cuda_stream)
            gather = self._rate(stream, lambda: self.all_gather(where[0], 2 * count, where[1]))
            reduce = self._rate(
                stream, lambda: self.reduce_scatter(where[0], count, torch.bfloat16, where[1])
            )
            self.check()
            del buffer
            torch.cuda.empty_cache()
        return gather, reduce

    def _rate(self, stream: torch.cuda.Stream, issue: Callable[[], None]) -> float:
        best = 0.0
        for _ in range(_PROBE_RUNS):  # the first ones make connections
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            issue()
            end.record(stream)
            end.synchronize()
            best = max(best, _PROBE_BYTES / (begin.elapsed_time(end) * 1e-3))
        return best

    def check(self) -> None:
        """Raises the first failure, if there is one."""
        self._run(self.core.check)

    def explained(self, error: GeminiError, number: int = 0) -> GeminiError:
        """`error`, a failure of this communicator, with what the other ranks said of it; told to them, too.

        Args:
            number: the collective that the ranks have to have reached; 0: that in which the failure was noticed.
        """
        if self._is_reported:
            return error
        self._tell(str(error))
        if _DIFFERENT in str(error):  # who is where is in it: all have compared it
            return type(error)(f"{_WAY_OUT}: {error}")
        # Who has gone has left its note before; whoever started the ranks may soon end this one, too.
        patience = patience_of(self._timeout)
        said = self._notes.read("failed", wait=1.0 if _GONE in str(error) else patience)
        calls = {r: _unpacked(text) for r, text in self._notes.read("calls", wait=0.0).items()}
        parts = [
            _first_difference(calls),
            _not_reached(calls, number or self.core.failed_at, number > 0),
        ]
        parts += self._notes.of_others(said, " (ended, stopped, or busy elsewhere)")
        return type(error)("; ".join([str(error), *filter(None, parts)]))

    def abort(self, reason: str) -> None:
        """Ends it for all ranks; theirs raise with `reason`."""
        if not self._is_reported:
            self._tell(reason)
        self.core.abort(reason)

    def close(self) -> None:
        """Waits for what is issued, and ends it; any number of times."""
        self.core.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    def _tell(self, text: str) -> None:
        self._is_reported = True
        self._notes.write("calls", _packed(self.core.history()))
        self._notes.write("failed", text[:2000])  # last: who reads it finds the calls, too

    def _run(self, call: Callable[..., None], *args: int) -> None:
        try:
            call(*args)
        except GeminiError as error:
            raise self.explained(error) from error.__cause__


def _number(dtype: torch.dtype) -> int:
    if dtype not in COMM_DTYPES:
        raise ValueError(f"dtype is {dtype}; it must be one of {', '.join(map(str, COMM_DTYPES))}")
    return COMM_DTYPES[dtype]


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 2", or "ranks 0, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


# ---- what the ranks have issued ----

_Calls = dict[int, str]  # the last collectives of a rank, in words, by number


def _packed(history: list[tuple[int, str]]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(history).encode())).decode()


def _unpacked(text: str) -> _Calls:
    return dict(json.loads(zlib.decompress(base64.b64decode(text))))


def _first_difference(calls: dict[int, _Calls]) -> str:
    """The first collective that is another one on some ranks, of those that all who told still know."""
    known = [(r, issued) for r, issued in calls.items() if issued]
    first = max((min(issued) for _, issued in known), default=0)
    last = max((max(issued) for _, issued in known), default=-1)
    for number in range(first, last + 1):
        at: dict[str, list[int]] = {}
        for r, issued in known:
            if number in issued:
                at.setdefault(issued[number].replace(f" number {number}", "", 1), []).append(r)
        if len(at) > 1:
            earlier = " or an earlier one" if number == first > 1 else ""
            each = ", ".join(f"{ranks_text(ranks)} {words}" for words, ranks in at.items())
            return f"the ranks differ from collective {number}{earlier} on: {each}"
    return ""


def _not_reached(calls: dict[int, _Calls], number: int, is_told: bool) -> str:
    """is_told: the collective's words, too, which a failure of its own begins with."""
    words = next((issued[number] for issued in calls.values() if number in issued), "")
    about = f" ({words.replace(f' number {number}', '', 1)})" if is_told and words else ""
    late = {r: max(issued, default=0) for r, issued in calls.items()}
    return "; ".join(
        f"rank {r} has not reached number {number}{about}, its last is "
        + (calls[r][last] if last else "none")
        for r, last in late.items()
        if last < number
    )


# ---- notes in the group's store ----


def patience_of(timeout: float) -> float:
    """Seconds to ask the others what they know of a failure: little beside the timeout that they come after."""
    return max(1.0, min(5.0, timeout / 8))


class _Notes:
    """One text for each rank and topic, in the group's store. A store that fails or hangs costs time, no error."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, names: Sequence[int] = (), *, patience: float
    ) -> None:
        self.store = store.clone()  # a visit that hangs must not block whoever else uses it
        # for one visit: whoever serves the store may be the rank that stopped
        self.patience = patience
        self.size = size
        self.names = list(names or range(size))
        self.name = self.names[rank]
        self.gloo: _Gloo | None = None  # through which bytes travel, on the host device
        self.is_lost = False  # a visit failed or hung: the next ones are left out

    def meet(self, what: str, kind: str, timeout: float, make: Callable[[], _Made]) -> _Made:
        """What `make` makes of all ranks together, once all have come; says who has not. kind: of device."""
        self.write("here", kind)
        here = self.read("here", wait=timeout)
        missing = [r for r in self.names if r not in here]
        others = [r for r, other in here.items() if other != kind]
        words = f"{what}, rank {self.name}"
        if missing:  # whoever makes it alone waits longer than `timeout`
            raise GeminiDeviceError(
                f"{words}: {ranks_text(missing)} did not come within {timeout:g} s"
            )
        if others:
            raise GeminiDeviceError(
                f"{words}: {ranks_text(others)} made it for another kind of device than {kind}"
            )
        failed, cause = [], None
        try:
            made = make()
        except NotImplementedError:
            raise
        except RuntimeError as error:
            failed, cause = [str(error) or type(error).__name__], error
        # A rank that goes at once would close connections that others are still making; and one whose connections were
        # closed says why: the one that closed them has said it, or will at once.
        self.write("made", "".join(failed))
        ended = self.read("made", wait=patience_of(timeout) if failed else timeout)
        failed += [f"rank {r} said: {t}" for r, t in ended.items() if t and r != self.name]
        missing = [r for r in self.names if r not in ended]
        if missing and not failed:
            failed.append(f"{ranks_text(missing)} did not make it within {timeout:g} s")
        if failed:
            raise GeminiDeviceError(f"{words}: {'; '.join(failed)}") from cause
        return made

    def has(self, key: str) -> bool:
        found: list[bool] = []
        self._visit(lambda: found.append(self.store.check([key])), self.patience)
        return found == [True]

    def get(self, key: str) -> str | None:
        """What is there, if anything is."""
        found: list[str] = []

        def visit() -> None:
            if self.store.check([key]):
                found.append(self.store.get(key).decode(errors="replace"))

        self._visit(visit, self.patience)
        return found[0] if found else None

    def mark(self, key: str, text: str = "") -> None:
        self._visit(lambda: self.store.set(key, text), self.patience)

    def write(self, topic: str, text: str) -> None:
        self.mark(f"{topic}/{self.name}", text)

    def read(self, topic: str, wait: float) -> dict[int, str]:
        """The texts by rank, all of them as soon as they are there, those that are after `wait` seconds."""
        found: dict[int, str] = {}
        end = time.monotonic() + wait

        def visit() -> None:
            while True:
                for r in self.names:
                    key = f"{topic}/{r}"
                    if r not in found and self.store.check([key]):
                        found[r] = self.store.get(key).decode(errors="replace")
                if len(found) == self.size or time.monotonic() >= end:
                    return
                time.sleep(0.02)

        self._visit(visit, wait + self.patience)
        return dict(sorted(found.copy().items()))

    def of_others(self, said: Mapping[int, str], guess: str = "") -> list[str]:
        """What the others have said of a failure, and who of them has said nothing; `guess`: why."""
        parts = [f"rank {r} said: {text}" for r, text in said.items() if r != self.name]
        silent = [r for r in self.names if r not in said and r != self.name]
        if silent and self.is_lost:
            parts.append(
                f"the group's store does not answer, {ranks_text(silent)} could not be asked"
            )
        elif silent:
            parts.append(f"{ranks_text(silent)} said nothing{guess}")
        return parts

    def _visit(self, do: Callable[[], None], patience: float) -> None:
        is_done = threading.Event()

        def quietly() -> None:
            try:
                do()
            except (RuntimeError, OSError):  # it ended with the rank that served it
                return
            is_done.set()

        if not self.is_lost:
            thread = threading.Thread(target=quietly, name="gemini-comm-notes", daemon=True)
            thread.start()
            thread.join(patience)
            self.is_lost = not is_done.is_set()


# ---- the host device: gloo, point to point ----


class _Gloo:
    """The transport of csrc/comm/comm.h over a gloo process group of its own."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: float, names: Sequence[int] = ()
    ) -> None:
        self.rank, self.timeout = rank, timeout
        self.names = names or range(size)  # for texts
        self.wait: Wait | None = None
        self.group: Any = None
        if size > 1:
            self.group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))

    def exchange(self, out: Sequence[tuple[int, int]], into: Sequence[tuple[int, int]]) -> None:
        group = self.group
        if group is None:
            raise GeminiDeviceError("the communicator is closed")
        self.wait = Wait(time.monotonic(), threading.get_ident())
        end = self.wait.since + self.timeout
        works = []
        peer, verb = self.rank, ""
        try:
            for issue, pieces, verb in ((group.recv, into, "sent"), (group.send, out, "taken")):
                for peer, (address, n_bytes) in enumerate(pieces):
                    if n_bytes:
                        works.append((issue([_bytes_at(address, n_bytes)], peer, _TAG), peer, verb))
            for waited in works:
                work, peer, verb = waited
                # gloo drops parts of milliseconds: a wait that ended before `end` would name a rank gone.
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0) + 0.002))
            self.wait.has_ended = True
        except RuntimeError as error:
            if time.monotonic() >= end:
                raise GeminiDeviceError(
                    f"rank {self.names[peer]} has not {verb} its bytes after {self.timeout:g} s"
                ) from error
            raise GeminiDeviceError(f"rank {self.names[peer]} {_GONE}") from error
        finally:  # an exception keeps this frame: close() must have the last reference to end the connections
            works.clear()
            self.wait = None
            group = issue = work = waited = None

    def close(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.abort()


def _bytes_at(address: int, n_bytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_ubyte * n_bytes).from_address(address), dtype=torch.uint8)


def _host(device: torch.device, notes: _Notes, rank: int, size: int, timeout: float) -> _C.Comm:
    gloo = _Gloo(dist.PrefixStore("gloo", notes.store), rank, size, timeout, notes.names)
    notes.gloo = gloo
    return _C.comm_host(gloo.exchange, gloo.close, rank, size)


# ---- CUDA: NCCL ----


def _nccl_path() -> str | None:
    """The library that torch's own packages bring, for the case that torch has not loaded it."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = (spec and spec.submodule_search_locations) or ()
    files = [Path(folder) / "lib" / "libnccl.so.2" for folder in folders]
    return next((str(file) for file in files if file.is_file()), None)


def _nccl(device: torch.device, notes: _Notes, rank: int, size: int, timeout: float) -> _C.Comm:
    path = _nccl_path()
    if rank == 0:
        try:
            word = _C.comm_nccl_id(path).hex()
        except (NotImplementedError, GeminiError) as error:
            notes.store.set("id", f"rank 0: {error}")  # so that nobody waits for it
            raise
        notes.store.set("id", word)
    else:
        notes.store.wait(["id"], timedelta(seconds=timeout))
        word = notes.store.get("id").decode()
    if word.startswith("rank 0"):
        raise GeminiDeviceError(word)
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    return _C.comm_nccl(path, ordinal, bytes.fromhex(word), rank, size, timeout)
