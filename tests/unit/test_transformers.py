"""Tiny Hugging Face families, unmodified, train to the bits of plain torch under a small budget."""

from __future__ import annotations

import functools

import pytest
import torch

from helpers.reference import (
    Outcome,
    Recipe,
    assert_same_outcome,
    assert_trained,
    drive,
    managed,
    tightly,
    train_plain,
)
from helpers.zoo import transformers_cases

STEPS = 5
BY_NAME = {case.name: case for case in transformers_cases()}
GRID = [(case.name, precision) for case in BY_NAME.values() for precision in case.precisions]


def _recipe(precision: str) -> Recipe:
    return Recipe(precision=precision, steps=STEPS, clip=1.0, accumulate=2)


@functools.cache
def _reference(name: str, precision: str) -> tuple[Outcome, Outcome]:
    return train_plain(BY_NAME[name], _recipe(precision))


@pytest.mark.parametrize(("name", "precision"), GRID)
def test_family(name: str, precision: str) -> None:
    case = BY_NAME[name]
    before, want = _reference(name, precision)
    assert_trained(before, want, [n for n in before.masters if n not in case.untrained])
    run = tightly(case.build, _recipe(precision), chunk_size=8192)
    try:
        drive(run, case, STEPS)
        assert_same_outcome(run.outcome(), want)
        assert run.engine.stats()["evictions"] > 0
    finally:
        run.engine.close()


def test_generate_between_steps() -> None:
    """Generation (no_grad, key-value cache, one token at a time) in the middle of training."""
    case, recipe = BY_NAME["llama"], _recipe("bf16-true")
    prompt = torch.tensor([[1, 5, 9]])

    def train(run):
        drive(run, case, 2)
        run.model.eval()
        text = run.model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        run.model.train()
        drive(run, case, 2, first=2)
        return text

    from helpers.reference import plain

    reference = plain(case.build, recipe)
    want = train(reference)
    run = managed(case.build, recipe, chunk_size=8192, placement_policy="cpu")
    try:
        assert torch.equal(train(run), want)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


def test_save_pretrained_round_trip(tmp_path) -> None:
    """`save_pretrained` on the managed model writes the trained weights, or refuses by name."""
    from transformers import LlamaForCausalLM

    import gemini_strategy as gs

    case, recipe = BY_NAME["llama"], _recipe("bf16-true")
    run = managed(case.build, recipe, chunk_size=8192, placement_policy="cpu")
    try:
        drive(run, case, 2)
        want = run.engine.model_state_dict()
        try:
            run.model.save_pretrained(tmp_path)
        except gs.GuardError:
            with run.engine.full_parameters(writable=False):
                run.model.save_pretrained(tmp_path)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
        for key, value in want.items():
            assert torch.equal(loaded[key], value), key
    finally:
        run.engine.close()
