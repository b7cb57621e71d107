"""Modules look for hooks before they choose a way to compute: managed ones have their owner's only."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini_strategy as gs
from gemini_strategy import _torch
from gemini_strategy.parameters import absent
from helpers.pairs import pairs
from helpers.ranks import run_ranks, values

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

FAST = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
MODES = (contextlib.nullcontext, torch.no_grad, torch.inference_mode)


class Encoder(nn.Module):
    def __init__(self, n_layers: int = 4, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, n_layers, nn.LayerNorm(16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        return self.head(self.encoder(x, **masks))


def encoders(**options: Any) -> tuple[Encoder, Encoder]:
    torch.manual_seed(0)
    model = Encoder(**options)
    return model, copy.deepcopy(model)


def manage(model: nn.Module, share: float = 1.0, **options: Any) -> tuple[gs.Engine, Any]:
    """With a budget of this share of what the weights take."""
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    budget = int(sum(p.numel() * 4 for p in model.parameters()) * share) + 16384
    options = {"device": "cpu", "device_budget": budget, "chunk_size": 2048} | options
    return gs.manage(model, optimizer, **options), optimizer


def masks() -> list[dict[str, Tensor]]:
    pads = torch.arange(6) >= torch.tensor([[6], [4], [2]])
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    return [{}, {"src_key_padding_mask": pads}, {"mask": causal}]


def outputs(model: nn.Module, is_training: bool, is_cast: bool) -> list[Any]:
    """Of every mode, with every mask; texts of what torch itself refuses under autocast."""
    model.train(is_training)
    found: list[Any] = []
    x = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(1))
    for mode in MODES:
        for kind in masks():
            torch.manual_seed(2)
            with mode(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
                try:
                    found.append(model(x, **kind).detach().clone())
                except RuntimeError as error:
                    if isinstance(error, gs.GeminiError):
                        raise
                    found.append(str(error))
    return found


def assert_same(got: list[Any], want: list[Any]) -> None:
    for a, b in zip(got, want, strict=True):
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b)
        else:
            assert a == b


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fast operations that modules have called."""
    called: list[str] = []

    def call(name: str, own: Any, *args: Any) -> Any:
        called.append(name)
        return own(*args)

    for name in FAST:
        monkeypatch.setattr(torch, name, functools.partial(call, name, getattr(torch, name)))
    return called


@pairs(is_training=[False, True], is_cast=[False, True], share=[0.3, 2.0])
def test_modules_go_the_way_that_they_go_unmanaged(
    is_training: bool, is_cast: bool, share: float, fast: list[str]
) -> None:
    managed, plain = encoders()
    engine, _ = manage(managed, share)
    want = outputs(plain, is_training, is_cast)
    taken = [*fast]
    fast.clear()
    assert_same(outputs(managed, is_training, is_cast), want)
    assert fast == taken
    assert bool(taken) is not is_training
    engine.close()
    assert_same(outputs(managed, is_training, is_cast), want)


def test_evaluation_between_steps_that_follow_a_plan() -> None:
    managed, plain = encoders()
    engine, optimizer = manage(managed, 0.4, placement_policy="auto")
    plain_optimizer = gs.HybridAdam(plain.parameters(), lr=1e-2)
    x = torch.randn(3, 6, 16)
    for step in range(8):
        losses = []
        for model, own in ((managed, optimizer), (plain, plain_optimizer)):
            torch.manual_seed(step)
            model.train()
            loss = model(x, **masks()[step % 3]).square().mean()
            loss.backward()
            own.step()
            own.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        assert_same(outputs(managed, False, True), outputs(plain, False, True))
    engine._runtime.core.check()


def test_a_layer_that_would_not_fit_when_it_evaluates_is_refused_at_once() -> None:
    managed, _ = encoders(n_layers=2)
    optimizer = gs.HybridAdam(managed.parameters())
    with pytest.raises(gs.GeminiMemoryError, match=r"module 'encoder\.layers\.0'.*of weights"):
        gs.manage(managed, optimizer, device="cpu", device_budget=16384, chunk_size=2048)


def test_a_layer_without_a_fast_path_needs_room_for_its_parts_only() -> None:
    managed, plain = encoders(n_layers=2, activation=torch.tanh)
    optimizer = gs.HybridAdam(managed.parameters())
    engine = gs.manage(managed, optimizer, device="cpu", device_budget=12288, chunk_size=2048)
    assert_same(outputs(managed, False, True), outputs(plain, False, True))
    engine.close()


class Gated(nn.TransformerEncoderLayer):
    """With an attribute of its base only."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.linear1 = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear1(x).tanh()


def _without_norms() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    layer.norm1 = layer.norm2 = nn.Identity()
    return layer


@pytest.mark.parametrize("make", [Gated, _without_norms])
def test_a_layer_that_has_not_what_its_base_has(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    managed = nn.Sequential(make(), nn.Linear(16, 4))
    plain = copy.deepcopy(managed)
    engine, _ = manage(managed, 2.0)
    x = torch.randn(3, 6, 16)
    assert torch.equal(managed(x), plain(x))
    managed(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(managed[1].weight.grad.clone(), plain[1].weight.grad)
    engine.close()


class Owning(nn.TransformerEncoderLayer):
    """With a parameter of its own: two units in one module."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = nn.Parameter(torch.full((), 1.5))

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return super().forward(x * self.scale, **options)


