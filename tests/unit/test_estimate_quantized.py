"""Estimates of quantized frozen weights under adapters, beside runs: bytes as stored, and the memory around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import nn
from transformers import GptOssConfig

import gemini_strategy as gs
from gemini_strategy import cli
from gemini_strategy.estimates.hugging_face import build_model
from gemini_strategy.estimates.machines import Machine
from gemini_strategy.estimates.tensors import Live, Operations
from gemini_strategy.machine.rates import REFERENCE
from gemini_strategy.parameters import quantized
from gemini_strategy.report.tables import bytes_text
from helpers.quantized_models import KINDS, TIGHT, Case, llama, trained

MACHINE = Machine("test", None, REFERENCE, 1e12, 1e12, 1e11)
RUN_SAYS = ("layout_hash", "chunks", "host_bytes", "state_bytes", "weight_bytes")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama().config.save_pretrained(tmp_path)
    return tmp_path


def experts(folder: Path, **quantization: Any) -> Path:
    """A model of which experts have most parameters, in tensors of three dimensions."""
    config = GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, vocab_size=96, num_local_experts=4, pad_token_id=0, dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | quantization))
    return folder


def test_experts_stay_as_they_are_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["estimate", str(experts(tmp_path)), "--tokens", "2x16", "--gpu", "rtx4090"]
    assert cli.main([*words, "--lora", "4", "--lora-targets", "q_proj", "--quantized", "nf4"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    n = 2 * 4 * (64 * 64 + 32 * 64) * 2  # of two layers' experts: gate and up, down; bf16
    size = bytes_text(n)
    assert f"not quantized {size} of 4 tensors that no linear layer has, as " in text
    assert "mlp.experts.gate_up_proj: they stay as they are" in text
    assert "frozen" in text and "never updated" in text
    assert cli.main([*words, "--lora", "4", "--lora-targets", "q_proj"]) == 0
    assert "not quantized" not in capsys.readouterr().out


def test_what_is_published_quantized_is_trained_dequantized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = {"quantization_config": {"quant_method": "mxfp4"}}
    folder = experts(tmp_path, **published)
    words = ["estimate", str(folder), "--tokens", "2x16", "--gpu", "rtx4090"]
    assert cli.main(words) == 2
    assert "--quantized none that they are dequantized to bf16" in capsys.readouterr().err
    assert cli.main([*words, "--quantized", "none"]) == 0
    whole = capsys.readouterr().out
    assert cli.main(["estimate", str(experts(tmp_path)), *words[2:]]) == 0
    assert capsys.readouterr().out == whole


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_are_counted_as_a_run_stores_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow: dict[str, float] = dict.fromkeys(REFERENCE, 1.0)
    monkeypatch.setenv("GEMINI_RATES", ",".join(f"{key}={value}" for key, value in slow.items()))
    case = Case(kind)
    arguments: dict[str, Any] = {"precision": "bf16-true", **TIGHT}
    ids = case.batch(0)
    inputs = {"input_ids": ids, "labels": ids}
    gpu = Machine("test", None, slow, 1e12, 1e12, 1e11)
    result = gs.estimate(case.build(), inputs, device="cpu", gpu=gpu, **arguments)
    model = case.build()
    engine = gs.manage(model, torch.optim.AdamW(trained(model)), device="cpu", **arguments)
    fetched = [0]
    for _ in range(4):  # in the first ones adapters and states come for the first time
        model(**inputs).loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        fetched.append(int(engine.stats()["fetched_bytes"]))
    stats, plan = engine.stats(), engine._runtime.core.plan_info()
    engine.close()
    assert {key: stats[key] for key in RUN_SAYS} == {key: result.stats[key] for key in RUN_SAYS}
    mine = result.schedules[0].plan
    assert mine["device_bytes"] == plan["device_bytes"]
    assert mine["hash"] == plan["hash"]
    assert mine["h2d_bytes"] == fetched[-1] - fetched[-2]


@pytest.mark.parametrize("kind", ["nf4", "fp4", "torchao int8", "torchao int4"])
def test_memory_around_quantized_weights_is_about_that_of_a_run(kind: str) -> None:
    """Not to the byte: their kernels take some for themselves. That of 8 bit multiplies integers."""
    case = Case(kind)
    ids = case.batch(0)
    inputs = {"input_ids": ids, "labels": ids}
    arguments: dict[str, Any] = {"device": "cpu", "gpu": MACHINE, "precision": "bf16-true"}
    result = gs.estimate(case.build(), inputs, **arguments)
    model, live = case.build().to(torch.bfloat16), Live()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            for tensor in (parameter, *(part for _, part in quantized.parts(parameter))):
                if not quantized.is_wrapper(tensor):
                    live.exempt(tensor)
            for tensor in quantized.aliases(module, parameter):
                live.exempt(tensor)
            for tensor in quantized.companions(module, parameter):
                live.note(tensor)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for tensor in {id(b): b for b in [*model.buffers(), ids]}.values():
        live.note(tensor)
    with Operations(live, lambda work: None):
        model(**inputs).loss.backward()
    assert abs(result.activation_bytes / live.most - 1) < 0.05


def test_other_layers_with_quantized_weights_are_refused() -> None:
    model = Case("nf4").build()
    layer = next(m for m in model.modules() if type(m).__name__ == "Linear4bit")
    layer.__class__ = type("Own", (nn.Module,), {})
    inputs = {"input_ids": Case("nf4").batch(0), "labels": Case("nf4").batch(0)}
    with pytest.raises(gs.GeminiError, match="Own with a quantized weight: an estimate knows"):
        gs.estimate(model, inputs, device="cpu", gpu=MACHINE, precision="bf16-true")


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4.5), ("int8", 8)])
def test_linear_layers_of_a_configuration_are_packed(kind: str, bits: float, folder: Path) -> None:
    model = build_model(folder, "sdpa", 4, kind)
    named = dict(model.named_modules())
    for name, module in named.items():
        if isinstance(module, nn.Linear) and "lora" not in name:
            is_packed = "lm_head" not in name
            assert quantized.is_bytes(module.weight) == is_packed
            kept = sum(b.nbytes for b in module.buffers()) + module.weight.nbytes
            n = module.in_features * module.out_features
            assert not is_packed or kept * 8 == n * bits + 32 * module.out_features * (
                kind == "int8"
            )
    true = bnb.nn.Params4bit(torch.randn(128, 64), quant_type="nf4", requires_grad=False).to("cpu")
    mine = next(m for n, m in named.items() if n.endswith("gate_proj.base_layer"))
    if kind == "nf4":
        assert (mine.weight.shape, mine.weight.dtype) == (true.shape, true.dtype)
        assert mine.scales_0.shape == true.quant_state.absmax.shape


def test_a_configuration_says_how_its_weights_are_quantized(folder: Path) -> None:
    def configured(**how: Any) -> Any:
        about = json.loads((folder / "config.json").read_text())
        about["quantization_config"] = how
        (folder / "config.json").write_text(json.dumps(about))
        return build_model(folder, "sdpa", 4)

    four = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    layer = configured(**four).base_model.model.model.layers[0].mlp.gate_proj.base_layer
    assert [tuple(b.shape) for b in layer.buffers()] == [(128,), (1,)]
    model = configured(quant_method="bitsandbytes", load_in_8bit=True)
    layer = model.base_model.model.model.layers[0].mlp.gate_proj.base_layer
    assert layer.weight.dtype is torch.int8
    with pytest.raises(gs.GeminiError, match="quantized by 'gptq', of which nothing is known"):
        configured(quant_method="gptq", bits=4)
