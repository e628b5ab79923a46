"""Defines the config section of the timed (simulated) environment."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollflow.tasks.environments.base_config import EnvironmentBase
from rollflow.tasks.environments.limits_config import LimitedEnvironment
from rollflow.tasks.runtime.sections import LONGEST_SECONDS, refuse

WIDEST = 10.0  # largest sigma of a lognormal distribution; a larger sigma could draw an infinite number


class TimedEnvironmentConfig(LimitedEnvironment, EnvironmentBase):
    """A simulated environment for tests and planning, whose steps only wait. Numbers and lengths of turns and the
    seconds of each step are drawn at random.
    """

    kind: Literal["timed"] = Field(
        "timed", description="simulated environment with several turns, whose steps only wait for a random time"
    )
    median_turns: float = Field(8.0, ge=1, le=1e6, description="median number of turns of a simulated episode")
    turns_sigma: float = Field(
        0.0,
        ge=0,
        le=WIDEST,
        description="sigma of the lognormal distribution of the number of turns; if 0, every episode has the median "
        "number of turns",
    )
    max_turns: int = Field(50, gt=0, description="largest number of turns of a simulated episode")
    correlation: float = Field(
        0.0,
        ge=0,
        le=1,
        description="correlation between the numbers of turns of the episodes of one prompt, from 0 (independent) to "
        "1 (equal)",
    )
    turn_tokens: int | None = Field(
        None,
        gt=0,
        description="limit of the tokens that the policy may generate in a turn; each turn draws its limit from a "
        "lognormal distribution with this median; default: only engine.max_new_tokens limits a turn",
    )
    turn_tokens_sigma: float = Field(
        0.0,
        ge=0,
        le=WIDEST,
        description="sigma of the lognormal distribution of turn_tokens; if 0, every turn has the same limit",
    )
    observation_tokens: int = Field(
        1, ge=0, description="number of tokens that a simulated environment adds to the response after each step"
    )
    distribution: Literal["gaussian", "lognormal"] = Field(
        "gaussian",
        description="distribution of the seconds of a step. gaussian: mean step_seconds, standard deviation "
        "step_sigma, and 0 in place of a negative number; lognormal: median step_seconds, sigma step_sigma",
    )
    step_seconds: float = Field(
        1.0,
        ge=0,
        le=LONGEST_SECONDS,
        description="mean (gaussian) or median (lognormal) seconds of one step of a simulated environment",
    )
    step_sigma: float = Field(
        0.0,
        ge=0,
        le=LONGEST_SECONDS,
        description="spread of the seconds of a step: the standard deviation in seconds (gaussian), or sigma "
        "(lognormal)",
    )
    reset_seconds: float = Field(
        0.0,
        ge=0,
        le=LONGEST_SECONDS,
        description="mean (gaussian) or median (lognormal) seconds until a simulated environment is ready for the "
        "first turn",
    )
    reset_sigma: float = Field(
        0.0,
        ge=0,
        le=LONGEST_SECONDS,
        description="spread of the seconds of a reset: the standard deviation in seconds (gaussian), or sigma "
        "(lognormal)",
    )
    slow_share: float = Field(0.0, ge=0, le=1, description="share of the episodes whose simulated environment is slow")
    slow_factor: float = Field(
        1.0,
        ge=1,
        le=1e6,
        description="factor by which the reset and the steps of a slow simulated environment are slower",
    )
    failures: float = Field(
        0.0,
        ge=0,
        le=1,
        description="probability that a step of the simulated environment fails, which ends the episode",
    )
    hangs: float = Field(
        0.0,
        ge=0,
        le=1,
        description="probability that a step of the simulated environment hangs for hang_seconds and then fails",
    )
    hang_seconds: float = Field(
        600.0, gt=0, le=LONGEST_SECONDS, description="seconds until a hanging simulated environment fails"
    )
    places: int | None = Field(
        None, gt=0, description="largest number of simulated environments that run at the same time; default: no limit"
    )

    @property
    def most_episodes(self) -> int | None:
        """The largest number of simulated environments that run at the same time."""
        return self.places

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.failures + self.hangs > 1:
            cure = f"failures = {self.failures:g} and hangs must not exceed 1 together; lower one of them"
            refuse("environment.hangs", self.hangs, cure)
        for key in ("step_sigma", "reset_sigma") if self.distribution == "lognormal" else ():
            if getattr(self, key) > WIDEST:
                refuse(
                    f"environment.{key}",
                    getattr(self, key),
                    f"the sigma of a lognormal distribution is at most {WIDEST:g}; lower it",
                )
        return self
