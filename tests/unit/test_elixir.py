"""Elixir's names: the snippets as its README prints them, every argument, and the bits of plain manage()."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import gemini_strategy as gs
from gemini_strategy import elixir
from gemini_strategy.elixir import (
    ElixirModule,
    ElixirOptimizer,
    minimum_waste_search,
    optimal_search,
)
from gemini_strategy.sizes import ChunkSizes
from helpers.saving import assert_same_model

SIMPLE = """
from gemini_strategy.elixir import ElixirModule, ElixirOptimizer, minimum_waste_search

model = BertForSequenceClassification.from_pretrained('bert-base-uncased')
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-8)

sr = minimum_waste_search(model, world_size)
model = ElixirModule(model, sr, world_group)
optimizer = ElixirOptimizer(model, optimizer)
"""

ADVANCED = """
import torch
import torch.distributed as dist
from gemini_strategy import HybridAdam
from gemini_strategy.elixir import ElixirModule, ElixirOptimizer, optimal_search

# get the world communication group
global_group = dist.GroupMember.WORLD
# get the communication world size
global_size = dist.get_world_size()

# initialize the model in CPU
model = get_model(model_name)
# HybridAdam allows a part of parameters updated on CPU and a part updated on GPU
optimizer = HybridAdam(model.parameters(), lr=1e-3)

sr = optimal_search(
    model,
    global_size,
    unified_dtype=torch.float16,  # enable for FP16 training
    overlap=True,  # enable for overlapping communications
    verbose=True,  # print detailed processing information
    inp=data,  # proivde an example input data in dictionary format
    step_fn=train_step  # provide an example step function
)
model = ElixirModule(
    model,
    sr,
    global_group,
    prefetch=True,  # prefetch chunks to overlap communications
    dtype=torch.float16,  # use AMP
    use_fused_kernels=True  # enable fused kernels in Apex
)
optimizer = ElixirOptimizer(
    model,
    optimizer,
    initial_scale=64,  # loss scale used in AMP
    init_step=True  # enable for the stability of training
)
"""


class Small(nn.Module):
    """Buffers that a forward changes, random numbers, a frozen and a tied parameter; takes a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(5)])
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.2)
        self.again = self.layers[0]
        self.frozen = nn.Parameter(torch.linspace(-1, 1, 32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.drop(self.norm(self.layers(x * self.frozen)))).square().mean()


def small() -> Small:
    torch.manual_seed(3)
    return Small()


def step_fn(model: nn.Module, inp: dict[str, Tensor]) -> None:
    model(**inp).backward()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 32)}


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Bert(BertForSequenceClassification):
    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> Any:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return BertForSequenceClassification(config)


def test_the_simple_snippet_runs_as_printed() -> None:
    names: dict[str, Any] = {
        "torch": torch,
        "BertForSequenceClassification": _Bert,
        "world_size": 1,
        "world_group": dist.GroupMember.WORLD,
    }
    exec(SIMPLE, names)
    plain = _Bert.from_pretrained("bert-base-uncased")
    adam = torch.optim.Adam(plain.parameters(), lr=1e-4, eps=1e-8)
    engine = gs.manage(plain, adam, device="cpu", precision="32-true")
    model, optimizer = names["model"], names["optimizer"]
    torch.manual_seed(1)
    for _ in range(3):
        data = {"input_ids": torch.randint(0, 60, (2, 8)), "labels": torch.tensor([0, 1])}
        optimizer.zero_grad()
        optimizer.backward(model(**data).loss)
        optimizer.step()
        engine.backward(plain(**data).loss)
        adam.step()
        adam.zero_grad()
    assert_same_model(model.state_dict(), engine.model_state_dict())
    assert model.engine.stats()["steps"] == 3
    model.close()
    engine.close()


def gpt2(_: str = "") -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=60, n_positions=16, n_embd=16, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
        )
    )  # fmt: skip


