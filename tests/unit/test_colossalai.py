"""Colossal-AI's names: the article's loop, the Booster of 0.5, every argument, and the bits of plain manage()."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM

import gemini_strategy as gs
import gemini_strategy.colossalai as colossalai
from gemini_strategy.colossalai import (
    Booster,
    Config,
    GeminiDDP,
    GeminiOptimizer,
    GeminiPlugin,
    HybridAdam,
    TensorShardStrategy,
    ZeroInitContext,
)
from gemini_strategy.originals import booster
from gemini_strategy.originals.arguments import Only
from helpers.saving import assert_same_model

CPU = torch.device("cpu")
FIXED = {name: only for name, only in booster.MODEL.items() if isinstance(only, Only)}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    colossalai.global_context.config = Config()


def net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def data(n: int = 4) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(9)
    return [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(n)]


def zero(policy: str = "auto", **optimizer: Any) -> dict[str, Any]:
    model = {"shard_strategy": TensorShardStrategy(), "tensor_placement_policy": policy}
    return {"model_config": model, "optimizer_config": optimizer}


def plain(
    batches: list[tuple[Tensor, Tensor]],
    clip: float | None = None,
    accumulate: int = 1,
    **arguments: Any,
) -> dict[str, Tensor]:
    """The same training under manage()."""
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    arguments = {"precision": "16-mixed", **arguments}
    engine = gs.manage(model, optimizer, device="cpu", **arguments)
    for i, (x, y) in enumerate(batches):
        value = loss(model(x), y)
        engine.backward(value if accumulate == 1 else value / accumulate)
        if i % accumulate == accumulate - 1:
            if clip is not None:
                engine.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
    state = engine.model_state_dict()
    engine.close()
    return state


# ---- launch and initialize ----


def test_the_articles_loop() -> None:
    colossalai.launch_from_torch(
        config={"zero": zero(gpu_margin_mem_ratio=0.8, initial_scale=2**5), "EPOCHS": 1}
    )
    assert colossalai.global_context.config.EPOCHS == 1
    model = net()
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    batches = data()
    engine, loader, rest, schedule = colossalai.initialize(
        model, optimizer, nn.CrossEntropyLoss(), batches
    )
    assert (loader, rest, schedule) == (batches, None, None)
    engine.train()
    for x, y in loader:
        engine.zero_grad()
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
    assert engine.training
    assert engine.optimizer.loss_scale == 32
    settings = engine.model.engine._runtime.settings
    assert (settings.policy, settings.margin) == ("auto", 0.8)
    want = plain(batches, initial_scale=32.0, gpu_margin_mem_ratio=0.8)
    assert_same_model(engine.model.state_dict(), want)
    engine.eval()
    assert not engine.training
    assert engine.close() is model
    assert gs.engine_of(model) is None


def test_launching_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gemini_strategy"):
        colossalai.launch_from_torch({}, seed=7)
        colossalai.launch_from_torch({}, seed=8, verbose=False)
    place = colossalai.get_current_device()
    assert caplog.messages == [f"1 ranks, {place}, seed 7"]


def test_accumulation_clipping_and_a_schedule_from_the_configuration() -> None:
    config = {
        "zero": zero("cpu", initial_scale=64),
        "gradient_accumulation": 2,
        "clip_grad_norm": 0.05,
    }
    colossalai.launch_from_torch(config)
    model = net()
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    batches = data()
    engine, loader, _, schedule = colossalai.initialize(
        model, optimizer, nn.CrossEntropyLoss(), batches, lr_scheduler=schedule, device_budget="1MB"
    )
    for x, y in loader:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        schedule.step()
    assert schedule.last_epoch == 2
    pickle.dumps(schedule.state_dict())
    assert engine.model.engine.stats()["steps"] == 2
    assert_same_model(
        engine.model.state_dict(), plain(batches, clip=0.05, accumulate=2, initial_scale=64.0)
    )
    engine.close()


def test_a_configuration_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text(
        "from gemini_strategy.colossalai import TensorShardStrategy\n"
        "BATCH_SIZE = 8\n"
        "zero = dict(model_config=dict(shard_strategy=TensorShardStrategy(),\n"
        "    tensor_placement_policy='cpu', fp32_reduce_scatter=True), optimizer_config=dict())\n"
    )
    colossalai.launch_from_torch(config=str(path), seed=5, verbose=False)
    numbers = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(numbers, torch.rand(3))
    assert colossalai.global_context.config.BATCH_SIZE == 8
    model = net()
    engine, *_ = colossalai.initialize(model, HybridAdam(model.parameters()))
    settings = engine.model.engine._runtime.settings
    assert settings.policy == "cpu"
    assert settings.is_grad_f32
    with pytest.raises(ValueError, match="engine.criterion: initialize\\(\\) was given none"):
        _ = engine.criterion
    engine.close()


def test_precision_follows_the_configuration() -> None:
    for config, precision in (
        ({}, "32-true"),
        ({"fp16": {"mode": colossalai.AMP_TYPE.TORCH, "init_scale": 8.0}}, "16-mixed"),
        ({"zero": zero()}, "16-mixed"),
    ):
        colossalai.launch_from_torch(config, verbose=False)
        model = net()
        engine, *_ = colossalai.initialize(model, HybridAdam(model.parameters()))
        assert engine.model.engine.precision == precision
        assert "fp16" not in config or engine.optimizer.loss_scale == 8.0
        engine.close()
    engine, *_ = colossalai.initialize(
        net_ := net(), HybridAdam(net_.parameters()), precision="bf16-true"
    )
    assert engine.model.engine.precision == "bf16-true"
    engine.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"parallel": {"pipeline": 2}}, "parallel=dict\\(pipeline=2\\).*data parallelism alone.*"),
        ({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, "tensor=.*device_budget"),
        ({"torch_ddp": {"find_unused_parameters": True}}, "torch_ddp.*averages gradients"),
        ({"gradient_handler": [{}]}, "gradient_handler"),
        ("nowhere.py", "there is no such file"),
        (3, "give a dict, or the path"),
    ],
)  # fmt: skip
def test_launch_refuses_by_name(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        colossalai.launch_from_torch(config, verbose=False)
    assert colossalai.global_context.config == {}


def test_one_of_each_parallelism_is_none() -> None:
    parallel = {"pipeline": 1, "tensor": {"size": 1, "mode": None}, "data": 4}
    colossalai.launch_from_torch({"parallel": parallel}, verbose=False)


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        ({"shard_strategy": None}, {}, "shard_strategy=None.*a TensorShardStrategy"),
        ({"reuse_fp16_shard": True}, {}, "reuse_fp16_shard=True.*only False"),
        ({"reduce_scatter_bucket_size_mb": 50}, {}, "reduce_scatter_bucket_size_mb=50"),
        ({"gradient_predivide_factor": 2.0}, {}, "gradient_predivide_factor=2.0"),
        ({"tensor_placement_policy": "gpu"}, {}, "placement_policy='gpu'"),
        ({"offload_config": {"device": "nvme"}}, {}, "offload_config=.*only dict\\(device='cpu'\\)"),
        ({"wrong": 1}, {}, "model_config has no 'wrong'"),
        ({}, {"wrong": 1}, "optimizer_config has no 'wrong'"),
        ({}, {"cpu_offload": True}, "cpu_offload=True.*tensor_placement_policy"),
        ({}, {"gpu_margin_mem_ratio": 0.5}, "gpu_margin_mem_ratio=0.5.*'auto' only"),
    ],
)  # fmt: skip
def test_zeros_configuration_is_refused_by_name(
    model: dict[str, Any], optimizer: dict[str, Any], message: str
) -> None:
    own = {"shard_strategy": TensorShardStrategy(), **model}
    config = {"zero": {"model_config": own, "optimizer_config": optimizer}}
    colossalai.launch_from_torch(config, verbose=False)
    with pytest.raises(ValueError, match=message):
        colossalai.initialize(module := net(), HybridAdam(module.parameters()))
    assert gs.engine_of(module) is None


def test_old_ways_to_say_cpu() -> None:
    own = {"shard_strategy": TensorShardStrategy(), "offload_config": {"device": "cpu"}}
    config = {"zero": {"model_config": own, "optimizer_config": {"cpu_offload": True}}}
    colossalai.launch_from_torch(config, verbose=False)
    model = net()
    engine, *_ = colossalai.initialize(model, HybridAdam(model.parameters()))
    assert engine.model.engine._runtime.settings.policy == "cpu"
    engine.close()
    with pytest.raises(ValueError, match="ophooks"):
        colossalai.initialize(model, HybridAdam(model.parameters()), ophooks=[])  # type: ignore[arg-type]


def test_modules_of_the_import_paths_of_old() -> None:
    import gemini_strategy.colossalai.launch as launch
    import gemini_strategy.elixir.search as search

    assert launch.Booster is Booster
    assert launch is sys.modules["gemini_strategy.colossalai.booster"] is colossalai
    assert search is sys.modules["gemini_strategy.elixir"]


# ---- ZeroInitContext ----


def opt() -> OPTForCausalLM:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=48, hidden_size=16, num_hidden_layers=2, ffn_dim=32, dropout=0.0,
            num_attention_heads=2, max_position_embeddings=16, word_embed_proj_dim=16,
        )
    )  # fmt: skip


def test_what_is_built_inside_has_no_memory_and_the_contexts_seed() -> None:
    numbers = torch.get_rng_state()
    states = []
    for seed in (11, 11, 12):
        context = ZeroInitContext(CPU, TensorShardStrategy(), seed=seed, shard_param=True)
        with context:
            model = opt()
        assert all(p.is_meta for p in model.parameters())
        assert context.model_numel_tensor.item() == sum(p.numel() for p in model.parameters())
        engine, *_ = colossalai.initialize(model, HybridAdam(model.parameters()))
        states.append(engine.model.state_dict())
        engine.close()
    assert torch.equal(torch.get_rng_state(), numbers)
    assert_same_model(states[0], states[1])
    name = "model.decoder.layers.0.fc1.weight"
    assert not torch.equal(states[0][name], states[2][name])


def test_without_shard_param_it_is_an_ordinary_model() -> None:
    total = torch.zeros(1, dtype=torch.long)
    with ZeroInitContext(
        "cpu", TensorShardStrategy(), 4, default_dtype=torch.float64, model_numel_tensor=total
    ):
        model = nn.Linear(3, 3)
    torch.manual_seed(4)
    want = nn.Linear(3, 3, dtype=torch.float64)
    assert torch.equal(model.weight, want.weight)
    assert total.item() == 12
    assert torch.get_default_dtype() is torch.float32
    assert nn.Linear(2, 2).weight.device == CPU


def test_the_context_refuses_by_name() -> None:
    with pytest.raises(ValueError, match="shard_strategy=None"):
        ZeroInitContext(CPU, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shard_param=1"):
        ZeroInitContext(CPU, TensorShardStrategy(), shard_param=1)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError), ZeroInitContext(CPU, TensorShardStrategy(), shard_param=True):
        raise RuntimeError
    assert not nn.Linear(2, 2).weight.is_meta


# ---- optimizers ----


def test_adams_have_the_originals_order() -> None:
    adam = HybridAdam(net().parameters(), 1e-2, False, (0.8, 0.9), 1e-6, 0.1, False)
    assert type(adam) is gs.HybridAdam
    group = adam.param_groups[0]
    wanted = {"lr": 1e-2, "bias_correction": False, "betas": (0.8, 0.9), "eps": 1e-6}
    assert {**group, **wanted, "weight_decay": 0.1, "adamw_mode": False} == group
    assert type(colossalai.CPUAdam(net().parameters())) is gs.CPUAdam
    assert type(colossalai.FusedAdam(net().parameters())) is gs.HybridAdam
    with pytest.raises(ValueError, match="nvme_offload_fraction=0.5.*no file tier"):
        HybridAdam(net().parameters(), nvme_offload_fraction=0.5)
    with pytest.raises(ValueError, match="CPUAdam\\(nvme_offload_fraction=1\\)"):
        colossalai.CPUAdam(net().parameters(), nvme_offload_fraction=1)
    with pytest.raises(ValueError, match="nvme_offload_dir='x'"):
        HybridAdam(net().parameters(), nvme_offload_dir="x")
    with pytest.raises(ValueError, match="amsgrad=True"):
        colossalai.FusedAdam(net().parameters(), amsgrad=True)


# ---- Gemini of 0.5 ----


def boosted(**arguments: Any) -> tuple[Booster, GeminiDDP, GeminiOptimizer]:
    booster = Booster(plugin=GeminiPlugin(**arguments))
    model = net()
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    wrapped, taken, *_ = booster.boost(model, optimizer)
    assert taken is not None
    return booster, wrapped, taken


def train(booster: Booster, model: GeminiDDP, optimizer: GeminiOptimizer) -> dict[str, Tensor]:
    for x, y in data():
        loss = nn.functional.cross_entropy(model(x), y)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(("precision", "ours"), [("fp16", "16-mixed"), ("bf16", "bf16-mixed")])
def test_booster_has_the_bits_of_manage(precision: str, ours: str) -> None:
    booster, model, optimizer = boosted(
        precision=precision, placement_policy="auto", initial_scale=2**8, max_norm=0.1
    )
    want = plain(data(), clip=0.1, precision=ours, initial_scale=2.0**8)
    assert_same_model(train(booster, model, optimizer), want)
    assert isinstance(model.unwrap(), nn.Sequential)
    model.close()


def test_boost_returns_the_rest_as_it_is() -> None:
    model = net()
    rest = nn.CrossEntropyLoss(), [1], object()
    found = Booster(plugin=GeminiPlugin()).boost(model, None, *rest)
    assert found[1] is None
    assert all(a is b for a, b in zip(found[2:], rest, strict=True))


def test_gemini_ddp_alone() -> None:
    model = net()
    wrapped = GeminiDDP(model, mixed_precision=torch.bfloat16, chunk_size="64KiB")
    optimizer = GeminiOptimizer(HybridAdam(model.parameters(), lr=1e-2), wrapped)
    for x, y in data():
        optimizer.backward(nn.functional.cross_entropy(wrapped(x), y))
        assert optimizer.get_grad_norm() > 0
        assert optimizer.clip_grad_by_norm(0.1) > 0
        optimizer.engine.step()
        optimizer.zero_grad()
    assert wrapped.engine._runtime.chunk_bytes == 64 << 10
    assert_same_model(wrapped.state_dict(), plain(data(), clip=0.1, precision="bf16-mixed"))
    wrapped.close()


def test_without_safetensors_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(gs.GeminiError, match=r"pip install 'gemini-strategy\[weights\]'"):
        booster._save_tensors({"a": torch.zeros(2)}, tmp_path / "file")
    with pytest.raises(gs.GeminiError, match=r"pip install 'gemini-strategy\[weights\]'"):
        booster._load_tensors(tmp_path / "file.safetensors")


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("use_safetensors", [False, True])
def test_files_keep_every_bit(tmp_path: Path, shard: bool, use_safetensors: bool) -> None:
    booster, model, optimizer = boosted(precision="fp16", growth_interval=2, initial_scale=2**8)
    train(booster, model, optimizer)
    files = {name: tmp_path / name for name in ("model", "optimizer", "schedule")}
    if use_safetensors and not shard:
        files["model"] = tmp_path / "model.safetensors"
    if shard and not use_safetensors:
        with pytest.raises(ValueError, match="use_safetensors=True"):
            booster.save_model(model, files["model"], shard=True)
        return
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    booster.save_model(model, files["model"], shard=shard, use_safetensors=use_safetensors)
    booster.save_optimizer(optimizer, files["optimizer"])
    booster.save_lr_scheduler(schedule, files["schedule"])
    want = train(booster, model, optimizer)
    scale = optimizer.loss_scale
    model.close()
    booster, model, optimizer = boosted(precision="fp16", growth_interval=2, initial_scale=2**8)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    booster.load_model(model, files["model"])
    booster.load_optimizer(optimizer, files["optimizer"])
    booster.load_lr_scheduler(schedule, files["schedule"])
    assert_same_model(train(booster, model, optimizer), want)
    assert optimizer.loss_scale == scale == 2**12
    assert model.engine.stats()["skipped_steps"] == 0
    model.close()


def test_tied_weights_in_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    booster = Booster(plugin=GeminiPlugin())
    model, *_ = booster.boost(opt(), None)
    model.manage(None)
    want = model.state_dict()
    booster.save_model(model, tmp_path / "w.safetensors", use_safetensors=True)
    other, *_ = booster.boost(opt(), None)
    other.manage(None)
    booster.load_model(other, tmp_path / "w.safetensors")
    assert_same_model(other.state_dict(), want)
    model.close()
    other.close()


@pytest.mark.parametrize("use_safetensors", [False, True])
def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_safetensors: bool
) -> None:
    booster, model, optimizer = boosted()
    (tmp_path / "file").write_text("")
    with pytest.raises(gs.GeminiError, match="s3://a/model is no file"):
        booster.save_model(model, "s3://a/model", use_safetensors=use_safetensors)
    with pytest.raises(gs.GeminiError, match="writing model"):
        booster.save_model(model, tmp_path / "file" / "model", use_safetensors=use_safetensors)
    path = tmp_path / "folder" / "model"
    booster.save_model(model, path, use_safetensors=use_safetensors)
    old = path.read_bytes()
    train(booster, model, optimizer)

    def fails(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch, pytest.raises(gs.GeminiError, match="no room"):
        patch.setattr(os, "fsync", fails)
        booster.save_model(model, path, use_safetensors=use_safetensors)
    assert path.read_bytes() == old
    assert [file.name for file in path.parent.iterdir()] == ["model"]
    booster.save_model(model, path, use_safetensors=use_safetensors)
    assert path.read_bytes() != old
    model.close()


@pytest.mark.parametrize("cls", [GeminiDDP, GeminiPlugin])
@pytest.mark.parametrize("name", sorted(FIXED))
def test_what_the_engine_knows_by_itself_is_refused_by_name(cls: Any, name: str) -> None:
    arguments = [] if cls is GeminiPlugin else [net()]
    default, _ = FIXED[name]
    if name not in inspect.signature(cls).parameters:
        assert name == "extra_dp_group" and cls is GeminiPlugin
        return
    assert inspect.signature(cls).parameters[name].default == default
    other = not default if isinstance(default, bool) else 0.5 if default is not None else object()
    with pytest.raises(ValueError, match=f"{cls.__name__}\\({name}=.*only {default!r} is taken: "):
        cls(*arguments, **{name: other})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 2}, "tp_size=2.*data parallelism alone"),
        ({"extra_dp_size": 2}, "extra_dp_size=2"),
        ({"enable_flash_attention": True}, "enable_flash_attention=True.*attn_implementation"),
        ({"enable_all_optimization": True}, "enable_all_optimization"),
        ({"enable_fused_normalization": True}, "enable_fused_normalization"),
        ({"enable_jit_fused": True}, "enable_jit_fused"),
        ({"enable_sequence_parallelism": True}, "enable_sequence_parallelism"),
        ({"enable_sequence_overlap": True}, "enable_sequence_overlap"),
        ({"precision": "fp32"}, "precision='fp32'.*'fp16', 'bf16'"),
        ({"placement_policy": "cuda"}, "placement_policy='cuda'.*'auto', 'static'"),
        ({"placement_policy": "static", "offload_optim_frac": 0.5}, "1.0, 0.5, 0.0.*gpu_margin"),
        ({"offload_optim_frac": 1.0}, "placement_policy='auto'.*the plan decides"),
        ({"verbose": 1}, "verbose=1"),
    ],
)  # fmt: skip
def test_the_plugin_refuses_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GeminiPlugin(**arguments)


@pytest.mark.parametrize(
    ("fractions", "policy"),
    [((1.0, 0.0, 0.0), "cuda"), ((1.0, 1.0, 0.0), "auto"), ((1.0, 1.0, 1.0), "cpu")],
)
def test_static_is_a_policy(fractions: tuple[float, ...], policy: str) -> None:
    names = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
    _, model, _ = boosted(placement_policy="static", **dict(zip(names, fractions, strict=True)))
    assert model.engine._runtime.settings.policy == policy
    model.close()


def test_arguments_with_an_effect(capsys: pytest.CaptureFixture[str]) -> None:
    booster, model, optimizer = boosted(
        search_range_m=0.01, hidden_dim=512, min_chunk_size_m=0.001, force_outputs_fp32=True,
        gpu_margin_mem_ratio=0.25, device_budget="1MB", verbose=True, min_scale=2, hysteresis=3,
        growth_factor=3, backoff_factor=0.25, max_scale=2**20, enable_gradient_accumulation=True,
        precision="bf16",
    )  # fmt: skip
    settings = model.engine._runtime.settings
    assert (settings.margin, settings.device_budget) == (0.25, 1_000_000)
    sizes = settings.sizes
    assert (sizes.range, sizes.n_grids, sizes.minimum) == (20971, 20, 2097)
    assert model(torch.ones(2, 16)).dtype is torch.float32
    train(booster, model, optimizer)
    assert "Gemini: the plan" in capsys.readouterr().err
    model.close()
    _, model, optimizer = boosted(min_scale=2, hysteresis=3, growth_factor=3, backoff_factor=0.25)
    scaler = optimizer.engine.scaler
    found = scaler.min_scale, scaler.hysteresis, scaler.growth_factor, scaler.backoff_factor
    assert found == (2, 3, 3, 0.25)
    optimizer.clip_grad_by_value(1.0)
    model.close()


def test_booster_refuses_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="plugin=None"):
        Booster()
    with pytest.raises(ValueError, match="mixed_precision='fp16'.*GeminiPlugin\\(precision"):
        Booster(mixed_precision="fp16", plugin=GeminiPlugin())  # type: ignore[arg-type]
    booster, model, optimizer = boosted()
    with pytest.raises(gs.GeminiError, match="no_sync"):
        booster.no_sync(model)
    with pytest.raises(ValueError, match="use_async=True"):
        booster.save_model(model, tmp_path / "m", use_async=True)
    with pytest.raises(ValueError, match="shard=True.*engine.save"):
        booster.save_optimizer(optimizer, tmp_path / "o", shard=True)
    with pytest.raises(ValueError, match="chunk_size=4096.*not both"):
        boosted(chunk_size=4096, hidden_dim=64)
    with pytest.raises(ValueError, match="step\\(closure=...\\): with max_norm"):
        boosted(max_norm=1.0)[2].step(lambda: None)
    with pytest.raises(TypeError, match="the module must be wrapped before"):
        GeminiOptimizer(HybridAdam((m := net()).parameters()), m)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'clipping_norm'"):
        GeminiPlugin(clipping_norm=1.0)  # type: ignore[call-arg]
    unmanaged, *_ = booster.boost(net())
    with pytest.raises(gs.GeminiError, match="not managed yet"):
        booster.save_model(unmanaged, tmp_path / "m")
    model.close()
