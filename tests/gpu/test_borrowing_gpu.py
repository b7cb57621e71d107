"""Losses that take the address of the head's weight, on a GPU: a Triton kernel, Liger's, cut cross-entropy.

The bits of the same loop without an engine, where the loss has the same bits from run to run. Cut cross-entropy has
not: its blocks add in any order. There losses and weights are near.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gemini_strategy as gs
from helpers.reference import assert_same_bits
from test_gpu_exact import AROUND, MIB, _deterministic, _release, _used

pytestmark = pytest.mark.gpu

__all__ = ["_deterministic"]

STEPS, ROWS, WIDTH, CLASSES, DEPTH = 8, 64, 1024, 16384, 6
HEAD_BYTES = 2 * WIDTH * CLASSES


def _copied(weight: Tensor) -> Tensor:
    """By a kernel of Triton, which gets the address."""
    import triton
    from triton import language as tl

    global _kernel
    if _kernel is None:

        @triton.jit
        def copy(source, target, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)

        _kernel = copy
    result = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    _kernel[(triton.cdiv(weight.numel(), 1024),)](weight, result, weight.numel(), BLOCK=1024)
    return result


_kernel: Any = None


class _ByTriton(torch.autograd.Function):
    """Keeps the weight on ctx, and gives its address in the backward, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ _copied(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ _copied(ctx.weight), grad.t() @ ctx.x


def _by_triton(head: Tensor, x: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(_ByTriton.apply(x, head).float(), target)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "one operation": lambda head, x, y: functional.cross_entropy((x @ head.t()).float(), y),
    "triton": _by_triton,
}


def _find(module: str, name: str) -> Any:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    return getattr(importlib.import_module(module), name)


_cce = _find("cut_cross_entropy", "linear_cross_entropy")
if _cce is not None:
    LOSSES["cut cross-entropy"] = lambda head, x, y: _cce(x, head, y)
_fused = _find("liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")
if _fused is not None:
    LOSSES["liger fused"] = lambda head, x, y: _fused()(head, x, y)
for _name in ("ORPO", "CPO"):
    _loss = _find("liger_kernel.chunked_loss", f"LigerFusedLinear{_name}Loss")
    if _loss is not None:
        LOSSES[f"liger {_name}, compiled"] = lambda head, x, y, loss=_loss: loss(compiled=True)(
            head, x.view(4, -1, WIDTH), y.view(4, -1)
        )[0]
_dpo = _find("liger_kernel.chunked_loss", "LigerFusedLinearDPOLoss")
if _dpo is not None:
    LOSSES["liger DPO, compiled"] = lambda head, x, y, reference: _dpo(compiled=True)(
        head,
        x.view(4, -1, WIDTH),
        y.view(4, -1),
        ref_input=x.detach().view(4, -1, WIDTH),
        ref_weight=reference,
    )[0]


class _Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH))
        )
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.reference = nn.Linear(WIDTH, CLASSES, bias=False).requires_grad_(False)
        self.loss = LOSSES[name]
        self.has_reference = "DPO" in name

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        more = (self.reference.weight,) if self.has_reference else ()
        return self.loss(self.head.weight, self.body(x), target, *more)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator).to("cuda", torch.bfloat16)
    return x, torch.randint(CLASSES, (ROWS,), generator=generator).cuda()


def _train(name: str, how: str | None) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """(losses, weights, bytes fetched in the last step); how: None: without an engine."""
    torch._dynamo.reset()
    _release()
    model, engine, moved = _Model(name), None, 0
    if how is None:
        gs.cast_model_(model.cuda(), "bf16-true")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = gs.HybridAdam(trained, lr=1e-3)
    if how is not None:
        engine = gs.manage(
            model,
            optimizer,
            precision="bf16-true",
            placement_policy="cpu",
            device_budget=_used() + AROUND + 5 * HEAD_BYTES,
            chunk_size=4 * MIB,
        )
    losses = []
    for step in range(STEPS):
        before = engine.stats()["fetched_bytes"] if engine else 0
        loss = model(*_batch(step))
        if engine is None:
            loss.backward()
        else:
            engine.backward(loss, step=how == "immediate")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
        if engine is not None:
            moved = engine.stats()["fetched_bytes"] - before
            assert engine.stats()["leases"] == 0
    weights = {n: p.detach().clone().cpu() for n, p in model.named_parameters()}
    if engine is not None:
        engine.close()
    return losses, weights, moved


@pytest.mark.parametrize("how", ["deferred", "immediate"])
@pytest.mark.parametrize("name", LOSSES)
def test_bits_and_fetches(name: str, how: str) -> None:
    want, weights, _ = _train(name, None)
    got, found, moved = _train(name, how)
    _, _, once = _train("one operation", how)
    if name == "cut cross-entropy":
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
        start = dict(_Model(name).named_parameters())
        apart, moved_by = (
            sum(float((a[key].float() - b[key].float()).square().sum()) for key in weights)
            for a, b in ((found, weights), (weights, start))
        )
        assert apart < 0.1 * moved_by  # of gradients that are not these, 2
    else:
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b, "a loss")
        for key, weight in weights.items():
            assert_same_bits(found[key], weight, key)
    n_heads = 2 if "DPO" in name else 1
    assert moved <= once + 2 * n_heads * HEAD_BYTES, (
        f"{moved} bytes fetched, {once} by one operation"
    )
