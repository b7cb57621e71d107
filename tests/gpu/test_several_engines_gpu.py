"""Several engines on one GPU: the bits of the unmanaged loop, one budget for all, and whoever is left has the rest.

Deterministic kernels on both sides (see test_gpu_exact.py).
"""

from __future__ import annotations

import functools
import gc
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gemini_strategy as gs
from gemini_strategy.huggingface import GeminiAccelerator, GeminiPlugin
from helpers.reference import (
    Outcome,
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    assert_trained,
    managed,
    plain,
    start,
    state_bytes,
)
from helpers.zoo import Case
from test_gpu_exact import AROUND, MIB, _deterministic, _peak, _release, _used
from test_planned_gpu import CASE, Transformer, tokens, transformer

pytestmark = pytest.mark.gpu

__all__ = ["_deterministic"]

STEPS = 14
RECIPE = Recipe(precision="bf16-true", steps=STEPS, clip=0.35, lr=3e-4, device="cuda")
OTHER = transformer(width=512, depth=6)  # 20 million parameters
CHUNK = 2 * MIB


def _reference_model() -> nn.Module:
    return start(lambda: Transformer(1024, 4), RECIPE, "cpu").eval()  # 52 million, frozen


def _plain_reference() -> nn.Module:
    return gs.cast_model_(_reference_model(), "bf16-true").cuda()


def _managed_reference(budget: int) -> gs.Engine:
    how: dict[str, Any] = {"device": "cuda", "precision": "bf16-true", "chunk_size": CHUNK}
    return gs.manage(_reference_model(), device_budget=budget, **how)


