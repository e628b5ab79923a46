"""Checks whether an objective can use the rewards of tokens, steps and turns. This module does not import torch."""

from __future__ import annotations

from rollflow.storage.errors import ConfigError
from rollflow.tasks.objectives.config import ObjectiveConfig, PartsObjective


def check_token_rewards(objective: ObjectiveConfig) -> None:
    """Raise `ConfigError` if an objective cannot train tokens by their own rewards. An objective with a clipped ratio
    of whole responses trains all tokens of a response by their mean advantage.
    """
    if isinstance(objective, PartsObjective) and not objective.trains_tokens:
        raise ConfigError(
            f"train.objective.ratio.level = {objective.ratio.level!r}: the scorer gives values to tokens or steps, and "
            'this objective trains all tokens of a response alike; set level = "token" (kind = "grpo" has it), or let '
            "the scorer return one value for a response"
        )


def check_states(objective: ObjectiveConfig, *, has_states: bool) -> None:
    """Raise `ConfigError` if an objective compares turns by their states, and no turn of the batch has a state."""
    if objective.advantage.credit == "state" and not has_states:
        raise ConfigError(
            'train.objective.advantage.credit = "state" needs an environment that names the state of each turn, '
            'and this one names none; let it call episode.enter_state before each turn, or set credit = "turn"'
        )
