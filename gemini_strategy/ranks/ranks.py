"""The ranks of a run: which processes train one model together, and what they tell each other besides collectives.

A rank owns a shard of every chunk; ranks of a *shard group* have all of them together, ranks of a *replica group* have
the same shard. What is said here travels over a gloo group of our own, the control group: small values that must be
equal, fields that are made whole, the first weights. The user's groups are left alone.

Invariants
    1. The control group is used by one thread at a time, in the order of the program, the same on every rank.
    2. Before anything travels, the ranks tell each other what they are about to do. Ranks that are at different places
       all raise, by name.
    3. The first failure ends it for all ranks: whoever waits is told, and later calls raise the same error at once.
    4. One rank alone says nothing to anybody, and needs no torch.distributed.
    5. Before a rank waits for others here its collectives have run, where these run in calls of its own: another rank
       may be waiting in one of them.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import os
import socket
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gemini_strategy import _C
from gemini_strategy.errors import GeminiDeviceError, GeminiError
from gemini_strategy.ranks.comm import (
    _GONE,
    DEFAULT_TIMEOUT,
    Communicator,
    Wait,
    _Gloo,
    _Notes,
    connect,
    patience_of,
    ranks_text,
)
from gemini_strategy.ranks.lookout import Lookout
from gemini_strategy.weakly import WeakSet

_FRAME = 1024  # bytes that the ranks tell each other at once
_SAMPLES = 256  # elements of a tensor whose bits stand for all of them
_MAX_TIMEOUT = 1e9
_made: dict[tuple[int, ...], int] = {}  # so far, by the members: all of them count alike
_open: WeakSet[Ranks] = WeakSet()


@dataclass(frozen=True)
class Group:
    """Some of the ranks; `rank` is the place of this one among `members`, which count in the run."""

    rank: int
    members: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.members)


class Ranks:
    """This process among those that train one model together. All of them make one, in the same order.

    Args:
        mesh: a DeviceMesh (1-D: shards over it; 2-D: replicas over the first dimension, shards over the second), a
            ProcessGroup, or None: all ranks of torch.distributed if it is initialised.
        timeout: seconds that one rank waits for another.
        is_sharded: False: every rank keeps the whole state.
        is_watched: False: nobody looks out where the others are.

    Attributes:
        rank, size: of this run; `members` are the ranks in torch.distributed's numbers.
        local_rank, local_size: among the ranks of this run on the same host, in the order of their ranks.
        shard, replica: the groups of this rank.

    Raises:
        GeminiError: there are no such ranks, or this process is not one of them.
        GeminiDeviceError: some did not come.
    """

    def __init__(
        self,
        mesh: Any = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        is_sharded: bool = True,
        is_watched: bool = True,
    ) -> None:
        if not (isinstance(timeout, int | float) and 0 < timeout <= _MAX_TIMEOUT):
            raise ValueError(f"timeout={timeout!r} must be a positive number of seconds")
        self.timeout = float(timeout)
        self._how = mesh, is_sharded
        self._twins: WeakSet[Ranks] = WeakSet()
        self.members, shape = _members_of(mesh, is_sharded)
        self.size = len(self.members)
        self.rank = self.members.index(dist.get_rank()) if self.size > 1 else 0
        self.shard, self.replica = _groups_of(self.rank, shape if is_sharded else (self.size, 1))
        self.local_rank, self.local_size = 0, 1
        self._local = [0]
        self._comms: list[Communicator] = []
        self._settle: Callable[[], object] | None = None
        # kind and text only: an exception that was raised holds the frames below it, and their tensors
        self._failure: tuple[type[GeminiError], str] | None = None
        self._gloo: Any = None
        self._reason: str | None = None  # of what may fail now
        self.when = ""  # " after step 7", for texts
        self._pid = os.getpid()
        self._begun = 0  # meetings
        self._meeting = ""
        self._lookout: Lookout | None = None
        self._verdict: str | None = None  # of the lookout, which has ended it
        if self.size == 1:
            return
        name = hashlib.sha256(repr(self.members).encode()).hexdigest()[:16]
        world = dist.group.WORLD.get_group_store()
        store = dist.PrefixStore(f"gemini/ranks/{name}", world)
        patience = patience_of(timeout)
        tries = _Notes(store, self.rank, self.size, patience=patience)
        number = _made.get(self.members, 0) + 1
        while tries.has(f"{number}/over"):  # the others came, and this rank did not
            number += 1
        _made[self.members] = number
        self._store = dist.PrefixStore(str(number), store)
        control = dist.PrefixStore("control", self._store)
        self._notes = _Notes(control, self.rank, self.size, patience=patience)
        gloo = dist.PrefixStore("gloo", self._notes.store)
        try:
            self._gloo = self._notes.meet(
                "control group", "", timeout, lambda: _Gloo(gloo, self.rank, self.size, timeout)
            )
        except BaseException:
            tries.mark(f"{number}/over")
            raise
        _open.add(self)
        try:
            hosts = self.gather("who is where", _host())
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise
        self._local = [r for r, host in enumerate(hosts) if host == hosts[self.rank]]
        self.local_rank, self.local_size = self._local.index(self.rank), len(self._local)
        if is_watched:
            self._lookout = Lookout(self, dist.PrefixStore("lookout", self._store))

    def twin(self) -> Ranks:
        """The same ranks for another thread, with a control group of their own. A collective, as making them is.

        They wait for each other as long as it takes, and end with these, or when the process of one of them does.
        """
        if self.size == 1:
            return self
        mesh, is_sharded = self._how
        twin = Ranks(mesh, self.timeout, is_sharded=is_sharded, is_watched=False)
        twin.timeout = twin._gloo.timeout = _MAX_TIMEOUT
        twin._settle = self._settle
        self._twins.add(twin)
        return twin

    # ---- what the ranks tell each other ----

    def gather(self, what: str, value: Any = None) -> list[Any]:
        """The value of every rank, in their order; values are what JSON can say. Also a barrier."""
        return self._tell(what, value, range(self.size))

    def gather_here(self, what: str, value: Any = None) -> list[Any]:
        """The same among the ranks of this host."""
        return self._tell(what, value, self._local)

    def agree(self, fields: Mapping[str, Any], what: str = "configuration") -> None:
        """Raises on every rank if one field is not the same on all of them.

        Raises:
            GeminiError: names the first field that differs, with each rank's value.
        """
        check_same(self.gather(f"agreement on {what}", dict(fields)))

    def assemble(
        self, values: torch.Tensor, first: int, n: int, what: str, root: int | None = None
    ) -> None:
        """Makes a host tensor whole, of which each rank of the shard group has the elements [first, first + n).

        Args:
            values: contiguous, on the CPU.
            what: what it is, for errors.
            root: the rank that is to have the whole; None: all. Shard groups without it have nothing to do.
        """
        members = self.shard.members
        if len(members) == 1 or (root is not None and root not in members):
            return
        _check_on_host(values, what)
        with self._whole(what):
            spans = self._spans(values, first, n, what, members)
            end = 0
            for rank, (begin, count) in zip(members, spans, strict=True):
                if begin != end and count:
                    text = f"{what}: rank {rank} has elements from {begin} on, expected {end}"
                    raise self._broken(GeminiError(text))
                end += count
            if end != values.numel():
                text = f"{what}: ranks have {end} of {values.numel()} elements"
                raise self._broken(GeminiError(text))
            pieces = dict(zip(members, (_piece(values, *span) for span in spans), strict=True))
            mine = pieces.pop(self.rank)
            takers = members if root is None else (root,)
            sent = dict.fromkeys((r for r in takers if r != self.rank), mine)
            self._exchange(what, sent, pieces if self.rank in takers else {})

    def share(self, values: torch.Tensor, first: int, n: int, what: str) -> None:
        """Rank 0's elements [first, first + n) become those of this rank; each rank says its own.

        Args:
            values: contiguous, on the CPU; elsewhere it stays as it is.
        """
        if self.size == 1:
            return
        everyone = range(self.size)
        _check_on_host(values, what)
        with self._whole(what):
            spans = self._spans(values, first, n, what, everyone)
            pieces = {r: _piece(values, *spans[r]) for r in everyone if r}
            if self.rank:
                self._exchange(what, {}, {0: pieces[self.rank]})
            else:
                self._exchange(what, pieces, {})

    def _spans(
        self, values: torch.Tensor, first: int, n: int, what: str, members: Sequence[int]
    ) -> list[tuple[int, int]]:
        told = self._tell(what, [values.numel(), str(values.dtype), first, n], members)
        kinds = [json.dumps(own[:2]) for own in told]
        if len(set(kinds)) > 1:
            raise self._broken(
                GeminiError(f"{what}: the ranks differ in its elements: {by_value(kinds, members)}")
            )
        return [(own[2], own[3]) for own in told]

    def _tell(self, what: str, value: Any, members: Sequence[int]) -> list[Any]:
        if len(members) == 1:
            return [value]
        self._begun, self._meeting = self._begun + 1, what
        text = json.dumps([what, value]).encode()
        mine = len(text).to_bytes(4, "little") + text
        with self._whole(what):
            frames = self._swap(
                what, mine[:_FRAME].ljust(_FRAME, b"\0"), dict.fromkeys(members, _FRAME)
            )
            lengths = {r: 4 + int.from_bytes(frame[:4], "little") for r, frame in frames.items()}
            if max(lengths.values()) > _FRAME:
                rests = {r: max(length - _FRAME, 0) for r, length in lengths.items()}
                more = self._swap(what, mine[_FRAME:], rests)
                frames = {r: frames[r] + more[r] for r in frames}
        told = [json.loads(frames[r][4 : lengths[r]]) for r in members]
        places = [place for place, _ in told]
        if len(set(places)) > 1:
            raise self._broken(
                GeminiError(
                    f"the ranks are at different places: {by_value(places, members)}; all of them must make the same "
                    "calls in the same order"
                )
            )
        return [value for _, value in told]

    def _swap(self, what: str, mine: bytes, sizes: Mapping[int, int]) -> dict[int, bytes]:
        """The bytes of each rank in `sizes`, of these sizes; `mine` goes to all of them."""
        sent = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8)
        received = {
            r: torch.empty(size, dtype=torch.uint8, device="cpu") for r, size in sizes.items()
        }
        others = [r for r in sizes if r != self.rank]
        self._exchange(
            what,
            {r: (sent.data_ptr(), len(mine)) for r in others},
            {r: (received[r].data_ptr(), sizes[r]) for r in others},
        )
        texts = {r: received[r].numpy().tobytes() for r in others}
        return {r: texts.get(r, mine) for r in sizes}

    def _exchange(
        self, what: str, out: Mapping[int, tuple[int, int]], into: Mapping[int, tuple[int, int]]
    ) -> None:
        self.check()
        self.settle()
        nothing = (0, 0)
        try:
            self._gloo.exchange(
                [out.get(r, nothing) for r in range(self.size)],
                [into.get(r, nothing) for r in range(self.size)],
            )
        except GeminiDeviceError as error:
            words = f"{what}{self.when}, rank {self.rank} of {self.size}: {error}"
            raise self._broken(GeminiDeviceError(words)) from error

    @contextlib.contextmanager
    def _whole(self, what: str) -> Iterator[None]:
        """Inside, an interrupt is the end: the others would take what comes next for the rest of this."""
        try:
            yield
        except GeminiError:
            raise
        except BaseException as error:
            self._broken(GeminiDeviceError(f"{what}: {type(error).__name__} on this rank"))
            raise

    def settle(self) -> None:
        """Invariant 5, before this process waits for what another rank has a part in."""
        if self._settle is not None and self._reason is None:  # else it may be the only one here
            with contextlib.suppress(GeminiError):  # whoever uses what it brings raises it
                self._settle()

    def settles_by(self, settle: Callable[[], object]) -> None:
        """`settle()` runs the collectives that are issued."""
        self._settle = settle

    # ---- what the lookout asks ----

    def wait(self) -> Wait | None:
        """What this rank waits for, if it does."""
        gloo, comms = self._gloo, list(self._comms)
        found = None if gloo is None else gloo.wait
        return found or next(filter(None, (comm.wait() for comm in comms)), None)

    def begun(self) -> list[int]:
        """How many meetings, and collectives of each communicator."""
        return [self._begun, *(number for number, _ in self.calls())]

    def last_begun(self) -> str:
        """The meeting or the collective, in words."""
        is_here = self._gloo is not None and self._gloo.wait is not None
        words = [history[-1][1] for c in self._comms if (history := c.core.history())]
        return self._meeting if is_here or not words else words[-1]

    def end_waiting(self, text: str) -> None:
        """It waits for ranks that wait for it: the end, with this text."""
        if self._failure is None:
            self._verdict = text
            self._failure = GeminiError, text
            self._notes.write("failed", text[:2000])
            self._end(text)

    # ---- failure ----

    def check(self) -> None:
        """Raises the first failure, if there is one."""
        if self._failure is not None:
            raise self._failure[0](self._failure[1])
        if self.size > 1 and (self._gloo is None or self._pid != os.getpid()):
            raise GeminiError("these ranks are closed, or this process was forked from one of them")

    @contextlib.contextmanager
    def revealing(self) -> Iterator[None]:
        """Inside, torch makes errors of its own of ours: that of a collective is raised in their place."""
        try:
            yield
        except RuntimeError:
            with self.explaining():
                for comm in self._comms:
                    comm.core.check()
            raise

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def calls(self) -> list[list[int]]:
        """Of each of this rank's communicators: how many collectives it has issued, and a hash of them."""
        return [list(comm.core.calls()) for comm in self._comms]

    def compare_calls(self, what: str, everyone: Sequence[list[list[int]]]) -> None:
        """Raises, and ends everything between the ranks, unless all have issued the same; each rank gave calls().

        Raises:
            GeminiError: names the first collective that differs.
        """
        for i, comm in enumerate(self._comms):
            if any(own[i] != everyone[0][i] for own in everyone):
                error = GeminiError(f"{what}: the ranks have not issued the same collectives")
                told = comm.explained(error, max(own[i][0] for own in everyone))
                self.abort(str(error))
                raise told

    def explained(self, error: GeminiError) -> GeminiError:
        """An error that may be about other ranks, with what they say of it."""
        if self._verdict is not None:
            return GeminiError(self._verdict)
        if self._failure is not None:
            return error
        fact = self._fact()
        for comm in self._comms:
            try:
                comm.core.check()
            except GeminiError:
                told = comm.explained(error)
                self.abort(str(error))
                return self._with_fact(told, fact)
        return error

    def _fact(self) -> str | None:
        """Where all ranks are, if somebody has asked."""
        return None if self._lookout is None else self._lookout.fact()

    def _with_fact(self, error: GeminiError, fact: str | None) -> GeminiError:
        """`error`, which is about other ranks, begins with where they are, or is that they wait for each other."""
        verdict = None if self._lookout is None else self._lookout.verdict()
        if verdict is not None:
            return GeminiError(verdict)
        return error if fact is None else type(error)(f"{fact}; {error}")

    def failed(self, error: GeminiError) -> GeminiError:
        """`error`, of something else between these ranks, is the end of this, too; with what the others said."""
        return error if self.size == 1 or self._gloo is None else self._broken(error)

    def _broken(self, error: GeminiError) -> GeminiError:
        """`error`, from now on the end of everything between the ranks; with what the others said."""
        if self._verdict is not None:
            return GeminiError(self._verdict)
        if self._failure is not None:
            return error
        fact = self._fact()
        self._failure = type(error), str(error)
        self._notes.write("failed", self._reason or str(error))
        self._end(self._reason or str(error))
        if isinstance(error, GeminiDeviceError):
            said = self._notes.read("failed", wait=min(2.0, patience_of(self.timeout)))
            error = type(error)("; ".join([str(error), *self._notes.of_others(said)]))
            error = self._with_fact(error, fact)
            self._failure = type(error), str(error)
        return error

    def _is_under_way(self) -> bool:
        comms = [comm for ranks in (self, *self._twins) for comm in ranks._comms]
        return not all(comm.core.is_over() for comm in comms)

    def abort(self, reason: str) -> None:
        """Ends it for all ranks: those that wait for this one raise, with `reason`. Idempotent."""
        if self.size > 1 and self._gloo is not None and self._failure is None:
            self._failure = GeminiError, f"rank {self.rank} has ended this run: {reason}"
            self._notes.write("failed", reason)
            self._end(reason)

    def _end(self, reason: str) -> None:
        for twin in list(self._twins):
            twin.abort(reason)
        for comm in self._comms:
            comm.abort(reason)
        if self._gloo is not None:
            self._gloo.close()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """An error inside that is about other ranks is raised with what they say of it."""
        try:
            yield
        except GeminiError as error:
            told = self.explained(error)
            if told is error:
                raise
            raise told from error

    @contextlib.contextmanager
    def patience(self, seconds: float, reason: str) -> Iterator[None]:
        """Inside, this rank waits for others this long only; what they are told if that was too short."""
        if self._gloo is None:
            yield
            return
        gloo, self._reason = self._gloo, reason
        gloo.timeout = min(self.timeout, seconds)
        try:
            yield
        finally:
            gloo.timeout, self._reason = self.timeout, None

    def give_up(self, what: str, error: BaseException) -> None:
        """An exception on this rank is the end for all ranks; after the engine that uses them."""
        self.abort(f"{what}: {type(error).__name__}: {error}")
        self.close()

    # ---- for the engine ----

    def communicators(self, device: torch.device) -> dict[str, Any]:
        """What the core needs of the other ranks, by the names of its arguments; nothing where there are none.

        Communicators of the shard group and of the replica group, and the speed of collectives (bytes/s of all ranks'
        shards together, the least of all ranks; 0: not known). A collective.
        """
        found = []
        for name, group in (("shard", self.shard), ("replica", self.replica)):
            if group.size == 1:
                found.append(None)
                continue
            self.check()
            store = dist.PrefixStore(f"{name}/{group.members[0]}", self._store)
            try:
                comm = connect(
                    store, group.rank, group.size, device, self.timeout, group.members, self.size
                )
            except GeminiError as error:
                words = f"{name} group of {ranks_text(group.members)}: {error}"
                raise self._broken(type(error)(words)) from error
            self._comms.append(comm)
            found.append(comm.core)
        if self.size == 1:
            return {}
        rates = self._comms[0].rates(device)
        everyone = self.gather("speed of collectives", list(rates))
        return {
            "shard_comm": found[0],
            "replica_comm": found[1],
            "gather_rate": min(gather for gather, _ in everyone),
            "reduce_rate": min(reduce for _, reduce in everyone),
        }

    def close(self) -> None:
        """Ends it on this rank; after the engine that uses it. Idempotent."""
        _open.discard(self)
        if self._lookout is not None:
            self._lookout.stop()
        if self._pid != os.getpid():
            return
        self._settle = None
        for comm in self._comms:
            comm.close()
        if self._gloo is not None:
            self._gloo.close()
            self._gloo = None


