"""Tiny Hugging Face families, unmodified, train to the bits of plain torch under a small budget."""

from __future__ import annotations

import pytest
import torch

from helpers.reference import (
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
GRID = [  # each family, its precisions in turns
    (case.name, case.precisions[i % len(case.precisions)])
    for i, case in enumerate(BY_NAME.values())
]


def _recipe(precision: str) -> Recipe:
    return Recipe(precision=precision, steps=STEPS, clip=1.0, accumulate=2)


@pytest.mark.parametrize(("name", "precision"), GRID)
def test_family(name: str, precision: str) -> None:
    case = BY_NAME[name]
    before, want = train_plain(case, _recipe(precision))
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
