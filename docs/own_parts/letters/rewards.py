"""A scorer: near misses get part of the reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollflow.tasks.scorers.base import Score


def near(response: str, reference: Mapping[str, Any], *, width: int = 1) -> Score:
    """Return 1 for the correct number, and down to 0.1 for a number that is off. A number that is more than `width` off
    gets 0.1. A response that is not a number gets 0.1 times its share of digits.
    """
    if not response.isdecimal():
        digits = sum(character.isdecimal() for character in response)
        return Score(0.1 * digits / max(len(response), 1), "not a number")
    off = abs(int(response[:9]) - int(reference["answer"]))
    return Score(max(0.1, 1.0 - off / (width + 1)), "right" if off == 0 else f"{off} off")
