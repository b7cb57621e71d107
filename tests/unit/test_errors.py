"""Errors say what, where, how much and the way out; and whatever failed, the next step has the same bits.

The first part goes through what `manage` must refuse and what calls must refuse later, and looks for the
name, the numbers and the way out in the text.  The second part raises in user code at every place of a
pass and compares the training that follows with the reference.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gemini_strategy as gs
from gemini_strategy import _C
from helpers import scripts
from helpers.pairs import pairs
from helpers.reference import (
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    drive,
    managed,
    plain,
    state_bytes,
)
from helpers.zoo import Case, Mlp, mlp_case

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

CASE = mlp_case(width=32, depth=3)
REFUSED = (gs.GeminiError, ValueError, TypeError)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _manage(model: nn.Module, optimizer: Any = None, **how: Any) -> gs.Engine:
    optimizer = _adam(model) if optimizer is None else optimizer
    return gs.manage(model, optimizer, device=how.pop("device", "cpu"), **how)


def _untouched(model: nn.Module) -> None:
    """A refused model is as it was: plain parameters, no hooks, still trainable by plain torch."""
    assert gs.engine_of(model) is None
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    for p in model.parameters():
        assert type(p) is nn.Parameter


# ---- what manage refuses -----------------------------------------------------------------------------


def test_tree() -> None:
    assert issubclass(gs.GeminiError, RuntimeError)
    assert issubclass(gs.GeminiMemoryError, gs.GeminiError)
    assert issubclass(gs.GeminiMemoryError, MemoryError)
    assert issubclass(gs.GeminiDeviceError, gs.GeminiError)
    assert issubclass(gs.GuardError, gs.GeminiError)


@pytest.mark.parametrize("policy", ["auto", "cpu"])
def test_device_budget_below_largest_unit(policy: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4096), nn.Linear(4096, 8))
    with pytest.raises(gs.GeminiMemoryError) as error:
        _manage(model, device_budget=40_000, placement_policy=policy, chunk_size=4096)
    text = str(error.value)
    assert re.search(r"\b[12]\.", text) or "1.weight" in text or "2.weight" in text, text
    assert len(re.findall(r"\d[\d,._]*", text)) >= 2, text
    assert "device_budget leaves 40.00 kB" in text, text
    _untouched(model)
    model(torch.randn(2, 8)).sum().backward()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, gs.HybridAdam])
def test_an_optimizer_that_another_engine_has(kind: type[torch.optim.Optimizer]) -> None:
    """What it lacks is not the right class, and the text must not ask for the class that it has."""
    first, second = Mlp(), Mlp()
    optimizer = kind(first.parameters(), lr=1e-3)
    engine = _manage(first, optimizer)
    with pytest.raises(gs.GeminiError, match="managed already, with another model") as error:
        _manage(second, optimizer)
    assert kind.__name__ in str(error.value) and "close()" in str(error.value)
    assert "not supported" not in str(error.value)
    _untouched(second)
    engine.close()
    _manage(first, optimizer).close()


def test_device_budget_below_a_model_of_one_module() -> None:
    with pytest.raises(gs.GeminiMemoryError, match="module 'the model' .* at least"):
        _manage(nn.Linear(512, 512), device_budget=100_000)


def test_cuda_policy_below_state() -> None:
    model = Mlp()
    with pytest.raises(gs.GeminiMemoryError) as error:
        _manage(model, device_budget=30_000, placement_policy="cuda")
    text = str(error.value)
    assert len(re.findall(r"\d[\d,._]*", text)) >= 2 and "device_budget" in text, text
    assert "auto" in text, "the way out is another policy or a larger budget"
    _untouched(model)


def test_host_budget_too_small() -> None:
    model = Mlp()
    with pytest.raises(gs.GeminiMemoryError) as error:
        _manage(model, host_budget=10_000, placement_policy="cpu")
    text = str(error.value)
    assert "host" in text and len(re.findall(r"\d[\d,._]*", text)) >= 2, text
    assert "host_budget" in text, text
    _untouched(model)


def test_host_memory_is_checked_before_allocating() -> None:
    """A model of more bytes than this machine has, whose values are not there yet."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = memory // 4 // 4096 + 4096

    class Huge(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(rows, 4096, device="meta"))

        def reset_parameters(self):
            raise AssertionError("too late")

    model = Huge()
    with pytest.raises(gs.GeminiMemoryError, match="(?i)host.* wanted"):
        _manage(model, placement_policy="cpu")
    _untouched(model)