def test_the_advanced_snippet_runs_as_printed(
    one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = torch.randint(0, 60, (2, 8))
    data = {"input_ids": ids, "labels": ids, "use_cache": False}

    def train_step(model: nn.Module, data: dict[str, Any]) -> None:
        model(**data).loss.backward()

    names: dict[str, Any] = {
        "get_model": gpt2, "model_name": "gpt2", "data": data, "train_step": train_step,
    }  # fmt: skip
    exec(ADVANCED, names)
    model, optimizer, found = names["model"], names["optimizer"], names["sr"]
    assert "Gemini: the estimate" in capsys.readouterr().err
    assert found.predicted["step_seconds"] > 0
    assert model.module.config._attn_implementation == "sdpa"
    assert optimizer.loss_scale == 64
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))

    plain = gpt2()
    plain.set_attn_implementation("sdpa")
    adam = gs.HybridAdam(plain.parameters(), lr=1e-3)
    engine = gs.manage(plain, adam, device="cpu", precision="16-mixed", initial_scale=64)
    for _ in range(3):
        optimizer.backward(model(**data).loss)
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(plain(**data).loss)
        adam.step()
        adam.zero_grad()
    assert engine.stats()["skipped_steps"] == 0
    assert_same_model(model.state_dict(), engine.model_state_dict())
    model.close()
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_search_changes_nothing(dtype: torch.dtype, overlap: bool) -> None:
    model = small()
    parameters = list(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    where = [p.data_ptr() for p in parameters]
    numbers = torch.get_rng_state()
    found = optimal_search(
        model, 1, unified_dtype=dtype, overlap=overlap, inp=batch(), step_fn=step_fn,
        device_budget="64KB",
    )  # fmt: skip
    torch.set_rng_state(numbers)
    batch()
    after = torch.get_rng_state()
    torch.set_rng_state(numbers)
    optimal_search(model, 1, inp=batch(), step_fn=step_fn)
    assert torch.equal(torch.get_rng_state(), after)
    assert_same_model(model.state_dict(), before)
    assert [p.data_ptr() for p in model.parameters()] == where
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(p.grad is None and type(p) is nn.Parameter for p in parameters)
    assert gs.engine_of(model) is None
    assert found.predicted is not None
    is_immediate = overlap and dtype is not torch.float16  # a loss scale is known after backward
    assert found.predicted["when"] == ("immediate" if is_immediate else "deferred")
    assert found.predicted["device_peak_bytes"] <= found.device_budget == 64_000


def test_a_search_keeps_nothing() -> None:
    model = small()
    optimal_search(model, 1, inp=batch(), step_fn=step_fn, device_budget="64KB")
    with pytest.raises(RuntimeError, match="mine"):
        optimal_search(model, 1, inp=batch(), step_fn=_fails)
    gc.collect()
    assert [each for each in gc.get_objects() if type(each) is Small and each is not model] == []
    assert not [name for name in vars(model) if name.startswith("_gm")]


def _fails(model: nn.Module, inp: Any) -> None:
    model(**inp).backward()
    raise RuntimeError("mine")


def test_the_result_is_what_manage_takes() -> None:
    """The same chunks as manage() makes by itself, and the plan that it then follows."""
    found = optimal_search(small(), 1, inp=batch(), step_fn=step_fn, device_budget="64KB")
    model = small()
    engine = gs.manage(
        model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]),
        device="cpu", precision="32-true", device_budget="64KB",
    )  # fmt: skip
    wrapped = ElixirModule(small(), found)
    own = wrapped.manage(torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad]))
    assert own.stats()["layout_hash"] == engine.stats()["layout_hash"]
    assert own.stats()["device_budget_bytes"] == 64_000
    engine.close()
    own.close()


