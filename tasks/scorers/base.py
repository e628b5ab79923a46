"""The interface of scorers, which get many responses at once and return a score for each response.

A score has a value, which becomes the reward, and a reason.

Every response gets a score. If scoring failed, the outcome says whether the deadline passed, the worker process died,
or the scorer raised an error.

A response that is slow to score delays no other response for long.

A score must depend only on the response and its reference, because a response is scored again if its worker process
dies. With adaptive deadlines of test cases, a score also depends on the run times of earlier programs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from rollflow.storage.errors import RollflowError
from rollflow.storage.records import Outcome
from rollflow.storage.token_arrays import Float32s, Int32s

# largest number of characters of a score's reason, and of the reason of a failed score
LONGEST_REASON, LONGEST_FAILURE = 1000, 200
LARGEST = 3.4028234663852886e38  # largest absolute value of a score, which is the largest float32
FAILED = " failed: "  # in a reason, the text between the name of the code that failed and its error
MOST_PARTS, LONGEST_NAME = 64, 100  # largest number of parts of a score, and of characters in a part's name

# values of a `Score`: value, reason, outcome, parts, seconds, version, token values in hexadecimal float32, failed
ScoreColumns = tuple[float, str, str, dict[str, float], float, str, str, bool]


@dataclass(frozen=True, slots=True)
class Score:
    """The result of scoring a response: a value, which becomes the reward, and a reason.

    `parts` maps names to the numbers from which the value was computed. A missing `outcome` is derived from the value:
    "correct" for 1 or more, "wrong" for 0 or less, and "partial" between 0 and 1. `seconds` is the time that scoring
    took. `version` is the version of the scorer (see the module `version`). `failed` is True if the scorer failed on
    the response, for example because the deadline passed.

    `token_values` has a number for each token of the response, or None for a token without a value. `step_values` has a
    pair for each step of the response: the position in the scored text at which the step ends, and the value of the
    step. Values of tokens and steps are rewards in addition to `value`. The module `token_values` converts step values
    to token values.

    `roles` maps the roles of an episode to their rewards; a role that is not named gets `value`.
    """

    value: float
    reason: str = ""
    outcome: Outcome = None  # type: ignore[assignment]  # `__post_init__` replaces None
    parts: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    version: str = field(default="", compare=False)
    failed: bool = field(default=False, compare=False, repr=False)
    token_values: Sequence[float | None] = ()
    step_values: Sequence[tuple[int, float]] = ()
    roles: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Derive a missing outcome from the value."""
        if self.outcome is None:
            object.__setattr__(self, "outcome", outcome_of(self.value))

    def to_columns(self) -> ScoreColumns:
        """Return the score as plain values, which are quick to pickle and can be written as JSON."""
        values = Float32s.of(self.token_values).data.hex()  # type: ignore[arg-type]  # checked values are numbers
        columns = self.value, self.reason, str(self.outcome), dict(self.parts), self.seconds, self.version, values
        return *columns, self.failed

    @classmethod
    def of_columns(cls, columns: Sequence[Any]) -> Score:
        """Build a score from the result of `to_columns`; raise `ValueError` or `TypeError` for any other input."""
        value, reason, outcome, parts, seconds, version, values, failed = (*columns, "", "", "")[:8]
        known = _read_values(values)
        return cls(value, reason, Outcome(outcome), parts, seconds, version, bool(failed), token_values=known)

    @property
    def has_token_values(self) -> bool:
        """True if the score has values of tokens or steps."""
        return len(self.token_values) > 0 or len(self.step_values) > 0


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A response to score, with its reference answer.

    `scorer` is the name of the scorer; "" means the scorer in `[reward]`. `messages` is the prompt as chat messages.
    `peers` are the tokens of the other responses to the same prompt, for a scorer that compares responses. With `adapts
    = False`, adaptive deadlines of test cases are at their maximum, so that the score does not depend on earlier
    programs. With `uses_cache = False`, cached scores of equal responses are not used.
    """

    tokens: Sequence[int]
    reference: Mapping[str, Any]
    scorer: str = ""
    messages: Sequence[Mapping[str, str]] = ()
    peers: Sequence[Sequence[int]] = ()
    adapts: bool = True
    uses_cache: bool = True

    def encode(self) -> bytes:
        """Encode the request as JSON for a worker process, with the tokens as hexadecimal int32."""
        asked = {"tokens": Int32s.of(self.tokens).data.hex(), "reference": dict(self.reference)}
        return json.dumps(asked).encode()


@dataclass(slots=True)
class ScorerUsage:
    """Counters of a scorer since the scorer's start."""

    scored: int = 0
    timeouts: int = 0
    busy_seconds: float = 0.0  # time spent on scoring, in seconds, summed over the worker processes


class Scorer(Protocol):
    """Scores responses; the module's docstring lists what every scorer guarantees."""

    usage: ScorerUsage
    # number of responses that the scorer's worker processes score at the same time; 0 without worker processes
    slots: int = 0

    async def start(self) -> None:
        """Start the scorer; `submit` may be called before the scorer is ready."""

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Begin to score the responses in `requests`; return a future of each score, in the order of the responses."""

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score the responses in `requests`; return the scores in the order of the responses."""
        return list(await asyncio.gather(*self.submit(requests)))

    async def serve(self, finished: asyncio.Event) -> None:
        """Wait until `finished` is set, then close the scorer.

        Raises:
            ConfigError: the scorer can score no response at all.
        """

    async def close(self) -> None:
        """End all processes and tasks that the scorer started."""


