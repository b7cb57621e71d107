"""Modules whose weights something else holds: accelerate's offloading, graphs of TorchScript, both FSDPs of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate import hooks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import gemini_strategy as gs
from helpers.ranks import run_ranks, values
from helpers.reference import assert_same_bits


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 3)))


def _manage(model: nn.Module, **how: Any) -> gs.Engine:
    return gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu", **how)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()


def _cpu(model: nn.Module, folder: Path) -> None:
    accelerate.cpu_offload(model, "cpu")


def _disk(model: nn.Module, folder: Path) -> None:
    accelerate.disk_offload(model, str(folder), "cpu")


def _mapped(model: nn.Module, folder: Path) -> None:
    places = {"0": "cpu", "1": "cpu", "2": "disk"}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder))


@pytest.mark.parametrize(
    ("offload", "words"),
    [
        (_cpu, ("module '0'", "host memory")),
        (_disk, ("module '0'", "on disk, in ")),
        (_mapped, ("module '2.0'", "on disk, in ")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_offloaded_weights_are_refused(
    offload: Any, words: tuple[str, ...], tmp_path: Path
) -> None:
    model = _model()
    offload(model, tmp_path)
    before, x = model(torch.ones(2, 4)), torch.ones(2, 4)
    with pytest.raises(gs.GeminiError, match="AlignDevicesHook") as error:
        _manage(model)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "device_map" in str(error.value) and "weights=" in str(error.value)
    assert_same_bits(model(x), before)


def test_a_device_map_without_hooks_is_refused() -> None:
    with torch.device("meta"):
        blank = _model()
    blank.hf_device_map = {"0": "cpu", "1": "cpu", "2": "disk"}
    blank[0] = nn.Linear(4, 6)
    with pytest.raises(gs.GeminiError, match=r"2\.0\.weight has no values .* on 'disk'"):
        _manage(blank)


def test_from_pretrained_with_a_device_map(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    rest = ("transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.ln_f", "lm_head")
    places = {**dict.fromkeys(rest, "cpu"), "transformer.h.1": "disk"}
    model = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "offload"
    )
    with pytest.raises(gs.GeminiError, match=r"module 'transformer\.h\.1\.ln_1' has accelerate's"):
        _manage(model)


@pytest.mark.parametrize(
    ("hook", "word"),
    [
        (lambda: hooks.CpuOffload("cpu"), "CpuOffload"),
        (
            lambda: hooks.LayerwiseCastingHook(torch.float32, torch.float32, False),
            "LayerwiseCastingHook",
        ),
        (
            lambda: hooks.SequentialHook(hooks.ModelHook(), hooks.CpuOffload("cpu")),
            "CpuOffload",
        ),
    ],
    ids=["CpuOffload", "LayerwiseCastingHook", "SequentialHook"],
)
def test_other_hooks_that_handle_weights_are_refused(hook: Any, word: str) -> None:
    model = _model()
    hooks.add_hook_to_module(model[2], hook())
    with pytest.raises(gs.GeminiError, match=f"module '2' has accelerate's {word}"):
        _manage(model)


def test_inputs_that_go_to_another_device_are_refused() -> None:
    model = _model()
    hook = hooks.AlignDevicesHook("cpu")
    hooks.add_hook_to_module(model[2], hook)
    hook.execution_device = "cuda:1"
    with pytest.raises(gs.GeminiError, match=r"module '2' .* to cuda:1, .* computes on cpu"):
        _manage(model)


class _Doubling(hooks.ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output * 2


def test_hooks_that_leave_weights_alone_stay() -> None:
    def build() -> nn.Module:
        model = _model()
        accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
        hooks.add_hook_to_module(model[2][0], _Doubling(), append=True)
        return model

    assert any(hasattr(module, "_hf_hook") for module in build().modules())
    model, reference = build(), build()
    optimizers = [gs.HybridAdam(m.parameters(), lr=0.1) for m in (model, reference)]
    engine = gs.manage(model, optimizers[0], device="cpu", placement_policy="cpu")
    for which, optimizer in zip((model, reference), optimizers, strict=True):
        _train(which, optimizer)
    engine.close()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert_same_bits(a.detach(), b.detach())
    assert_same_bits(model(torch.ones(2, 4)), reference(torch.ones(2, 4)))


@pytest.mark.parametrize("how", ["script", "trace", "whole"])
def test_script_modules_are_refused(how: str) -> None:
    model: nn.Module = _model()
    if how == "trace":
        model[2] = torch.jit.trace(model[2], torch.randn(1, 6))
    elif how == "script":
        model[2] = torch.jit.script(model[2])
    else:
        model = torch.jit.script(model)
    x = torch.randn(2, 4)
    before = model(x)
    name = "the model" if how == "whole" else "module '2'"
    with pytest.raises(gs.GeminiError, match=f"{name} is a .*Module .*torch.jit"):
        _manage(model)
    assert_same_bits(model(x), before)
    if how != "whole":
        model[2] = nn.Linear(6, 3)
        _manage(model).close()


def test_a_scripted_activation_stays() -> None:
    def build() -> nn.Module:
        model = _model()
        model[1] = torch.jit.script(nn.SiLU())
        return model

    model, reference = build(), build()
    optimizers = [gs.HybridAdam(m.parameters(), lr=0.1) for m in (model, reference)]
    engine = gs.manage(model, optimizers[0], device="cpu", placement_policy="cpu")
    for which, optimizer in zip((model, reference), optimizers, strict=True):
        _train(which, optimizer)
    engine.close()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert_same_bits(a.detach(), b.detach())


@pytest.mark.parametrize("name", ["buffers", "parameters", "named_parameters", "named_buffers"])
def test_a_module_may_have_such_an_attribute_of_its_own(name: str) -> None:
    """torch asks the whole model alone for its parameters, so one inside may hide the method."""
    model = _model()
    setattr(model[2], name, [])  # such as past inputs
    engine = _manage(model)
    engine.backward(model(torch.ones(2, 4)).sum())
    engine.optimizer.step()
    engine.close()
    assert getattr(model[2], name) == []


def _sharded(rank: int, size: int) -> list[str]:
    models = [fully_shard(_model())]
    for how in (False, True):
        inner = FullyShardedDataParallel(
            _model(), device_id=torch.device("cpu"), use_orig_params=how
        )
        models.append(nn.Sequential(inner))
    said = []
    for model in models:
        with pytest.raises(gs.GeminiError) as error:
            _manage(model)
        said.append(str(error.value))
    return said


def test_what_another_library_shards_is_refused(tmp_path: Path) -> None:
    for said in values(run_ranks(2, tmp_path, _sharded)):
        assert said[0].startswith("0.weight is a DTensor, a part of a parameter that another")
        # Sharded after manage() the model would have parameters that the engine does not know.
        assert said[0].endswith("parallelize_module(), before it or after")
        assert all(text.startswith("module '0' is a FullySharded") for text in said[1:])
