"""`manage()` and the engine that a person holds: chunks under a model, its gradients, its optimizer.

The core (csrc/engine.h) moves bytes; this file decides what each parameter is, fills the chunks, and
undoes it all in `close()`. Hooks are in hooks.py, the guard in guard.py, the optimizer's face in takeover.py.

Invariants
    1. `manage()` either succeeds or leaves model and optimizer as they were.
    2. Every managed parameter has one slot, however many names (tied weights) it has.
    3. The real `.grad` of a managed parameter is None except inside its accumulation hook.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gemini_strategy import _C, takeover
from gemini_strategy.errors import GeminiError, GeminiMemoryError, GuardError
from gemini_strategy.guard import (
    GuardedTensor,
    Slot,
    _Guarded,
    close_side_doors,
    guarded_class,
    open_class,
)
from gemini_strategy.hooks import RootForward, SavedTensorNet, Unit
from gemini_strategy.optim import clip_coefficient
from gemini_strategy.precision import LossScaler, Precision, weight_dtypes
from gemini_strategy.sizes import parse_bytes

__all__ = ["Engine", "engine_of", "manage"]

_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_POLICIES = {"auto": 0, "cpu": 1, "cuda": 2}
_WEIGHT, _MASTER, _M, _V, _GRAD = range(5)
_MIB = 1 << 20
_DRIVER_RESERVE = 128 * _MIB  # what the driver may still take: modules, library handles
_plain_torch = torch._C.DisableTorchFunctionSubclass

# root module -> engine, both weak: the model's hooks keep its engine alive
_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()

# CUDA device index -> its engine
_cuda_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()


def engine_of(model: nn.Module) -> Engine | None:
    """The open engine that manages `model` or any parameter of it, or None."""
    found = _engines.get(model)
    engine = found() if found is not None else None
    if engine is not None and not engine.closed:
        return engine
    for parameter in model.parameters():
        slot = getattr(parameter, "_gm_slot", None)
        if slot is not None and not slot.engine.closed:
            return slot.engine
    return None


# ---- what is managed ----


def _find_units(model: nn.Module) -> list[tuple[str, nn.Module, list[tuple[str, nn.Parameter]]]]:
    """The modules that directly own parameters, in registration order.

    nn.MultiheadAttention uses its out_proj's weight itself, so the two are one unit.
    """
    units = []
    absorbed: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in absorbed:
            continue
        prefix = f"{name}." if name else ""
        owned = [(prefix + n, p) for n, p in module._parameters.items() if p is not None]
        if isinstance(module, nn.MultiheadAttention):
            absorbed.add(id(module.out_proj))
            projection = module.out_proj._parameters.items()
            owned += [(f"{prefix}out_proj.{n}", p) for n, p in projection if p is not None]
        if owned:
            units.append((name, module, owned))
    return units


def _check_parameter(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    if parameter.is_complex():
        raise GeminiError(
            f"{name} is {parameter.dtype}: complex parameters are not supported; keep such a module "
            "outside the managed model"
        )
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise GeminiError(f"{name} is not initialized yet: run one forward pass before manage()")
    if parameter.is_meta:
        raise GeminiError(
            f"{name} is on the meta device: materialize the model (model.to_empty() and its weights) "
            "before manage()"
        )
    if parameter.layout is not torch.strided:
        raise GeminiError(f"{name} has layout {parameter.layout}: only dense parameters are supported")
    if parameter.device.type not in ("cpu", device.type):
        raise GeminiError(
            f"{name} is on {parameter.device}, the engine on {device}: move the model to the CPU first, or "
            f'give device="{parameter.device.type}"'
        )
    if device.type == "cuda" and parameter.device.type == "cuda" and parameter.device != device:
        raise GeminiError(f"{name} is on {parameter.device}, the engine on {device}: use one device")
    if getattr(parameter, "_gm_slot", None) is not None:
        raise GeminiError(
            f"{name} is managed already: call close() on its engine (gemini_strategy.engine_of(model)) "
            "before managing the model again"
        )
    if type(parameter).__torch_function__ is not torch._C._disabled_torch_function_impl:
        raise GeminiError(
            f"{name} is a {type(parameter).__name__} with a __torch_function__ of its own; only plain "
            "nn.Parameter and subclasses without one can be managed"
        )


class _TakeGrad:
    """The accumulation hook of one parameter: its gradient goes to the engine (invariant 3).

    The slot is held weakly: torch keeps the hook where Python's cycle collector does not look, and a
    strong reference would keep model and engine alive for ever. The engine holds the slot.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = weakref.ref(slot)

    def __call__(self, parameter: torch.Tensor) -> None:
        with _plain_torch():
            grad = torch.Tensor.grad.__get__(parameter)
            torch.Tensor.grad.__set__(parameter, None)
        slot = self._slot()
        if grad is not None and slot is not None:
            slot.engine.take_grad(slot, grad)


