"""The promise on a GPU: the bits of the unmanaged loop for every policy and budget.

Both sides run with deterministic kernels and math attention, because the default attention backward
differs from run to run.  The device's own figure of used memory is sampled while a managed run trains and
must stay below the budget.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# read by cuBLAS when its first handle is made
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torch._inductor.config
from torch import nn

import gemini_strategy as gs
from helpers.reference import (
    Outcome,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    assert_trained,
    drive,
    managed,
    state_bytes,
    train_plain,
)
from helpers.zoo import CASES, Case, mlp_case, transformers_cases

pytestmark = pytest.mark.gpu

MIB = 1 << 20
STEPS = 50
CASE = mlp_case(width=1280, depth=4, p=0.1)  # 29 million parameters
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
AROUND = 320 * MIB  # cuBLAS workspaces, kernels that load late, activations


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    switches = ("flash", "mem_efficient", "cudnn", "math")
    for name in switches:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(name == "math")
    # torch's compiler times a few configurations of a kernel, and they round differently: a loop that compiles
    # torchao's step has other bits from run to run, without an engine, too.
    with torch._inductor.config.patch({"triton.autotune_pointwise": False}):
        yield
    for name in switches:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
    torch.use_deterministic_algorithms(False)
    _release()


def _release() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@contextmanager
def _peak(seconds: float = 0.001) -> Iterator[list[int]]:
    """The largest figure of used device memory while inside, in [0]: the driver's own, sampled."""
    peak, stop = [_used()], threading.Event()

    def watch() -> None:
        while not stop.wait(seconds):
            peak[0] = max(peak[0], _used())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak[0] = max(peak[0], _used())


def _recipe(precision: str) -> Recipe:
    return Recipe(
        precision=precision,
        steps=STEPS,
        clip=0.35,
        accumulate=2,
        gradient_dtype=torch.float32 if precision == "bf16-mixed" else None,
        device="cuda",
    )


@functools.cache
def _reference(precision: str) -> Outcome:
    before, after = train_plain(CASE, _recipe(precision))
    assert_trained(before, after)
    _release()
    return after


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("policy", "share", "chunk"),
    [
        ("cuda", None, 8 * MIB),
        ("auto", 1.0, 8 * MIB),
        ("auto", 0.6, 4 * MIB),
        ("auto", 0.35, 2 * MIB),
        ("auto", 0.35, 8 * MIB),
        ("cpu", 0.35, 4 * MIB),
    ],
)
def test_bits_and_peak(policy: str, share: float | None, chunk: int, precision: str) -> None:
    recipe = _recipe(precision)
    want = _reference(precision)
    _release()
    budget = None
    if share is not None:
        budget = _used() + AROUND + int(share * state_bytes(CASE.build, recipe))
    run = managed(
        CASE.build,
        recipe,
        placement_policy=policy,
        device_budget=budget,
        chunk_size=chunk,
    )
    try:
        with _peak() as peak:
            drive(run, CASE, STEPS)
            torch.cuda.synchronize()
        stats = run.engine.stats()
        assert_same_outcome(run.outcome(), want)
        if budget is not None:
            assert peak[0] <= budget, f"{peak[0] / MIB:.0f} MiB used of {budget / MIB:.0f}"
            assert stats["device_peak_bytes"] <= stats["device_budget_bytes"] == budget
        if policy == "cpu":
            assert stats["evictions"] > STEPS
    finally:
        run.engine.close()


def test_cuda_policy_below_the_state_is_refused() -> None:
    recipe = _recipe("32-true")
    _release()
    budget = _used() + AROUND // 4 + int(0.35 * state_bytes(CASE.build, recipe))
    with pytest.raises(gs.GeminiMemoryError, match="device_budget"):
        managed(CASE.build, recipe, placement_policy="cuda", device_budget=budget)
    _release()
    assert _used() <= budget


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adam_on_cpu_and_cuda(dtype: torch.dtype) -> None:
    """`HybridAdam` alone: the same gradients give the same bits on both, clipping included."""
    generator = torch.Generator().manual_seed(3)
    sizes = (1, 7, 1000, 4097, 100_003)
    values = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
    sides = {
        device: [nn.Parameter(v.clone().to(device)) for v in values] for device in ("cpu", "cuda")
    }
    optimizers = {
        device: gs.HybridAdam(params, lr=1e-2, weight_decay=0.1) for device, params in sides.items()
    }
    for step in range(20):
        grads = [torch.randn(n, generator=generator).to(dtype) * 10.0 ** -(step % 9) for n in sizes]
        norms = []
        for device, params in sides.items():
            for p, g in zip(params, grads, strict=True):
                p.grad = g.to(device, copy=True)  # the step clips it in place
            norms.append(optimizers[device].clip_grad_norm_(1.0))
            optimizers[device].step(grad_divisor=4.0)
        assert_same_bits(norms[0], norms[1], "norm")
    for a, b in zip(sides["cpu"], sides["cuda"], strict=True):
        assert_same_bits(b, a, "weight")
        one, two = optimizers["cpu"].state[a], optimizers["cuda"].state[b]
        assert set(one) == set(two)
        for key in one:
            assert_same_bits(two[key], one[key], key)


NAMES = (
    "tied_weights", "module_called_twice", "frozen_parameters", "lora", "unused_parameters",
    "parameter_on_non_leaf", "child_weight_in_parent", "transposed_views", "side_effect_in_units",
    "several_forwards_one_backward", "eval_between_steps", "conditional_branch", "rope_buffers",
    "checkpoint_reentrant", "checkpoint_not_reentrant", "odd_sizes", "multihead_attention",
    "custom_function_saves_weight", "parameter_list_and_dict", "batch_norm", "lstm",
    "changing_sequence_length",
)  # fmt: skip


def _families() -> list[Case]:
    """The families that have deterministic CUDA kernels, where transformers is installed."""
    if importlib.util.find_spec("transformers") is None:
        return []
    return [c for c in transformers_cases() if c.name in ("gpt2", "llama", "bert", "opt", "t5")]


MODELS = [case for case in CASES if case.name in NAMES] + _families()


@pytest.mark.parametrize("place", [0, -1], ids=["first precision", "last precision"])
@pytest.mark.parametrize("case", MODELS, ids=repr)
def test_models(case: Case, place: int) -> None:
    """Shapes of trouble on the GPU, everything evicted after every unit, Adam on the CPU."""
    precision = case.precisions[place]
    recipe = Recipe(precision=precision, steps=5, clip=1.0, accumulate=2, device="cuda")
    _, want = train_plain(case, recipe)
    run = managed(case.build, recipe, placement_policy="cpu", chunk_size=2 * MIB)
    try:
        drive(run, case, recipe.steps)
        assert_same_outcome(run.outcome(), want)
    finally:
        run.engine.close()


def test_gpu_tensors_on_a_cpu_engine_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda()
    with pytest.raises(gs.GeminiError, match=r"0\.weight.*cuda"):
        gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu")


def test_memory_is_given_back() -> None:
    """After close, and after a dropped engine, the device is as before. The first round takes cuBLAS and kernels."""
    before = 0
    for close in (True, True, False, True, False):
        run = managed(
            lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))),
            Recipe(device="cuda"),
            placement_policy="auto",
        )
        run(torch.ones(8, 1024, device="cuda")).sum().backward()
        run.optimizer.step()
        if close:
            run.engine.close()
            run.model.cpu()
        del run
        _release()
        before = before or _used()
        assert _used() <= before + 64 * MIB
