"""Demonstrations for the supervised training of a new policy (cold start), as tokens.

A demonstration is a prompt and the right response. The demonstration of an episode with several turns also has the
tokens that the environment adds, on which the policy is not trained.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rollflow.storage.records import Prompt
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.run_prompts import RunPrompts

POOL = 20_000  # number of demonstrations from which batches are drawn
LEAST = 0.1  # smallest distance of a domain from the target accuracy, as a share of the target


class Demonstration(NamedTuple):
    """The tokens of a demonstration. `sampled` says for each token of the response if the policy is trained on the
    token; if `sampled` is empty, the policy is trained on the whole response.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    sampled: Sequence[bool] = ()


# Returns the demonstrations of a question: one, or one for each context if the chat template changes earlier answers.
Encode = Callable[[Prompt, Question], Sequence[Demonstration]]


class DemonstrationPool:
    """The demonstrations of a run, which are tokenized when they are first drawn."""

    def __init__(self, prompts: RunPrompts, encode: Encode, draw: random.Random) -> None:
        self._prompts, self._encode, self._draw = prompts, encode, draw
        self._weights = [config.share for config in prompts.configs]
        self._made: dict[tuple[int, int], Sequence[Demonstration]] = {}

    def weigh(self, accuracies: Mapping[str, float], target: float) -> None:
        """Draw demonstrations of each prompt source in proportion to the source's share and the distance of its domain
        from the target accuracy.
        """
        self._weights = [
            config.share * max(target - accuracies.get(config.domain, 0.0), LEAST * target)
            for config in self._prompts.configs
        ]

    def draw(self, count: int) -> list[Demonstration]:
        """Draw the demonstrations of `count` questions at random."""
        sources, single = range(len(self._weights)), len(self._weights) == 1
        which = [0] * count if single else self._draw.choices(sources, self._weights, k=count)
        return [one for source in which for one in self._at(source, self._draw.randrange(POOL))]

    def _at(self, source: int, position: int) -> Sequence[Demonstration]:
        if (source, position) not in self._made:
            self._made[source, position] = self._encode(*self._prompts.find_demonstration(source, position))
        return self._made[source, position]
