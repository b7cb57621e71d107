# The adapter to Lightning: importing this module makes `Trainer(strategy="gemini")` known.
#
# Lightning is distributed twice, as `lightning` and as `pytorch_lightning`, with separate classes and registries, and
# has no entry point for strategies. So the strategy class is built once per installed tree and registered in each, and
# this import is the line that a user writes. Importing the second tree costs about a tenth of a second once the first
# is there, so every installed one is served.
#
# Invariants
#   1. Importing or reloading this module any number of times is the same as once: classes keep their identity.
#   2. A strategy name that someone else has registered is never replaced.
"""Lightning strategies ``"gemini"``, ``"gemini_cpu"``, ``"gemini_cuda"`` and ``"gemini_hybrid"``.

    import gemini_strategy.lightning
    trainer = lightning.Trainer(strategy="gemini", precision="bf16-mixed")

:data:`GeminiStrategy` takes the options; it is the class for the Lightning that the program uses (the one that is
imported already; ``lightning`` when both or neither are). :func:`strategy_class` returns the other one's.
"""

import sys
from typing import Any, NoReturn

from gemini_strategy import GeminiError
from gemini_strategy.lightning.strategy import build_strategy
from gemini_strategy.lightning.trees import MODULES, import_tree, installed_trees

__all__ = ["GeminiStrategy", "strategy_class"]

_NAMES: dict[str, dict[str, Any]] = {
    "gemini": {"placement_policy": "auto"},
    "gemini_cpu": {"placement_policy": "cpu"},
    "gemini_cuda": {"placement_policy": "cuda"},
    "gemini_hybrid": {"device_mesh": "hybrid"},
}
_DESCRIPTION = "Chunked model state within a device budget, {}={!r}"

# Kept over a reload (invariant 1).
_classes: dict[str, type] = globals().get("_classes", {})


def strategy_class(tree: str) -> type:
    """The strategy class for one distribution of Lightning.

    Args:
        tree: ``"lightning"`` (``lightning.pytorch`` means the same) or ``"pytorch_lightning"``.

    Raises:
        ValueError: any other name.
        ImportError: the distribution is not installed.
    """
    name = "lightning" if tree == "lightning.pytorch" else tree
    if name not in MODULES:
        raise ValueError(
            f"strategy_class(tree={tree!r}): expected one of {', '.join(map(repr, MODULES))}."
        )
    if name not in _classes:
        _classes[name] = build_strategy(import_tree(name))
    _register(name)
    return _classes[name]


def _register(tree: str) -> None:
    trainer, fabric = (sys.modules[module] for module in MODULES[tree])
    for name, preset in _NAMES.items():
        for registry, strategy, arguments in (
            (trainer.strategies.StrategyRegistry, _classes[tree], preset),
            (fabric.strategies.STRATEGY_REGISTRY, _refuse_fabric, {}),
        ):
            if name not in registry:
                described = _DESCRIPTION.format(*next(iter(preset.items())))
                registry.register(name, strategy, description=described, **arguments)
            elif registry[name]["strategy"].__module__.partition(".")[0] != "gemini_strategy":
                raise GeminiError(
                    f"the strategy name {name!r} is taken in `{tree}` by {registry[name]['strategy']!r}: unregister it"
                    " before importing gemini_strategy.lightning."
                )


def _refuse_fabric() -> NoReturn:
    raise NotImplementedError(
        "strategy='gemini' is not available for Fabric in this version. Use Trainer(strategy='gemini'), or call"
        " gemini_strategy.manage(model, optimizer) in your own loop without Fabric."
    )


def _adopt_trees() -> Any:
    trees = list(_classes) or installed_trees()
    if not trees:
        raise ImportError("gemini_strategy.lightning needs Lightning: pip install lightning")
    classes = [strategy_class(name) for name in trees]
    # Each class can be imported by name (LightningCLI and YAML need that), the preferred one as GeminiStrategy.
    for tree, cls in zip(trees, classes, strict=True):
        name = (
            "GeminiStrategy"
            if cls is classes[0]
            else f"{tree.title().replace('_', '')}GeminiStrategy"
        )
        cls.__module__, cls.__name__, cls.__qualname__ = __name__, name, name
        globals()[name] = cls
    return classes[0]


GeminiStrategy = _adopt_trees()
