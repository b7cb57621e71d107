"""What each chunk is doing at this moment, in one word and in its parts.

The words are those of the originals (FREE, HOLD, COMPUTE, HOLD_AFTER_BWD), and READY and UPDATE for what they called
READY_FOR_REDUCE: there is one state for a chunk here, not one for each tensor, as a chunk is moved and updated whole.
docs/originals.md has the picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

STATES = ("FREE", "HOLD", "COMPUTE", "HOLD_AFTER_BWD", "READY", "UPDATE")
PIECES = ("weight", "state", "grad", "gathered", "unreduced")


@dataclass(frozen=True)
class ChunkState:
    """One chunk, on this rank.

    Attributes:
        chunk: its number, in the order of the layout.
        state: one of STATES, the first that holds of COMPUTE (a module, a backward node or a tensor outside shows its
            weights), UPDATE (its step was taken and waits to be issued), READY (every gradient is there),
            HOLD_AFTER_BWD (some are), HOLD (its weights are on the device), FREE (they are at home only).
        parameters: the names of those in it.
        pieces: where each of its PIECES is: "HOME" (on the host only; of "gathered" and "unreduced": nowhere), "CLEAN"
            (on the device, and the same on the host), "DIRTY" (the device alone is right).
        uses: modules, backward nodes and tensors that show its weights now.
        gradients: of its trained parameters, those that have a gradient which no update has used.
    """

    chunk: int
    state: str
    parameters: tuple[str, ...]
    pieces: Mapping[str, str]
    uses: int
    gradients: int


def chunk_states(engine: Any) -> list[ChunkState]:
    """Every chunk of a runtime, in order; changes nothing, and waits for nothing."""
    names: dict[int, list[str]] = {}
    for slot in engine.slots:
        names.setdefault(engine.core.chunk(slot.id)[0], []).append(slot.name)
    return [
        ChunkState(
            chunk=number,
            state=_word(found),
            parameters=tuple(names.get(number, ())),
            pieces=MappingProxyType({key: found[key] for key in PIECES if key in found}),
            uses=found["uses"],
            gradients=found["gradients"],
        )
        for number, found in enumerate(engine.core.chunk_states())
    ]


def _word(found: Mapping[str, Any]) -> str:
    if found["uses"]:
        return "COMPUTE"
    if found["pending"]:
        return "UPDATE"
    if found["gradients"]:
        return "READY" if found["gradients"] == found["trained"] else "HOLD_AFTER_BWD"
    return "FREE" if found.get("gathered", found["weight"]) == "HOME" else "HOLD"
