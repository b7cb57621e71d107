"""Calls that enter and leave units, and the net that catches what autograd saves.

[Note: units without forward hooks]
    Some modules look whether they or their children have hooks, and take another way then, with other bits:
    nn.TransformerEncoderLayer leaves its fast path. So a unit has none. It is entered by what torch calls in the place
    of the module's own call (`_compiled_call_impl`), and the hooks that a module has run inside.

[Note: backward without backward hooks]
    Inside a unit's forward, autograd's saved-tensor hooks are ours. A saved tensor that shows managed
    bytes is kept as a token; when a backward node unpacks it, the chunk is fetched and pinned until
    another node of the same backward unpacks: autograd runs the nodes of a device one after the
    other. A node written in Python may run a backward of its own (re-entrant checkpointing); its pins
    last through that, because the nested one is a graph task of its own. So a node finds the right
    bytes whatever way its module's outputs took: returned, stored on the side, or hidden in an object.

[Note: storages that stay]
    All units and nodes that use a parameter show the one tensor `slot.shown`. When its last user goes while somebody
    still has its storage (a cache, an output, `self.w_t`, what a differentiated backward has saved), that storage takes
    a pin of its own, which ends with it (csrc/engine/lease.c), and the next user gets a new tensor. Nobody asks again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import sys
import types
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from gemini_strategy import _C, _torch
from gemini_strategy._torch import detect_fake_mode, tree_map
from gemini_strategy.errors import GeminiError, GuardError
from gemini_strategy.parameters import absent, borrowing, patches
from gemini_strategy.parameters.leaving import Attached
from gemini_strategy.parameters.outside import Outside
from gemini_strategy.parameters.slot import Slot
from gemini_strategy.precision import to_fp32
from gemini_strategy.roots import roots

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime

_OF_CODE = ("__code__", "__globals__", "__name__")
_MODIFIED = "one of the variables needed for gradient computation has been modified by an inplace operation: {}."


def keep_nets_on_top() -> None:
    """Makes the caller's `saved_tensors_hooks` go below the nets, wherever they start, while an engine is open.

    Such hooks (save_on_cpu, checkpointing) would get weights: one that returns its tensor would keep their chunks.
    And a forward that checkpointing repeats in part, outside its unit, has to save what it saved inside. The nets
    delegate everything else to them.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks
    patches.add(hooks, "__enter__", _entering)
    patches.add(hooks, "__exit__", _leaving)
    # What its context manager calls: Dynamo knows the function itself by identity.
    patches.add(_torch.disabling_saved_tensors_hooks, "cell_contents", _without_nets)


def _entering(plain: Any) -> Any:
    @functools.wraps(plain)
    def enter(self: Any) -> Any:
        result = plain(self)
        net = next(iter(absent.nets), None)  # any: the one on top packs for all
        if net is not None:
            self._gm_net = net, net.push()
            # The patch may be off by then. A `with` has looked its exit up already.
            self.__exit__ = functools.partial(type(self).__exit__, self)
        return result

    return enter


def _leaving(plain: Any) -> Any:
    @functools.wraps(plain)
    def leave(self: Any, *args: object) -> Any:
        vars(self).pop("__exit__", None)
        net, depth = vars(self).pop("_gm_net", None) or (None, None)
        if depth is not None:
            net.pop_to(depth)
        return plain(self, *args)

    return leave


def _without_nets(plain: Any) -> Any:
    """In a unit's own forward, as torch.func does: the hooks are not the caller's. Storages hold what is saved then."""

    @functools.wraps(plain)
    def disabled(error_message: str) -> Any:
        taken = borrowing.take_nets()
        try:
            yield from plain(error_message)
        finally:
            borrowing.put_nets(taken)

    return disabled


