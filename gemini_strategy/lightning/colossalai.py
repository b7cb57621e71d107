# The old name: `Trainer(strategy="colossalai")` and ColossalAIStrategy are the strategy "gemini" and its class.
#
# Invariants
#   1. The alias decides nothing: its arguments are GeminiStrategy's own, the originals' 21 before all others.
#   2. It says once per process what it became.

import functools
import inspect
from typing import Any

_has_said = False

_TEXT = (
    "strategy='colossalai' has become GeminiStrategy({arguments}) of gemini_strategy, with the same arguments. It takes"
    " every precision of the Trainer. What gpu_margin_mem_ratio, chunk_search_range, chunk_search_n_grids and"
    " min_chunk_size (bytes of weights) do not say is chosen from device_budget. docs/originals.md has every name."
)


def build_colossalai(strategy: type) -> type:
    """The alias of one tree's GeminiStrategy: a class of its own, as the registry and config files name classes."""
    plain = strategy.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        global _has_said
        plain(self, *args, **kwargs)
        if not _has_said:
            _has_said = True
            defaults = inspect.signature(plain).parameters
            given = self.engine_arguments.items()
            shown = [
                f"{name}={value!r}" for name, value in given if value != defaults[name].default
            ]
            self._say(_TEXT.format(arguments=", ".join(shown)))

    parts = {"__init__": init, "__doc__": strategy.__doc__, "__module__": __name__}
    return type("ColossalAIStrategy", (strategy,), parts)
