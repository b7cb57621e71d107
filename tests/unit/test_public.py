"""What a person sees of the package: its names, an engine's names, and an engine in one line."""

from __future__ import annotations

import ast
import copy
import pickle
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy import _C

ROOT = Path(__file__).resolve().parents[2]


def public(thing: object) -> list[str]:
    return [name for name in dir(thing) if not name.startswith("_")]


def test_the_package_shows_what_is_for_use() -> None:
    assert public(gs) == [
        "CPUAdam",
        "Engine",
        "Estimate",
        "GeminiDeviceError",
        "GeminiError",
        "GeminiMemoryError",
        "GuardError",
        "HybridAdam",
        "LossScaler",
        "cast_model_",
        "engine_of",
        "errors",
        "estimate",
        "grad_norm",
        "manage",
        "optim",
        "parse_bytes",
    ]
    assert all(hasattr(gs, name) for name in public(gs))


def test_an_engine_shows_what_is_for_use() -> None:
    engine = gs.manage(nn.Linear(2, 2), device="cpu")
    assert public(engine) == [
        "backward",
        "chunk_states",
        "clip_grad_norm_",
        "clip_grad_value_",
        "close",
        "closed",
        "device",
        "ends_step",
        "full_parameter",
        "full_parameters",
        "grad_norm",
        "load",
        "load_model_state_dict",
        "load_optimizer_state_dict",
        "load_state_dict",
        "masters",
        "meter",
        "model",
        "model_state_dict",
        "optimizer",
        "optimizer_state_dict",
        "precision",
        "ranks",
        "report",
        "save",
        "save_pretrained",
        "scaler",
        "state_dict",
        "stats",
        "step",
        "timeline",
        "zero_grad",
    ]
    documented = [getattr(gs.Engine, name).__doc__ for name in public(gs.Engine)]
    assert all(documented)
    engine.close()


def test_an_engine_in_one_line() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(model, optimizer, device="cpu", device_budget="1GB")
    about = "<Engine: Linear on cpu, 1 GB of device memory, policy auto"
    assert repr(engine) == f"{about}, no plan yet, 1 rank>"
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert repr(engine).startswith(f"{about}, a plan with ")
    engine.close()
    assert repr(engine) == "<Engine: Linear on cpu, closed>"


def test_an_engine_is_not_copied() -> None:
    engine = gs.manage(nn.Linear(2, 2), device="cpu")
    for act in (copy.copy, copy.deepcopy):
        with pytest.raises(gs.GeminiError, match="cannot be copied"):
            act(engine)
    with pytest.raises(gs.GeminiError, match="cannot be pickled"):
        pickle.dumps(engine)
    engine.close()


# ---- what type checkers see ----


def stubbed(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """The names that a stub declares, and what is in the classes among them."""
    found: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.body if isinstance(node, ast.ClassDef) else []
        elif isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = []
    return found


def test_every_name_of_the_core_has_a_stub() -> None:
    names = stubbed(ast.parse((ROOT / "gemini_strategy/_C.pyi").read_text()).body)
    assert sorted(names) == public(_C)
    for name, body in names.items():
        if body:
            declared = {n for n in stubbed(body) if not n.startswith("_")}
            there = {n for n in vars(getattr(_C, name)) if not n.startswith("_")}
            # Attributes that Python code gives to its subclasses' instances are declared, too.
            assert there <= declared, f"{name}: {there - declared}"


def test_the_package_says_that_it_is_typed() -> None:
    """And an editable install is a path: type checkers do not follow the hooks that setuptools makes otherwise."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert (ROOT / "gemini_strategy/py.typed").exists()
    assert setuptools["package-data"] == {"gemini_strategy": ["py.typed", "*.pyi"]}
    assert setuptools["package-dir"] == {"": "."}
