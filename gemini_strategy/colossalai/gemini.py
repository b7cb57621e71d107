"""GeminiDDP and GeminiOptimizer of 0.5: their arguments, on the wrappers that both originals share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from gemini_strategy.arguments import Arguments
from gemini_strategy.precision import LOSS_SCALING
from gemini_strategy.wrapper import WrappedModule, WrappedOptimizer, refuse

_PLAN = "the plan decides that from device_budget and what was measured; leave it out"
# What the original asks its user, and the engine knows by itself: the one value, and why there is no other.
FIXED: dict[str, tuple[Any, str]] = {
    "chunk_config_dict": (None, "give chunk_size=, in bytes of weights"),
    "chunk_init_device": (None, "values go straight to their places"),
    "max_prefetch": (0, f"how far is fetched ahead: {_PLAN}"),
    "warmup_non_model_data_ratio": (0.8, f"the first step is served on demand: {_PLAN}"),
    "steady_cuda_cap_ratio": (0.9, "give device_budget=, which is kept"),
    "pin_memory": (True, "places on the host are pinned memory"),
    "strict_ddp_mode": (False, 'give placement_policy="cuda", which keeps everything on the device'),
    "scatter_after_inference": (True, f"what stays after an evaluation: {_PLAN}"),
    "extra_dp_group": (None, "give zero_group=, a DeviceMesh of two dimensions: replicas, shards"),
    "memstats": (None, "the first step is traced in any case"),
    "master_weights": (True, "fp32 masters are always kept; they cost 2 bytes beside a bf16 weight"),
    "enable_async_reduce": (True, "reductions run beside the backward in any case"),
    "fp8_communication": (False, "nothing is quantized"),
    "use_fp8": (False, "nothing is quantized"),
}  # fmt: skip
_POLICIES = {  # of "static": shares of sharding, states and weights off the device
    (1.0, 0.0, 0.0): "cuda",
    (1.0, 1.0, 0.0): "auto",
    (1.0, 1.0, 1.0): "cpu",
}
_MIB = 1 << 20


def management(call: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of manage() for those of GeminiDDP and GeminiPlugin.

    Raises:
        ValueError: an argument is refused, by name.
    """
    refuse(call, given, FIXED)
    arguments = Arguments(call, given)
    arguments.check_bool("force_outputs_fp32", "verbose", "enable_gradient_accumulation")
    precisions = {"fp16": "16-mixed", "bf16": "bf16-mixed"}
    precisions |= {torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}
    arguments.check_choice("mixed_precision", tuple(precisions))
    return {
        "placement_policy": _policy(call, given),
        "precision": precisions[given["mixed_precision"]],
        "force_outputs_fp32": given["force_outputs_fp32"],
        "mesh": given["zero_group"],
        "report": True if given["verbose"] else None,
        "device_budget": given["device_budget"],
        **_sizes(call, given),
    }


def _policy(call: str, given: Mapping[str, Any]) -> str:
    names = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
    fractions = tuple(float(given[name]) for name in names)
    if given["placement_policy"] == "auto":
        if fractions != (1.0, 0.0, 0.0):
            raise ValueError(f"{call}(placement_policy='auto', {names}={fractions}): {_PLAN}.")
        return "auto"
    Arguments(call, given).check_choice("placement_policy", ("auto", "static"))
    if fractions not in _POLICIES:
        known = "; ".join(f"{key} is {value!r}" for key, value in _POLICIES.items())
        raise ValueError(
            f"{call}(placement_policy='static', ({', '.join(names)})={fractions}): {known}; for what lies between "
            "give placement_policy='auto' and device_budget=, or gpu_margin_mem_ratio= for the states."
        )
    return _POLICIES[fractions]


