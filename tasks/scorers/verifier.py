"""Verifiers, which are functions that score texts in worker processes.

    form       function                                                a worker calls it
    one        (response, reference) -> Score | float                  with one response after another
    async      async (response, reference) -> Score | float            with up to `reward.at_once` responses at a time
    several    (responses, references) -> list[Score | float]          with up to `reward.at_once` responses in a call
    several    async (responses, references) -> list[Score | float]    with up to `reward.at_once` responses in a call

A verifier with a further argument `tokens` also gets the tokens of each response. If a verifier raises an error, the
response gets the score of `base.failure_score`.

A verifier that keeps processes or connections between two calls has a function `end`, which ends them.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import LONGEST_REASON, Score, failure_score, make_storable, validate_score
from rollflow.tasks.scorers.base_config import Format, LengthPenalty, RewardBase
from rollflow.tasks.scorers.config import RewardConfig

Reference = Mapping[str, Any]
JUDGED = (Outcome.CORRECT, Outcome.PARTIAL, Outcome.WRONG)
_THREAD = threading.local()


@dataclass(frozen=True, slots=True)
class Verifier:
    """A function that scores responses, in one of the four forms that the module's docstring lists."""

    function: Callable[..., Any]
    takes_several: bool = False
    is_async: bool = False
    takes_tokens: bool = False
    end: Callable[[], Any] | None = None  # synchronous or asynchronous

    @property
    def scores_several(self) -> bool:
        """True if a worker process should score several responses at a time with this verifier."""
        return self.takes_several or self.is_async

    def __call__(self, response: str, reference: Reference, tokens: Sequence[int] = ()) -> Any:
        """Score one response in this thread and return the verifier's result; `tokens` are the response's tokens."""
        if self.scores_several:
            return runner_of_thread().run(self.call([response], [reference], [tokens]))[0]
        return self.function(response, reference, **self._pass_tokens(tokens))

    async def call(
        self, responses: Sequence[str], references: Sequence[Reference], tokens: Sequence[Sequence[int]] = ()
    ) -> list[Any]:
        """Score responses and return the verifier's results. An error on one response is raised for all responses.
        `tokens` are the tokens of each response, for a verifier that needs them.
        """
        tokens = tokens or [()] * len(responses)
        if not self.takes_several:
            rows = zip(responses, references, map(self._pass_tokens, tokens), strict=True)
            calls = (self.function(response, reference, **more) for response, reference, more in rows)
            return list(await asyncio.gather(*calls)) if self.is_async else list(calls)
        more = self._pass_tokens(list(map(list, tokens)))
        found = self.function(list(responses), list(references), **more)
        found = list(await found if self.is_async else found)
        if len(found) != len(responses):
            raise ValueError(
                f"the verifier returned {len(found)} scores for {len(responses)} responses; return one for each"
            )
        return found

    def _pass_tokens(self, tokens: Sequence[Any]) -> dict[str, Any]:
        return {"tokens": list(tokens)} if self.takes_tokens else {}

    async def close(self) -> None:
        """End the processes and connections that the verifier keeps between calls; it may be used again."""
        if self.end is not None and inspect.isawaitable(ended := self.end()):
            await ended


def runner_of_thread() -> asyncio.Runner:
    """Return this thread's `asyncio.Runner`, whose event loop stays open, because a verifier may keep processes between
    calls.
    """
    if not hasattr(_THREAD, "runner"):
        _THREAD.runner = asyncio.Runner()
    runner: asyncio.Runner = _THREAD.runner
    return runner


def close_in_thread(verifiers: Iterable[Verifier]) -> None:
    """Close verifiers that this thread has called, and then the thread's `asyncio.Runner`."""
    try:
        for verifier in verifiers:
            runner_of_thread().run(verifier.close())
    finally:
        runner_of_thread().close()
        del _THREAD.runner


def answer_of(response: str, where: str) -> str:
    """Return the part of a response to score: the whole response, or the content of its last <answer> tag ("" without a
    tag).
    """
    return find_answer(response, where)[1]


