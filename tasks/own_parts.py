"""Whether the parts that a recipe imports are there: looked at before a run begins."""

from __future__ import annotations

from rollflow.tasks.config import RunConfig
from rollflow.tasks.objectives import build_objective
from rollflow.tasks.objectives.config import ImportObjective
from rollflow.tasks.verifiers import build_verifier
from rollflow.tasks.verifiers.config import ImportReward


def check_own_parts(config: RunConfig) -> None:
    """Import them, and build what is built of them. Parts that come with rollflow are left alone: they are there.

    Raises:
        ConfigError: with one sentence for the first thing a person must change.
    """
    if isinstance(config.reward, ImportReward):
        build_verifier(config.reward)
    if isinstance(config.train.objective, ImportObjective):
        build_objective(config.train.objective)
