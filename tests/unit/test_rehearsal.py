"""Optimizers of any class: equal bits show whether they treat each parameter by itself, and nothing is left behind."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes as bnb
import numpy as np
import pytest
import torch
import torchao.optim
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from transformers.optimization import Adafactor

from gemini_strategy import GeminiError
from gemini_strategy.optim import opaque, overrides
from gemini_strategy.optim.parts import Own, run, stand_in
from gemini_strategy.optim.rehearsal import Rehearsed, rehearse, states_like

ELEMENT, WHOLE = Rehearsed(False, "element"), Rehearsed(False, "whole")
CPU = torch.device("cpu")


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(shape, generator=source) for shape in shapes or [(9,), (33, 17), (128, 96)]
    ]
    return [nn.Parameter(tensor.to(dtype)) for tensor in drawn]


# ---- optimizers like those that people have ----


class Plain(Optimizer):
    """w -= lr * g, by a method that others change."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.update(group, p, p.grad, self.state[p]), alpha=group["lr"])
        return loss

    def begin(self) -> None:
        pass

    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        return grad


class GlobalNorm(Plain):
    def begin(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        self.norm = torch.stack([g.norm() for g in grads if g is not None]).norm()

    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        return grad / self.norm


class InGroup(Plain):
    """A count in the group, as schedule-free has it."""

    def begin(self) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1

    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        state.setdefault("m", torch.zeros_like(p)).lerp_(grad, 1 / group["k"])
        return state["m"]


class OnItself(Plain):
    """The same in an attribute, which is a tensor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.clock = {"k": torch.tensor(0.0)}

    def begin(self) -> None:
        self.clock["k"] += 1

    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        return grad / self.clock["k"]


class CountsParameters(Plain):
    def begin(self) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + len(group["params"])


class Blockwise(Plain):
    """A moment in 8 bits per block of 256, by a table that all parameters share."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tables: dict[str, torch.Tensor] = {}
        self.initialized = False

    def begin(self) -> None:
        self.initialized = True

    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        n = p.numel()
        blocks = -(-n // 256)
        if not state:
            self.tables.setdefault("linear", torch.linspace(-1, 1, 256))
            state.update(step=0, codes=torch.full_like(p, 127, dtype=torch.uint8))
            state.update(table=self.tables["linear"], most=torch.zeros(blocks))
        state["step"] += 1
        m = state["table"][state["codes"].long()].flatten()
        m = nn.functional.pad(m, (0, blocks * 256 - n)).view(blocks, 256) * state["most"][:, None]
        m = (m.flatten()[:n].view_as(p) + grad) / 2
        padded = nn.functional.pad(m.flatten(), (0, blocks * 256 - n)).view(blocks, 256)
        state["most"].copy_(padded.abs().amax(1).clamp_min(1e-12))
        scaled = padded / state["most"][:, None]
        codes = ((scaled + 1) * 127.5).round().to(torch.uint8).flatten()[:n]
        state["codes"].copy_(codes.view_as(p))
        return m


class RowFactored(Plain):
    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        if p.dim() < 2:
            return grad
        row = state.setdefault("row", torch.zeros_like(p[..., 0]))
        column = state.setdefault("column", torch.zeros_like(p[0]))
        row.lerp_(grad.square().mean(-1), 0.1)
        column.lerp_(grad.square().mean(0), 0.1)
        return grad / (row.unsqueeze(-1) * column).sqrt().add(1e-8)


class RowNorm(Plain):
    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        return grad / (grad.norm(dim=-1, keepdim=True) + 1e-8)


class Preconditioned(Plain):
    """A state that grows with the square of a dimension: that of flat pieces would be huge."""

    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        assert p.dim() == 0 or p.shape[0] <= 512
        rows = grad.reshape(p.shape[0] if p.dim() else 1, -1)
        state.setdefault("q", torch.zeros(len(rows), len(rows))).addmm_(rows, rows.T)
        return (state["q"] @ rows).view_as(p)


class Coded(torch.Tensor):
    """Codes and a scale, that are a tensor to others."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Coded:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Coded:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class WithSubclass(Plain):
    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        if "m" not in state:
            codes = torch.zeros_like(p, dtype=torch.int8)
            state["m"] = Coded(codes, torch.zeros(p.shape[:-1] or (1,)))
        m = state["m"]
        scale = m.scale.unsqueeze(-1) if p.dim() > 1 else m.scale
        value = (m.codes * scale + grad) / 2
        m.scale.copy_(value.abs().amax(-1) / 127)
        scale = m.scale.unsqueeze(-1) if p.dim() > 1 else m.scale
        m.codes.copy_((value / scale).round())
        return value


class Drawing(Plain):
    draw: Callable[[], Any] = staticmethod(lambda: torch.rand(()))

    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        return grad * float(self.draw())


class DrawsOfItsOwn(Plain):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.source = torch.Generator().manual_seed(3)

    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        return grad * torch.rand((), generator=self.source)


class NeedsClosure(Plain):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


class AssertsClosure(Plain):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "sharpness needs a closure"


class Raises(Plain):
    def begin(self) -> None:
        raise ValueError("not today")


class Slow(Plain):
    """Keeps parameters of its own, as wrappers of optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"])


class ByName(Plain):
    def begin(self) -> None:
        self.state["k"] = self.state.get("k", 0) + 1


class Moves(Plain):
    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        p.data = p.data.clone()
        return grad


class Views(Plain):
    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        state["fast"] = p.data
        return grad


class Grows(Plain):
    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        state["history"] = torch.cat([state.get("history", grad.flatten()[:0]), grad.flatten()])
        return grad


class InClass(Plain):
    steps = 0
    seen: list[int] = []  # noqa: RUF012

    def begin(self) -> None:
        type(self).steps += 1
        self.seen.append(1)


class NotANumber(Plain):
    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        return grad * float("nan")


class Trust(Plain):
    """The norm of the weights decides how long a step is: what no learning rate of 0 shows."""

    def begin(self) -> None:
        weights = [p for group in self.param_groups for p in group["params"]]
        self.norm = torch.stack([p.norm() for p in weights]).norm()

    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        return grad * self.norm


class Derived(Plain):
    """Its step calls the one of a class that has hooks of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


# ---- torch's own ----

TORCH = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
)
NOT_BY_ELEMENT = {"Adafactor": "whole", "Muon": "whole"}
REFUSED = {"LBFGS": "step.. of LBFGS needs 'closure'", "SparseAdam": "SparseAdam.*dense gradients"}


def torchs(name: str, given: list[nn.Parameter], **options: Any) -> Optimizer:
    if name == "SGD":
        options.setdefault("momentum", 0.9)
    given = [p for p in given if name != "Muon" or p.dim() == 2]
    return getattr(torch.optim, name)(given, lr=1e-3, **options)


def test_all_of_torchs_are_known() -> None:
    assert {"Adam", "SGD", *NOT_BY_ELEMENT, *REFUSED} <= {*TORCH} and len(TORCH) >= 15


@pytest.mark.parametrize("name", TORCH)
def test_torchs_optimizers(name: str) -> None:
    optimizer = torchs(name, parameters((), (1,), (9,), (128, 192), (4, 3, 3, 3)))
    if name in REFUSED:
        with pytest.raises(GeminiError, match=REFUSED[name]):
            rehearse(optimizer)
        return
    assert rehearse(optimizer) == Rehearsed(False, NOT_BY_ELEMENT.get(name, "element"))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_are_those_of_the_optimizer(dtype: torch.dtype) -> None:
    given = parameters(dtype=dtype)
    assert rehearse(torch.optim.AdamW(given)) == ELEMENT
    with pytest.raises(GeminiError, match=f"shape .5, 3. in {dtype}|shape .7,. in {dtype}"):
        rehearse(GlobalNorm(given))


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"amsgrad": True}, {"maximize": True}], ids=str
)
def test_options_of_groups(options: dict[str, Any]) -> None:
    given = parameters()
    groups = [{"params": given[:1]}, {"params": given[1:], "weight_decay": 0.3, **options}]
    assert rehearse(torch.optim.AdamW(groups)) == ELEMENT


def test_fused_kernels_may_see_where_a_tensor_ends() -> None:
    found = rehearse(torch.optim.AdamW(parameters(), fused=True))
    assert not found.writes_itself and found.cut in ("element", "block") and found.block <= 64


def test_strides_are_those_of_the_optimizer() -> None:
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    assert rehearse(torch.optim.SGD(convolution.parameters(), momentum=0.9)) == ELEMENT
    with pytest.raises(GeminiError, match="AdamW8bit gives a parameter other memory.*contiguous"):
        rehearse(bnb.optim.AdamW8bit(convolution.parameters()))


def test_an_optimizer_that_has_stepped_and_one_without_parameters() -> None:
    given = parameters()
    optimizer = torch.optim.Adam(given)
    for p in given:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert rehearse(optimizer) == ELEMENT
    assert rehearse(torch.optim.Adam([{"params": []}])) == WHOLE


# ---- all others ----


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Plain, ELEMENT),
        (Derived, ELEMENT),
        (InGroup, Rehearsed(True, "element")),
        (OnItself, Rehearsed(True, "element")),
        (Blockwise, Rehearsed(False, "block", 256)),
        (RowFactored, WHOLE),
        (RowNorm, Rehearsed(False, "row")),
        (Preconditioned, WHOLE),
        (WithSubclass, Rehearsed(False, "row")),
        (InClass, ELEMENT),
    ],
)
def test_what_a_rehearsal_finds(kind: Any, found: Rehearsed) -> None:
    assert rehearse(kind(parameters())) == found


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            GlobalNorm,
            r"GlobalNorm does not .* apart .*the weight differs by \d.*AdamW, or train without",
        ),
        (Trust, "Trust does not .* the weight differs by"),
        (
            CountsParameters,
            "CountsParameters does not .*param_groups 0.k differs by",
        ),
        (NeedsClosure, "NeedsClosure needs 'closure'"),
        (AssertsClosure, "AssertsClosure.*AssertionError: sharpness needs a closure"),
        (Raises, "step.. of Raises.*raises ValueError: not today"),
        (Slow, "Slow.inner holds parameters"),
        (ByName, "ByName keeps a state for 'k'"),
        (Moves, "Moves gives a parameter other memory"),
        (Views, "Views cannot be managed: state fast is a view of the parameter itself"),
        (Grows, r"state history of Grows changes its form after the first step, to \(14,\)"),
        (DrawsOfItsOwn, "DrawsOfItsOwn does not treat each parameter by itself"),
        (NotANumber, "NotANumber makes no finite number"),
    ],
)
def test_what_is_refused_and_why(kind: Any, text: str) -> None:
    with pytest.raises(GeminiError, match=text):
        rehearse(kind(parameters()))


def test_a_warm_up_that_begins_at_zero_hides_nothing() -> None:
    for lr in (0.0, torch.tensor(0.0)):
        with pytest.raises(GeminiError, match="Trust does not"):
            rehearse(Trust(parameters(dtype=torch.bfloat16), lr))


def test_settings_go_with_their_parameter() -> None:
    given = parameters()
    manager = bnb.optim.GlobalOptimManager.get_instance()
    kept = dict(manager.pid2config), dict(manager.index2config)
    try:
        manager.register_parameters(given)
        manager.override_config(given[2], "optim_bits", 32)
        optimizer = bnb.optim.AdamW8bit(given)
        rehearse(optimizer)
        own = overrides.settings_of(optimizer)
        assert own == {id(given[2]): {"optim_bits": 32}}
        where = 0, (128, 96), (96, 1), torch.float32, CPU
        for settings, dtype in (({}, torch.uint8), (own[id(given[2])], torch.float32)):
            found, *_ = states_like(optimizer, *where, settings)
            assert {leaf.path: leaf.dtype for leaf in found}["state1",] is dtype
    finally:
        manager.pid2config, manager.index2config = kept


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (bnb.optim.AdamW, ELEMENT),
        (bnb.optim.AdamW8bit, Rehearsed(False, "block", 4096)),
        (bnb.optim.PagedAdamW8bit, Rehearsed(False, "block", 4096)),
        (bnb.optim.Lion8bit, Rehearsed(False, "block", 4096)),
        (torchao.optim.AdamW4bit, Rehearsed(False, "block", 4096)),
        (Adafactor, WHOLE),
    ],
)
def test_packages(make: Any, found: Rehearsed) -> None:
    assert rehearse(make(parameters())) == found


def test_stochastic_rounding_draws() -> None:
    optimizer = torchao.optim.AdamW8bit(
        parameters(dtype=torch.bfloat16), bf16_stochastic_round=True
    )
    with pytest.raises(GeminiError, match="AdamW8bit draws random numbers .torch's"):
        rehearse(optimizer)


# ---- nothing is left behind ----


def test_everything_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    given = parameters()
    for p in given:
        p.grad = torch.ones_like(p)
    optimizers = [
        InGroup(given),
        OnItself(given),
        Blockwise(given),
        InClass(given),
        torch.optim.Adagrad(given),
        bnb.optim.AdamW8bit(given),
        DrawsOfItsOwn(given),
        Drawing(given),
    ]
    draws = [
        lambda: torch.rand(()),
        random.random,
        np.random.rand,
        lambda: torch.set_default_dtype(torch.float64) or 1,
    ]
    for optimizer in optimizers:
        groups, state = optimizer.param_groups, optimizer.state
        before = copy.deepcopy(
            {k: v for k, v in vars(optimizer).items() if k not in ("state", "page_mng")}
        )
        n_states = len(state)
        for draw in draws if isinstance(optimizer, Drawing) else draws[:1]:
            monkeypatch.setattr(Drawing, "draw", staticmethod(draw))
            generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
            try:
                rehearse(optimizer)
                assert draw is draws[-1] or not isinstance(optimizer, Drawing)
            except GeminiError as error:
                is_its_own = type(optimizer) is DrawsOfItsOwn
                assert is_its_own or "draws random numbers" in str(error)
            assert torch.equal(generators[0], torch.get_rng_state())
            assert generators[1] == random.getstate()
            assert np.array_equal(generators[2][1], np.random.get_state()[1])
        assert optimizer.param_groups is groups and optimizer.state is state
        assert len(state) == n_states
        for name, value in before.items():
            if not isinstance(value, set) and "object at" not in str(value):
                assert str(vars(optimizer)[name]) == str(value), name
    assert InClass.steps == 0 and InClass.seen == []
    assert torch.get_default_dtype() is torch.float32
    assert not bnb.optim.GlobalOptimManager.get_instance().pid2config
    assert optimizers[6].source.initial_seed() == 3
    torch.testing.assert_close(
        torch.rand(3, generator=optimizers[6].source),
        torch.rand(3, generator=torch.Generator().manual_seed(3)),
        rtol=0,
        atol=0,
    )
    for p, fresh in zip(given, parameters(), strict=True):
        assert torch.equal(p, fresh) and torch.equal(p.grad, torch.ones_like(p))


# ---- stepping some parameters ----


def test_a_step_runs_no_hooks_and_is_not_a_schedulers() -> None:
    called = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("all before")),
        register_optimizer_step_post_hook(lambda *_: called.append("all after")),
    ]
    try:
        Plain(parameters())  # the class's step has hooks from now on
        optimizer = Derived(parameters())
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        torch.optim.lr_scheduler.ConstantLR(optimizer)
        part = stand_in(optimizer, optimizer.param_groups, optimizer.state)
        assert type(part) is Derived and part is not optimizer and "step" not in vars(part)
        run(part)
        assert called == [] and torch.is_grad_enabled()
        optimizer.step()
        twice = ["all before", "before"] * 2 + ["after", "all after"] * 2
        assert called == twice  # for the derived class and for the one that it calls
    finally:
        for handle in handles:
            handle.remove()


def test_a_stand_in_shares_the_rest_and_has_its_own_methods() -> None:
    optimizer: Any = Plain(parameters())
    optimizer.shared = {"a": []}
    optimizer.method = optimizer.begin
    groups, state = [{"params": [], "lr": 1.0}], defaultdict(dict)
    part: Any = stand_in(optimizer, groups, state)
    assert part.param_groups is groups and part.state is state
    assert part.shared is optimizer.shared and part.method.__self__ is part
    paged = stand_in(bnb.optim.PagedAdam(parameters()), [], {})
    assert paged.is_paged is False
    assert type(stand_in(optimizer, groups, state, kind=Raises)) is Raises


def parts_of(given: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    yield given[1:]
    yield given[:1]


@pytest.mark.parametrize("kind", [InGroup, OnItself])
def test_parts_with_values_of_their_own_train_as_one(kind: Any) -> None:
    """What who steps parts does, by `Own`, when an optimizer writes itself."""
    given, together = parameters(), parameters()
    optimizer, whole = kind(given), kind(together)
    source = torch.Generator().manual_seed(1)
    for _ in range(4):
        for p, q in zip(given, together, strict=True):
            p.grad = torch.randn(p.shape, generator=source)
            q.grad = p.grad.clone()
        whole.step()
        start, end = Own.of(optimizer), None
        for part in parts_of(given):
            groups = [{"params": part}]
            made = stand_in(optimizer, groups, optimizer.state)
            start.copied(optimizer, made).put(made)
            run(made)
            ended = Own.of(made)
            assert end is None or end.difference(ended) is None
            end = ended
        end.put(optimizer)
        assert Own.of(optimizer).difference(Own.of(whole)) is None
    for p, q in zip(given, together, strict=True):
        assert torch.equal(p, q)
        assert [k for k, _ in opaque.leaves(optimizer.state.get(p))] == [
            k for k, _ in opaque.leaves(whole.state.get(q))
        ]


# ---- the sizes of states ----

GEOMETRIES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()),
    ((1,), (1,)),
    ((7,), (1,)),
    ((3, 5), (5, 1)),
    ((3, 5), (1, 3)),
    ((4096,), (1,)),
    ((33, 4099), (4099, 1)),
    ((8, 3, 5, 5), (75, 1, 15, 3)),
]


def real(optimizer: Optimizer, parameter: nn.Parameter) -> list[opaque.Leaf]:
    """What a step of the optimizer itself makes."""
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return [
        opaque.Leaf.of(path, tensor)
        for path, tensor in opaque.leaves(optimizer.state[parameter])
        if opaque.is_kept_in_chunk(tensor, parameter)
    ]


def made(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty_strided(shape, stride, dtype=dtype).zero_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in TORCH if name not in REFUSED])
def test_states_are_known_before_the_first_step(name: str, dtype: torch.dtype) -> None:
    optimizer = torchs(name, parameters())
    for shape, stride in GEOMETRIES:
        if name == "Muon" and len(shape) != 2:
            continue
        parameter = made(shape, stride, dtype)
        expected = real(torchs(name, [parameter]), parameter)
        found, form, _ = states_like(optimizer, 0, shape, stride, dtype, CPU)
        assert list(found) == expected
        assert all(tensor.is_meta for _, tensor in opaque.leaves(form))
        assert [leaf.path for leaf in found if leaf.path not in dict(opaque.leaves(form))] == []


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (Blockwise, {"codes", "most"}),
        (WithSubclass, {"m.codes", "m.scale"}),
        (RowFactored, {"row", "column"}),
        (bnb.optim.AdamW8bit, {"state1", "state2", "absmax1", "absmax2"}),
        (
            torchao.optim.AdamW8bit,
            {f"exp_avg{s}.{k}" for s in ("", "_sq") for k in ("codes", "scale", "qmap")},
        ),
        (Adafactor, {"exp_avg_sq_row", "exp_avg_sq_col"}),
        (Plain, set()),
    ],
)
def test_states_of_others(kind: Any, own: set[str]) -> None:
    shape, stride = (64, 128), (128, 1)
    optimizer = kind(parameters())
    found, form, _ = states_like(optimizer, 0, shape, stride, torch.float32, CPU)
    assert {opaque.text(leaf.path) for leaf in found} == own
    assert not optimizer.state
    expected = {leaf.path: leaf for leaf in found}
    if kind is not torchao.optim.AdamW8bit:  # its step would be compiled
        parameter = made(shape, stride, torch.float32)
        everything = {leaf.path: leaf for leaf in real(kind([parameter]), parameter)}
        assert expected == {path: everything[path] for path in expected}
        assert {path[0] for path in everything.keys() - expected.keys()} <= {
            "table",
            "qmap1",
            "qmap2",
        }
    assert type(form) is dict


class NotFake(Plain):
    """A step that looks at values, as kernels behind ctypes do."""

    def update(self, group: Any, p: Any, grad: torch.Tensor, state: Any) -> torch.Tensor:
        state["m"] = torch.zeros(len(p.detach().numpy().tobytes()) // 2)
        return grad


def test_sizes_are_found_by_a_real_step_where_no_other_runs() -> None:
    optimizer = NotFake(parameters())
    found, _, _ = states_like(optimizer, 0, (3, 5), (5, 1), torch.float32, CPU)
    assert [(leaf.path, leaf.shape) for leaf in found] == [(("m",), (30,))]
    shape = 1 << 14, 1 << 13
    with pytest.raises(
        GeminiError, match="NotFake .*without memory .*2147483648 bytes, more than 1073741824"
    ):
        states_like(optimizer, 0, shape, (shape[1], 1), torch.float32, CPU)
    with pytest.raises(
        GeminiError, match="Raises on a parameter of shape .3,. .* ValueError: not today"
    ):
        states_like(Raises(parameters()), 0, (3,), (1,), torch.float32, CPU)
    big, _, _ = states_like(
        torch.optim.AdamW(parameters()), 0, shape, (shape[1], 1), torch.float32, CPU
    )
    assert sum(leaf.nbytes for leaf in big) == 2 * 4 << 27