def _step(run: Plain, reference: Any, step: int) -> None:
    """Of a policy that stays near its reference."""
    torch.manual_seed(1000 + step)
    ids = tokens(step).to("cuda")
    with torch.no_grad():
        want = functional.log_softmax(reference(ids).float(), -1)
    have = functional.log_softmax(run(ids).float(), -1)
    near = functional.kl_div(have, want, log_target=True, reduction="batchmean") / ids.shape[1]
    loss = functional.nll_loss(have[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + 0.1 * near
    run.losses.append(loss.detach().float().cpu().clone())
    run.backward(loss)
    run.finish()


def _drive(run: Plain, reference: Any, first: int = 0, steps: int = STEPS) -> None:
    for step in range(first, first + steps):
        _step(run, reference, step)


@functools.cache
def _wanted() -> tuple[Outcome, Tensor]:
    """Of the policy after its steps, and what the reference says of one batch."""
    run, reference = plain(CASE.build, RECIPE), _plain_reference()
    before = run.outcome()
    _drive(run, reference)
    after = run.outcome()
    assert_trained(before, after)
    with torch.no_grad():
        logits = reference(tokens(99).to("cuda")).cpu()
    del run, reference
    _release()
    return after, logits


def _logits(reference: gs.Engine) -> Tensor:
    with torch.no_grad():
        return reference.model(tokens(99).to("cuda")).cpu()


@functools.cache
def _state(case: Case) -> int:
    return state_bytes(case.build, RECIPE)


def _reference_bytes() -> int:
    return 2 * sum(p.numel() for p in _reference_model().parameters())


@pytest.mark.parametrize("share", [0.3, 0.7, 2.5])
@pytest.mark.parametrize("is_reference_first", [True, False])
def test_a_policy_and_its_reference(is_reference_first: bool, share: float) -> None:
    want, logits = _wanted()
    _release()
    budget = _used() + AROUND + int(share * (_state(CASE) + _reference_bytes()))
    with _peak() as peak:
        if is_reference_first:
            reference = _managed_reference(budget)
            assert_same_bits(_logits(reference), logits)  # had the device for itself
        run = managed(CASE.build, RECIPE, device_budget=budget, chunk_size=CHUNK)
        if not is_reference_first:
            reference = _managed_reference(budget)
        _drive(run, reference.model)
        torch.cuda.synchronize()
    assert peak[0] <= budget, f"{peak[0] / MIB:.0f} MiB used of {budget / MIB:.0f}"
    assert_same_outcome(run.outcome(), want)
    assert_same_bits(_logits(reference), logits)
    stats = run.engine.stats()
    print(share, is_reference_first, reference.stats()["device_bytes"], stats["device_bytes"])
    assert stats["planned"]
    held = reference.stats()["device_bytes"]
    if share > 1:
        assert held >= _reference_bytes()
    else:
        assert held < _reference_bytes()
    run.engine.close()
    run.model.cpu()
    del run
    _release()
    # Alone it has the whole budget, and torch's memory answers to it.
    with _peak() as peak:
        for _ in range(3):
            assert_same_bits(_logits(reference), logits)
    assert reference.stats()["device_bytes"] > held or share > 1
    assert peak[0] <= budget
    big = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    assert_same_bits(_logits(reference), logits)
    assert _used() <= budget
    del big
    reference.close()


def test_the_reference_is_closed_first_and_another_one_comes() -> None:
    want, logits = _wanted()
    _release()
    budget = _used() + AROUND + int(0.4 * (_state(CASE) + _reference_bytes()))
    with _peak() as peak:
        run = managed(CASE.build, RECIPE, device_budget=budget, chunk_size=CHUNK)
        reference = _managed_reference(budget)
        _drive(run, reference.model, steps=5)
        reference.close()
        reference.model.cpu()
        reference = _managed_reference(budget)
        _drive(run, reference.model, first=5, steps=4)
        del reference  # nobody closes it
        gc.collect()
        reference = _managed_reference(budget)
        _drive(run, reference.model, first=9, steps=STEPS - 9)
        torch.cuda.synchronize()
    assert peak[0] <= budget, f"{peak[0] / MIB:.0f} MiB used of {budget / MIB:.0f}"
    assert_same_outcome(run.outcome(), want)
    assert_same_bits(_logits(reference), logits)
    run.engine.close()
    reference.close()


@functools.cache
def _wanted_pair() -> tuple[Outcome, Outcome]:
    runs = plain(CASE.build, RECIPE), plain(OTHER.build, RECIPE)
    _drive_pair(*runs)
    outcomes = runs[0].outcome(), runs[1].outcome()
    del runs
    _release()
    return outcomes


def _drive_pair(first: Plain, second: Plain) -> None:
    """Each learns from the other's last word."""
    for step in range(STEPS):
        _step(first, second, 2 * step)
        _step(second, first, 2 * step + 1)


@pytest.mark.parametrize("share", [0.35, 0.6, 1.3])
def test_two_models_that_train(share: float) -> None:
    want = _wanted_pair()
    _release()
    budget = _used() + AROUND + int(share * (_state(CASE) + _state(OTHER)))
    with _peak() as peak:
        first = managed(CASE.build, RECIPE, device_budget=budget, chunk_size=CHUNK)
        second = managed(OTHER.build, RECIPE, device_budget=budget, chunk_size=CHUNK)
        _drive_pair(first, second)
        torch.cuda.synchronize()
    print(share, first.engine.stats()["device_bytes"], second.engine.stats()["device_bytes"])
    assert peak[0] <= budget, f"{peak[0] / MIB:.0f} MiB used of {budget / MIB:.0f}"
    assert_same_outcome(first.outcome(), want[0])
    assert_same_outcome(second.outcome(), want[1])
    first.engine.close()
    second.engine.close()


def test_models_that_do_not_fit_together() -> None:
    """A chunk of 226 MB, and 172 MiB of room beside the reference's."""
    _, logits = _wanted()
    whole: dict[str, Any] = {"chunk_size": 512 * MIB}
    large = transformer(width=1536)
    want = plain(large.build, RECIPE)
    _drive(want, _plain_reference(), steps=3)
    wanted = want.outcome()
    del want
    _release()
    budget = _used() + 300 * MIB
    reference = _managed_reference(budget)
    with pytest.raises(gs.GeminiMemoryError, match=r"Transformer .* and Transformer ") as error:
        managed(large.build, RECIPE, device_budget=budget, **whole)
    print(error.value)
    enough = int(re.search(r"\((\d+) bytes\)", str(error.value)).group(1))
    assert_same_bits(_logits(reference), logits)  # as before
    reference.close()
    reference.model.cpu()
    _release()
    enough += AROUND  # for activations
    reference = _managed_reference(enough)
    run = managed(large.build, RECIPE, device_budget=enough, **whole)
    _drive(run, reference.model, steps=3)
    assert_same_outcome(run.outcome(), wanted)
    assert_same_bits(_logits(reference), logits)
    run.engine.close()
    reference.close()


def test_under_an_accelerator() -> None:
    budget = _used() + AROUND + int(0.5 * (_state(CASE) + _reference_bytes()))
    accelerator = GeminiAccelerator(
        gemini_plugin=GeminiPlugin(device_budget=budget, chunk_size=CHUNK)
    )
    model = start(CASE.build, RECIPE, "cpu").bfloat16()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
    reference = accelerator.prepare_model(_reference_model().bfloat16(), evaluation_mode=True)
    plain_reference = _reference_model().bfloat16().cuda()
    for step in range(6):
        ids = tokens(step).to("cuda")
        with torch.no_grad():
            want = reference(ids)
            assert_same_bits(want.cpu(), plain_reference(ids).cpu())
        loss = functional.mse_loss(model(ids).float(), want.float())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory(model, reference, optimizer)
