"""Verifiers: one contract (`base`) and one file for each kind, chosen by `build_verifier`; `pool` runs them."""

from __future__ import annotations

from rollflow.tasks.scorers.base import Verifier
from rollflow.tasks.scorers.config import ExactReward, ImportReward, ReasoningGymReward, RewardConfig


def build_verifier(config: RewardConfig) -> Verifier:
    """Build the verifier that `[reward]` names, and import the verifier's modules before the first response.

    Raises:
        ConfigError: there is no verifier with that import path.
    """
    match config:
        case ReasoningGymReward():
            from rollflow.tasks.scorers.reasoning_gym import family_score

            return family_score
        case ExactReward():
            from rollflow.tasks.scorers.exact import exact

            return exact
        case ImportReward():
            from rollflow.tasks.scorers.imported import imported_verifier

            return imported_verifier(config)
