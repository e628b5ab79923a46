"""A scorer that leaves a share of the responses unjudged. The text of a response decides whether it is judged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score, Unjudged

WHY = "the examiner of this text is away"


def is_away(text: str) -> bool:
    """Return whether nobody can judge a text: two of ten texts."""
    return hashlib.sha256(text.encode()).digest()[0] % 10 < 2


def compute_value(text: str) -> float:
    """Return the reward of a text that can be judged."""
    return hashlib.sha256(text.encode()).digest()[1] / 256


def score(response: str, reference: Mapping[str, Any]) -> Score:
    """Score a response, or raise `Unjudged`."""
    text = response.strip()
    if is_away(text):
        raise Unjudged(WHY)
    return Score(compute_value(text), "", Outcome.PARTIAL)
