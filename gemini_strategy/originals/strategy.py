"""The old strategy: `Trainer(strategy="colossalai")` and ColossalAIStrategy are the strategy "gemini" and its class.

Invariants
    1. The alias decides nothing: its arguments are GeminiStrategy's own, the originals' 21 before all others.
    2. It says once per process what it became.
"""

import functools
import inspect
from typing import Any

NAME = "colossalai"
_TEXT = (
    "strategy='colossalai' has become GeminiStrategy({arguments}) of gemini_strategy, with the same arguments. It takes"
    " every precision of the Trainer. What gpu_margin_mem_ratio, chunk_search_range, chunk_search_n_grids and"
    " min_chunk_size (bytes of weights) do not say is chosen from device_budget. docs/originals.md has every name."
)
_has_said = False


@functools.cache  # a class keeps its identity
def old_strategy(strategy: type) -> type:
    """The alias of one tree's GeminiStrategy: a class of its own, as the registry and config files name classes."""

    @functools.wraps(strategy.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        global _has_said
        strategy.__init__(self, *args, **kwargs)
        if not _has_said:
            from lightning_utilities.core.rank_zero import rank_zero_info

            _has_said = True
            bound = inspect.signature(strategy).bind(*args, **kwargs).arguments
            rank_zero_info(
                _TEXT.format(arguments=", ".join(f"{n}={v!r}" for n, v in bound.items()))
            )

    name = strategy.__name__.replace("Gemini", "ColossalAI")
    parts = {"__init__": init, "__doc__": strategy.__doc__, "__module__": strategy.__module__}
    return type(name, (strategy,), parts)
