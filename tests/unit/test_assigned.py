"""What is assigned to weights, gradients and moments is copied: all short programs give torch's bits, or a refusal.

The reference is the same program on an unmanaged model.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini_strategy as gs
from helpers.ranks import run_ranks, values

EVERY = 1 if os.environ.get("ASSIGNED") == "all" else 131  # of the programs of three operations
SLICES = 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Program:
    """A model of two weights `a` and `b`, a tensor `q` that may be assigned, and a state dict."""

    def __init__(self, device: str, is_managed: bool) -> None:
        torch.manual_seed(3)
        self.device = device
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(device)
        self.a, self.b = self.model[0].weight, self.model[2].weight
        self.x = torch.randn(5, 3).to(device)
        self.q, self.z = self.full(0.1), self.full(0.4)
        self.optimizer = gs.HybridAdam(self.model.parameters(), lr=1e-2)
        self.engine = None
        if is_managed:
            self.engine = gs.manage(
                self.model,
                self.optimizer,
                device_budget="1MB" if device == "cpu" else None,
                device=device,
                precision="32-true",
            )
        self.state = self.model.state_dict()

    def full(self, value: float) -> Tensor:
        return torch.full((3, 3), value, device=self.device)

    def backward(self) -> None:
        self.model(self.x).square().sum().backward()

    def swap(self, key: str) -> None:
        one, other = getattr(self.a, key), getattr(self.b, key)
        setattr(self.a, key, other)
        setattr(self.b, key, one)

    def assign_moment(self) -> None:
        if len(self.optimizer.state[self.a]):
            self.optimizer.state[self.a]["exp_avg"] = self.q

    def shown(self) -> list[Tensor | None]:
        parameters = list(self.model.parameters())
        grads = [None if p.grad is None else p.grad.clone() for p in parameters]
        entries = [self.state[key].clone() for key in ("0.weight", "2.weight")]
        return [p.detach().clone() for p in parameters] + grads + entries


def _if_grad(act: Callable[[Tensor], Any]) -> Callable[[Program], Any]:
    return lambda p: None if p.a.grad is None else act(p.a.grad)


ACTS: dict[str, Callable[[Program], Any]] = {
    "backward": Program.backward,
    "step": lambda p: p.optimizer.step(),
    "zero": lambda p: p.optimizer.zero_grad(set_to_none=False),
    "drop": lambda p: p.optimizer.zero_grad(),
    "clip": lambda p: p.optimizer.clip_grad_norm_(0.1),
    "grad = q": lambda p: setattr(p.a, "grad", p.q),
    "grad.data = q": lambda p: _if_grad(lambda g: setattr(g, "data", p.q))(p),
    "grad *=": _if_grad(lambda g: g.mul_(2.0)),
    "swap grads": lambda p: p.swap("grad"),
    "q.data = z": lambda p: setattr(p.q, "data", p.z),
    "q *=": lambda p: p.q.mul_(0.5),
    "q.data *=": lambda p: p.q.data.mul_(0.5),
    "q.numpy() *=": lambda p: p.q.numpy().__imul__(2.0),
    "q = another": lambda p: setattr(p, "q", p.full(0.2)),
    "data = q": lambda p: setattr(p.a, "data", p.q),
    "data = clone": lambda p: setattr(p.a, "data", p.q.clone()),
    "data = data": lambda p: setattr(p.a, "data", p.a.data),
    "swap data": lambda p: p.swap("data"),
    "data *=": lambda p: p.a.data.mul_(0.9),
    "foreach": lambda p: torch._foreach_mul_([p.a.data, p.b.data], 0.9),
    "moment = q": Program.assign_moment,
    "state dict": lambda p: setattr(p, "state", p.model.state_dict()),
    "load": lambda p: p.model.load_state_dict(p.state),
    "entry's row": lambda p: p.state["0.weight"][0].fill_(0.3),
}


def _outcome(
    acts: tuple[str, ...], device: str, is_managed: bool
) -> list[Tensor | None] | Exception:
    program = Program(device, is_managed)
    try:
        for act in ("backward", "step", *acts, "backward", "step"):
            ACTS[act](program)
        seen = program.shown()
        if program.engine is not None:
            program.engine.close()
        return [None if t is None else t.cpu() for t in (*seen, *program.model.parameters())]
    except Exception as error:
        return error
    finally:
        while program.engine is not None and not program.engine.closed:
            with contextlib.suppress(gs.GeminiError):  # each write is refused once
                program.engine.close()


def _wrong(acts: tuple[str, ...], device: str) -> str | None:
    want, got = (_outcome(acts, device, is_managed) for is_managed in (False, True))
    if isinstance(want, Exception):
        return None  # no program
    if isinstance(got, gs.GeminiError):
        named = ("0.weight", "2.weight", "0.bias", "2.bias")
        return None if any(name in str(got) for name in named) else f"{acts}: {got!r}"
    if isinstance(got, Exception):
        return f"{acts}: {got!r}"
    pairs = zip(got, want, strict=True)
    same = [(a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs]
    return None if all(same) else f"{acts}: {[i for i, is_same in enumerate(same) if not is_same]}"


@pytest.mark.parametrize("part", range(SLICES))
@pytest.mark.parametrize("device", DEVICES)
def test_all_programs_of_two_operations(device: str, part: int) -> None:
    programs = list(itertools.product(ACTS, repeat=2))[part::SLICES]
    assert [wrong for acts in programs if (wrong := _wrong(acts, device))] == []


@pytest.mark.parametrize("part", range(SLICES))
def test_programs_of_three_operations(part: int) -> None:
    programs = list(itertools.product(ACTS, repeat=3))[part * EVERY // SLICES :: EVERY]
    programs = programs[part::SLICES] if EVERY == 1 else programs[::SLICES]
    assert [wrong for acts in programs if (wrong := _wrong(acts, "cpu"))] == []


# ---- between a forward and its backward ----------------------------------------------------------


def _averaged(is_managed: bool, precision: str = "32-true") -> list[Tensor]:
    """Another set of weights is assigned between a forward and its backward, and taken back before, or after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    engine = None
    if is_managed:
        engine = gs.manage(model, optimizer, device_budget="1MB", device="cpu", precision=precision)
    x, seen = torch.randn(5, 4, requires_grad=True), []
    average = [torch.randn(p.shape) for p in model.parameters()]
    version = model[0].weight._version
    for is_back_before in (True, False):
        loss = model(x).square().sum()
        before = [p.data.clone() for p in model.parameters()]
        for p, values_of_it in zip(model.parameters(), average, strict=True):
            p.data = values_of_it
        seen.append(model(x).detach().clone())
        for p, values_of_it in (
            zip(model.parameters(), before, strict=True) if is_back_before else ()
        ):
            p.data = values_of_it
        loss.backward()
        seen += [p.grad.clone() for p in model.parameters()] + [x.grad.clone()]
        for p, values_of_it in zip(model.parameters(), before, strict=True):
            p.data = values_of_it
    seen.append(torch.tensor(model[0].weight._version - version))
    optimizer.step()
    seen += [p.detach().clone() for p in model.parameters()]
    if engine is not None:
        engine.close()
    return seen