class SavedTensorNet(_C.Net):
    """Packs and unpacks saved tensors; see [Note: backward without backward hooks].

    The core's Net does it; here is what it calls when something is unusual.
    """

    def __init__(self, engine: Runtime, slots: list[Slot]) -> None:
        core, device = engine.core, engine.device
        shown = sorted((s for s in slots if s.parameter.numel()), key=lambda s: core.address(s.id))
        ordinal = device.index if device.type == "cuda" else -1
        mark = _mark_touch if wants_marks() else None
        self.start(engine, core, tuple(shown), ordinal, mark)
        for slot in slots:
            slot.net = self
        for unit in engine.units:
            unit.start(self, tuple(unit.slots))
        absent.nets.add(self)
        borrowing.watch_compiler()

    def is_absent(self, tensor: torch.Tensor) -> bool:
        return absent.is_absent(tensor)

    def refuse_modified(
        self, tensor: torch.Tensor | None, slot: Slot | None, now: int, then: int
    ) -> None:
        if slot is not None:
            slot.engine.check_open()
            raise RuntimeError(_MODIFIED.format(f"{slot.name} (parameter)"))
        assert tensor is not None
        kind = f"{tensor.dtype} tensor of shape {tuple(tensor.shape)}"
        raise RuntimeError(
            _MODIFIED.format(kind) + f" It is at version {now}; expected version {then}."
        )

    def refuse_closed(self, slot: Slot) -> NoReturn:
        raise GeminiError(
            f"backward needs {slot.name}, of a forward that ran before, and its engine is closed: the graph has no "
            "weights any more. Run backward before close(), or the forward again"
        )

    def refuse_thread(self, slot: Slot) -> NoReturn:
        raise GuardError(
            f"{slot.name}: two threads run a backward at the same time on the host device: let one wait for the other "
            "(threads that evaluate need not)"
        )

    def make_room(self, slot: Slot) -> bool:
        return borrowing.make_room(slot.engine)

    def no_room(self, slot: Slot, error: MemoryError) -> None:
        raise slot.engine.room_error(slot, "a backward node that needs it", error) from None


def wants_marks() -> bool:
    """Whether units and backward nodes show in NVTX: GEMINI_NVTX=1."""
    return os.environ.get("GEMINI_NVTX") == "1"


def _mark_touch(slot: Slot) -> None:
    torch.cuda.nvtx.mark(f"backward {slot.name}")