def check_same(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raises if a field is not the same in the fields of every rank; names the first."""
    for field in dict.fromkeys(itertools.chain.from_iterable(everyone)):
        said = [json.dumps(own[field]) if field in own else "nothing" for own in everyone]
        if len(set(said)) > 1:
            raise GeminiError(
                f"the ranks differ in {field}: {by_value(said)}; it must be the same on all of them"
            )


def check_lines(what: str, everyone: Iterable[Sequence[str]]) -> None:
    """Raises for the first line that is not the same on all ranks; what: with {} for its number."""
    for index, lines in enumerate(itertools.zip_longest(*everyone)):
        check_same([{what.format(index): line} for line in lines])


def fingerprint(values: torch.Tensor, of_all: bool = False) -> str:
    """Tells values from others by the bits of some of them, or of all."""
    flat = values.detach().reshape(-1)
    some = flat[:: 1 if of_all else max(flat.numel() // _SAMPLES, 1)].to("cpu").contiguous()
    return f"{flat.numel()} elements {zlib.crc32(some.view(torch.uint8).numpy()):08x}"


def _members_of(mesh: Any, is_sharded: bool) -> tuple[tuple[int, ...], tuple[int, int]]:
    """(ranks in torch.distributed's numbers, (replicas, shards))."""
    is_started = dist.is_available() and dist.is_initialized()
    if mesh is None and not is_started:
        n = os.environ.get("WORLD_SIZE", "")
        if n.isdecimal() and int(n) > 1 and "RANK" in os.environ:
            warnings.warn(
                f"WORLD_SIZE={n}, but torch.distributed is not initialised: this process trains alone; call "
                "torch.distributed.init_process_group() before manage() to train with the others",
                stacklevel=4,
            )
        return (0,), (1, 1)
    if not is_started:
        raise GeminiError(
            "mesh= was given, but torch.distributed is not initialised: start with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    if mesh is None:
        n = dist.get_world_size()
        return tuple(range(n)), (1, n)
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise GeminiError(
            f"rank {dist.get_rank()} is not in the group given as mesh=: only its ranks call manage() with it"
        )
    if isinstance(mesh, dist.ProcessGroup):
        members = tuple(dist.get_process_group_ranks(mesh))
        shape: tuple[int, ...] = (1, len(members))
    elif isinstance(mesh, dist.device_mesh.DeviceMesh):
        members = tuple(mesh.mesh.flatten().tolist())
        shape = tuple(mesh.mesh.shape)
        if len(shape) > 2:
            raise GeminiError(
                f"mesh has {len(shape)} dimensions: give one (shards) or two (replicas, shards) of them, for example "
                f"mesh[{(mesh.mesh_dim_names or ('a name',))[-1]!r}]"
            )
        if is_sharded and mesh.mesh.numel() > 1:
            _check_names(mesh)
    else:
        raise TypeError(
            f"mesh must be a DeviceMesh, a ProcessGroup or None, got {type(mesh).__name__}"
        )
    if dist.get_rank() not in members:
        raise GeminiError(
            f"rank {dist.get_rank()} is not in the mesh of {ranks_text(members)}: only its ranks call manage() with it"
        )
    return members, (shape if len(shape) == 2 else (1, *shape))


def _check_names(mesh: Any) -> None:
    """Dimensions count by their place; names that say otherwise would be another sharding than was meant."""
    names = list(mesh.mesh_dim_names or ())
    if names and ("repl" in names[-1].lower() or (len(names) == 2 and "shard" in names[0].lower())):
        raise GeminiError(
            f"mesh has the dimensions {tuple(names)} of {tuple(mesh.mesh.shape)} ranks, but the first of two is "
            "the replicas and the last the shards: give init_device_mesh(..., (replicas, shards), "
            'mesh_dim_names=("replicate", "shard")), or enable_distributed_storage=False for replicas alone'
        )


def _groups_of(rank: int, shape: tuple[int, int]) -> tuple[Group, Group]:
    """(shard group, replica group) of a rank in (replicas, shards), row by row."""
    replicas, shards = shape
    row, column = divmod(rank, shards)
    shard = tuple(range(row * shards, (row + 1) * shards))
    replica = tuple(range(column, replicas * shards, shards))
    return Group(column, shard), Group(row, replica)


def _host() -> list[str]:
    """What tells this host from others: containers of one machine are hosts of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return [socket.gethostname(), boot]


def _check_on_host(values: torch.Tensor, what: str) -> None:
    if values.device.type != "cpu" or not values.is_contiguous():
        raise ValueError(f"{what}: a contiguous tensor on the CPU is wanted")


def _piece(values: torch.Tensor, first: int, n: int) -> tuple[int, int]:
    """(address, bytes) of elements [first, first + n)."""
    size = values.element_size()
    return values.data_ptr() + first * size, n * size


def by_value(said: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """ "'a' on ranks 0, 2, 'b' on rank 1"."""
    by_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks or range(len(said)), said, strict=True):
        by_text.setdefault(text, []).append(rank)
    return ", ".join(f"{text[:300]} on {ranks_text(found)}" for text, found in by_text.items())


def _explain(text: str) -> str | None:
    """A failure of the core: that two ranks wait for each other, if it is that."""
    for ranks in list(_open):
        if ranks._verdict is not None and ranks._verdict[:100] in text:
            return ranks._verdict
        if ranks._lookout is not None and ranks._comms and _GONE in text:
            verdict = ranks._lookout.verdict()
            if verdict is not None:
                return verdict
    return None


_C.explain_by(_explain)
_LAST_SECONDS = 10.0  # of an end without an error, for what is issued


@atexit.register
def _leave() -> None:
    """The process ends with engines open: the other ranks need not wait for it.

    They may still read what this one shows for collectives that it has issued, unless it ends by an error.
    """
    error = getattr(sys, "last_value", None)
    reason = "" if error is None else f" by {type(error).__name__}: {error}"
    end = time.monotonic() + (_LAST_SECONDS if error is None else 0.0)
    for ranks in list(_open):
        if ranks._pid == os.getpid():
            with contextlib.suppress(Exception):
                while ranks._is_under_way() and time.monotonic() < end:
                    time.sleep(0.001)
                ranks.abort(f"its process ended{reason}, with the engine open")
                if ranks._lookout is not None:
                    ranks._lookout.stop()