def manage(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device_budget: int | float | str | None = None,
    host_budget: int | float | str | None = None,
    placement_policy: str = "auto",
    precision: str | None = None,
    device: torch.device | str | None = None,
    chunk_size: int | str | None = None,
    block_size: int | str | None = None,
    chunk_search_range: int | str | None = None,
    chunk_search_n_grids: int | None = None,
    min_chunk_size: int | str | None = None,
    gpu_margin_mem_ratio: float | None = None,
    mapping: str = "aliased",
    gradient_dtype: torch.dtype | None = None,
    force_outputs_fp32: bool = False,
    convert_inputs: bool = True,
    initial_scale: float = 2.0**16,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    max_scale: float = 2.0**32,
    threads: int | None = None,
) -> Engine:
    """Puts a built model's parameters into chunks, in place, and takes its optimizer over.

    The model keeps its class, its modules and its Parameter objects; the optimizer object stays the
    one that LR schedulers know. Train as before: forward, `loss.backward()` (`engine.backward(loss)`
    with "16-mixed"), `optimizer.step()`, `optimizer.zero_grad()`; clip with `engine.clip_grad_norm_`.

    Args:
        model: a built model; its parameters may be on the CPU or on `device`.
        optimizer: torch.optim.AdamW, torch.optim.Adam, HybridAdam or CPUAdam over parameters of the
            model; None for inference (parameters then keep torch's own `.grad`).
        device_budget: device memory in bytes, "24GB", "24GiB" or a fraction of the device. On CUDA
            everything this process holds there counts, activations included; on the host device what
            the engine places there. None: what the device has.
        host_budget: bytes of host memory for weights, states and gradients. None: what the host has.
        placement_policy: "cuda": everything on the device; "cpu": evicted after every module, states
            on the host; "auto": as much as fits.
        precision: "32-true", "bf16-true", "bf16-mixed" or "16-mixed"; None keeps the parameters' dtypes.
        device: where to compute; None: CUDA if there is a device, else the CPU (the host device).
        chunk_size: bytes of weights in one chunk; None: chosen from the model and the budget.
        block_size: bytes of one block of device memory; rounded up to the device's granularity.
        chunk_search_range, chunk_search_n_grids, min_chunk_size: search the chunk size that leaves
            the least unused in [min_chunk_size, min_chunk_size + chunk_search_range], tried at
            n_grids + 1 even steps (bytes of weights). Giving any of them asks for the search;
            defaults then are 64 MiB, 4096 and 32 MiB. Not together with chunk_size.
        gpu_margin_mem_ratio: "auto" only: the share, in [0, 1], of the device memory left beside all
            weights that may hold optimizer states. None: all of it.
        mapping: "aliased", or "strict": an evicted parameter's address shows no data at all, at the
            price of waits; for finding accesses that escape the guard.
        gradient_dtype: None: gradients are kept and accumulated in the weight's dtype, as torch does;
            torch.float32: in fp32.
        force_outputs_fp32: cast half-precision tensors in the model's outputs to fp32.
        convert_inputs: let the model's forward cast floating-point inputs ("*-true") or run under
            autocast ("*-mixed"); False where the caller does that (Lightning).
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale:
            dynamic loss scaling of "16-mixed"; see LossScaler.
        threads: worker threads for host arithmetic; None: the cores this process may use.

    Returns:
        The engine.

    Raises:
        ValueError: an argument is out of its range.
        GeminiError: the model or optimizer cannot be managed; the text names the parameter.
        GeminiMemoryError: the budgets do not suffice; the text has the bytes wanted and available.
    """
    if placement_policy not in _POLICIES:
        raise ValueError(
            f'placement_policy={placement_policy!r} is not supported; choose "auto", "cpu" or "cuda"'
        )
    if mapping not in ("aliased", "strict"):
        raise ValueError(f'mapping={mapping!r} is not supported; choose "aliased" or "strict"')
    if gradient_dtype not in (None, torch.float32):
        raise ValueError(f"gradient_dtype={gradient_dtype!r}: choose None or torch.float32")
    if gpu_margin_mem_ratio is not None and not 0.0 <= gpu_margin_mem_ratio <= 1.0:
        raise ValueError(f"gpu_margin_mem_ratio={gpu_margin_mem_ratio!r} must be in [0, 1]")
    if gpu_margin_mem_ratio is not None and placement_policy != "auto":
        raise ValueError(
            f'gpu_margin_mem_ratio has a meaning with placement_policy="auto" only, not '
            f"{placement_policy!r}"
        )
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads!r} must be at least 1")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    plan = Precision(precision)
    target = _find_device(device)
    close_side_doors()
    if engine_of(model) is not None:
        raise GeminiError(
            "this model is managed already: call close() on its engine "
            "(gemini_strategy.engine_of(model)) before managing it again"
        )
    scaler_arguments = (
        initial_scale,
        min_scale,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
        max_scale,
    )
    sizes = _Sizes(chunk_size, block_size, chunk_search_range, chunk_search_n_grids, min_chunk_size)
    engine = Engine.__new__(Engine)
    engine._build(
        model,
        optimizer,
        target,
        plan,
        _POLICIES[placement_policy],
        device_budget,
        host_budget,
        sizes,
        mapping == "strict",
        gradient_dtype is torch.float32,
        gpu_margin_mem_ratio,
        LossScaler(*scaler_arguments),
        threads or 0,
    )
    engine._root = RootForward(engine, model, convert_inputs, force_outputs_fp32)
    return engine


