"""What a forward on CUDA does otherwise than the same forward on fake tensors of the CPU.

The fake tensors of a recorded step are the CPU's, as not every build of torch has others. Four things in which CUDA
differs change what a step keeps: which attention is taken, which operations autocast runs in fp32, that a softmax reads
half precision and writes fp32 without a copy between, and that dropout keeps a mask of a byte per element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gemini_strategy import _torch
from gemini_strategy._torch import tree_map
from gemini_strategy.estimates.tensors import HALF
from gemini_strategy.precision import to_fp32

_LARGEST_HEAD = 256  # of the attention without a mask

# https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32".
_FP32_NAMES = """
__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist
cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss
layer_norm log log10 log_softmax log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss
nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss
softmax softmin softplus sum renorm tan triplet_margin_loss
"""
_IN_FP32 = frozenset(_FP32_NAMES.split())


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash attention where CUDA takes it, else the memory-efficient one; neither keeps the scores.

    The memory-efficient one knows no grouped heads, so that CUDA takes plain products then, and keeps the scores.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    aten = torch.ops.aten
    if attn_mask is None and query.dtype in HALF and query.shape[-1] <= _LARGEST_HEAD:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if enable_gqa:
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=True
        )[0]
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # CUDA makes numbers of it, too
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask, 0.0)
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


class _FusedSoftmax(torch.autograd.Function):
    """fp32 results of half precision; its gradient is in half precision again.

    Both kernels know fp16 alone for fake tensors; bf16 has the same bytes.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, is_log: bool) -> torch.Tensor:
        ctx.dtype, ctx.dim, ctx.is_log = x.dtype, dim, is_log
        aten = torch.ops.aten
        of = aten._log_softmax if is_log else aten._softmax
        result = of(x.view(torch.float16), dim, True)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        aten = torch.ops.aten
        of = aten._log_softmax_backward_data if ctx.is_log else aten._softmax_backward_data
        (result,) = ctx.saved_tensors
        return of(gradient, result, ctx.dim, torch.float16).view(ctx.dtype), None, None


def _softmax(is_log: bool, x: torch.Tensor, dim: Any = None, *_: Any, **given: Any) -> Any:
    """None where CUDA does as the CPU does."""
    dtype = given.get("dtype")
    if dtype is None and torch.is_autocast_enabled("cpu"):
        dtype = torch.float32
    if x.dtype not in HALF or dtype is not torch.float32 or not isinstance(dim, int):
        return None
    return _FusedSoftmax.apply(x, dim, is_log)


def _cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Under autocast, of class numbers, with a softmax that makes no copy; None for others."""
    is_plain = not target.is_floating_point() and label_smoothing == 0.0 and reduce is None
    if logits.dtype not in HALF or not is_plain or not torch.is_autocast_enabled("cpu"):
        return None
    chances = _FusedSoftmax.apply(logits, 1 if logits.dim() > 1 else 0, True)
    return functional.nll_loss(chances, target, weight, None, ignore_index, None, reduction)


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """None where CUDA has no fused kernel."""
    if inplace or not training or not 0.0 < p < 1.0:
        return None
    return torch.native_dropout(x, p, True)[0]


#: A function of torch -> what CUDA does, or None for what the CPU does, too.
_FUSED: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: _cross_entropy,
    functional.dropout: _dropout,
    torch.dropout: _dropout,
    **{
        of: functools.partial(_softmax, is_log)
        for is_log, functions in (
            (False, (functional.softmax, torch.softmax, torch.Tensor.softmax)),
            (True, (functional.log_softmax, torch.log_softmax, torch.Tensor.log_softmax)),
        )
        for of in functions
    },
}


def _backward(
    loss: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    if gradient is None:
        gradient = torch.ones_like(loss)
    inputs = () if inputs is None else (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    keeps = create_graph if retain_graph is None else retain_graph
    ways = {"allow_unreachable": True, "accumulate_grad": True}
    given = (loss,), (gradient,), keeps, create_graph, tuple(inputs)
    _torch.execution_engine.run_backward(*given, **ways)


class CudaRules(TorchFunctionMode):
    """Inside, calls of torch do what CUDA would do."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention and args[0].dim() == 4:
            return _attention(*args, **kwargs)
        if func is torch.Tensor.backward:
            with self:  # torch takes a mode away while it is asked, and backward may run a forward (checkpointing)
                return _backward(*args, **kwargs)
        fused = _FUSED.get(func)
        if fused is not None and (out := fused(*args, **kwargs)) is not None:
            return out
        name = getattr(func, "__name__", "")
        if name in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(to_fp32, (args, kwargs))
        return func(*args, **kwargs)
