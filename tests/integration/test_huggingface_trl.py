"""trl's trainers under a budget: the losses and the masters of the same trainer without one, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

import gemini_strategy as gs
from gemini_strategy.huggingface import GeminiTrainerMixin
from huggingface_case import (
    VOCABULARY,
    Reference,
    assert_same,
    losses,
    make_model,
    masters,
    options,
    plugin,
)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="w2"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


def words(n: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    return [
        " ".join(f"w{int(i)}" for i in torch.randint(2, VOCABULARY, (8,), generator=generator))
        for _ in range(n)
    ]


def train(kind: type, config: type, folder: Path, data: Any, is_managed: bool, **given: Any) -> Any:
    """A trainer of `kind` that has trained, under a budget or as the reference."""
    beside = {"gemini_plugin": plugin()} if is_managed else {}
    base = GeminiTrainerMixin if is_managed else Reference
    mine = type(kind.__name__, (base, kind), {})
    names = ("ref_model", "peft_config", "reward_funcs")
    of_trainer = {name: given.pop(name) for name in names if name in given}
    model = given.pop("model", None) or make_model()
    args = config(**options(folder, **{"gradient_checkpointing": False, **given}))
    trainer = mine(
        model, args=args, train_dataset=data, processing_class=tokenizer(), **of_trainer, **beside
    )
    trainer.train()
    return trainer


def both(kind: type, config: type, folder: Path, data: Any, **given: Any) -> Any:
    """Compares the two; the managed one."""
    made = []
    for is_managed in (False, True):
        own = {
            name: make() if callable(make) and name in ("model", "ref_model") else make
            for name, make in given.items()
        }
        torch.manual_seed(0)
        made.append(train(kind, config, folder / str(is_managed), data, is_managed, **own))
    reference, managed = made
    assert losses(reference) == losses(managed)
    assert_same(
        masters(managed), {n: v for n, v in masters(reference).items() if n in masters(managed)}
    )
    assert gs.engine_of(managed.model).stats()["steps"] == 4
    return managed


def adapters() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def test_sft(tmp_path: Path) -> None:
    trainer = both(SFTTrainer, SFTConfig, tmp_path, Dataset.from_dict({"text": words(32, 1)}))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all("gemini/device_peak_bytes" in entry and "entropy" in entry for entry in logged)


def test_sft_with_adapters_that_it_adds_itself(tmp_path: Path) -> None:
    data = Dataset.from_dict({"text": words(32, 1)})
    trainer = both(
        SFTTrainer,
        SFTConfig,
        tmp_path,
        data,
        peft_config=adapters(),
    )
    trainer.save_model()
    assert {p.name for p in (tmp_path / "True").iterdir()} >= {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    assert not (tmp_path / "True" / "model.safetensors").exists()


def preferences() -> Any:
    return Dataset.from_dict(
        {"prompt": words(16, 1), "chosen": words(16, 2), "rejected": words(16, 3)}
    )


def test_dpo_with_a_reference_model(tmp_path: Path) -> None:
    trainer = both(DPOTrainer, DPOConfig, tmp_path, preferences(), ref_model=make_model)
    engine = gs.engine_of(trainer.ref_model)
    assert engine.optimizer is None
    assert engine.stats()["device_peak_bytes"] <= 90_000
    assert_same(
        engine.model_state_dict(), {n: p.detach() for n, p in make_model().named_parameters()}
    )


def test_dpo_with_adapters(tmp_path: Path) -> None:
    both(
        DPOTrainer,
        DPOConfig,
        tmp_path,
        preferences(),
        peft_config=adapters(),
    )


def grpo_options() -> dict[str, Any]:
    def rewards(completions: list[str], **given: Any) -> list[float]:
        return [float(sum(map(ord, text)) % 7) for text in completions]

    return {"reward_funcs": rewards, "num_generations": 2, "max_completion_length": 4}


def test_grpo(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": words(16, 1)})
    both(GRPOTrainer, GRPOConfig, tmp_path, data, **grpo_options())


def test_reward(tmp_path: Path) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_labels=1,
            pad_token_id=0,
        )
        return LlamaForSequenceClassification(config)

    data = Dataset.from_dict({"chosen": words(16, 2), "rejected": words(16, 3)})
    both(RewardTrainer, RewardConfig, tmp_path, data, model=model)


def test_an_optimizer_that_goes_past_the_engine_is_refused_before_a_model_is_loaded(
    tmp_path: Path,
) -> None:
    mine = type("Mine", (GeminiTrainerMixin, SFTTrainer), {})
    args = SFTConfig(**options(tmp_path, optim="lomo"))
    with pytest.raises(gs.GeminiError, match=r"optim='lomo'.*adafactor"):
        mine("no-such-model", args=args)
