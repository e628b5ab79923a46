"""The composite reward, which combines the scores of several scorers, called its parts.

    value = sum of weight * value over the parts, or 0 if a part of `reward.requires` is not correct

The `parts` of the score contain the value of each reward part under its name. The parts of a reward part's own score
are named "name.part". If a part could not be judged, the response is unjudged. If a scorer fails, the response gets the
sum of the negative weights, so that the policy does not learn to cause failures.

Values of tokens and steps are combined with the same weights.

    CompositeVerifier   all parts are verifiers, which run in one worker process, one after the other
    CompositeScorer     a part is a judge or a reward model, so each part is a scorer of its own:

                        parts in worker processes --> required judges and models --> other judges and models

`CompositeScorer` asks no judge about a response whose score is already decided.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.scorers.base import (
    MOST_PARTS,
    Score,
    Scorer,
    ScoreRequest,
    ScorerUsage,
    failure_score,
    validate_score,
)
from rollflow.tasks.scorers.config import REMOTE, CompositeReward
from rollflow.tasks.scorers.routed import SeveralScorers
from rollflow.tasks.scorers.token_values import shift_steps
from rollflow.tasks.scorers.verifier import Verifier, answer_of, apply_threshold, find_answer, finish_score

Decode = Callable[[Sequence[int], bool], str]


def combine_scores(config: CompositeReward, scores: Mapping[str, Score]) -> Score:
    """Combine the scores of the parts into the score of a response. A part without a score was not asked, because the
    other parts already decided the score (`is_decided`).

    Raises:
        ValueError: the parts have values for different numbers of tokens.
    """
    found = {name: scores[name] for name in config.parts if name in scores}
    parts = {name: score.value for name, score in found.items()}
    for name, score in found.items():
        parts |= {f"{name}.{inner}": value for inner, value in score.parts.items()}
    parts = dict(list(parts.items())[:MOST_PARTS])
    reason = "; ".join(f"{name}: {score.reason}" for name, score in found.items())
    if any(score.outcome is Outcome.UNJUDGED for score in found.values()):
        return Score(0.0, reason, Outcome.UNJUDGED, parts)
    if failed := next((score for score in found.values() if score.failed), None):
        return Score(config.failure_value, failed.reason, failed.outcome, parts, failed=True)
    for name in config.requires:
        if name in found and found[name].outcome is not Outcome.CORRECT:
            return Score(0.0, f"{name} is not correct; {reason}", found[name].outcome, parts)
    value = sum(config.parts[name].weight * score.value for name, score in found.items())
    outcome = _join_outcomes([score.outcome for score in found.values()])
    return Score(value, reason, outcome, parts, **_add_values(config, found))


def is_decided(config: CompositeReward, scores: Mapping[str, Score]) -> bool:
    """Return whether the scores of some parts already decide the score of the response, whatever the other parts would
    give.
    """
    if any(score.failed or score.outcome is Outcome.UNJUDGED for score in scores.values()):
        return True
    return any(name in scores and scores[name].outcome is not Outcome.CORRECT for name in config.requires)


class CompositeVerifier:
    """Scores responses with several verifiers, whose scores are the parts of one score."""

    def __init__(self, config: CompositeReward, verifiers: Mapping[str, Verifier]) -> None:
        """Store the verifiers; their keys are the names of the reward parts in the config."""
        self._config = config
        self._verifiers = verifiers

    def build(self) -> Verifier:
        """Return a verifier that combines all parts; it is asynchronous if a part is asynchronous."""
        if any(verifier.scores_several for verifier in self._verifiers.values()):
            return Verifier(self.score_later, is_async=True, takes_tokens=True, end=self.close)
        return Verifier(self.score, takes_tokens=True, end=self.close)

    async def close(self) -> None:
        """Close the verifiers of all parts."""
        for verifier in self._verifiers.values():
            await verifier.close()

    def score(self, response: str, reference: Mapping[str, Any], tokens: Sequence[int] = ()) -> Score:
        """Score a response with verifiers that are all synchronous functions."""
        scores = {name: self._score_part(name, response, reference, tokens) for name in self._verifiers}
        return combine_scores(self._config, scores)

    async def score_later(self, response: str, reference: Mapping[str, Any], tokens: Sequence[int] = ()) -> Score:
        """Score a response with one verifier after another; a verifier may be asynchronous."""
        scores = dict[str, Score]()
        for name, verifier in self._verifiers.items():
            if not verifier.scores_several:
                scores[name] = self._score_part(name, response, reference, tokens)
                continue
            try:
                [found] = await verifier.call([self._answer(name, response)], [reference], [tokens])
                scores[name] = self._check(name, found, response)
            except Exception as error:  # noqa: BLE001 - a part is user code, whose error is the reason for this score
                scores[name] = failure_score(name, error)
        return combine_scores(self._config, scores)

    def _score_part(self, name: str, response: str, reference: Mapping[str, Any], tokens: Sequence[int] = ()) -> Score:
        try:
            found = self._verifiers[name](self._answer(name, response), reference, tokens)
            return self._check(name, found, response)
        except Exception as error:  # noqa: BLE001 - a part is user code, whose error is the reason for this score
            return failure_score(name, error)

    def _check(self, name: str, score: Any, response: str) -> Score:
        start, answer = find_answer(response, self._config.parts[name].scorer.answer)
        valid = shift_steps(validate_score(name, score), start, len(answer))
        return apply_threshold(valid, self._config.parts[name].scorer.correct_from)

    def _answer(self, name: str, response: str) -> str:
        return answer_of(response, self._config.parts[name].scorer.answer)


class CompositeScorer(SeveralScorers):
    """Scores responses with several scorers, whose scores are the parts of one score."""

    def __init__(self, config: CompositeReward, scorers: Mapping[str, Scorer], decode: Decode) -> None:
        """Store the scorers; their keys are the names of the reward parts in the config. `decode` converts tokens to
        text, with or without special tokens.
        """
        super().__init__(scorers)
        self._config, self._decode = config, decode
        remote = [name for name, part in config.parts.items() if isinstance(part.scorer, REMOTE)]
        required = [name for name in remote if name in config.requires]
        steps = [[name for name in config.parts if name not in remote], required]
        steps.append([name for name in remote if name not in required])
        self._steps = [step for step in steps if step]
        self._tasks: set[asyncio.Task[Score]] = set()
        self._scored = self._timeouts = 0
        self._lowest = config.failure_value  # the lowest value of a response so far, at most `failure_value`

    @property
    def usage(self) -> ScorerUsage:  # type: ignore[override]  # the sum is read only
        """The counters of the composite score's responses; `busy_seconds` is the sum over all parts."""
        return ScorerUsage(self._scored, self._timeouts, super().usage.busy_seconds)

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Begin to score responses, and return a future of each score, in the order of the requests.

        A future raises `ConfigError` if the scorer of a part can score no response at all.
        """
        tasks = [asyncio.get_running_loop().create_task(self._score(request)) for request in requests]
        for task in tasks:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return list[asyncio.Future[Score]](tasks)

    async def close(self) -> None:
        """End the tasks that wait for scores, and close all scorers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().close()

    async def _score(self, request: ScoreRequest) -> Score:
        started = time.perf_counter()
        try:
            text = self._decode(list(Int32s.of(request.tokens)), self._config.special_tokens)
        except (TypeError, ValueError, OverflowError) as error:  # raised if an environment passed an invalid request
            return failure_score("request", error)
        scores = dict[str, Score]()
        for step in self._steps:
            futures = [self.scorers[name].submit([request])[0] for name in step]
            scores |= zip(step, await asyncio.gather(*futures), strict=True)
            if is_decided(self._config, scores):
                break
        score = finish_score(self._combine(scores), self._config, text, len(request.tokens))
        self._scored += 1
        self._timeouts += score.outcome is Outcome.TIMEOUT
        return replace(score, seconds=time.perf_counter() - started)

    def _combine(self, scores: Mapping[str, Score]) -> Score:
        """Combine the scores of the parts. If a part failed, the response gets the lowest value so far, because a
        reward model has no lower bound.
        """
        try:
            combined = combine_scores(self._config, scores)
            score = validate_score("composite reward", combined)
        except ValueError as error:
            combined = score = failure_score("composite reward", error)
        if score.outcome is Outcome.UNJUDGED:
            return score
        if combined.failed or score.failed:
            return replace(score, value=self._lowest)
        self._lowest = min(self._lowest, score.value)
        return score


