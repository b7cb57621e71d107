"""Puts the layer in place of accelerate's Accelerator and transformers' Trainer, for scripts that know nothing of it.

A class is replaced in the module that defines it, when that module has been imported and before anybody has its names.
So whatever derives from a Trainer, in trl or in a script, derives from ours, and a module that nobody imports costs
nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from gemini_strategy.errors import GeminiError
from gemini_strategy.huggingface.folders import keeping_masters
from gemini_strategy.huggingface.reading import leave_unread
from gemini_strategy.huggingface.refusals import check_arguments


def _replace(home: str, name: str, module: ModuleType) -> None:
    """Puts our class, Gemini`name` of the module `home`, in the place of the module's."""
    ours = getattr(importlib.import_module(f"gemini_strategy.huggingface.{home}"), f"Gemini{name}")
    plain = getattr(module, name)
    strangers = [kind.__name__ for kind in plain.__subclasses__() if kind is not ours]
    if strangers:
        raise GeminiError(
            f"{module.__name__}.{name} has been derived from already, by {', '.join(strangers)}, which would not train "
            "under the budget: put Gemini in place before that, with `gemini-strategy run`"
        )
    # Under its own name: scripts, logs and pickles tell no difference.
    ours.__name__, ours.__qualname__, ours.__module__ = name, name, module.__name__
    setattr(module, name, ours)


def _arguments(module: ModuleType) -> None:
    """What cannot be honoured is refused where a script says it, before it loads a model."""
    kind = module.TrainingArguments
    plain = kind.__post_init__

    @functools.wraps(plain)
    def checked(self: Any) -> None:
        check_arguments(self)
        plain(self)

    kind.__post_init__ = checked


def _models(module: ModuleType) -> None:
    leave_unread(module)
    module.PreTrainedModel.save_pretrained = keeping_masters(module.PreTrainedModel.save_pretrained)


def _adapters(module: ModuleType) -> None:
    module.PeftModel.save_pretrained = keeping_masters(module.PeftModel.save_pretrained)


_ACTS: dict[str, Callable[[ModuleType], None]] = {
    "accelerate.accelerator": functools.partial(_replace, "accelerator", "Accelerator"),
    "peft.peft_model": _adapters,
    "transformers.modeling_utils": _models,
    "transformers.training_args": _arguments,
    "transformers.trainer": functools.partial(_replace, "trainer", "Trainer"),
}


class _Loader(importlib.abc.Loader):
    """A module's own loader; what is to be done with the module follows it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _ACTS[module.__name__](module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of _ACTS where they always were."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _ACTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def install() -> None:
    """Puts the layer in place, for modules that are imported already and for those that will be. Idempotent.

    Raises:
        GeminiError: somebody has derived from what is to be replaced.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name, act in _ACTS.items():
        if name in sys.modules:
            act(sys.modules[name])
    sys.meta_path.insert(0, _Finder())
