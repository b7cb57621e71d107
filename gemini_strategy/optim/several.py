"""Several optimizers of one model, each of other parameters: Muon for its matrices, AdamW for the rest.

Each steps when its own `step()` is called, as without an engine. Where the engine asks for "the optimizer" (groups for
a norm, states for a checkpoint) it gets all of them as one: their groups one after the other.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini_strategy.errors import GeminiError
from gemini_strategy.optim.opaque import How, When
from gemini_strategy.optim.opaque_optimizer import OpaqueOptimizer
from gemini_strategy.weakly import weak_method

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot
    from gemini_strategy.runtime import Runtime


class Several:
    """What the engine wants of one optimizer, of several."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        states = [part.state for part in parts if isinstance(part, torch.optim.Optimizer)]
        self.state: Any = ChainMap(*states)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def check(
        self, check: Callable[[torch.optim.Optimizer], set[int]], model: nn.Module
    ) -> set[int]:
        """id() of all their parameters, of which each is in one of them alone.

        Raises:
            GeminiError: one of them cannot be managed, or two have a parameter in common.
        """
        names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
        owners: dict[int, int] = {}
        for number, part in enumerate(self.parts):
            for key in check(part):
                if key in owners:
                    raise GeminiError(
                        f"{names[key]} is in optimizer {owners[key]} ({type(self.parts[owners[key]]).__name__}) and in "
                        f"optimizer {number} ({type(part).__name__}): a parameter has one optimizer"
                    )
                owners[key] = number
        return set(owners)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """All of them, in their order."""
        if closure is not None:
            raise GeminiError(
                f"a closure for {len(self.parts)} optimizers: call it yourself, then engine.step()"
            )
        for part in self.parts:
            part.step()


def parts_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that a person has."""
    if optimizer is None:
        return []
    return list(optimizer.parts) if isinstance(optimizer, Several) else [optimizer]


class OpaqueSeveral:
    """An OpaqueOptimizer for each of them; a parameter's is its own optimizer's."""

    def __init__(self, runtime: Runtime, optimizers: Several) -> None:
        self.members = [OpaqueOptimizer(runtime, part) for part in optimizers.parts]
        self._parts = optimizers.parts
        self._owners = {
            id(p): member
            for part, member in zip(optimizers.parts, self.members, strict=True)
            for group in part.param_groups
            for p in group["params"]
        }

    def of(self, optimizer: torch.optim.Optimizer) -> OpaqueOptimizer:
        """The one that has an optimizer's states."""
        return self.members[[part is optimizer for part in self._parts].index(True)]

    def owner(self, slot: Slot) -> OpaqueOptimizer:
        """The one that has a parameter's states."""
        return self._owners.get(id(slot.parameter), self.members[0])

    def core_arguments(self) -> dict[str, Any]:
        # A step of one of them is no sign of what the others' will be: none is made ahead.
        whens = [member.core_arguments()["opaque_when"] for member in self.members]
        return {"opaque": weak_method(self.run), "opaque_when": min(*whens, When.DEFERRED)}

    def cut(self, slot: Slot) -> int:
        return self.owner(slot).cut(slot)

    def divide(self, slot: Slot, parts: Sequence[tuple[int, int]]) -> list[int]:
        return self.owner(slot).divide(slot, parts)

    def state_bytes(self, slot: Slot) -> int:
        return self.owner(slot).state_bytes(slot)

    def update(self, slot: Slot, divisor: float, factor: float) -> tuple[Any, ...]:
        return self.owner(slot).update(slot, divisor, factor)

    def begin(self) -> None:
        for member in self.members:
            member.begin()

    def values(self) -> dict[str, str]:
        every = [member.values() for member in self.members]
        return {
            f"{key} of optimizer {i}": v for i, own in enumerate(every) for key, v in own.items()
        }

    def run(
        self, ids: list[int], scale: float, late_scale: int, stream: int, how: int = How.STEP
    ) -> bool:
        """As OpaqueOptimizer.run; a step is of one of them."""
        wrote = False
        for member in self.members:
            mine = member.select(ids)
            wrote |= bool(mine) and member.run(mine, scale, late_scale, stream, how)
        return wrote

    def end(self, slots: Iterable[Slot], stream: int) -> None:
        """As OpaqueOptimizer.end."""
        slots = list(slots)
        for member in self.members:
            member.end((slot for slot in slots if self.owner(slot) is member), stream)

    def finish(self) -> None:
        for member in self.members:
            member.finish()

    def check_unwritten(self) -> None:
        for member in self.members:
            member.check_unwritten()

    def take_error(self) -> BaseException | None:
        return next(filter(None, [member.take_error() for member in self.members]), None)

    def has(self, slot: Slot) -> bool:
        return self.owner(slot).has(slot)

    def slots(self) -> list[Slot]:
        return [slot for member in self.members for slot in member.slots()]

    def read(
        self, slot: Slot, twins: dict[int, torch.Tensor] | None = None, root: int | None = None
    ) -> dict[Any, Any]:
        return self.owner(slot).read(slot, twins, root)

    def write(
        self,
        slot: Slot,
        entry: Mapping[Any, Any],
        is_copied: bool = True,
        twins: dict[int, torch.Tensor] | None = None,
    ) -> None:
        self.owner(slot).write(slot, entry, is_copied, twins)

    def settle(self) -> None:
        for member in self.members:
            member.settle()

    def drop(self, slot: Slot) -> None:
        self.owner(slot).drop(slot)

    def check(self, slot: Slot, entry: Mapping[Any, Any], is_whole: bool = False) -> None:
        self.owner(slot).check(slot, entry, is_whole)

    def show(self, slot: Slot) -> dict[Any, Any]:
        return self.owner(slot).show(slot)

    def sent(
        self,
        slot: Slot,
        entry: Mapping[Any, Any],
        device: torch.device,
        twins: dict[int, torch.Tensor],
    ) -> dict[Any, Any]:
        return self.owner(slot).sent(slot, entry, device, twins)

    def release(self) -> None:
        for member in self.members:
            member.release()
