"""Any optimizer on a GPU: the bits of the same loop without an engine, under budgets that stream weights and states.

Deterministic kernels on both sides (see test_gpu_exact.py). The driver's own figure of used memory stays below the
budget, the first step, which makes the states, included.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.optim.adam import clip_coefficient
from gemini_strategy.optim.opaque import leaves
from gemini_strategy.report.tables import host_resident_bytes
from helpers.reference import assert_same_bits
from test_gpu_exact import AROUND, MIB, _deterministic, _peak, _release, _used

pytestmark = pytest.mark.gpu

__all__ = ["_deterministic"]

STEPS = 12
WIDTH, DEPTH = 1280, 6  # 20 million parameters


Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True, maximize=True),
    "capturable": lambda p: torch.optim.NAdam(p, lr=1e-3, capturable=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def _of(module: str, **classes: dict[str, Any]) -> None:
    """Optimizers of a package that this machine has."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return
    package = importlib.import_module(module)
    for name, options in classes.items():
        make: Make = functools.partial(getattr(package, name), **options)
        OPTIMIZERS[f"{module.partition('.')[0]}-{name}"] = make


_of(
    "bitsandbytes.optim", AdamW8bit={"lr": 1e-3}, PagedAdamW8bit={"lr": 1e-3}, Lion8bit={"lr": 1e-4}
)
_of("torchao.optim", AdamW8bit={"lr": 1e-3}, AdamW4bit={"lr": 1e-3})


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        ]
    return nn.Sequential(*layers)


def _batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator).to("cuda", dtype)


def _loss(model: nn.Module, step: int, dtype: torch.dtype) -> torch.Tensor:
    target = _batch(step + STEPS, torch.float32)
    return (model(_batch(step, dtype)).float() - target).square().mean()


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
    found: dict[Any, torch.Tensor] = {}
    for name, p in model.named_parameters():
        found[name] = p.detach().cpu()
        for path, tensor in leaves(optimizer.state.get(p, {})):
            found[name, *path] = tensor.cpu()
    return found


@functools.cache
def _reference(name: str, dtype: torch.dtype, clip: float | None) -> dict[Any, torch.Tensor]:
    model = _model().to("cuda", dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(STEPS):
        _loss(model, step, dtype).backward()
        if clip is not None:
            grads = [p.grad for p in model.parameters()]
            factor = clip_coefficient(gs.grad_norm(grads), clip)
            for grad in grads:
                grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
    found = _states(model, optimizer)
    del model, optimizer
    _release()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", ["deferred", "immediate", "clipped", "speculated"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_and_peak(name: str, how: str, dtype: torch.dtype) -> None:
    clip = {"clipped": 1e-3, "speculated": 1e3}.get(how)  # which never fires
    want = _reference(name, dtype, clip)
    n_taken = 0
    for policy, share in (("auto", 0.6), ("cpu", 0.4), ("cuda", None)):
        _release()
        n_bytes = sum(tensor.nbytes for tensor in want.values())
        budget = None if share is None else _used() + AROUND + int(share * n_bytes)
        model = _model()
        optimizer = OPTIMIZERS[name](model.parameters())
        precision = "32-true" if dtype is torch.float32 else "bf16-true"
        with _peak() as peak:
            engine = gs.manage(
                model,
                optimizer,
                precision=precision,
                placement_policy=policy,
                device_budget=budget,
                chunk_size=8 * MIB,
            )
            for step in range(STEPS):
                engine.backward(_loss(model, step, dtype), step=how == "immediate")
                if clip is not None:
                    engine.clip_grad_norm_(clip)
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
        stats = engine.stats()
        if how == "speculated":
            n_taken += stats["taken_updates"]
            assert stats["redone_updates"] == 0
        engine.close()
        found = _states(model, optimizer)
        assert found.keys() == want.keys()
        for key, tensor in want.items():
            is_weight = isinstance(key, str)  # which is fp32 again
            got = found[key].to(tensor.dtype) if is_weight else found[key]
            assert_same_bits(got, tensor, str(key))
        if budget is not None:
            assert peak[0] <= budget, f"{peak[0] / MIB:.0f} MiB used of {budget / MIB:.0f}"
        if policy == "cpu":
            assert stats["evictions"] > STEPS
    # A plan need not speculate where its passes are slow enough to hide the updates behind the step.
    assert how != "speculated" or n_taken > 0


def test_close_gives_memory_back() -> None:
    left = []
    for _ in range(5):
        model = _model()
        optimizer = OPTIMIZERS["rmsprop"](model.parameters())
        budget = _used() + AROUND + 80 * MIB
        engine = gs.manage(model, optimizer, device_budget=budget, placement_policy="cpu")
        for step in range(STEPS):
            engine.backward(_loss(model, step, torch.float32))
            optimizer.step()
            optimizer.zero_grad()
        host = engine.stats()["host_bytes"]
        engine.close()
        del model, optimizer, engine
        _release()
        left.append((host_resident_bytes(), _used()))
    (resident, used), (resident_then, used_then) = left[-1], left[1]  # the first two load kernels
    assert resident - resident_then < host / 2, f"{left}, {host} bytes each"
    assert used - used_then < 8 * MIB, f"{left}"


def test_two_optimizers() -> None:
    """Muon for matrices, AdamW for the rest."""
    outcomes = []
    for is_managed in (False, True):
        model = _model() if is_managed else _model().to("cuda")
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)
        engine = None
        if is_managed:
            engine = gs.manage(
                model, [muon, adamw], device_budget=_used() + AROUND + 80 * MIB, chunk_size=8 * MIB
            )
        for step in range(STEPS):
            loss = _loss(model, step, torch.float32)
            loss.backward() if engine is None else engine.backward(loss)
            for optimizer in (muon, adamw):
                optimizer.step()
                optimizer.zero_grad()
        if engine is not None:
            engine.close()
        outcomes.append({**_states(model, muon), **_states(model, adamw)})
        del model, muon, adamw, engine
        _release()
    assert outcomes[0].keys() == outcomes[1].keys()
    for key, tensor in outcomes[0].items():
        assert_same_bits(outcomes[1][key], tensor, str(key))
