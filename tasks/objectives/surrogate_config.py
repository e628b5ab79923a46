"""The sections `ratio` and `surrogate` of `[train.objective]`, which define the loss of each token.

The formulas of ratios and surrogate losses are in `ratios.py` and `surrogates.py`. In this module, A is the advantage,
pi the trained policy, and mu the policy that the key `ratio.to` names. The module `surrogate_config` imports only
pydantic, and not torch.
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
    """Options of the ratio of the trained policy to an older policy, which the surrogate loss uses. See `ratios.py`."""

    to: Literal["behaviour", "proximal"] = Field(
        "behaviour",
        description="policy in the ratio's denominator. behaviour: the policy that sampled the tokens; proximal: "
        "the learner before this version's first update",
    )
    level: Level = Field(
        "token",
        description="what gets a ratio: each token; each response, as the product of its tokens' ratios; or each "
        "response, as their geometric mean",
    )


class Clip(Section):
    """PPO's clip of the ratio."""

    kind: Literal["clip"] = Field(
        "clip", description="PPO maximizes the smaller of A x ratio and A x clipped ratio, where A is the advantage"
    )
    low: float = Field(0.2, gt=0, le=1, description="amount by which a ratio may be below 1 before PPO clips it")
    high: float = Field(
        0.28, gt=0, le=UNBOUNDED, description="amount by which a ratio may be above 1 before PPO clips it"
    )
    dual: float | None = Field(
        None,
        gt=1,
        le=UNBOUNDED,
        description="largest ratio with which a token of negative advantage counts in the loss; default: no limit",
    )


class PolicyGradient(Section):
    """Options of the policy-gradient loss: the log-prob times the advantage, weighted by the clamped ratio without its
    gradient."""

    kind: Literal["policy-gradient"] = Field(
        "policy-gradient",
        description="REINFORCE maximizes weight x A log pi, where A is the advantage, pi the token's probability, and "
        "the weight the clamped ratio",
    )
    positive: Range = Field(
        (1.0, 1.0),
        description="range to which the ratio is clamped for a positive advantage; [1, 1]: every weight is 1",
    )
    negative: Range = Field(
        (1.0, 1.0),
        description="range to which the ratio is clamped for an advantage of 0 or less; [1, 1]: every weight is 1",
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
    """Options of the binary total-variation loss: the ratio times the advantage, for tokens whose probability is still
    close to that under the older policy."""

    kind: Literal["binary-tv"] = Field(
        "binary-tv",
        description="maximizes advantage x ratio, but only for tokens whose pi - mu is within the bounds; pi is the "
        "token's probability under the trained policy, and mu under the policy of `ratio.to`",
    )
    low: float = Field(
        0.2,
        gt=0,
        le=UNBOUNDED,
        description="largest amount by which the probability of a token with negative advantage may have fallen; "
        "beyond it the token has no loss",
    )
    high: float = Field(
        0.2,
        gt=0,
        le=UNBOUNDED,
        description="largest amount by which the probability of a token with positive advantage may have risen; "
        "beyond it the token has no loss",
    )


class Kimi(Section):
    """Options of Kimi's loss: the advantage times the log-prob, minus a squared log-ratio."""

    kind: Literal["kimi"] = Field(
        "kimi",
        description="maximizes A log pi - tau/2 (log ratio)^2, where A is the advantage and pi the token's probability",
    )
    tau: float = Field(
        0.1, gt=0, le=HEAVIEST, description="tau in the formula of kimi, the weight of the squared log-ratio"
    )


Surrogate = Annotated[Clip | PolicyGradient | BinaryTv | Kimi, Field(discriminator="kind")]
