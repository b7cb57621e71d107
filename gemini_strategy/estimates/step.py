"""One pass of a training step, recorded on tensors without bytes: what the engine would be asked for, and what else the
device would hold.

The model's parameters are replaced by fake ones for the time of the recording. Its units, saved tensors and gradients
are watched where the engine's own hooks stand (parameters/hooks.py, csrc/binding/net.c), and the core replays what they
saw (csrc/binding/paper.c).

Invariants
    1. The model is afterwards what it was: the same parameters, buffers, hooks and modes.
    2. Events come in the order in which a run would call the core. Between them stands the operations' work.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gemini_strategy import _C, _torch
from gemini_strategy._torch import tree_map
from gemini_strategy.errors import GeminiError
from gemini_strategy.estimates.cuda_rules import CudaRules
from gemini_strategy.estimates.quantized import calling, multiplied
from gemini_strategy.estimates.tensors import Live, Operations, Work
from gemini_strategy.parameters import quantized
from gemini_strategy.parameters.hooks import is_compiled
from gemini_strategy.parameters.registration import Registration
from gemini_strategy.precision import FORMATS, Precision
from gemini_strategy.report.tables import count_tokens
from gemini_strategy.roots import roots, title

_KIND = _C.RECORDED
_IN_BACKWARD, _GRAD = 1, 2  # GM_ENTER_*

Event = tuple[int, ...]
StepFunction = Callable[[nn.Module, Any], Any]
"""(model, inputs) -> the loss; or None, if it has run the backward itself."""


@dataclass(frozen=True, slots=True)
class Held:
    """From here on tensors held at most so many bytes, of those so far."""

    bytes: int


@dataclass
class RecordedPass:
    """A forward and its backward.

    Attributes:
        entries: events of `Core.replay`, and between them work and memory.
        backward_at: the number of entries before the backward.
        tensors: see `Live.events`, without those that stay.
        kept_bytes: of tensors that stay between steps (buffers).
        peak_bytes: the most that tensors held; without weights, states and the gradients that the engine has taken.
        tokens: of the inputs, or their samples; 0: not known.
        parameters: of the optimizer that have got a gradient.
    """

    entries: list[Event | Work | Held] = field(default_factory=list)
    backward_at: int = 0
    tensors: list[tuple[int, int]] = field(default_factory=list)
    kept_bytes: int = 0
    peak_bytes: int = 0
    tokens: int = 0
    parameters: list[int] = field(default_factory=list)


def loss_of(model: nn.Module, inputs: Any) -> Any:
    """A model's own loss (`output.loss`, `output["loss"]`), else the mean of the squares of its output."""
    if roots(model) != [model]:
        raise GeminiError(f"{title(model)} has no forward: give step_fn, which returns the loss")
    if isinstance(inputs, Mapping):
        output = model(**inputs)
    else:
        output = model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    first = output[0] if isinstance(output, list | tuple) else output
    if not isinstance(first, torch.Tensor):
        raise GeminiError(
            f"the model returns a {type(output).__name__} without a loss: give step_fn, which returns the loss"
        )
    return first.float().square().mean()


class _Token:
    """The place of a saved parameter, or of a view of one."""

    def __init__(self, index: int, tensor: torch.Tensor) -> None:
        self.index = index
        self.shape, self.strides = tuple(tensor.shape), tensor.stride()
        self.offset, self.dtype = tensor.storage_offset(), tensor.dtype


class _Delegated:
    """What a hook of the user's (checkpointing) keeps of a tensor, and how it gives it back."""

    def __init__(self, unpack: Callable[[Any], Any], packed: Any) -> None:
        self.unpack = unpack
        self.packed = packed


def _node_key() -> int:
    """As gm_py_node_key: autograd's own number of the running node; -1 outside backward."""
    node = _torch.current_node()
    return -1 if node is None else node._sequence_nr() & ((1 << 63) - 1)


