"""Elixir's way in: a search, a wrapped module and a wrapped optimizer, over the engine of `manage()`.

    from gemini_strategy.elixir import ElixirModule, ElixirOptimizer, minimum_waste_search

    search_result = minimum_waste_search(model, world_size)
    model = ElixirModule(model, search_result, world_group)
    optimizer = ElixirOptimizer(model, optimizer)

A search is `estimate()`: nothing is allocated or computed, and the model does not change. Every argument has the
original's name and an effect, or is refused by name: docs/originals.md says what became of what.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.originals import wrapper as base
from gemini_strategy.originals.arguments import Only, chosen, counted, takes

__all__ = [
    "ElixirModule", "ElixirOptimizer", "MemoryProfile", "SearchResult", "cuda_memory_profiling", "minimum_waste_search",
    "optimal_search",
]  # fmt: skip
_PRECISIONS = {torch.float32: "32-true", torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}
_SCALING = {**base.SCALING, "initial_scale": 32768, "max_scale": 2**24}
_GPU = "h100"  # of a search where there is none
_PINNED = Only(True, "places on the host are pinned memory; leave it out")
_ADAM = Only("Adam", "the engine updates with Adam and AdamW")
_WHOLE = Only(False, "every rank gives the whole state; load the file on each")
StepFunction = Callable[[nn.Module, Any], Any]
"""(model, inp): a forward of the model and a backward, on tensors without values; what it returns does not count."""


@dataclass(frozen=True)
class SearchResult:
    """What a search has found; for ElixirModule. Sizes are bytes, as manage() takes them.

    `predicted` has of a step on the example batch "step_seconds", "device_peak_bytes", "host_peak_bytes", "when" (of
    updates) and the other figures of the plan, `table` the estimate as text. Without an example they are None and "".
    """

    chunk_size: int
    device_budget: int | None
    placement_policy: str
    unified_dtype: torch.dtype
    world_size: int
    numels: tuple[int, ...]  # of each parameter
    predicted: Mapping[str, Any] | None = field(default=None, repr=False)
    table: str = field(default="", repr=False)


@takes(
    unified_dtype=torch.float, cpu_offload=False, prefetch=False, verbose=False, pin_memory=_PINNED, inp=None,
    step_fn=None, device_budget=None, gpu=None,
)  # fmt: skip
def minimum_waste_search(m: nn.Module, group_size: int, **given: Any) -> SearchResult:
    """The chunk size that leaves the least of each chunk unused; with `inp` and `step_fn` a step is predicted.

    `device_budget` and `gpu` are as estimate() has them; gpu None: the one that is here, else an H100. A step that does
    not fit the budget is a GeminiMemoryError.
    """
    policy = "cpu" if given.pop("cpu_offload") else "cuda"
    given["overlap"] = given.pop("prefetch")
    return _search("minimum_waste_search", m, group_size, policy, 4096, given)


@takes(
    unified_dtype=torch.float, optimizer_type=_ADAM, overlap=False, verbose=False, inp=None, step_fn=None,
    device_budget=None, gpu=None,
)  # fmt: skip
def optimal_search(m: nn.Module, group_size: int, **given: Any) -> SearchResult:
    """The chunk size that manage() chooses, and the places that the planner does for the step `step_fn(m, inp)`."""
    if given["step_fn"] is None:
        raise ValueError(
            "optimal_search(step_fn=None): the step is traced to plan it: give inp= and step_fn=, a function of a "
            "model and that batch which runs forward and backward; minimum_waste_search needs neither"
        )
    return _search("optimal_search", m, group_size, "auto", None, given)


def _search(
    call: str, model: nn.Module, group_size: int, policy: str, n_grids: int | None, given: Mapping[str, Any]
) -> SearchResult:  # fmt: skip
    dtype, overlap, step_fn = given["unified_dtype"], given["overlap"], given["step_fn"]
    inp, budget, gpu = given["inp"], given["device_budget"], given["gpu"]
    cuda = torch.cuda.is_available()
    if step_fn is None and (overlap or inp is not None):
        name = "prefetch=True" if overlap else "inp=..."
        raise ValueError(f"{call}({name}): without step_fn= nothing uses it: give an example step")
    estimate = _estimate(
        model, inp, step_fn, chosen(call, "unified_dtype", dtype, _PRECISIONS),
        gpu=gpu if cuda else gpu or _GPU, device="cuda" if cuda else "cpu", device_budget=budget,
        placement_policy=policy, ranks=counted(call, "group_size", group_size), chunk_search_n_grids=n_grids,
    )  # fmt: skip
    result = SearchResult(
        chunk_size=estimate.chunk_bytes,
        device_budget=None if budget is None else estimate.settings.device_budget,
        placement_policy=policy,
        unified_dtype=dtype,
        world_size=group_size,
        numels=tuple(p.numel() for p in model.parameters()),
        predicted=None if step_fn is None else _predicted(estimate, overlap),
        table="" if step_fn is None else str(estimate),
    )
    if given["verbose"] and base.place()[0] == 0:
        text = f"chunk size {result.chunk_size:,} bytes\n{result.table}"
        print(text.strip(), file=sys.stderr, flush=True)
    return result


def _estimate(
    model: nn.Module, inp: Any, step_fn: StepFunction | None, precision: str, **more: Any
) -> gs.Estimate:
    def step(model: nn.Module, inp: Any) -> None:
        if step_fn is not None:
            step_fn(model, inp)

    found = gs.estimate(model, inp, step_fn=step, precision=precision, **more)
    if step_fn is not None and not found.gradient_bytes:
        raise ValueError(
            "step_fn has left no gradient: it has to run the forward of the model that it is given, and a backward"
        )
    return found


def _predicted(estimate: gs.Estimate, overlap: bool) -> Mapping[str, Any]:
    if not estimate.fits:
        raise gs.GeminiMemoryError(estimate.refusals[0].text)
    plans = {schedule.when: schedule.plan for schedule in estimate.schedules}
    plan = plans.get("immediate" if overlap else "deferred", plans["deferred"])
    peaks = {f"{where}_peak_bytes" for where in ("device", "host")}
    return MappingProxyType({**plan, **{name: getattr(estimate, name) for name in peaks}})


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes of one training step on one device that holds the whole model, without states of an optimizer.

    Each parameter and buffer counts once. `activation_occ` is the most that all other tensors hold at one moment, the
    inputs, temporary results and unfinished gradients among them: `activation_bytes` of estimate() without buffers.
    """

    param_occ: int
    buffer_occ: int
    grad_occ: int
    activation_occ: int


