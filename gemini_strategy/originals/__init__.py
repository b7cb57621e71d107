"""The originals' names, Colossal-AI's, Elixir's and the old strategy's, written on what any program may use of Gemini.

docs/originals.md says what became of what. Nothing else knows this package but gemini_strategy/colossalai.py and
elixir.py, the import paths of old, and gemini_strategy.lightning, which registers the old strategy.
"""

import importlib
import sys

_PARTS = {  # modules that the import paths had
    "colossalai": ("booster", "gemini", "launch", "optimizers", "training", "zero"),
    "elixir": ("profiling", "search", "wrapper"),
}


def stand_in(path: str) -> None:
    """From now on an import of this path, and of the modules that were below it, is that of the module here."""
    name = path.rpartition(".")[2]
    module = importlib.import_module(f"{__name__}.{name}")
    sys.modules[path] = module
    for part in _PARTS[name]:
        sys.modules[f"{path}.{part}"] = module
        setattr(module, part, module)  # `import a.b.part as name` asks for it
