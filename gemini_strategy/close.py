"""Closing an engine: everything it holds is let go, and the model and its optimizer are ordinary again.

Invariants
    1. After close() the engine holds nothing, whatever came before: an error that had closed the core does not keep
       memory or hooks. Only a copy that cannot be made while the core still lives stops it; nothing has changed then.
    2. What is given back without a word is exact: what came in fp32 is its fp32 master. Masters that are rounded to the
       16 bits in which the model came, and weights between two steps, are given back with a warning.
    3. The engine's device memory is free before parameters and states go back to the device.
    4. A checkpoint that is being written is waited for before anything is let go.
    5. What the host has no room for is an error before anything has changed.
    6. Several ranks close together, or none of them gets weights that others have a part of.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy import _C, _torch
from gemini_strategy.errors import GeminiError, GeminiMemoryError
from gemini_strategy.optim import managed
from gemini_strategy.optim.adam import HybridAdam
from gemini_strategy.parameters import absent, patches, quantized
from gemini_strategy.parameters.slot import Slot
from gemini_strategy.report.progress import progress
from gemini_strategy.sizes import size_text

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime

PATIENCE = 10.0  # seconds that a rank with an exception waits for the others


def close(
    engine: Runtime, dtype: torch.dtype | None, with_states: bool, is_told: bool = True
) -> None:
    """See Engine.close; is_told: whether rounding is worth a warning."""
    if engine.closed:
        return
    if dtype not in (None, torch.float32):
        raise ValueError(
            f"dtype={dtype!r}: choose None (the dtypes that the model came in) or torch.float32"
        )
    unsaved = _end_saving(engine)
    try:
        _close(engine, dtype is torch.float32, with_states, is_told)
    finally:
        patches.take_off()
    if unsaved is not None and sys.exception() is None:
        raise unsaved
    if unsaved is not None:
        warnings.warn(f"a checkpoint was not written: {unsaved}", RuntimeWarning, stacklevel=3)


def _end_saving(engine: Runtime) -> GeminiError | None:
    """A checkpoint that is being written is waited for; what it met does not keep anything from being closed."""
    if engine.saving is not None and sys.exception() is not None and engine.ranks.size > 1:
        engine.saving.join(PATIENCE)
        if not engine.saving.done:
            # The others may wait for this rank where their writers cannot go on.
            engine.ranks.abort(f"{type(sys.exception()).__name__}: {sys.exception()}")
    try:
        engine.end_saving()
    except GeminiError as error:
        return error
    return None


def _is_master(slot: Slot, is_fp32: bool) -> bool:
    """Whether its fp32 master is what is given back."""
    return is_fp32 or slot.outer_dtype is torch.float32


def _close(engine: Runtime, is_fp32: bool, with_states: bool, is_told: bool) -> None:
    cause = engine.core.salvage()
    if cause is None:
        engine.coming_step.give_up("no optimizer.step() followed")
        cause = engine.core.salvage()
    cause = _meet(engine, cause)
    total = _bytes_to_read(engine, is_fp32, with_states)
    if cause is None:
        _check_room(engine, total)
    first = _let_go(engine, is_dead=cause is not None)
    rounded = None
    if cause is None:
        try:
            engine.settle()
            if is_told and not is_fp32:
                rounded = _first_rounded(engine, with_states)
            with progress("Gemini: closing", total, engine.ranks.rank) as done:
                values = {}
                for slot in engine.slots:
                    values[slot] = _value(slot, is_fp32)
                    done(values[slot].nbytes)
                grads = _read_grads(engine)
                release = managed.releasing(engine, is_fp32, with_states, done)
        except GeminiError as error:
            cause = engine.core.salvage()
            if cause is None and engine.ranks.has_failed:
                cause = str(error)
            if cause is None:
                engine.ranks.abort(f"close(): {error}")  # the others read what this one has not
                raise
        except Exception as error:
            engine.ranks.abort(f"close(): {type(error).__name__}: {error}")
            raise
    if cause is not None:
        _C.uninterrupted(_close_dead, engine, is_fp32, cause)
        if first is not None and not isinstance(first, GeminiError):  # which are of that cause
            raise first
        return
    _C.uninterrupted(_give_all, engine, values, grads, release)
    if rounded is not None and engine.ranks.rank == 0:
        warnings.warn(
            f"the fp32 masters, of {rounded.name} for one, were rounded to {rounded.dtype}, in which the model came: "
            "engine.close(dtype=torch.float32) gives them back as they are, and the optimizer's moments with them; "
            "engine.save(folder) before it keeps both, too",
            RuntimeWarning,
            stacklevel=4,
        )
    if first is not None:
        raise first


def _dtype(slot: Slot, is_fp32: bool) -> torch.dtype:
    return torch.float32 if is_fp32 and slot.has_low else slot.outer_dtype


def _value(slot: Slot, is_fp32: bool) -> torch.Tensor:
    """What a parameter is given back as."""
    value = slot.read_master() if _is_master(slot, is_fp32) else slot.read_weight()
    return value.to(_dtype(slot, is_fp32))


def _first_rounded(engine: Runtime, with_states: bool) -> Slot | None:
    """A parameter whose master is more than what is given back of it; None: nothing is lost."""
    keeps = isinstance(engine.optimizer, HybridAdam)
    for slot in engine.slots:
        is_kept = _is_master(slot, False) or (keeps and (with_states or not slot.has_state))
        if slot.has_low and not is_kept and slot.lack()[2]:
            return slot
    return None


def _check_room(engine: Runtime, total: int) -> None:
    """The host has room for what is given back beside what the engine has, of all ranks on it."""
    ranks = engine.ranks
    wanted, there = total * ranks.local_size, int(_C.host_topology()["memory"])
    text = None
    if wanted > there:
        each = f"{ranks.local_size} ranks, {size_text(total, is_wanted=True)} each: "
        text = (
            f"HOST: close() gives back {size_text(wanted, is_wanted=True)} of weights and moments beside what the "
            f"engine has ({each if ranks.local_size > 1 else ''}weights in the dtype that the model came in), and the "
            f"host has {size_text(there)} left. The engine is open as before: engine.save(folder) and "
            "engine.save_pretrained(folder) need no second copy, and close(with_states=False) leaves out the moments"
        )
    texts = ranks.gather("close()", text) if ranks.size > 1 else [text]
    for rank, said in enumerate(texts):
        if said is not None:
            raise GeminiMemoryError(f"rank {rank}: {said}" if ranks.size > 1 else said)


def _give_all(
    engine: Runtime,
    values: dict[Slot, torch.Tensor],
    grads: dict[Slot, torch.Tensor],
    release: Callable[[], None],
) -> None:
    """All that close() changes; nothing has changed before."""
    release()
    give_back(engine, values, grads)
    if engine.optimizer is not None:
        managed.send_states(engine.optimizer, engine.slots, engine.opaque)


def _bytes_to_read(engine: Runtime, is_fp32: bool, with_states: bool) -> int:
    """Of the weights and moments that are given back, as _close and managed.releasing count them."""
    n_bytes = 0
    for slot in engine.slots:
        n_bytes += math.prod(slot.shape) * _dtype(slot, is_fp32).itemsize
    if with_states and engine.optimizer is not None:
        n_bytes += sum(managed.moment_bytes(s) for s in engine.slots if s.has_state)
    return n_bytes


def _meet(engine: Runtime, cause: str | None) -> str | None:
    """All ranks are here, and none of their engines has ended: None; else what has happened.

    Ranks that close because of an exception may be alone with it: they do not wait long.
    """
    ranks = engine.ranks
    if ranks.size == 1:
        return cause
    flying = sys.exception()
    try:
        with contextlib.ExitStack() as stack:
            if flying is not None:
                reason = f"it was closed after {type(flying).__name__}: {flying}"
                stack.enter_context(ranks.patience(PATIENCE, reason))
            causes = ranks.gather("close()", cause)
    except GeminiError as error:
        return cause or (str(error) if flying is None else reason)
    return next((f"rank {r}: {text}" for r, text in enumerate(causes) if text is not None), None)


def _let_go(engine: Runtime, is_dead: bool) -> Exception | None:
    """Leaves what is entered and ends what is recorded, whatever it finds; the first error."""
    first: Exception | None = None

    def attempt(act: Callable[[], Any]) -> None:
        nonlocal first
        try:
            act()
        except Exception as error:
            first = first or error

    attempt(engine.end_first_step)
    attempt(engine.begin_pass)
    for unit in engine.units:
        while unit.n_entered:
            attempt(unit.leave)
    if engine.recording is not None:
        attempt(engine.recording.finish)
    attempt(engine.measured.forget if is_dead else engine.measured.tell)
    return first


def _close_dead(engine: Runtime, is_fp32: bool, cause: str) -> None:
    """Weights as the error has left them; gradients and the optimizer's states would belong to no step."""
    values, lost = {}, []
    engine.ranks.abort(cause)
    engine.core.salvage()
    for slot in engine.slots:
        try:
            values[slot] = slot.read_own(_is_master(slot, is_fp32)).to(_dtype(slot, is_fp32))
        except Exception:  # the device itself may be gone
            filler = float("nan") if slot.dtype.is_floating_point else 0
            values[slot] = slot.empty(_dtype(slot, is_fp32)).fill_(filler)
            lost.append(slot.name)
    if engine.optimizer is not None:
        managed.let_go(engine.optimizer)
    text = (
        f"this engine ended inside a step: {cause}. Its model and optimizer are ordinary again, but the weights are "
        "of no single step, and the optimizer's states are gone: load a checkpoint into both before they are used"
    )
    if engine.ranks.shard.size > 1:
        text += "; each rank has its part of the weights only, and no values elsewhere"
    if lost:
        text += f"; {len(lost)} parameters could not be read and hold no values (the first is {lost[0]})"
    try:
        give_back(engine, values, {})
    finally:
        warnings.warn(text, RuntimeWarning, stacklevel=5)


