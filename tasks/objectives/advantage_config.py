"""Defines the config section `[train.objective.advantage]`, which determines how advantages are computed from
rewards.

The formulas are in `advantages.py`, `step_advantages.py`, `turn_advantages.py` and `gae.py`.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollflow.tasks.objectives.surrogate_config import HEAVIEST
from rollflow.tasks.runtime.sections import Section, refuse

SCALES = {  # baseline -> allowed scales; with any other scale, equal rewards would cause a division by almost zero
    "none": ("none", "whiten"),
    "batch": ("none", "batch", "whiten"),
}


class Advantage(Section):
    """Options for computing advantages from rewards."""

    baseline: Literal["none", "group", "leave-one-out", "batch", "critic"] = Field(
        "group",
        description="number that is subtracted from a reward. none: nothing; group: mean reward of all responses to "
        "the prompt; leave-one-out: mean reward of the other responses; batch: mean reward of the batch; critic: the "
        "critic's estimate for each token",
    )
    scale: Literal["none", "group", "batch", "whiten"] = Field(
        "group",
        description="number by which advantages are divided. none: nothing; group: the standard deviation of the "
        "rewards of the same prompt; batch: the standard deviation of the advantages of the batch; whiten: as batch, "
        "but the mean over all tokens is subtracted first",
    )
    credit: Literal["episode", "turn", "state"] = Field(
        "episode",
        description="rewards for which a turn of an episode gets credit. episode: all rewards of the episode; turn: "
        "its own and all later rewards; state: all rewards of the episode, and also a comparison with other turns in "
        "the same state (GiGPO)",
    )
    state_weight: float = Field(
        1.0,
        ge=0,
        le=HEAVIEST,
        description=(
            "weight of the comparison of turns in the same state, relative to the comparison of episodes (omega of "
            'GiGPO); used only with credit = "state"'
        ),
    )
    gamma: float = Field(
        1.0,
        gt=0,
        le=1,
        description="gamma, the factor by which later rewards are discounted: per token with a critic, per turn with "
        'credit = "turn" or "state"; with 1, there is no discount',
    )
    gae_lambda: float = Field(
        1.0,
        ge=0,
        le=1,
        description="lambda of generalized advantage estimation, used only with a critic. 1: the advantage is the "
        "discounted sum of all later rewards minus the critic's value; 0: the advantage uses only the next reward "
        "and the values of two neighbouring tokens",
    )
    overlong: float = Field(
        0.0,
        ge=0,
        le=1,
        description="the penalty for the length of a response rises linearly from 0 to 1 over this last share of "
        "engine.max_new_tokens; if 0, there is no length penalty",
    )
    positive_weight: float = Field(
        1.0,
        ge=0,
        le=HEAVIEST,
        description="factor by which positive advantages are multiplied; if 0, responses with a positive advantage are "
        "not trained on",
    )
    negative_weight: float = Field(
        1.0,
        ge=0,
        le=HEAVIEST,
        description="factor by which negative advantages are multiplied; a factor below 1 makes training on stale "
        "batches more stable",
    )

    @model_validator(mode="after")
    def _compared_with_what_it_has(self) -> Self:
        if self.baseline == "critic" and self.scale in ("group", "batch"):
            cure = 'a critic\'s advantages belong to tokens, not to groups or batches; choose "whiten" or "none"'
            refuse("train.objective.advantage.scale", self.scale, cure)
        fitting = SCALES.get(self.baseline)
        if fitting and self.scale not in fitting:
            wanted = " or ".join(f'"{scale}"' for scale in fitting)
            cure = (
                f'with the baseline "{self.baseline}", equal rewards would be divided by a deviation of almost '
                f"0; choose {wanted}"
            )
            refuse("train.objective.advantage.scale", self.scale, cure)
        if self.baseline == "critic" and self.credit != "episode":
            cure = 'a critic credits every token by itself; set credit = "episode", or another baseline'
            refuse("train.objective.advantage.credit", self.credit, cure)
        if self.credit == "state" and self.baseline in ("none", "batch"):
            cure = 'turns in the same state are compared with each other; set baseline = "group" or "leave-one-out"'
            refuse("train.objective.advantage.baseline", self.baseline, cure)
        self._check_effects()
        return self

    def _check_effects(self) -> None:
        """Reject a key that has no effect because of the values of other keys."""
        has_turns, has_critic = self.credit != "episode", self.baseline == "critic"
        critic = 'this key has no effect without a critic; remove it, or set baseline = "critic"'
        for name, counts, cure in (
            ("gamma", has_critic or has_turns, critic + ', or credit = "turn"'),
            ("gae_lambda", has_critic, critic),
            ("state_weight", self.credit == "state", 'this key counts only with credit = "state"; remove it'),
        ):
            if not counts and getattr(self, name) != 1.0:
                refuse(f"train.objective.advantage.{name}", getattr(self, name), cure)
