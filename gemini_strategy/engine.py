"""The engine that a person holds: training, reading and writing parameters, state, and the way back.

What is under it is a Runtime (runtime.py): hooks, slots, states and the optimizer's face work with that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn

from gemini_strategy import _C, _torch, close
from gemini_strategy import state as states
from gemini_strategy.checkpoint.background import Saving, save_in_background
from gemini_strategy.checkpoint.folder import local
from gemini_strategy.checkpoint.load import EVERYTHING, load
from gemini_strategy.checkpoint.pretrained import save_pretrained
from gemini_strategy.checkpoint.save import Wanted, save
from gemini_strategy.errors import GeminiError, GuardError
from gemini_strategy.optim import state_dicts
from gemini_strategy.optim.several import Several
from gemini_strategy.parameters import gate, masters, order, quantized
from gemini_strategy.parameters.slot import Slot
from gemini_strategy.report import chunks, tables
from gemini_strategy.report import timeline as timelines
from gemini_strategy.roots import roots, title
from gemini_strategy.runtime import Runtime, Uncopied
from gemini_strategy.sizes import parse_bytes


class Engine(Uncopied, _C.Handle):
    """The engine of one managed model; made by `manage()`.

    Attributes:
        model: the model, in place; of several an nn.ModuleList of them.
        optimizer: the optimizer that was taken over, or None.
        device: where the model computes.
        precision: the precision's name, or None.
        scaler: the LossScaler of "16-mixed", or None.
        ranks: those that train this model together; see ranks/ranks.py.
        meter: counts steps; `meter.tokens_per_step = n` replaces the count from the model's inputs.

    With several ranks every rank makes the same calls in the same order, also those that only read: whole
    parameters, gradients and states are put together from the ranks' parts. What is written has to be the same on
    every rank, as each keeps its part of it.
    """

    _gone = nn.Parameter(
        torch.empty(0)
    )  # what slots have in the place of theirs when the engine is closed and dropped

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.model = runtime.model
        several = isinstance(runtime.optimizer, Several)
        self.optimizer = runtime.optimizer.parts if several else runtime.optimizer
        self.device = runtime.device
        self.precision = runtime.precision
        self.scaler = runtime.scaler
        self.ranks = runtime.ranks
        self.meter = runtime.meter
        runtime.engine = self

    @property
    def closed(self) -> bool:
        """True after close()."""
        return self._runtime.closed

    # ---- training ----

    @_torch.untraced
    def backward(self, loss: torch.Tensor, *, step: bool = False, **kwargs: Any) -> None:
        """`loss.backward()`, with the loss multiplied by the loss scale in "16-mixed".

        Args:
            loss: a 0-dim tensor.
            step: this backward ends the step: `optimizer.step()` comes next, with nothing between that
                reads or changes gradients (no clipping). Weights may then be updated inside backward, as
                soon as their gradients are complete; the gradients are used up. See `ends_step`.
        """
        runtime = self._runtime
        ends = runtime.ends_step() if step else contextlib.nullcontext()
        try:
            with runtime.explaining(), runtime.accept_scaled(), ends:
                runtime.scale(loss).backward(**kwargs)
        except BaseException:
            runtime.interrupt_first_step()
            raise

    def ends_step(self) -> AbstractContextManager[None]:
        """Inside, a backward ends the step: for loops that call backward themselves.

        Updates then overlap with backward where the plan can do that exactly; otherwise nothing changes.
        With a loss scaler it has no effect. The bits are those of the same loop without it.

        Any error inside keeps its type; where weights had been updated, a note says that the engine is closed.

        Raises:
            GeminiError: weights are needed again in the backward that has updated them; the engine is closed then.
                Or the gradients of the last such step are still there, or it has not come; see step.py.
        """
        return self._runtime.ends_step()

    def grad_norm(self) -> float:
        """The 2-norm of all gradients that the optimizer will use, unscaled, unclipped.

        The sum of squares is exact and rounded once, so the figure does not depend on chunks,
        placement or device. inf or nan with non-finite gradients.
        """
        self._trained()
        return self._runtime.grad_norm()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clips all gradients by their common 2-norm, in the next step.

        The factor min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ defines it, is
        fused into the next optimizer step. `p.grad` shows clipped gradients from now on.

        Args:
            max_norm: the largest norm allowed, not negative.
            norm_type: 2 only.
            error_if_nonfinite: raise on a non-finite norm (before anything is changed).

        Returns:
            The total norm before clipping, a 0-dim fp32 tensor on the engine's device. Nobody waits for it where it can
            stay there (a planned step, not "16-mixed", no `error_if_nonfinite`).

        Raises:
            ValueError: another norm_type, or a negative max_norm.
            RuntimeError: the norm is not finite and error_if_nonfinite is set.
        """
        self._trained()
        return self._runtime.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value_(self, value: float) -> None:
        """Clamps every gradient element (unscaled) to [-value, value], now."""
        self._trained()
        self._runtime.clip_grad_value_(value)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step; also reached as `optimizer.step()`.

        With a loss scaler a step with non-finite gradients changes no bit of the model and its
        states; the scale is updated either way.
        """
        return self._trained().step(closure)  # with its hooks; it comes to Runtime.step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops every gradient (or zeroes it, with set_to_none=False), as torch's zero_grad does.

        A clip factor that no step has used is dropped too.
        """
        self._runtime.clear_grads(self._runtime.slots, set_to_none)

    # ---- reading and writing parameters ----

    @contextlib.contextmanager
    def full_parameter(self, parameter: nn.Parameter) -> Iterator[torch.Tensor]:
        """The parameter as a CPU tensor: the fp32 master if it is trained, else the weight.

        Changes made to the tensor are written back at the end of the context.
        """
        self._runtime.check_open()
        slot = self._runtime.slot_of(parameter)
        values = slot.read_master()
        before = values.clone()
        yield values
        if not order.same_bytes(values, before):
            slot.write_master(values)

    @contextlib.contextmanager
    def full_parameters(
        self, module: nn.Module | None = None, writable: bool = True
    ) -> Iterator[None]:
        """Every parameter of `module` (default: the model) is a plain tensor inside the context.

        All of them are on the device at once, which needs room. In-place changes are kept.

        Args:
            module: the model or a submodule.
            writable: False saves the comparison that finds changes; making one is then an error.

        Raises:
            GeminiMemoryError: they do not fit the device budget together.
            GuardError: at the end, if a parameter was written although writable is False.
        """
        self._runtime.check_open()
        module = self.model if module is None else module
        plain = [p for p in module.parameters() if not quantized.is_wrapper(p)]
        slots = list(dict.fromkeys(self._runtime.slot_of(p) for p in plain))
        slots = [slot for slot in slots if not slot.is_raw]  # quantized ones are served always
        shown = [slot.lease(is_watched=writable) for slot in slots]
        shows = _C.begin_showing()  # else another thread does: they stay absent, and are served
        opened: list[Slot] = []
        try:
            for slot, data in zip(slots, shown, strict=True) if shows else ():
                opened.append(slot)
                slot.open_count += 1
                if slot.open_count == 1:
                    slot.swap(gate.inside(data))
                    slot.version = slot.parameter._version
            yield
        finally:
            written = []
            for slot in opened if not self.closed else ():
                if slot.parameter._version != slot.version and not writable:
                    written.append(slot)
                slot.version = slot.parameter._version  # the leases find the writes
                slot.open_count -= 1
                if slot.open_count == 0:
                    slot.swap(slot.absent)
            if shows:
                _C.end_showing()
            shown.clear()
            if not self.closed:
                for slot in written:  # what was written is kept, and said
                    self._runtime.note_write(slot)
                self._runtime.core.drain()
        if written:
            raise GuardError(
                f"{written[0].name} was written inside full_parameters(writable=False); use writable=True"
            )

    def masters(self) -> AbstractContextManager[None]:
        """Inside, each parameter of the model is its fp32 master, a tensor on the CPU that is read as it is used.

        For what keeps weights of its own beside the model, such as torch.optim.swa_utils.AveragedModel: one parameter
        at a time is in memory, and what is written to one is its master, exactly. Frozen parameters are their weights,
        in the dtype that they came in.
        `copy.deepcopy(model)` copies masters. Forward passes inside see the model's ordinary weights.

        With several ranks all of them read and write the same, and each gets the whole.

        Raises:
            GeminiError: inside a forward, or the engine is closed.
        """
        self._runtime.check_open()
        return masters.shown(self._runtime)

    def model_state_dict(self, masters: bool = True, *, rank0_only: bool = False) -> dict[str, Any]:
        """The model's state on the CPU; keys and order as `model.state_dict()`.

        Args:
            masters: give trained parameters as fp32 masters; False: in compute dtype. Tied parameters share one tensor.
            rank0_only: all ranks call it, but only rank 0 gets the state, the others an empty dict (and no memory).
        """
        self._runtime.check_open()
        return states.model_state_dict(self._runtime, masters, 0 if rank0_only else None)

    def load_model_state_dict(self, state: dict[str, Any], strict: bool = True) -> Any:
        """`model.load_state_dict`; fp32 values become masters exactly. Every rank gives the whole state."""
        self._runtime.check_open()
        with self.ranks.revealing():
            return self.model.load_state_dict(state, strict=strict)

    def optimizer_state_dict(
        self, *, rank0_only: bool = False, with_lows: bool = True
    ) -> dict[str, Any]:
        """The optimizer's state in its own form, of Adam's in torch.optim.AdamW's; tensors on the CPU.

        Args:
            rank0_only: as in model_state_dict.
            with_lows: with what 16-bit weights lack to be their masters; no need beside the masters themselves.
        """
        root = 0 if rank0_only else None
        return state_dicts.state_dict(self._runtime, self._trained(), root, with_lows)

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the optimizer's state_dict(), of Adam's that of any AdamW or Adam; the whole, on every rank.

        An empty "state" begins anew.
        """
        state_dicts.load_state_dict(self._runtime, self._trained(), state)

    def _trained(self) -> Any:
        """The optimizer of an open engine."""
        self._runtime.check_open()
        if self.optimizer is None:
            raise GeminiError("there is no optimizer: manage(model, optimizer) with one to train")
        return self._runtime.optimizer

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Everything for an exact resume: masters, buffers, moments, steps, loss scaler. See model_state_dict."""
        state: dict[str, Any] = {"model": self.model_state_dict(rank0_only=rank0_only)}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer_state_dict(rank0_only=rank0_only, with_lows=False)
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return {} if rank0_only and self.ranks.rank else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict(). The optimizer's part and the scaler's may be missing: theirs stay as they are.

        Raises:
            ValueError: there is no model in it, or the optimizer's part does not fit; nothing has been changed.
        """
        self._runtime.check_open()
        is_dict = isinstance(state, Mapping)
        if not is_dict or "model" not in state:
            has = (", ".join(map(repr, state)) if is_dict else repr(state)) or "nothing"
            raise ValueError(
                f"engine.load_state_dict: 'model' is missing, the state has {has}; it takes what engine.state_dict() "
                "gave (with rank0_only=True that is empty on the other ranks). A model's own state_dict goes into "
                "engine.load_model_state_dict"
            )
        load = None
        if "optimizer" in state:  # what does not fit is said before the model changes
            try:
                load = state_dicts.prepared(self._runtime, self._trained(), state["optimizer"])
            except (ValueError, GeminiError):
                self._check_names(state["model"])
                raise
        self.load_model_state_dict(state["model"])
        if load is not None:
            load()
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])

    def _check_names(self, state: Mapping[str, Any]) -> None:
        """What is wrong with a state is that it is another model's."""
        names = sorted(self.model.state_dict(keep_vars=True).keys() ^ state.keys())
        if names:
            raise ValueError(
                f"engine.load_state_dict: the state is of another model, as {', '.join(names[:5])} and "
                f"{max(len(names) - 5, 0)} more are in one of them alone; nothing has changed"
            )

    @overload
    def save(
        self,
        folder: str | os.PathLike[str],
        extra: Any = None,
        *,
        keep_last: int | None = None,
        frozen: bool = True,
        background: Literal[False] = False,
    ) -> Path: ...

    @overload
    def save(
        self,
        folder: str | os.PathLike[str],
        extra: Any = None,
        *,
        keep_last: int | None = None,
        frozen: bool = True,
        background: Literal[True],
    ) -> Saving: ...

    def save(
        self,
        folder: str | os.PathLike[str],
        extra: Any = None,
        *,
        keep_last: int | None = None,
        frozen: bool = True,
        background: bool = False,
    ) -> Path | Saving:
        """Saves everything for an exact resume into a folder.

        That is masters, buffers, moments, steps, groups, the loss scaler and each rank's random numbers; gradients are
        not saved.

        Every rank writes its own part, straight from where it is: the host needs some 250 MiB beside the engine. All
        ranks call it, with a folder that all hosts can write. The folder is whole or not there at every moment: an
        older checkpoint of the same name is replaced at the end, when the new one is on the disk. After an error, on
        any rank, training goes on as if it had not been called.

        torch.distributed.checkpoint reads the folder too, and
        `python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER` makes an ordinary file of it.

        Args:
            folder: where; its parents are made if they are not there.
            extra: plain data to be kept beside it (the states of schedulers and loaders, the position in the loop), of
                each rank its own: numbers, strings, lists, tuples, dicts, tensors.
            keep_last: `folder` is for a series of checkpoints: this one is `step-000000123` in it, `latest` names it
                when all of it is on the disk, and only the last so many that were saved are kept.
            frozen: False: without parameters that are not trained, such as the base of adapters. They are not read,
                and `load` leaves those of the model as they are.
            background: return as soon as it is known what it has to be, and write it while training goes on. What an
                update changes before it has been written is copied first. Copies take at most half of the host's
                memory that is left, or one chunk's; then updates wait for the disk. The next save, load, close() and
                the end of the process wait for it.

        Returns:
            The checkpoint's folder; in the background what it is waited with.

        Raises:
            GeminiError: it cannot be written, on which rank and why; or `folder` is there and no checkpoint.
            ValueError: keep_last is less than 1.
        """
        wanted = Wanted(local(folder), extra, keep_last, frozen)
        return (save_in_background if background else save)(self._runtime, wanted)

    def load(self, folder: str | os.PathLike[str], *, model_only: bool = False) -> Any:
        """Loads what `save` has saved, bit for bit, whatever the number of ranks, the policy and the budget are now.

        All ranks call it. Names, shapes and every byte are checked before anything changes. Random numbers go on where
        they were if there are as many ranks as at saving; else they stay as they are.

        Args:
            folder: the checkpoint, or a series of them, of which `latest` is taken.
            model_only: weights and buffers alone; the optimizer and random numbers stay as they are.

        Returns:
            This rank's `extra`; rank 0's if there are not as many ranks as at saving.

        Raises:
            GeminiError: there is no checkpoint, it does not fit the model or the optimizer (by name), or it is damaged
                (which file, on which rank). Nothing has changed then. An error later (an interrupt, a module's own
                set_extra_state) leaves a model of two states: what trains or saves it is refused until a load succeeds.
        """
        parts = {"model"} if model_only else EVERYTHING
        return load(self._runtime, local(folder), parts)

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        dtype: torch.dtype | None = None,
        *,
        max_shard_size: int | str = "5GB",
        module: nn.Module | None = None,
    ) -> Path:
        """Saves the weights as a Hugging Face folder, which `from_pretrained` of the model's class loads.

        It has safetensors files, their index if there are several, config.json and generation_config.json. Names are
        those that transformers' own `save_pretrained` writes, and tied weights are in it once. Of a model with peft's
        adapters only these are written (adapter_model.safetensors, adapter_config.json), and the frozen base is not
        read. A module that is not of transformers becomes model.safetensors without a configuration.

        All ranks call it, with a folder that all hosts can write, and each writes what it has, straight from where it
        is. The folder is whole or not there at every moment, as with `save`. Files of an older model in it are
        replaced; others, such as a tokenizer's, stay.

        Args:
            folder: where; its parents are made if they are not there.
            dtype: of all floating-point parameters in the files (torch.float32, torch.bfloat16, torch.float16), rounded
                from the fp32 masters; those that the model's class keeps in fp32 stay so. None: nothing is rounded,
                trained parameters are their fp32 masters and frozen ones are as they are. config.json says which dtype
                that is. Buffers are as they are.
            max_shard_size: of one file; a larger tensor has a file of its own.
            module: a module of the model, to save it alone; None: the model. Of several models one.

        Returns:
            The folder.

        Raises:
            GeminiError: it cannot be written, on which rank and why; a value is beyond the range of `dtype`; or
                `folder` has other things than files. An older model in it is as it was then.
        """
        allowed = (None, torch.float32, torch.bfloat16, torch.float16)
        if dtype not in allowed:
            raise ValueError(f"dtype={dtype!r} must be one of {', '.join(map(str, allowed))}")
        most = parse_bytes(max_shard_size, name="max_shard_size")
        if module is None and len(roots(self.model)) > 1:
            raise GeminiError(
                f"engine.save_pretrained: a folder has one model, and this engine has {title(self.model)}: call it for "
                "each of them, with module="
            )
        module = self.model if module is None else module
        if not any(module is each for each in self.model.modules()):
            raise ValueError(f"module={type(module).__name__} is no module of the managed model")
        return save_pretrained(self._runtime, local(folder), dtype, most, module)

    # ---- the rest ----

    def stats(self) -> dict[str, int | float]:
        """Plain numbers about the run so far, in groups: steps, model, memory, since manage(), plan, ranks, foretold.

        docs/tuning.md has a table of all names.

        Bytes are bytes, times seconds, counts since manage(); medians are over the last 32 steps (NaN: not measured).
        """
        return self._runtime.stats()

    def chunk_states(self) -> list[chunks.ChunkState]:
        """What each chunk is doing now, on this rank: FREE, HOLD, COMPUTE, HOLD_AFTER_BWD, READY or UPDATE.

        May be called from anywhere, a module's forward included. See report/chunks.py, and docs/originals.md for what
        leads from one state to the next.
        """
        self._runtime.check_open()
        return chunks.chunk_states(self._runtime)

    def report(self) -> str:
        """The table of the plan and, once there have been steps, what was planned beside what was measured."""
        return tables.report(self._runtime)

    def timeline(
        self, path: str | Path, svg: str | Path | None = None, steps: int = 1
    ) -> timelines.Recording:
        """Records the next `steps` optimizer steps, or the body of a `with` statement.

        From one `step()` to the next, hence the passes of a step with what they hide: the updates of the step before
        (deferred) or their own (immediate).

        Args:
            path: where the Chrome trace is written (Perfetto, chrome://tracing).
            svg: where the picture is written; None: nowhere.
            steps: how many; ignored by `with`.

        Raises:
            ValueError: steps is less than 1.
            FileNotFoundError: a file's folder does not exist.
            GeminiError: a recording is under way.
        """
        draw: timelines.Draw | None = None
        if svg is not None:
            from gemini_strategy.tools.svg import export_svg as draw
        return timelines.record(self._runtime, path, svg, steps, draw)

    def close(self, dtype: torch.dtype | None = None, *, with_states: bool | None = None) -> None:
        """Makes model and optimizer ordinary again, with the trained weights, and frees everything. Idempotent.

        Several ranks close together, and each has the whole model then. Where the others do not come (this one is
        handling an exception, say, which they have not met) they are told, and this rank keeps its part of the weights.

        An engine that an error has closed can be closed, too: a RuntimeWarning then says what could not be given
        back (weights of one step, states of the optimizer).

        Args:
            dtype: None: parameters in the dtypes that they came in, those that came in fp32 as their fp32 masters (in
                the compute dtype, if that is the wider one); a RuntimeWarning says where masters are rounded to 16
                bits. torch.float32: all that have fp32 masters as these. Parameters return to the device they came
                from.
            with_states: give the optimizer its moments back, whole on every rank. None: if there is one rank.

        Raises:
            GeminiMemoryError: the host has no room for a second copy beside the engine's; nothing has changed.
            GeminiError: at the end, when all is closed: a checkpoint that was being written in the background could not
                be, and nobody had been told (while an exception is handled, a RuntimeWarning says so).
        """
        states = self.ranks.size == 1 if with_states is None else with_states
        with _torch.InferenceMode(False):
            close.close(self._runtime, dtype, states)

    def __repr__(self) -> str:
        about, ranks = tables.about(self._runtime), self.ranks
        where = f"{about['model']} on {about['device']}"
        if self.closed:
            return f"<Engine: {where}, closed>"
        budget, plan = about["device_budget"], tables.plan_of(self._runtime)
        parts = [
            where,
            "no device budget" if budget < 0 else f"{tables.bytes_text(budget)} of device memory",
            f"policy {about['policy']}",
            "no plan yet" if plan is None else f"a plan with {plan['when']} updates",
            "1 rank" if ranks.size == 1 else f"rank {ranks.rank} of {ranks.size}",
        ]
        return f"<Engine: {', '.join(parts)}>"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            if self._runtime.saving is not None:
                # Before abort() ends it. On another rank the writer may wait for what this error keeps it from.
                self._runtime.saving.join(close.PATIENCE)
            self.ranks.abort(f"{type(error).__name__}: {error}")
        self.close()
