"""A verifier that loads a reward model in the caller's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from rollflow.tasks.scorers.base import Score
from rollflow.tasks.scorers.model.classifier import Classifier
from rollflow.tasks.scorers.model.config import ModelReward
from rollflow.tasks.scorers.model.folder import find_model
from rollflow.tasks.scorers.model.scorer import score_grade


class ModelVerifier:
    """Scores texts with a reward model in this process; the prompt is the column `question` of the reference."""

    def __init__(self, config: ModelReward) -> None:
        self._config = config

    def score(self, responses: Sequence[str], references: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Score responses in one call of the reward model."""
        prompts = [str(reference["question"]) for reference in references]
        chats = [[{"role": "user", "content": prompt}] if prompt else [] for prompt in prompts]
        grades = self._classifier.grade(list(zip(chats, responses, strict=True)))
        return [score_grade(self._config, grade) for grade in grades]

    @cached_property
    def _classifier(self) -> Classifier:
        return open_classifier(self._config, "reward")


def open_classifier(config: ModelReward, section: str) -> Classifier:
    """Load the reward model from the folder that the config section names, or from the Hugging Face hub."""
    folder = find_model(config, section)
    assert folder is not None, "a missing model is downloaded"
    return Classifier(config, folder, section)
