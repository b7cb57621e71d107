"""The optimizer that the user made goes on being that object: groups, schedulers, hooks, state, its end.

Also the life of the engine around it: `engine_of`, close, what is left behind, and that everything is
given back when the engine is dropped, closed or forgotten at interpreter exit.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gemini_strategy as gs
from helpers.pairs import turns
from helpers.ranks import fork_context
from helpers.reference import (
    Managed,
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    drive,
    managed,
    plain,
    start,
)
from helpers.scripts import run_to_the_end
from helpers.zoo import mlp_case

CASE = mlp_case(width=32, depth=3)
STEPS = 8


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    decay = [p for n, p in model.named_parameters() if p.dim() > 1 and "head" not in n]
    plain_ones = [p for p in model.parameters() if p.dim() == 1]
    head = [model.head.weight]
    return [
        {"params": decay, "weight_decay": 0.1, "lr": 1e-3},
        {"params": plain_ones, "weight_decay": 0.0, "betas": (0.8, 0.95)},
        {"params": head, "lr": 5e-3, "eps": 1e-6},
    ]


def _half_of_all(run: Plain) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5


def _compare(run: Plain, reference: Plain, script: Callable[[Plain], None]) -> None:
    try:
        for which in (run, reference):
            script(which)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


# ---- groups and schedulers -----------------------------------------------------------------------------


@turns(policy=["cpu", "auto", "cuda"], precision=["bf16-true", "16-mixed", "32-true"])
def test_groups(policy: str, precision: str) -> None:
    recipe = Recipe(precision=precision, groups=_groups, clip=1.0)
    run = managed(CASE.build, recipe, placement_policy=policy, chunk_size=10_000)
    _compare(run, plain(CASE.build, recipe), lambda which: drive(which, CASE, STEPS))


def test_group_values_may_be_edited() -> None:
    def script(run: Plain) -> None:
        drive(run, CASE, 2)
        _half_of_all(run)
        drive(run, CASE, 1, first=2)
        run.optimizer.param_groups[0]["weight_decay"] = 0.5
        run.optimizer.param_groups[1]["betas"] = (0.5, 0.9)
        run.optimizer.param_groups[2]["eps"] = 1e-3
        drive(run, CASE, 2, first=3)

    recipe = Recipe(groups=_groups)
    run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=4096)
    _compare(run, plain(CASE.build, recipe), script)


# One that writes lr, those that write betas too, those that hold others.
SCHEDULERS = {
    "exponential": lambda o: lrs.ExponentialLR(o, 0.8),
    "cyclic": lambda o: lrs.CyclicLR(o, 1e-4, 1e-2, 3, cycle_momentum=True),
    "onecycle": lambda o: lrs.OneCycleLR(o, 1e-2, total_steps=20),
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, 1.0, 3), lrs.CosineAnnealingLR(o, 5)], [3]
    ),
    "chained": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.5, 2), lrs.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
def test_scheduler(name: str, when: str) -> None:
    """Schedulers wrap `optimizer.step`; one made before manage must reach the engine all the same."""
    make = SCHEDULERS[name]
    recipe = Recipe(groups=_groups)
    reference = plain(CASE.build, recipe)
    reference.scheduler = make(reference.optimizer)
    if when == "after":
        run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=4096)
        run.scheduler = make(run.optimizer)
    else:
        run = _managed_with_scheduler(recipe, make)
    _compare(run, reference, lambda which: drive(which, CASE, STEPS))


def _managed_with_scheduler(recipe: Recipe, make: Callable) -> Any:
    from helpers.reference import Managed

    model = start(CASE.build, recipe)
    optimizer = gs.HybridAdam(recipe.groups(model), lr=recipe.lr, weight_decay=recipe.weight_decay)
    scheduler = make(optimizer)
    engine = gs.manage(
        model,
        optimizer,
        device="cpu",
        precision=recipe.precision,
        placement_policy="cpu",
        chunk_size=4096,
    )
    assert engine.optimizer is optimizer
    run = Managed(engine, recipe)
    run.scheduler = scheduler
    return run


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
def test_reduce_on_plateau() -> None:
    def script(run: Plain) -> None:
        scheduler = lrs.ReduceLROnPlateau(run.optimizer, factor=0.5, patience=1)
        for step in range(STEPS):
            drive(run, CASE, 1, first=step)
            scheduler.step(1.0)

    recipe = Recipe(groups=_groups)
    run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=4096)
    _compare(run, plain(CASE.build, recipe), script)


# ---- torch's optimizers -----------------------------------------------------------------------------------


TORCH = {
    "adamw": (lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.05), True),
    "adamw_foreach": (
        lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.05, foreach=True),
        True,
    ),
    "adamw_fused": (lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.05, fused=True), True),
    "adamw_tensor_lr": (
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(2e-3), weight_decay=0.05),
        True,
    ),
    "adam": (lambda p: torch.optim.Adam(p, lr=2e-3, weight_decay=0.05), False),
    "adam_decoupled": (
        lambda p: torch.optim.Adam(p, lr=2e-3, weight_decay=0.05, decoupled_weight_decay=True),
        True,
    ),
}


@turns(name=TORCH, precision=["32-true", "bf16-true"])
def test_torch_optimizers(name: str, precision: str) -> None:
    from helpers.reference import Managed

    make, decoupled = TORCH[name]
    lr = float(torch.tensor(2e-3)) if "tensor" in name else 2e-3
    recipe = Recipe(precision=precision, lr=lr, weight_decay=0.05, adamw_mode=decoupled)
    model = start(CASE.build, recipe)
    optimizer = make(model.parameters())
    kind = type(optimizer)
    engine = gs.manage(
        model, optimizer, device="cpu", precision=precision, placement_policy="cpu", chunk_size=4096
    )
    assert engine.optimizer is optimizer and isinstance(optimizer, kind)
    run = Managed(engine, recipe)
    _compare(run, plain(CASE.build, recipe), lambda which: drive(which, CASE, STEPS))
    assert type(optimizer) is kind


def test_cpu_adam_is_hybrid_adam() -> None:
    recipe = Recipe()
    model = start(CASE.build, recipe)
    optimizer = gs.CPUAdam(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    engine = gs.manage(model, optimizer, device="cpu", placement_policy="cpu", chunk_size=4096)
    _compare(Managed(engine, recipe), plain(CASE.build, recipe), lambda w: drive(w, CASE, STEPS))


@pytest.mark.parametrize("mode", [True, False])
def test_adam_without_correction(mode: bool) -> None:
    recipe = Recipe(adamw_mode=mode, bias_correction=False, precision="bf16-mixed")
    run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=4096)
    _compare(run, plain(CASE.build, recipe), lambda which: drive(which, CASE, STEPS))


def test_optimizer_that_has_stepped_is_taken_over_with_its_state() -> None:
    """Three plain steps, then manage: the rest equals six plain steps."""
    recipe = Recipe()
    reference, early = plain(CASE.build, recipe), plain(CASE.build, recipe)
    drive(reference, CASE, 6)
    drive(early, CASE, 3)
    engine = gs.manage(
        early.model, early.optimizer, device="cpu", placement_policy="cpu", chunk_size=4096
    )
    run = Managed(engine, recipe)
    run.losses += early.losses
    drive(run, CASE, 3, first=3)
    assert_same_outcome(run.outcome(), reference.outcome())
    engine.close()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_close_hands_everything_back(precision: str) -> None:
    """After close an ordinary loop with the same objects continues to the same bits."""
    recipe = Recipe(precision=precision, groups=_groups)
    reference = plain(CASE.build, recipe)
    drive(reference, CASE, 6)
    run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=4096)
    drive(run, CASE, 3)
    engine = run.engine
    engine.close()
    assert engine.closed
    assert type(run.optimizer) is gs.HybridAdam
    for module in run.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not module._backward_hooks and not module._backward_pre_hooks
    for p in run.model.parameters():
        assert type(p) is nn.Parameter and p.is_leaf and p.grad is None
        assert p.detach().numpy().size if p.dtype == torch.float32 else p.data_ptr()
    gs.cast_model_(run.model, None if precision == "32-true" else precision)  # it left in fp32
    rest = Plain(run.model, run.optimizer, recipe)
    rest.losses, rest.norms = run.losses, run.norms
    drive(rest, CASE, 3, first=3)
    assert_same_outcome(rest.outcome(), reference.outcome())
    copy.deepcopy(run.model)
    pickle.loads(pickle.dumps(run.model))
    copy.deepcopy(run.optimizer)


def test_manage_close_manage() -> None:
    """Managed, closed and managed again with another layout: the bits of one run."""
    recipe = Recipe()
    reference = plain(CASE.build, recipe)
    drive(reference, CASE, 6)
    run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=4096)
    drive(run, CASE, 3)
    run.engine.close()
    engine = gs.manage(
        run.model,
        run.optimizer,
        device="cpu",
        placement_policy="auto",
        chunk_size=20_000,
    )
    again = Managed(engine, recipe)
    again.losses += run.losses
    drive(again, CASE, 3, first=3)
    assert_same_outcome(again.outcome(), reference.outcome())
    engine.close()


def test_managed_read_and_closed_in_inference_mode() -> None:
    """What was called there trains on outside, as if it had been called outside."""
    precision = "bf16-true"
    recipe = Recipe(precision=precision)
    reference = plain(CASE.build, recipe)
    drive(reference, CASE, 6)
    model = start(CASE.build, recipe, "cpu")
    optimizer = gs.HybridAdam(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    with torch.inference_mode():
        engine = gs.manage(model, optimizer, device="cpu", precision=precision)
    run = Managed(engine, recipe)
    drive(run, CASE, 2)
    with torch.inference_mode():
        optimizer.state_dict()
        engine.optimizer_state_dict()
    drive(run, CASE, 2, first=2)
    with torch.inference_mode():
        engine.close()
    assert not any(p.is_inference() for p in model.parameters())
    gs.cast_model_(model, precision)  # it left in fp32
    rest = Plain(model, optimizer, recipe)
    rest.losses, rest.norms = run.losses, run.norms
    drive(rest, CASE, 2, first=4)
    assert_same_outcome(rest.outcome(), reference.outcome())


# ---- the object itself ---------------------------------------------------------------------------------------


def test_same_object_same_groups() -> None:
    recipe = Recipe(groups=_groups)
    model = start(CASE.build, recipe)
    optimizer = gs.HybridAdam(_groups(model))
    groups = optimizer.param_groups
    first = groups[0]["params"][0]
    engine = gs.manage(model, optimizer, device="cpu", placement_policy="cpu")
    assert engine.optimizer is optimizer and engine.model is model
    assert optimizer.param_groups is groups and groups[0]["params"][0] is first
    assert isinstance(optimizer, gs.HybridAdam) and isinstance(optimizer, torch.optim.Optimizer)
    assert "lr" in repr(optimizer)
    assert engine.device == torch.device("cpu")
    engine.close()


def test_engine_of() -> None:
    model = CASE.build()
    outside = nn.Linear(2, 2)
    assert gs.engine_of(model) is None
    engine = gs.manage(model, gs.HybridAdam(model.parameters()), device="cpu")
    assert gs.engine_of(model) is engine
    assert gs.engine_of(model.blocks[1][1]) is engine
    assert gs.engine_of(outside) is None
    engine.close()
    assert gs.engine_of(model) is None


def test_a_model_whose_parameters_were_all_replaced_has_its_engine() -> None:
    """Else a second engine would be over the first, and either's close() would take the other's forward away."""
    model = nn.Sequential(nn.Linear(4, 4))
    engine = gs.manage(model, gs.HybridAdam(model.parameters()), device="cpu")
    model[0] = nn.Linear(4, 4)
    assert gs.engine_of(model) is engine
    with pytest.raises(gs.GeminiError, match="this model is managed already"):
        gs.manage(model, device="cpu", precision="bf16-mixed")
    engine.close()
    again = gs.manage(model, device="cpu", precision="bf16-mixed")
    assert gs.engine_of(model) is again
    again.close()


def _wrap_forward(model: nn.Module) -> None:
    inner = model.forward
    model.forward = lambda *args: inner(*args) * 0.5


def _change_class(model: nn.Module) -> None:
    kind = type(model)
    model.__class__ = type("Other", (kind,), {"forward": lambda s, x: kind.forward(s, x) * 0.5})


@pytest.mark.parametrize("change", [_wrap_forward, _change_class])
def test_a_forward_that_is_changed_while_managed_counts_and_stays(
    change: Callable[[nn.Module], None],
) -> None:
    outcomes = []
    for is_managed in (False, True):
        model = start(CASE.build, Recipe())
        optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
        losses = []
        for number in range(STEPS):
            if is_managed and number in (0, 6):
                engine = gs.manage(model, optimizer, device="cpu")
            if number == 2:
                change(model)
            if is_managed and number == 4:
                engine.close()
            loss = CASE.loss(model, CASE.batch(number))
            loss.backward()
            optimizer.step()
            model.zero_grad()
            losses.append(loss.detach())
        outcomes.append(losses)
    for a, b in zip(*outcomes, strict=True):
        assert_same_bits(a, b)
    engine.close()


def test_step_hooks_run() -> None:
    seen = []
    run = managed(CASE.build, Recipe(), placement_policy="cpu", chunk_size=4096)
    before = register_optimizer_step_pre_hook(lambda o, a, k: seen.append("global"))
    run.optimizer.register_step_pre_hook(lambda o, a, k: seen.append("pre"))
    run.optimizer.register_step_post_hook(lambda o, a, k: seen.append("post"))
    drive(run, CASE, 2)
    before.remove()
    run.engine.close()
    assert seen == ["global", "pre", "post"] * 2 or seen == ["pre", "global", "post"] * 2


def test_step_hooks_made_before_manage_run() -> None:
    seen = []
    model = CASE.build()
    optimizer = gs.HybridAdam(model.parameters())
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(1))
    engine = gs.manage(model, optimizer, device="cpu")
    CASE.loss(model, CASE.batch(0)).backward()
    optimizer.step()
    engine.close()
    assert seen == [1]


def _clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("looks_like_torchs", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_the_user_has_wrapped_stays_wrapped(when: str, looks_like_torchs: bool) -> None:
    """Through manage() and close(), with a scheduler around it."""
    outcomes = []
    for is_managed in (False, True):
        model = start(CASE.build, Recipe())
        optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
        is_late = is_managed and when == "after"
        engine = gs.manage(model, optimizer, device="cpu") if is_late else None
        inner = optimizer.step

        def step(self: Any, closure: Any = None, inner: Any = inner, model: Any = model) -> Any:
            result = inner(closure) if when == "after" else type(self).step(self, closure)
            _clamp(model)
            return result

        if looks_like_torchs:
            step = functools.wraps(type(optimizer).step)(step)
        optimizer.step = step.__get__(optimizer)
        scheduler = lrs.StepLR(optimizer, 2, 0.5)
        if is_managed and not is_late:
            engine = gs.manage(model, optimizer, device="cpu")
        losses = []
        for number in range(STEPS):
            if engine is not None and number == STEPS // 2:
                engine.close()
            loss = CASE.loss(model, CASE.batch(number))
            loss.backward()
            optimizer.step()
            scheduler.step()
            model.zero_grad()
            losses.append(loss.detach())
        outcomes.append(losses)
    for a, b in zip(*outcomes, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("kind", [gs.HybridAdam, torch.optim.AdamW, torch.optim.Adam])
def test_a_step_from_before_manage_is_refused(kind: Any) -> None:
    """It would update past the engine, and a clip would be lost."""
    model = start(CASE.build, Recipe())
    optimizer = kind(model.parameters())
    taken = [optimizer.step]
    if kind is gs.HybridAdam:
        taken.append(lambda clip=optimizer.clip_grad_norm_: clip(0.1))
    engine = gs.manage(model, optimizer, device="cpu")
    CASE.loss(model, CASE.batch(0)).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for past in taken:
        with pytest.raises(gs.GeminiError, match="was taken from the optimizer before manage"):
            past()
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name], name)
    optimizer.step()
    engine.close()


@pytest.mark.parametrize("name", ["step", "zero_grad"])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_class_whose_step_or_zero_grad_somebody_has_replaced_is_refused(
    name: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would do without it, in silence."""
    model = start(CASE.build, Recipe())
    optimizer = torch.optim.AdamW(model.parameters())
    own = getattr(torch.optim.AdamW, name)
    engine = gs.manage(model, optimizer, device="cpu") if is_late else None
    CASE.loss(model, CASE.batch(0)).backward()
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, name, functools.wraps(own)(lambda *args: own(*args)))
        with pytest.raises(gs.GeminiError, match=rf"{name} is a function of test_takeover"):
            optimizer.step() if is_late else gs.manage(model, optimizer, device="cpu")
    engine = engine or gs.manage(model, optimizer, device="cpu")
    optimizer.step()
    engine.close()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_state_dicts_by_methods_from_before_manage(precision: str) -> None:
    recipe = Recipe(precision=precision)
    model = start(CASE.build, recipe)
    optimizer = gs.HybridAdam(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    save, load = optimizer.state_dict, optimizer.load_state_dict
    reference = plain(CASE.build, recipe)
    with gs.manage(model, optimizer, precision=precision, device="cpu") as engine:
        run = Managed(engine, recipe)
        for each, state_of in ((run, save), (reference, reference.optimizer.state_dict)):
            drive(each, CASE, 2)
            weights = copy.deepcopy(each.model.state_dict())
            state = pickle.loads(pickle.dumps(state_of()))
            drive(each, CASE, 2, first=2)
            each.model.load_state_dict(weights)
            (load if each is run else reference.optimizer.load_state_dict)(state)
            drive(each, CASE, 2, first=4)
        assert_same_outcome(run.outcome(), reference.outcome())


def test_torch_s_load_state_dict_from_before_manage_rounds_and_is_refused() -> None:
    model = CASE.build()
    optimizer = torch.optim.AdamW(model.parameters())
    load = optimizer.load_state_dict
    with gs.manage(model, optimizer, precision="bf16-mixed", device="cpu") as engine:
        drive(Managed(engine, Recipe(precision="bf16-mixed")), CASE, 2)
        state = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(gs.GeminiError, match=r"load_state_dict was taken .* before manage"):
            load(state)
        for index, entry in optimizer.state_dict()["state"].items():
            assert_same_bits(entry["exp_avg"], state["state"][index]["exp_avg"])


def test_another_optimizer_of_ours_on_managed_16_bit_weights_is_refused() -> None:
    """It would not know their masters."""
    run = managed(CASE.build, Recipe(precision="bf16-mixed"))
    other = gs.HybridAdam(run.model.parameters())
    drive(run, CASE, 2)
    before = run.outcome()
    run.backward(CASE.loss(run, CASE.batch(2)))
    with pytest.raises(gs.GeminiError, match=r"stem\.weight is managed.* not this HybridAdam"):
        other.step()
    run.engine.zero_grad()
    assert_same_outcome(run.outcome(), before)
    run.engine.close()


def test_methods_that_were_taken_while_managed_work_after_close() -> None:
    seen = []
    model = start(CASE.build, Recipe())
    optimizer = gs.HybridAdam(model.parameters())
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append(1))
    engine = gs.manage(model, optimizer, device="cpu")
    step, zero_grad, clip = optimizer.step, optimizer.zero_grad, optimizer.clip_grad_norm_
    save, load, add = optimizer.state_dict, optimizer.load_state_dict, optimizer.add_param_group
    names = {
        "__init__": lambda self: None,
        "__getattr__": lambda self, key: getattr(optimizer, key),
    }
    wrapper = type("Wrapper", (type(optimizer),), names)()  # as Lightning's
    engine.close()
    CASE.loss(model, CASE.batch(0)).backward()
    assert clip(0.5) > 0
    step()
    assert seen == [1]
    for clear in (zero_grad, wrapper.zero_grad):
        CASE.loss(model, CASE.batch(0)).backward()
        clear()
        assert all(p.grad is None for p in model.parameters())
    load(save())
    add({"params": [optimizer.param_groups[0]["params"].pop()]})
    assert len(optimizer.param_groups) == 2


