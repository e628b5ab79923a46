"""Verifiers: one contract (`base`), a file each, chosen by `build_verifier`; and the processes they run in (`pool`)."""

from __future__ import annotations

from rollflow.tasks.verifiers.base import Verifier
from rollflow.tasks.verifiers.config import ExactReward, ImportReward, ReasoningGymReward, RewardConfig


def build_verifier(config: RewardConfig) -> Verifier:
    """The verifier that `[reward]` asks for, with what it needs imported: that is no response's time.

    Raises:
        ConfigError: there is no verifier of that import path.
    """
    match config:
        case ReasoningGymReward():
            from rollflow.tasks.verifiers.reasoning_gym import family_score

            return family_score
        case ExactReward():
            from rollflow.tasks.verifiers.exact import exact

            return exact
        case ImportReward():
            from rollflow.tasks.verifiers.imported import imported_verifier

            return imported_verifier(config)
