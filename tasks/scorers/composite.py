"""The verifier `composite`, which combines the scores of several verifiers.

    value = sum of weight * value over the parts, or 0 if a part of `reward.requires` is not correct

The value of each part is kept in the score's parts: under the name of the part, and the part's own parts under
"name.part". If a part could not be judged, the response is unjudged. If the scorer of a part failed, the value is the
sum of the negative weights, because otherwise the policy could learn to make a part fail whose weight is negative.

Values of tokens and steps are combined in the same way: the weighted values of all parts are added, and a response
whose value is not the sum of its parts has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import MOST_PARTS, Score, failure_score, validate_score
from rollflow.tasks.scorers.config import CompositeReward
from rollflow.tasks.scorers.token_values import shift_steps
from rollflow.tasks.scorers.verifier import Verifier, answer_of, apply_threshold, find_answer


class CompositeScorer:
    """Scores responses with several verifiers, whose scores are the parts of one score. See the module's docstring."""

    def __init__(self, config: CompositeReward, verifiers: Mapping[str, Verifier]) -> None:
        """Store the verifiers, by the names of the reward parts in the config."""
        self._config = config
        self._verifiers = verifiers

    def build(self) -> Verifier:
        """Return a verifier that combines all parts of the composite reward. The verifier is asynchronous if a part is
        asynchronous.
        """
        if any(verifier.scores_several for verifier in self._verifiers.values()):
            return Verifier(self.score_later, is_async=True, takes_tokens=True)
        return Verifier(self.score, takes_tokens=True)

    def score(self, response: str, reference: Mapping[str, Any], tokens: Sequence[int] = ()) -> Score:
        """Score a response with verifiers that are all synchronous functions."""
        return self.add_up({name: self._score_part(name, response, reference, tokens) for name in self._verifiers})

    async def score_later(self, response: str, reference: Mapping[str, Any], tokens: Sequence[int] = ()) -> Score:
        """Score a response with one verifier after another. Verifiers may be asynchronous."""
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
        return self.add_up(scores)

    def add_up(self, scores: Mapping[str, Score]) -> Score:
        """Combine the scores of all reward parts into the score of a response."""
        parts = {name: score.value for name, score in scores.items()}
        for name, score in scores.items():
            parts |= {f"{name}.{inner}": value for inner, value in score.parts.items()}
        parts = dict(list(parts.items())[:MOST_PARTS])
        reason = "; ".join(f"{name}: {score.reason}" for name, score in scores.items())
        if any(score.outcome is Outcome.UNJUDGED for score in scores.values()):
            return Score(0.0, reason, Outcome.UNJUDGED, parts)
        if failed := next((score for score in scores.values() if score.failed), None):
            return Score(self._config.failure_value, failed.reason, failed.outcome, parts)
        for name in self._config.requires:
            if scores[name].outcome is not Outcome.CORRECT:
                return Score(0.0, f"{name} is not correct; {reason}", scores[name].outcome, parts)
        value = sum(self._config.parts[name].weight * score.value for name, score in scores.items())
        outcome = _join_outcomes([score.outcome for score in scores.values()])
        return Score(value, reason, outcome, parts, **self._add_values(scores))

    def _add_values(self, scores: Mapping[str, Score]) -> dict[str, Any]:
        """Add the weighted values of tokens and steps of all reward parts.

        Raises:
            ValueError: the parts have values for different numbers of tokens.
        """
        weighted = [(self._config.parts[name].weight, score) for name, score in scores.items()]
        rows = [[(weight, value) for value in score.token_values] for weight, score in weighted if score.token_values]
        if len({len(row) for row in rows}) > 1:
            raise ValueError(f"the parts have token values for {', '.join(str(len(row)) for row in rows)} tokens")
        return {
            "token_values": [_add_weighted(values) for values in zip(*rows, strict=True)],
            "step_values": [(end, weight * value) for weight, score in weighted for end, value in score.step_values],
        }

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
