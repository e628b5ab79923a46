"""Tokenizes the demonstrations for the supervised training of a new policy (cold start).

A demonstration is a prompt with a correct response. In an episode with several turns, the policy is not trained on
tokens that the environment adds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rollflow.storage.records import Prompt
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.run_prompts import RunPrompts

POOL = 20_000  # number of demonstrations from which batches are drawn
LEAST = 0.1  # lower bound on a domain's distance to the target accuracy in `weigh`, as a share of the target


class Demonstration(NamedTuple):
    """The tokens of a demonstration. `sampled` is True for each response token that the policy is trained on; if
    `sampled` is empty, the whole response is trained.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    sampled: Sequence[bool] = ()


# Returns the demonstrations of a question. If the chat template changes earlier answers, there is one demonstration for
# each context.
Encode = Callable[[Prompt, Question], Sequence[Demonstration]]


class DemonstrationPool:
    """The demonstrations of a run, which are tokenized when they are first drawn."""

    def __init__(
        self, prompts: RunPrompts, encode: Encode, draw: random.Random, close: Callable[[], None] = lambda: None
    ) -> None:
        """Set up the pool. The random generator `draw` chooses the demonstrations. The method `close` calls the
        function `close`.
        """
        self._prompts, self._encode, self._draw, self.close = prompts, encode, draw, close
        self._weights = [config.share for config in prompts.configs]
        self._made: dict[tuple[int, int], Sequence[Demonstration]] = {}

    def weigh(self, accuracies: Mapping[str, float], target: float) -> None:
        """Set how often demonstrations of each prompt source are drawn: in proportion to its share times its distance
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
