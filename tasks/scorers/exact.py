"""The verifier `exact`, which compares a response's answer with the reference answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score


def exact(response: str, reference: Mapping[str, Any]) -> Score:
    """Return 1 if the response's answer equals the reference answer, else 0. A missing or empty answer scores 0."""
    if not response:
        return Score(0.0, "no answer", Outcome.UNPARSABLE)
    right = response == str(reference["answer"]).strip()
    return Score(float(right), "equal" if right else "differs from the reference")
