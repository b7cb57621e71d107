"""Beside a torch that lacks a private name the package says which, of which torch, and what to do."""

import json
import subprocess
import sys

import pytest
import torch

from gemini_strategy import _torch

# One process has torch, and a fork of it for each name lacks that name.
PROGRAM = """
import functools, importlib, json, os, sys, types
import torch

class Missing:
    def __get__(self, instance, owner):
        raise AttributeError("missing")

def found(path):
    try:
        return functools.reduce(getattr, path.split(".")[1:], torch)
    except AttributeError:
        module, _, name = path.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError:
            return getattr(found(module), name)

def remove(path):
    above, _, name = path.rpartition(".")
    owner = sys.modules.get(above) or found(above)
    if isinstance(owner, type):
        setattr(owner, name, Missing())
    elif name in vars(owner) and not hasattr(type(owner), "__getattr__"):
        delattr(owner, name)
        sys.modules[path] = None  # a module is not imported anew
    else:  # it finds its names itself
        upper, _, name = above.rpartition(".")
        setattr(found(upper), name, types.SimpleNamespace())

paths = json.loads(sys.argv[1])
for path in paths:
    found(path)
for path in paths:
    read, write = os.pipe()
    if os.fork() == 0:
        text = "nothing"
        try:
            remove(path)
            import gemini_strategy._torch
        except ImportError as error:
            text = str(error)
        except BaseException as error:
            text = repr(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with open(read) as answer:
        print(json.dumps([path, answer.read()]))
    os.wait()
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    names = json.dumps(sorted(set(_torch.NAMES)))
    command = [sys.executable, "-c", PROGRAM, names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_all_names_are_there() -> None:
    assert len(set(_torch.NAMES)) > 50
    assert "torch._C._dispatch_keys" in _torch.NAMES


@pytest.mark.parametrize("name", sorted(set(_torch.NAMES)))
def test_a_torch_without_it_is_refused_by_name(name: str, answers: dict[str, str]) -> None:
    text = answers[name]
    assert text.startswith(f"torch {torch.__version__} lacks "), text
    assert name in text.partition(" lacks ")[2].partition(", by which")[0].split(", "), text
    assert "install torch 2.11 to 2.13" in text
