"""Procedural prompts of one reasoning-gym family.

reasoning-gym makes item i from the seed `dataset seed + i`. The three streams of a run lie far apart in that one
sequence. If the text of a training item is held out, the next item of its stride takes its place.
"""

from __future__ import annotations

from typing import Any

import reasoning_gym

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.config import ReasoningGymPrompts

STREAM = 10_000_000_000  # items one stream may use
STRIDE = 64  # items tried for one position before the held-out set is called too large
SIZE = 2**31 - 1


class ReasoningGymSource:
    """`QuestionSource` over one family."""

    def __init__(self, config: ReasoningGymPrompts, seed: int, held_out: int) -> None:
        self._family = config.family
        self._training = self._open(config, seed * 3 * STREAM)
        self._demonstrations = self._open(config, (seed * 3 + 1) * STREAM)
        self._evaluation = self._open(config, (seed * 3 + 2) * STREAM)
        self._held = self._choose(held_out)

    def training(self, position: int) -> Question:
        """See `QuestionSource`."""
        return self._outside(self._training, position)

    def demonstration(self, position: int) -> Question:
        """See `QuestionSource`."""
        return self._outside(self._demonstrations, position)

    def held_out(self, count: int) -> list[Question]:
        """See `QuestionSource`."""
        return list(self._held.values())[:count]

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

    def _choose(self, count: int) -> dict[str, Question]:
        """The first `count` distinct questions of the evaluation stream (fewer if the family has no more)."""
        held: dict[str, Question] = {}
        for item in range(count * 20):
            if len(held) == count:
                break
            question = self._question(self._evaluation[item])
            held.setdefault(question.text, question)
        return held

    def _outside(self, dataset: Any, position: int) -> Question:
        for item in range(position * STRIDE, (position + 1) * STRIDE):
            question = self._question(dataset[item])
            if question.text not in self._held:
                return question
        raise ConfigError(
            f"evaluation.prompts: the {len(self._held)} held-out prompts leave nothing of {self._family} to train on; "
            "lower evaluation.prompts or widen prompts.options"
        )

    def _question(self, entry: dict[str, Any]) -> Question:
        reference = {"family": self._family, "answer": entry["answer"], "metadata": entry["metadata"]}
        return Question(entry["question"], str(entry["answer"]), reference)