def _read_values(text: str) -> Sequence[float]:
    """Convert hexadecimal float32 to token values; `()` stands for no values."""
    return Float32s(bytes.fromhex(text)) if text else ()


def outcome_of(value: Any) -> Outcome:
    """Return the outcome of a score with this value; a value that is not a number has the outcome "wrong"."""
    if not isinstance(value, Real):
        return Outcome.WRONG
    number = float(value)
    return Outcome.CORRECT if number >= 1 else Outcome.PARTIAL if number > 0 else Outcome.WRONG


def validate_score(who: str, score: Any) -> Score:
    """Convert the result of user code (a score or a number) into a valid score.

    If the result is invalid, the score of a failure is returned (`failure_score`). An unjudged score gets the value 0,
    and no values for tokens or steps.
    """
    try:
        if not isinstance(score, Score):
            if not isinstance(score, Real):
                raise TypeError(f"the scorer must return a Score or a number, not a {type(score).__name__}")
            score = Score(score)  # type: ignore[arg-type]
        reason, outcome = make_storable(str(score.reason), LONGEST_REASON), Outcome(score.outcome)
        if outcome is Outcome.UNJUDGED:
            return Score(0.0, reason, outcome, _check_named("part", score.parts))
        return Score(
            check_number("the score's value", score.value),
            reason,
            outcome,
            _check_named("part", score.parts),
            token_values=_check_tokens(score.token_values),
            step_values=tuple(_check_step(step) for step in score.step_values),
            roles=_check_named("role", score.roles),
        )
    except Exception as error:  # noqa: BLE001 - user code may return anything
        return failure_score(who, error)


def check_number(what: str, value: Any) -> float:
    """Convert a number of user code to a float; raise `TypeError` or `ValueError` unless it is a finite float32."""
    if not isinstance(value, Real):
        raise TypeError(f"{what} must be a number, not a {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise ValueError(f"{what} is {value}, which is not a finite float32 number")
    return number


def _check_named(what: str, values: Mapping[str, Any]) -> dict[str, float]:
    if len(values) > MOST_PARTS:
        raise ValueError(f"the score has {len(values)} {what}s, more than the {MOST_PARTS} that are allowed")
    return {
        make_storable(str(name), LONGEST_NAME): check_number(f"the score's {what} {name!r}", value)
        for name, value in values.items()
    }


def _check_tokens(values: Sequence[float | None]) -> Sequence[float]:
    """Convert token values to float32, with NaN for None; values that are already float32 are not checked again."""
    if isinstance(values, Float32s) or not len(values):
        return values if isinstance(values, Float32s) else ()
    # Adding 0.0 turns -0.0 into 0.0, because repeated verdicts are compared bit by bit.
    return Float32s.of([math.nan if value is None else check_number("a token value", value) + 0.0 for value in values])


def _check_step(step: tuple[int, float]) -> tuple[int, float]:
    end, value = step
    return operator.index(end), check_number("a step value", value)


class Unjudged(RollflowError):
    """Raised by a scorer that cannot judge a response now, for a reason that the policy cannot have caused. An unjudged
    response is judged again later.
    """


def failure_score(who: str, error: BaseException) -> Score:
    """Log a warning, and return the score of a response on which user code, such as a verifier, failed.

    A failure that the response may have caused scores 0, so that the policy does not learn to cause failures. The error
    `Unjudged` and lost connections lead to the outcome "unjudged", because the policy cannot cause them. A broken pipe
    does not count as a lost connection, because it may come from a program that the policy wrote. The causes of `error`
    are checked, too, because HTTP libraries wrap the error of a lost connection.
    """
    reason = make_storable(f"{who}{FAILED}{type(error).__name__}: {error}", LONGEST_FAILURE)
    causes = list_causes(error)
    is_unjudged = any(
        isinstance(one, Unjudged | ConnectionError) for one in causes if not isinstance(one, BrokenPipeError)
    )
    effect = "nobody could judge a response" if is_unjudged else "a response gets a reward of 0"
    logging.getLogger(__name__).warning("%s, as its %s", effect, reason)
    return Score(0.0, reason, Outcome.UNJUDGED if is_unjudged else Outcome.UNPARSABLE, failed=not is_unjudged)


def list_causes(error: BaseException) -> list[BaseException]:
    """Return an error and the chain of its causes, as a traceback would show them."""
    found = list[BaseException]()
    next_error: BaseException | None = error
    while next_error is not None and next_error not in found:
        found.append(next_error)
        next_error = next_error.__cause__ or (None if next_error.__suppress_context__ else next_error.__context__)
    return found


def is_cancelled() -> bool:
    """Return whether the current asyncio task was cancelled; if not, a `CancelledError` came from user code."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_failure(score: Score) -> bool:
    """Return whether a score says that user code failed on the response."""
    return score.value == 0 and FAILED in score.reason


def timeout_score(seconds: float, value: float) -> Score:
    """Return the score, with the given value, of a response that was not scored within `seconds`."""
    return Score(value, f"deadline: no verdict in {seconds:g} s", Outcome.TIMEOUT, seconds=seconds, failed=True)


def make_storable(text: str, longest: int) -> str:
    """Shorten a text, and escape lone surrogates, which UTF-8 cannot encode."""
    return text[:longest].encode("utf-8", "backslashreplace").decode()