def find_answer(response: str, where: str) -> tuple[int, str]:
    """Return the part of a response to score, as `answer_of` does, and the number of characters before that part."""
    start, text = 0, response
    if where == "tag":
        *_, last = (None, *re.finditer(r"<answer>(.*?)</answer>", response, flags=re.DOTALL))
        start, text = (last.start(1), last[1]) if last else (0, "")
    return start + len(text) - len(text.lstrip()), text.strip()


def matches_form(form: Format, response: str) -> bool:
    """Return whether the whole response, without white space at its ends, matches the required pattern."""
    return re.fullmatch(form.pattern, response.strip(), flags=re.DOTALL) is not None


def score_response(
    verify: Callable[[str, Reference], Any],
    where: str,
    response: str,
    reference: Reference,
    form: Format | None = None,
) -> Score:
    """Score the answer in `response` with a verifier; an error becomes a score of 0 with a reason."""
    started = time.perf_counter()
    try:
        score = validate_score("verifier", verify(answer_of(response, where), reference))
    except Exception as error:  # noqa: BLE001 - a verifier is user code, whose error is the reason for this score
        score = failure_score("verifier", error)
    return replace(apply_form(score, form, response), seconds=time.perf_counter() - started)


def judge_correct(
    verify: Verifier, config: RewardConfig, decode: Callable[[Sequence[int], bool], str]
) -> Callable[[Sequence[int], Reference], bool]:
    """Return a function that scores a response in this process, and returns whether the response is correct."""

    def is_correct(tokens: Sequence[int], reference: Reference) -> bool:
        with_tokens, text = functools.partial(verify, tokens=tokens), decode(tokens, config.special_tokens)
        score = score_response(with_tokens, config.answer, text, reference)
        return apply_threshold(score, config.correct_from).outcome is Outcome.CORRECT

    return is_correct


def apply_threshold(score: Score, correct_from: float | None) -> Score:
    """Decide whether a score is correct by comparing its value with `correct_from`; with None, the verifier's decision
    stays.
    """
    if correct_from is None or score.outcome not in JUDGED:
        return score
    if score.value >= correct_from:
        return replace(score, outcome=Outcome.CORRECT)
    return replace(score, outcome=Outcome.PARTIAL) if score.outcome is Outcome.CORRECT else score


def apply_form(score: Score, form: Format | None, response: str) -> Score:
    """Subtract `form.penalty` from the score of a response that does not match the required format `form`.

    The parts of the score show the value before the penalty, and the penalty. Up to a constant, the penalty is the
    format reward of DeepSeek-R1 (DeepSeek-AI 2025, section 2.2.2). A correct answer in a wrong format gets the outcome
    "partial".
    """
    if form is None:
        return score
    penalty = 0.0 if matches_form(form, response) else form.penalty
    score = replace(score, parts={"answer": score.value, **score.parts, "format": -penalty})
    if not penalty:
        return score
    reason = make_storable(f"not in its form; {score.reason}", LONGEST_REASON)
    outcome = Outcome.PARTIAL if score.outcome is Outcome.CORRECT else score.outcome
    return replace(score, value=score.value - penalty, reason=reason, outcome=outcome)


def apply_length(score: Score, penalty: LengthPenalty | None, response: str, tokens: int) -> Score:
    """Subtract the length penalty from the score of a response with this number of tokens. The parts of the score show
    the value before the penalty, and the penalty.

    The penalty does not change the outcome, because a long response may be correct.
    """
    if penalty is None:
        return score
    length = tokens if penalty.unit == "tokens" else len(response)
    amount = penalty.amount(length)
    score = replace(score, parts={"answer": score.value, **score.parts, "length_penalty": -amount})
    if not amount:
        return score
    reason = make_storable(f"{length} {penalty.unit} are too long; {score.reason}", LONGEST_REASON)
    return replace(score, value=score.value - amount, reason=reason)


def finish_score(score: Score, config: RewardBase, response: str, tokens: int) -> Score:
    """Apply format penalty, length penalty and threshold to the score of a response with this number of tokens."""
    formed = apply_form(score, config.format, response)
    return apply_threshold(apply_length(formed, config.length_penalty, response, tokens), config.correct_from)
