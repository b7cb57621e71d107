"""The words that arguments take, here and on the command line. Needs no torch."""

from __future__ import annotations

from typing import Literal, get_args

from gemini_strategy import _C

PolicyName = Literal["auto", "cpu", "cuda"]
POLICIES = _C.POLICIES
PrecisionName = Literal["32-true", "bf16-true", "bf16-mixed", "16-mixed"]
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)
QUANTIZED = ("nf4", "int8")  # kinds of weights, as bitsandbytes stores them