def is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs a compiled graph (torch.compile(module) or module.compile())."""
    call = module._compiled_call_impl
    while isinstance(call, _UnitCall):
        call = call.compiled
    # torch.compile's wrapper is known by its child: importing its class costs over a second.
    return "_orig_mod" in module._modules or call is not None


class Unit(_C.Unit):
    """A module that directly owns managed parameters, or a compiled module with all of its own.

    Or one that uses its children's itself: then it is entered while it evaluates, see registration.py.

    Entering and leaving are the core's Unit's; here is what it calls when something is unusual.
    """

    def __init__(self, engine: Runtime, index: int, name: str, slots: list[Slot]) -> None:
        self.engine = engine
        self.id = index
        self.name = name
        self.slots = slots
        self.watches_writes = False  # its forward writes weights in place (Embedding max_norm)
        self.is_for_evaluation = False
        self.is_compiled_use = False  # a compiled function has borrowed it, and may again
        self._call: _UnitCall | None = None

    def install(self, module: nn.Module) -> None:
        self.is_compiled = is_compiled(module)
        self._call = _UnitCall(self, module)

    def enter_by(self, call: types.MethodType | None) -> None:
        """Entering is this method of the unit from now on; None: its own again."""
        if call is None:
            vars(self).pop("enter", None)
        else:
            self.enter = call  # type: ignore[method-assign]
        if self._call is not None:
            self._call.enter = self.enter

    def remove(self) -> None:
        if self._call is not None:
            self._call.remove()
            self._call = None

    def refuse_thread(self) -> NoReturn:
        raise GuardError(
            f"module {self.name!r} is compiled, and another thread is inside a module: let one wait for the other"
        )

    def watch(self) -> list[torch.Tensor]:
        """Leases that find by comparison what this forward writes."""
        return [s.lease() for s in self.slots if s.has_low]

    def make_room(self, slot: Slot) -> bool:
        return borrowing.make_room(slot.engine)

    def no_room(self, slot: Slot, error: MemoryError) -> None:
        raise self.engine.room_error(slot, f"module {self.name!r}", error) from None


class MarkedUnit(Unit):
    """A unit whose time shows in NVTX, from enter to leave."""

    def enter(self) -> None:
        torch.cuda.nvtx.range_push(self.name)
        super().enter()

    def leave(self) -> None:
        try:
            super().leave()
        finally:
            torch.cuda.nvtx.range_pop()


class _UntraceableError(GuardError, AttributeError):
    """An attribute that only somebody asks for who wants the code of a managed model."""


def refuse_tracing(name: str) -> NoReturn:
    raise _UntraceableError(
        f"{name}: a managed model has no code that could be scripted, traced or exported: close the engine first "
        "(gemini_strategy.engine_of(model).close() makes the model ordinary again)"
    )


def _is_traced() -> bool:
    """Whether this call runs to be written down, for calls in which no engine takes part.

    What make_fx writes down of real values, as torch.func.linearize has it do, names parameters: it is served.
    """
    if torch.compiler.is_compiling() or _torch.tracing_state() is not None:
        return True
    return detect_fake_mode() is not None


class _UnitCall(Attached, _C.UnitCall):
    """A module's call with its unit entered around it; see [Note: units without forward hooks].

    It copies as nothing: a copy of a managed model is unmanaged.
    """

    def __init__(self, unit: Unit | None, module: nn.Module) -> None:
        """unit: None: the module has none; others below it do, and it may borrow them."""
        self.module = module
        self.own = self.compiled = module.__dict__.get(_torch.COMPILED_CALL)
        self._had_own = _torch.COMPILED_CALL in module.__dict__
        self.reach = frozenset()
        self.compiled_use: list[Slot] = []  # below it, of functions that it calls
        self.lacks_room = False  # what its operations have borrowed had to be given back
        self._name = type(module).__name__
        if unit is not None:
            self.enter, self.leave = unit.enter, unit.leave
            self.is_for_evaluation = unit.is_for_evaluation
            self.outside = Outside(unit) if unit.engine.precision_plan.is_mixed else None
            self.device = unit.engine.device.type
            self._name = unit.name or self._name
            # Dynamo goes past calls of modules without hooks, and looks here, too. Of no hook, nothing else reads it.
            module._forward_hooks_with_kwargs[_torch.COMPILED_CALL] = True  # type: ignore[index]
        # Not by setattr: what torch.compile makes of a module hands most attributes on to that.
        module.__dict__[_torch.COMPILED_CALL] = self

    def remove(self) -> None:
        """Those that came later are gone."""
        own = self.module.__dict__
        self.module._forward_hooks_with_kwargs.pop(_torch.COMPILED_CALL, None)  # type: ignore[call-overload]
        if own.get(_torch.COMPILED_CALL) is not self:
            return
        if self._had_own:
            own[_torch.COMPILED_CALL] = self.compiled
        else:
            del own[_torch.COMPILED_CALL]

    def borrow_from_now_on(self, slot: Slot) -> bool:
        """Whether that is new."""
        if slot in self.compiled_use:
            return False
        self.compiled_use.append(slot)
        self.borrows_again = True
        return True

    def borrow_again(self) -> None:
        """What compiled functions have used: their guards look at it, and a guard is no operation."""
        for slot in self.compiled_use:
            borrowing.borrow(slot, borrowing.Use.COMPILED)

    def refuse_if_traced(self) -> None:
        """The core asks where a dispatch mode is on, or torch.jit traces: nothing else writes down what runs."""
        if _is_traced():
            refuse_tracing(self._name)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_CODE:
            refuse_tracing(self._name)
        raise AttributeError(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def borrowers(model: nn.Module, units: list[tuple[nn.Module, Unit]]) -> list[_UnitCall]:
    """Calls for the modules that have units below them and are none: what any of them may borrow is told to all.

    See [Note: borrowing] in csrc/binding/call.c.
    """
    of = {}
    inside_compiled = set()
    for module, unit in units:
        of.setdefault(id(module), []).append(unit)
        if unit.is_compiled:
            inside_compiled.update(id(m) for m in module.modules() if m is not module)
    calls = []
    for module in model.modules():
        reach = frozenset(u for m in module.modules() for u in of.get(id(m), ()))
        call = module.__dict__.get(_torch.COMPILED_CALL)
        own = inspect.getattr_static(module, "forward", None)
        is_called = own is not inspect.getattr_static(nn.Module, "forward")
        if id(module) in of:
            while isinstance(call, _UnitCall):
                call.reach = reach
                call = call.compiled
        elif reach and is_called and id(module) not in inside_compiled:
            calls.append(_UnitCall(None, module))
            calls[-1].reach = reach
    return calls


def root_forwards(engine: Runtime) -> list[RootForward]:
    """Puts one in the place of each root's `forward`."""
    forms = engine.settings.convert_inputs, engine.settings.force_outputs_fp32
    return [RootForward(engine, root, *forms) for root in roots(engine.model)]