def _add_values(config: CompositeReward, scores: Mapping[str, Score]) -> dict[str, Any]:
    """Add the weighted values of tokens and steps of all reward parts.

    Raises:
        ValueError: the parts have values for different numbers of tokens.
    """
    weighted = [(config.parts[name].weight, score) for name, score in scores.items()]
    rows = [[(weight, value) for value in score.token_values] for weight, score in weighted if score.token_values]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"the parts give values for different numbers of tokens ({', '.join(str(len(row)) for row in rows)}); "
            "each part must give one value per token"
        )
    return {
        "token_values": [_add_weighted(values) for values in zip(*rows, strict=True)],
        "step_values": [(end, weight * value) for weight, score in weighted for end, value in score.step_values],
    }


def _add_weighted(values: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the weighted sum of the parts' values of one token, or None if no part has a value for the token."""
    given = [weight * value for weight, value in values if value is not None and not math.isnan(value)]
    return sum(given) if given else None


def _join_outcomes(outcomes: list[Outcome]) -> Outcome:
    """Return the outcome of a composite score: "correct" if all parts are correct, "partial" if a part is correct or
    partial, otherwise the outcome of the first part.
    """
    if set(outcomes) == {Outcome.CORRECT}:
        return Outcome.CORRECT
    return Outcome.PARTIAL if {Outcome.CORRECT, Outcome.PARTIAL} & set(outcomes) else outcomes[0]
