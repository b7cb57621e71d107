"""Estimates with optimizers that the engine does not compute: their states' bytes, and the plan of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torchao.optim
from torch import nn
from transformers.optimization import Adafactor

import gemini_strategy as gs
from gemini_strategy.cli import main
from gemini_strategy.estimates.machines import REFERENCE, Machine

N, ROWS, COLUMNS = 3, 128, 192
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: Adafactor(p, lr=0.1, relative_step=False, scale_parameter=False),
    "bitsandbytes": lambda p: bnb.optim.AdamW8bit(p, lr=0.1),
    "torchao": lambda p: torchao.optim.AdamW8bit(p, lr=0.1),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x).square().mean() for layer in self.layers)  # type: ignore[return-value]


def state_bytes(name: str, itemsize: int) -> int:
    """Of one weight; what has one element is no tensor of a chunk, and each tensor begins at 512 bytes."""
    n = ROWS * COLUMNS
    tensors = {
        "sgd": [],
        "momentum": [n * itemsize],
        "adagrad": [n * itemsize],
        "adafactor": [ROWS * 4, COLUMNS * 4],
        "bitsandbytes": [n, n, n // 256 * 4, n // 256 * 4],
        "torchao": [n, n, n // 256 * 4, n // 256 * 4, 256 * 4, 256 * 4],  # with maps of their own
    }[name]
    return sum(-(-each // 512) * 512 for each in tensors)


def machine() -> Machine:
    return Machine("test", None, dict.fromkeys(REFERENCE, 1.0), 1e12, 1e12, 1e11)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_planned_is_what_a_run_plans(
    name: str, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As test_estimate.py's, whose rates these are."""
    rates = ",".join(f"{key}=1.0" for key in REFERENCE)
    monkeypatch.setenv("GEMINI_RATES", rates)
    given: dict[str, Any] = {"precision": precision, "device_budget": "512KB"}
    x = torch.ones(2, COLUMNS)
    with torch.device("meta"):
        model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    result = gs.estimate(
        model,
        x,
        optimizer=optimizer,
        device="cpu",
        gpu=machine(),
        step_fn=lambda model, x: model(x),
        **given,
    )
    assert result.is_opaque
    assert result.optimizer == type(optimizer).__name__
    assert result.state_bytes == N * state_bytes(name, 2 if precision == "bf16-true" else 4)
    for schedule in result.schedules:
        run = Net()
        engine = gs.manage(run, OPTIMIZERS[name](run.parameters()), device="cpu", **given)
        engine.backward(run(x), step=schedule.when == "immediate")
        engine.optimizer.step()
        stats, plan = engine.stats(), engine._runtime.core.plan_info()
        saved = engine.state_dict()
        engine.close()
        assert plan["hash"] == schedule.plan["hash"]
        assert plan["device_bytes"] == schedule.plan["device_bytes"]
        assert result.host_bytes == stats["host_bytes"]
        masters = sum(value.nbytes for value in saved["model"].values())
        beside = result.state_dict_peak_bytes - result.host_peak_bytes
        assert beside == masters + result.state_bytes


def test_bytes_for_a_gpu_that_is_not_here() -> None:
    """Tensors as large as a model of eight billion parameters has, which nothing is allocated for."""
    with torch.device("meta"):
        model = nn.Linear(4096, 128256, bias=False)
    n = model.weight.numel()
    result = gs.estimate(
        model,
        torch.empty(1, 4096, device="meta"),
        optimizer=bnb.optim.AdamW8bit(model.parameters()),
        gpu="h100",
        device_budget="24GB",
        precision="bf16-true",
    )
    assert result.state_bytes == 2 * (n + n // 256 * 4)
    assert "bytes per trained parameter; its own step() runs on the device" in " ".join(
        str(result).split()
    )
    assert "Adam on the host" not in str(result)


def test_a_name_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "vocab_size": 96, '
        '"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}'
    )
    words = [
        "estimate",
        str(config),
        "--gpu",
        "h100",
        "--tokens",
        "1x32",
        "--precision",
        "bf16-true",
    ]
    embedding, norms, rest = 96 * 128, 5 * 128, 96 * 128 + 2 * (4 * 128**2 + 3 * 128 * 256)
    of_norms = 2 * 5 * 512  # fp32: they have fewer than 4096 elements
    for name, beside in (("adamw_8bit", 2 * 4 * embedding), ("bitsandbytes.optim:AdamW8bit", 0)):
        in_8_bits = rest if beside else rest + embedding  # a Trainer keeps embeddings' in 32 bits
        assert main([*words, "--optimizer", name]) == 0
        text = " ".join(capsys.readouterr().out.split())
        found = float(text.split("of states, ")[1].split(" bytes per")[0])
        expected = (2 * in_8_bits + beside + of_norms) / (embedding + norms + rest)
        assert expected <= found < expected * 1.1, name  # with scales, of 256 elements each
    assert main([*words, "--optimizer", "lomo"]) == 2
    assert "--optimizer lomo updates parameters by hooks of its own" in capsys.readouterr().err
    assert main([*words, "--optimizer", "nothing"]) == 2
    assert "none of a Trainer's (adamw_torch, " in capsys.readouterr().err
    assert main([*words, "--optimizer", "torch.optim:Nothing"]) == 2
    assert "torch.optim has no optimizer of that name" in capsys.readouterr().err
    assert main([*words, "--optimizer", "no_such_package:Class"]) == 2
    assert "needs no_such_package, which is not installed" in capsys.readouterr().err
    assert main([*words, "--optimizer", "torch.optim:LBFGS"]) == 2
    assert "step() of LBFGS needs 'closure'" in capsys.readouterr().err
