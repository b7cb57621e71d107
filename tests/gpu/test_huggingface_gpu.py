"""trl's trainers and transformers' on a GPU, under a budget and without: the same losses and masters, bit for bit.

Deterministic kernels on both sides (see test_gpu_exact.py). The programs are those of the CPU's tests, with a model
that is large enough for a budget to bind.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import gemini_strategy as gs
from gemini_strategy.huggingface import GeminiPlugin
from test_gpu_exact import AROUND, MIB, _deterministic, _peak, _release, _used

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

import huggingface_case
import test_huggingface_trl as cases

pytestmark = pytest.mark.gpu

__all__ = ["_deterministic"]

CHUNK = 2 * MIB
ON_GPU = {"use_cpu": False}


def make_model() -> Any:
    """24 million parameters."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=huggingface_case.VOCABULARY,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=7,
            num_attention_heads=8,
            num_key_value_heads=8,
            attention_dropout=0.1,
        )
    )


N_PARAMETERS = 23_900_000


def masters(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in huggingface_case.masters(trainer).items()}


def _budget() -> int:
    """A third of what training takes (fp32 weights, gradients and moments) beside what is there now."""
    _release()
    return _used() + AROUND + 16 * N_PARAMETERS // 3


def _plugin() -> GeminiPlugin:
    return GeminiPlugin(device_budget=_budget(), chunk_size=CHUNK)


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(cases, "make_model", make_model)
    monkeypatch.setattr(cases, "masters", masters)
    monkeypatch.setattr(cases, "plugin", _plugin)


def _both(kind: type, config: type, folder: Path, data: Any, **given: Any) -> Any:
    trainer = cases.both(kind, config, folder, data, **ON_GPU, **given)
    assert trainer.accelerator.device.type == "cuda"
    return trainer


def test_the_model_is_as_large_as_is_said() -> None:
    n = sum(p.numel() for p in make_model().parameters())
    assert N_PARAMETERS <= n <= 1.05 * N_PARAMETERS


def test_sft(tmp_path: Path) -> None:
    trainer = _both(
        SFTTrainer, SFTConfig, tmp_path, Dataset.from_dict({"text": cases.words(32, 1)})
    )
    assert gs.engine_of(trainer.model).stats()["evictions"] > 0


def test_sft_with_adapters(tmp_path: Path) -> None:
    data = Dataset.from_dict({"text": cases.words(32, 1)})
    trainer = _both(SFTTrainer, SFTConfig, tmp_path, data, peft_config=cases.adapters())
    trainer.save_model()


def test_dpo_with_a_reference_model(tmp_path: Path) -> None:
    trainer = _both(DPOTrainer, DPOConfig, tmp_path, cases.preferences(), ref_model=make_model)
    engine = gs.engine_of(trainer.ref_model)
    assert engine.optimizer is None
    assert engine.stats()["evictions"] > 0
    assert gs.engine_of(trainer.model).stats()["evictions"] > 0
    weights = {name: p.detach() for name, p in make_model().named_parameters()}
    huggingface_case.assert_same(engine.model_state_dict(), weights)


def test_dpo_with_adapters(tmp_path: Path) -> None:
    _both(DPOTrainer, DPOConfig, tmp_path, cases.preferences(), peft_config=cases.adapters())


def test_grpo(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": cases.words(16, 1)})
    _both(GRPOTrainer, GRPOConfig, tmp_path, data, **cases.grpo_options())


def test_a_trainer_stays_within_the_budget(tmp_path: Path) -> None:
    from gemini_strategy.huggingface import GeminiTrainer

    runs = []
    for is_managed in (False, True):
        budget = _budget()
        torch.manual_seed(0)
        kind = (
            GeminiTrainer
            if is_managed
            else type("Plain", (huggingface_case.Reference, Trainer), {})
        )
        given = GeminiPlugin(device_budget=budget, chunk_size=CHUNK)
        beside = {"gemini_plugin": given} if is_managed else {}
        args = TrainingArguments(**huggingface_case.options(tmp_path / str(is_managed), **ON_GPU))
        trainer = kind(make_model(), args=args, train_dataset=huggingface_case.rows(), **beside)
        with _peak() as peak:
            trainer.train()
            torch.cuda.synchronize()
        assert not is_managed or peak[0] <= budget
        runs.append((huggingface_case.losses(trainer), masters(trainer)))
        if not is_managed:
            trainer.model.cpu()
            trainer.optimizer.state.clear()
            del trainer
    assert runs[0][0] == runs[1][0]
    huggingface_case.assert_same(runs[1][1], runs[0][1])
