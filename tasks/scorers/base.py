"""The contract of scorers: a scorer gets responses, many at once, and returns a score for each.

- A score has a value, which becomes the reward, a reason for people, named parts, and an outcome from a closed set.
- Every response gets a score. If nobody could score the response, the outcome says why: the deadline passed, the
  process of the scorer died, or the scorer failed.
- A slow response delays no other response for long: each score is a future of its own.
- A scorer may be a function in a worker process, an actor or a client of an endpoint. `build_scorer` alone decides
  which scorer a run has.
- A response may be scored again after a death, so a score depends on the response and its reference alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from rollflow.storage.records import Outcome
from rollflow.storage.token_arrays import Int32s

LONGEST_REASON, LONGEST_FAILURE = 1000, 200  # most characters of a reason, and of a reason for a failure
LARGEST = 3.4028234663852886e38  # largest value, because batches store rewards in float32
MOST_PARTS, LONGEST_NAME = 64, 100  # most parts of a score, and most characters of a part's name

ScoreColumns = tuple[float, str, str, dict[str, float], float]  # value, reason, outcome, parts, seconds


@dataclass(frozen=True, slots=True)
class Score:
    """The value of a response, which is its reward, and the reason for the value.

    `parts` maps names to numbers of which the value was made; it may be empty. Without an `outcome`, the value decides:
    1 or more is correct, 0 or less is wrong, between them is partial. `seconds` is the time that the scorer took.
    """

    value: float
    reason: str = ""
    outcome: Outcome = None  # type: ignore[assignment]  # `__post_init__` replaces None
    parts: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Derive a missing outcome from the value."""
        if self.outcome is None:
            object.__setattr__(self, "outcome", outcome_of(self.value))

    def to_columns(self) -> ScoreColumns:
        """Return the score as plain values, which are quick to pickle and can be written as JSON."""
        return self.value, self.reason, str(self.outcome), dict(self.parts), self.seconds

    @classmethod
    def of_columns(cls, columns: Sequence[Any]) -> Score:
        """Build a score from the result of `to_columns`; raise `ValueError` or `TypeError` for other values."""
        value, reason, outcome, parts, seconds = columns
        return cls(value, reason, Outcome(outcome), parts, seconds)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One response to score; a flat array of tokens needs no conversion."""

    tokens: Sequence[int]
    reference: Mapping[str, Any]

    def encode(self) -> bytes:
        """Encode the request as JSON for a worker: the tokens' bytes in hexadecimal, and the reference."""
        asked = {"tokens": Int32s.of(self.tokens).data.hex(), "reference": dict(self.reference)}
        return json.dumps(asked).encode()


@dataclass(slots=True)
class ScorerUsage:
    """The work of a scorer since its start."""

    scored: int = 0
    timeouts: int = 0
    busy_seconds: float = 0.0  # summed over the workers


class Scorer(Protocol):
    """Scores responses. See the module's docstring for the guarantees."""

    usage: ScorerUsage

    async def start(self) -> None:
        """Start the scorer; the first response need not wait until the scorer is ready."""

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Start to score these responses and return the futures of their scores, in order."""

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score these responses and return all scores, in order."""
        return list(await asyncio.gather(*self.submit(requests)))

    async def serve(self, finished: asyncio.Event) -> None:
        """Wait until `finished` is set, then close the scorer.

        Raises:
            ConfigError: the scorer cannot score any response, whatever the response is.
        """

    async def close(self) -> None:
        """End everything that the scorer started."""


def outcome_of(value: Any) -> Outcome:
    """Return the outcome that a value has by itself; a value that is no number says nothing about the response."""
    if not isinstance(value, Real):
        return Outcome.UNJUDGED
    number = float(value)
    return Outcome.CORRECT if number >= 1 else Outcome.PARTIAL if number > 0 else Outcome.WRONG


def validate_score(who: str, score: Any) -> Score:
    """Return the result of user code, a score or a number, as a score that can be stored.

    An invalid result becomes the score of a failure.
    """
    try:
        if not isinstance(score, Score):
            if not isinstance(score, Real):
                raise TypeError(f"it returned a {type(score).__name__}, not a Score or a number")
            score = Score(score)  # type: ignore[arg-type]
        reason = make_storable(str(score.reason), LONGEST_REASON)
        return Score(_check_number("its value", score.value), reason, Outcome(score.outcome), _check_parts(score.parts))
    except Exception as error:  # noqa: BLE001 - user code may return anything
        return failure_score(who, error)


def _check_number(what: str, value: Any) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"{what} is a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise ValueError(f"{what} is {value}")
    return number


def _check_parts(parts: Mapping[str, Any]) -> dict[str, float]:
    if len(parts) > MOST_PARTS:
        raise ValueError(f"it has {len(parts)} parts, and {MOST_PARTS} is the limit")
    return {
        make_storable(str(name), LONGEST_NAME): _check_number(f"its part {name!r}", part)
        for name, part in parts.items()
    }


def failure_score(who: str, error: BaseException) -> Score:
    """Return the score for a response on which user code failed, and log a warning about the failure."""
    reason = make_storable(f"{who} failed: {type(error).__name__}: {error}", LONGEST_FAILURE)
    logging.getLogger(__name__).warning("a response gets a reward of 0, as its %s", reason)
    return Score(0.0, reason, Outcome.UNJUDGED)


def timeout_score(seconds: float) -> Score:
    """Return the score for a response without a score after the deadline of `seconds`."""
    return Score(0.0, f"deadline: no verdict in {seconds:g} s", Outcome.TIMEOUT, seconds=seconds)


def make_storable(text: str, longest: int) -> str:
    """Shorten a text and escape half surrogate pairs, which neither a pipe nor a batch can hold."""
    return text[:longest].encode("utf-8", "backslashreplace").decode()
