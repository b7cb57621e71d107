"""The planned engine on a GPU: a small transformer has the bits of the unmanaged loop under every plan.

200 steps with clipping, 60 without, two micro-batches each; deterministic kernels on both sides (see
test_gpu_exact.py).  A run counts as planned only if it followed its plan to the end without a wait.  The driver's
own figure of used memory is sampled and must stay below the budget.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

# read by cuBLAS when its first handle is made
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from helpers.reference import (
    Managed,
    Outcome,
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    assert_trained,
    drive,
    managed,
    plain,
    state_bytes,
)
from helpers.zoo import Case
from test_gpu_exact import MIB, _deterministic, _peak, _release, _used

pytestmark = pytest.mark.gpu

__all__ = ["_deterministic"]

STEPS = {0.35: 200, None: 60}  # by clipping
FEW = 16
VOCABULARY, LENGTH, SEQUENCES = 1024, 64, 4
# what a budget has beside the state: reserve of the driver, workspaces, activations
AROUND = 320 * MIB
SLOW_HOST = "h2d=55e9,d2h=54e9,host_adam=5e7,host_adam_beside=5e7"  # states come to the device
FAST_HOST = "h2d=20e9,d2h=20e9,host_adam=60e9,host_adam_beside=60e9"  # updates stay on the host


class Layer(nn.Module):
    """A pre-norm transformer layer with written-out heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.first(x)).view(rows, length, 3, width // 64, 64)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        hidden = functional.dropout(functional.gelu(self.up(self.second(x))), 0.1, self.training)
        return x + self.down(hidden)


class Transformer(nn.Module):
    """Tokens to logits; `recompute`: None, "reentrant" or "plain" checkpoints around each layer."""

    def __init__(self, width: int, depth: int, recompute: str | None = None) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            if self.recompute and self.training:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = layer(x)
        return self.head(self.norm(x))


def tokens(step: int, sequences: int = SEQUENCES, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(70_000 + step)
    return torch.randint(0, VOCABULARY, (sequences, length), generator=generator)


def loss_of(run: Any, ids: Tensor) -> Tensor:
    logits = run(ids)[:, :-1].float()
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def transformer(width: int = 768, depth: int = 4, recompute: str | None = None) -> Case:
    return Case("transformer", lambda: Transformer(width, depth, recompute), tokens, loss_of)


CASE = transformer()  # 30 million parameters


def recipe_of(clip: float | None, steps: int) -> Recipe:
    return Recipe(
        precision="bf16-true", steps=steps, clip=clip, accumulate=2, lr=3e-4, device="cuda"
    )


def drive_immediate(run: Plain, case: Case, steps: int, first: int = 0) -> None:
    """As drive(), and the engine is told which backward ends the step."""
    recipe = run.recipe
    for step in range(first, first + steps):
        torch.manual_seed(1000 + step)
        for micro in range(recipe.accumulate):
            loss = case.loss(run, case.batch(step * recipe.accumulate + micro).to("cuda"))
            run.losses.append(loss.detach().float().cpu().clone())
            is_last = micro == recipe.accumulate - 1
            run.engine.backward(loss / recipe.accumulate, step=is_last)
        run.finish()


@functools.cache
def _reference(clip: float | None, steps: int) -> Outcome:
    run = plain(CASE.build, recipe_of(clip, steps))
    before = run.outcome()
    drive(run, CASE, steps)
    after = run.outcome()
    assert_trained(before, after)
    del run
    _release()
    return after


def budget_of(share: float, case: Case = CASE) -> int:
    """What this process holds now, room around the state, and a share of the state."""
    _release()
    state = state_bytes(case.build, recipe_of(None, 1))
    return _used() + AROUND + int(share * state)


def assert_planned(run: Managed, what: str = "") -> dict[str, Any]:
    """The plan was followed to the end, without a wait."""
    stats, info = run.engine.stats(), run.engine._runtime.core.plan_info()
    assert stats["planned"], what
    assert stats["replay_waits"] == 0, what
    assert stats["plan_breaks"] == 0, what
    run.engine._runtime.core.check()
    return info


PLANS = [
    # policy, share of the state, chunk, rates
    ("cuda", None, 8 * MIB, FAST_HOST),
    ("auto", 1.0, 4 * MIB, FAST_HOST),
    ("auto", 0.6, 8 * MIB, SLOW_HOST),
    ("auto", 0.35, 2 * MIB, SLOW_HOST),
    ("cpu", 0.35, 4 * MIB, FAST_HOST),
]


@pytest.mark.parametrize("clip", [0.35, None], ids=["deferred", "immediate"])
@pytest.mark.parametrize(("policy", "share", "chunk", "rates"), PLANS)
def test_bits_and_peak(
    policy: str,
    share: float | None,
    chunk: int,
    rates: str,
    clip: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GEMINI_RATES", rates)
    steps = STEPS[clip]
    want = _reference(clip, steps)
    budget = None if share is None else budget_of(share)
    run = managed(
        CASE.build,
        recipe_of(clip, steps),
        placement_policy=policy,
        device_budget=budget,
        chunk_size=chunk,
    )
    with contextlib.closing(run.engine):
        with _peak(0.005) as peak:
            (drive if clip is not None else drive_immediate)(run, CASE, steps)
            torch.cuda.synchronize()
        info = assert_planned(run)
        print(policy, share, info["when"], info["n_of_class"], f"{peak[0] / MIB:.0f} MiB")
        assert_same_outcome(run.outcome(), want)
        assert info["when"] == ("deferred" if clip is not None else "immediate")
        if budget is not None:
            assert peak[0] <= budget, f"{peak[0] / MIB:.0f} MiB used of {budget / MIB:.0f}"
        if policy == "cpu":
            assert info["n_of_class"]["C2"] == run.engine.stats()["chunks"]


@pytest.mark.parametrize("share", [0.6, 0.35])
@pytest.mark.parametrize("clip", [0.35, None], ids=["deferred", "immediate"])
def test_bits_at_size(share: float, clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.34 billion parameters, whose chunks are as large as the engine chooses them."""
    monkeypatch.setenv("GEMINI_RATES", SLOW_HOST)
    case, recipe = transformer(width=1536, depth=12, recompute="plain"), recipe_of(clip, FEW)
    reference = plain(case.build, recipe)
    drive(reference, case, FEW)
    want = reference.outcome()
    del reference
    budget = budget_of(share, case) + 512 * MIB  # a larger model has larger activations
    run = managed(case.build, recipe, device_budget=budget)
    with contextlib.closing(run.engine):
        (drive if clip is not None else drive_immediate)(run, case, FEW)
        assert_planned(run)
        assert_same_outcome(run.outcome(), want)


def test_every_class_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs, one after the other, until each class has been planned; the bits are those of one reference."""
    want = _reference(0.35, FEW)
    met: set[str] = set()
    for share in (0.9, 0.5, 0.2):
        for rates in (SLOW_HOST, FAST_HOST):
            monkeypatch.setenv("GEMINI_RATES", rates)
            run = managed(
                CASE.build, recipe_of(0.35, FEW), device_budget=budget_of(share), chunk_size=2 * MIB
            )
            with contextlib.closing(run.engine):
                drive(run, CASE, FEW)
                counts = assert_planned(run)["n_of_class"]
                print(share, counts)
                assert_same_outcome(run.outcome(), want)
            met |= {name for name, count in counts.items() if count}
    assert met == {"R", "S1", "S2", "C1", "C2"}


@pytest.mark.parametrize("recompute", ["plain", "reentrant"])
def test_checkpointing(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", FAST_HOST)
    case, recipe = transformer(recompute=recompute), recipe_of(0.35, FEW)
    reference = plain(case.build, recipe)
    drive(reference, case, FEW)
    run = managed(case.build, recipe, device_budget=budget_of(0.35), chunk_size=2 * MIB)
    with contextlib.closing(run.engine):
        drive(run, case, FEW)
        assert_planned(run)
        assert_same_outcome(run.outcome(), reference.outcome())


def test_evaluation_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another batch, no gradients, evaluation mode: its own trace under the same plan, and no bit of training."""
    monkeypatch.setenv("GEMINI_RATES", FAST_HOST)
    recipe = recipe_of(0.35, FEW)

    def train(run: Plain) -> list[Tensor]:
        seen = []
        for step in range(FEW):
            drive(run, CASE, 1, first=step)
            if step % 3 == 2:
                run.model.eval()
                with torch.no_grad():
                    ids = tokens(9_000 + step, sequences=2).to("cuda")
                    seen.append(loss_of(run, ids).cpu())
                run.model.train()
        return seen

    reference = plain(CASE.build, recipe)
    want = train(reference)
    run = managed(CASE.build, recipe, device_budget=budget_of(0.35), chunk_size=2 * MIB)
    with contextlib.closing(run.engine):
        got = train(run)
        stats = run.engine.stats()
        assert stats["planned"]
        assert stats["replay_waits"] == 0
        for step, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same_bits(a, b, f"evaluation {step}")
        assert_same_outcome(run.outcome(), reference.outcome())


def test_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", FAST_HOST)
    torch._dynamo.reset()

    def build() -> nn.Module:
        model = Transformer(768, 4)
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        return model

    case, recipe = Case("compiled", build, tokens, loss_of), recipe_of(0.35, FEW)
    reference = plain(build, recipe)
    drive(reference, case, FEW)
    run = managed(build, recipe, device_budget=budget_of(0.35, case), chunk_size=2 * MIB)
    with contextlib.closing(run.engine):
        drive(run, case, FEW)
        assert_planned(run)
        assert_same_outcome(run.outcome(), reference.outcome())
    torch._dynamo.reset()


def test_two_streams_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches take turns on two streams of the caller's own; only his waits order them.

    The loss of one is alive in the next, so autograd adds gradients up on the other stream, and torch keeps the memory
    of each until the step is over; and it keeps memory for each stream by itself.
    """
    monkeypatch.setenv("GEMINI_RATES", FAST_HOST)
    want = _reference(0.35, FEW)
    gradients = (
        state_bytes(CASE.build, recipe_of(None, 1)) // 3
    )  # 4 of 12 bytes: of two micro-batches
    budget = budget_of(0.35) + gradients + 256 * MIB
    run = managed(CASE.build, recipe_of(0.35, FEW), device_budget=budget, chunk_size=2 * MIB)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    main = torch.cuda.current_stream()
    with contextlib.closing(run.engine):
        for step in range(FEW):
            torch.manual_seed(1000 + step)
            for micro in range(2):
                ids = tokens(2 * step + micro).to("cuda")
                streams[micro].wait_stream(main)
                with torch.cuda.stream(streams[micro]):
                    loss = loss_of(run, ids)
                    run.losses.append(loss.detach().float().cpu().clone())
                    run.backward(loss / 2)
                main.wait_stream(streams[micro])
            run.finish()
        assert run.engine.stats()["planned"]
        assert_same_outcome(run.outcome(), want)


def test_predicted_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 5 % of what the driver counts, at a budget of half the state of 0.4 billion parameters."""
    monkeypatch.setenv("GEMINI_RATES", FAST_HOST)
    case, recipe = transformer(width=2048, depth=8, recompute="plain"), recipe_of(None, 6)
    _release()
    budget = _used() + 640 * MIB + int(0.5 * state_bytes(case.build, recipe))
    run = managed(case.build, recipe, device_budget=budget)
    with contextlib.closing(run.engine):
        drive(run, case, 4)
        with _peak() as peak:
            drive(run, case, 2, first=4)
            torch.cuda.synchronize()
        stats = run.engine.stats()
        predicted = stats["predicted_device_peak_bytes"]
        print(
            f"predicted {predicted / MIB:.0f} MiB, measured {peak[0] / MIB:.0f} of {budget / MIB:.0f}"
        )
        assert stats["planned"]
        assert peak[0] <= budget
        assert abs(predicted - peak[0]) <= 0.05 * peak[0]