class _Recorder:
    """Hooks on the units and parameters of one model, which write down what they see."""

    def __init__(self, registration: Registration, live: Live) -> None:
        self.result = RecordedPass()
        self.live = live
        self.parameters: list[nn.Parameter] = []  # fake ones, by the numbers of the slots
        self.taking: list[Any] = []  # the handles of their hooks
        self._slots = registration.slots
        self._units = registration.modules()
        self._index: dict[int, int] = {}  # id of a storage -> number of its parameter
        self._tasks: set[int] = set()
        self._is_backward = False
        self._held = 0
        self._below: list[tuple[Any, Any] | None] = []  # the hooks under ours

    def note(self, kind: str, *numbers: int) -> None:
        if not self._is_backward and _torch.current_node() is not None:
            self._is_backward = True
            self.result.backward_at = len(self.result.entries)
        if self.live.most > self._held:
            self._held = self.live.most
            self.result.entries.append(Held(self._held))
        self.result.entries.append((_KIND[kind], *numbers))

    # ---- units ----

    def _enter(self, unit: int, module: nn.Module, args: Any) -> None:
        in_backward = _torch.current_node() is not None
        if in_backward:
            self.note("UNPIN", _node_key(), _torch.current_task())
        flags = (_IN_BACKWARD if in_backward else 0) | (_GRAD if torch.is_grad_enabled() else 0)
        self.note("ENTER", unit, flags)
        top = _torch.top_saved_tensors_hooks(True)
        is_ours = top is not None and getattr(top[0], "__self__", None) is self
        self._below.append(self._below[-1] if is_ours and self._below else top)
        _torch.push_saved_tensors_hooks(self.pack, self.unpack)

    def _leave(self, unit: int, module: nn.Module, args: Any, output: Any) -> None:
        _torch.pop_saved_tensors_hooks()
        self._below.pop()
        self.note("LEAVE", unit)

    # ---- saved tensors ----

    def pack(self, tensor: torch.Tensor) -> Any:
        index = self._index.get(_torch.storage_id(tensor.untyped_storage()))
        if index is not None:
            return _Token(index, tensor)
        below = self._below[-1] if self._below else None
        if below is not None:
            return _Delegated(below[1], below[0](tensor))
        return tensor.detach()

    def unpack(self, packed: Any) -> Any:
        if isinstance(packed, torch.Tensor):
            return packed
        node, task = _node_key(), _torch.current_task()
        if isinstance(packed, _Delegated):
            self.note("SUSPEND", node)
            tensor = packed.unpack(packed.packed)
            self.note("RESUME", node, task)
            return tensor
        self._touch(packed.index, node, task)
        parameter = self.parameters[packed.index].detach()
        if packed.dtype is not parameter.dtype:
            parameter = parameter.view(packed.dtype)
        return parameter.as_strided(packed.shape, packed.strides, packed.offset)

    def _touch(self, index: int, node: int, task: int) -> None:
        if task >= 0 and task not in self._tasks:
            self._tasks.add(task)
            _torch.execution_engine.queue_callback(functools.partial(self.note, "END", task))
        self.note("UNPACK", index, node, task)

    def touch(self, indices: Sequence[int]) -> None:
        """The running backward node needs these parameters, which nothing has saved for it."""
        for index in indices:
            self._touch(index, _node_key(), _torch.current_task())

    # ---- gradients ----

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            return
        self.note("UNPIN", _node_key(), _torch.current_task())
        dtype = grad.dtype if grad.dtype in FORMATS else torch.float32
        self.note("GRAD", index, FORMATS[dtype])
        if index not in self.result.parameters and self._slots[index].has_moments:
            self.result.parameters.append(index)

    # ---- being installed ----

    def stand_in(self, index: int) -> nn.Parameter:
        """The fake parameter of a slot, in the dtype in which it is computed with."""
        slot = self._slots[index]
        data = torch.empty_strided(slot.shape, slot.strides, dtype=slot.dtype, device="cpu")
        parameter = nn.Parameter(data, requires_grad=slot.parameter.requires_grad)
        self.live.exempt(parameter)
        self._index[_torch.storage_id(parameter.untyped_storage())] = index
        if slot.has_grad_home:
            take = functools.partial(self._take, index)
            self.taking.append(parameter.register_post_accumulate_grad_hook(take))
        return parameter

    def install(self) -> Iterator[Any]:
        for number, (name, module) in enumerate(self._units):
            if is_compiled(module):
                raise GeminiError(
                    f"module {name!r} is compiled: an estimate records operations one by one; estimate the model "
                    "before torch.compile (its activations are then an upper bound)"
                )
            yield module.register_forward_pre_hook(
                functools.partial(self._enter, number), prepend=True
            )
            yield module.register_forward_hook(
                functools.partial(self._leave, number), always_call=True
            )


@contextlib.contextmanager
def _replaced(model: nn.Module, recorder: _Recorder, registration: Registration) -> Iterator[None]:
    """Invariant 1, for parameters and buffers."""
    recorder.parameters = [recorder.stand_in(i) for i in range(len(registration.slots))]
    fakes: dict[int, torch.Tensor] = {
        id(slot.parameter): parameter
        for slot, parameter in zip(registration.slots, recorder.parameters, strict=True)
    }
    tables = [
        table for module in model.modules() for table in (module._parameters, module._buffers)
    ]
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or quantized.is_wrapper(tensor):
                    continue  # whose parts have slots of their own: see multiplied()
                if id(tensor) not in fakes:  # a buffer
                    fakes[id(tensor)] = torch.empty_like(tensor, device="cpu")
                    recorder.live.note(fakes[id(tensor)])
                table[name] = fakes[id(tensor)]
        yield
    finally:
        for table, old in zip(tables, before, strict=True):
            table.clear()
            table.update(old)
        for handle in recorder.taking:  # Python's collector does not see a hook of a parameter
            handle.remove()


