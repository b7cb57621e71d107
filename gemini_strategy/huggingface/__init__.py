"""Hugging Face's Trainer, trl and accelerate under a budget.

    from gemini_strategy.huggingface import GeminiPlugin, GeminiTrainer
    trainer = GeminiTrainer(model, args, gemini_plugin=GeminiPlugin(device_budget="24GB"), ...)

    class Trainer(GeminiTrainerMixin, SFTTrainer): ...
    accelerator = GeminiAccelerator(gemini_plugin=GeminiPlugin(device_budget="24GB"))

A script as it is trains under a budget with `gemini-strategy run --device-budget 24GB train.py`.

    with gemini_strategy.huggingface.loading():  # the weights stay in their files until manage()
        model = AutoModelForCausalLM.from_pretrained("folder")
"""

from __future__ import annotations

from typing import Any

from gemini_strategy.huggingface.extras import imported

# What needs accelerate or transformers is imported when it is asked for: a script may need only one of them.
_HOMES = {
    "GeminiAccelerator": "accelerator",
    "GeminiOptimizer": "accelerator",
    "GeminiPlugin": "plugin",
    "GeminiTrainer": "trainer",
    "GeminiTrainerMixin": "trainer",
    "loading": "reading",
}

# Imported before a home is: where the runner replaces a class in it, that takes ours, which must not be half made then.
_BEFORE = {"accelerator": "accelerate.accelerator", "trainer": "transformers.trainer"}

__all__ = [
    "GeminiAccelerator",
    "GeminiOptimizer",
    "GeminiPlugin",
    "GeminiTrainer",
    "GeminiTrainerMixin",
    "loading",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, user = _HOMES[name], f"{__name__}.{name}"
    if home in _BEFORE:
        imported(_BEFORE[home], user)
    value = getattr(imported(f"{__name__}.{home}", user), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