def _read_grads(engine: Runtime) -> dict[Slot, torch.Tensor]:
    """The gradients that the engine holds, unscaled."""
    scale = engine.scaler.scale if engine.scaler is not None else 1.0
    grads = {}
    for slot in engine.slots:
        if slot.has_grad_home and engine.core.has_grad(slot.id):
            try:
                grads[slot] = slot.read_grad().cpu().float() / scale
            except GeminiError as error:
                if type(error) is not GeminiError:  # of memory, of the device: it is still there
                    raise
                # an update inside backward has used it up
    return grads


def _sent(values: dict[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
    """The values where manage() found them; all of them on the host if they have no room there."""
    try:
        return {slot: value.to(slot.original_device) for slot, value in values.items()}
    except torch.OutOfMemoryError as error:
        text = f"the model is on the host, since it does not fit where manage() found it: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=6)
        for slot in values:
            slot.original_device = torch.device("cpu")
        return values


def give_back(
    engine: Runtime, values: dict[Slot, torch.Tensor], grads: dict[Slot, torch.Tensor]
) -> None:
    """Every parameter ordinary, with these values and gradients, and nothing of the engine left behind."""
    for slot in values:
        slot.given.end()
    engine.closed, engine.engine = True, None
    absent.nets.discard(getattr(engine, "net", None))
    for unit in reversed(engine.units):  # a module may be two, one around the other
        unit.remove()
    for root in engine.roots:
        root.remove()
    for handle in engine.handles:
        handle.remove()
    for slot, value in values.items():
        parameter = slot.parameter
        parameter.__class__ = slot.plain_class
        slot.swap(value)
        del parameter._gm_slot
        slot.shown = slot.inside = slot.absent = None
    engine.masters.clear()
    engine.core.close()
    engine.ranks.close()
    engine.memory.close()
    for slot, value in _sent(values).items():
        parameter = slot.parameter
        with _torch.DisableTorchFunctionSubclass():
            parameter.data = value
        for alias in slot.aliases:
            alias.data = parameter.data
        if slot in grads:
            try:
                parameter.grad = grads[slot].to(parameter.dtype).to(parameter.device)
            except torch.OutOfMemoryError as error:
                text = f"the gradient of {slot.name} is dropped, since it does not fit: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=5)
    for module in engine.model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and quantized.is_wrapper(parameter):
                quantized.follow(parameter)
            elif parameter is not None:
                for tensor in quantized.companions(module, parameter):
                    tensor.data = tensor.data.to(parameter.device)
