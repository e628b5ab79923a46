"""What every verifier guarantees: a response and its prompt's reference in, a score and the reason out.

A verifier is a function of its two arguments: a response is judged again after a worker's death, and must get the same
score. It runs in a worker process that is killed at the deadline, and what it raises is the response's reason.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rollflow.tasks.verifiers.config import Format

LONGEST_REASON, LONGEST_FAILURE = 1000, 200  # characters
LARGEST = 3.4028234663852886e38  # reward: a batch keeps float32


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and why it was given; `seconds` is the verifier's own time."""

    reward: float
    reason: str
    seconds: float = 0.0


class Verifier(Protocol):
    """Judges one response."""

    def __call__(self, response: str, reference: Mapping[str, Any]) -> Score: ...


def answer_of(response: str, where: str) -> str:
    """Return the part of a response that is judged: all of it, or the content of the last <answer> tag, else ""."""
    if where == "all":
        return response.strip()
    found = re.findall(r"<answer>(.*?)</answer>", response, flags=re.DOTALL)
    return found[-1].strip() if found else ""


def in_form(form: Format, response: str) -> bool:
    """Whether the whole response, but for blanks at its ends, is of the pattern."""
    return re.fullmatch(form.pattern, response.strip(), flags=re.DOTALL) is not None


def judge(
    verify: Verifier, where: str, response: str, reference: Mapping[str, Any], form: Format | None = None
) -> Score:
    """Run a verifier on the part of `response` that counts; what it raises becomes a score of 0 with the reason.

    A response that is not in `form` pays its price, so that the whole reward is of what is right and in form (the
    format reward of DeepSeek-AI 2025, DeepSeek-R1, section 2.2.2, less a constant).
    """
    started = time.perf_counter()
    try:
        score = sound("verifier", verify(answer_of(response, where), reference))
    except Exception as error:  # noqa: BLE001 - a verifier is foreign code; its failure is this response's reason
        score = failed("verifier", error)
    if form is not None and not in_form(form, response):
        reason = _storable(f"not in its form; {score.reason}", LONGEST_REASON)
        score = replace(score, reward=score.reward - form.price, reason=reason)
    return replace(score, seconds=time.perf_counter() - started)


def sound(who: str, score: Score) -> Score:
    """What foreign code gave as a score, as it can be stored; `failed` where it is none."""
    try:
        if not math.isfinite(score.reward) or abs(score.reward) > LARGEST:
            raise ValueError(f"its reward is {score.reward}")
        return Score(float(score.reward), _storable(str(score.reason), LONGEST_REASON))
    except Exception as error:  # noqa: BLE001 - it may be anything
        return failed(who, error)


def failed(who: str, error: BaseException) -> Score:
    """The score of a response that foreign code raised something for; it is warned of, or nobody would look for it."""
    reason = _storable(f"{who} failed: {type(error).__name__}: {error}", LONGEST_FAILURE)
    logging.getLogger(__name__).warning("a response gets a reward of 0, as its %s", reason)
    return Score(0.0, reason)


def _storable(reason: str, longest: int) -> str:
    """So much of it that a pipe and a batch take it: half of a surrogate pair is no text to either."""
    return reason[:longest].encode("utf-8", "backslashreplace").decode()