def cuda_memory_profiling(
    model: nn.Module, inp: Any, step_fn: StepFunction, dtype: torch.dtype = torch.float
) -> MemoryProfile:
    """The memory of a training step on CUDA, without a GPU and without the memory."""
    found = _estimate(
        model, inp, step_fn, chosen("cuda_memory_profiling", "dtype", dtype, _PRECISIONS), gpu=_GPU,
        device_budget=1 << 50, placement_policy="cuda",
    )  # fmt: skip
    return MemoryProfile(
        param_occ=found.weight_bytes,
        buffer_occ=sum(b.numel() * b.element_size() for b in model.buffers()),
        grad_occ=found.gradient_bytes,
        activation_occ=found.activation_bytes - found.buffer_bytes,
    )


class ElixirModule(base.WrappedModule):
    """A model in chunks, as a search has found them; dtype, model and ranks have to be those of the search."""

    @takes(
        process_group=None, prefetch=False, dtype=torch.float, reduce_always_fp32=False, output_fp32=False,
        use_fused_kernels=False,
    )  # fmt: skip
    def __init__(self, module: nn.Module, search_result: SearchResult, **given: Any) -> None:
        dtype, group, found = given["dtype"], given["process_group"], search_result
        other, size = "ElixirModule(search_result=...): it is", base.place(group)[1]
        if dtype is not found.unified_dtype:
            wanted = f"expected the search's, {found.unified_dtype}."
            raise ValueError(f"ElixirModule(dtype={dtype}): {wanted}")
        if tuple(p.numel() for p in module.parameters()) != found.numels:
            raise ValueError(
                f"{other} of a model with {len(found.numels)} parameters of other sizes than this "
                f"{type(module).__name__}'s: search again"
            )
        if size != found.world_size:
            raise ValueError(
                f"{other} for {found.world_size} ranks, and the group has {size}: search with the size of the group"
            )
        if given["use_fused_kernels"]:
            _fuse(module)
        super().__init__(
            module,
            chunk_size=found.chunk_size,
            device_budget=found.device_budget,
            placement_policy=found.placement_policy,
            precision=_PRECISIONS[dtype],
            gradient_dtype=torch.float32 if given["reduce_always_fp32"] else None,
            force_outputs_fp32=given["output_fp32"],
            mesh=group,
        )
        self.prefetch = given["prefetch"]

    @takes(only_rank_0=_WHOLE, strict=True)
    def load_state_dict(self, state_dict: Any, strict: bool) -> Any:  # type: ignore[override]
        """Parameters and buffers; every rank gives the whole."""
        return super().load_state_dict(state_dict, strict)


def _fuse(module: Any) -> None:
    if getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager":
        module.set_attn_implementation("sdpa")
        return
    warnings.warn(
        f"use_fused_kernels=True changes nothing for this {type(module).__name__}: torch's layer norm and "
        "scaled_dot_product_attention are fused already, and it has no eager attention to be switched",
        stacklevel=4,
    )


class ElixirOptimizer(base.WrappedOptimizer):
    """The optimizer of an ElixirModule: `backward(loss)`, `step`, `zero_grad`, `state_dict`.

    With init_step=True its state has its entries from the start: step 0 and moments of zero. No step is made.
    """

    @takes(**_SCALING, **base.CLIPPING, init_step=False)
    def __init__(self, module: ElixirModule, optimizer: Any, **given: Any) -> None:
        if not isinstance(module, ElixirModule):
            kind = type(module).__name__
            raise TypeError(f"ElixirOptimizer(module=...): give the ElixirModule, not a {kind}")
        is_early = given.pop("init_step")
        super().__init__(module, optimizer, ends_step=module.prefetch, **given)
        for group in self.param_groups if is_early else ():
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self.state[parameter]["step"] = torch.tensor(0.0)
