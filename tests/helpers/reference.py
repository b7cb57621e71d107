"""The unmanaged reference and the managed run, driven by the same loop so that their bits can be compared.

`Plain` is the reference: the model in ordinary torch memory, cast once with `gs.cast_model_`, updated by
`gs.HybridAdam` standing alone with its fused clip.  `Managed` is the same training under an engine.  Both
offer the same five verbs (call, backward, clip, step, zero_grad), so a test says what happens once and
runs it twice.  `Outcome` is everything that training leaves behind: weights and buffers in compute
precision, fp32 masters, moments, step counts, losses, norms and loss scales; outcomes are compared bit
for bit, and two NaNs are equal only when their bits are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import gemini_strategy as gs

__all__ = [
    "Managed",
    "Outcome",
    "Plain",
    "Recipe",
    "assert_same_bits",
    "assert_same_outcome",
    "assert_trained",
    "bits",
    "compute_dtype",
    "drive",
    "managed",
    "merge_master",
    "plain",
    "start",
    "state_bytes",
    "tightly",
    "train_managed",
    "train_plain",
]

_DTYPES = {
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype that weights have in forward and backward."""
    return _DTYPES[precision]


@dataclass(frozen=True)
class Recipe:
    """How to train: everything that both runs must agree on."""

    precision: str = "32-true"
    steps: int = 50
    clip: float | None = None
    accumulate: int = 1
    gradient_dtype: torch.dtype | None = None
    lr: float = 2e-3
    weight_decay: float = 0.02
    adamw_mode: bool = True
    bias_correction: bool = True
    groups: Callable[[nn.Module], Iterable[Any]] | None = None
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    initial_scale: float = 2.0**12
    growth_interval: int = 7
    hysteresis: int = 2
    device: str = "cpu"
    seed: int = 7


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes as integers of its element size, on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    return (
        tensor.view(_WORDS[tensor.element_size()])
        if tensor.dim()
        else tensor.reshape(1).view(_WORDS[tensor.element_size()])
    )


def merge_master(weight: Tensor, low: Tensor | None) -> Tensor:
    """The fp32 master of a weight: bits = (hi << 16) + lo for bf16, the stored master for fp16."""
    if weight.dtype == torch.bfloat16 and low is not None:
        high = weight.detach().contiguous().view(torch.int16).to(torch.int32) * 65536
        return (high + low.reshape(weight.shape).to(torch.int32)).view(torch.float32)
    if weight.dtype == torch.float16 and low is not None:
        return low.detach().reshape(weight.shape).float()
    return weight.detach().float()


