"""The coming optimizer step: what has been decided of it, and what may still be done with its gradients.

              clip_grad_norm_()                   optimizer.step()
    OPEN ------------------------> CLIPPED -------------------------> OPEN
    OPEN ---> backward(step=True) -> ARMED -------------------------> OPEN

CLIPPED: the step multiplies gradients by the factor of a clip. The device has that factor first (csrc/engine/clip.c);
the host waits for it only where a program asks what it is. So a clip is late, its factor None, or known. `zero_grad()`
drops gradients and clip. After the step the gradients that are still there are the clipped ones, as in torch.

ARMED: updates run inside that backward where the plan allows it. The core alone says which gradients are used up (csrc/
engine/gradient.c). What is refused does not depend on where updates ran, so that no program works until there is a
plan: the core counts as used up all that such a step has taken. Only who chooses the schedule by itself is served while
the gradients are there, and told, so that it chooses the other one.

Invariants
    1. While a step is ARMED its numbers stay, and no gradient of it is read, changed or dropped, nor does one arrive.
    2. A gradient that is used up is of no use, until it is dropped or set.
    3. An error inside that backward keeps its type. If weights had been updated, the engine is closed, and a note says
       so, and what to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gemini_strategy.errors import GeminiError

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot
    from gemini_strategy.runtime import Runtime

_BETWEEN = "between backward(step=True) and optimizer.step()"

Updates = list[tuple[Any, ...]]  # as Runtime._update makes them


class State(enum.Enum):
    OPEN = enum.auto()
    CLIPPED = enum.auto()
    ARMED = enum.auto()


@dataclasses.dataclass(eq=False)
class Clip:
    """One clip by norm.

    Attributes:
        limit: the largest norm that it allows.
        version: of the gradients that it has measured (core.grads_version).
        factor: what it came to; None: only the device knows.
    """

    limit: float
    version: int
    factor: float | None = None


class Step:
    """The coming step of one engine.

    Attributes:
        state: see above.
        clip: of a CLIPPED step.
        clips: by which clip a gradient that is still there has been shortened. The step multiplies by the way: the
            bytes are what they were until something uses them after it (shorten). Whoever reads them gets the product.
        wants_numbers: the core speculates: the first gradient brings the step's numbers.
        is_served: gradients that such a step has used may be read as long as they are there.
        was_served: that has happened.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.state = State.OPEN
        self.clip: Clip | None = None
        self.clips: dict[Slot, Clip] = {}
        self.wants_numbers = False
        self._numbers: dict[int, tuple[Any, ...]] = {}  # of the step that is announced, by slot
        # The core may have updated weights; after the step: of the last one.
        self._runs_inside = self._is_inside = False
        self.is_served = self.was_served = False

    @property
    def sees_gradients(self) -> bool:
        """Whether something here is to be done as a gradient arrives."""
        return self.state is State.ARMED or bool(self.clips) or self.wants_numbers

    @property
    def is_under_way(self) -> bool:
        """Whether a backward has begun the step, or is about to, and optimizer.step() has not ended it."""
        return self.state is State.ARMED or self._is_inside

    def _move(self, to: State, clip: Clip | None = None) -> None:
        self.state, self.clip = to, clip
        if to is not State.ARMED:
            self._numbers = {}
        self._runtime.choose_way()

    # ---- the clip ----

    @property
    def is_late(self) -> bool:
        """The core has the factor of this step, and the host has not."""
        return self.clip is not None and self.clip.factor is None

    @property
    def limit(self) -> float | None:
        """The largest norm that the step allows."""
        return None if self.clip is None else self.clip.limit

    @property
    def factor(self) -> float:
        """What the step multiplies gradients by. May wait for it."""
        return 1.0 if self.clip is None else self._known(self.clip)

    def clipped(self, slots: Iterable[Slot], clip: Clip) -> None:
        """A clip has measured these gradients."""
        if clip.factor != 1.0:
            self.clips.update(dict.fromkeys(slots, clip))
        self._move(State.CLIPPED, clip)

    def settle(self) -> None:
        """Waits for what the last clip came to, if it is late."""
        for clip in (self.clip, *self.clips.values()):
            if clip is not None:
                self._known(clip)

    def _known(self, clip: Clip) -> float:
        if clip.factor is None:  # the last clip: a later one settles it (check_unclipped, shorten)
            clip.factor = self._runtime.core.clip_factor()
        if clip.factor == 1.0 and self.clips:
            self.clips = {slot: each for slot, each in self.clips.items() if each is not clip}
            self._runtime.choose_way()
        return clip.factor

    def factor_of(self, slot: Slot) -> float:
        """By what a clip has shortened the gradient of `slot`. May wait for it."""
        clip = self.clips.get(slot)
        return 1.0 if clip is None else self._known(clip)

    def drop_clip(self) -> None:
        """Gradients are dropped, or their step is left out."""
        if self.state is State.CLIPPED:
            self._move(State.OPEN)

    def forget_clip(self, slot: Slot) -> None:
        """Its gradient is another, or gone: no clip has shortened it."""
        if self.clips.pop(slot, None) is not None and not self.clips:
            self._runtime.choose_way()

    def shorten(self, slots: Iterable[Slot]) -> None:
        """Before these gradients are used: a clip whose step is over is in them, as in torch."""
        for slot in slots if self.clips else ():
            if self.clips.get(slot) is not self.clip:
                self.shorten_one(slot)

    def shorten_one(self, slot: Slot) -> None:
        factor = self.factor_of(slot)
        if factor != 1.0:
            slot.clip_grad(factor)

    def check_unclipped(self, what: str) -> None:
        """The factor of a clip is for the gradients that it has seen, and no step has used it yet."""
        core = self._runtime.core
        if self.factor != 1.0:
            given = [s for s in self._runtime.slots if s.has_grad_home and core.has_grad(s.id)]
            named = next((s for s in given if s not in self.clips), next(iter(given), None))
            one = f", that of {named.name} among them" if named else ""
            raise GeminiError(
                f"{what} after clip_grad_norm_(), whose factor {self.factor:.6g} the next step will apply to all "
                f"gradients{one}: clip once in a step, after its last backward and after all other changes of "
                "gradients, and directly before optimizer.step(). zero_grad() drops gradients and factor"
            )

    def check_unchanged(self) -> None:
        """The step comes: since its clip no gradient has come or changed."""
        if self.clip is not None and self.clip.version != self._runtime.core.grads_version():
            self.check_unclipped("optimizer step: gradients have come or were changed")

    # ---- the step that its backward announces ----

    @contextlib.contextmanager
    def announced(self, updates: Updates) -> Iterator[None]:
        """Inside is the backward that ends the step with these numbers.

        Raises:
            GeminiError: the last such step has not come, or its gradients are still there. Nothing has changed then.
        """
        runtime = self._runtime
        if self.state is State.ARMED:
            raise GeminiError(
                f"no step has followed backward(step=True): {self._name()}: call optimizer.step() first"
            )
        self.shorten(runtime.slots_by_id[update[0]] for update in updates)
        try:
            # Whether what was assigned has been written is looked at before a step: there is none inside a backward.
            self._runs_inside = runtime.core.arm(updates, not runtime.assigned)
            self._is_inside = True
            yield
        except BaseException as error:
            closed = self.give_up(f"{type(error).__name__}: {error}")
            if closed is not None and closed != str(error):
                error.add_note(
                    f"{closed}. Without step=True an error in a backward changes no weight"
                )
            raise
        finally:
            self._is_inside = False
        self._numbers = {update[0]: update for update in updates}
        self._move(State.ARMED)

    def give_up(self, cause: str) -> str | None:
        """An announced step will not come: None if nothing has changed, else the error that all later calls raise.

        A text, as an exception would keep the frames of the one that is being handled, and they the graph.
        """
        if self.state is State.ARMED:
            self._move(State.OPEN)
        try:
            self._runtime.core.disarm(cause)
        except GeminiError as error:
            return str(error)
        return None

    def check_arrival(self, slot: Slot) -> None:
        """A gradient of `slot` has come. The core refuses it where the last one is used up."""
        if slot.id in self._numbers:
            raise GeminiError(
                f"{slot.name}: a gradient arrived {_BETWEEN}: call optimizer.step() first"
            )

    def check_read(self, slots: Iterable[Slot]) -> None:
        """Gradients are asked for: to be read, measured, clipped."""
        core, ids = self._runtime.core, [slot.id for slot in slots]
        if self.is_served and not self._runs_inside:
            self.was_served |= core.keep_grads(ids)
        else:
            core.check_grads(ids)
        for slot_id in ids if self._numbers else ():
            if slot_id in self._numbers:
                raise GeminiError(
                    f"the gradient of {self._runtime.slots_by_id[slot_id].name} is asked for {_BETWEEN}: call "
                    "optimizer.step(), then zero_grad() before the next backward; to read, clip or keep gradients call "
                    "backward without step=True"
                )

    def check_change(self, slot: Slot) -> None:
        """The gradient is set or dropped."""
        if slot.id in self._numbers and self._runtime.core.has_grad(slot.id):
            raise GeminiError(
                f"{slot.name}: its gradient is dropped or changed {_BETWEEN}: call optimizer.step() first; a gradient "
                "that is to change before its step needs a backward without step=True"
            )

    def check_save(self) -> None:
        """A checkpoint is asked for: some weights may be of this step, and others of the last one."""
        if self.state is State.ARMED:
            raise GeminiError(
                f"{self._name()}: a checkpoint {_BETWEEN} would be of no step: call optimizer.step() first"
            )

    def check_announced(self, updates: Updates) -> None:
        """The step comes: if it was announced, with these numbers."""
        for update in updates if self.state is State.ARMED else ():
            if self._numbers.get(update[0]) == update:
                continue
            name = self._runtime.slots_by_id[update[0]].name
            text = (
                f"{name}: hyperparameters, the state or the clip factor changed {_BETWEEN}; change them before "
                "backward, or call backward without step=True"
            )
            closed = self.give_up(text)
            if closed is not None:
                raise GeminiError(closed)
            raise GeminiError(
                f"{text}. Nothing has been updated: optimizer.step() now is a step with these numbers"
            )

    def taken(self, wants_numbers: bool) -> None:
        """The core has taken the step, and with an announced one its gradients."""
        self._runs_inside = self._runs_inside and self.state is State.ARMED
        self.wants_numbers = wants_numbers
        self._move(State.OPEN)

    def _name(self) -> str:
        return self._runtime.slots_by_id[min(self._numbers)].name if self._numbers else "a gradient"
