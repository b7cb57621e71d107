"""Registering a model: which modules are units, what each parameter becomes, and moving it into its chunk."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini_strategy import _C, _torch
from gemini_strategy.errors import GeminiError, GeminiMemoryError
from gemini_strategy.parameters import order, quantized
from gemini_strategy.parameters.hooks import (
    MarkedUnit,
    Unit,
    borrowers,
    is_compiled,
    wants_marks,
)
from gemini_strategy.parameters.low import settled_low
from gemini_strategy.parameters.means import average_grad
from gemini_strategy.parameters.parameter import managed_class
from gemini_strategy.parameters.slot import Slot
from gemini_strategy.precision import FORMATS, weight_dtypes
from gemini_strategy.sizes import size_text

if TYPE_CHECKING:
    from gemini_strategy.parameters.original import Original
    from gemini_strategy.runtime import Runtime
    from gemini_strategy.weights.loading import Loading


@dataclass
class _FoundUnit:
    """A module that directly owns parameters, before it is managed.

    is_for_evaluation: or one that uses its children's itself while it evaluates.
    """

    name: str
    module: nn.Module
    owned: list[tuple[str, nn.Parameter]]
    is_for_evaluation: bool = False


def _find_units(model: nn.Module) -> list[_FoundUnit]:
    """The modules that directly own parameters, in registration order.

    nn.MultiheadAttention uses its out_proj's weight itself, so the two are one unit. A compiled module is
    one unit with everything in it: entering has no place inside a graph. Units for evaluation come last.
    """
    units, readers = [], []
    absorbed: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in absorbed:
            continue
        prefix = f"{name}." if name else ""
        if is_compiled(module):
            absorbed.update(id(child) for child in module.modules())
            named = module.named_parameters(remove_duplicate=False)
            owned = list(_expanded((prefix + n, p) for n, p in named))
            units += [_FoundUnit(name, module, owned)] if owned else []
            continue
        owned = [(prefix + n, p) for n, p in module._parameters.items() if p is not None]
        if isinstance(module, nn.MultiheadAttention):
            absorbed.add(id(module.out_proj))
            projection = module.out_proj._parameters.items()
            owned += [(f"{prefix}out_proj.{n}", p) for n, p in projection if p is not None]
        if owned:
            units.append(_FoundUnit(name, module, list(_expanded(owned))))
        if _has_fast_path(module):
            inside = module.named_parameters(remove_duplicate=False)
            owned = list(_expanded((prefix + n, p) for n, p in inside))
            readers.append(_FoundUnit(name, module, owned, is_for_evaluation=True))
    return units + readers


def _has_fast_path(module: nn.Module) -> bool:
    """Whether torch may evaluate it by one operation on all weights inside: what it asks of the module.

    Where this says no and torch does, the operation is served as any other outside units; no bits depend on it.
    """
    if not isinstance(module, nn.TransformerEncoderLayer):
        return False
    attention = getattr(module, "self_attn", None)  # a subclass need not have what its base has
    is_usual = bool(getattr(module, "activation_relu_or_gelu", 0))
    if not is_usual or not isinstance(attention, nn.MultiheadAttention):
        return False
    # Other norms may stand in the places of torch's: it asks these for eps, too, but not before it evaluates.
    norms = [getattr(module, name, None) for name in ("norm1", "norm2")]
    is_alike = all(isinstance(norm, nn.LayerNorm) for norm in norms)
    is_alike = is_alike and norms[0].eps == norms[1].eps
    is_alike = is_alike and attention._qkv_same_embed_dim and attention.in_proj_bias is not None
    return is_alike and attention.batch_first and attention.num_heads % 2 == 0


def _expanded(owned: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """With the parts of quantized parameters in the place of those that are made of other tensors."""
    for name, parameter in owned:
        quantized.check(name, parameter)
        if quantized.is_wrapper(parameter):
            yield from ((f"{name}.{rest}", part) for rest, part in quantized.parts(parameter))
        else:
            yield name, parameter


def _check_parameter(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    if parameter.is_complex():
        raise GeminiError(
            f"{name} is {parameter.dtype}: complex parameters are not supported; keep such a module "
            "outside the managed model"
        )
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise GeminiError(f"{name} is not initialized yet: run one forward pass before manage()")
    if parameter.is_inference():
        raise GeminiError(
            f"{name} was made under torch.inference_mode(): such parameters cannot be trained; build or "
            "load the model outside it"
        )
    if parameter.layout is not torch.strided:
        raise GeminiError(
            f"{name} has layout {parameter.layout}: only dense parameters are supported"
        )
    if not order.is_dense(parameter):
        raise GeminiError(
            f"{name} has shape {tuple(parameter.shape)} and strides {parameter.stride()}: its elements do not fill "
            f"memory of their own, each once; make them with {name}.data = {name}.data.contiguous() before manage()"
        )
    if parameter.device.type not in ("cpu", "meta", device.type):
        raise GeminiError(
            f"{name} is on {parameter.device}, the engine on {device}: move the model to the CPU first, or "
            f'give device="{parameter.device.type}"'
        )
    if device.type == "cuda" and parameter.device.type == "cuda" and parameter.device != device:
        raise GeminiError(
            f"{name} is on {parameter.device}, the engine on {device}: use one device"
        )
    if getattr(parameter, "_gm_slot", None) is not None:
        raise GeminiError(
            f"{name} is managed already: call close() on its engine (gemini_strategy.engine_of(model)) "
            "before managing the model again"
        )
    is_plain = type(parameter).__torch_function__ is _torch.disabled_torch_function
    if not (is_plain or type(parameter) is torch.Tensor or quantized.is_bytes(parameter)):
        raise GeminiError(
            f"{name} is a {type(parameter).__name__} with a __torch_function__ of its own; only plain "
            "nn.Parameter and subclasses without one can be managed"
        )


def _is_raw(parameter: torch.Tensor) -> bool:
    """A part of a quantized parameter, or one that has its bytes itself."""
    return type(parameter) is torch.Tensor or quantized.is_bytes(parameter)


def _hook_gradient(parameter: nn.Parameter, take: Callable[[Any], object]) -> Any:
    """`take` gets it with its gradient, before the user's own hooks; torch wants it to be trained at that moment."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(take)
    parameter.requires_grad_(is_trained)
    hooks = parameter._post_accumulate_grad_hooks
    items = list(hooks.items())
    hooks.clear()
    hooks.update([items[-1], *items[:-1]])
    return handle


