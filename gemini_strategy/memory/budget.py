"""The device budget on CUDA: what is not ours counts too, and what several engines have of one device.

The core asks for chunks; torch's caching allocator asks through torch_pool.py; the rest of what this process
holds (driver context, modules, memory from before manage()) is read from the driver. On the host device there
is nothing around the chunks, and everything here is 0.

Of the engines on a device one leads: the first that trains, or else the first, among those with a budget. Torch's
memory counts in its budget, and it gives up chunks where torch needs more. Each of the others has a fixed part of
that budget for its chunks, at most its own budget, which counts whether it is used or not (invariant 2).

Invariants
    1. Torch's allocator asks one engine of a device at most, and while one is open with a budget, exactly one.
    2. The chunks of all engines, torch's pool and what others hold fit the leader's budget: it has what the parts
       leave, and a part becomes larger only after the others have become smaller.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from gemini_strategy.errors import GeminiError, GeminiMemoryError
from gemini_strategy.memory.torch_memory import LEAST_KEPT, TorchMemory
from gemini_strategy.sizes import size_text
from gemini_strategy.weakly import WeakSet

DRIVER_RESERVE = 128 << 20  # what the driver may still take: modules, library handles
# In the first step it takes most: kernels are loaded when they are first used (230 MB on an H200).
_FIRST_RESERVE = 384 << 20


def first_reserve(device_budget: int, spare: int | None = None) -> int:
    """Bytes of more room for the driver until the first step is over; little where the budget is small.

    Args:
        spare: bytes that are left beside the largest module; activations need some of them, too.
    """
    most = min(_FIRST_RESERVE, device_budget // 32)
    return max(0, most if spare is None else min(most, spare // 2))


def slack(device_budget: int) -> int:
    """Bytes that a plan leaves free within the budget, for torch's memory to grow a little without a new plan."""
    return max(LEAST_KEPT, device_budget // 128)


def parts_of(room: int, needs: Sequence[tuple[int, int]]) -> list[int]:
    """What each of several engines has of `room` bytes.

    Each has its least; what is left goes to all in proportion to what they lack, and none has more than its most.

    Args:
        needs: (least, most) bytes of each. The least of all together fit.
    """
    lacking = sum(most - least for least, most in needs)
    spare = min(max(room - sum(least for least, _ in needs), 0), lacking)
    return [least + (most - least) * spare // max(lacking, 1) for least, most in needs]


class DeviceMemory:
    """What surrounds the chunks of one engine on its device."""

    def __init__(self, device: torch.device) -> None:
        self.core: Any = None  # from join() on
        self.name = ""
        self.budget = -1  # none
        self.trains = False
        self.least = self.most = 0  # bytes of chunks
        self.part: int | None = None  # None: it leads, or has no budget
        self.reserve = 0  # bytes more for the driver, where it leads, until its first step is over
        self._on = _open(device) if device.type == "cuda" else None

    def join(self, core: Any, name: str, budget: int, least: int, trains: bool) -> None:
        """The engine has its core: it gets its part of the device.

        Args:
            name: of its model, for errors.
            budget: bytes; -1: none.
            least: bytes that its units need at once.

        Raises:
            GeminiMemoryError: the engines that are open on the device do not fit it together.
        """
        if self._on is None:
            return
        stats = core.stats()
        self.core, self.name, self.budget, self.trains = core, name, budget, trains
        self.least = least
        self.most = stats["weight_bytes"] + trains * stats["state_bytes"] + slack(budget)
        self._on.admit(self)

    def close(self) -> None:
        """Torch's memory is torch's again if this was the last engine, and else the others'. Idempotent."""
        on, self._on = self._on, None
        if on is not None:
            on.release(self)

    def needs(self, lead: DeviceMemory) -> tuple[int, int]:
        """(least, most) bytes of its chunks."""
        most = self.most if self is lead else min(self.most, self.budget)
        return self.least, max(self.least, most)

    def held_bytes(self) -> int:
        """Of chunks; 0 after the core is closed."""
        with contextlib.suppress(GeminiError):
            return int(self.core.stats()["device_bytes"])
        return 0

    def torch_bytes(self) -> int:
        """What torch holds; of that a core knows nothing before it has joined."""
        return 0 if self._on is None else self._on.torch.bytes()

    def external_bytes(self, chunk_bytes: int) -> int:
        """Device memory in use that is neither chunks nor torch's pool, with room for the driver, in bytes.

        Of an engine that does not lead: all of its budget but for its part.
        """
        if self._on is None:
            return 0
        if self.part is None:
            return self._on.beside(chunk_bytes) + self.reserve
        return max(self.budget - self.part, 0)

    def left_bytes(self, device_budget: int, chunk_bytes: int) -> int:
        """What others, and torch, leave of the budget for chunks and for what torch still takes; may be negative."""
        torch_bytes = self.torch_bytes() if self.part is None else 0
        return device_budget - self.external_bytes(chunk_bytes) - torch_bytes

    def follow(self) -> bool:
        """The core has what external_bytes says from now on; False: it holds more, and cannot give that up."""
        with contextlib.suppress(GeminiError):
            self.core.set_external_bytes(self.external_bytes(self.held_bytes()))
            return bool(self.core.reserve(0))
        return True

    def answer_for_torch(self, yes: bool) -> None:
        """Invariant 1."""
        with contextlib.suppress(GeminiError):
            self.core.answer_for_torch(yes)

    def first_reserve_bytes(self, device_budget: int, spare: int) -> int:
        """`first_reserve` for an engine that leads on a GPU."""
        leads = self._on is not None and self.part is None
        return first_reserve(device_budget, spare) if leads else 0

    def slack_bytes(self, device_budget: int) -> int:
        """`slack` where there is a GPU."""
        return 0 if self._on is None else slack(device_budget)

    def _torch(self) -> TorchMemory | None:
        """If it is this engine's to put in order."""
        return self._on.torch if self._on is not None and self._on.lead() is self else None

    def tidy(self) -> bool:
        """See TorchMemory."""
        torch_memory = self._torch()
        return torch_memory is not None and torch_memory.tidy()

    def give_cached(self) -> bool:
        """In a pass that has no room for its chunks; see TorchMemory."""
        torch_memory = self._torch()
        return torch_memory is not None and torch_memory.give_cached()

    def recover(self) -> bool:
        """See TorchMemory."""
        torch_memory = self._torch()
        return torch_memory is not None and torch_memory.recover()

    def explain(self, error: torch.OutOfMemoryError) -> None:
        """Adds to torch's text, which knows the whole device alone, what the budget is used for. Once."""
        if self._on is None or hasattr(error, "__notes__"):
            return
        lead = self._on.lead()
        if lead is None or lead.budget < 0:
            return
        others = self._on.parts()
        beside = f", parts of other models {size_text(others)}" if others else ""
        why = lead.core.refusal()
        stuck = f" Chunks that could not leave the device: {why}." if why else ""
        error.add_note(
            f"gemini: within device_budget, {size_text(lead.budget)}, chunks of parameters hold "
            f"{size_text(lead.held_bytes())}{beside} and torch {size_text(self._on.torch.bytes())}, activations and "
            "what the loop keeps, beside the driver's and others' memory. Fewer tokens at a time, activation "
            f"checkpointing or a larger device_budget make room.{stuck}"
        )


class _Device:
    """One CUDA device while engines are open on it."""

    def __init__(self, device: torch.device) -> None:
        self.torch = TorchMemory(device)
        self._device = device
        # In the order in which they came; who is garbage is gone.
        self._engines: WeakSet[DeviceMemory] = WeakSet()

    def lead(self) -> DeviceMemory | None:
        """Who answers for torch's memory."""
        return min(self._engines, key=lambda e: (e.budget < 0, not e.trains), default=None)

    def parts(self) -> int:
        """Bytes that engines other than the leader have for themselves."""
        return sum(engine.part or 0 for engine in self._engines)

    def _foreign(self, chunk_bytes: int) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return max(total - free - chunk_bytes - self.torch.bytes(), 0) + DRIVER_RESERVE

    def beside(self, chunk_bytes: int) -> int:
        """What surrounds the `chunk_bytes` of the leader."""
        others = [engine for engine in self._engines if engine.part is not None]
        return self._foreign(chunk_bytes + sum(e.held_bytes() for e in others)) + self.parts()

    def admit(self, engine: DeviceMemory) -> None:
        """See DeviceMemory.join."""
        with _lock:
            self._engines.add(engine)
            if engine.budget >= 0:
                self._check(engine)
            full = self._share_out()
        if full is not None and full is not engine:
            raise GeminiMemoryError(
                f"DEVICE: {full.name} holds {size_text(full.held_bytes())} of {self._device} in chunks that tensors "
                f"show, and cannot make room for {engine.name}: let go of what was read of its parameters, or "
                "manage the models before they are used"
            )

    def release(self, engine: DeviceMemory) -> None:
        """See DeviceMemory.close."""
        with _lock:
            if engine in self._engines:
                self._engines.discard(engine)
                self._share_out()

    def _bounded(self) -> list[DeviceMemory]:
        return [engine for engine in self._engines if engine.budget >= 0]

    def _room(self, lead: DeviceMemory) -> int:
        """Bytes for the chunks of all that have a budget."""
        foreign = self._foreign(sum(e.held_bytes() for e in self._bounded()))
        return lead.budget - foreign - self.torch.bytes()

    def _check(self, engine: DeviceMemory) -> None:
        """The least of all fits; else nothing has changed for the others."""
        bounded, lead = self._bounded(), self.lead()
        assert lead is not None
        room, wanted = self._room(lead), sum(e.least for e in bounded)
        if len(bounded) > 1 and wanted > room:
            self._engines.discard(engine)
            needs = " and ".join(f"{e.name} {size_text(e.least, is_wanted=True)}" for e in bounded)
            left = f"leaves {size_text(room)}" if room > 0 else "leaves nothing"
            enough = lead.budget + wanted - room
            raise GeminiMemoryError(
                f"DEVICE: the models on {self._device} need room for their largest modules at once ({needs}), "
                f"device_budget {left}: raise device_budget of {lead.name} to at least "
                f"{size_text(enough, is_wanted=True)} ({enough} bytes), close() an engine that is not needed, or give "
                "a smaller chunk_size"
            )

    def _share_out(self) -> DeviceMemory | None:
        """Invariants 1 and 2; an engine that cannot give up what it has too much."""
        lead = self.lead()
        if lead is None:
            return None
        bounded = self._bounded()
        parts: dict[DeviceMemory, int] = {}
        if len(bounded) > 1:
            room = self._room(lead) - slack(lead.budget) - first_reserve(lead.budget)
            sizes = parts_of(room, [engine.needs(lead) for engine in bounded])
            parts = dict(zip(bounded, sizes, strict=True))
        for engine in self._engines:
            if engine is not lead:
                engine.answer_for_torch(False)
        # Who has less than before comes first, then the leader, who has the rest.
        turn = {}
        for engine in bounded:
            before = engine.budget if engine.part is None else engine.part
            turn[engine] = 1 if engine is lead else 2 * (parts[engine] > before)
            engine.part = None if engine is lead else parts[engine]
        full = None
        for engine in sorted(bounded, key=turn.__getitem__):
            if not engine.follow():
                full = full or engine
        lead.answer_for_torch(True)
        return full


_lock = threading.RLock()  # of the parts of all devices
# CUDA device index -> who is open there
_devices: dict[int, weakref.ref[_Device]] = {}


def _found(device: torch.device) -> _Device | None:
    reference = _devices.get(device.index)
    return None if reference is None else reference()


def _open(device: torch.device) -> _Device:
    if _found(device) is not None:
        gc.collect()  # a model that the script has dropped is part of a cycle with its engine
    with _lock:
        found = _found(device)
        if found is None:
            found = _Device(device)
            _devices[device.index] = weakref.ref(found)
        else:
            found.torch.give_cached()
        return found