def test_weights_assigned_between_a_forward_and_its_backward() -> None:
    """A view that autograd has saved keeps its values, and no version counts an assignment, as in torch."""
    want, got = _averaged(is_managed=False), _averaged(is_managed=True)
    assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * len(want)


# ---- who has what was assigned -------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("is_again", [False, True])
def test_gradients_that_were_there_are_added_to(is_again: bool, precision: str) -> None:
    """Those that `manage()` finds are the model's alone: of a backward before it, or of another engine."""

    def run(is_managed: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = gs.cast_model_(
            nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), precision
        )
        optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
        x, engine = torch.randn(5, 3, dtype=model[0].weight.dtype), None
        how = {"device_budget": "1MB", "device": "cpu", "precision": precision}
        if is_managed and is_again:
            engine = gs.manage(model, optimizer, **how)
        model(x).square().sum().backward()
        if engine is not None:
            engine.close()
        if is_managed:
            engine = gs.manage(model, optimizer, **how)
        model(x).square().sum().backward()
        seen = [p.grad.clone() for p in model.parameters()]
        if engine is not None:
            engine.close()
        return seen

    want, got = run(is_managed=False), run(is_managed=True)
    assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * len(want)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_gradient_whose_storage_a_program_has_looked_at(is_kept: bool) -> None:
    """What it no longer has it cannot write; a storage that it still has, it can."""
    model = nn.Linear(3, 3)
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    engine = gs.manage(model, optimizer, device_budget="1MB", device="cpu", precision="32-true")
    given = torch.full((3, 3), 0.5)
    storage = given.untyped_storage()
    model.weight.grad = given
    del given
    if is_kept:
        with pytest.raises(gs.GeminiError, match="weight: a gradient arrives"):
            model(torch.ones(2, 3)).sum().backward()
    del storage
    model.zero_grad()
    model.weight.grad = torch.full((3, 3), 0.5)
    model.weight.grad.untyped_storage().nbytes()
    model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(model.weight.grad.clone(), torch.full((3, 3), 2.5))
    given = torch.full((3, 3), 0.5)
    given.untyped_storage().nbytes()
    model.weight.grad = given
    del given
    model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(model.weight.grad.clone(), torch.full((3, 3), 2.5))
    engine.close()


