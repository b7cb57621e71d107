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
#   3. Lightning's messages go where they went before: to the log of the tree that was imported first.
"""Lightning strategies ``"gemini"``, ``"gemini_cpu"``, ``"gemini_cuda"`` and ``"gemini_hybrid"``.

    import gemini_strategy.lightning
    trainer = lightning.Trainer(strategy="gemini", precision="bf16-mixed")

:data:`GeminiStrategy` takes the options; it is the class for the Lightning that the program uses (the one that is
imported already; ``lightning`` when both or neither are). :func:`strategy_class` returns the other one's.
"""

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from lightning_utilities.core import rank_zero

from gemini_strategy import GeminiError
from gemini_strategy._lightning_precision import Tree
from gemini_strategy._lightning_strategy import build_strategy

__all__ = ["GeminiStrategy", "strategy_class"]

# Tree -> (module of the Trainer, module of Fabric), in order of preference.
_MODULES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
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
    if name not in _MODULES:
        raise ValueError(
            f"strategy_class(tree={tree!r}): expected one of {', '.join(map(repr, _MODULES))}."
        )
    if name not in _classes:
        trainer, fabric = _imported(name)
        roots = {
            n: frozenset(module.partition(".")[0] for module in modules)
            for n, modules in _MODULES.items()
        }
        foreign = frozenset().union(*roots.values()) - roots[name]
        _classes[name] = build_strategy(Tree(name, trainer, fabric, roots[name], foreign))
    _register(name)
    return _classes[name]


def _imported(tree: str) -> list[ModuleType]:
    """Each tree, when it is imported, takes the log of both for its own: the one that came first keeps it."""
    is_first = not any(module in sys.modules for pair in _MODULES.values() for module in pair)
    log = rank_zero.log
    modules = [importlib.import_module(module) for module in _MODULES[tree]]
    if not is_first:
        rank_zero.log = log
    return modules


def _register(tree: str) -> None:
    trainer, fabric = (sys.modules[module] for module in _MODULES[tree])
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


def _installed() -> list[str]:
    found = [name for name in _MODULES if name in sys.modules or find_spec(name) is not None]
    # What the program imported itself comes first; Python's sort keeps the order of preference otherwise.
    return sorted(found, key=lambda name: _MODULES[name][0] not in sys.modules)


def _adopt_trees() -> Any:
    trees = list(_classes) or _installed()
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