def test_a_layer_with_a_parameter_of_its_own() -> None:
    torch.manual_seed(0)
    managed = nn.Sequential(Owning(16, 2, 24, dropout=0.0, batch_first=True), nn.Linear(16, 4))
    plain = copy.deepcopy(managed)
    engine, _ = manage(managed, 2.0)
    x = torch.randn(3, 6, 16)
    for model in (managed, plain):
        model(x).sum().backward()
    assert torch.equal(managed[0].scale.grad.clone(), plain[0].scale.grad)
    with torch.no_grad():
        assert torch.equal(managed.eval()(x), plain.eval()(x))
    assert absent.is_absent(managed[0].scale) and absent.is_absent(managed[0].linear1.weight)
    engine.close()
    assert not any("_compiled_call_impl" in vars(m) for m in managed.modules())
    assert not any(m._forward_hooks_with_kwargs for m in managed.modules())


def _evaluate_on(rank: int, size: int) -> None:
    managed, plain = encoders()
    engine, _ = manage(managed, 0.5)
    assert_same(outputs(managed, False, True), outputs(plain, False, True))
    assert_same(outputs(managed, False, False), outputs(plain, False, False))
    for model in (managed, plain):
        model.train()
        torch.manual_seed(rank)
        model(torch.ones(3, 6, 16)).square().mean().backward()
    engine.close()


def test_on_two_ranks(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, _evaluate_on))


# ---- what a call is ----


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_hooks_run_inside_their_unit() -> None:
    model = linears()
    engine, _ = manage(model)
    seen: list[bool] = []

    def look(module: nn.Module, *_: Any) -> None:
        seen.append(absent.is_absent(module.weight))

    model[0].register_forward_pre_hook(look, prepend=True)
    model[0].register_forward_hook(look)
    model(torch.ones(1, 4))
    assert seen == [False, False]
    engine.close()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_every_error_leaves_the_unit(error: type[BaseException]) -> None:
    model = linears()
    engine, _ = manage(model)

    def fail(*_: Any) -> None:
        raise error("stop")

    handle = model[0].register_forward_pre_hook(fail)
    with pytest.raises(error, match="stop"):
        model[0](torch.ones(1, 4))
    handle.remove()
    assert not any(unit.n_entered for unit in engine._runtime.units)
    model(torch.ones(1, 4)).sum().backward()
    engine._runtime.core.check()


def _by_dict(module: nn.Module) -> nn.Module:
    """As torch.nn.parallel.replicate makes modules, with parameters twice as large."""
    other = module.__new__(type(module))
    other.__dict__ = module.__dict__.copy()
    other._parameters = {k: nn.Parameter(p.detach() * 2) for k, p in module._parameters.items()}
    other._modules = {k: _by_dict(m) for k, m in module._modules.items()}
    return other


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = linears()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


@pytest.mark.parametrize("hooks", [False, True])
def test_a_module_made_of_the_dict_of_another_is_called_itself(hooks: bool) -> None:
    plain, managed = Twice(), Twice()
    engine, _ = manage(managed)
    if hooks:
        for module in managed.modules():
            module.register_forward_hook(lambda *_: None)
    x = torch.ones(1, 4)
    assert torch.equal(_by_dict(managed)(x), _by_dict(plain)(x))
    assert torch.equal(managed(x), plain(x))
    engine.close()


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deep": copy.deepcopy,
    "shallow": copy.copy,
    "pickled": lambda module: pickle.loads(pickle.dumps(module)),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.LSTM(4, 4)])
def test_copies_compute_the_same(make: Callable[[], nn.Module], kind: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([make()])
    x = torch.randn(2, 4)
    want = model[0](x)
    engine, _ = manage(model)
    other = COPIES[kind](model[0])
    assert torch.equal(other(x)[0], want[0])
    engine.close()


@pytest.mark.parametrize(
    "keep",
    [
        torch.jit.script,
        lambda module: torch.compile(module),
        lambda module: module.compile(),
        lambda module: torch.jit.trace(module, torch.ones(1, 4)),
        lambda module: torch.cuda.make_graphed_callables(module, (torch.ones(1, 4),)),
        lambda module: torch.cuda.make_graphed_callables((module,), ((torch.ones(1, 4),),)),
    ],
)
def test_what_goes_past_a_call_is_refused(keep: Callable[[nn.Module], Any]) -> None:
    model = linears()
    engine, _ = manage(model)
    for module in (model, model[0]):
        with pytest.raises(gs.GuardError, match=r"0\.weight is managed|^0: a managed"):
            keep(module)
    engine.close()


def test_a_compiled_function_calls_a_managed_module_as_it_is() -> None:
    model = linears()
    x = torch.ones(1, 4)
    want = model(x).detach()
    engine, _ = manage(model)
    function = torch.compile(lambda value: model[1](model[0](value)), backend="eager")
    assert torch.equal(function(x), want)
    engine.close()


def test_a_parameter_is_known_by_its_class_as_before() -> None:
    """Optimizers of torch choose by it whether they work on lists, bitsandbytes and peft ask for its name."""
    model = linears()
    engine, _ = manage(model)
    managed = type(model[0].weight)
    assert managed is not nn.Parameter
    names = ("__name__", "__qualname__", "__module__")
    assert all(getattr(managed, name) == getattr(nn.Parameter, name) for name in names)
    assert managed in vars(_torch.optimizer)[_torch.FOREACH_TYPES]
    engine.close()
