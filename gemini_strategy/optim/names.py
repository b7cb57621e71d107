"""Optimizers by the names that transformers has for them: which go past the engine."""

from __future__ import annotations

from gemini_strategy.errors import GeminiError

# They step inside the backward, each parameter as its gradient comes.
_IN_BACKWARD = ("lomo", "adalomo")
_LAYERWISE = "_layerwise"


def check_name(name: str, where: str) -> None:
    """A name of `TrainingArguments(optim=...)`, said `where`.

    Raises:
        GeminiError: it cannot be honoured.
    """
    if name in _IN_BACKWARD or name.endswith(_LAYERWISE):
        same = name.removesuffix(_LAYERWISE)
        instead = "'adamw_8bit' or 'adafactor'" if same == name else repr(same)
        raise GeminiError(
            f"{where} updates parameters by hooks of its own inside the backward, which would go past the engine: use "
            f"{instead}; with max_grad_norm=0 Gemini updates inside the backward, too, and no gradient stays"
        )
