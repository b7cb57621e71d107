"""Who looks out while a rank waits for the others: a thread that asks where they are, and says it.

A rank that waits long asks; the lookout of each other rank answers with where its program is, whatever that waits for.
Ranks that are slow are waited for, with a notice. Where two wait for each other it is the end for both, at once.

Invariants
    1. A rank that nobody asks does nothing but look, every few seconds, whether it is asked.
    2. Two ranks wait for each other if both wait and each has begun something that the other has not: all begin the
       same in the same order. A rank waits that has since the look before, so its numbers are of one moment.
    3. Answers to what was asked in an earlier wait do not count. Those of a wait that failed stay for its error's text.
    4. Only a rank that still waits ends it; then all do, since a thread that waits is woken by the other side's end.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist

from gemini_strategy.ranks.comm import Wait, _Notes, patience_of
from gemini_strategy.ranks.places import place_of

if TYPE_CHECKING:
    from gemini_strategy.ranks.ranks import Ranks

LOOK_SECONDS = 2.0  # between two looks
ASK_SECONDS = 8.0  # of waiting, before the others are asked
NOTICE_SECONDS = 20.0  # before it is said
_ALL = (
    "all ranks have to make the same calls in the same order, also those that only read. Let every rank make this call "
    "and use what it gives on one, or make it after "
    "gemini_strategy.engine_of(model).close(), when each rank has the whole model"
)


@dataclasses.dataclass
class Report:
    """What a rank says of itself: where it is, and how far.

    Attributes:
        words: see Place.
        waits: for other ranks, here; waits_in_torch: in a call of torch.distributed, for these ranks of the run.
        begun: how many meetings, and collectives of each communicator.
        last: the last of them, in words.
        number: of the report.
    """

    words: str
    waits: bool
    waits_in_torch: list[int]
    begun: list[int]
    last: str
    number: int


class Lookout:
    """The lookout of one rank."""

    def __init__(self, ranks: Ranks, store: dist.Store) -> None:
        self._ranks = weakref.proxy(ranks)  # a run that is dropped ends with it
        self._store = store.clone()  # a visit that hangs must not block whoever else uses it
        self._notes = _Notes(store, ranks.rank, ranks.size, patience=patience_of(ranks.timeout))
        self._stop = threading.Event()
        self._asked = b""
        self._n_asked = self._n_said = 0
        # The wait that was asked for last, and what the ranks have said since.
        self._asked_in: tuple[Wait | None, dict[int, Report]] = (None, {})
        self._old: dict[int, int] = {}  # the numbers of reports that were there before it
        self._mark = ""  # of the place at the last look
        self._told: Wait | None = None  # that a notice was given for
        threading.Thread(target=self._run, name="gemini-lookout", daemon=True).start()

    def stop(self) -> None:
        """No call of the store begins after its next look."""
        self._stop.set()

    def verdict(self) -> str | None:
        """Where the ranks are, if they wait for each other: found here, or by another rank; this rank first."""
        found = self._notes.get("verdict")
        if found is None:
            return None
        return self._text({int(r): Report(**own) for r, own in json.loads(found).items()})

    def fact(self) -> str | None:
        """Where the ranks were when they were asked, this one first; None: in the wait that failed none has said it."""
        asked, reports = self._asked_in
        is_of_failure = asked is not None and not asked.has_ended
        others = {r: own for r, own in reports.items() if r != self._ranks.rank}
        return self._text(reports) if is_of_failure and others else None

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._stop.wait(LOOK_SECONDS):
                self._look()
        except (RuntimeError, OSError, ReferenceError):  # the store has ended, or the run
            return

    def _look(self) -> None:
        wait = self._ranks.wait()
        if wait is not None and time.monotonic() - wait.since >= ASK_SECONDS:
            self._ask(wait)
            return
        if self._store.check(["asked"]):
            asked = self._store.get("asked")
            if asked != self._asked:
                self._asked = asked
                self._say()
            self._heed()

    def _heed(self) -> None:
        """Another rank has found it: whoever waits for this one is woken by its end."""
        verdict = self.verdict()
        if verdict is not None:
            self._end(verdict)

    def _end(self, text: str) -> None:
        self._stop.set()
        self._ranks.end_waiting(text)

    def _ask(self, wait: Wait) -> None:
        found = self._read()
        if wait is not self._asked_in[0]:
            self._old = {r: own.number for r, own in found.items()}
        self._n_asked += 1
        self._store.set("asked", f"{self._ranks.rank}.{self._n_asked}")
        self._say()
        self._heed()
        reports = {r: own for r, own in found.items() if own.number != self._old.get(r)}
        self._asked_in = wait, reports
        seconds = time.monotonic() - wait.since
        if self._is_mutual(reports) and self._ranks.wait() is wait:
            told = {r: dataclasses.asdict(own) for r, own in reports.items()}
            self._store.set("verdict", json.dumps(told))
            self._end(self._text(reports))
        elif wait is not self._told and seconds >= NOTICE_SECONDS:
            self._told = wait
            print(
                f"Gemini: rank {self._ranks.rank} has waited for {seconds:.0f} s of {self._ranks.timeout:g}. "
                + self._text(reports),
                file=sys.stderr,
                flush=True,
            )

    def _say(self) -> None:
        self._store.set(f"place/{self._ranks.rank}", json.dumps(dataclasses.asdict(self._report())))

    def _report(self) -> Report:
        ranks, wait = self._ranks, self._ranks.wait()
        place = place_of(None if wait is None else wait.thread)
        is_there = place.mark == self._mark  # since the last look
        self._mark = place.mark
        self._n_said += 1
        return Report(
            words=place.words,
            waits=wait is not None and time.monotonic() - wait.since >= LOOK_SECONDS,
            waits_in_torch=[
                r
                for r, member in enumerate(ranks.members)
                if is_there and member in place.waits_for
            ],
            begun=ranks.begun(),
            last=ranks.last_begun(),
            number=self._n_said,
        )

    def _read(self) -> dict[int, Report]:
        found = {}
        for r in range(self._ranks.size):
            if self._store.check([f"place/{r}"]):
                found[r] = Report(**json.loads(self._store.get(f"place/{r}")))
        return found

    def _is_mutual(self, reports: Mapping[int, Report]) -> bool:
        """Invariant 2; or the other waits in torch.distributed for this one, which waits for what it has not begun."""
        own = self._ranks.rank
        mine = reports.get(own)
        if mine is None or not mine.waits:
            return False
        for r, other in reports.items():
            has_more = any(m > o for m, o in zip(mine.begun, other.begun, strict=True))
            has_less = any(m < o for m, o in zip(mine.begun, other.begun, strict=True))
            is_waited_for = (other.waits and has_less) or own in other.waits_in_torch
            if r != own and has_more and is_waited_for:
                return True
        return False

    # ---- what is said ----

    def _text(self, reports: Mapping[int, Report]) -> str:
        """The plain fact, then the numbers."""
        own = self._ranks.rank
        order = [own, *(r for r in range(self._ranks.size) if r != own)]
        asleep = "has not said where it is"
        facts = [f"rank {r} {reports[r].words if r in reports else asleep}" for r in order]
        numbers = [
            f"rank {r} has begun {reports[r].begun[0]} meetings and {', '.join(map(str, reports[r].begun[1:]))} "
            f"collectives, the last is {reports[r].last}"
            for r in order
            if r in reports
        ]
        return f"{'; '.join(facts)}: {_ALL} ({'; '.join(numbers)})"
