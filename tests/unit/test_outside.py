"""Parts of a model in mixed precision that a loop calls by itself: a method that is not forward, a submodule.

A plain model in mixed precision has fp32 weights there and computes in fp32. With 16-bit weights each module's own
operations run in 16 bits, and everything between modules in fp32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gemini_strategy as gs
from gemini_strategy.errors import GuardError
from helpers.pairs import turns
from helpers.reference import assert_same_bits


class Island(nn.Module):
    """A part that computes in fp32 inside a forward, on activations and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 2, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(-1, -2), -1) @ x * self.gain


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.island = Island()
        self.head = nn.Linear(16, 24)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return x + self.body(x)

    def _fp32(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.island(x.float())

    def forward(self, tokens: torch.Tensor, is_checkpointed: bool = False) -> torch.Tensor:
        x = self.encode(tokens)
        x = checkpoint(self._fp32, x, use_reentrant=False) if is_checkpointed else self._fp32(x)
        return self.head(x)


def tokens() -> torch.Tensor:
    return torch.randint(0, 24, (4, 6), generator=torch.Generator().manual_seed(1))


def manage(precision: str, **given: Any) -> tuple[Net, Net, gs.Engine]:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"device": "cpu", "precision": precision, "initial_scale": 4.0, **given}
    return model, plain, gs.manage(model, optimizer, **settings)


CALLS: dict[str, Callable[[Net], torch.Tensor]] = {
    "a method": lambda model: model.encode(tokens()),
    "a method and a part": lambda model: model.head(model.encode(tokens())),
    "a part": lambda model: model.body(torch.linspace(-1, 1, 64).view(4, 16)),
    "a part of a part": lambda model: model.body[2](torch.linspace(-1, 1, 64).view(2, 32)),
    "checkpointed": lambda model: model.head(
        checkpoint(model.encode, tokens(), use_reentrant=False)
    ),
    "checkpointed, reentrant": lambda model: model.head(
        checkpoint(model.body, torch.ones(3, 16, requires_grad=True), use_reentrant=True)
    ),
}


@turns(call=CALLS, precision=["bf16-mixed", "16-mixed"])
def test_it_runs_and_gives_fp32_near_the_plain_models(call: str, precision: str) -> None:
    """Near: to what products of 16-bit numbers can differ by, of the largest value."""
    model, plain, engine = manage(precision)
    results, grads = [], []
    for each in (model, plain):
        result = CALLS[call](each)
        assert result.dtype is torch.float32
        loss = result.square().mean()
        engine.backward(loss) if each is model else loss.backward()
        results.append(result.detach())
        grads.append(each.body[2].weight.grad.detach().float().clone())
    grads[0] /= engine.scaler.scale if engine.scaler is not None else 1.0
    for got, want in (results, grads):
        assert (got - want).abs().max() < 0.02 * want.abs().max()
    engine.step()


def test_the_callers_autocast_and_16_bits_are_the_callers() -> None:
    model, _, engine = manage("bf16-mixed")
    x = torch.ones(3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        want = model.body(x)
        assert want.dtype is torch.bfloat16
    assert model.body(x.bfloat16()).dtype is torch.bfloat16
    assert_same_bits(model.body(x).detach(), want.float().detach())
    engine.close()


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("before", [False, True], ids=["alone", "a part was called before"])
def test_fp32_islands_inside_a_forward_stay_fp32(before: bool, is_checkpointed: bool) -> None:
    """To the bit, in what checkpointing repeats, too."""
    torch.manual_seed(0)
    plain = gs.cast_model_(Net(), "bf16-mixed")
    with torch.autocast("cpu", torch.bfloat16):
        want = plain(tokens(), is_checkpointed)
    want.float().square().mean().backward()
    model, _, engine = manage("bf16-mixed")
    if before:
        model.encode(tokens())
    got = model(tokens(), is_checkpointed)
    assert_same_bits(got.detach(), want.detach())
    engine.backward(got.float().square().mean())
    for (name, mine), its in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same_bits(mine.grad.detach().clone(), its.grad, name)
    engine.close()


def test_what_cannot_be_told_apart_is_refused() -> None:
    model, _, engine = manage("bf16-mixed")
    x = torch.ones(4, 6, 16)
    loss = model(tokens(), True).float().sum() + model.island(x).sum()
    with pytest.raises(GuardError, match=r"'island' was called outside .*torch\.autocast"):
        engine.backward(loss)
    engine.close()


def test_a_loop_that_has_autocast_of_its_own_is_left_alone() -> None:
    """convert_inputs=False: what it does without autocast is its own."""
    model, _, engine = manage("bf16-mixed", convert_inputs=False)
    with pytest.raises(RuntimeError, match="dtype"):
        model.body(torch.ones(3, 16))
    engine.close()


def test_a_model_that_is_one_module_is_as_it_was() -> None:
    model = nn.Linear(4, 4)
    engine = gs.manage(model, None, device="cpu", precision="bf16-mixed")
    assert model(torch.ones(2, 4)).dtype is torch.bfloat16
    engine.close()