@pytest.mark.parametrize("kind", [gs.HybridAdam, torch.optim.AdamW])
@pytest.mark.parametrize("is_before", [True, False])
def test_a_gradient_of_what_is_frozen_is_refused_by_the_step(is_before: bool, kind: Any) -> None:
    """torch's optimizers step a frozen parameter that has one, and the engine has no place for its states."""
    torch.manual_seed(3)
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(5, 3)
    plain = copy.deepcopy(model)
    optimizers = [
        each(of.parameters(), lr=1e-2, weight_decay=0.1)
        for each, of in ((gs.HybridAdam, plain), (kind, model))
    ]
    weight = model[0].weight.requires_grad_(False)
    plain[0].weight.requires_grad_(False)
    if is_before:
        weight.grad = torch.ones(3, 3)
    engine = gs.manage(model, optimizers[1], device_budget="1MB", device="cpu", precision="32-true")
    if not is_before:
        weight.grad = torch.ones(3, 3)
    for set_to_none in (False, True):
        for each in (plain, model):
            each(x).square().sum().backward()
        for refused in (optimizers[1].step, lambda: engine.clip_grad_norm_(1.0)):
            with pytest.raises(gs.GeminiError, match=r"0\.weight was frozen .* drop its gradient"):
                refused()
        optimizers[1].zero_grad(set_to_none)
        optimizers[0].zero_grad(set_to_none)
        assert (weight.grad is None) is set_to_none
        assert weight.grad is None or not weight.grad.any()
    for optimizer, each in zip(optimizers, (plain, model), strict=True):
        each(x).square().sum().backward()
        optimizer.step()
    engine.close()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


# ---- versions ------------------------------------------------------------------------------------

IN_PLACE = sorted(
    name
    for name in dir(torch)
    if name.startswith("_foreach_") and name.endswith("_") and name not in ("_foreach_copy_",)
)


def _operands(name: str, one: list[Tensor]) -> tuple[Any, ...]:
    ones = [torch.ones_like(t) for t in one]
    if name in ("_foreach_addcdiv_", "_foreach_addcmul_"):
        return ones, ones, torch.tensor([1.0, 2.0])
    if name in ("_foreach_lerp_",):
        return ones, 0.5
    binary = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_max", "clamp_min")
    return (2.0,) if name.removeprefix("_foreach_")[:-1] in binary else ()


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operations_over_lists_count_a_version(name: str) -> None:
    def counts(is_managed: bool) -> list[Any]:
        torch.manual_seed(1)
        model = nn.Linear(4, 4)
        with torch.no_grad():
            for p in model.parameters():
                p.abs_().add_(0.5)
        if is_managed:
            engine = gs.manage(model, device_budget="1MB", device="cpu", precision="32-true")
        weights = [model.weight, model.bias]
        before = [w._version for w in weights]
        with torch.no_grad():
            getattr(torch, name)(weights, *_operands(name, [w.detach().clone() for w in weights]))
        counted = [w._version > n for w, n in zip(weights, before, strict=True)]
        seen = [w.detach().clone() for w in weights]
        if is_managed:
            engine.close()
        return [counted, *[t.numpy().tobytes() for t in seen]]

    assert counts(is_managed=True) == counts(is_managed=False)


def test_backward_after_an_in_place_operation_over_lists_is_refused_as_in_torch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = gs.manage(model, device_budget="1MB", device="cpu", precision="32-true")
    loss = model(torch.randn(2, 4, requires_grad=True)).sum()
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    engine.close()


