"""The old import path of gemini_strategy.originals.elixir."""

from gemini_strategy.originals import stand_in
from gemini_strategy.originals.elixir import *  # noqa: F403  what a type checker reads

stand_in(__name__)
