"""Module hooks that enter and leave units, and the net that catches what autograd saves.

[Note: backward without backward hooks]
    Inside a unit's forward, autograd's saved-tensor hooks are ours. A saved tensor that shows managed
    bytes is kept as a token; when a backward node unpacks it, the chunk is fetched and pinned until
    another node of the same backward unpacks: autograd runs the nodes of a device one after the
    other. A node written in Python may run a backward of its own (re-entrant checkpointing); its pins
    last through that, because the nested one is a graph task of its own. So a node finds the right
    bytes whatever way its module's outputs took: returned, stored on the side, or hidden in an object.

[Note: views that escape]
    A view of an open parameter that is still alive when its unit leaves (a cache, an output, `self.w_t`)
    would show other bytes later. The storage's reference count tells: such a chunk stays pinned until the
    view is gone. What was written through it is found by the version counter that views share.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import types
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from gemini_strategy.errors import GuardError
from gemini_strategy.guard import guarded_class, open_class
from gemini_strategy.slot import Slot

if TYPE_CHECKING:
    from gemini_strategy.engine import Engine

__all__ = ["RootForward", "SavedTensorNet", "Unit", "is_compiled", "keep_nets_on_top"]

_use_count = torch._C._storage_Use_Count
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_plain_torch = torch._C.DisableTorchFunctionSubclass
_hooks_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled
_MODIFIED = "one of the variables needed for gradient computation has been modified by an inplace operation: {}."
_current_node = torch._C._current_autograd_node
_current_task = torch._C._current_graph_task_id


_thread = threading.local()


def _active_nets() -> list[SavedTensorNet]:
    """The nets pushed on this thread, innermost last."""
    if not hasattr(_thread, "nets"):
        _thread.nets = []
    return _thread.nets


def keep_nets_on_top() -> None:
    """Makes `saved_tensors_hooks` that start inside a unit go below its net.

    Such hooks (save_on_cpu, checkpointing of a part of a forward) would get the unit's weights: one that
    returns its tensor would save them without a token. The net delegates everything else to them. Done once
    per process, by the first manage(); outside units nothing changes.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks
    if hasattr(hooks, "_gm_enter"):
        return
    hooks._gm_enter, hooks._gm_exit = hooks.__enter__, hooks.__exit__

    def enter(self: Any) -> Any:
        result = hooks._gm_enter(self)
        nets = _active_nets()
        self._gm_net = nets[-1] if nets and nets[-1].push() else None
        return result

    def leave(self: Any, *args: object) -> Any:
        if getattr(self, "_gm_net", None) is not None:
            self._gm_net.pop()
            self._gm_net = None
        return hooks._gm_exit(self, *args)

    hooks.__enter__, hooks.__exit__ = enter, leave


class _Token:
    """A saved tensor on managed bytes."""

    __slots__ = ("address", "epoch", "is_view", "slot", "tensor")

    def __init__(self, slot: Slot, tensor: torch.Tensor, address: int) -> None:
        self.slot = slot
        self.is_view = tensor is not slot.parameter
        self.tensor = tensor.detach() if self.is_view else tensor
        self.address = address
        self.epoch = slot.epoch_now()
        if self.is_view:
            slot.view_tokens += 1

    def check(self) -> None:
        if self.epoch != self.slot.epoch_now():
            raise RuntimeError(_MODIFIED.format(f"{self.slot.name} (parameter)"))

    def __del__(self) -> None:
        if self.is_view:
            self.slot.view_tokens -= 1


class _Saved:
    """Any other saved tensor: detached, so that no node keeps itself alive through its own output.

    torch checks the versions of what it saves itself; under hooks that falls to the hooks.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = -1 if tensor.is_inference() else tensor._version

    def check(self) -> None:
        if self.version >= 0 and self.tensor._version != self.version:
            kind = f"{self.tensor.dtype} tensor of shape {tuple(self.tensor.shape)}"
            now, then = self.tensor._version, self.version
            raise RuntimeError(
                _MODIFIED.format(kind) + f" It is at version {now}; expected version {then}."
            )


class _Delegated:
    """A saved tensor that the user's own hooks (checkpointing, save_on_cpu) have packed."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Any) -> None:
        self.packed = packed
        self.unpack = unpack