class RootForward(Attached):
    """A root's `forward` while it is managed: input dtypes, autocast, and order after an interrupt.

    An instance attribute over the class's method, not hooks: torch runs no hook when KeyboardInterrupt
    passes, and autocast must not stay on.
    """

    def __init__(
        self, engine: Runtime, model: nn.Module, convert_inputs: bool, force_outputs_fp32: bool
    ) -> None:
        self.engine = engine
        self.model = model
        self.convert_inputs = convert_inputs
        self.force_outputs_fp32 = force_outputs_fp32
        self.own = model.__dict__.get("forward")
        functools.update_wrapper(self, model.forward, updated=())
        model.forward = self
        call = model.__dict__.get(_torch.COMPILED_CALL)
        if convert_inputs and isinstance(call, _UnitCall):
            call.outside = None  # its calls are this one's

    def __getattr__(self, name: str) -> Any:
        if name in _OF_CODE:
            refuse_tracing(type(self.model).__name__)
        raise AttributeError(name)

    def remove(self) -> None:
        if self.model.__dict__.get("forward") is not self:  # the user's, around this one
            return
        if self.own is not None:
            self.model.forward = self.own
        else:
            del self.model.__dict__["forward"]

    def _forward(self) -> Any:
        """The model's own. Its class, or the class's forward, may have become another since manage()."""
        if self.own is not None:
            return self.own
        kind = type(self.model)
        found = inspect.getattr_static(kind, "forward")
        return found.__get__(self.model, kind) if hasattr(found, "__get__") else found

    def _other(self) -> nn.Module | None:
        """A module that was made of a copy of the model's dict, so has this too, if it is that one which is called."""
        frame = sys._getframe(2)
        if frame.f_globals.get("__name__") != nn.Module.__module__:
            return None
        module = frame.f_locals.get("self")
        return None if module is self.model or not isinstance(module, nn.Module) else module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        other = self._other() if self.own is None else None
        if other is not None:
            return type(other).forward(other, *args, **kwargs)
        if self.engine.closed:
            return self._forward()(*args, **kwargs)
        if self.engine.memory.recover():
            self.engine.core.forget_outside()
        plan = self.engine.precision_plan
        context: Any = contextlib.nullcontext()
        if self.convert_inputs:
            args, kwargs = plan.convert_inputs((args, kwargs))
            context = plan.forward_context(self.engine.device.type)
        try:
            with self.engine.meter.counting((args, kwargs)), context, self.engine.explaining():
                output = self._forward()(*args, **kwargs)
        except BaseException as error:
            self.engine.interrupt_first_step()
            if not isinstance(error, Exception):  # else torch has run the units' leave hooks
                self.engine.recover()
            raise
        return tree_map(to_fp32, output) if self.force_outputs_fp32 else output

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A deep copy of the model is unmanaged: its forward is its class's (or the copied own) again."""
        if self.own is not None:
            return copy.deepcopy(self.own, memo)
        return types.MethodType(type(self.model).forward, memo[id(self.model)])

    def __reduce__(self) -> Any:
        return getattr, (self.model, "forward")