# ---- state dicts ---------------------------------------------------------------------------------

UNCOUNTED: dict[str, Callable[[nn.Linear], Any]] = {
    "data": lambda m: m.weight.data.clamp_(-0.1, 0.1),
    "foreach": lambda m: torch._foreach_mul_([m.weight.data, m.bias.data], 2.0),
    "out": lambda m: torch.mul(m.weight.data, 2.0, out=m.weight.data),
    "storage": lambda m: torch.empty(0).set_(m.weight.detach().untyped_storage()).mul_(2.0),
    "in its unit": lambda m: _in_unit(m, lambda: m.weight.data.mul_(2.0)),
    "by numpy, in its unit": lambda m: _in_unit(m, lambda: _halve(m.weight.data)),
}


def _halve(values: Tensor) -> None:
    """By taking one from the exponents: NumPy has no bf16."""
    bits = values.view(torch.int16 if values.dtype is torch.bfloat16 else torch.int32).numpy()
    bits -= 1 << (7 if values.dtype is torch.bfloat16 else 23)


def _in_unit(module: nn.Linear, act: Callable[[], Any]) -> None:
    handle = module.register_forward_pre_hook(lambda *_: (act(), None)[1])
    with torch.no_grad():
        module(torch.zeros(1, 4, dtype=module.weight.dtype))
    handle.remove()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("how", UNCOUNTED)
def test_a_kept_state_dict_follows_writes_that_no_version_counts(how: str, precision: str) -> None:
    """And a write to one of its rows leaves the others what they are."""
    torch.manual_seed(2)
    model = nn.Linear(4, 4)
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    plain = copy.deepcopy(model)
    for each in (plain, model):  # of one that came in fp32 the entries are the masters
        gs.cast_model_(each, precision)
    engine = gs.manage(model, optimizer, device_budget="1MB", device="cpu", precision=precision)
    kept, want = model.state_dict(), plain.state_dict()
    UNCOUNTED[how](model)
    UNCOUNTED[how](plain)
    assert torch.equal(kept["weight"].clone(), want["weight"])
    kept["weight"][0].fill_(7.0)
    want["weight"][0].fill_(7.0)
    assert torch.equal(model.weight.detach().clone(), plain.weight.detach())
    engine.close()


def _stale(rank: int, size: int, how: str) -> list[str]:
    torch.manual_seed(2)
    model = nn.Linear(4, 4)
    engine = gs.manage(model, device_budget="1MB", device="cpu", precision="32-true")
    kept = model.state_dict()
    UNCOUNTED[how](model)
    try:
        kept["weight"].clone()
        text = ""
    except gs.GeminiError as error:
        text = str(error)
    engine.close()
    return [text]


@pytest.mark.parametrize("how", ["data", "foreach", "out"])
def test_a_kept_state_dict_of_two_ranks_has_ended_then(how: str, tmp_path: Path) -> None:
    for texts in values(run_ranks(2, tmp_path, _stale, how)):
        assert "weight: this entry of a state dict shows the weight as it was" in texts[0]


# ---- conjugates and negatives --------------------------------------------------------------------


class Spectral(nn.Module):
    """A layer whose weights are complex numbers in real memory."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        w, v = torch.view_as_complex(self.p).conj(), torch.view_as_complex(self.q)
        return (x * w * v * w.imag).abs().square().sum() + (w.imag * v.conj().imag).sum()


@pytest.mark.parametrize("is_inside", [True, False])
def test_conjugate_views_of_real_weights(is_inside: bool) -> None:
    """In its unit a saved view keeps its bits; outside a view of an absent tensor does."""
    torch.manual_seed(0)
    plain = Spectral()
    model, x = copy.deepcopy(plain), torch.randn(8, dtype=torch.complex64)
    engine = gs.manage(
        model,
        gs.HybridAdam(model.parameters(), lr=1e-2),
        device_budget="1MB",
        device="cpu",
        precision="32-true",
    )
    for each in (plain, model):
        (each(x) if is_inside else Spectral.forward(each, x)).backward()
    for name in ("p", "q"):
        assert torch.equal(getattr(model, name).grad.clone(), getattr(plain, name).grad)
    engine.close()
