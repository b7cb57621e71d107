"""Benchmarks' output, read as strictly as JSON is defined: Python's own reader takes NaN and Infinity for numbers."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def json_lines(text: str) -> list[dict[str, Any]]:
    """What each line holds; ValueError where one is not JSON."""
    return [json.loads(line, parse_constant=_refuse) for line in text.splitlines()]
