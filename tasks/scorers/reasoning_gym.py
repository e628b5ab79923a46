"""The verifier of reasoning-gym prompts, which calls the scorer of the prompt's own family."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score


def family_score(response: str, reference: Mapping[str, Any]) -> Score:
    """Score a response in [0, 1] with reasoning-gym's scorer for the prompt's family."""
    value = float(_find_scorer(str(reference["family"]))(response, dict(reference)))
    if value == 1.0:
        return Score(value, "right", Outcome.CORRECT)
    return Score(value, "wrong", Outcome.WRONG) if value <= 0.01 else Score(value, "partly right", Outcome.PARTIAL)


def has_scorer(family: str) -> bool:
    """Return whether reasoning-gym has a family with this name."""
    try:
        _find_scorer(family)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=128)
def _find_scorer(family: str) -> Any:
    return reasoning_gym.get_score_answer_fn(family)
