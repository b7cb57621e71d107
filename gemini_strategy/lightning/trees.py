# The installed distributions of Lightning: `lightning` and `pytorch_lightning`, whose classes are not each other's.
#
# Invariants
#   1. Lightning's messages go where they went before: to the log of the tree that was imported first.

import importlib
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from lightning_utilities.core import rank_zero

# Tree -> (module of the Trainer, module of Fabric), in order of preference.
MODULES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}


@dataclass(frozen=True)
class Tree:
    """One of the distributions.

    Attributes:
        name: ``"lightning"`` or ``"pytorch_lightning"``.
        pl: the module with ``Trainer`` in it.
        fabric: the module with the ``Fabric`` of the same tree in it.
        foreign: names of the top-level packages that belong to the other tree.
    """

    name: str
    pl: ModuleType
    fabric: ModuleType
    foreign: frozenset[str]

    def check(self, argument: str, value: Any, wanted: type, call: str) -> None:
        """Raise TypeError, naming the remedy, unless `value` is None or an instance of this tree's `wanted`."""
        if value is None or isinstance(value, wanted):
            return
        got = type(value)
        roots = {base.__module__.partition(".")[0] for base in got.__mro__}
        if roots & self.foreign:
            other = "pytorch_lightning" if self.name == "lightning" else "lightning"
            finder = "strategy_class" if call == "GeminiStrategy" else "fabric_strategy_class"
            raise TypeError(
                f"{call}({argument}=...): {got.__module__}.{got.__qualname__} belongs to `{other}`, but this strategy"
                f" class belongs to `{self.name}`. Import everything from `{self.name}`, or take the other class with"
                f" gemini_strategy.lightning.{finder}({other!r})."
            )
        raise TypeError(
            f"{call}({argument}=...): expected None or an instance of"
            f" {wanted.__module__}.{wanted.__qualname__}, got {got.__module__}.{got.__qualname__}."
        )


def made_for(tree: Tree, name: str, ours: type, plain: type, **parts: Any) -> type:
    """A class of ours for a tree, whose own class it derives from."""
    common = {"__doc__": ours.__doc__, "__module__": ours.__module__, "_tree": tree}
    return type(name, (ours, plain), common | parts)


def import_tree(name: str) -> Tree:
    """Each tree, when it is imported, takes the log of both for its own: the one that came first keeps it."""
    is_first = not any(module in sys.modules for pair in MODULES.values() for module in pair)
    log = rank_zero.log
    trainer, fabric = (importlib.import_module(module) for module in MODULES[name])
    if not is_first:
        rank_zero.log = log
    roots = {n: frozenset(m.partition(".")[0] for m in pair) for n, pair in MODULES.items()}
    foreign = frozenset().union(*roots.values()) - roots[name]
    return Tree(name, trainer, fabric, foreign)


def installed_trees() -> list[str]:
    """What the program imported itself comes first."""
    found = [name for name in MODULES if name in sys.modules or find_spec(name) is not None]
    # Python's sort keeps the order of preference otherwise.
    return sorted(found, key=lambda name: MODULES[name][0] not in sys.modules)
