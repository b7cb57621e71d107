"""ElixirModule and ElixirOptimizer: the originals' arguments, on the wrappers that both originals share."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from gemini_strategy.arguments import Arguments
from gemini_strategy.elixir.search import PRECISION_OF, SearchResult
from gemini_strategy.precision import LOSS_SCALING
from gemini_strategy.wrapper import WrappedModule, WrappedOptimizer, group_size, refuse


class ElixirModule(WrappedModule):
    """A model in chunks, as a search has found them.

    Args:
        module: the model that was searched.
        search_result: of minimum_waste_search or optimal_search.
        process_group: the ranks that share the chunks; None: all, or this process alone.
        prefetch: updates run inside the backward, which ElixirOptimizer.backward then ends a step with (no
            accumulation). Weights are always fetched ahead.
        dtype: the search's unified_dtype. float16 has a loss scale.
        reduce_always_fp32: gradients are kept, and summed over the ranks, in fp32.
        output_fp32: half-precision tensors in the outputs become fp32.
        use_fused_kernels: a transformers model that was built with "eager" attention gets torch's fused one; torch's
            layer norm is fused in any case. A model for which nothing changes says so in a warning.

    Raises:
        ValueError: the dtype, the model or the ranks are not those of the search.
    """

    def __init__(
        self,
        module: nn.Module,
        search_result: SearchResult,
        process_group: ProcessGroup | None = None,
        prefetch: bool = False,
        dtype: torch.dtype = torch.float,
        reduce_always_fp32: bool = False,
        output_fp32: bool = False,
        use_fused_kernels: bool = False,
    ) -> None:
        given = dict(locals())
        arguments = Arguments("ElixirModule", given)
        arguments.check_bool("prefetch", "reduce_always_fp32", "output_fp32", "use_fused_kernels")
        is_searched = dtype is search_result.unified_dtype
        arguments.check(is_searched, "dtype", f"the search's, {search_result.unified_dtype}")
        if tuple(p.numel() for p in module.parameters()) != search_result.numels:
            raise ValueError(
                f"ElixirModule(search_result=...): it is of a model with {len(search_result.numels)} parameters of "
                f"other sizes than this {type(module).__name__}'s: search again"
            )
        size = group_size(process_group)
        if size != search_result.world_size:
            raise ValueError(
                f"ElixirModule(search_result=...): it is for {search_result.world_size} ranks, and the group has "
                f"{size}: search with the size of the group"
            )
        if use_fused_kernels:
            _fuse(module)
        super().__init__(
            module,
            chunk_size=search_result.chunk_size,
            device_budget=search_result.device_budget,
            placement_policy=search_result.placement_policy,
            precision=PRECISION_OF[dtype],
            gradient_dtype=torch.float32 if reduce_always_fp32 else None,
            force_outputs_fp32=output_fp32,
            mesh=process_group,
        )
        self.prefetch = prefetch

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], only_rank_0: bool = False, strict: bool = True
    ) -> Any:
        """Parameters and buffers; every rank gives the whole."""
        reason = "every rank gives the whole state; load the file on each"
        refuse("ElixirModule.load_state_dict", locals(), {"only_rank_0": (False, reason)})
        return super().load_state_dict(state_dict, strict)


def _fuse(module: nn.Module) -> None:
    switch = getattr(module, "set_attn_implementation", None)
    config = getattr(module, "config", None)
    if callable(switch) and getattr(config, "_attn_implementation", None) == "eager":
        switch("sdpa")
        return
    warnings.warn(
        f"use_fused_kernels=True changes nothing for this {type(module).__name__}: torch's layer norm and "
        "scaled_dot_product_attention are fused already, and it has no eager attention to be switched",
        stacklevel=3,
    )


class ElixirOptimizer(WrappedOptimizer):
    """The optimizer of an ElixirModule: `backward(loss)`, `step`, `zero_grad`, `state_dict`.

    Args:
        module: the ElixirModule.
        optimizer: torch.optim.AdamW, Adam, HybridAdam or CPUAdam over its parameters.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: of the loss
            scale of float16.
        max_norm: clip the gradients of each step to this 2-norm; 0: not.
        norm_type: 2.
        init_step: the optimizer's state has its entries from the start: step 0 and moments of zero. No step is made.

    Raises:
        TypeError: `module` is no ElixirModule.
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        module: ElixirModule,
        optimizer: torch.optim.Optimizer,
        initial_scale: float = 32768,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**24,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        init_step: bool = False,
    ) -> None:
        given = dict(locals())
        if not isinstance(module, ElixirModule):
            raise TypeError(
                f"ElixirOptimizer(module=...): give the ElixirModule, not a {type(module).__name__}"
            )
        arguments = Arguments("ElixirOptimizer", given)
        arguments.check(norm_type == 2, "norm_type", "2: gradients are clipped by their 2-norm")
        arguments.check_bool("init_step")
        super().__init__(
            module,
            optimizer,
            max_norm=max_norm,
            ends_step=module.prefetch,
            **{name: given[name] for name in LOSS_SCALING},
        )
        for group in self.param_groups if init_step else ():
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self.state[parameter]["step"] = torch.tensor(0.0)
