"""Every door to a parameter outside its unit, in both mapping modes, with its chunk evicted.

A door is a function of a run.  It is walked under the engine and on the unmanaged reference at the same
point of the same training.  Under the engine it must give the same value, bit for bit, or refuse with an
error that names the parameter (only where `refusable`); afterwards training goes on, and losses, weights,
masters and moments must still have the bits of the reference that did (or, after a refusal, did not do)
the same thing.  A door that writes shows in what follows, so a write that is silently lost is caught.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gemini_strategy as gs
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from reference import (
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    drive,
    managed,
    plain,
    tightly,
)
from torch import Tensor, nn
from zoo import Case, Mlp, mlp_case

CASE = mlp_case(width=32, depth=3)
WEIGHT = "blocks.1.1.weight"
OTHER = "head.weight"
MAPPINGS = ("aliased", "strict")
PLACEMENTS = ("cpu", "tight")


@dataclass(frozen=True)
class Door:
    name: str
    walk: Callable[[Plain], Any]
    refusable: bool = False
    writes: bool = False

    def __repr__(self) -> str:
        return self.name


READS: list[Door] = []
WRITES: list[Door] = []
GRADIENTS: list[Door] = []


def _door(doors: list[Door], **how: Any) -> Callable[[Callable], Callable]:
    def add(walk: Callable) -> Callable:
        doors.append(Door(walk.__name__.strip("_"), walk, **how))
        return walk

    return add


def _p(run: Plain, name: str = WEIGHT) -> nn.Parameter:
    return run.model.get_parameter(name)


def _all(run: Plain) -> list[nn.Parameter]:
    return list(run.model.parameters())


def _same(got: Any, want: Any, what: str = "value") -> None:
    if isinstance(want, Tensor):
        assert_same_bits(got, want, what)
    elif isinstance(want, dict):
        assert list(got) == list(want), what
        for key in want:
            _same(got[key], want[key], f"{what}[{key}]")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), what
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            _same(a, b, f"{what}[{i}]")
    elif isinstance(want, np.ndarray):
        assert got.dtype == want.dtype and np.array_equal(got, want), what
    else:
        assert got == want, f"{what}: {got!r}, expected {want!r}"


def _start(
    placement: str, mapping: str, recipe: Recipe, case: Case = CASE, floor: float = 0.05
) -> Plain:
    if placement == "cpu":
        return managed(
            case.build, recipe, chunk_size=4096, mapping=mapping, placement_policy="cpu"
        )
    return tightly(case.build, recipe, floor=floor, chunk_size=4096, mapping=mapping)


def _names_a_parameter(run: Plain, error: Exception) -> bool:
    return any(name in str(error) for name, _ in run.model.named_parameters())


def _walk_both(door: Door, run: Plain, reference: Plain) -> None:
    try:
        got = door.walk(run)
    except gs.GeminiError as error:
        assert door.refusable, f"{door.name} was refused: {error}"
        assert _names_a_parameter(run, error), f"the refusal names no parameter: {error}"
        return
    except TypeError as error:
        assert door.refusable, f"{door.name} was refused: {error}"
        return
    _same(got, door.walk(reference), door.name)


# ---- doors that read -------------------------------------------------------------------------------


@_door(READS)
def _norm(run: Plain) -> Any:
    return _p(run).norm().item(), float(_p(run).sum()), _p(run).abs().max()


@_door(READS)
def _clone(run: Plain) -> Any:
    return _p(run).clone(), _p(run).detach().clone(), _p(run).data.clone()


@_door(READS)
def _detach(run: Plain) -> Any:
    value = _p(run).detach()
    assert not value.requires_grad
    return value + 0, value.abs().sum()


@_door(READS)
def _data_attribute(run: Plain) -> Any:
    data = _p(run).data
    assert not data.requires_grad
    return data.sum(), data.clone(), data.mean().item()


@_door(READS)
def _two_parameters_in_one_operation(run: Plain) -> Any:
    return _p(run, "blocks.0.1.weight") + _p(run, "blocks.2.1.weight"), _p(run) @ _p(run, OTHER)


@_door(READS)
def _all_parameters_in_one_operation(run: Plain) -> Any:
    return torch.cat([p.reshape(-1) for p in _all(run)])


@_door(READS)
def _parameters_to_vector(run: Plain) -> Any:
    return nn.utils.parameters_to_vector(run.model.parameters())


@_door(READS)
def _foreach_norm(run: Plain) -> Any:
    return torch._foreach_norm([p.detach() for p in _all(run)])


@_door(READS)
def _total_norm(run: Plain) -> Any:
    return nn.utils.get_total_norm(_all(run))


@_door(READS)
def _loop(run: Plain) -> Any:
    return [(p.norm(), p.clone(), p.sum().item()) for p in run.model.parameters()]


@_door(READS)
def _named_loop(run: Plain) -> Any:
    return {n: (p.float() ** 2).sum().sqrt() for n, p in run.model.named_parameters()}


@_door(READS)
def _elements(run: Plain) -> Any:
    p = _p(run)
    return p[3], p[1, 2].item(), p[:, 4:9], p[..., -1], p[p > 0], [row.sum() for row in p]


@_door(READS)
def _tolist(run: Plain) -> Any:
    return _p(run).tolist(), _p(run, "head.bias").tolist()


@_door(READS)
def _conversions(run: Plain) -> Any:
    p = _p(run)
    return p.cpu().clone(), p.float().clone(), p.double(), p.to(torch.float16), p.to("cpu") + 0


@_door(READS)
def _attributes(run: Plain) -> Any:
    p = _p(run)
    assert isinstance(p, nn.Parameter)
    return (
        p.shape, p.dtype, p.device, p.requires_grad, p.is_leaf, p.numel(), p.dim(), len(p),
        p.stride(), p.is_contiguous(), p.element_size(), p.is_floating_point(), p.grad_fn,
        p.storage_offset(), p.layout, p.nbytes, tuple(p.size()), p.is_cuda, p.ndim,
    )


@_door(READS)
def _text(run: Plain) -> Any:
    return str(_p(run).data), f"{_p(run, 'head.bias').sum().item():.9f}"


@_door(READS)
def _comparisons(run: Plain) -> Any:
    p = _p(run)
    assert torch.equal(p, p) and bool((p == p).all())
    return torch.isfinite(p).all(), torch.allclose(p, p.clone())


@_door(READS)
def _functional_linear(run: Plain) -> Any:
    with torch.no_grad():
        x = torch.ones(3, 32, dtype=_p(run).dtype)
        return F.linear(x, _p(run), run.model.blocks[1][1].bias)


@_door(READS)
def _linear_with_grad(run: Plain) -> Any:
    x = torch.ones(3, 32, dtype=_p(run).dtype, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.tanh(F.linear(x, _p(run))).sum(), x)
    return slope


@_door(READS)
def _autograd_grad_of_parameter(run: Plain) -> Any:
    p = _p(run)
    (slope,) = torch.autograd.grad((p * p * p).float().sum(), p)
    return slope


@_door(READS)
def _out_argument(run: Plain) -> Any:
    out = torch.empty_like(_p(run), requires_grad=False)
    with torch.no_grad():
        torch.add(_p(run), 1.0, out=out)
    return out


@_door(READS)
def _likes(run: Plain) -> Any:
    p = _p(run)
    return torch.zeros_like(p), p.new_zeros(3), torch.ones_like(p, dtype=torch.int8), p.new_ones(2)


@_door(READS)
def _into_another_tensor(run: Plain) -> Any:
    target = torch.zeros(64, 32, dtype=_p(run).dtype)
    with torch.no_grad():
        target.copy_(_p(run))
        target[:32] += _p(run)[32:]
    return target


@_door(READS)
def _ema(run: Plain) -> Any:
    ema = [torch.zeros_like(p, requires_grad=False) for p in run.model.parameters()]
    with torch.no_grad():
        for e, p in zip(ema, run.model.parameters(), strict=True):
            e.mul_(0.9).add_(p.detach(), alpha=0.1)
            e.lerp_(p, 0.5)
    return ema


@_door(READS)
def _ema_foreach(run: Plain) -> Any:
    ema = [torch.zeros_like(p, requires_grad=False) for p in run.model.parameters()]
    torch._foreach_lerp_(ema, [p.detach() for p in run.model.parameters()], 0.25)
    return ema


@_door(READS)
def _ema_foreach_guarded(run: Plain) -> Any:
    ema = [torch.zeros_like(p, requires_grad=False) for p in run.model.parameters()]
    with torch.no_grad():
        torch._foreach_add_(ema, _all(run), alpha=0.25)
    return ema


@_door(READS)
def _state_dict(run: Plain) -> Any:
    return {k: v.clone() for k, v in run.model.state_dict().items()}


@_door(READS)
def _state_dict_of_submodule(run: Plain) -> Any:
    return {k: v.clone() for k, v in run.model.blocks[1].state_dict(prefix="x.").items()}


@_door(READS)
def _torch_save_state_dict(run: Plain) -> Any:
    file = io.BytesIO()
    torch.save(run.model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@_door(READS)
def _safetensors(run: Plain) -> Any:
    return sorted(safetensors.torch.load(safetensors.torch.save(run.model.state_dict())).items())


@_door(READS, refusable=True)
def _torch_save_parameter(run: Plain) -> Any:
    file = io.BytesIO()
    torch.save(_p(run), file)
    file.seek(0)
    return torch.load(file, weights_only=False).detach()


@_door(READS, refusable=True)
def _pickle_parameter(run: Plain) -> Any:
    return pickle.loads(pickle.dumps(_p(run))).detach()


@_door(READS, refusable=True)
def _deepcopy_parameter(run: Plain) -> Any:
    other = copy.deepcopy(_p(run))
    assert other.requires_grad
    return other.detach()


@_door(READS, refusable=True)
def _torch_save_model(run: Plain) -> Any:
    file = io.BytesIO()
    torch.save(run.model, file)
    file.seek(0)
    return dict(torch.load(file, weights_only=False).state_dict())


@_door(READS, refusable=True)
def _pickle_model(run: Plain) -> Any:
    return dict(pickle.loads(pickle.dumps(run.model)).state_dict())


@_door(READS, refusable=True)
def _deepcopy_model(run: Plain) -> Any:
    other = copy.deepcopy(run.model).eval()
    x = torch.ones(2, 32, dtype=next(iter(other.state_dict().values())).dtype)
    return dict(other.state_dict()), other(x).detach()


@_door(READS, refusable=True)
def _averaged_model(run: Plain) -> Any:
    averaged = torch.optim.swa_utils.AveragedModel(run.model)
    averaged.update_parameters(run.model)
    return {k: v.clone() for k, v in averaged.module.state_dict().items()}


@_door(READS, refusable=True)
def _numpy(run: Plain) -> Any:
    return _p(run).detach().float().numpy().copy()


@_door(READS, refusable=True)
def _numpy_protocol(run: Plain) -> Any:
    return np.asarray(_p(run, OTHER).detach().to(torch.float32)).copy()


@_door(READS, refusable=True)
def _dlpack(run: Plain) -> Any:
    return torch.utils.dlpack.from_dlpack(_p(run).detach()).clone()


@_door(READS, refusable=True)
def _data_ptr(run: Plain) -> Any:
    return _p(run).data_ptr() % 64, _p(run).data.data_ptr() % 64


@_door(READS, refusable=True)
def _untyped_storage(run: Plain) -> Any:
    p = _p(run)
    raw = torch.tensor(p.untyped_storage()[: 16], dtype=torch.uint8)
    return raw if raw.dim() else None


@_door(READS, refusable=True)
def _functional_call(run: Plain) -> Any:
    values = {n: torch.full_like(p, 0.01) for n, p in run.model.named_parameters()}
    run.model.eval()
    x = torch.ones(2, 32, dtype=_p(run).dtype)
    out = torch.func.functional_call(run.model, values, (x,)).detach()
    run.model.train()
    return out


@_door(READS)
def _type_and_identity(run: Plain) -> Any:
    params = _all(run)
    owned = [p for g in run.optimizer.param_groups for p in g["params"]]
    assert [id(p) for p in params] == [id(p) for p in owned]
    assert len({p for p in params}) == len(params)
    assert run.model.blocks[1][1].weight is _p(run)
    return len(params)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("door", READS, ids=repr)
def test_read_between_steps(door: Door, precision: str, mapping: str, placement: str) -> None:
    recipe = Recipe(precision=precision, clip=1.0)
    reference, run = plain(CASE.build, recipe), _start(placement, mapping, recipe)
    try:
        for step in range(3):
            drive(run, CASE, 1, first=step)
            drive(reference, CASE, 1, first=step)
            _walk_both(door, run, reference)
        drive(run, CASE, 1, first=3)
        drive(reference, CASE, 1, first=3)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("door", READS, ids=repr)
def test_read_before_first_step_and_before_step(door: Door, mapping: str) -> None:
    """Before any forward, and between backward and step, with gradients waiting."""
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), _start("cpu", mapping, recipe)
    try:
        _walk_both(door, run, reference)
        for which in (run, reference):
            torch.manual_seed(3)
            which.backward(CASE.loss(which, CASE.batch(0)))
        _walk_both(door, run, reference)
        for which in (run, reference):
            which.finish()
            drive(which, CASE, 2, first=1)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


# ---- reading while a pass runs ---------------------------------------------------------------------


def _read_some(model: nn.Module, seen: list) -> None:
    with torch.no_grad():
        seen.append([model.get_parameter(n).clone() for n in (WEIGHT, OTHER, "blocks.0.1.weight")])
        seen.append(sum(p.detach().double().sum() for p in model.parameters()))


def _on_forward_hook(model: nn.Module, seen: list) -> list:
    return [m.register_forward_hook(lambda *_: _read_some(model, seen)) for m in model.modules()]


def _on_forward_pre_hook(model: nn.Module, seen: list) -> list:
    return [m.register_forward_pre_hook(lambda *_: _read_some(model, seen)) for m in model.modules()]


def _on_backward_hook(model: nn.Module, seen: list) -> list:
    return [
        m.register_full_backward_hook(lambda *_: _read_some(model, seen)) for m in model.blocks
    ]


def _on_backward_pre_hook(model: nn.Module, seen: list) -> list:
    return [
        m.register_full_backward_pre_hook(lambda *_: _read_some(model, seen)) for m in model.blocks
    ]


def _on_output_gradient(model: nn.Module, seen: list) -> list:
    def attach(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda g: _read_some(model, seen))

    return [m.register_forward_hook(attach) for m in (model.blocks[0][1], model.blocks[2], model)]


def _on_global_hook(model: nn.Module, seen: list) -> list:
    def hook(module: nn.Module, *_: Any) -> None:
        if isinstance(module, (nn.Linear, Mlp)):
            _read_some(model, seen)

    modules = nn.modules.module
    return [
        modules.register_module_forward_hook(hook),
        modules.register_module_forward_pre_hook(hook),
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize(
    "attach",
    [
        _on_forward_hook, _on_forward_pre_hook, _on_backward_hook, _on_backward_pre_hook,
        _on_output_gradient, _on_global_hook,
    ],
)
def test_read_during_a_pass(attach: Callable, mapping: str, placement: str) -> None:
    recipe = Recipe(precision="bf16-true", clip=1.0)
    reference, run = plain(CASE.build, recipe), _start(placement, mapping, recipe)
    seen: dict[Plain, list] = {run: [], reference: []}
    try:
        for which in (run, reference):
            handles = attach(which.model, seen[which])
            drive(which, CASE, 3)
            for handle in handles:
                handle.remove()
        assert seen[reference]
        _same(seen[run], seen[reference])
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_write_during_forward(mapping: str) -> None:
    """A forward hook that writes into a unit that has not run yet."""
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), _start("cpu", mapping, recipe)

    def attach(model: nn.Module) -> Any:
        def hook(*_: Any) -> None:
            with torch.no_grad():
                model.head.weight.mul_(0.99)

        return model.blocks[0].register_forward_hook(hook)

    try:
        for which in (run, reference):
            attach(which.model)
            drive(which, CASE, 3)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


def _regularised(run: Plain, batch: Any) -> Tensor:
    loss = F.mse_loss(run(batch[0]).float(), batch[1])
    penalty = sum(p.float().square().sum() for p in run.model.parameters())
    tie = (run.model.blocks[0][1].weight * run.model.blocks[2][1].weight).float().mean()
    return loss + 1e-3 * penalty + torch.tanh(tie)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-mixed"])
def test_penalty_on_parameters(precision: str, mapping: str, placement: str) -> None:
    """A loss with terms of the parameters themselves: autograd goes through the guard.

    Such a graph shows all weights at once, so the budget must hold them (a third of fp32 state).
    """
    case = Case("regularised", CASE.build, CASE.batch, _regularised)
    recipe = Recipe(precision=precision, clip=1.0)
    reference, run = plain(case.build, recipe), _start(placement, mapping, recipe, case, floor=0.6)
    try:
        for which in (run, reference):
            drive(which, case, 4)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


# ---- doors that write --------------------------------------------------------------------------------


@_door(WRITES)
def _inplace_under_no_grad(run: Plain) -> Any:
    with torch.no_grad():
        _p(run).mul_(0.5)
        _p(run, OTHER).add_(_p(run, "stem.weight").t(), alpha=0.1).clamp_(-0.2, 0.2)
    return _p(run).clone()


@_door(WRITES)
def _copy_into(run: Plain) -> Any:
    with torch.no_grad():
        _p(run).copy_(torch.linspace(-1, 1, _p(run).numel()).reshape(_p(run).shape))
    return _p(run).sum()


@_door(WRITES)
def _data_inplace(run: Plain) -> Any:
    _p(run).data.mul_(0.5)
    _p(run).data.add_(0.01)
    _p(run).data.copy_(_p(run).data * 1.5)
    return _p(run).data.clone()


@_door(WRITES)
def _data_setitem(run: Plain) -> Any:
    _p(run).data[0] = 0.125
    _p(run).data[3, 4:7] = -1.0
    return _p(run).data.clone()


@_door(WRITES)
def _setitem_under_no_grad(run: Plain) -> Any:
    with torch.no_grad():
        _p(run)[0, 0] = 3.0
        _p(run)[:, 1] = 0.0
    return _p(run).clone()


@_door(WRITES)
def _through_detach(run: Plain) -> Any:
    _p(run).detach().mul_(0.5)
    return _p(run).clone()


@_door(WRITES, refusable=True)
def _through_views(run: Plain) -> Any:
    with torch.no_grad():
        _p(run).t().mul_(1.25)
        _p(run).view(-1)[5:9] = 0.5
        row = _p(run)[2]
        row.fill_(0.25)
    return _p(run).clone()


@_door(WRITES, refusable=True)
def _through_a_view_kept_from_before(run: Plain) -> Any:
    view = _p(run).detach()
    for other in run.model.parameters():
        other.norm()
    view.mul_(0.5)
    return _p(run).clone()


@_door(WRITES)
def _init_normal(run: Plain) -> Any:
    torch.manual_seed(11)
    nn.init.normal_(_p(run), std=0.05)
    nn.init.zeros_(run.model.blocks[1][1].bias)
    nn.init.xavier_uniform_(_p(run, OTHER))
    nn.init.orthogonal_(run.model.stem.weight)
    return _p(run).clone()


@_door(WRITES)
def _reset_parameters(run: Plain) -> Any:
    torch.manual_seed(12)
    run.model.blocks[1][1].reset_parameters()
    return _p(run).clone()


@_door(WRITES)
def _apply_init(run: Plain) -> Any:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.05)
            module.bias.data.zero_()

    torch.manual_seed(13)
    run.model.apply(init)
    return [p.clone() for p in run.model.parameters()]


@_door(WRITES)
def _foreach_inplace(run: Plain) -> Any:
    with torch.no_grad():
        torch._foreach_mul_(_all(run), 0.875)
    return [p.clone() for p in run.model.parameters()]


@_door(WRITES)
def _out_is_parameter(run: Plain) -> Any:
    with torch.no_grad():
        torch.mul(_p(run), 0.5, out=_p(run))
    return _p(run).clone()


@_door(WRITES)
def _swap_in_ema_and_back(run: Plain) -> Any:
    kept = [p.detach().clone() for p in run.model.parameters()]
    run.model.eval()
    with torch.no_grad():
        for p in run.model.parameters():
            p.copy_(p * 0.5)
        out = run(torch.ones(2, 32))
        for p, value in zip(run.model.parameters(), kept, strict=True):
            p.data.copy_(value)
    run.model.train()
    return out


@_door(WRITES)
def _load_state_dict(run: Plain) -> Any:
    state = {k: v * 0.75 for k, v in run.model.state_dict().items()}
    return str(run.model.load_state_dict(state)), _p(run).clone()


@_door(WRITES)
def _load_state_dict_of_submodule(run: Plain) -> Any:
    block = run.model.blocks[1]
    state = {k: v * 0.75 for k, v in block.state_dict().items()}
    del state["0.weight"]
    keys = block.load_state_dict(state, strict=False)
    return list(keys.missing_keys), _p(run).clone()


@_door(WRITES, refusable=True)
def _load_state_dict_assign(run: Plain) -> Any:
    state = {k: v * 0.75 for k, v in run.model.head.state_dict().items()}
    run.model.head.load_state_dict(state, assign=True)
    return _p(run, OTHER).clone()


@_door(WRITES, refusable=True)
def _data_assign(run: Plain) -> Any:
    _p(run).data = _p(run).data * 0.5
    return _p(run).clone()


@_door(WRITES, refusable=True)
def _vector_to_parameters(run: Plain) -> Any:
    vector = nn.utils.parameters_to_vector(run.model.parameters()).detach() * 0.9
    nn.utils.vector_to_parameters(vector, run.model.parameters())
    return _p(run).clone()


@_door(WRITES, refusable=True)
def _set(run: Plain) -> Any:
    with torch.no_grad():
        _p(run).set_(torch.full((64, 32), 0.01))
    return _p(run).clone()


@_door(WRITES, refusable=True)
def _numpy_write(run: Plain) -> Any:
    _p(run).detach().numpy()[0, 0] = 2.0
    return _p(run).clone()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("door", WRITES, ids=repr)
def test_write_between_steps(door: Door, mapping: str, placement: str) -> None:
    recipe = Recipe(precision="32-true", clip=1.0)
    reference, run = plain(CASE.build, recipe), _start(placement, mapping, recipe)
    try:
        _walk_both(door, run, reference)
        for step in range(2):
            drive(run, CASE, 1, first=step)
            drive(reference, CASE, 1, first=step)
            _walk_both(door, run, reference)
        drive(run, CASE, 2, first=2)
        drive(reference, CASE, 2, first=2)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed"])
def test_write_resets_the_master(precision: str, mapping: str) -> None:
    """Where the written weight differs the master becomes that weight; elsewhere it keeps its bits."""
    recipe = Recipe(precision=precision)
    run = _start("cpu", mapping, recipe)
    try:
        drive(run, CASE, 2)
        before = run.outcome()
        with torch.no_grad():
            _p(run)[0].fill_(0.3)
            _p(run)[1].copy_(_p(run)[1].clone())
        after = run.outcome()
        want_weight, want_master = before.weights[WEIGHT].clone(), before.masters[WEIGHT].clone()
        want_weight[0] = 0.3
        want_master[0] = want_weight[0].float()
        assert_same_bits(after.weights[WEIGHT], want_weight)
        assert_same_bits(after.masters[WEIGHT], want_master)
        for name in before.masters:
            if name != WEIGHT:
                assert_same_bits(after.masters[name], before.masters[name], name)
    finally:
        run.engine.close()


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_inplace_with_grad_is_torchs_error(mapping: str) -> None:
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), _start("cpu", mapping, recipe)
    try:
        drive(run, CASE, 1)
        with pytest.raises(RuntimeError, match="leaf"):
            _p(run).mul_(2.0)
        with pytest.raises(RuntimeError, match="leaf"):
            _p(run)[0] = 1.0
        drive(run, CASE, 2, first=1)
        drive(reference, CASE, 3)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


VIEWS = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "transpose": lambda p: p.detach().t(),
    "flat": lambda p: p.data.view(-1),
    "row": lambda p: p.detach()[3],
    "alias": lambda p: p.detach().view_as(p),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("view", VIEWS)
def test_view_kept_across_steps(view: str, mapping: str, placement: str) -> None:
    """A kept view shows the parameter's present value, as torch's would, or is refused."""
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), _start(placement, mapping, recipe)
    try:
        drive(run, CASE, 1)
        drive(reference, CASE, 1)
        want = VIEWS[view](_p(reference))
        try:
            kept = VIEWS[view](_p(run))
        except gs.GuardError as error:
            kept = None
            assert _names_a_parameter(run, error)
        drive(run, CASE, 2, first=1)
        drive(reference, CASE, 2, first=1)
        if kept is not None:
            try:
                assert_same_bits(kept.clone(), want, f"kept {view}")
            except gs.GuardError as error:
                assert WEIGHT in str(error)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


# ---- doors to gradients, between backward and step --------------------------------------------------


@_door(GRADIENTS, refusable=True)
def _read_grad(run: Plain) -> Any:
    return _p(run).grad.clone(), [p.grad.norm() for p in run.model.parameters()]


@_door(GRADIENTS, refusable=True)
def _grad_is_there(run: Plain) -> Any:
    return [p.grad is not None for p in run.model.parameters()]


@_door(GRADIENTS, refusable=True)
def _grad_to_none(run: Plain) -> Any:
    _p(run).grad = None


@_door(GRADIENTS, refusable=True)
def _grad_assign(run: Plain) -> Any:
    _p(run).grad = torch.full_like(_p(run), 0.03)


@_door(GRADIENTS, refusable=True)
def _grad_inplace(run: Plain) -> Any:
    for p in run.model.parameters():
        p.grad.mul_(0.25)


@_door(GRADIENTS, refusable=True)
def _grad_inplace_one(run: Plain) -> Any:
    _p(run).grad.zero_()


@_door(GRADIENTS, refusable=True)
def _grad_data_inplace(run: Plain) -> Any:
    for p in run.model.parameters():
        p.grad.data.mul_(-2.0)


@_door(GRADIENTS, refusable=True)
def _torch_clip_grad_norm(run: Plain) -> Any:
    return nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)


@_door(GRADIENTS, refusable=True)
def _torch_clip_grad_norm_not_foreach(run: Plain) -> Any:
    return nn.utils.clip_grad_norm_(run.model.parameters(), 0.01, foreach=False)


@_door(GRADIENTS, refusable=True)
def _torch_clip_grad_value(run: Plain) -> Any:
    nn.utils.clip_grad_value_(run.model.parameters(), 0.001)


@_door(GRADIENTS, refusable=True)
def _torch_clip_some(run: Plain) -> Any:
    return nn.utils.clip_grad_norm_(run.model.blocks.parameters(), 0.01)


@_door(GRADIENTS)
def _zero_grad_of_model(run: Plain) -> Any:
    run.model.zero_grad()


@_door(GRADIENTS)
def _zero_grad_of_optimizer(run: Plain) -> Any:
    run.optimizer.zero_grad()


@_door(GRADIENTS, refusable=True)
def _zero_grad_of_submodule(run: Plain) -> Any:
    run.model.blocks[1].zero_grad()


@_door(GRADIENTS, refusable=True)
def _zero_grad_to_zeros(run: Plain) -> Any:
    run.optimizer.zero_grad(set_to_none=False)


@_door(GRADIENTS, refusable=True)
def _requires_grad_off(run: Plain) -> Any:
    _p(run).requires_grad_(False)
    _p(run).requires_grad_(True)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("door", GRADIENTS, ids=repr)
def test_gradient_door(door: Door, precision: str, mapping: str) -> None:
    recipe = Recipe(precision=precision)
    reference, run = plain(CASE.build, recipe), _start("cpu", mapping, recipe)
    try:
        for step in range(3):
            for which in (run, reference):
                torch.manual_seed(step)
                which.backward(CASE.loss(which, CASE.batch(step)))
            _walk_both(door, run, reference)
            for which in (run, reference):
                which.finish()
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_no_gradient_before_backward(mapping: str) -> None:
    recipe = Recipe(precision="32-true")
    run = _start("cpu", mapping, recipe)
    try:
        assert all(p.grad is None for p in run.model.parameters())
        drive(run, CASE, 1)
        assert all(p.grad is None for p in run.model.parameters())
    finally:
        run.engine.close()


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_user_hooks_see_the_gradient(mapping: str) -> None:
    """Tensor hooks and post-accumulate hooks on parameters, set after manage, see the true bytes."""
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), _start("cpu", mapping, recipe)
    seen: dict[Plain, list] = {run: [], reference: []}
    try:
        for which in (run, reference):
            try:
                handle = _p(which).register_hook(lambda g, w=which: seen[w].append(g.clone()))
            except gs.GuardError as error:
                assert WEIGHT in str(error)
                seen = {run: [], reference: []}
                break
            drive(which, CASE, 2)
            handle.remove()
        _same(seen[run], seen[reference])
    finally:
        run.engine.close()


# ---- doors that change the model ---------------------------------------------------------------------


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("change", ["half", "double", "bfloat16"])
def test_cast_after_manage_is_refused(change: str, mapping: str) -> None:
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), _start("cpu", mapping, recipe)
    try:
        drive(run, CASE, 1)
        with pytest.raises(gs.GeminiError) as refusal:
            getattr(run.model, change)()
        assert _names_a_parameter(run, refusal.value)
        drive(run, CASE, 2, first=1)
        drive(reference, CASE, 3)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_moves_that_change_nothing(mapping: str) -> None:
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), _start("cpu", mapping, recipe)
    try:
        drive(run, CASE, 1)
        run.model.to("cpu").cpu().float().to(torch.float32)
        run.model.train(False).train(True)
        run.model.requires_grad_(True)
        drive(run, CASE, 2, first=1)
        drive(reference, CASE, 3)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_parameter_replaced_after_manage(mapping: str) -> None:
    """A replaced parameter is refused at the latest at the next pass, by name; never trained past."""
    recipe = Recipe(precision="32-true")
    run = _start("cpu", mapping, recipe)
    try:
        drive(run, CASE, 1)
        with pytest.raises(gs.GeminiError, match=r"head\.weight"):
            run.model.head.weight = nn.Parameter(torch.zeros(32, 32))
            drive(run, CASE, 1, first=1)
    finally:
        run.engine.close()


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_module_added_after_manage(mapping: str) -> None:
    """A module added later behaves as in torch (a gradient, no update) or is refused by name."""
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), _start("cpu", mapping, recipe)

    def add(which: Plain) -> None:
        torch.manual_seed(5)
        which.model.blocks.append(nn.Linear(32, 32))
        drive(which, CASE, 2)

    try:
        try:
            add(run)
        except gs.GeminiError as error:
            assert "blocks.3" in str(error)
            return
        add(reference)
        _same(run.losses, reference.losses)
        assert_same_bits(_p(run).clone(), _p(reference))
    finally:
        run.engine.close()


# ---- the doors we offer ------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-mixed"])
def test_full_parameter(precision: str, mapping: str, placement: str) -> None:
    recipe = Recipe(precision=precision)
    run = _start(placement, mapping, recipe)
    try:
        drive(run, CASE, 2)
        before = run.outcome()
        for name, p in run.model.named_parameters():
            with run.engine.full_parameter(p) as value:
                assert value.dtype == torch.float32 and value.device.type == "cpu"
                assert_same_bits(value, before.masters[name], name)
        assert_same_outcome(run.outcome(), before)
        with run.engine.full_parameter(_p(run)) as value:
            value[0].fill_(1 / 3)
        after = run.outcome()
        want = before.masters[WEIGHT].clone()
        want[0] = 1 / 3
        assert_same_bits(after.masters[WEIGHT], want)
        assert_same_bits(after.masters[OTHER], before.masters[OTHER])
        dtype = after.weights[WEIGHT].dtype
        assert_same_bits(after.weights[WEIGHT][0], torch.full((32,), 1 / 3).to(dtype))
    finally:
        run.engine.close()


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_full_parameters(mapping: str) -> None:
    """Inside the context parameters are plain: every door is open, and writes stay."""
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), _start("cpu", mapping, recipe)

    def change(which: Plain) -> list:
        kept = []
        for p in which.model.parameters():
            kept.append(p.detach().numpy().copy())
            p.data.mul_(0.5)
            p.detach().numpy()[...] += 0.25
        return kept

    try:
        drive(run, CASE, 2)
        drive(reference, CASE, 2)
        with run.engine.full_parameters():
            got = change(run)
        _same(got, change(reference))
        with run.engine.full_parameters(run.model.blocks[1], writable=False):
            assert_same_bits(_p(run).clone(), _p(reference).detach())
        drive(run, CASE, 2, first=2)
        drive(reference, CASE, 2, first=2)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


class _Peeking(nn.Module):
    """A parent that looks at the weights of all its children around every call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.no_grad():
                self.seen.append(torch.stack([m.weight.sum() for m in self.layers]))
            scale = self.layers[0].weight.detach().abs().max() + self.layers[4].bias.mean()
            x = torch.tanh(layer(x) * scale)
            self.seen.append(layer.weight.data[0].clone())
        return x


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_parent_reads_children(precision: str, mapping: str, placement: str) -> None:
    case = Case("peeking", _Peeking, CASE.batch, CASE.loss)
    recipe = Recipe(precision=precision, clip=0.5)
    reference, run = plain(case.build, recipe), _start(placement, mapping, recipe, case)
    try:
        for which in (run, reference):
            drive(which, case, 3)
        _same(run.model.seen, reference.model.seen)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_closure_reads_and_trains(mapping: str) -> None:
    """`optimizer.step(closure)`: the closure runs forward, backward and reads weights."""
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), _start("cpu", mapping, recipe)

    def steps(which: Plain) -> Iterator[Any]:
        for step in range(3):
            def closure(step: int = step) -> Tensor:
                torch.manual_seed(step)
                which.optimizer.zero_grad()
                loss = CASE.loss(which, CASE.batch(step)) + 0 * _p(which).detach().sum()
                loss.backward()
                return loss

            yield which.optimizer.step(closure).detach(), _p(which).clone()
        which.zero_grad()

    try:
        _same(list(steps(run)), list(steps(reference)))
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()