class Registration:
    """One model on its way into an engine. Nothing of the model changes before `attach`."""

    def __init__(
        self, engine: Runtime, groups: set[int], adapters: set[int], loading: Loading | None
    ) -> None:
        """groups, adapters: id() of the parameters that the optimizer has, and of those of adapters, which may be
        switched on and off while they are managed. loading: of values that files have."""
        self._engine = engine
        self._loading = loading
        self._units = _find_units(engine.model)
        self.slots: list[Slot] = []
        self._index: dict[int, int] = {}  # id(parameter) -> slot id
        dtypes = weight_dtypes(engine.model, engine.precision)
        for unit in self._units:
            for name, parameter in () if unit.is_for_evaluation else unit.owned:
                if id(parameter) in self._index:
                    self.slots[self._index[id(parameter)]].names.append(name)
                    continue
                _check_parameter(name, parameter, engine.device)
                self._index[id(parameter)] = len(self.slots)
                dtype = parameter.dtype if _is_raw(parameter) else dtypes[parameter]
                is_grouped = id(parameter) in groups
                is_adapter = id(parameter) in adapters and dtype in FORMATS
                slot = self._new_slot(name, parameter, dtype, is_grouped, is_adapter)
                if slot.is_raw:
                    slot.aliases = quantized.aliases(unit.module, parameter)
                self.slots.append(slot)

    def _new_slot(
        self,
        name: str,
        parameter: nn.Parameter,
        dtype: torch.dtype,
        is_grouped: bool,
        is_adapter: bool,
    ) -> Slot:
        slot = Slot(self._engine, len(self.slots), name, parameter)
        slot.dtype = dtype
        slot.is_raw = _is_raw(parameter)
        slot.format = FORMATS.get(dtype, 0) if slot.is_float else 0
        slot.device = self._engine.device
        is_trainable = parameter.requires_grad or is_adapter
        is_trained = is_trainable and self._engine.optimizer is not None
        if parameter.requires_grad and dtype not in FORMATS:
            raise GeminiError(
                f"{name} is {dtype} and trainable: fp32, bf16 and fp16 are supported; give a precision, "
                "or freeze it"
            )
        if dtype is torch.float16 and is_trained and parameter.grad is not None:
            raise GeminiError(
                f"{name} has a gradient already, without the loss scale of fp16: zero_grad() first"
            )
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise GeminiError(f"{name} has a sparse gradient already: zero_grad() first")
        # Of what is frozen, too: a model that came in fp32 leaves with its own values.
        is_rounded = slot.outer_dtype is not dtype and not self._is_exact(slot)
        slot.has_low = (is_trainable or is_rounded) and dtype is not torch.float32
        slot.has_moments = is_trained and (is_grouped or is_adapter)
        if self._engine.opaque is not None and slot.has_moments:
            # Its optimizer steps fp32 masters beside autocast, and else the weight itself.
            slot.has_low = slot.has_low and self._engine.precision_plan.is_mixed
        slot.has_grad_home = is_trained
        return slot

    def _is_exact(self, slot: Slot) -> bool:
        """Whether the compute dtype loses nothing of the values, as a file has them in that dtype."""
        return self._loading is not None and self._loading.dtype(slot.parameter) is slot.dtype

    def cuts(self) -> list[int]:
        """Of each parameter, the elements between the places where ranks' parts of it may begin; 1: anywhere."""
        opaque = self._engine.opaque
        return [opaque.cut(s) if opaque is not None and s.has_moments else 1 for s in self.slots]

    def state_bytes(
        self,
        params: list[tuple[int, int, int, bool, bool, bool, str, int]],
        chunk_bytes: int,
        n_shards: int,
    ) -> list[int] | None:
        """Of the states of each shard's part of each parameter, where the engine does not know what they are."""
        opaque = self._engine.opaque
        if opaque is None:
            return None
        parts = zip(self.slots, _C.parts(params, chunk_bytes, n_shards), strict=True)
        nothing = [0] * n_shards
        found = [opaque.divide(s, of_it) if s.has_moments else nothing for s, of_it in parts]
        return [n for of_shard in zip(*found, strict=True) for n in of_shard]

    def specs(self) -> list[tuple[int, int, int, bool, bool, bool]]:
        """What the core wants to know of each parameter (csrc/engine/engine.h, gm_engine_param) but name and cut."""
        found = []
        for slot in self.slots:
            places = slot.has_low, slot.has_moments, slot.has_grad_home
            found.append((math.prod(slot.shape), slot.dtype.itemsize, slot.format, *places))
        return found

    def modules(self) -> list[tuple[str, nn.Module]]:
        """Names and modules of the units that training enters, in the order of their numbers."""
        return [(unit.name, unit.module) for unit in self._units if not unit.is_for_evaluation]

    def unit_tables(self) -> tuple[list[int], list[int]]:
        """(parameter ids unit after unit, where each unit begins)."""
        params: list[int] = []
        begins = [0]
        for unit in self._units:
            params += [self._index[id(p)] for _, p in unit.owned]
            begins.append(len(params))
        return params, begins

    def unit_names(self) -> list[str]:
        return [unit.name or "the model" for unit in self._units]

    @functools.cached_property
    def _waiting(self) -> int:
        """Bytes of gradients that wait for their sum over ranks, in one chunk."""
        core = self._engine.core
        return max((core.chunk(slot.id)[3] for slot in self.slots), default=0)

    @property
    def _staying(self) -> int:
        """Bytes of chunks that stay on the device."""
        return int(self._engine.core.stats()["staying_bytes"])

    @functools.cached_property
    def _most_updating(self) -> tuple[int, str]:
        """Bytes of the largest chunk that an optimizer's own step() gets as a whole, and a parameter of it; 0: none."""
        core = self._engine.core
        return max(((core.chunk(s.id)[4], s.name) for s in self.slots), default=(0, ""))

    def floor_bytes(self) -> int:
        """The least that chunks need of the device."""
        most = max(self._most_at_once[0], self._most_updating[0])
        return self._staying + most + self._waiting

    def check_floor(self, budget: int, available: int) -> int:
        """Every module must fit together with the modules around it that own parameters, and with the gradients
        that wait for their sum over ranks.

        Returns:
            The bytes that the largest of them leaves of `available`.

        Raises:
            GeminiMemoryError: naming the module, its largest parameter and the budget that suffices.
        """
        wanted, unit = self._most_at_once
        waiting, staying, total = self._waiting, self._staying, self.floor_bytes()
        updating, name = self._most_updating
        if updating > wanted and total > available:
            enough = budget + total - available
            raise GeminiMemoryError(
                f"DEVICE: the step of {type(self._engine.optimizer).__name__} needs the chunk of {name} as a whole, "
                f"{size_text(updating, is_wanted=True)} of weights, states and gradient, and device_budget leaves "
                f"{size_text(max(available, 0))}: raise device_budget to at least {size_text(enough, is_wanted=True)} "
                f"({enough} bytes), or give a smaller chunk_size"
            )
        if unit is not None and total > available:
            largest, parameter = max(unit.owned, key=lambda item: item[1].numel())
            beside = f" and {size_text(waiting, is_wanted=True)} for gradients" if waiting else ""
            if staying:
                beside += (
                    f", beside {size_text(staying, is_wanted=True)} for which the host has no room"
                )
            left = f"leaves {size_text(available)}" if available > 0 else "leaves nothing"
            enough = budget + total - available
            raise GeminiMemoryError(
                f"DEVICE: module {unit.name or 'the model'!r} with the modules around it needs "
                f"{size_text(wanted, is_wanted=True)} of weights at once{beside}, device_budget {left} (largest "
                f"parameter: {largest}, {parameter.numel():,} elements): raise device_budget to at least "
                f"{size_text(enough, is_wanted=True)} ({enough} bytes), or give a smaller chunk_size"
            )
        if waiting:
            room = self._engine.ranks.gather("room for gradients", available - staying - wanted)
            self._engine.core.limit_unreduced(min(room))
        return available - total

    @functools.cached_property
    def _most_at_once(self) -> tuple[int, _FoundUnit | None]:
        """The most bytes that units entered inside one another hold, and the innermost of those units.

        A module that several modules have runs inside each of them, whatever its name says.
        """
        chunk = self._engine.core.chunk
        units = {id(unit.module): unit for unit in self._units}
        chunks = {
            key: frozenset(chunk(self._index[id(p)]) for _, p in unit.owned)
            for key, unit in units.items()
        }  # of a module that is two units: those for evaluation, which are more
        most: tuple[int, _FoundUnit | None] = (0, None)
        waiting: list[tuple[nn.Module, frozenset[tuple[int, int, int, int, int]]]] = [
            (self._engine.model, frozenset())
        ]
        seen = set()
        while waiting:
            module, around = waiting.pop()
            held = around | chunks.get(id(module), frozenset())
            if (id(module), held) in seen:
                continue
            seen.add((id(module), held))
            wanted = sum(shown for _, shown, *_ in held)
            wanted += max((gathering for _, _, gathering, *_ in held), default=0)
            if id(module) in units and wanted > most[0]:
                most = wanted, units[id(module)]
            waiting += [(m, held) for m in reversed(module._modules.values()) if m is not None]
        return most

    def attach(
        self, loading: Loading, original: Original, done: Callable[[int], object]
    ) -> tuple[list[Unit], list[Any]]:
        """Moves every parameter into its chunk, swaps classes, hooks units: (units, hook handles).

        `done` is told the bytes of each parameter whose values are its own.
        """
        handles = []
        averages = self._engine.optimizer is None and self._engine.ranks.size > 1
        for slot in self.slots:
            has_own = not loading.has(slot.parameter)
            self._attach_slot(slot, loading, original)
            if has_own:
                done(slot.part_bytes)
            if slot.has_grad_home:
                handles.append(_hook_gradient(slot.parameter, _C.take_grad))
            elif averages and slot.is_float and not slot.is_raw:
                handles.append(_hook_gradient(slot.parameter, average_grad))
        unit_class = MarkedUnit if wants_marks() else Unit
        units = []
        for index, found in enumerate(self._units):
            slots = list(dict.fromkeys(self.slots[self._index[id(p)]] for _, p in found.owned))
            unit = unit_class(self._engine, index, found.name, slots)
            unit.is_for_evaluation = found.is_for_evaluation
            is_renormed = isinstance(found.module, nn.Embedding | nn.EmbeddingBag)
            unit.watches_writes = is_renormed and found.module.max_norm is not None
            unit.install(found.module)
            units.append(unit)
            for slot in slots if not found.is_for_evaluation else ():
                slot.units.append(unit)
            if quantized.would_pack(found.module):
                handles.append(quantized.Unpacked(found.module))
                original.on_restore(handles[-1].remove)
        modules = [found.module for found in self._units]
        handles += borrowers(self._engine.model, list(zip(modules, units, strict=True)))
        loading.commit(original)
        device = self._engine.device
        self._share_buffers(original)
        self._move_kept(original)
        for module in self._engine.model.modules():
            for key, tensor in module._buffers.items():
                if tensor is not None and tensor.device != device:
                    module._buffers[key] = tensor.to(device)
        return units, handles

    def _move_kept(self, original: Original) -> None:
        """What quantized weights keep beside their bytes is where these are used."""
        device = self._engine.device
        for unit in self._units:
            for _, parameter in unit.owned:
                for tensor in quantized.companions(unit.module, parameter):
                    if tensor.device != device:
                        original.keep_alias(tensor)
                        tensor.data = tensor.data.to(device)
        for parameter in self._engine.model.parameters():
            if quantized.is_wrapper(parameter):
                quantized.follow(parameter)
                original.on_restore(functools.partial(quantized.follow, parameter))

    def _share_buffers(self, original: Original) -> None:
        """The ranks begin with rank 0's."""
        ranks = self._engine.ranks
        named = list(self._engine.model.named_buffers()) if ranks.size > 1 else []
        for unit in self._units if ranks.size > 1 else ():
            for name, parameter in unit.owned:
                kept = quantized.companions(unit.module, parameter)
                named += [(f"{name} ({number})", tensor) for number, tensor in enumerate(kept)]
        for name, tensor in named:
            values = tensor.detach().to("cpu", copy=True).contiguous()
            ranks.share(values, 0, values.numel(), f"first values of {name}")
            if ranks.rank:
                original.keep_values(tensor)
                with torch.no_grad():
                    tensor.copy_(values)

    def _attach_slot(self, slot: Slot, loading: Loading, original: Original) -> None:
        parameter = slot.parameter
        low = parameter.__dict__.pop("_gm_low", None)
        if low is not None:
            low = settled_low(parameter, low)  # weights may have been written since the cast
        was_seen = parameter.__dict__.pop("_gm_seen", None) is not None
        # What the optimizer has of weights that it has stepped is not the file's.
        slot.is_whole, slot.is_settled = was_seen and loading.has(parameter), was_seen
        if not loading.has(parameter):
            with _torch.DisableTorchFunctionSubclass():
                slot.fill(parameter.detach(), low)
        grad = parameter.grad
        parameter.grad = None
        if parameter.is_meta:
            loading.show(parameter, slot.hide(), original)
        else:
            original.keep_data(parameter)
            for alias in slot.aliases:
                original.keep_alias(alias)
            parameter.data = slot.hide()
            for alias in slot.aliases:
                alias.data = slot.absent
        slot.open_count = int(slot.is_raw)
        slot.managed_class = managed_class(slot.plain_class)
        parameter._gm_slot = slot
        parameter.__class__ = slot.managed_class
        if grad is not None:
            keep = slot.write_grad if slot.has_grad_home else slot.set_grad
            keep(grad.to(slot.device, slot.dtype))