class SavedTensorNet:
    """Packs and unpacks saved tensors; see [Note: backward without backward hooks]."""

    def __init__(self, engine: Engine, slots: list[Slot]) -> None:
        self._engine = engine
        self._begin, self._end = engine.core.weight_span()
        by_address = sorted((engine.core.address(s.id), s) for s in slots if s.parameter.numel())
        self._addresses = [a for a, _ in by_address]
        self._slots = [s for _, s in by_address]
        self._outer: list[tuple[Any, Any] | None] = []
        self._running: list[_RunningNode] = []

    def push(self) -> bool:
        """Installs our hooks over the user's; False where torch forbids hooks."""
        if not _hooks_enabled():
            return False
        top = _top_hooks(True)
        if top is not None and getattr(top[0], "__self__", None) is self:
            top = self._outer[-1]
        self._outer.append(top)
        _push_hooks(self.pack, self.unpack)
        _active_nets().append(self)
        return True

    def pop(self) -> None:
        _active_nets().pop()
        self._outer.pop()
        _pop_hooks()

    def pack(self, tensor: torch.Tensor) -> Any:
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # tensors without plain storage cannot show our bytes
            address = 0
        if self._begin <= address < self._end:
            slot = self._slots[bisect_right(self._addresses, address) - 1]
            if tensor.untyped_storage()._cdata != slot.storage:
                # A leased tensor of the guard: saved as itself, it would keep its lease until backward.
                with torch.no_grad(), _plain_torch():
                    offset = (address - self._engine.core.address(slot.id)) // tensor.element_size()
                    base = torch.Tensor.detach(slot.parameter)
                    tensor = base.as_strided(tensor.shape, tensor.stride(), offset)
            return _Token(slot, tensor, address)
        outer = self._outer[-1] if self._outer else None
        if outer is not None:
            return _Delegated(outer[0](tensor), outer[1])
        return _Saved(tensor)

    def unpack(self, saved: Any) -> torch.Tensor:
        if type(saved) is _Saved:
            saved.check()
            return saved.tensor
        if type(saved) is _Token:
            saved.check()
            self.touch(saved.address)
            return saved.tensor
        return self._unpack_delegated(saved)

    def _unpack_delegated(self, saved: _Delegated) -> torch.Tensor:
        """The user's unpack may run a forward (checkpointing): the node has launched nothing yet, so what
        it has unpacked may go meanwhile, and comes back."""
        frame = self._running[-1] if self._running else None
        if frame is None or frame.node != _node_key(_current_node()) or not frame.addresses:
            return saved.unpack(saved.packed)
        addresses, frame.addresses = frame.addresses, []
        self._engine.core.release_touched(frame.n_before)
        tensor = saved.unpack(saved.packed)
        for address in addresses:
            self.touch(address)
        return tensor

    def touch(self, address: int) -> None:
        """Makes the chunk at `address` readable for the running node."""
        core, stream = self._engine.core, self._engine.stream()
        node, task = _node_key(_current_node()), _current_task()
        if not self._follow(node, task):
            self._running.append(_RunningNode(task, node, core.n_touched()))
        self._running[-1].addresses.append(address)
        try:
            core.touch(address, stream)
        except MemoryError as error:
            slot = self._slots[bisect_right(self._addresses, address) - 1]
            raise self._engine.room_error(slot, "a backward node that needs it", error) from None

    def _follow(self, node: int, task: int) -> bool:
        """Unpins what earlier nodes of this task have touched; False if the task is new to us."""
        depth = len(self._running)
        while depth and self._running[depth - 1].task != task:
            depth -= 1
        if depth == 0:
            return False
        del self._running[depth:]  # backwards nested in this task's last node have ended
        if self._running[-1].node != node:
            self._engine.core.release_touched(self._running[-1].n_before)
            self._running[-1].node = node
            self._running[-1].addresses = []
        return True

    def settle(self) -> None:
        """Unpins what is no longer needed; called before each unit and each step.

        Outside backward that is everything. Inside it is what earlier nodes have touched: a node may
        start with the recomputation of an activation, before it has unpacked any weight.
        """
        if not self._running:
            return
        node = _current_node()
        if node is not None:
            self._follow(_node_key(node), _current_task())
        else:
            self._running.clear()
            self._engine.core.release_touched(0)


def _node_key(node: Any) -> int:
    """A node's place in its thread's order of creation; -1 outside backward."""
    return -1 if node is None else node._sequence_nr()


class _RunningNode:
    """The node of one (perhaps nested) backward that unpacked last."""

    __slots__ = ("addresses", "n_before", "node", "task")

    def __init__(self, task: int, node: int, n_before: int) -> None:
        self.task = task
        self.node = node  # its key: the node itself would keep the graph, and all of us, alive
        self.n_before = n_before  # chunks that nodes of enclosing backwards have touched
        self.addresses: list[int] = []  # what it has touched


