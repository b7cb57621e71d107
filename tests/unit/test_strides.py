"""Parameters whose elements lie in memory in another order than row by row keep that order, and with it the kernels
and the bits of the unmanaged run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini_strategy as gs
from helpers.pairs import pairs
from helpers.ranks import run_ranks, values
from helpers.reference import (
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    assert_trained,
    drive,
    managed,
    plain,
)
from helpers.zoo import Case


class Transposed(nn.Module):
    """Linear layers of odd sizes whose weights were made as transposes, and a product with a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(129, 257), nn.Linear(257, 129)
        self.tied = nn.Linear(129, 257)
        for layer in (self.up, self.down, self.tied):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        self.tied.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.tanh(self.up(x)))
        return self.tied(torch.tanh(x)) + x @ self.up.weight.t()


class Images(nn.Module):
    """Convolutions in channels_last, one of them by one pixel, one with groups."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 1),
            nn.Conv2d(12, 12, 3, groups=4),
        )
        self.head = nn.Linear(12, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x.contiguous(memory_format=torch.channels_last))
        return self.head(x.mean((2, 3)))


class Odd(nn.Module):
    """Dimensions of one element with strides of their own, no elements at all, and a permutation of three."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.randn(7).as_strided((7, 1), (1, 5)))
        self.empty = nn.Parameter(torch.empty(4, 0).t())
        self.cube = nn.Parameter(torch.randn(3, 5, 7).permute(2, 0, 1))
        self.frozen = nn.Parameter(torch.randn(7, 5).t(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bi,ijk->bk", x, self.cube) @ self.frozen
        return y * self.single.t() + self.empty.sum()


def _vectors(width: int) -> Any:
    def batch(step: int) -> Tensor:
        return torch.randn(4, width, generator=torch.Generator().manual_seed(step))

    return batch


def _images(step: int) -> Tensor:
    return torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(step))


def _loss(run: Any, batch: Tensor) -> Tensor:
    return run(batch).float().square().mean()


CASES = {
    "transposed": Case("transposed", Transposed, _vectors(129), _loss),
    "channels_last": Case("channels_last", Images, _images, _loss),
    "odd": Case("odd", Odd, _vectors(7), _loss),
}
_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def _strides(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: p.stride() for name, p in model.named_parameters()}


@pairs(
    case=list(CASES.values()),
    precision=["32-true", "bf16-mixed", "16-mixed"],
    policy=["cpu", "auto"],
)
def test_bits_and_strides(case: Case, precision: str, policy: str) -> None:
    recipe = Recipe(precision=precision, clip=0.5, accumulate=2, steps=4)
    reference = plain(case.build, recipe)
    strides = _strides(reference.model)
    before = reference.outcome()
    run = managed(case.build, recipe, placement_policy=policy, chunk_size=4096)
    assert _strides(run.model) == strides
    for which in (run, reference):
        drive(which, case, 4)
    assert_same_outcome(run.outcome(), reference.outcome())
    assert_trained(before, run.outcome())
    assert {k: v.stride() for k, v in run.model.state_dict().items() if k in strides} == strides
    states = run.optimizer.state_dict()["state"]
    for number, p in enumerate(run.model.parameters()):
        if p.requires_grad and p.numel():
            assert states[number]["exp_avg"].stride() == p.stride()
            assert states[number]["exp_avg_sq"].stride() == p.stride()
    run.engine.close()
    assert _strides(run.model) == strides
    masters = reference.outcome().masters  # the model came in fp32
    for name, p in reference.model.named_parameters():
        got = run.model.get_parameter(name).detach()
        want = masters.get(name, p.detach())
        assert_same_bits(got if name in masters else got.to(p.dtype), want, name)


@_case
def test_gradients_show_the_strides_of_their_parameter(case: Case) -> None:
    def grads(run: Plain) -> list[Tensor]:
        run.backward(case.loss(run, case.batch(0)))
        return [p.grad for p in run.model.parameters() if p.requires_grad]

    run = managed(case.build, Recipe(), placement_policy="cpu", chunk_size=4096)
    reference = plain(case.build, Recipe())
    for shown, own in zip(grads(run), grads(reference), strict=True):
        sizes = zip(shown.stride(), own.stride(), own.shape, strict=True)
        assert all(a == b for a, b, size in sizes if size > 1 and own.numel())
        assert_same_bits(shown.clone(), own)
        shown.copy_(torch.arange(own.numel()).reshape(own.shape))
        own.copy_(torch.arange(own.numel()).reshape(own.shape))
        assert_same_bits(shown.clone(), own)
    run.model.zero_grad(set_to_none=False)
    run.engine.close()


def test_a_gradient_in_another_order_is_brought_into_the_parameters() -> None:
    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return grad @ w, (grad.t() @ x).contiguous()

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Turned.apply(x, self.weight) + self.bias

    def build() -> nn.Module:
        model = Model(6, 10)
        model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
        return model

    case = Case("turned", build, _vectors(6), _loss)
    run = managed(build, Recipe(), placement_policy="cpu")
    reference = plain(build, Recipe())
    for which in (run, reference):
        drive(which, case, 3)
    assert_same_outcome(run.outcome(), reference.outcome())
    run.engine.close()


@_case
def test_save_and_load(case: Case) -> None:
    recipe = Recipe(precision="bf16-mixed")
    reference, run = plain(case.build, recipe), managed(case.build, recipe, chunk_size=4096)
    drive(run, case, 2)
    saved = run.engine.state_dict()
    run.engine.close()
    again = managed(case.build, recipe, chunk_size=4096, placement_policy="cpu")
    again.engine.load_state_dict(
        {
            **saved,
            "model": {key: value.contiguous() for key, value in saved["model"].items()},
        }
    )
    drive(reference, case, 4)
    drive(again, case, 2, first=2)
    got, want = again.outcome(), reference.outcome()
    got.losses, want.losses = got.losses, want.losses[2:]
    assert_same_outcome(got, want)
    for p in again.model.parameters():
        with again.engine.full_parameter(p) as values:
            assert values.stride() == p.stride()
            values.fill_(0.5)
        assert bool((p == 0.5).all())
    again.engine.close()


@_case
def test_weights_from_files_on_the_meta_device(case: Case, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(7)
    model = case.build()
    # Files have no strides, and names of one tensor once.
    save_file(
        {k: v.contiguous().clone() for k, v in model.state_dict().items()},
        str(tmp_path / "model.safetensors"),
    )
    with torch.device("meta"):
        blank = case.build()
    strides = _strides(blank)
    assert strides == _strides(model)
    engine = gs.manage(
        blank,
        torch.optim.AdamW(blank.parameters()),
        weights=tmp_path / "model.safetensors",
        device="cpu",
        chunk_size=4096,
    )
    assert _strides(blank) == strides
    engine.close()
    assert _strides(blank) == strides
    for (name, a), b in zip(blank.named_parameters(), model.parameters(), strict=True):
        assert_same_bits(a.detach(), b.detach(), name)


def test_initial_values_on_the_meta_device() -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)

    with torch.device("meta"):
        blank = build()
    torch.manual_seed(3)
    engine = gs.manage(blank, torch.optim.AdamW(blank.parameters()), device="cpu")
    assert blank.weight.stride() == build().weight.stride()
    assert_same_bits(blank.weight.clone(), build().weight.detach())
    engine.close()


def _train(rank: int, size: int, name: str) -> Any:
    recipe = Recipe(precision="bf16-mixed", clip=0.5)
    run = managed(CASES[name].build, recipe, chunk_size=4096)
    drive(run, CASES[name], 3)
    outcome = run.outcome()
    outcome.losses.clear()
    run.engine.close()
    return outcome, _strides(run.model), [p.detach() for p in run.model.parameters()]


@_case
def test_two_ranks(case: Case, tmp_path: Path) -> None:
    reference = plain(case.build, Recipe(precision="bf16-mixed", clip=0.5))
    strides = _strides(reference.model)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks.py does
    try:
        drive(reference, case, 3)
    finally:
        torch.set_num_threads(threads)
    want = reference.outcome()
    want.losses.clear()
    for outcome, own, weights in values(run_ranks(2, tmp_path, _train, case.name)):
        assert_same_outcome(outcome, want)
        assert own == strides
        for a, (name, p) in zip(weights, reference.model.named_parameters(), strict=True):
            same = want.masters.get(name, p.detach())  # it came in fp32
            assert_same_bits(a if name in want.masters else a.to(p.dtype), same, name)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: setattr(model[1].weight, "data", model[1].weight.data.t()),
    ],
    ids=["memory_format", "transposed"],
)
def test_another_order_is_refused(change: Callable[[nn.Module], Any]) -> None:
    """Kernels choose by it, so the weights would not have the bits of the unmanaged run."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(6, 6))
    engine = gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu")
    with pytest.raises(gs.GeminiError, match=r"[01]\.weight: its elements keep the order"):
        change(model)
    model[1].weight.data = torch.ones(12, 6)[::2].clone()
    model[1].weight.data.copy_(model[1].weight.data.t().clone())
    engine.close()


def _differ(rank: int, size: int) -> str:
    model = nn.Linear(4, 6)
    if rank:
        model.weight.data = model.weight.data.t().contiguous().t()
    with pytest.raises(gs.GeminiError) as error:
        gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu")
    return str(error.value)


def test_ranks_agree_on_strides(tmp_path: Path) -> None:
    for text in values(run_ranks(2, tmp_path, _differ)):
        assert "weight" in text and "strides (1, 6)" in text and "rank 1" in text, text


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(6, 8)[:, ::2],
        lambda: torch.randn(1, 4).expand(6, 4),
        lambda: torch.randn(40).as_strided((6, 4), (1, 1)),
        lambda: torch.empty(6, 8, device="meta")[:, ::2],
    ],
    ids=["gaps", "expanded", "overlapping", "meta"],
)
def test_elements_without_memory_of_their_own_are_refused(make: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 6))
    model[0].weight = nn.Parameter(make())
    with pytest.raises(gs.GeminiError, match=r"0\.weight .*strides .*contiguous\(\)"):
        gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu")
    assert type(model[0].weight) is nn.Parameter
    with contextlib.suppress(NotImplementedError):  # meta stays so
        model[0].weight.data = model[0].weight.data.contiguous()
