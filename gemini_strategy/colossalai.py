"""The old import path of gemini_strategy.originals.colossalai."""

from gemini_strategy.originals import stand_in
from gemini_strategy.originals.colossalai import *  # noqa: F403  what a type checker reads

stand_in(__name__)
