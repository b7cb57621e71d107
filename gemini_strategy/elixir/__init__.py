"""Elixir's way in: a search, a wrapped module and a wrapped optimizer, over the engine of `manage()`.

    from gemini_strategy.elixir import ElixirModule, ElixirOptimizer, minimum_waste_search

    search_result = minimum_waste_search(model, world_size)
    model = ElixirModule(model, search_result, world_group)
    optimizer = ElixirOptimizer(model, optimizer)

Every argument has the original's name and an effect, or is refused by name. docs/originals.md says what became of what.
"""

from gemini_strategy.elixir.profiling import MemoryProfile, cuda_memory_profiling
from gemini_strategy.elixir.search import SearchResult, minimum_waste_search, optimal_search
from gemini_strategy.elixir.wrapper import ElixirModule, ElixirOptimizer

__all__ = [
    "ElixirModule",
    "ElixirOptimizer",
    "MemoryProfile",
    "SearchResult",
    "cuda_memory_profiling",
    "minimum_waste_search",
    "optimal_search",
]