def test_the_least_waste_is_the_layouts_own() -> None:
    model = nn.Sequential(*[nn.Linear(1000, 1000 + 100 * i, device="meta") for i in range(3)])
    shapes = [(p.numel(), 4, 0) for p in model.parameters()]
    expected = gs._C.chunk_search(shapes, 32 << 20, 64 << 20, 4096)
    assert minimum_waste_search(model, 4).chunk_size == expected
    half = minimum_waste_search(model, 4, unified_dtype=torch.float16)
    shapes = [(numel, 2, 0) for numel, _, _ in shapes]
    assert half.chunk_size == gs._C.chunk_search(shapes, 32 << 20, 64 << 20, 4096)
    assert (half.world_size, half.unified_dtype) == (4, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_layout_is_asked_as_manage_asks_it(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The same elements, widths and kinds, in the same order; kinds may have other numbers."""
    seen: list[list[tuple[int, int, int]]] = []
    choose = ChunkSizes.choose

    def spy(sizes: ChunkSizes, specs: list[tuple[int, int, int]], *rest: Any) -> tuple[int, int]:
        kinds = list(dict.fromkeys(kind for _, _, kind in specs))
        seen.append([(numel, width, kinds.index(kind)) for numel, width, kind in specs])
        return choose(sizes, specs, *rest)

    monkeypatch.setattr(ChunkSizes, "choose", spy)
    found = minimum_waste_search(small(), 1, unified_dtype=dtype)
    module = ElixirModule(small(), found, dtype=dtype)
    module.manage(torch.optim.Adam([p for p in module.parameters() if p.requires_grad])).close()
    assert len(seen) > 1  # the estimate asks, and then manage()
    assert all(each == seen[-1] for each in seen)
    assert len({kind for _, _, kind in seen[0]}) == (2 if dtype is torch.float32 else 3)


def test_a_model_on_meta_is_searched_as_one_with_values() -> None:
    with torch.device("meta"):
        blank = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    found = optimal_search(
        blank, 1, inp=torch.ones(2, 16), step_fn=lambda m, x: m(x).sum().backward()
    )
    assert found.predicted is not None
    assert all(p.is_meta for p in blank.parameters())


@pytest.mark.parametrize("offload", [False, True])
def test_cpu_offload_is_a_policy(offload: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found = minimum_waste_search(
        small(), 1, cpu_offload=offload, verbose=True, prefetch=True, inp=batch(), step_fn=step_fn
    )
    assert "chunk size" in (text := capsys.readouterr().err)
    assert ('"cpu"' if offload else '"cuda"') in text
    assert found.predicted["when"] == "immediate"
    wrapped = ElixirModule(small(), found)
    engine = wrapped.manage(None)
    assert engine._runtime.settings.policy == ("cpu" if offload else "cuda")
    engine.close()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: minimum_waste_search(m, 0), "group_size=0.*at least 1"),
        (lambda m: minimum_waste_search(m, 1, pin_memory=False), "pin_memory=False.*only True"),
        (lambda m: minimum_waste_search(m, 1, prefetch=True), "prefetch=True.*step_fn"),
        (lambda m: minimum_waste_search(m, 1, inp=batch()), "inp=.*without step_fn"),
        (lambda m: minimum_waste_search(m, 1, unified_dtype=torch.float64), "unified_dtype"),
        (lambda m: minimum_waste_search(m, 1, device_budget=-1), "device_budget=-1"),
        (lambda m: optimal_search(m, 1), "step_fn=None.*minimum_waste_search"),
        (
            lambda m: optimal_search(m, 1, optimizer_type="SGD", step_fn=step_fn, inp=batch()),
            "optimizer_type='SGD'.*only 'Adam'",
        ),
        (
            lambda m: optimal_search(m, 1, step_fn=lambda m, x: m(**x), inp=batch()),
            "step_fn has left no gradient",
        ),
        (
            lambda m: ElixirModule(m, minimum_waste_search(nn.Linear(2, 2), 1)),
            "2 parameters of other sizes than this Small",
        ),
        (lambda m: ElixirModule(m, minimum_waste_search(m, 2)), "for 2 ranks.*group has 1"),
        (
            lambda m: ElixirModule(m, minimum_waste_search(m, 1), dtype=torch.float16),
            "dtype=torch.float16.*the search's, torch.float32",
        ),
        (lambda m: ElixirModule(m, minimum_waste_search(m, 1), prefetch=1), "prefetch=1"),
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_by_name(call: Any, message: str) -> None:
    model = small()
    with pytest.raises(ValueError, match=message):
        call(model)
    assert gs.engine_of(model) is None


def test_a_budget_that_is_too_small_is_refused_and_ends() -> None:
    with pytest.raises(gs.GeminiMemoryError, match="raise device_budget to at least"):
        optimal_search(small(), 1, inp=batch(), step_fn=step_fn, device_budget="4KB")


def wrapped(**arguments: Any) -> tuple[ElixirModule, torch.optim.Optimizer]:
    model = small()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    dtype = arguments.get("dtype", torch.float32)
    found = minimum_waste_search(model, 1, unified_dtype=dtype)
    return ElixirModule(model, found, **arguments), optimizer


def trained(module: ElixirModule, optimizer: ElixirOptimizer) -> dict[str, Tensor]:
    torch.manual_seed(5)
    for _ in range(3):
        optimizer.backward(module(**batch()).float())
        optimizer.step()
    return module.state_dict()


def test_arguments_of_the_module_have_their_effect() -> None:
    base = wrapped()
    want = trained(base[0], ElixirOptimizer(*base))
    module, adam = wrapped(prefetch=True)
    optimizer = ElixirOptimizer(module, adam)
    assert_same_model(trained(module, optimizer), want)
    assert module.engine.stats()["immediate_updates"] > 0
    with pytest.raises(gs.GeminiError, match="call optimizer.step"):
        for _ in range(2):
            optimizer.backward(module(**batch()))
    module, adam = wrapped(dtype=torch.bfloat16, reduce_always_fp32=True, output_fp32=True)
    ElixirOptimizer(module, adam)
    assert module(**batch()).dtype is torch.float32
    assert module.engine._runtime.settings.is_grad_f32
    module, adam = wrapped(dtype=torch.bfloat16)
    ElixirOptimizer(module, adam)
    assert next(module.parameters()).dtype is torch.bfloat16
    assert not module.engine._runtime.settings.is_grad_f32
    with pytest.warns(UserWarning, match="use_fused_kernels=True changes nothing for this Small"):
        wrapped(use_fused_kernels=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(use_fused_kernels=False)


def test_clipping_is_that_of_the_engine() -> None:
    module, adam = wrapped()
    got = trained(module, ElixirOptimizer(module, adam, max_norm=1e-3))
    model = small()
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine = gs.manage(model, adam, device="cpu", precision="32-true")
    torch.manual_seed(5)
    for _ in range(3):
        model(**batch()).backward()
        assert engine.clip_grad_norm_(1e-3) > 1e-3
        adam.step()
        adam.zero_grad()
    assert_same_model(got, engine.model_state_dict())
    base = wrapped()
    unclipped = trained(base[0], ElixirOptimizer(*base))
    assert any(not torch.equal(got[name], unclipped[name]) for name in got)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("initial_scale", 8), ("min_scale", 2), ("growth_factor", 3), ("backoff_factor", 0.25),
        ("growth_interval", 5), ("hysteresis", 1), ("max_scale", 2**20),
    ],
)  # fmt: skip
def test_arguments_of_the_loss_scale_reach_it(argument: str, value: float) -> None:
    module, adam = wrapped(dtype=torch.float16)
    optimizer = ElixirOptimizer(module, adam, **{argument: value})
    name = "scale" if argument == "initial_scale" else argument
    assert getattr(optimizer.engine.scaler, name) == value


def test_defaults_of_the_optimizer_are_the_originals() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(ElixirOptimizer).parameters.items()
    }
    assert list(defaults) == [
        "module", "optimizer", "initial_scale", "min_scale", "growth_factor", "backoff_factor",
        "growth_interval", "hysteresis", "max_scale", "max_norm", "norm_type", "init_step",
    ]  # fmt: skip
    assert (defaults["initial_scale"], defaults["max_scale"]) == (32768, 2**24)
    assert list(inspect.signature(ElixirModule).parameters) == [
        "module", "search_result", "process_group", "prefetch", "dtype", "reduce_always_fp32",
        "output_fp32", "use_fused_kernels",
    ]  # fmt: skip
    assert all(hasattr(elixir, name) for name in elixir.__all__)


def test_the_optimizer_refuses_by_name() -> None:
    module, adam = wrapped()
    with pytest.raises(TypeError, match="give the ElixirModule, not a Small"):
        ElixirOptimizer(module.module, adam)
    with pytest.raises(ValueError, match="norm_type=1"):
        ElixirOptimizer(module, adam, norm_type=1)
    with pytest.raises(ValueError, match="max_norm=-1"):
        ElixirOptimizer(module, adam, max_norm=-1)
    coupled = torch.optim.LBFGS(module.parameters())
    with pytest.raises(gs.GeminiError, match="LBFGS"):
        ElixirOptimizer(module, coupled)
    ElixirOptimizer(module, adam)
    with pytest.raises(gs.GeminiError, match="ElixirModule has an optimizer already"):
        ElixirOptimizer(module, adam)


@pytest.mark.parametrize("is_early", [False, True])
def test_init_step_makes_states_and_no_step(is_early: bool) -> None:
    base = wrapped()
    want = trained(base[0], ElixirOptimizer(*base))
    module, adam = wrapped()
    optimizer = ElixirOptimizer(module, adam, init_step=is_early)
    assert len(optimizer.state_dict()["state"]) == (len(adam.param_groups[0]["params"]) * is_early)
    assert_same_model(trained(module, optimizer), want)


def test_schedulers_take_either_optimizer() -> None:
    for which in ("wrapper", "inner"):
        module, adam = wrapped()
        optimizer = ElixirOptimizer(module, adam)
        held = optimizer if which == "wrapper" else adam
        schedule = torch.optim.lr_scheduler.StepLR(held, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.backward(module(**batch()))
            optimizer.step()
            schedule.step()
        assert adam.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_state_goes_on_exactly() -> None:
    """Masters, moments, buffers and the loss scale, in the files that a person would write."""
    module, adam = wrapped(dtype=torch.float16)
    optimizer = ElixirOptimizer(module, adam, growth_interval=2)
    trained(module, optimizer)
    saved = module.state_dict(), optimizer.state_dict()
    assert optimizer.loss_scale == 65536
    assert_same_model(module.state_dict(prefix="a."), {f"a.{k}": v for k, v in saved[0].items()})
    halves = module.state_dict(from_param=True)
    assert halves["layers.0.weight"].dtype is torch.float16
    saved = tuple(torch.load(_written(part), weights_only=True) for part in saved)
    want = trained(module, optimizer)
    module, adam = wrapped(dtype=torch.float16)
    optimizer = ElixirOptimizer(module, adam, growth_interval=2)
    module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert optimizer.loss_scale == 65536
    assert_same_model(trained(module, optimizer), want)
    with pytest.raises(ValueError, match="only_rank_0=True"):
        module.load_state_dict(saved[0], only_rank_0=True)
    with pytest.raises(ValueError, match="keep_vars=True"):
        module.state_dict(keep_vars=True)


def _written(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_a_forward_before_the_optimizer() -> None:
    module, adam = wrapped()
    module.eval()
    x = batch()
    with torch.no_grad():
        before = module(**x)
    optimizer = ElixirOptimizer(module, adam)
    with torch.no_grad():
        assert torch.equal(module(**x), before)
    module.train()
    trained(module, optimizer)
    for each in (module, optimizer):
        with pytest.raises(gs.GeminiError, match="cannot be copied"):
            copy.deepcopy(each)
    assert module.close() is module.unwrap()
    assert gs.engine_of(module.module) is None
