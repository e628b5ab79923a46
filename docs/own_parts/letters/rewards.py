"""A verifier: near misses get part of the reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollflow.tasks.verifiers.base import Score


def near(response: str, reference: Mapping[str, Any], *, width: int = 1) -> Score:
    """1 for the right number, falling to 0 where it is more than `width` off; what is no number gets 0."""
    if not response.isdecimal():
        return Score(0.0, "not a number")
    off = abs(int(response) - int(reference["answer"]))
    return Score(max(0.0, 1.0 - off / (width + 1)), "right" if off == 0 else f"{off} off")
