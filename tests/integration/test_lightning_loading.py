# Modules that configure_model builds on the meta device, with weights from a file and without, in both Lightning trees.

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gemini_strategy as gs
from gemini_strategy import lightning as adapter
from lightning_case import (
    PRECISIONS,
    cast_reference,
    fit,
    fit_reference,
    make,
    make_reference_trainer,
    make_trainer,
    module_class,
    same,
    same_training,
)


@functools.cache
def _blank_class(tree: str) -> type:
    """The module of the other tests, its body built on the meta device in `configure_model`."""

    class Blank(module_class(tree)):
        def configure_model(self) -> None:
            with torch.device("meta"):
                self.build()

        def configure_optimizers(self) -> Any:
            self.seen.append(str(self.body[1].weight.device))
            return super().configure_optimizers()

    return Blank


def _blank(tree: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return _blank_class(tree)(build="late", **options)


def _strategy(tree: str, **options: Any) -> Any:
    return adapter.strategy_class(tree)(**options)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_initial_values_are_those_of_building(tree: str, precision: str) -> None:
    def built() -> Any:
        module = make(tree, reference=True, build="late")
        torch.manual_seed(1)
        module.build()
        cast_reference(module, precision)
        return module

    reference = built()
    reference_trainer = make_reference_trainer(tree, precision=precision)
    reference_trainer.fit(reference)  # with the random numbers that building has left
    module = _blank(tree)
    trainer = fit(tree, module, precision=precision, seed=1)
    assert module.seen[0] == "meta"
    same_training(trainer, module, reference_trainer, reference)


def _file(tree: str, path: Path) -> Path:
    save_file(make(tree, seed=5).state_dict(), path)
    return path


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_from_a_file(tree: str, precision: str, tmp_path: Path) -> None:
    path = _file(tree, tmp_path / "some.safetensors")
    reference = make(tree, reference=True)
    reference.load_state_dict(load_file(path))
    cast_reference(reference, precision)
    reference_trainer = fit_reference(tree, reference, precision=precision)
    module = _blank(tree)
    trainer = fit(tree, module, _strategy(tree, weights=path), precision=precision)
    same_training(trainer, module, reference_trainer, reference)


def test_the_file_is_where_training_begins_and_no_more(tree: str, tmp_path: Path) -> None:
    """Stages after the first go on from what was trained, and a checkpoint comes after the file."""
    strategy = _strategy(tree, weights=str(_file(tree, tmp_path / "some.safetensors")))
    want = load_file(tmp_path / "some.safetensors")
    module = _blank(tree)
    trainer = make_trainer(tree, strategy)
    trainer.validate(module, verbose=False)
    same(trainer.strategy.lightning_module_state_dict()["body.1.weight"], want["body.1.weight"])
    trainer = fit(tree, module, _strategy(tree, weights=strategy.weights))
    trained = trainer.strategy.lightning_module_state_dict()
    assert not torch.equal(trained["body.1.weight"], want["body.1.weight"])
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    trainer.test(module, verbose=False)
    same(trainer.strategy.lightning_module_state_dict(), trained)
    trainer = make_trainer(tree, _strategy(tree, weights=strategy.weights))
    trainer.validate(module, verbose=False)
    same(trainer.strategy.lightning_module_state_dict(), trained)
    other = _blank(tree)
    trainer = make_trainer(tree, _strategy(tree, weights=strategy.weights))
    trainer.test(other, ckpt_path=tmp_path / "trained.ckpt", verbose=False)
    same(trainer.strategy.lightning_module_state_dict(), trained)


def test_a_module_with_values_takes_the_file_once(tree: str, tmp_path: Path) -> None:
    path = _file(tree, tmp_path / "some.safetensors")
    module = make(tree, seed=1)
    trainer = make_trainer(tree, _strategy(tree, weights=path))
    trainer.validate(module, verbose=False)
    want = load_file(path)
    same(trainer.strategy.lightning_module_state_dict(), {n: want[n] for n in module.state_dict()})
    trained = fit(
        tree, module, _strategy(tree, weights=path)
    ).strategy.lightning_module_state_dict()
    assert not torch.equal(trained["body.1.weight"], want["body.1.weight"])
    trainer = make_trainer(tree, _strategy(tree, weights=path))
    trainer.validate(module, verbose=False)
    same(trainer.strategy.lightning_module_state_dict(), trained)


def test_a_transformer_inside(tree: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(5)
    want = LlamaForCausalLM(config)
    want.save_pretrained(tmp_path, max_shard_size="8KB")

    class Inside(module_class(tree)):
        def configure_model(self) -> None:
            if self.body is None:
                with torch.device("meta"):
                    self.body = LlamaForCausalLM(config)
                    self.head = nn.Linear(3, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.body(tokens).logits

    module = Inside(build="late")
    with pytest.raises(gs.GeminiError, match=r"head.weight, head.bias; give missing='init'"):
        fit(tree, module, _strategy(tree, weights=tmp_path))
    assert module.head.weight.is_meta and module.body.lm_head.weight.is_meta
    trainer = make_trainer(tree, _strategy(tree, weights={"body": tmp_path}, missing="init"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*meta|.*no place")
        trainer.validate(module, verbose=False)
    state = trainer.strategy.lightning_module_state_dict()
    for name, tensor in want.state_dict().items():
        same(state[f"body.{name}"], tensor.detach())
    assert module.body.lm_head.weight is module.body.model.embed_tokens.weight
    trainer = fit(tree, module, _strategy(tree, weights={"body": tmp_path}, missing="init"))
    assert all(torch.isfinite(torch.tensor(module.losses)))
    assert module.losses[-1] < module.losses[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"weights": 3}, r"GeminiStrategy\(weights=3\).*path"),
        ({"weights": {"body": 3}}, r"weights=.*mapping"),
        ({"missing": "maybe"}, r"GeminiStrategy\(missing='maybe'\).*'refuse', 'init'"),
    ],
)
def test_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        adapter.GeminiStrategy(**arguments)
