"""`backward(step=True)`: the step that a backward was said to end, until its gradients are let go.

Updates run inside that backward where the plan allows it, and the gradients are used up then. What is refused does
not depend on where they ran, so that no program works until there is a plan. Only who chooses the schedule by itself is
served while the gradients are there, as in the first step, and told, so that it chooses the other one.

Invariants
    1. From the end of that backward to its step the numbers of the step stay, and no gradient is read, changed or
       dropped, nor does one arrive.
    2. From that step on a gradient is of no use, until it is dropped or set.
    3. An error inside that backward keeps its type. If weights had been updated, the engine is closed, and a note says
       so, and what to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gemini_strategy.errors import GeminiError

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot
    from gemini_strategy.runtime import Runtime

_BETWEEN = "between backward(step=True) and optimizer.step()"

Updates = list[tuple[Any, ...]]  # as Runtime._update makes them


class StepInBackward:
    """Of one engine; between two steps it knows nothing.

    Attributes:
        waits: the backward is done, and its step has not come.
        used: slots whose gradients the last step has used up.
        is_served: gradients of such a step may be read as long as they are there.
        was_served: that has happened.
    """

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine
        # Of the step that has been announced, by slot.
        self._numbers: dict[int, tuple[Any, ...]] = {}
        self._is_armed = False  # the core may have updated weights
        self._ran_inside = False  # so it was in the last step
        self.is_served = self.was_served = False
        self.waits = False
        self.used: set[int] = set()

    @contextlib.contextmanager
    def announced(self, updates: Updates) -> Iterator[None]:
        """Inside is the backward that ends the step with these numbers.

        Raises:
            GeminiError: the last such step has not come, or its gradients are still there. Nothing has changed then.
        """
        if self.waits:
            raise GeminiError(
                f"no step has followed backward(step=True): {self._name()}: call optimizer.step() first"
            )
        if self.used:
            raise GeminiError(self._used_up(min(self.used)))
        # Whether what was assigned has been written is looked at before a step: there is none inside a backward.
        self._is_armed = not self._engine.assigned and self._engine.core.arm(updates)
        self._numbers = {update[0]: update for update in updates}
        try:
            yield
        except BaseException as error:
            closed = self.give_up(f"{type(error).__name__}: {error}")
            if closed is not None:
                error.add_note(
                    f"{closed}. Without step=True an error in a backward changes no weight"
                )
            raise
        self._now(waits=True)

    def give_up(self, cause: str) -> str | None:
        """The step will not come: None if nothing has changed, else the error that all later calls raise.

        A text, as an exception would keep the frames of the one that is being handled, and they the graph.
        """
        was_armed, self._is_armed = self._is_armed, False
        self._numbers = {}
        self._now(waits=False)
        if was_armed:
            try:
                self._engine.core.disarm(cause)
            except GeminiError as error:
                return str(error)
        return None

    # ---- what comes between ----

    def check_arrival(self, slot: Slot) -> None:
        """A gradient of `slot` has come."""
        if self.waits and slot.id in self._numbers:
            raise GeminiError(
                f"{slot.name}: a gradient arrived {_BETWEEN}: call optimizer.step() first"
            )
        if slot.id in self.used:
            raise GeminiError(self._used_up(slot.id))

    def check_read(self, slots: Iterable[Slot]) -> None:
        """Gradients are asked for: to be read, measured, clipped."""
        for slot in slots if self.waits or self.used else ():
            is_awaited = self.waits and slot.id in self._numbers
            if slot.id in self.used and self.is_served and not (is_awaited or self._ran_inside):
                self.was_served = True
            elif is_awaited or slot.id in self.used:
                raise GeminiError(self._used_up(slot.id))

    def check_change(self, slot: Slot) -> None:
        """The gradient is set or dropped."""
        if self.waits and slot.id in self._numbers and self._engine.core.has_grad(slot.id):
            raise GeminiError(
                f"{slot.name}: its gradient is dropped or changed {_BETWEEN}: call optimizer.step() first; a gradient "
                "that is to change before its step needs a backward without step=True"
            )
        if slot.id in self.used:
            self.used.discard(slot.id)
            self._now(self.waits)

    def check_save(self) -> None:
        """A checkpoint is asked for: some weights may be of this step, and others of the last one."""
        if self.waits:
            raise GeminiError(
                f"{self._name()}: a checkpoint {_BETWEEN} would be of no step: call optimizer.step() first"
            )

    def check_step(self, updates: Updates) -> None:
        """The step has come: it is the one that was announced."""
        if not self.waits:
            for update in updates if self.used else ():
                if update[0] in self.used:
                    raise GeminiError(self._used_up(update[0]))
            return
        for update in updates:
            if self._numbers.get(update[0]) == update:
                continue
            name = self._engine.slots_by_id[update[0]].name
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

    def done(self, slots: Iterable[Slot]) -> None:
        """The step was taken."""
        if self.waits:
            self.used.update(slot.id for slot in slots)
        self._ran_inside, self._is_armed = self._is_armed, False
        self._numbers = {}
        self._now(waits=False)

    def _now(self, waits: bool) -> None:
        self.waits = waits
        self._engine.choose_way()

    def _name(self) -> str:
        return self._engine.slots_by_id[min(self._numbers)].name if self._numbers else "a gradient"

    def _used_up(self, slot_id: int) -> str:
        return (
            f"the gradient of {self._engine.slots_by_id[slot_id].name} was used up by the update inside "
            "backward(step=True): call optimizer.step(), then zero_grad() before the next backward; to read, clip or "
            "keep gradients call backward without step=True"
        )