def test_no_cuda() -> None:
    if torch.cuda.is_available():
        with pytest.raises(REFUSED, match="cuda:99"):
            _manage(Mlp(), device="cuda:99")
        return
    model = Mlp()
    with pytest.raises(REFUSED) as error:
        _manage(model, device="cuda")
    assert "CUDA" in str(error.value) or "cuda" in str(error.value)
    assert "cpu" in str(error.value).lower()
    _untouched(model)


@pytest.mark.parametrize("isa", ["sse9", "AVX-1024"])
@pytest.mark.parametrize("last", ["gs.HybridAdam([p]).step()", 'gs.manage(model, device="cpu")'])
def test_unknown_instruction_set(isa: str, last: str, tmp_path: Path) -> None:
    """GEMINI_ISA forces one implementation; a wrong or missing one is named, not ignored.

    By manage() also where nothing is measured, as rates are kept or given.
    """
    code = (
        "import os, torch, gemini_strategy as gs\n"
        "os.environ['GEMINI_RATES'] = 'h2d=1e9'\n"
        "model = torch.nn.Linear(3, 1)\n"
        "p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)\n"
        f"{last}\n"
    )
    (tmp_path / "step.py").write_text(code)
    done = scripts.run(tmp_path, ["step.py"], GEMINI_ISA=isa)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert isa in last and "GEMINI_ISA" in last and "scalar" in last, last


@pytest.mark.parametrize("precision", ["16", "fp8", "bf16", "16-true", "", "64-true", 16])
def test_precision_string(precision: Any) -> None:
    model = Mlp()
    with pytest.raises(REFUSED) as error:
        _manage(model, precision=precision)
    text = str(error.value)
    assert repr(precision) in text or str(precision) in text
    for allowed in ("32-true", "bf16-true", "bf16-mixed", "16-mixed"):
        assert allowed in text, text
    _untouched(model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("placement_policy", "disk"),
        ("placement_policy", None),
        ("device_budget", -1),
        ("device_budget", 0),
        ("device_budget", "lots"),
        ("device_budget", float("nan")),
        ("device_budget", [1]),
        ("host_budget", -5),
        ("host_budget", "12 parsecs"),
        ("chunk_size", 0),
        ("chunk_size", -4096),
        ("chunk_size", "big"),
        ("block_size", -1),
        ("gpu_margin_mem_ratio", 1.5),
        ("gpu_margin_mem_ratio", -0.1),
        ("gradient_dtype", torch.int8),
        ("gradient_dtype", "fp7"),
        ("threads", 0),
        ("threads", -2),
    ],
)
def test_configuration_names_the_field(field: str, value: Any) -> None:
    model = Mlp()
    with pytest.raises(REFUSED) as error:
        _manage(model, **{field: value})
    assert field in str(error.value), str(error.value)
    _untouched(model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("initial_scale", 0),
        ("initial_scale", -1),
        ("initial_scale", float("inf")),
        ("min_scale", -1),
        ("growth_factor", 0.5),
        ("backoff_factor", 1.5),
        ("backoff_factor", 0),
        ("growth_interval", 0),
        ("hysteresis", 0),
        ("max_scale", 1),
    ],
)
def test_scaler_configuration_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(REFUSED) as error:
        _manage(Mlp(), precision="16-mixed", **{field: value})
    assert field in str(error.value), str(error.value)


def test_unknown_argument() -> None:
    with pytest.raises(TypeError, match="prefetch_everything"):
        _manage(Mlp(), prefetch_everything=True)