def _find_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise GeminiError(f'device {device} is not supported; use "cuda" or "cpu"')
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise GeminiError(
                'device "cuda" was asked for, but torch sees no CUDA device; use device="cpu" (the host '
                "device), or a machine with a driver and a CUDA build of torch"
            )
        if not _C.BUILT_WITH_CUDA:
            raise GeminiError(
                "this build of gemini_strategy has no CUDA kernels: build it again with nvcc present"
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
    return device


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _Sizes:
    """Chunk and block sizes as the caller gave them, and what they become for a model."""

    def __init__(
        self,
        chunk_size: int | str | None,
        block_size: int | str | None,
        search_range: int | str | None,
        n_grids: int | None,
        min_chunk_size: int | str | None,
    ) -> None:
        self.searches = not (search_range is None and n_grids is None and min_chunk_size is None)
        if self.searches and chunk_size is not None:
            raise ValueError("give chunk_size, or the arguments of the search for one, not both")
        if n_grids is not None and n_grids < 1:
            raise ValueError(f"chunk_search_n_grids={n_grids!r} must be at least 1")
        self.chunk = None if chunk_size is None else parse_bytes(chunk_size, name="chunk_size")
        self.block = None if block_size is None else parse_bytes(block_size, name="block_size")
        self.n_grids = 4096 if n_grids is None else n_grids
        self.range = 64 * _MIB
        if search_range is not None:
            self.range = parse_bytes(search_range, name="chunk_search_range")
        self.minimum = 32 * _MIB
        if min_chunk_size is not None:
            self.minimum = parse_bytes(min_chunk_size, name="min_chunk_size")

    def choose(
        self, specs: list[tuple[int, int, int]], budget: int, is_cuda: bool
    ) -> tuple[int, int]:
        """(chunk bytes, block bytes) for parameters of (numel, weight bytes, kind)."""
        granule = 2 * _MIB if is_cuda else _C.HOST_GRANULARITY
        weights = sum(numel * width for numel, width, _ in specs)
        if self.searches:
            chunk = _C.chunk_search(specs, self.minimum, self.range, self.n_grids)
        elif self.chunk is not None:
            chunk = self.chunk
        else:  # many chunks, so that little is held beyond what a unit needs
            chunk = min(max(weights // 32, granule), 64 * _MIB)
            if budget > 0:
                chunk = max(min(chunk, budget // 32), granule)
        return chunk, self.block or granule


class Engine:
    """The engine of one managed model; made by `manage()`.

    Attributes:
        model: the model, in place.
        optimizer: the optimizer that was taken over, or None.
        device: where the model computes.
        precision: the precision's name, or None.
        scaler: the LossScaler of "16-mixed", or None.
        closed: True after close().
        core: the C engine (internal).
    """

    # ---- construction ----

    def _build(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        plan: Precision,
        policy: int,
        device_budget: int | float | str | None,
        host_budget: int | float | str | None,
        sizes: _Sizes,
        is_strict: bool,
        is_grad_f32: bool,
        margin: float | None,
        scaler: LossScaler,
        threads: int,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.precision = plan.name
        self.precision_plan = plan
        self.closed = False
        self.core: Any = None
        self._policy = policy
        self._is_grad_f32 = is_grad_f32
        self._margin = margin
        self._clip_factor = 1.0
        self._sumsq: tuple[float, int] | None = None
        self._in_backward = False
        self._held: dict[int, tuple[Slot, int, int]] = {}
        self._handles: list[Any] = []
        self._pool: Any = None
        self._steps = self._skipped = 0
        self._torch_peak = 0
        self._trimmed_bytes = 1 << 62
        self.net: Any = None
        self._root: Any = None

        groups = takeover.check(optimizer, model) if optimizer is not None else {}
        found = _find_units(model)
        self._make_slots(found, groups, plan)
        half = any(s.has_grad_home and s.dtype is torch.float16 for s in self._slots)
        self.scaler = scaler if half else None
        specs = [self._spec(s) for s in self._slots]
        budget = self._parse_device_budget(device_budget)
        kinds = list(dict.fromkeys(spec[1:] for spec in specs))
        shapes = [(spec[0], spec[1], kinds.index(spec[1:])) for spec in specs]
        chunk_bytes, block_bytes = sizes.choose(shapes, budget, device.type == "cuda")
        host = -1
        if host_budget is not None:
            host = parse_bytes(host_budget, _physical_memory(), "host_budget")
        unit_params: list[int] = []
        unit_begin = [0]
        for _, _, owned in found:
            unit_params += [self._index[id(p)] for _, p in owned]
            unit_begin.append(len(unit_params))
        self._start_pool()
        try:
            self.core = _C.Core(
                ordinal=-1 if device.type == "cpu" else device.index,
                params=specs,
                unit_params=unit_params,
                unit_begin=unit_begin,
                chunk_bytes=chunk_bytes,
                block_bytes=block_bytes,
                device_budget=budget,
                host_budget=host,
                policy=policy,
                is_strict=is_strict,
                is_grad_f32=is_grad_f32,
                threads=threads,
                external_bytes=self._external_bytes(0),
            )
            self._check_floor(found, budget)
        except BaseException:
            self._stop_pool()
            raise
        self._adopt(found)
        if optimizer is not None:
            takeover.install(self, optimizer)
        _engines[model] = weakref.ref(self)
        self._settle()

    def _make_slots(self, found: Any, groups: dict[int, dict[str, Any]], plan: Precision) -> None:
        self._slots: list[Slot] = []
        self._index: dict[int, int] = {}
        dtypes = weight_dtypes(self.model, plan.name)
        for _, _, owned in found:
            for name, parameter in owned:
                if id(parameter) in self._index:
                    self._slots[self._index[id(parameter)]].names.append(name)
                    continue
                _check_parameter(name, parameter, self.device)
                slot = Slot(self, len(self._slots), name, parameter)
                slot.dtype = dtypes[parameter]
                slot.device = self.device
                group = groups.get(id(parameter))
                is_trained = parameter.requires_grad and self.optimizer is not None
                if parameter.requires_grad and slot.dtype not in _FORMATS:
                    raise GeminiError(
                        f"{name} is {slot.dtype} and trainable: fp32, bf16 and fp16 are supported; give a "
                        "precision, or freeze it"
                    )
                slot.has_low = parameter.requires_grad and slot.dtype is not torch.float32
                slot.has_moments = is_trained and group is not None
                slot.has_grad_home = is_trained
                slot.group = group
                self._index[id(parameter)] = slot.id
                self._slots.append(slot)

    @staticmethod
    def _spec(slot: Slot) -> tuple[int, int, int, bool, bool, bool]:
        return (
            math.prod(slot.shape),
            slot.dtype.itemsize,
            _FORMATS.get(slot.dtype, 0),
            slot.has_low,
            slot.has_moments,
            slot.has_grad_home,
        )

    def _parse_device_budget(self, budget: int | float | str | None) -> int:
        """Bytes; -1 for no limit (host device only)."""
        if self.device.type == "cuda":
            total = torch.cuda.mem_get_info(self.device)[1]
            return parse_bytes(0.95 if budget is None else budget, total, "device_budget")
        if budget is None:
            return -1
        return parse_bytes(budget, _physical_memory(), "device_budget")

    def _check_floor(self, found: Any, budget: int) -> None:
        """Every module must fit together with the modules around it that own parameters."""
        if budget < 0 or self._policy == _POLICIES["cuda"]:
            return
        available = budget - (self._external_bytes(0) if self.device.type == "cuda" else 0)
        chunks_of: dict[str, set[tuple[int, int]]] = {}
        for name, _, owned in found:
            parents = [p for p in chunks_of if p == "" or name.startswith(p + ".")]
            chunks = {self.core.chunk(self._index[id(p)]) for _, p in owned}
            chunks_of[name] = chunks.union(*(chunks_of[p] for p in parents))
            wanted = sum(size for _, size in chunks_of[name])
            if wanted > available:
                largest, parameter = max(owned, key=lambda item: item[1].numel())
                raise GeminiMemoryError(
                    f"DEVICE: module {name!r} with the modules around it needs {wanted} bytes of weights at "
                    f"once, device_budget leaves {available} (largest parameter: {largest}, "
                    f"{parameter.numel()} elements): raise device_budget to at least "
                    f"{budget + wanted - available}, or give a smaller chunk_size"
                )

    def _adopt(self, found: Any) -> None:
        """Moves every parameter's bytes into its chunk and puts hooks and classes in place."""
        for slot in self._slots:
            parameter = slot.parameter
            values = parameter.detach()
            low = parameter.__dict__.pop("_gm_low", None)
            if slot.dtype in _FORMATS:
                master = self._master_of(values, low)
                self.core.write(slot.id, _MASTER, master.data_ptr())
            else:
                plain = values.to("cpu", slot.dtype).contiguous()
                self.core.write(slot.id, _WEIGHT, plain.data_ptr())
            plain_grad = parameter.grad
            parameter.grad = None
            lease = self.core.lease(slot.id, 0, 0, 0)
            parameter.data = slot.blob(lease)
            slot.storage = parameter.untyped_storage()._cdata
            slot.base_count = torch._C._storage_Use_Count(slot.storage)
            parameter._gm_slot = slot
            if slot.has_grad_home:
                self._handles.append(parameter.register_post_accumulate_grad_hook(_TakeGrad(slot)))
            parameter.__class__ = guarded_class(slot.plain_class)
            if plain_grad is not None:
                slot.set_grad(plain_grad.to(self.device, slot.dtype))
        self._units: list[Unit] = []
        for index, (name, module, owned) in enumerate(found):
            slots = list(dict.fromkeys(self._slots[self._index[id(p)]] for _, p in owned))
            unit = Unit(self, index, name, slots)
            is_renormed = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            unit.watches_writes = is_renormed and module.max_norm is not None
            unit.install(module)
            self._units.append(unit)
        self._handles += [
            handle
            for module in self.model.modules()
            if any(p is not None for p in module._parameters.values())
            for handle in (
                module._register_state_dict_hook(_SaveHook(self)),
                module._register_load_state_dict_pre_hook(_LoadHook(self), with_module=True),
            )
        ]
        self.net = SavedTensorNet(self, self._slots)
        for module in self.model.modules():
            for key, tensor in module._buffers.items():
                if tensor is not None and tensor.device != self.device:
                    module._buffers[key] = tensor.to(self.device)

    @staticmethod
    def _master_of(values: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
        """The fp32 master: the values, with the rest that cast_model_ has kept."""
        if low is None:
            return values.to("cpu", torch.float32).contiguous()
        if low.dtype is torch.float32:
            return low.to("cpu").contiguous()
        bits = values.to("cpu").view(torch.int16).to(torch.int32) << 16
        return (bits + low.to("cpu").to(torch.int32)).view(torch.float32).contiguous()

    # ---- CUDA memory around the chunks ----

    def _start_pool(self) -> None:
        if self.device.type == "cuda":
            other = _cuda_engines.get(self.device.index)
            if other is not None and not other.closed:
                raise GeminiError(
                    f"{self.device} has an open engine already, and torch's memory can answer to one "
                    "only: close() that engine first"
                )
            _cuda_engines[self.device.index] = self
            from gemini_strategy.cuda_pool import TorchPool

            torch.cuda.empty_cache()
            self._pool = TorchPool(self.device)
            self._pool.begin()
            weakref.finalize(self, self._pool.end)

    def _stop_pool(self) -> None:
        if self._pool is not None:
            self._pool.end()
            self._pool = None

    def _external_bytes(self, ours: int) -> int:
        """Device memory in use that is neither ours nor torch's pool: context, modules, older memory."""
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return max(total - free - ours - self._pool.bytes(), 0) + _DRIVER_RESERVE

    def _settle(self) -> None:
        """Uses what is left on the device for optimizer states ("auto")."""
        if self._policy != _POLICIES["auto"]:
            return
        stats = self.core.stats()
        budget = stats["device_budget_bytes"]
        reserve = 0
        if self.device.type == "cuda":
            if self._steps == 0:
                return  # the activations are not known yet
            self._torch_peak = max(self._torch_peak, self._pool.peak_bytes())
            reserve = max(self._torch_peak - self._pool.bytes(), 0) + _DRIVER_RESERVE
        if self._margin is not None and budget > 0:
            spare = budget - reserve - stats["weight_bytes"]
            reserve += int(max(spare, 0) * (1.0 - self._margin))
        elif self._margin == 0.0:
            return
        self.core.settle(reserve)

    # ---- what hooks call ----

    def stream(self) -> int:
        """The raw handle of torch's current stream; 0 on the host device."""
        if self.device.type == "cpu":
            return 0
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def begin_pass(self) -> None:
        """Called before each unit: lets go of what earlier work no longer needs."""
        self.net.settle()
        if self._held:
            self._poll_held()

    def _poll_held(self) -> None:
        for slot, lease, version in list(self._held.values()):
            if torch._C._storage_Use_Count(slot.storage) > slot.base_count + slot.view_tokens:
                continue
            del self._held[slot.id]
            with _plain_torch():
                now = slot.parameter._version
            if now != version:
                self.note_write(slot)
            self.core.lease_end(lease)

    def hold(self, slot: Slot) -> None:
        """Keeps a chunk resident while a view of `slot`'s parameter lives; see hooks.py."""
        if slot.id not in self._held:
            with _plain_torch():
                version = slot.parameter._version
            self._held[slot.id] = (slot, self.core.lease(slot.id, 1, 0, self.stream()), version)

    def note_write(self, slot: Slot) -> None:
        try:
            self.core.note_write(slot.id)
        except GeminiError as error:
            raise GuardError(
                f"{slot.name}: {error}; write it outside its module's forward, or inside "
                "engine.full_parameter(p)"
            ) from None

    def room_error(self, slot: Slot, what: str, error: BaseException) -> GeminiMemoryError:
        leases = self.core.stats()["leases"]
        held = f" ({leases} tensors outside their modules hold chunks)" if leases else ""
        return GeminiMemoryError(f"no room on the device for {slot.name}, for {what}{held}: {error}")

    def check_requires_grad(self, slot: Slot, value: bool) -> None:
        if value and self.optimizer is not None and not slot.has_grad_home:
            raise GeminiError(
                f"{slot.name} was frozen when the model was managed, so it has no place for a gradient; "
                "engine.close(), set requires_grad, and manage() again"
            )

    def take_grad(self, slot: Slot, grad: torch.Tensor) -> None:
        """Adds one gradient to what the engine holds for a parameter."""
        if self.scaler is not None and not self._in_backward:
            raise GeminiError(
                f"{slot.name}: a gradient arrived from loss.backward(), but with fp16 weights (\"16-mixed\") the loss "
                "must be scaled: call engine.backward(loss) instead (and no torch.amp.GradScaler)"
            )
        if grad.layout is not torch.strided:
            raise GeminiError(f"{slot.name}: its gradient is {grad.layout}: build it with sparse=False")
        grad = grad.detach()
        if grad.dtype not in _FORMATS:
            grad = grad.float()
        grad = grad.contiguous()
        self._sumsq = None
        self.core.grad_put(slot.id, grad.data_ptr(), _FORMATS[grad.dtype], self.stream())

    def read_weight(self, slot: Slot) -> torch.Tensor:
        """A CPU copy of the weight, in its dtype."""
        values = torch.empty(slot.shape, dtype=slot.dtype)
        self.core.read(slot.id, _WEIGHT, values.data_ptr())
        return values

    def read_master(self, slot: Slot) -> torch.Tensor:
        """A CPU copy: fp32 for what is trained, the weight itself for what is not."""
        if not (slot.has_low or slot.dtype is torch.float32):
            return self.read_weight(slot)
        values = torch.empty(slot.shape, dtype=torch.float32)
        self.core.read(slot.id, _MASTER, values.data_ptr())
        return values

    def write_master(self, slot: Slot, values: torch.Tensor) -> None:
        """Sets weight and master from values of any floating-point dtype (weight dtype if frozen)."""
        if tuple(values.shape) != slot.shape:
            raise ValueError(f"{slot.name} has shape {slot.shape}, got {tuple(values.shape)}")
        is_float = slot.has_low or slot.dtype is torch.float32
        plain = values.detach().to("cpu", torch.float32 if is_float else slot.dtype).contiguous()
        self.core.write(slot.id, _MASTER if is_float else _WEIGHT, plain.data_ptr())

    def read_grad(self, slot: Slot) -> torch.Tensor:
        """A copy on the engine's device, in the weight's dtype."""
        dtype = torch.float32 if self._is_grad_f32 else slot.dtype
        values = torch.empty(slot.shape, dtype=dtype)
        self.core.read(slot.id, _GRAD, values.data_ptr())
        return values.to(self.device, slot.dtype)

    def write_grad(self, slot: Slot, values: torch.Tensor) -> None:
        dtype = torch.float32 if self._is_grad_f32 else slot.dtype
        plain = values.detach().to("cpu", dtype).contiguous()
        self.core.write(slot.id, _GRAD, plain.data_ptr())
        self._sumsq = None

    def _check_open(self) -> None:
        if self.closed:
            raise GeminiError("this engine is closed: call gemini_strategy.manage() again")

    def slot_of(self, parameter: torch.Tensor) -> Slot:
        """The slot of one of this engine's parameters."""
        slot = getattr(parameter, "_gm_slot", None)
        if slot is None or slot.engine is not self:
            raise GeminiError(
                f"a parameter of shape {tuple(parameter.shape)} is not managed by this engine: parameters "
                "replaced or added after manage() are unknown to it"
            )
        return slot

    # ---- training ----

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """`loss.backward()`, with the loss multiplied by the loss scale in "16-mixed"."""
        with self.accept_scaled():
            self.scale(loss).backward(**kwargs)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale; itself without one. Backward belongs into `accept_scaled`."""
        return loss if self.scaler is None else loss * self.scaler.scale

    @contextlib.contextmanager
    def accept_scaled(self) -> Iterator[None]:
        """Inside, gradients are taken as scaled: for loops that call backward themselves."""
        self._check_open()
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def _measure_grads(self) -> tuple[float, int]:
        """(exact sum of squares of the gradients to be stepped, non-finite elements), cached."""
        self._check_open()
        if self._sumsq is None:
            ids = [s.id for s in self._slots if s.has_moments and self.core.has_grad(s.id)]
            self._sumsq = self.core.grad_sumsq(ids, self.stream())
        return self._sumsq

    def grad_norm(self) -> float:
        """The 2-norm of all gradients that the optimizer will use, unscaled, unclipped.

        The sum of squares is exact and rounded once, so the figure does not depend on chunks,
        placement or device. inf or nan with non-finite gradients.
        """
        squares, _ = self._measure_grads()
        return math.sqrt(squares) / (self.scaler.scale if self.scaler is not None else 1.0)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clips all gradients by their common 2-norm, in the next step.

        The factor min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ defines it, is
        fused into the next optimizer step; `p.grad` stays as it is.

        Args:
            max_norm: the largest norm allowed, not negative.
            norm_type: 2 only.
            error_if_nonfinite: raise on a non-finite norm (before anything is changed).

        Returns:
            The total norm before clipping, a 0-dim fp32 CPU tensor.

        Raises:
            ValueError: another norm_type, or a negative max_norm.
            RuntimeError: the norm is not finite and error_if_nonfinite is set.
        """
        if float(norm_type) != 2.0:
            raise ValueError(f"norm_type={norm_type!r}: clipping by the 2-norm is supported")
        if not max_norm >= 0:
            raise ValueError(f"max_norm={max_norm!r} must not be negative")
        norm = self.grad_norm()
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order 2.0 of the gradients is non-finite ({norm}), so it cannot be "
                "clipped; set error_if_nonfinite=False to go on"
            )
        if self.scaler is None or math.isfinite(norm):
            self._clip_factor = clip_coefficient(norm, float(max_norm))
        return torch.tensor(norm, dtype=torch.float32)

    def clip_grad_value_(self, value: float) -> None:
        """Clamps every gradient element (unscaled) to [-value, value], now."""
        if not value >= 0:
            raise ValueError(f"value={value!r} must not be negative")
        self._check_open()
        bound = float(value) * (self.scaler.scale if self.scaler is not None else 1.0)
        for slot in self._slots:
            if slot.has_grad_home and self.core.has_grad(slot.id):
                self.write_grad(slot, self.read_grad(slot).clamp_(-bound, bound))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step; also reached as `optimizer.step()`.

        With a loss scaler a step with non-finite gradients changes no bit of the model and its
        states; the scale is updated either way.
        """
        self._check_open()
        if self.optimizer is None:
            raise GeminiError("there is no optimizer: manage(model, optimizer) with one to train")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.recover()
        slots = [
            p._gm_slot
            for group in self.optimizer.param_groups
            for p in group["params"]
            if self.core.has_grad(p._gm_slot.id)
        ]
        if not slots:
            return loss
        divisor = 1.0
        if self.scaler is not None:
            divisor = self.scaler.scale
            _, nonfinite = self._measure_grads()
            if nonfinite:
                self.scaler.update(True)
                self._skipped += 1
                self._clip_factor = 1.0
                return loss
        updates = [
            (s.id, *takeover.hyperparameters(s.group), s.adam_step + 1, *takeover.mode(s.group))
            + (divisor, self._clip_factor)
            for s in slots
        ]
        order = [(u[0], *u[1:6], *u[6:]) for u in updates]
        self.core.step(order, self.stream())
        for slot in slots:
            slot.adam_step += 1
        if self.scaler is not None:
            self.scaler.update(False)
        self._clip_factor = 1.0
        self._steps += 1
        self._refresh_memory()
        return loss

    def _refresh_memory(self) -> None:
        if self.device.type == "cuda":
            held = self._pool.bytes()
            if self._steps > 2 and held > 1.1 * self._trimmed_bytes:
                # Segments that torch merely caches count too; a pool in use does not give them back.
                self._pool.trim()
                self._trimmed_bytes = max(self._pool.bytes(), held // 2)
            self.core.set_external_bytes(self._external_bytes(self.core.stats()["device_bytes"]))
            if self._steps <= 2:
                self._settle()
                self._trimmed_bytes = self._pool.bytes()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops every gradient (or zeroes it, with set_to_none=False), as torch's zero_grad does.

        A clip factor that no step has used is dropped too.
        """
        self.clear_grads(self._slots, set_to_none)

    def clear_grads(self, slots: list[Slot], set_to_none: bool) -> None:
        self._check_open()
        self.recover()
        self._clip_factor = 1.0
        self._sumsq = None
        for slot in slots:
            if not slot.has_grad_home or not self.core.has_grad(slot.id):
                continue
            if set_to_none:
                self.core.grad_drop(slot.id)
            else:
                self.write_grad(slot, torch.zeros(slot.shape))

    def recover(self) -> None:
        """Leaves units that an interrupt (KeyboardInterrupt in forward) has left entered."""
        self.begin_pass()
        for unit in self._units:
            while unit.is_entered:
                unit.leave()

    # ---- reading and writing parameters ----

    def __copy__(self) -> Any:
        raise GeminiError("an engine cannot be copied: copy.deepcopy(engine.model) gives a plain model")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise GeminiError("an engine cannot be pickled: save engine.state_dict()")

    @contextlib.contextmanager
    def full_parameter(self, parameter: nn.Parameter) -> Iterator[torch.Tensor]:
        """The parameter as a CPU tensor: the fp32 master if it is trained, else the weight.

        Changes made to the tensor are written back at the end of the context.
        """
        self._check_open()
        slot = self.slot_of(parameter)
        values = self.read_master(slot)
        before = values.clone()
        yield values
        if not torch.equal(values.view(torch.uint8), before.view(torch.uint8)):
            self.write_master(slot, values)

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
        self._check_open()
        module = self.model if module is None else module
        slots = list(dict.fromkeys(self.slot_of(p) for p in module.parameters()))
        shown = []
        try:
            for slot in slots:
                shown.append(slot.lease(is_watched=writable)[0])
        except BaseException:
            shown.clear()
            raise
        for slot in slots:
            slot.open_count += 1
            slot.parameter.__class__ = open_class(slot.plain_class)
            slot.version = slot.parameter._version
        try:
            yield
        finally:
            written = []
            for slot in slots:
                if slot.parameter._version != slot.version and not writable:
                    written.append(slot)
                slot.version = slot.parameter._version  # the leases find the writes
                slot.open_count -= 1
                if slot.open_count == 0 and not self.closed:
                    slot.parameter.__class__ = guarded_class(slot.plain_class)
            shown.clear()
            if not self.closed:
                for slot in written:  # what was written is kept, and said
                    self.note_write(slot)
                self.core.drain(self.stream())
        if written:
            raise GuardError(
                f"{written[0].name} was written inside full_parameters(writable=False); use writable=True"
            )

    def _named_slots(self, parameter: Any) -> Slot | None:
        slot = getattr(parameter, "_gm_slot", None)
        return slot if slot is not None and slot.engine is self else None

    def model_state_dict(self, masters: bool = True) -> dict[str, Any]:
        """The model's state on the CPU; keys and order as `model.state_dict()`.

        Args:
            masters: give trained parameters as fp32 masters; False: in compute dtype. Tied parameters share one tensor.
        """
        self._check_open()
        copies: dict[int, torch.Tensor] = {}
        result = self.model.state_dict(keep_vars=True)
        for key, value in result.items():
            slot = self._named_slots(value)
            if slot is not None:
                if slot.id not in copies:
                    copies[slot.id] = self.read_master(slot) if masters else self.read_weight(slot)
                result[key] = copies[slot.id]
            elif isinstance(value, torch.Tensor):
                result[key] = value.detach().to("cpu", copy=True)
        return result

    def load_model_state_dict(self, state: dict[str, Any], strict: bool = True) -> Any:
        """`model.load_state_dict`; fp32 values become masters exactly."""
        self._check_open()
        return self.model.load_state_dict(state, strict=strict)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's state in torch.optim.AdamW's form; tensors on the CPU."""
        self._check_open()
        if self.optimizer is None:
            raise GeminiError("there is no optimizer")
        return takeover.state_dict(self, self.optimizer)

    def read_moments(self, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        """CPU copies of (exp_avg, exp_avg_sq), fp32, in the parameter's shape."""
        m, v = (torch.empty(slot.shape, dtype=torch.float32) for _ in range(2))
        self.core.read(slot.id, _M, m.data_ptr())
        self.core.read(slot.id, _V, v.data_ptr())
        return m, v

    def write_moments(self, slot: Slot, m: torch.Tensor, v: torch.Tensor, step: int) -> None:
        for field, values in ((_M, m), (_V, v)):
            if tuple(values.shape) != slot.shape:
                raise ValueError(
                    f"{slot.name}: a moment has shape {tuple(values.shape)}, expected {slot.shape}"
                )
            plain = values.detach().to("cpu", torch.float32).contiguous()
            self.core.write(slot.id, field, plain.data_ptr())
        slot.adam_step = step

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state_dict of torch.optim.AdamW, Adam, HybridAdam or a managed one.

        An empty "state" resets moments and steps.
        """
        self._check_open()
        if self.optimizer is None:
            raise GeminiError("there is no optimizer")
        takeover.load_state_dict(self, self.optimizer, state)

    def state_dict(self) -> dict[str, Any]:
        """Everything for an exact resume: masters, buffers, moments, steps, loss scaler."""
        state: dict[str, Any] = {"model": self.model_state_dict()}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer_state_dict()
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict()."""
        self._check_open()
        self.load_model_state_dict(state["model"])
        if "optimizer" in state:
            self.load_optimizer_state_dict(state["optimizer"])
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])

    # ---- the rest ----

    def stats(self) -> dict[str, int | float]:
        """Plain numbers about the run so far. Bytes are bytes; counts are since manage().

        Keys: steps, skipped_steps, loss_scale, parameters, chunks, settled_chunks, blocks, fetches, evictions,
        fetched_bytes, evicted_bytes (written back), device_bytes and device_peak_bytes (of blocks),
        device_budget_bytes (-1: none), host_bytes, state_bytes (the training state: weights, optimizer
        states and gradients, padding included), weight_bytes, leases, layout_hash.
        """
        self._check_open()
        return {
            "steps": self._steps,
            "skipped_steps": self._skipped,
            "loss_scale": self.scaler.scale if self.scaler is not None else 1.0,
            "parameters": sum(math.prod(s.shape) for s in self._slots),
            **self.core.stats(),
        }

    def close(self, dtype: torch.dtype | None = None) -> None:
        """Makes model and optimizer ordinary again, with the trained weights. Idempotent.

        Args:
            dtype: None: parameters in compute dtype; torch.float32: trained parameters as their
                fp32 masters. Parameters return to the device they came from.
        """
        if self.closed:
            return
        if dtype not in (None, torch.float32):
            raise ValueError(f"dtype={dtype!r}: choose None (compute dtype) or torch.float32")
        self.recover()
        for unit in self._units:
            unit.remove()
        self._root.remove()
        for handle in self._handles:
            handle.remove()
        restored = []
        for slot in self._slots:
            values = self.read_master(slot) if dtype is torch.float32 else self.read_weight(slot)
            has_grad = slot.has_grad_home and self.core.has_grad(slot.id)
            grad = self.read_grad(slot) if has_grad else None
            restored.append((slot, values, grad))
        if self.optimizer is not None:
            takeover.release(self, self.optimizer, dtype is torch.float32)
        for slot, values, grad in restored:
            parameter = slot.parameter
            parameter.__class__ = slot.plain_class
            parameter.data = values.to(slot.original_device)
            if slot.has_grad_home:
                parameter.grad = None if grad is None else grad.to(values.dtype).to(parameter.device)
            del parameter._gm_slot
        for _, lease, _ in self._held.values():
            self.core.lease_end(lease)
        self._held.clear()
        self.closed = True
        _engines.pop(self.model, None)
        self.core.close()
        self._stop_pool()


class _StateHook:
    """A state-dict hook that copies as nothing: a deep copy of a managed model is unmanaged."""

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> _StateHook:
        return type(self)(None)

    def __reduce__(self) -> Any:
        return type(self), (None,)


class _SaveHook(_StateHook):
    """Replaces the guarded entries of one module's state by CPU copies; tied ones share a copy."""

    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        for name in module._parameters:
            value = state.get(prefix + name)
            if type(value) is not GuardedTensor:
                continue
            slot = value._gm_slot
            twins = (state.get(n) for n in slot.names)
            plain = [t for t in twins if type(t) is torch.Tensor and tuple(t.shape) == slot.shape]
            state[prefix + name] = plain[0] if plain else slot.engine.read_weight(slot)


class _LoadHook(_StateHook):
    """Loads fp32 values into masters exactly, before torch copies the rounded weights."""

    def __call__(
        self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        if self.engine is None:
            return
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            if not isinstance(parameter, _Guarded) or not isinstance(value, torch.Tensor):
                continue
            slot = parameter._gm_slot
            if metadata.get("assign_to_params_buffers", False):
                raise GuardError(
                    f"{slot.name}: load_state_dict(assign=True) would replace a managed parameter; use "
                    "assign=False, or load before manage()"
                )
            if slot.has_low and value.is_floating_point() and tuple(value.shape) == slot.shape:
                self.engine.write_master(slot, value)
                state[prefix + name] = self.engine.read_weight(slot)
