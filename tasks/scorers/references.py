"""Finds data rows whose reference makes scoring impossible; a run rejects such rows before it begins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rollflow.tasks.scorers.base import Unjudged
from rollflow.tasks.scorers.config import (
    ChoiceReward,
    CodeReward,
    InstructionsReward,
    MathsReward,
    RegexReward,
    RewardConfig,
)
from rollflow.tasks.scorers.judge.config import JudgeReward

NUMBER = re.compile(r"-?\d{1,300}(?:\.\d{1,300})?")  # matches a reference answer that needs no check


def is_quick(config: RewardConfig, reference: Mapping[str, Any]) -> bool:
    """Return whether checking a reference is surely fast, because its answer is a number."""
    return isinstance(config, MathsReward) and NUMBER.fullmatch(str(reference.get("answer", "")).strip()) is not None


def find_reference_fault(config: RewardConfig, reference: Mapping[str, Any]) -> str | None:
    """Return the reason why no response can match this reference, or None if a response can match it."""
    try:
        match config:
            case MathsReward():
                return _find_maths_fault(str(reference.get("answer", "")))
            case ChoiceReward():
                from rollflow.tasks.scorers.text.choice import find_gold

                find_gold(reference)
            case CodeReward():
                from rollflow.tasks.scorers.code.scorer import find_cases_fault

                return find_cases_fault(config, reference)
            case InstructionsReward():
                from rollflow.tasks.scorers.text.instructions import check_constraints

                check_constraints(reference)
            case JudgeReward():
                from rollflow.tasks.scorers.judge.prompts import check_row

                check_row(config, reference)
            case RegexReward():
                from rollflow.tasks.scorers.text.regex import compile_pattern

                compile_pattern(config, reference)
                if config.group is not None and not str(reference.get("answer", "")).strip():
                    return "the answer is empty, and reward.group compares a text with it; give an answer"
    except Unjudged as error:
        return f"{error}, or remove the row"
    except (ValueError, KeyError) as error:
        return f'{error}; correct the row, because reward.kind = "{config.kind}" reads it'
    return None


@lru_cache(maxsize=100_000)
def _find_maths_fault(answer: str) -> str | None:
    if NUMBER.fullmatch(answer.strip()):
        return None
    from rollflow.tasks.scorers.text.marked import find_boxed
    from rollflow.tasks.scorers.text.maths import equals, find_fault

    answer = find_boxed(answer) or answer
    if not answer.strip():
        return 'the answer is empty, and reward.kind = "maths" gives no response a reward for it; give an answer'
    if fault := find_fault(answer):
        return f'the answer {fault} for reward.kind = "maths"; give the final answer alone'
    if not equals(answer, answer):
        return f"the answer ({answer[:40]!r}) is nothing that math-verify can compare; write it as LaTeX"
    return None
