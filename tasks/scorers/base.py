"""The contract of verifiers: a verifier gets a response and its prompt's reference, and returns a score and a reason.

A verifier is a pure function of its two arguments, because a response that is scored again after a worker's death must
get the same score. A verifier runs in a worker process, which is killed at the deadline. If a verifier raises an error,
the response scores 0, with the error as the reason.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rollflow.tasks.scorers.config import Format

LONGEST_REASON, LONGEST_FAILURE = 1000, 200  # most characters of a reason, and of a reason for a failure
LARGEST = 3.4028234663852886e38  # largest reward, because batches store rewards in float32


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and the reason for it; `seconds` is the time that the verifier took."""

    reward: float
    reason: str
    seconds: float = 0.0


class Verifier(Protocol):
    """Scores one response."""

    def __call__(self, response: str, reference: Mapping[str, Any]) -> Score: ...


def answer_of(response: str, where: str) -> str:
    """Return the scored part of a response: the whole response, or the content of the last <answer> tag, if any."""
    if where == "all":
        return response.strip()
    found = re.findall(r"<answer>(.*?)</answer>", response, flags=re.DOTALL)
    return found[-1].strip() if found else ""


def matches_form(form: Format, response: str) -> bool:
    """Return whether the whole response, without blanks at its ends, matches the pattern."""
    return re.fullmatch(form.pattern, response.strip(), flags=re.DOTALL) is not None


def score_response(
    verify: Verifier, where: str, response: str, reference: Mapping[str, Any], form: Format | None = None
) -> Score:
    """Run a verifier on the scored part of `response`; an error becomes a score of 0 with a reason.

    A response that does not match `form` loses `form.penalty`. Up to a constant, this penalty is the format reward of
    DeepSeek-R1 (DeepSeek-AI 2025, section 2.2.2).
    """
    started = time.perf_counter()
    try:
        score = validate_score("verifier", verify(answer_of(response, where), reference))
    except Exception as error:  # noqa: BLE001 - a verifier is user code, whose error is the reason for this score
        score = failure_score("verifier", error)
    if form is not None and not matches_form(form, response):
        reason = _make_storable(f"not in its form; {score.reason}", LONGEST_REASON)
        score = replace(score, reward=score.reward - form.penalty, reason=reason)
    return replace(score, seconds=time.perf_counter() - started)


def validate_score(who: str, score: Score) -> Score:
    """Return a score from user code in a form that can be stored; replace an invalid score by a failure's score."""
    try:
        if not math.isfinite(score.reward) or abs(score.reward) > LARGEST:
            raise ValueError(f"its reward is {score.reward}")
        return Score(float(score.reward), _make_storable(str(score.reason), LONGEST_REASON))
    except Exception as error:  # noqa: BLE001 - user code may return anything
        return failure_score(who, error)


def failure_score(who: str, error: BaseException) -> Score:
    """Return the score for a response on which user code failed, and log a warning about the failure."""
    reason = _make_storable(f"{who} failed: {type(error).__name__}: {error}", LONGEST_FAILURE)
    logging.getLogger(__name__).warning("a response gets a reward of 0, as its %s", reason)
    return Score(0.0, reason)


def _make_storable(reason: str, longest: int) -> str:
    """Shorten a reason and escape half surrogate pairs, which neither a pipe nor a batch can hold."""
    return reason[:longest].encode("utf-8", "backslashreplace").decode()