def _sizes(call: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The search for a chunk size, from elements / 2^20 to bytes of 16-bit weights; its defaults: no search."""
    asked = (given["search_range_m"], given["hidden_dim"], given["min_chunk_size_m"])
    if asked == (32, None, 32):
        return {"chunk_size": given["chunk_size"]}
    if given["chunk_size"] is not None:
        raise ValueError(
            f"{call}(chunk_size={given['chunk_size']!r}): give it, or arguments of the search for it, not both."
        )
    width = 2 * _MIB
    span = int(given["search_range_m"] * width)
    step = (given["hidden_dim"] or 1024) * 2
    return {
        "chunk_search_range": span,
        "chunk_search_n_grids": max(1, span // step),
        "min_chunk_size": int(given["min_chunk_size_m"] * width),
    }


class GeminiDDP(WrappedModule):
    """A model in chunks, in place; GeminiOptimizer takes its optimizer over.

    Arguments have the originals' names. Those with an effect:

    Args:
        module: the model.
        placement_policy: "auto"; or "static", where (shard_param_frac, offload_optim_frac, offload_param_frac) of
            (1, 0, 0) keeps everything on the device, (1, 1, 1) everything on the host, and (1, 1, 0) is "auto".
        enable_gradient_accumulation: False or True; several backwards before a step add up in any case.
        search_range_m, hidden_dim, min_chunk_size_m: the search for a chunk size, in 2^20 elements (hidden_dim:
            elements); their defaults: the size that manage() takes.
        force_outputs_fp32: half-precision tensors in the outputs become fp32.
        mixed_precision: torch.float16 or bfloat16: weights in it, fp32 masters, autocast.
        zero_group: the ranks, as mesh= of manage().
        verbose: print the plan's table.
        chunk_size, device_budget: as manage() has them; not the originals'.

    The others are taken with their defaults alone, which are what the engine does.

    Raises:
        ValueError: an argument is refused, by name, with the way out.
    """

    def __init__(
        self,
        module: nn.Module,
        chunk_config_dict: None = None,
        chunk_init_device: None = None,
        placement_policy: str = "auto",
        enable_gradient_accumulation: bool = False,
        max_prefetch: int = 0,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        search_range_m: int = 32,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        pin_memory: bool = True,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        scatter_after_inference: bool = True,
        mixed_precision: torch.dtype | str = torch.float16,
        zero_group: ProcessGroup | Any = None,
        memstats: None = None,
        master_weights: bool = True,
        extra_dp_group: None = None,
        verbose: bool = False,
        enable_async_reduce: bool = True,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        chunk_size: int | str | None = None,
        device_budget: int | float | str | None = None,
    ) -> None:
        super().__init__(module, **management("GeminiDDP", dict(locals())))


class GeminiOptimizer(WrappedOptimizer):
    """The optimizer of a GeminiDDP: `backward(loss)`, `step`, `zero_grad`, `state_dict`, `load_state_dict`.

    Args:
        optim: torch.optim.AdamW, Adam, HybridAdam or CPUAdam over the module's parameters.
        module: the GeminiDDP.
        gpu_margin_mem_ratio: with placement_policy="auto" the share of what the weights leave on the device that states
            may take; None: all of it.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: of the loss
            scale of fp16.
        max_norm: clip the gradients of each step to this 2-norm; 0: not.
        norm_type: 2.

    Raises:
        ValueError, TypeError: an argument is out of its range, or unknown.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        module: GeminiDDP,
        gpu_margin_mem_ratio: float | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
    ) -> None:
        given = dict(locals())
        Arguments("GeminiOptimizer", given).check(norm_type == 2, "norm_type", "2: the 2-norm")
        scaling = {name: given[name] for name in LOSS_SCALING}
        super().__init__(
            module, optim, max_norm=max_norm, gpu_margin_mem_ratio=gpu_margin_mem_ratio, **scaling
        )

    def get_grad_norm(self) -> float:
        """The 2-norm of the gradients, unscaled and unclipped."""
        return self.engine.grad_norm()

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of the next step; gives their norm."""
        return self.engine.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamps every element of the gradients."""
        self.engine.clip_grad_value_(clip_value)