def test_optimizers_with_a_parameter_in_common() -> None:
    model = Mlp()
    with pytest.raises(REFUSED, match=r"is in optimizer 0 \(AdamW\) and in optimizer 1 \(AdamW\)"):
        _manage(model, [_adam(model), _adam(model)])
    _untouched(model)


def test_a_step_that_autograd_records() -> None:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, differentiable=True)
    with pytest.raises(REFUSED, match="differentiable"):
        _manage(model, optimizer)
    _untouched(model)


def test_the_class_of_an_optimizer() -> None:
    with pytest.raises(gs.GeminiError, match=r"the class AdamW.*AdamW\(model.parameters\(\)\)"):
        _manage(Mlp(), torch.optim.AdamW)


def test_not_an_optimizer() -> None:
    with pytest.raises(REFUSED, match=r"optimizer is a str, and no torch.optim.Optimizer"):
        _manage(Mlp(), "adam")


def test_not_a_module() -> None:
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(REFUSED, match=r"[Mm]odule"):
        gs.manage([p], torch.optim.AdamW([p]), device="cpu")


class _Holding(nn.Module):
    def __init__(self, odd: nn.Parameter):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.odd = odd


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64)), "complex"),
        (lambda: nn.Parameter(torch.ones(3, 3, device="meta")), "meta"),
        (lambda: nn.UninitializedParameter(), "initial"),
        (lambda: nn.Parameter(torch.eye(3).to_sparse()), "sparse"),
        (lambda: nn.Parameter(torch.ones(3, dtype=torch.float64)), "float64"),
    ],
    ids=["complex", "meta", "lazy", "sparse", "float64"],
)
def test_parameter_kinds_refused_by_name(make: Callable, word: str) -> None:
    model = _Holding(make())
    optimizer = torch.optim.AdamW(model.body.parameters())
    with pytest.raises(REFUSED) as error:
        _manage(model, optimizer)
    assert "odd" in str(error.value) and word in str(error.value), str(error.value)