def test_a_class_that_the_user_has_put_over_the_optimizers_steps_and_is_told_of_at_close() -> None:
    seen = []
    run = managed(CASE.build, Recipe())
    kind = type(run.optimizer)
    names = {"step": lambda self, closure=None: seen.append(1) or kind.step(self, closure)}
    run.optimizer.__class__ = type("Counting", (kind,), names)
    drive(run, CASE, 2)
    with pytest.warns(RuntimeWarning, match="class became Counting"):
        run.engine.close()
    assert seen == [1, 1] and type(run.optimizer) is gs.HybridAdam


def test_a_clip_whose_step_has_not_come_is_refused_at_manage() -> None:
    """The engine would step unclipped."""
    model = start(CASE.build, Recipe())
    optimizer = gs.HybridAdam(model.parameters())
    CASE.loss(model, CASE.batch(0)).backward()
    optimizer.clip_grad_norm_(1e-3)
    with pytest.raises(gs.GeminiError, match="clipped gradients that its step has not used"):
        gs.manage(model, optimizer, device="cpu")
    optimizer.step()
    gs.manage(model, optimizer, device="cpu").close()


def test_a_parameter_that_is_in_the_groups_twice_is_refused_by_name() -> None:
    run = managed(CASE.build, Recipe())
    group = run.optimizer.param_groups[0]
    group["params"].append(group["params"][0])
    CASE.loss(run, CASE.batch(0)).backward()
    name = next(iter(dict(run.model.named_parameters())))
    with pytest.raises(gs.GeminiError, match=f"{name} is in them twice"):
        run.engine.clip_grad_norm_(1.0)
    group["params"].pop()
    run.optimizer.step()
    run.engine.close()


