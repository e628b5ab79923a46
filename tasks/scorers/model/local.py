"""A reward model that is loaded in the process of its caller, from its own folder."""

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
    """Scores texts by a reward model in this process. The prompt is the column `question` of the reference."""

    def __init__(self, config: ModelReward) -> None:
        self._config = config

    def score(self, responses: Sequence[str], references: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Score responses in one call of the model."""
        prompts = [str(reference["question"]) for reference in references]
        chats = [[{"role": "user", "content": prompt}] if prompt else [] for prompt in prompts]
        grades = self._classifier.grade(list(zip(chats, responses, strict=True)))
        return [score_grade(self._config, grade) for grade in grades]

    @cached_property
    def _classifier(self) -> Classifier:
        return open_classifier(self._config, "reward")


def open_classifier(config: ModelReward, section: str) -> Classifier:
    """Load the model from the folder that its section names, or from the hub."""
    folder = find_model(config, section)
    assert folder is not None, "a missing model is downloaded"
    return Classifier(config, folder, section)
