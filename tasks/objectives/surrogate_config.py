"""Defines the config sections `ratio` and `surrogate` of `[train.objective]`, which determine the loss of each
token.

The formulas of ratios and surrogate losses are in `ratios.py` and `surrogates.py`. In this module, A is the advantage,
pi the trained policy, and mu the policy that the key `ratio.to` names.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollflow.tasks.objectives.presets import UNBOUNDED
from rollflow.tasks.runtime.sections import Section, refuse

Level = Literal["token", "sequence", "geometric"]
HEAVIEST = 1e6  # largest allowed weight of a loss, because a larger weight might overflow
Range = tuple[Annotated[float, Field(ge=0, le=UNBOUNDED)], Annotated[float, Field(ge=0, le=UNBOUNDED)]]


class Ratio(Section):
    """Options of the probability ratio between the trained policy and an older policy, which the surrogate loss
    uses.
    """

    to: Literal["behaviour", "proximal"] = Field(
        "behaviour",
        description="policy in the denominator of the probability ratio. behaviour: the policy that sampled the "
        "tokens; proximal: the policy before the first optimizer step of the current policy version",
    )
    level: Level = Field(
        "token",
        description="level at which the probability ratio is computed. token: one ratio for each token; sequence: "
        "one ratio for each response, the product of its tokens' ratios; geometric: one ratio for each response, "
        "the geometric mean of its tokens' ratios",
    )


class Clip(Section):
    """Options of PPO's clipped surrogate loss."""

    kind: Literal["clip"] = Field(
        "clip",
        description="PPO's clipped loss: maximizes the smaller of A x ratio and A x clipped ratio, where A is the "
        "advantage",
    )
    low: float = Field(
        0.2,
        gt=0,
        le=1,
        description="distance below 1 at which PPO clips the probability ratio, so that 0.2 clips at 0.8",
    )
    high: float = Field(
        0.28,
        gt=0,
        le=UNBOUNDED,
        description="distance above 1 at which PPO clips the probability ratio, so that 0.28 clips at 1.28",
    )
    dual: float | None = Field(
        None,
        gt=1,
        le=UNBOUNDED,
        description="dual clip of PPO: the loss of a token with a negative advantage is at most this number times the "
        "absolute value of the advantage; default: no limit",
    )


class PolicyGradient(Section):
    """Options of the policy-gradient loss (REINFORCE): the log-prob of a token times its advantage, weighted by the
    clamped probability ratio. No gradient flows through the weight.
    """

    kind: Literal["policy-gradient"] = Field(
        "policy-gradient",
        description="REINFORCE: maximizes weight x A x log pi, where A is the advantage, pi the probability of the "
        "token, and the weight is the clamped probability ratio",
    )
    positive: Range = Field(
        (1.0, 1.0),
        description="range to which the probability ratio is clamped if the advantage is positive; with [1, 1], every "
        "weight is 1",
    )
    negative: Range = Field(
        (1.0, 1.0),
        description="range to which the probability ratio is clamped if the advantage is 0 or negative; with [1, 1], "
        "every weight is 1",
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        for name in ("positive", "negative"):
            low, high = getattr(self, name)
            if low > high:
                refuse(f"train.objective.surrogate.{name}", [low, high], "write the smaller bound first")
        return self

    @property
    def weighs(self) -> bool:
        """True if the surrogate loss depends on the ratio."""
        return any(low != high for low, high in (self.positive, self.negative))


class BinaryTv(Section):
    """Options of the binary total-variation loss: the advantage times the probability ratio. A token has no loss if its
    probability differs too much from its probability under the older policy.
    """

    kind: Literal["binary-tv"] = Field(
        "binary-tv",
        description="binary total-variation loss: maximizes advantage x ratio for tokens whose probability has fallen "
        "by at most low and risen by at most high, compared with the policy of train.objective.ratio.to",
    )
    low: float = Field(
        0.2,
        gt=0,
        le=UNBOUNDED,
        description="largest allowed fall of the probability of a token with a negative advantage; if the "
        "probability has fallen further, the token has no loss",
    )
    high: float = Field(
        0.2,
        gt=0,
        le=UNBOUNDED,
        description="largest allowed rise of the probability of a token with a positive advantage; if the "
        "probability has risen further, the token has no loss",
    )


class Kimi(Section):
    """Options of Kimi's loss: the advantage times the log-prob of a token, minus a squared log-ratio."""

    kind: Literal["kimi"] = Field(
        "kimi",
        description="Kimi's loss: maximizes A log pi - tau/2 (log ratio)^2, where A is the advantage and pi the "
        "probability of the token",
    )
    tau: float = Field(
        0.1, gt=0, le=HEAVIEST, description="tau in the formula of Kimi's loss: the weight of the squared log-ratio"
    )


Surrogate = Annotated[Clip | PolicyGradient | BinaryTv | Kimi, Field(discriminator="kind")]