@dataclass
class Outcome:
    """What training left behind."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)
    exp_avg: dict[int, Tensor] = field(default_factory=dict)
    exp_avg_sq: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: int = 0


def assert_same_bits(got: Tensor, want: Tensor, what: str = "tensor") -> None:
    """Same dtype, shape and bytes."""
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, (
        f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    )
    a, b = bits(got), bits(want)
    if not torch.equal(a, b):
        wrong = (a != b).sum().item()
        gap = (got.detach().double().cpu() - want.detach().double().cpu()).abs().max().item()
        raise AssertionError(f"{what}: {wrong} of {a.numel()} elements differ, at most by {gap:g}")


def _same_tensors(got: dict[Any, Tensor], want: dict[Any, Tensor], what: str) -> None:
    assert list(got) == list(want), f"{what}: keys {list(got)}, expected {list(want)}"
    for key in want:
        assert_same_bits(got[key], want[key], f"{what}[{key}]")


def assert_same_outcome(got: Outcome, want: Outcome) -> None:
    """Losses first, because the first loss that differs tells the step at which the runs parted."""
    assert len(got.losses) == len(want.losses)
    for step, (a, b) in enumerate(zip(got.losses, want.losses, strict=True)):
        assert_same_bits(a, b, f"loss {step}")
    assert got.scales == want.scales
    assert got.skipped == want.skipped
    assert len(got.norms) == len(want.norms)
    for step, (a, b) in enumerate(zip(got.norms, want.norms, strict=True)):
        assert_same_bits(a, b, f"norm {step}")
    _same_tensors(got.weights, want.weights, "weight")
    _same_tensors(got.masters, want.masters, "master")
    assert got.counts == want.counts
    _same_tensors(got.exp_avg, want.exp_avg, "exp_avg")
    _same_tensors(got.exp_avg_sq, want.exp_avg_sq, "exp_avg_sq")


def assert_trained(before: Outcome, after: Outcome, expected: Iterable[str] | None = None) -> None:
    """Every named master (default: all that have elements) moved and is finite."""
    names = [n for n, t in before.masters.items() if t.numel()] if expected is None else expected
    for name in names:
        moved = after.masters[name]
        assert torch.isfinite(moved).all(), f"{name} is not finite"
        assert not torch.equal(moved, before.masters[name]), f"{name} did not move"


def _cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((k, _cast_inputs(v, dtype)) for k, v in value.items())
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_cast_inputs(v, dtype) for v in value)
    return value


def _counts(state: dict[int, dict[str, Any]]) -> dict[int, int]:
    steps = {i: int(s["step"]) for i, s in sorted(state.items())}
    return {i: n for i, n in steps.items() if n}


class Plain:
    """The reference: ordinary tensors, our casts, our Adam alone."""

    engine = None

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe):
        self.model, self.optimizer, self.recipe = model, optimizer, recipe
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.scales: list[float] = []
        self.skipped = 0
        self.scheduler = recipe.schedule(optimizer) if recipe.schedule else None
        self.scaler = None
        if recipe.precision == "16-mixed":
            self.scaler = gs.LossScaler(
                initial_scale=recipe.initial_scale,
                growth_interval=recipe.growth_interval,
                hysteresis=recipe.hysteresis,
            )
        self._wide: dict[nn.Parameter, Tensor] = {}
        if recipe.gradient_dtype == torch.float32:
            for p in model.parameters():
                if p.requires_grad and p.dtype != torch.float32:
                    p.grad_dtype = None
                    p.register_post_accumulate_grad_hook(self._widen)

    def _widen(self, p: Tensor) -> None:
        wide = p.grad.float()
        p.grad = None
        self._wide[p] = self._wide[p] + wide if p in self._wide else wide

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = compute_dtype(self.recipe.precision)
        if self.recipe.precision.endswith("-mixed"):
            with torch.autocast(self.recipe.device.split(":")[0], dtype=dtype):
                return self.model(*args, **kwargs)
        if dtype != torch.float32:
            args, kwargs = _cast_inputs(args, dtype), _cast_inputs(kwargs, dtype)
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Gradients of loss times the loss scale."""
        (loss * self.scaler.scale if self.scaler else loss).backward()

    def _divisor(self) -> float:
        return self.scaler.scale if self.scaler else 1.0

    def _owned(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def finish(self) -> None:
        """Clip, step and clear; an overflow skips the update and leaves every bit as it was."""
        for p, wide in self._wide.items():
            p.grad = wide
        self._wide.clear()
        grads = [p.grad for p in self._owned() if p.grad is not None]
        overflow = self.scaler is not None and not all(torch.isfinite(g).all() for g in grads)
        if not overflow:
            divisor = self._divisor()
            if self.recipe.clip is not None:
                self.norms.append(self._clip(self.recipe.clip, divisor))
            self.optimizer.step(grad_divisor=divisor)
        self.skipped += overflow
        if self.scaler is not None:
            self.scaler.update(overflow)
            self.scales.append(self.scaler.scale)
        if self.scheduler is not None:
            self.scheduler.step()
        self.zero_grad()

    def _clip(self, max_norm: float, divisor: float) -> Tensor:
        if divisor == 1.0:
            norm = self.optimizer.clip_grad_norm_(max_norm)
        else:
            norm = self.optimizer.clip_grad_norm_(max_norm, grad_divisor=divisor)
        return torch.as_tensor(norm, dtype=torch.float32).detach().cpu().reshape(())

    def zero_grad(self) -> None:
        """Forget the gradients of the whole model."""
        self._wide.clear()
        self.model.zero_grad()
        self.optimizer.zero_grad()

    def outcome(self) -> Outcome:
        """A copy of everything, on the CPU."""
        weights = {k: v.detach().cpu().clone() for k, v in self.model.state_dict().items()}
        masters = {}
        for name, p in self.model.named_parameters():
            if not p.requires_grad:
                continue
            state = self.optimizer.state.get(p, {})
            low = state.get("remainder", state.get("master", getattr(p, "_gm_low", None)))
            low = low.cpu() if low is not None else None
            masters[name] = merge_master(p.detach().cpu(), low).clone()
        return _outcome(self, weights, masters, self.optimizer.state_dict()["state"])


class Managed(Plain):
    """The same verbs under an engine."""

    def __init__(self, engine: gs.Engine, recipe: Recipe):
        self.engine = engine
        self.model, self.optimizer, self.recipe = engine.model, engine.optimizer, recipe
        self.losses, self.norms, self.scales, self.skipped = [], [], [], 0
        self.scheduler = recipe.schedule(engine.optimizer) if recipe.schedule else None
        self.scaler = engine.scaler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def finish(self) -> None:
        before = self.engine.stats()["skipped_steps"]
        norm = None
        if self.recipe.clip is not None:
            norm = self.engine.clip_grad_norm_(self.recipe.clip)
        self.optimizer.step()
        skipped = self.engine.stats()["skipped_steps"] - before
        self.skipped += skipped
        if norm is not None and not skipped:
            assert norm.dtype == torch.float32 and norm.dim() == 0
            assert norm.device in (torch.device("cpu"), self.engine.device)
            self.norms.append(norm.clone())
        if self.scaler is not None:
            self.scales.append(self.scaler.scale)
        if self.scheduler is not None:
            self.scheduler.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def outcome(self) -> Outcome:
        weights = self.engine.model_state_dict(masters=False)
        full = self.engine.model_state_dict(masters=True)
        masters = {n: full[n] for n, p in self.model.named_parameters() if p.requires_grad}
        for name, master in masters.items():
            assert master.dtype == torch.float32, f"master of {name} is {master.dtype}"
        return _outcome(self, weights, masters, self.optimizer.state_dict()["state"])


def _outcome(
    run: Plain, weights: dict[str, Tensor], masters: dict[str, Tensor], state: dict[int, dict]
) -> Outcome:
    counts = _counts(state)
    return Outcome(
        weights={k: v.detach().cpu().clone() for k, v in weights.items()},
        masters={k: v.detach().cpu().clone() for k, v in masters.items()},
        exp_avg={i: state[i]["exp_avg"].detach().cpu().clone() for i in counts},
        exp_avg_sq={i: state[i]["exp_avg_sq"].detach().cpu().clone() for i in counts},
        counts=counts,
        losses=list(run.losses),
        norms=[norm.cpu() for norm in run.norms],
        scales=list(run.scales),
        skipped=run.skipped,
    )


def start(build: Callable[[], nn.Module], recipe: Recipe, device: str | None = None) -> nn.Module:
    """The model of seed `recipe.seed`, in train mode, on the recipe's device unless another is given."""
    torch.manual_seed(recipe.seed)
    return build().train().to(device or recipe.device)


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    groups = recipe.groups(model) if recipe.groups else model.parameters()
    return gs.HybridAdam(
        groups,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        adamw_mode=recipe.adamw_mode,
        bias_correction=recipe.bias_correction,
    )


def plain(build: Callable[[], nn.Module], recipe: Recipe) -> Plain:
    """The reference, ready to drive."""
    model = start(build, recipe)
    gs.cast_model_(model, recipe.precision)
    return Plain(model, _optimizer(model, recipe), recipe)


def managed(build: Callable[[], nn.Module], recipe: Recipe, **how: Any) -> Managed:
    """The managed run, ready to drive; the model comes from the CPU; `how` goes to `gs.manage`."""
    model = start(build, recipe, "cpu")
    engine = gs.manage(
        model,
        _optimizer(model, recipe),
        precision=recipe.precision,
        gradient_dtype=recipe.gradient_dtype,
        device=recipe.device,
        initial_scale=recipe.initial_scale,
        growth_interval=recipe.growth_interval,
        hysteresis=recipe.hysteresis,
        **how,
    )
    return Managed(engine, recipe)


def drive(run: Plain, case: Any, steps: int, first: int = 0) -> None:
    """Steps first..first+steps of a case: `case.batch(step)` and `case.loss(run, batch)`."""
    recipe = run.recipe
    for step in range(first, first + steps):
        torch.manual_seed(1000 + step)
        for micro in range(recipe.accumulate):
            batch = _to(case.batch(step * recipe.accumulate + micro), recipe.device)
            loss = case.loss(run, batch)
            run.losses.append(loss.detach().float().cpu().clone())
            run.backward(loss / recipe.accumulate)
        run.finish()


def _to(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: _to(v, device) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to(v, device) for v in value)
    return value


def train_plain(case: Any, recipe: Recipe) -> tuple[Outcome, Outcome]:
    """(before, after) of the reference run of a case."""
    run = plain(case.build, recipe)
    before = run.outcome()
    drive(run, case, recipe.steps)
    return before, run.outcome()


def train_managed(case: Any, recipe: Recipe, **how: Any) -> tuple[Outcome, dict[str, Any]]:
    """(after, engine.stats()) of the managed run of a case; the engine is closed."""
    run = managed(case.build, recipe, **how)
    with contextlib.closing(run.engine):
        drive(run, case, recipe.steps)
        return run.outcome(), run.engine.stats()


def state_bytes(build: Callable[[], nn.Module], recipe: Recipe) -> int:
    """Weights plus optimizer states in bytes, without padding: what a budget is a fraction of."""
    with torch.random.fork_rng():
        model = start(build, recipe, "cpu")
    if all(p.dtype is torch.float32 for p in model.parameters()):  # else it is built so
        gs.cast_model_(model, recipe.precision)
    per_weight = {torch.float32: 12, torch.bfloat16: 12, torch.float16: 14}
    return sum(
        p.numel() * (per_weight[p.dtype] if p.requires_grad else p.element_size())
        for p in model.parameters()
    )


def tightly(
    build: Callable[[], nn.Module], recipe: Recipe, floor: float = 0.1, **how: Any
) -> Managed:
    """The managed run under the smallest budget, in steps of a quarter, that the engine accepts."""
    whole = state_bytes(build, recipe)
    fraction = floor
    while True:
        try:
            return managed(build, recipe, device_budget=int(whole * fraction) + 4096, **how)
        except gs.GeminiMemoryError:
            if fraction > 2.0:
                raise
            fraction *= 1.25
