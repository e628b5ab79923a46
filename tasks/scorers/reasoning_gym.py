"""The verifier for prompts from the library reasoning-gym. It calls the library's scorer for the prompt's task family
(the kind of puzzle).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score

# The library compares the boards of these families as tuples, but references are stored as JSON, which has only lists.
BOARDS = frozenset({"arc_agi", "rearc"})


def family_score(response: str, reference: Mapping[str, Any]) -> Score:
    """Score a response from 0 to 1 with reasoning-gym's scorer for the prompt's task family."""
    family, entry = str(reference["family"]), dict(reference)
    if family in BOARDS:
        board = tuple(tuple(row) for row in entry["metadata"]["output"])
        entry["metadata"] = {**entry["metadata"], "output": board}
    value = float(_find_scorer(family)(response, entry))
    if value == 1.0:
        return Score(value, "right", Outcome.CORRECT)
    return Score(value, "wrong", Outcome.WRONG) if value <= 0.01 else Score(value, "partly right", Outcome.PARTIAL)


def has_scorer(family: str) -> bool:
    """Return whether the library reasoning-gym has a task family with this name."""
    try:
        _find_scorer(family)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=128)
def _find_scorer(family: str) -> Any:
    return reasoning_gym.get_score_answer_fn(family)