def test_integer_parameters_are_carried_along() -> None:
    """Quantized weights are frozen integers: they live in chunks and keep their dtype and bits."""

    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            g = torch.Generator().manual_seed(1)
            codes = torch.randint(-127, 127, (16, 32), dtype=torch.int8, generator=g)
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.up = nn.Linear(16, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(torch.tanh(x @ (self.codes.to(x.dtype) / 127).t()))

    case = Case("quantized", Quantized, CASE.batch, CASE.loss)
    for precision in ("32-true", "bf16-true"):
        recipe = Recipe(precision=precision, groups=lambda model: model.up.parameters())
        reference = plain(Quantized, recipe)
        run = managed(Quantized, recipe, placement_policy="cpu", chunk_size=4096)
        for which in (run, reference):
            drive(which, case, 3)
        assert_same_outcome(run.outcome(), reference.outcome())
        run.engine.close()
        assert run.model.codes.dtype == torch.int8


def test_foreign_parameter_in_optimizer() -> None:
    model, other = Mlp(), nn.Linear(3, 5)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    with pytest.raises(REFUSED) as error:
        _manage(model, optimizer)
    assert "optimizer" in str(error.value) and "(5, 3)" in str(error.value).replace(
        "[", "("
    ).replace("]", ")"), str(error.value)
    _untouched(model)


def test_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(REFUSED, match=r"0\.weight|Embedding"):
        engine = _manage(model, placement_policy="cpu")
        model(torch.tensor([1, 2])).sum().backward()
        engine.step()


# ---- what calls refuse later ---------------------------------------------------------------------------


def test_managed_twice() -> None:
    model = Mlp()
    engine = _manage(model, placement_policy="cpu")
    with pytest.raises(gs.GeminiError, match="manage"):
        gs.manage(model, _adam(Mlp()), device="cpu")
    with pytest.raises(gs.GeminiError, match="manage"):
        gs.manage(model.blocks, torch.optim.AdamW(model.blocks.parameters()), device="cpu")
    with pytest.raises(gs.GeminiError, match="manage"):
        gs.manage(nn.Sequential(nn.Linear(2, 2), model), None, device="cpu")
    x = torch.randn(2, 32)
    model(x).sum().backward()
    engine.step()
    engine.close()
    again = _manage(model, placement_policy="cpu")
    model(x).sum().backward()
    again.step()
    again.close()


def test_optimizer_managed_twice() -> None:
    model = Mlp()
    optimizer = _adam(model)
    engine = _manage(model, optimizer, placement_policy="cpu")
    with pytest.raises(REFUSED):
        gs.manage(Mlp(), optimizer, device="cpu")
    engine.close()


def test_use_after_close() -> None:
    recipe = Recipe(precision="16-mixed")
    run = managed(CASE.build, recipe, placement_policy="cpu")
    drive(run, CASE, 1)
    engine, p = run.engine, next(run.model.parameters())
    engine.close()
    engine.close()
    assert engine.closed
    for call in (
        engine.step,
        engine.zero_grad,
        engine.grad_norm,
        lambda: engine.clip_grad_norm_(1.0),
        lambda: engine.clip_grad_value_(1.0),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        engine.model_state_dict,
        engine.optimizer_state_dict,
        engine.state_dict,
        lambda: engine.load_state_dict({}),
        lambda: engine.load_model_state_dict({}),
        lambda: engine.load_optimizer_state_dict({}),
        lambda: engine.full_parameter(p).__enter__(),
        lambda: engine.full_parameters().__enter__(),
    ):
        with pytest.raises(gs.GeminiError, match="closed"):
            call()
    assert gs.engine_of(run.model) is None


def _in_a_fork(calls: tuple[Callable[[], Any], ...]) -> int:
    """How a forked process ends: 0 if it was refused all of them by name."""
    child = os.fork()
    if child == 0:
        n_served = 1
        try:
            for call in calls:
                with pytest.raises(gs.GeminiError, match="forked"):
                    call()
            n_served = 0
        finally:
            os._exit(n_served)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("policy", ["cpu", "cuda"])
@pytest.mark.parametrize("steps", [0, 4])
def test_a_forked_process_is_refused(policy: str, steps: int) -> None:
    """It has not the memory: neither what is on the device, of which nothing has to move, nor the homes."""
    recipe = Recipe(steps=steps)
    run = managed(CASE.build, recipe, placement_policy=policy)
    drive(run, CASE, steps)
    p, x = next(run.model.parameters()), CASE.batch(0)

    def evaluate() -> None:
        with torch.no_grad():
            CASE.loss(run, x)

    for _ in range(2):  # the plan knows it
        evaluate()
        drive(run, CASE, min(steps, 1))
    calls = (evaluate, run.model.state_dict, p.sum, lambda: copy.deepcopy(run.model))
    assert _in_a_fork((*calls, run.engine.model_state_dict)) == 0
    assert _in_a_fork((run.engine.close,)) == 0
    drive(run, CASE, 1)
    run.engine.close()


def test_plain_backward_in_fp16_is_refused() -> None:
    recipe = Recipe(precision="16-mixed")
    reference, run = plain(CASE.build, recipe), managed(CASE.build, recipe, placement_policy="cpu")
    try:
        drive(run, CASE, 1)
        with pytest.raises(gs.GeminiError) as error:
            CASE.loss(run, CASE.batch(0)).backward()
        assert "engine.backward" in str(error.value) and "16-mixed" in str(error.value)
        run.zero_grad()
        drive(run, CASE, 2, first=1)
        drive(reference, CASE, 3)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


def test_add_param_group_is_refused() -> None:
    run = managed(CASE.build, Recipe(), placement_policy="cpu")
    try:
        with pytest.raises(gs.GeminiError, match="add_param_group"):
            run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        assert len(run.optimizer.param_groups) == 1
        drive(run, CASE, 1)
    finally:
        run.engine.close()


def test_nonfinite_norm_raises_when_asked() -> None:
    run = managed(CASE.build, Recipe(), placement_policy="cpu")
    try:
        x, y = CASE.batch(0)
        run.backward(CASE.loss(run, (x * float("inf"), y)))
        with pytest.raises(RuntimeError, match=r"non-?finite"):
            run.engine.clip_grad_norm_(1.0, error_if_nonfinite=True)
    finally:
        run.engine.close()


def test_parameters_outside_the_optimizer() -> None:
    """Trainable parameters that the optimizer does not have get gradients as in torch, and no update."""

    def only_blocks(model: nn.Module) -> list[nn.Parameter]:
        return [p for n, p in model.named_parameters() if not n.startswith(("head", "stem"))]

    recipe = Recipe(groups=only_blocks)
    reference = plain(CASE.build, recipe)
    run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=4096)
    try:
        drive(run, CASE, 2)
        drive(reference, CASE, 2)
        for which in (run, reference):
            torch.manual_seed(1)
            which.backward(CASE.loss(which, CASE.batch(5)))
        for name in ("head.weight", "stem.bias"):
            assert_same_bits(
                run.model.get_parameter(name).grad, reference.model.get_parameter(name).grad, name
            )
        for which in (run, reference):
            which.optimizer.step()
        got = run.model.get_parameter("head.weight").grad
        assert_same_bits(got, reference.model.get_parameter("head.weight").grad)
        for which in (run, reference):
            which.zero_grad()
            assert which.model.get_parameter("head.weight").grad is None
            drive(which, CASE, 1, first=3)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


