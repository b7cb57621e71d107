"""Closing an engine: everything it holds is let go, and the model and its optimizer are ordinary again.

Invariants
    1. After close() the engine holds nothing, whatever came before: an error that had closed the core does not keep
       memory or hooks. Only a copy that cannot be made while the core still lives stops it; nothing has changed then.
    2. What is given back without a word is exact. Weights between two steps are given back with a warning.
    3. The engine's device memory is free before parameters and states go back to the device.
    4. A checkpoint that is being written is waited for before anything is let go.
    5. Several ranks close together, or none of them gets weights that others have a part of.
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
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim import managed
from gemini_strategy.parameters import absent, quantized
from gemini_strategy.parameters.slot import Slot
from gemini_strategy.report import tables
from gemini_strategy.report.progress import progress

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime

PATIENCE = 10.0  # seconds that a rank with an exception waits for the others


def close(engine: Runtime, dtype: torch.dtype | None, with_states: bool) -> None:
    """See Engine.close."""
    if engine.closed:
        return
    if dtype not in (None, torch.float32):
        raise ValueError(f"dtype={dtype!r}: choose None (compute dtype) or torch.float32")
    unsaved = _end_saving(engine)
    _close(engine, dtype is torch.float32, with_states)
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


def _close(engine: Runtime, is_fp32: bool, with_states: bool) -> None:
    cause = engine.core.salvage()
    if cause is None and engine.step_in_backward.give_up() is not None:
        engine.core.salvage()
        cause = "backward(step=True) had updated weights, and no optimizer.step() followed"
    cause = _meet(engine, cause)
    first = _let_go(engine, is_dead=cause is not None)
    if cause is None:
        try:
            engine.settle()
            total = _bytes_to_read(engine, is_fp32, with_states)
            with progress("Gemini: closing", total, engine.ranks.rank) as done:
                values = {}
                for slot in engine.slots:
                    values[slot] = slot.read_master() if is_fp32 else slot.read_weight()
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
    if first is not None:
        raise first


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
        managed.send_states(engine.optimizer, engine.slots)


def _bytes_to_read(engine: Runtime, is_fp32: bool, with_states: bool) -> int:
    """Of the weights and moments that are given back, as _close and managed.releasing count them."""
    n_bytes = 0
    for slot in engine.slots:
        dtype = torch.float32 if is_fp32 and slot.has_low else slot.dtype
        n_bytes += math.prod(slot.shape) * dtype.itemsize
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
        while unit.is_entered:
            attempt(unit.leave)
    if engine.recording is not None:
        attempt(engine.recording.finish)
    if engine.steps and not is_dead:
        attempt(lambda: engine.announce(tables.result_table))
    return first


def _close_dead(engine: Runtime, is_fp32: bool, cause: str) -> None:
    """Weights as the error has left them; gradients and the optimizer's states would belong to no step."""
    values, lost = {}, []
    engine.ranks.abort(cause)
    engine.core.salvage()
    for slot in engine.slots:
        try:
            values[slot] = slot.read_own(is_fp32)
        except Exception:  # the device itself may be gone
            filler = float("nan") if slot.dtype.is_floating_point else 0
            dtype = torch.float32 if is_fp32 and slot.has_low else slot.dtype
            values[slot] = slot.empty(dtype).fill_(filler)
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
    engine.root.remove()
    for handle in engine.handles:
        handle.remove()
    for slot, value in values.items():
        parameter = slot.parameter
        parameter.__class__ = slot.plain_class
        slot.swap(value)
        del parameter._gm_slot
        slot.shown = slot.inside = None
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
