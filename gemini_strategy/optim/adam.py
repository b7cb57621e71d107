"""Adam as the core computes it, standing alone on plain tensors, and the exact gradient norm.

`HybridAdam` and `CPUAdam` are ordinary `torch.optim.Optimizer`s: the same arithmetic, bit for bit,
as under a managed model (csrc/arith/arith.h has its definition), on CPU and on CUDA tensors. Together
with `grad_norm` and `cast_model_` they are the unmanaged reference that a managed run must equal.

Invariants
 1. A step checks every gradient before it changes any parameter: a refused step changes nothing.
 2. State tensors lie in memory in the order of their parameter: one pass over addresses fits all.
 3. The fp32 rest of a half-precision parameter exists once: in `optimizer.state` after the first
    step, in the attribute `_gm_low` of the parameter before it. It is the weight's, not the entry's: of an entry that
    was taken out of `optimizer.state` the optimizer still has it (`_gm_lows`), and the next update takes it up.
 4. A half-precision weight that is not the one that the last step (or the cast) left was written, and
    is its own master: `low.settled_low`. An fp16 master shows it. Of a bf16 parameter the attribute
    `_gm_seen` has what was left; without it, as where a remainder was loaded or written, that is the weight's.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gemini_strategy import _C
from gemini_strategy.errors import GeminiError
from gemini_strategy.parameters import absent, quantized
from gemini_strategy.parameters.low import note_seen, settled_low
from gemini_strategy.parameters.order import is_dense, is_same
from gemini_strategy.precision import FORMATS, weight_dtypes

# key in optimizer.state, and dtype, of what a weight lacks to be an fp32 master
_LOW = {torch.bfloat16: ("remainder", torch.int16), torch.float16: ("master", torch.float32)}


def hyperparameters(group: Mapping[str, Any]) -> tuple[float, ...]:
    """(lr, beta1, beta2, eps, weight_decay) of a param group as they stand now."""
    return tuple(map(float, (group["lr"], *group["betas"], group["eps"], group["weight_decay"])))


def mode(group: Mapping[str, Any]) -> tuple[bool, bool]:
    """(decoupled weight decay, bias correction)."""
    decoupled = group.get("adamw_mode", group.get("decoupled_weight_decay", False))
    return bool(decoupled), bool(group.get("bias_correction", True))


def _ordered_like(tensor: Tensor, model: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`tensor` in the memory order and on the device of `model`; itself if it is so already."""
    dtype = dtype or tensor.dtype
    if tensor.dtype == dtype and tensor.device == model.device:
        if not is_dense(model):
            is_ordered = tensor.is_contiguous()
        else:
            is_ordered = is_dense(tensor) and is_same(tensor.shape, tensor.stride(), model.stride())
        if is_ordered:
            return tensor
    return torch.empty_like(model, dtype=dtype, requires_grad=False).copy_(tensor)


