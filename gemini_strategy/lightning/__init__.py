# The adapter to Lightning: importing this module makes the strategies known to Trainer and Fabric.
#
# Lightning is distributed twice, as `lightning` and as `pytorch_lightning`, with separate classes and registries, and
# has no entry point for strategies. So the strategy classes, one for the Trainer and one for Fabric, are built once per
# installed tree and registered in each, and this import is the line that a user writes. Importing the second tree costs
# about a tenth of a second once the first is there, so every installed one is served.
#
# Invariants
#   1. Importing or reloading this module any number of times is the same as once: classes keep their identity.
#   2. A strategy name that someone else has registered is never replaced.
"""Lightning strategies ``"gemini"``, ``"gemini_cpu"``, ``"gemini_cuda"`` and ``"gemini_hybrid"``.
For the Trainer also ``"colossalai"``, the old name.

    import gemini_strategy.lightning
    trainer = lightning.Trainer(strategy="gemini", precision="bf16-mixed")
    fabric = lightning.Fabric(strategy="gemini", precision="bf16-mixed")

:data:`GeminiStrategy` takes the options, for Fabric :data:`GeminiFabricStrategy`; they are the classes for the
Lightning that the program uses (the one that is imported already; ``lightning`` when both or neither are).
:func:`strategy_class` and :func:`fabric_strategy_class` return the other one's.
"""

import sys
from typing import TYPE_CHECKING, Any

try:
    import lightning_utilities  # noqa: F401  a part of Lightning, which what follows needs first
except ImportError as error:
    raise ImportError(
        "gemini_strategy.lightning needs Lightning: pip install 'gemini-strategy[lightning]'"
    ) from error

from gemini_strategy import GeminiError
from gemini_strategy.lightning.fabric import FabricStrategy, build_fabric_strategy
from gemini_strategy.lightning.strategy import Strategy, build_strategy
from gemini_strategy.lightning.trees import MODULES, import_tree, installed_trees
from gemini_strategy.originals.strategy import NAME, old_strategy

__all__ = [
    "ColossalAIStrategy",
    "GeminiFabricStrategy",
    "GeminiStrategy",
    "colossalai_strategy_class",
    "fabric_strategy_class",
    "strategy_class",
]

_NAMES: dict[str, dict[str, Any]] = {
    "gemini": {"placement_policy": "auto"},
    "gemini_cpu": {"placement_policy": "cpu"},
    "gemini_cuda": {"placement_policy": "cuda"},
    "gemini_hybrid": {"device_mesh": "hybrid"},
}
_DESCRIPTION = "Chunked model state within a device budget, {}={!r}"

# By the tree: of the Trainer, and of Fabric. Kept over a reload (invariant 1).
_classes: dict[str, tuple[type, type]] = globals().get("_classes", {})


def strategy_class(tree: str) -> type:
    """The strategy class for the Trainer of one distribution of Lightning.

    Args:
        tree: ``"lightning"`` (``lightning.pytorch`` means the same) or ``"pytorch_lightning"``.

    Raises:
        ValueError: any other name.
        ImportError: the distribution is not installed.
    """
    return _built("strategy_class", tree)[0]


def fabric_strategy_class(tree: str) -> type:
    """The same for its Fabric, which ``lightning.fabric`` and ``lightning_fabric`` name too: :func:`strategy_class`."""
    return _built("fabric_strategy_class", tree)[1]


def colossalai_strategy_class(tree: str) -> type:
    """The same under the old name: ``strategy="colossalai"``; see :func:`strategy_class`."""
    return old_strategy(_built("colossalai_strategy_class", tree)[0])


def _built(call: str, tree: str) -> tuple[type, type]:
    """A tree's classes, which are registered."""
    name = next((n for n, modules in MODULES.items() if tree in (n, *modules)), None)
    if name is None:
        raise ValueError(f"{call}(tree={tree!r}): expected one of {', '.join(map(repr, MODULES))}.")
    if name not in _classes:
        found = import_tree(name)
        _classes[name] = build_strategy(found), build_fabric_strategy(found)
    _register(name)
    return _classes[name]


def _register(tree: str) -> None:
    trainer, fabric = (sys.modules[module] for module in MODULES[tree])
    of_trainer = trainer.strategies.StrategyRegistry
    of_fabric = fabric.strategies.STRATEGY_REGISTRY
    strategy, of_own_loops = _classes[tree]
    wanted = [(of_trainer, NAME, old_strategy(strategy), _NAMES["gemini"])]
    for name, preset in _NAMES.items():
        wanted += [(of_trainer, name, strategy, preset), (of_fabric, name, of_own_loops, preset)]
    for registry, name, own, preset in wanted:
        if name not in registry:
            described = _DESCRIPTION.format(*next(iter(preset.items())))
            registry.register(name, own, description=described, **preset)
        elif registry[name]["strategy"].__module__.partition(".")[0] != "gemini_strategy":
            raise GeminiError(
                f"the strategy name {name!r} is taken in `{tree}` by {registry[name]['strategy']!r}: unregister it"
                " before importing gemini_strategy.lightning."
            )


def _adopt_trees() -> tuple[Any, Any]:
    trees = list(_classes) or installed_trees()
    if not trees:
        raise ImportError(
            "gemini_strategy.lightning needs Lightning: pip install 'gemini-strategy[lightning]'"
        )
    # Each class can be imported by name (LightningCLI and YAML need that), the preferred one as GeminiStrategy.
    for tree in trees:
        start = "" if tree == trees[0] else tree.title().replace("_", "")
        own = _built("strategy_class", tree)
        for cls in (*own, old_strategy(own[0])):
            name = start + cls.__name__.removeprefix(start)
            cls.__module__, cls.__name__, cls.__qualname__ = __name__, name, name
            globals()[name] = cls
    return _classes[trees[0]]


if TYPE_CHECKING:
    # What a type checker can know: the arguments, and that Trainer and Fabric take them (Any stands for their bases).
    class GeminiStrategy(Strategy, Any): ...

    class GeminiFabricStrategy(FabricStrategy, Any): ...

    class ColossalAIStrategy(Strategy, Any): ...
else:
    GeminiStrategy, GeminiFabricStrategy = _adopt_trees()