def test_no_optimizer_is_inference() -> None:
    """Without an optimizer the model runs, and step is refused by name."""
    torch.manual_seed(0)
    model = Mlp(p=0.0)
    x = torch.randn(4, 32)
    want = model(x).detach()
    engine = gs.manage(model, None, device="cpu", placement_policy="cpu", chunk_size=4096)
    with torch.no_grad():
        assert_same_bits(model(x), want)
    calls: list[Callable] = [engine.step, engine.grad_norm]
    calls += [lambda: engine.clip_grad_norm_(1.0), lambda: engine.clip_grad_value_(1.0)]
    for call in calls:  # gradients are torch's own then, and no norm of ours would have them
        with pytest.raises(gs.GeminiError, match="there is no optimizer"):
            call()
    engine.close()
    assert_same_bits(model(x).detach(), want)


# ---- exceptions in user code -----------------------------------------------------------------------------


class _StopError(Exception):
    pass


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: type) -> Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        raise ctx.kind("backward")


class _Fragile(nn.Module):
    """Raises where `fault` says: ("forward", unit), ("backward", unit), ("recompute", unit)."""

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(5)
        )
        self.gain = nn.Parameter(torch.ones(32))
        self.fault: tuple[str, int] | None = None
        self.kind: type = _StopError
        self.checkpointing = False
        self.calls = 0

    def _unit(self, i: int, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fault == ("recompute", i) and self.calls > len(self.units):
            raise self.kind("recompute")
        x = self.units[i](x)
        if self.fault == ("forward", i):
            raise self.kind("forward")
        if self.fault == ("backward", i):
            x = _RaiseInBackward.apply(x, self.kind)
        return x

    def forward(self, x: Tensor) -> Tensor:
        self.calls = 0
        x = x * self.gain
        for i in range(len(self.units)):
            if self.checkpointing:
                x = checkpoint(self._unit, i, x, use_reentrant=False)
            else:
                x = self._unit(i, x)
        return x


FRAGILE = Case("fragile", _Fragile, CASE.batch, CASE.loss)


@pairs(
    phase=["forward", "backward", "recompute"],
    unit=[0, 2, 4],
    kind=[_StopError, StopIteration, KeyboardInterrupt, torch.OutOfMemoryError],
)
def test_exception_in_user_code(phase: str, unit: int, kind: type) -> None:
    recipe = Recipe(precision="bf16-mixed", clip=1.0)
    reference = plain(_Fragile, recipe)
    run = managed(_Fragile, recipe, chunk_size=4096, placement_policy="cpu")

    def fail(which: Plain) -> None:
        which.model.fault, which.model.kind = (phase, unit), kind
        which.model.checkpointing = phase == "recompute"
        caught = False
        try:
            which.backward(FRAGILE.loss(which, FRAGILE.batch(9)))
        except (kind, RuntimeError):
            caught = True
        assert caught
        which.model.fault, which.model.checkpointing = None, False
        which.zero_grad()

    try:
        for which in (run, reference):
            drive(which, FRAGILE, 2)
            fail(which)
            fail(which)
            assert not torch.is_autocast_enabled("cpu")
            drive(which, FRAGILE, 2, first=2)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


def _interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """The next call of it raises KeyboardInterrupt, and the ones after it do what they did."""
    real = getattr(owner, name)

    def interrupt(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(owner, name, real)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupt)


@contextlib.contextmanager
def _interrupted_after() -> Iterator[None]:
    yield
    raise KeyboardInterrupt


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_an_interrupt_that_waits_for_the_core_comes_after_the_step(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised when the core's step returns: what that has updated is counted all the same."""
    recipe = Recipe(precision=precision, clip=0.01)
    reference = plain(CASE.build, recipe)
    run = managed(CASE.build, recipe, chunk_size=4096, placement_policy="cpu")
    step = run.optimizer.step

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
            patch.setattr(run.engine._runtime.ranks, "explaining", _interrupted_after)
            step()

    try:
        drive(run, CASE, 2)
        with monkeypatch.context() as patch:
            patch.setattr(run.optimizer, "step", interrupted)
            drive(run, CASE, 1, first=2)
        drive(run, CASE, 2, first=3)
        drive(reference, CASE, 5)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


def test_a_second_interrupt_leaves_half_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all that was updated is counted: nothing is trained or saved until a checkpoint is loaded."""
    run = managed(CASE.build, Recipe(), chunk_size=4096, placement_policy="cpu")
    try:
        drive(run, CASE, 2)
        run.engine.save(tmp_path / "saved")
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
            _interrupt_once(patch, type(run.engine._runtime.slots[1]), "count_update")
            drive(run, CASE, 1, first=2)
        for call in (run.zero_grad, run.optimizer.step, lambda: run.engine.save(tmp_path / "half")):
            with pytest.raises(gs.GeminiError, match=r"optimizer\.step\(\) was interrupted.*load"):
                call()
        run.engine.load(tmp_path / "saved")
        run.zero_grad()
        drive(run, CASE, 2)
    finally:
        run.engine.close()


def test_an_interrupt_in_zero_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that come later are not shortened by the clip of those that were being dropped."""
    recipe = Recipe(clip=0.01)
    reference = plain(CASE.build, recipe)
    run = managed(CASE.build, recipe, chunk_size=4096, placement_policy="cpu")
    try:
        drive(run, CASE, 2)
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
            _interrupt_once(patch, run.engine._runtime.coming_step, "forget_clip")
            drive(run, CASE, 1, first=2)
        run.zero_grad()
        drive(run, CASE, 2, first=3)
        drive(reference, CASE, 5)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


@pytest.mark.parametrize("where", ["forward_pre", "forward", "tensor", "post_accumulate"])
def test_exception_in_user_hook(where: str) -> None:
    recipe = Recipe(precision="32-true", clip=1.0)
    reference = plain(_Fragile, recipe)
    run = managed(_Fragile, recipe, chunk_size=4096, placement_policy="cpu")

    def boom(*_: Any) -> None:
        raise _StopError(where)

    def attach(model: nn.Module) -> Any:
        middle = model.units[2]
        if where == "forward_pre":
            return middle.register_forward_pre_hook(boom)
        if where == "forward":
            return middle[0].register_forward_hook(boom)
        if where == "post_accumulate":
            return middle[0].weight.register_post_accumulate_grad_hook(boom)
        return middle.register_forward_hook(lambda m, a, out: out.register_hook(boom) and None)

    try:
        for which in (run, reference):
            drive(which, FRAGILE, 1)
            handle = attach(which.model)
            with pytest.raises(_StopError):
                which.backward(FRAGILE.loss(which, FRAGILE.batch(9)))
            handle.remove()
            which.zero_grad()
            drive(which, FRAGILE, 2, first=1)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


def test_exception_in_closure() -> None:
    recipe = Recipe(precision="32-true")
    reference = plain(_Fragile, recipe)
    run = managed(_Fragile, recipe, chunk_size=4096, placement_policy="cpu")

    def boom() -> Tensor:
        raise _StopError("closure")

    try:
        for which in (run, reference):
            drive(which, FRAGILE, 1)
            with pytest.raises(_StopError):
                which.optimizer.step(boom)
            drive(which, FRAGILE, 2, first=1)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


def test_exception_then_evaluation_then_training() -> None:
    """Nothing stays entered after a failed forward: evaluation under the smallest policy still works."""
    recipe = Recipe(precision="32-true")
    whole = state_bytes(_Fragile, recipe)
    reference = plain(_Fragile, recipe)
    run = managed(_Fragile, recipe, chunk_size=4096, device_budget=whole)
    try:
        for which in (run, reference):
            which.model.fault = ("forward", 3)
            for _ in range(5):
                with pytest.raises(_StopError):
                    which(torch.ones(2, 32))
            which.model.fault = None
            which.model.eval()
            with torch.no_grad():
                which.losses.append(which(torch.ones(2, 32)).sum())
            which.model.train()
            drive(which, FRAGILE, 2)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


# ---- what autograd refuses stays refused ---------------------------------------------------------------


class _Modifies(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.b = nn.Linear(32, 32)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.how == "input":
            z = y.square()
            y.mul_(2.0)
        else:
            z = torch.tanh(y)
            out = z * 1.0
            z.mul_(2.0)
            z = out
        return self.b(z)


@pytest.mark.parametrize("where", ["root", "unit"])
@pytest.mark.parametrize("how", ["input", "output"])
def test_modified_activation_is_torchs_error(how: str, where: str) -> None:
    """Autograd's own check that saved activations were not written must survive our hooks."""

    class Owner(_Modifies):
        def __init__(self):
            super().__init__(how)
            if where == "unit":
                self.gain = nn.Parameter(torch.ones(()))

    run = managed(Owner, Recipe(), placement_policy="cpu", chunk_size=4096)
    try:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run.backward(CASE.loss(run, CASE.batch(0)))
    finally:
        run.engine.close()


@pytest.mark.parametrize("how", ["step", "write"])
def test_modified_weight_is_torchs_error(how: str) -> None:
    """A graph built before its weights changed is not backpropagated with the new ones."""
    reference = plain(CASE.build, Recipe())
    run = managed(CASE.build, Recipe(), placement_policy="cpu", chunk_size=4096)

    def stale(which: Plain) -> None:
        drive(which, CASE, 1)
        old = CASE.loss(which, CASE.batch(1))
        if how == "step":
            drive(which, CASE, 1, first=2)
        else:
            with torch.no_grad():
                which.model.get_parameter("blocks.1.4.weight").mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        which.zero_grad()
        drive(which, CASE, 2, first=3)

    try:
        for which in (run, reference):
            stale(which)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


def test_a_text_that_is_cut_inside_a_character_is_a_text() -> None:
    """The core cuts long texts by bytes."""
    model = nn.Module()
    model.register_parameter("ü" * 600, nn.Parameter(torch.zeros(3)))
    with gs.manage(model, None, device="cpu") as engine:
        core = engine._runtime.core
        with pytest.raises(ValueError, match="no such elements of ü"):
            core.save_read(0, _C.FIELDS["weight"], 7, 1, 0)