def _readable(tensor: Tensor) -> Tensor:
    """Itself, or a copy of what an engine has: it has no address (parameters/absent.py)."""
    return tensor.clone() if absent.is_absent(tensor) else tensor


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _add_squares(
    tensor: Tensor, total: bytes | None, on_device: dict[torch.device, Tensor]
) -> bytes | None:
    """Adds the squares of one tensor to `total` (host) or to its device's sum."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.dtype not in FORMATS:
        raise TypeError(
            f"grad_norm takes dense fp32, bf16 and fp16 tensors, not {tensor.layout} "
            f"{tensor.dtype} of shape {tuple(tensor.shape)}; convert it first (to_dense(), float())"
        )
    if tensor.numel() == 0:
        return total
    tensor = _readable(tensor if is_dense(tensor) else tensor.contiguous())
    dtype, device = FORMATS[tensor.dtype], tensor.device
    if device.type == "cpu":
        return _C.sumsq_host(tensor.data_ptr(), dtype, tensor.numel(), total)
    if device.type != "cuda":
        raise TypeError(f"grad_norm takes CPU and CUDA tensors, not one on {device}; move it first")
    if device not in on_device:
        size = len(_C.sumsq_merge(None, None))
        on_device[device] = torch.zeros(size, dtype=torch.uint8, device=device)
    address = on_device[device].data_ptr()
    _C.sumsq_cuda(device.index, _stream(device), tensor.data_ptr(), dtype, tensor.numel(), address)
    return total


def grad_norm(tensors: Tensor | Iterable[Tensor | None]) -> float:
    """The 2-norm of all elements together, independent of order, grouping and device.

    Args:
        tensors: one or several, of any shapes; fp32, bf16 or fp16; CPU or CUDA; None is skipped.

    Returns:
        The square root of the exact sum of squares, the sum rounded once to double (nearest even).
        inf with an infinite element, nan with a NaN.

    Raises:
        TypeError: a tensor is sparse, of another dtype, or on another kind of device.
    """
    total: bytes | None = None
    on_device: dict[torch.device, Tensor] = {}
    for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
        if tensor is not None:
            total = _add_squares(tensor, total, on_device)
    for part in on_device.values():
        read = part.cpu()
        total = _C.sumsq_merge(total, _C.sumsq_read(read.data_ptr()))
    return math.sqrt(_C.sumsq_value(total)) if total is not None else 0.0


def _largest(tensors: Iterable[Tensor]) -> float:
    """The infinity norm; nan with a NaN."""
    largest = [t.detach().abs().max().float().item() for t in tensors if t.numel()]
    return math.nan if any(map(math.isnan, largest)) else max(largest, default=0.0)


def clip_coefficient(total_norm: float, max_norm: float) -> float:
    """The factor that clips gradients of this norm: min(1, max_norm / (total_norm + 1e-6)).

    The formula of torch.nn.utils.clip_grad_norm_, in double: nan for a NaN norm, 0 for an infinite
    one.
    """
    coefficient = max_norm / (total_norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient


class _Held:
    """Carries a tensor through torch's load_state_dict, which would cast it to p's dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _hold(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    held = {
        index: {k: _Held(v) if isinstance(v, Tensor) else v for k, v in entry.items()}
        for index, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": held}


class _Clip:
    """What the next step clips by, and the versions of the gradients that this is for."""

    def __init__(self) -> None:
        self.set(1.0, ())

    def set(self, factor: float, grads: Iterable[Tensor]) -> None:
        self.factor = factor
        self.seen: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        for grad in grads if factor != 1.0 else ():
            self.seen[grad] = grad._version


class HybridAdam(torch.optim.Optimizer):
    """Adam and AdamW on fp32 masters, for fp32, bf16 and fp16 parameters on CPU and CUDA.

    The update is the sequence of operations in csrc/arith/arith.h, the same bits on every processor and
    on the GPU. `state[p]` holds `step` (0-dim fp32, CPU), `exp_avg`, `exp_avg_sq` (fp32, p's shape)
    and, for bf16 parameters, `remainder` (int16: master bits = (bf16 bits << 16) + remainder), for
    fp16 parameters, `master` (fp32). Where a weight is another one at a step than the last step left, the script
    wrote it, and it is its own master; where it was written and is the same again, its master stays. Beside a bf16
    parameter a copy of it is kept to see that. `state.clear()` resets moments and steps: masters stay.
    A `remainder` that is loaded, or written, belongs to the weights of the next step, in whichever order weights and
    states are restored: what else is written to them before it keeps it.

    Args:
        params: parameters, named parameters or groups, as for every torch optimizer.
        lr: float or 0-dim tensor; per group, as all that follow.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment, after bias correction.
        weight_decay: decoupled (AdamW) or added to the gradient (L2), as `adamw_mode` says.
        adamw_mode: True: AdamW (Loshchilov and Hutter, 2019); False: Adam with L2 decay.
        bias_correction: divide the moments by 1 - beta^step (Kingma and Ba, 2015).

    Raises:
        ValueError: a hyperparameter is out of its range.
        TypeError: a parameter's dtype is not fp32, bf16 or fp16 (complex ones, for example).
    """

    _device_types: tuple[str, ...] = ("cpu", "cuda")
    # changed in place: Lightning's wrappers run the methods of this class on themselves
    _gm_clip: _Clip
    # by parameter, the rest in `state` and its version: another one was put there since
    _gm_lows: MutableMapping[Tensor, tuple[Tensor, int]]

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        bias_correction: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adamw_mode": adamw_mode,
            "bias_correction": bias_correction,
        }
        self._gm_lows, self._gm_clip = WeakTensorKeyDictionary(), _Clip()
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: rests are of the weights of now, those of dropped entries too."""
        state = super().__getstate__()
        if not self._gm_lows:  # an engine has them, or nothing was stepped
            return state
        entries = {p: dict(entry) for p, entry in self.state.items()}
        kept = {}
        for p, (low, _) in self._gm_lows.items():
            key = _LOW.get(p.dtype, ("", None))[0]
            if entries.get(p, {}).get(key) is low:
                self._look(p, low)
                entries[p][key] = settled_low(p, low)
            elif self._lacks(p, low):
                kept[p] = settled_low(p, low)
        return {**state, "state": defaultdict(dict, entries), "_gm_kept": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        kept = state.pop("_gm_kept", None)
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch puts it there; it is no option of ours
        if "_gm_lows" not in self.__dict__:  # a copy, or unpickled
            self._gm_lows, self._gm_clip = WeakTensorKeyDictionary(), _Clip()
            self._note_lows()
            for p, low in (kept or {}).items():
                p._gm_low = low
            for p in (*self._gm_lows, *(kept or ())):
                note_seen(p)
        for group in self.param_groups:
            self._complete_group(group)

    def _complete_group(self, group: dict[str, Any]) -> None:
        """Gives a group that another Adam saved what it lacks; refuses what we do not do."""
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise ValueError(
                    f"{type(self).__name__} has no {option}=True, which this param group asks for; "
                    "train with it set to False"
                )
        if "adamw_mode" not in group and "decoupled_weight_decay" in group:
            group["adamw_mode"] = bool(group["decoupled_weight_decay"])
        for option, value in self.defaults.items():
            group.setdefault(option, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, and checks hyperparameters and dtypes.

        Raises:
            ValueError: a hyperparameter is out of its range.
            TypeError: a parameter's dtype is not fp32, bf16 or fp16.
        """
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            group = self.param_groups[before]
            self._complete_group(group)
            self._scalars(group, 1, 1.0, 1.0)
            for i, p in enumerate(group["params"]):
                if p.dtype not in FORMATS:
                    raise TypeError(
                        f"{self._name(before, i)} is {p.dtype}; {type(self).__name__} trains fp32, "
                        "bf16 and fp16 parameters: convert it, or leave it to another optimizer"
                    )
        except (TypeError, ValueError):
            del self.param_groups[before:]
            raise

    def _name(self, group_index: int, index: int) -> str:
        group = self.param_groups[group_index]
        shape = tuple(group["params"][index].shape)
        if "param_names" in group:
            return f'parameter "{group["param_names"][index]}" {shape}'
        return f"parameter {index} of param group {group_index} {shape}"

    @staticmethod
    def _scalars(
        group: Mapping[str, Any], step: int, grad_divisor: float, clip_factor: float
    ) -> bytes:
        divisors = float(grad_divisor), float(clip_factor)
        return _C.adam_scalars(*hyperparameters(group), step, *mode(group), *divisors)

    def _with_grads(self) -> Iterator[tuple[int, int, dict[str, Any], Tensor]]:
        for group_index, group in enumerate(self.param_groups):
            for index, p in enumerate(group["params"]):
                if p.grad is not None:
                    yield group_index, index, group, p

    def _check(self, name: str, p: Tensor) -> None:
        slot = getattr(p, "_gm_slot", None)
        if slot is not None and slot.has_low:
            raise GeminiError(
                f"{slot.name} is managed, and its engine has what its {p.dtype} values lack to be their master: step "
                f"the optimizer that was given to manage(), and not this {type(self).__name__}"
            )
        grad = p.grad
        if grad.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {name} is {grad.layout}; {type(self).__name__} takes dense "
                "gradients only: build the embedding with sparse=False"
            )
        if grad.dtype not in FORMATS or p.dtype not in FORMATS:
            raise TypeError(
                f"{name} is {p.dtype} with a gradient of {grad.dtype}; {type(self).__name__} takes "
                "fp32, bf16 and fp16: convert it"
            )
        if p.device.type not in self._device_types or grad.device != p.device:
            raise TypeError(
                f"{name} is on {p.device}, its gradient on {grad.device}; {type(self).__name__} "
                f"works on {' and '.join(self._device_types)}: move the model"
            )
        for tensor, what in ((p.data, name), (grad, f"the gradient of {name}")):
            if type(tensor) not in (Tensor, nn.Parameter):
                raise TypeError(
                    f"{what} is a {type(tensor).__name__}; {type(self).__name__} works on the "
                    "memory of plain tensors: unwrap it, or use another optimizer"
                )
        state = self.state.get(p, {})
        held = {f"an {key}": state[key] for key in ("exp_avg", "exp_avg_sq") if key in state}
        for key, value in ({"a gradient": grad} | held).items():
            if value.shape != p.shape:
                raise ValueError(
                    f"{name} has {key} of shape {tuple(value.shape)}: one of them was resized: build a new optimizer"
                )
        if any(size > 1 and stride == 0 for size, stride in zip(p.shape, p.stride(), strict=True)):
            raise TypeError(
                f"{name} is an expanded view (strides {p.stride()}): elements share memory; "
                "make it contiguous"
            )

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        """The state of p, made at its first step, in p's memory order."""
        state = self.state[p]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
        if p.dtype in _LOW and _LOW[p.dtype][0] not in state:
            key, dtype = _LOW[p.dtype]
            low, _ = self._gm_lows.get(p, (None, 0))
            low = getattr(p, "_gm_low", None if low is None else low.clone())  # it may be popped
            if low is None or low.dtype != dtype or low.shape != p.shape:
                # the master is the weight itself: a remainder of 0, or an fp32 copy
                low = torch.zeros_like(p) if dtype is torch.int16 else p
            state[key] = _ordered_like(low.detach(), p.detach(), dtype)
        elif p.dtype in _LOW:
            self._look(p, state[_LOW[p.dtype][0]])
        if hasattr(p, "_gm_low"):
            del p._gm_low
        for key, value in state.items():
            if key != "step":
                state[key] = _ordered_like(value, p.detach())
        return state

    def _lacks(self, p: Tensor, low: Tensor) -> bool:
        """Whether `low`, which the optimizer has kept, is what p's entry has no more."""
        key, dtype = _LOW.get(p.dtype, (None, None))
        is_missing = key not in self.state.get(p, {}) and not hasattr(p, "_gm_low")
        return key is not None and is_missing and low.dtype is dtype and low.shape == p.shape

    def _look(self, p: Tensor, low: Tensor) -> None:
        """What the script has put into `state` is of the weight of now."""
        known, version = self._gm_lows.get(p, (None, 0))
        if known is not low or low._version != version:
            p.__dict__.pop("_gm_seen", None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_divisor: float = 1.0) -> Any:
        """One update of every parameter that has a gradient.

        Args:
            closure: evaluated first, with gradients enabled; its result is returned.
            grad_divisor: what gradients are divided by (a loss scale, say), fused into the update
                together with the factor of the latest clip_grad_norm_, which then is 1 again:
                `p.grad` is clipped from then on.

        Raises:
            TypeError: a gradient is sparse, complex, on another device or of another dtype. No
                parameter has been changed then.
            ValueError: a hyperparameter is out of its range, or a parameter was resized. No parameter has been changed
                then.
            GeminiError: a gradient has come or was changed after clip_grad_norm_(). No parameter has
                been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        clip_factor = self._gm_clip.factor
        self._check_clipped()
        work = []
        scalars: dict[tuple[int, int], bytes] = {}
        for group_index, index, group, p in self._with_grads():
            self._check(self._name(group_index, index), p)
            done = self.state[p].get("step", 0) if p in self.state else 0
            step = int(done) + 1
            if (group_index, step) not in scalars:
                scalars[group_index, step] = self._scalars(group, step, grad_divisor, clip_factor)
            work.append((p, scalars[group_index, step]))
        for p, packed in work:
            self._update(p, packed)
            if clip_factor != 1.0:
                p.grad.mul_(clip_factor)
        self._gm_clip.set(1.0, ())
        return loss

    def _check_clipped(self) -> None:
        """The factor of a clip is for the gradients that it has seen, as they were then."""
        if self._gm_clip.factor == 1.0:
            return
        for group_index, index, _, p in self._with_grads():
            if self._gm_clip.seen.get(p.grad) != p.grad._version:
                raise GeminiError(
                    f"the gradient of {self._name(group_index, index)} has come or was changed after "
                    f"clip_grad_norm_(), whose factor {self._gm_clip.factor:.6g} this step would apply "
                    "to it: clip once in a step, after its last backward and after all other changes "
                    "of gradients. The optimizer's zero_grad() drops gradients and factor"
                )

    def _update(self, p: Tensor, scalars: bytes) -> None:
        state = self._state_of(p)
        plain = p.detach()
        weight = _readable(plain if is_dense(plain) else plain.contiguous())
        grad_dtype = p.grad.dtype if p.grad.dtype in (p.dtype, torch.float32) else torch.float32
        grad = _readable(_ordered_like(p.grad.detach(), plain, grad_dtype))
        low = state[_LOW[p.dtype][0]] if p.dtype in _LOW else None
        if low is not None:
            low.copy_(settled_low(p, low))
        is_cuda = p.device.type == "cuda"
        arguments = (
            *((p.device.index, _stream(p.device)) if is_cuda else (-1, 0)),
            FORMATS[p.dtype],
            FORMATS[grad.dtype],
            weight.data_ptr(),
            low.data_ptr() if low is not None else 0,
            state["exp_avg"].data_ptr(),
            state["exp_avg_sq"].data_ptr(),
            grad.data_ptr(),
            [(0, p.numel(), scalars)],
        )
        if p.numel() > 0:  # else nothing is to compute; it counts as stepped, as in torch
            _C.adam(*arguments)
        if weight is not plain:
            plain.copy_(weight)
        note_seen(p)
        if low is not None:
            self._gm_lows[p] = low, low._version
        state["step"] += 1
        # autograd notices when a graph that was built before this step is used after it
        torch.autograd.graph.increment_version(p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; a clip factor that no step has used is dropped with the gradients."""
        self._gm_clip.set(1.0, ())
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        grad_divisor: float = 1.0,
    ) -> Tensor:
        """Clips the gradients of all parameters by their common norm, in the next step.

        The gradients stay as they are until the next step(), into which the factor
        (clip_coefficient) is fused: it is 1 again and they are clipped after it. A second call
        before the step replaces the factor.

        Args:
            max_norm: the norm to clip to, >= 0.
            norm_type: 2.0 (grad_norm: exact, order-independent) or inf.
            error_if_nonfinite: raise when the norm is inf or nan.
            grad_divisor: what the gradients must be divided by to be the true ones (a loss scale).

        Returns:
            The norm of the gradients divided by `grad_divisor`: a 0-dim fp32 CPU tensor.

        Raises:
            ValueError: `norm_type` is neither 2 nor inf, or `max_norm` is negative or nan.
            GeminiError: the norm is not finite and `error_if_nonfinite` is set.
        """
        if not max_norm >= 0.0:
            raise ValueError(f"max_norm is {max_norm}; it must be >= 0")
        grads = [p.grad for _, _, _, p in self._with_grads()]
        if float(norm_type) == 2.0:
            norm = grad_norm(grads)
        elif float(norm_type) == math.inf:
            norm = _largest(grads)
        else:
            raise ValueError(f"norm_type is {norm_type}; use 2.0 or inf")
        norm /= grad_divisor
        if error_if_nonfinite and not math.isfinite(norm):
            raise GeminiError(
                f"the norm of the gradients is {norm}, so they cannot be clipped; look for what "
                "made them non-finite, or pass error_if_nonfinite=False"
            )
        self._gm_clip.set(clip_coefficient(norm, float(max_norm)), grads)
        return torch.tensor(norm, dtype=torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """As torch's; what weights lack to be their masters is that of the weights of now."""
        if "_gm_engine" in vars(self):  # taken from it before manage()
            return type(self).state_dict(self)
        result = super().state_dict()
        ordered = (p for group in self.param_groups for p in group["params"])
        for index, p in enumerate(ordered):
            key = _LOW[p.dtype][0] if p.dtype in _LOW else None
            entry = result["state"].get(index, {})
            if key in entry:
                self._look(p, entry[key])
                low = settled_low(p, entry[key])  # the state keeps its own: a write may be undone
                if not torch.equal(low, entry[key]):
                    result["state"][index] = {**entry, key: low}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, for dicts of ours and of torch.optim.Adam and AdamW.

        Gradients stay, and so does a clip of theirs that the next step is to apply.

        Moments stay fp32 and remainders int16, whatever the parameters' dtype. A dict without low
        parts (torch's own) leaves those of the parameters as they are.

        Raises:
            ValueError: groups or shapes do not fit, or a group asks for amsgrad or maximize. The
                optimizer is then as it was.
        """
        if "_gm_engine" in vars(self):  # taken from it before manage()
            type(self).load_state_dict(self, state_dict)
            return
        state, groups = self.state, self.param_groups

        def release(optimizer: torch.optim.Optimizer) -> None:
            for p, entry in optimizer.state.items():
                for key, value in entry.items():
                    if isinstance(value, _Held):
                        entry[key] = self._loaded(p, key, value.tensor)
                    elif key == "step":  # older torch has a number
                        entry[key] = self._loaded(p, key, torch.tensor(float(value)))

        first = self.register_load_state_dict_pre_hook(_hold)
        last = self.register_load_state_dict_post_hook(release, prepend=True)
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self.state, self.param_groups = state, groups
            raise
        finally:
            first.remove()
            last.remove()
        for p in (p for group in self.param_groups for p in group["params"]):
            if "remainder" in self.state.get(p, {}):
                p.__dict__.pop("_gm_seen", None)
        for p, entry in state.items():
            key = _LOW[p.dtype][0] if p.dtype in _LOW else None
            if key in entry and key not in self.state.get(p, {}):
                p._gm_low = entry[key]
        self._note_lows()

    def _note_lows(self) -> None:
        """What `state` has of weights is theirs, whatever becomes of their entries."""
        for p, entry in self.state.items():
            if p.dtype in _LOW and _LOW[p.dtype][0] in entry:
                low = entry[_LOW[p.dtype][0]]
                self._gm_lows[p] = low, low._version

    @staticmethod
    def _loaded(p: Tensor, key: str, value: Tensor) -> Tensor:
        """A copy of a loaded state tensor in the dtype, order and place that the step expects."""
        if key == "step":
            return value.detach().to(device="cpu", dtype=torch.float32, copy=True)
        if value.shape != p.shape:
            raise ValueError(
                f'state "{key}" has shape {tuple(value.shape)}, its parameter {tuple(p.shape)}; '
                "load the state of the same model"
            )
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        return torch.empty_like(p, dtype=dtype, requires_grad=False).copy_(value.detach())


class CPUAdam(HybridAdam):
    """HybridAdam for parameters on the CPU; refuses CUDA parameters when it stands alone."""

    _device_types = ("cpu",)


def cast_model_(model: nn.Module, precision: str | None) -> nn.Module:
    """Casts parameters in place to what `manage(model, precision=...)` makes of them with Adam or AdamW.

    bf16 rounds to nearest with ties away from zero, fp16 to nearest even (csrc/arith/arith.h). What a
    trainable parameter loses stays in `p._gm_low` (bf16: int16 remainder; fp16: fp32 master), where
    HybridAdam takes it up at its first step; copy.deepcopy does not keep it, so cast after copying.
    Which parameters keep fp32 is said by precision.weight_dtype; buffers stay as they are.

    Args:
        model: its parameters keep their identity; ties stay ties.
        precision: None (nothing changes), "32-true", "bf16-true", "bf16-mixed" or "16-mixed".

    Returns:
        The model.

    Raises:
        ValueError: the precision is not one of these.
        TypeError: a parameter is complex.
        GeminiError: a parameter has a gradient already, or was cast before and not trained since.
    """
    targets = weight_dtypes(model, precision)
    if precision is None:
        return model
    for name, p in model.named_parameters():
        if p.is_complex():
            raise TypeError(
                f'parameter "{name}" is {p.dtype}; complex parameters are not supported: keep its '
                "real and imaginary parts as two parameters"
            )
        if p.grad is not None:
            raise GeminiError(
                f'parameter "{name}" has a gradient of {p.grad.dtype}; call zero_grad() first'
            )
        if hasattr(p, "_gm_low"):
            raise GeminiError(
                f'parameter "{name}" was cast to {p.dtype} and not trained since; cast a model once'
            )
    for p, dtype in targets.items():
        is_quantized = quantized.is_wrapper(p) or quantized.is_bytes(p)
        if p.is_floating_point() and not is_quantized:
            _cast_(p, dtype)
    return model


@torch.no_grad()
def _cast_(p: nn.Parameter, dtype: torch.dtype) -> None:
    plain = p.detach()
    if dtype is torch.float32:
        p.data = plain.to(torch.float32)
        return
    order = plain if is_dense(plain) else plain.contiguous()
    master = torch.empty_like(order, dtype=torch.float32, device="cpu").copy_(order)
    weight = torch.empty_like(master, dtype=dtype)
    low = torch.empty_like(master, dtype=_LOW[dtype][1])
    _C.split_host(
        FORMATS[dtype], master.data_ptr(), weight.data_ptr(), low.data_ptr(), master.numel()
    )
    p.data = weight.to(p.device)
    if p.requires_grad:
        p._gm_low = low.to(p.device)
        note_seen(p)
