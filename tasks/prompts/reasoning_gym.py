"""Procedural prompts of one reasoning-gym family.

reasoning-gym makes item i from the seed `dataset seed + i`. The three streams of a run lie far apart in that one
sequence. If a training item is held out, the next item of its stride takes its place.

The key of an item is the words of its expression (else of its question) in any order, and its answer.
"""

from __future__ import annotations

from typing import Any

import reasoning_gym

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.config import ReasoningGymPrompts
from rollflow.tasks.prompts.held_out import HeldOut
from rollflow.tasks.prompts.keys import unordered_key

STREAM = 10_000_000_000  # items one stream may use
STRIDE = 64  # items tried for one position before the held-out set is called too large
SIZE = 2**31 - 1


class ReasoningGymSource:
    """`QuestionSource` over one family."""

    def __init__(self, config: ReasoningGymPrompts, seed: int, count: int, excluded: HeldOut) -> None:
        self._family, self._excluded = config.family, excluded
        self._training = self._open(config, seed * 3 * STREAM)
        self._demonstrations = self._open(config, (seed * 3 + 1) * STREAM)
        self._evaluation = self._open(config, (seed * 3 + 2) * STREAM)
        self._held = self._choose(count)
        for question in self._held:
            excluded.add(question)

    def training(self, position: int) -> Question:
        """See `QuestionSource`."""
        return self._outside(self._training, position)

    def demonstration(self, position: int) -> Question:
        """See `QuestionSource`."""
        return self._outside(self._demonstrations, position)

    def held_out(self, count: int) -> list[Question]:
        """See `QuestionSource`."""
        return self._held[:count]

    def _open(self, config: ReasoningGymPrompts, seed: int) -> Any:
        try:
            return reasoning_gym.create_dataset(config.family, seed=seed, size=SIZE, **config.options)
        except ValueError as error:
            raise ConfigError(
                f"prompts.family = {config.family!r}: {error}; see reasoning-gym's list of tasks"
            ) from None
        except (TypeError, AssertionError) as error:
            cure = f"give options that {config.family} accepts"
            raise ConfigError(f"prompts.options = {config.options!r}: {error}; {cure}") from None

    def _choose(self, count: int) -> list[Question]:
        """The first `count` distinct questions of the evaluation stream (fewer if the family has no more)."""
        chosen: list[Question] = []
        held = HeldOut(self._excluded.split)
        for item in range(count * 20):
            if len(chosen) == count:
                break
            question = self._question(self._evaluation[item])
            if question not in held:
                held.add(question)
                chosen.append(question)
        return chosen

    def _outside(self, dataset: Any, position: int) -> Question:
        for item in range(position * STRIDE, (position + 1) * STRIDE):
            question = self._question(dataset[item])
            if question not in self._excluded:
                return question
        raise ConfigError(
            f"evaluation.prompts: the {len(self._held)} held-out prompts leave nothing of {self._family} to train on; "
            "lower evaluation.prompts or widen prompts.options"
        )

    def _question(self, entry: dict[str, Any]) -> Question:
        reference = {"family": self._family, "answer": entry["answer"], "metadata": entry["metadata"]}
        return Question(entry["question"], str(entry["answer"]), reference, _key(entry))


def _key(entry: dict[str, Any]) -> str:
    """Return one key for all orders of an item's words, and of a sum's numbers whatever the sentence around it.

    Some families name their solution `expression`: it counts only if the question contains it.
    """
    asked, expression = entry["question"], entry["metadata"].get("expression")
    stands_there = isinstance(expression, str) and expression.strip() and expression in asked
    return unordered_key(expression if stands_there else asked, str(entry["answer"]))