@contextlib.contextmanager
def _without_padding() -> Iterator[None]:
    """Inside, transformers takes a mask without values for one that hides nothing, instead of for an exported model's.

    Then attention needs no mask, as in a run whose batches are full.
    """
    masks = sys.modules.get("transformers.masking_utils")
    answers: dict[str, Callable[..., Any]] = {
        "is_tracing": lambda tensor=None: False,
        "fast_all": lambda tensor: True,  # nothing is hidden
        "find_packed_sequence_indices": lambda position_ids: None,  # one sequence in a row
    }
    before = {name: getattr(masks, name) for name in answers if hasattr(masks, name)}
    try:
        for name in before:
            setattr(masks, name, answers[name])
        yield
    finally:
        for name, value in before.items():
            setattr(masks, name, value)


def _fakes(inputs: Any, live: Live) -> Any:
    """The inputs without bytes, counted; one tensor that is there twice stays one."""
    made: dict[int, torch.Tensor] = {}

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = torch.empty_like(
                value, device="cpu", requires_grad=value.requires_grad
            )
            live.note(made[id(value)])
        return made[id(value)]

    return tree_map(fake, inputs)


def record(
    model: nn.Module,
    inputs: Any,
    registration: Registration,
    precision: Precision,
    *,
    step_fn: StepFunction | None = None,
    is_cuda: bool = True,
    convert_inputs: bool = True,
) -> RecordedPass:
    """Runs one forward and backward on tensors without bytes, and says what they did.

    Args:
        model: as manage() would take it; its parameters may be on the meta device.
        inputs: of the model: a tensor, a list of arguments or a dict of them; their values are not looked at.
        registration: of this model.
        precision: of the run.
        step_fn: what gives the loss; None: `loss_of`.
        is_cuda: the run is on CUDA, whose attention and autocast are followed; False: on the CPU.
        convert_inputs: as in manage().

    Raises:
        GeminiError: the model cannot run so: it asks for values, or has a compiled module.
    """
    live = Live()
    recorder = _Recorder(registration, live)
    mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_without_padding())
        stack.enter_context(mode)
        stack.enter_context(_replaced(model, recorder, registration))
        stack.enter_context(multiplied(registration, live, recorder.touch))
        for handle in recorder.install():
            stack.callback(handle.remove)
        recorder.result.kept_bytes = live.now
        kept = live.kept()
        inputs = _fakes(inputs, live)
        recorder.result.tokens = count_tokens(inputs)
        if is_cuda:
            stack.enter_context(CudaRules())
        stack.enter_context(Operations(live, recorder.result.entries.append))
        _run(model, inputs, precision, step_fn or loss_of, convert_inputs)
        recorder.result.peak_bytes = live.most
        recorder.result.entries.append(Held(live.most))
        del inputs
    ended = {number for number, size in live.events if not size} - kept
    recorder.result.tensors = [event for event in live.events if event[0] in ended]
    return recorder.result


@contextlib.contextmanager
def _root_forwards(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Inside, a root's forward converts its inputs and has autocast, and the loss around it has neither, as under
    manage()."""
    with contextlib.ExitStack() as stack:
        for root in roots(model):
            stack.enter_context(calling(root, _as_managed(root.forward, precision)))
        yield


def _as_managed(forward: Callable[..., Any], precision: Precision) -> Callable[..., Any]:

    @functools.wraps(forward, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = precision.convert_inputs((args, kwargs))
        with precision.forward_context("cpu"):
            return forward(*args, **kwargs)

    return called


def _run(
    model: nn.Module, inputs: Any, precision: Precision, step_fn: StepFunction, converts: bool
) -> None:
    try:
        with _root_forwards(model, precision) if converts else contextlib.nullcontext():
            loss = step_fn(model, inputs)
            if loss is not None:
                loss.backward()
    except Exception as error:
        if _is_about_values(error):
            raise GeminiError(
                "the model's forward, or step_fn, asks for values of its tensors, and an estimate has none "
                f"({type(error).__name__}: {error}): give inputs or a step_fn with which it does not"
            ) from error
        raise


def _is_about_values(error: Exception) -> bool:
    """A fake tensor was asked for what it does not have. numpy() and a format ("{loss:.3f}") have errors of no class of
    its own."""
    words = ("is not supported for tensor subclasses", "passed to FakeTensor.__format__")
    is_own = type(error).__module__.startswith("torch._subclasses")
    return is_own or any(word in str(error) for word in words)