def test_a_closure_that_closes_the_engine_is_told_so() -> None:
    run = managed(CASE.build, Recipe())
    with pytest.raises(gs.GeminiError, match="this engine is closed"):
        run.optimizer.step(run.engine.close)


def test_closure_result_is_returned() -> None:
    run = managed(CASE.build, Recipe(), placement_policy="cpu", chunk_size=4096)

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = CASE.loss(run, CASE.batch(0))
        loss.backward()
        return loss

    first = run.optimizer.step(closure)
    second = run.engine.step(closure)
    assert first.requires_grad and torch.isfinite(first) and second < first * 2
    assert run.optimizer.step() is None
    run.engine.close()


def test_optimizer_pickle_and_copy_do_not_take_the_engine() -> None:
    """Copies of a managed optimizer are refused clearly or are ordinary optimizers."""
    run = managed(CASE.build, Recipe(), placement_policy="cpu", chunk_size=4096)
    drive(run, CASE, 1)
    for make in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        try:
            other = make(run.optimizer)
        except (gs.GeminiError, TypeError):
            continue
        assert type(other) is gs.HybridAdam
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises((gs.GeminiError, TypeError)):
            make(run.engine)
    drive(run, CASE, 1)
    run.engine.close()


def _store(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    moments = [entry["exp_avg"] for entry in optimizer.state.values()]
    torch.save((model.state_dict(), moments), path)


def test_a_process_that_is_started_gets_an_ordinary_model(tmp_path: Path) -> None:
    """It takes each tensor's memory by descriptor, when all of them have been pickled."""
    run = managed(CASE.build, Recipe(), placement_policy="cpu", chunk_size=4096)
    drive(run, CASE, 2)
    args = run.model, run.optimizer, tmp_path / "seen"
    process = fork_context().Process(target=_store, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0
    weights, moments = torch.load(tmp_path / "seen")
    for name, value in run.model.state_dict().items():
        assert torch.equal(weights[name], value), name
    for value, parameter in zip(moments, run.model.parameters(), strict=True):
        assert torch.equal(value, run.optimizer.state[parameter]["exp_avg"])
    run.engine.close()


# ---- the end --------------------------------------------------------------------------------------------------


def _usage() -> tuple[int, int, int]:
    """Open files, memory mappings and threads of this process."""
    process = Path("/proc/self")
    n_maps = len((process / "maps").read_text().splitlines())
    return len(list((process / "fd").iterdir())), n_maps, len(list((process / "task").iterdir()))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("keeps_loss", [False, True])
def test_a_closed_model_that_is_dropped_frees_its_memory_at_once(keeps_loss: bool) -> None:
    """Python looks for cycles when it likes; the next model may want the memory before."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    managed(
        build, Recipe()
    ).engine.close()  # the first optimizer makes torch import what keeps frames
    gc.collect()
    gc.disable()
    try:
        run = managed(build, Recipe())
        run(torch.ones(2, 8)).sum().backward()
        run.optimizer.step()
        loss = run(torch.ones(2, 8)).sum() if keeps_loss else None
        run.engine.close()
        memory = [weakref.ref(p.untyped_storage()) for p in run.model.parameters()]
        dropped = [weakref.ref(run.model), weakref.ref(run.engine), weakref.ref(run.optimizer)]
        del run
        assert [each() for each in dropped] == [None] * 3
        if loss is None:
            assert [each() for each in memory] == [None] * 4
        else:
            with pytest.raises(gs.GeminiError, match="engine is closed"):
                loss.backward()
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["close", "drop"])
def test_everything_is_given_back(how: str) -> None:
    def once() -> weakref.ref:
        run = managed(
            lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))),
            Recipe(),
            placement_policy="auto",
            device_budget=1 << 21,
        )
        run(torch.ones(2, 256)).sum().backward()
        run.optimizer.step()
        if how == "close":
            run.engine.close()
        return weakref.ref(run.engine)

    for _ in range(4):
        once()
    gc.collect()
    files, maps, threads = _usage()
    grown = []
    for _ in range(2):  # malloc keeps some of what it had; a leak of 4 MiB each shows every time
        resident = _resident()
        engines = [once() for _ in range(20)]
        gc.collect()
        assert [e() for e in engines] == [None] * 20
        grown.append(_resident() - resident)
    files_now, maps_now, threads_now = _usage()
    assert files_now <= files and threads_now <= threads
    assert maps_now <= maps + 10
    assert min(grown) <= 32 << 20, "20 engines with 4 MiB of state each"


def test_states_follow_the_parameters_when_the_device_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU that the engine has filled could not take them before."""
    from gemini_strategy import close

    run = managed(CASE.build, Recipe(precision="bf16-true"), placement_policy="cpu")
    drive(run, CASE, 2)
    optimizer, before = run.optimizer, []

    def devices() -> set[str]:
        return {
            value.device.type
            for state in optimizer.state.values()
            for key, value in state.items()
            if key != "step"
        }

    def give_back(*args: Any) -> None:
        before.append(devices())
        original(*args)
        for slot in run.engine._runtime.slots:
            slot.original_device = torch.device("meta")  # stands for the GPU that they came from

    original = close.give_back
    monkeypatch.setattr(close, "give_back", give_back)
    run.engine.close()
    assert before == [{"cpu"}] and devices() == {"meta"}


def test_close_without_room_for_copies_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost while the engine lives: it stays open, trains on, and can be closed later."""
    recipe = Recipe(precision="bf16-true")
    reference = plain(CASE.build, recipe)
    run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=4096)
    drive(run, CASE, 3)
    last = run.engine._runtime.slots[-1]

    def full(slot: Any, root: int | None = None) -> tuple[Tensor, Tensor]:
        if slot is last:
            raise gs.GeminiMemoryError("HOST: no room")
        return read_moments(slot, root)

    read_moments = type(last).read_moments
    monkeypatch.setattr(type(last), "read_moments", full)
    with pytest.raises(gs.GeminiMemoryError, match="no room"):
        run.engine.close()
    monkeypatch.undo()
    assert not run.engine.closed and type(run.optimizer) is not gs.HybridAdam
    drive(run, CASE, 3, first=3)
    drive(reference, CASE, 6)
    assert_same_outcome(run.outcome(), reference.outcome())
    run.engine.close()
    assert run.engine.closed


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_close_of_an_engine_that_can_read_nothing(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no values says so, in the text and in every use."""
    run = managed(
        CASE.build, Recipe(precision="bf16-true"), placement_policy="cpu", chunk_size=4096
    )
    drive(run, CASE, 2)
    monkeypatch.setattr(run.engine._runtime, "core", _Lost(run.engine._runtime.core))
    with pytest.warns(RuntimeWarning, match=r"the device is gone.*22 parameters .*stem\.weight"):
        run.engine.close(dtype)
    assert run.engine.closed and gs.engine_of(run.model) is None
    for p in run.model.parameters():
        assert type(p) is nn.Parameter and p.dtype is torch.float32 and p.isnan().all()
    assert type(run.optimizer) is gs.HybridAdam and not run.optimizer.state


class _Lost:
    """A core whose device is gone."""

    def __init__(self, core: Any):
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def salvage(self) -> str:
        return "the device is gone"

    def read(self, *args: Any) -> None:
        raise gs.GeminiError("the device is gone")


def test_close_says_what_a_recording_could_not_write(tmp_path: Path) -> None:
    run = managed(CASE.build, Recipe(), placement_policy="cpu", chunk_size=4096)
    folder = tmp_path / "gone"
    folder.mkdir()
    run.engine.timeline(folder / "trace.json", steps=9)
    drive(run, CASE, 2)
    folder.rmdir()
    with pytest.raises(OSError, match="gone"):
        run.engine.close()
    assert run.engine.closed and gs.engine_of(run.model) is None
    run.engine.close()


def test_failed_manage_gives_everything_back() -> None:
    def once() -> None:
        with pytest.raises(gs.GeminiMemoryError):
            managed(
                lambda: nn.Sequential(nn.Linear(512, 512)),
                Recipe(),
                device_budget=100_000,
                placement_policy="cuda",
            )

    for _ in range(3):
        once()
    gc.collect()
    before = _usage()
    for _ in range(10):
        once()
    gc.collect()
    after = _usage()
    assert after[0] <= before[0] and after[2] <= before[2] and after[1] <= before[1] + 10


def test_manage_frees_engines_that_nobody_has_any_more() -> None:
    """Their homes would count as memory that the host does not have."""

    def dropped() -> weakref.ref:
        model = nn.Linear(4, 4)
        return weakref.ref(gs.manage(model, device="cpu")._runtime)

    gc.disable()
    try:
        runtime = dropped()
        gs.manage(nn.Linear(4, 4), device="cpu").close()
    finally:
        gc.enable()
    assert runtime() is None


def test_weights_outlive_a_dropped_engine() -> None:
    """A model whose engine handle was dropped goes on: the model itself keeps the engine."""
    recipe = Recipe()
    run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=4096)
    reference = plain(CASE.build, recipe)
    model, optimizer = run.model, run.optimizer
    del run
    gc.collect()
    for step in range(3):
        torch.manual_seed(1000 + step)
        loss = CASE.loss(model, CASE.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    drive(reference, CASE, 3)
    want = reference.outcome().weights
    for name, value in model.state_dict().items():
        assert_same_bits(value.clone(), want[name], name)
    gs.engine_of(model).close()


ENDINGS = {
    "return": "",
    "close": "engine.close()",
    "exit": "import sys; sys.exit(0)",
    "exception": "raise KeyError('mine')",
    "fork": "import os\npid = os.fork()\nif pid == 0:\n    os._exit(0)\n"
    "assert os.waitpid(pid, 0)[1] == 0\nmodel(x).sum().backward(); optimizer.step()",
}
ENDED = """
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
engine = gs.manage(model, optimizer, device='cpu', placement_policy='cpu')
x = torch.ones(2, 64)
model(x).sum().backward(); optimizer.step()
loss = model(x).sum()
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    programs = {ending: ENDED + end for ending, end in ENDINGS.items()}
    imports = "import torch, torch._dynamo, gemini_strategy as gs"
    return run_to_the_end(tmp_path_factory.mktemp("endings"), programs, imports)


@pytest.mark.parametrize("ending", ENDINGS)
def test_interpreter_exit(ending: str, endings: dict[str, Any]) -> None:
    """No crash, no hang and no noise when the interpreter ends with an engine alive, or a closed one."""
    done = endings[ending]
    if ending == "exception":
        assert done.returncode == 1 and done.stderr.strip().endswith("KeyError: 'mine'")
    else:
        assert done.returncode == 0 and done.stderr == "", done.stderr


def test_a_sparse_gradient_is_refused_by_name_before_anything_changes() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    model(torch.tensor([1, 2])).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(gs.GeminiError, match=r"0\.weight has a sparse gradient already"):
        gs.manage(model, optimizer, device="cpu")
    assert model[0].weight.grad.is_sparse
    optimizer.zero_grad()
    gs.manage(model, optimizer, device="cpu").close()