def is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs a compiled graph (torch.compile(module) or module.compile())."""
    # torch.compile's wrapper is known by its child: importing its class costs over a second.
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


class Unit:
    """A module that directly owns managed parameters, or a compiled module with all of its own."""

    def __init__(self, engine: Engine, index: int, name: str, slots: list[Slot]) -> None:
        self.engine = engine
        self.id = index
        self.name = name
        self.slots = slots
        self.watches_writes = False  # its forward writes weights in place (Embedding max_norm)
        self._frames: list[tuple[bool, list[torch.Tensor]] | None] = []
        self._handles: list[Any] = []
        self._is_compiled = False

    @property
    def is_entered(self) -> bool:
        return bool(self._frames)

    def install(self, module: nn.Module) -> None:
        self._is_compiled = is_compiled(module)
        if module._compiled_call_impl is not None:  # it would compile hooks too: enter around it
            module._compiled_call_impl = _CompiledCall(self, module._compiled_call_impl)
            self._handles = [_Restore(module)]
            return
        self._handles = [
            module.register_forward_pre_hook(_Enter(self), prepend=True),
            module.register_forward_hook(_Leave(self), always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def enter(self) -> None:
        engine = self.engine
        self._frames.append(None)  # until everything below has worked
        engine.begin_pass()
        try:
            engine.core.enter(self.id, engine.stream())
        except MemoryError as error:
            raise engine.room_error(self.slots[0], f"module {self.name!r}", error) from None
        try:
            watched = [s.lease()[0] for s in self.slots if self.watches_writes and s.has_low]
        except BaseException:
            engine.core.leave(self.id, engine.stream())
            raise
        for slot in self.slots:
            slot.open_count += 1
            if slot.open_count == 1:
                # Compiled code is specialized on plain parameters.
                plain = slot.plain_class
                slot.parameter.__class__ = plain if self._is_compiled else open_class(plain)
                slot.version = slot.parameter._version
        has_net = engine.net.push()  # without grad too: the forward may turn it on
        if not has_net and torch.is_grad_enabled():
            self._close()
            engine.core.leave(self.id, engine.stream())
            raise GuardError(
                f"module {self.name!r}: saved-tensor hooks are disabled here (torch.func transforms "
                "disable them), and managed parameters cannot be followed into backward without them"
            )
        self._frames[-1] = (has_net, watched)

    def leave(self) -> None:
        frame = self._frames.pop() if self._frames else None
        if frame is None:
            return  # enter failed: there is nothing to undo
        engine = self.engine
        has_net, watched = frame
        if has_net:
            engine.net.pop()
        if engine.closed:
            return
        try:
            self._find_writes(is_compared=bool(watched))
        finally:
            self._close()
            self._hold_escaped()
            del watched, frame  # their leases compare the bytes
            engine.core.leave(self.id, engine.stream())

    def _close(self) -> None:
        for slot in self.slots:
            slot.open_count -= 1
            if slot.open_count == 0:
                slot.parameter.__class__ = guarded_class(slot.plain_class)

    def _find_writes(self, is_compared: bool) -> None:
        for slot in self.slots:
            version = slot.parameter._version
            if version != slot.version:
                slot.epoch += version - slot.version
                slot.version = version
                if not is_compared or not slot.has_low:
                    self.engine.note_write(slot)

    def _hold_escaped(self) -> None:
        for slot in self.slots:
            if _use_count(slot.storage) > slot.base_count + slot.view_tokens:
                self.engine.hold(slot)


class _CompiledCall:
    """A compiled `module.__call__` with its unit entered around it."""

    def __init__(self, unit: Unit, call: Any) -> None:
        self.unit = unit
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.unit.enter()
        try:
            return self.call(*args, **kwargs)
        finally:
            self.unit.leave()


class _Restore:
    """Takes a _CompiledCall away again."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def remove(self) -> None:
        if isinstance(self.module._compiled_call_impl, _CompiledCall):
            self.module._compiled_call_impl = self.module._compiled_call_impl.call


class _UnitHook:
    """A hook object that copies as nothing: a deep copy of a managed model is unmanaged."""

    def __init__(self, unit: Unit | None) -> None:
        self.unit = unit

    def __deepcopy__(self, memo: dict[int, Any]) -> _UnitHook:
        return type(self)(None)

    def __reduce__(self) -> Any:
        return type(self), (None,)


class _Enter(_UnitHook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            raise GuardError(
                "a managed module cannot be traced; compile the submodule before manage()"
            )
        if self.unit is not None:
            self.unit.enter()


class _Leave(_UnitHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.unit is not None:
            self.unit.leave()


class RootForward:
    """The model's `forward` while it is managed: input dtypes, autocast, and order after an interrupt.

    An instance attribute over the class's method, not hooks: torch runs no hook when KeyboardInterrupt
    passes, and autocast must not stay on.
    """

    def __init__(
        self, engine: Engine, model: nn.Module, convert_inputs: bool, force_outputs_fp32: bool
    ) -> None:
        self.engine = engine
        self.model = model
        self.convert_inputs = convert_inputs
        self.force_outputs_fp32 = force_outputs_fp32
        self._had_own = "forward" in model.__dict__
        self._forward = model.forward
        functools.update_wrapper(self, self._forward, updated=())
        model.forward = self

    def remove(self) -> None:
        if self._had_own:
            self.model.forward = self._forward
        else:
            self.model.__dict__.pop("forward", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.engine.precision_plan
        context: Any = contextlib.nullcontext()
        if self.convert_inputs:
            args, kwargs = plan.convert_inputs((args, kwargs))
            context = plan.forward_context(self.engine.device.type)
        try:
            with context:
                output = self._forward(*args, **kwargs)
        except Exception:
            raise  # torch has run the units' leave hooks
        except BaseException:
            self.engine.recover()
            raise
        return tree_map(_to_fp32, output) if self.force_outputs_fp32 else output

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A deep copy of the model is unmanaged: its forward is its class's (or the copied own) again."""
        if self._had_own:
            return copy.deepcopy(self._forward, memo)
        return types.MethodType(type(self.model).forward, memo[id(self.model)])

    def __reduce__(self) -> Any:
        return getattr, (self.model, "forward")


def _to_fp32(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value
