"""The `[train.objective]` section: the loss to minimize, as a choice of parts.

A part is a section of a few keys; the part's formula and paper are documented with its code. `kind` names a preset
(`presets.py`). The preset defines all parts and keys that a recipe leaves out. A run stores every key of every part.
This module imports pydantic only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from rollflow.tasks.objectives.presets import PRESETS, UNBOUNDED, PresetName
from rollflow.tasks.runtime.sections import Imported, Section, refuse, with_kinds

Level = Literal["token", "sequence", "geometric"]
HEAVIEST = 1e6  # largest allowed weight; a larger weight would only overflow
Range = tuple[Annotated[float, Field(ge=0, le=UNBOUNDED)], Annotated[float, Field(ge=0, le=UNBOUNDED)]]


class Ratio(Section):
    """The ratio of the trained policy to an older one, in the surrogate. See `ratios.py`."""

    to: Literal["behaviour", "proximal"] = Field(
        "behaviour",
        description="policy in the denominator: the policy that sampled, or the learner before this version's first "
        "update (proximal)",
    )
    level: Level = Field(
        "token", description="one ratio per token; their product over a response; or their geometric mean over it"
    )


class Clip(Section):
    """PPO's clip of the ratio."""

    kind: Literal["clip"] = Field("clip", description="PPO: the smaller one of A x ratio and A x clipped ratio")
    low: float = Field(0.2, gt=0, le=1, description="the ratio is clipped to 1 - low or more")
    high: float = Field(0.28, gt=0, le=UNBOUNDED, description="the ratio is clipped to 1 + high or less")
    dual: float | None = Field(
        None, gt=1, le=UNBOUNDED, description="largest ratio with which a negative advantage counts; default: no limit"
    )


class PolicyGradient(Section):
    """The log-prob times the advantage, weighted by the clamped ratio without its gradient."""

    kind: Literal["policy-gradient"] = Field("policy-gradient", description="REINFORCE: weight x A log pi")
    positive: Range = Field(
        (1.0, 1.0), description="range to which the ratio is clamped where A > 0; [1, 1]: no weight"
    )
    negative: Range = Field((1.0, 1.0), description="range to which the ratio is clamped elsewhere; [1, 1]: no weight")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        for name in ("positive", "negative"):
            low, high = getattr(self, name)
            if low > high:
                refuse(f"train.objective.surrogate.{name}", [low, high], "give the smaller end first")
        return self

    @property
    def weighs(self) -> bool:
        """True if the ratio has an effect on the loss."""
        return any(low != high for low, high in (self.positive, self.negative))


class BinaryTv(Section):
    """The ratio times the advantage, for tokens whose probability has not moved too far."""

    kind: Literal["binary-tv"] = Field(
        "binary-tv", description="the ratio times A, while pi - mu is within bounds; mu: the policy of `ratio.to`"
    )
    low: float = Field(0.2, gt=0, le=UNBOUNDED, description="a token with A < 0 counts while pi - mu >= -low")
    high: float = Field(0.2, gt=0, le=UNBOUNDED, description="a token with A > 0 counts while pi - mu <= high")


class Kimi(Section):
    """The advantage times the log-prob, minus a squared log-ratio."""

    kind: Literal["kimi"] = Field("kimi", description="A log pi - tau/2 (log ratio)^2")
    tau: float = Field(0.1, gt=0, le=HEAVIEST, description="weight of the squared log-ratio")


Surrogate = Annotated[Clip | PolicyGradient | BinaryTv | Kimi, Field(discriminator="kind")]


class Correction(Section):
    """The treatment of tokens that an older policy sampled. See `corrections.py`."""

    outside: Literal["none", "clamp", "mask", "second-moment"] = Field(
        "none",
        description="what to do with a ratio to the behaviour policy that is out of range; none: no correction; "
        "second-moment: drop the tokens with the largest squared log-ratios",
    )
    level: Level = Field("token", description="level of the ratio that weights the loss, as in train.objective.ratio")
    low: float = Field(0.0, ge=0, le=UNBOUNDED, description="smallest ratio in range")
    high: float = Field(UNBOUNDED, gt=0, le=UNBOUNDED, description="largest ratio in range")
    weigh: bool = Field(True, description="a mask multiplies the remaining losses by the ratio, too")
    judge: Level | None = Field(None, description="level of the ratio that decides what a mask drops; default: `level`")
    second_moment: float = Field(
        0.04, gt=0, le=UNBOUNDED, description="largest mean squared log-ratio of the tokens that second-moment keeps"
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.low > self.high:
            refuse("train.objective.correction.low", self.low, f"it must not be above high = {self.high:g}")
        return self

    @property
    def weighs(self) -> bool:
        """True if the correction multiplies losses by a ratio."""
        return self.outside == "clamp" or (self.outside == "mask" and self.weigh)


COUNTS_WITH = {  # for each key of a correction: the values of `outside` with which the key has an effect
    "level": ("clamp", "mask"),
    "low": ("clamp", "mask"),
    "high": ("clamp", "mask"),
    "weigh": ("mask",),
    "judge": ("mask",),
    "second_moment": ("second-moment",),
}


SCALES = {  # for two baselines: the allowed scales; with other scales, equal rewards would be divided by almost zero
    "none": ("none", "whiten"),
    "batch": ("none", "batch", "whiten"),
}


class Advantage(Section):
    """How advantages are computed from rewards. See `advantages.py`."""

    baseline: Literal["none", "group", "leave-one-out", "batch", "critic"] = Field(
        "group",
        description="what is subtracted from the reward: nothing, the mean of the group, of the other responses of "
        "the group, or of the batch, or a critic's estimate for each token",
    )
    scale: Literal["none", "group", "batch", "whiten"] = Field(
        "group",
        description="what the advantage is divided by: nothing, or the standard deviation of the group or of the "
        "batch; whiten: subtract the mean over all tokens first",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="with a critic: discount of a reward per token")
    gae_lambda: float = Field(
        1.0,
        ge=0,
        le=1,
        description="with a critic: lambda of GAE; 1 trusts rewards alone, 0 trusts the critic's values",
    )
    overlong: float = Field(
        0.0, ge=0, le=1, description="last share of engine.max_new_tokens in which the reward falls, by 1 at the end"
    )
    positive_weight: float = Field(1.0, ge=0, le=HEAVIEST, description="weight of positive advantages")
    negative_weight: float = Field(
        1.0,
        ge=0,
        le=HEAVIEST,
        description="weight of negative advantages; below 1 it steadies training on stale batches",
    )

    @model_validator(mode="after")
    def _compared_with_what_it_has(self) -> Self:
        if self.baseline == "critic" and self.scale in ("group", "batch"):
            cure = 'a critic\'s advantages are of tokens; choose "whiten" or "none"'
            refuse("train.objective.advantage.scale", self.scale, cure)
        fitting = SCALES.get(self.baseline)
        if fitting and self.scale not in fitting:
            wanted = " or ".join(f'"{scale}"' for scale in fitting)
            cure = f'with the baseline "{self.baseline}", equal rewards would be divided by nothing; choose {wanted}'
            refuse("train.objective.advantage.scale", self.scale, cure)
        for name in ("gamma", "gae_lambda") if self.baseline != "critic" else ():
            if getattr(self, name) != 1.0:
                cure = 'it changes nothing without a critic; leave it out, or set baseline = "critic"'
                refuse(f"train.objective.advantage.{name}", getattr(self, name), cure)
        return self


KL_COUNTS_WITH = {"kl": "kl_weight", "kl_to": "kl_weight", "kl_in": "kl_weight", "kl_gain": "kl_target"}


class Penalties(Section):
    """The KL penalty and the entropy bonus, in the loss of each token or in its response's reward."""

    kl: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of the KL divergence; k1 only in the reward")
    kl_to: Literal["behaviour", "reference"] = Field(
        "behaviour", description="policy that the divergence is measured from; reference: see train.reference"
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="where the divergence counts: in the loss of each token, or in the reward of its response"
    )
    kl_weight: float = Field(0.0, ge=0, le=HEAVIEST, description="weight of the divergence")
    kl_target: float | None = Field(
        None,
        gt=0,
        description="target of the divergence, in nats per token; after each version the weight is adapted to meet it",
    )
    kl_gain: float = Field(0.1, gt=0, le=1, description="speed at which the weight is adapted to kl_target")
    entropy_weight: float = Field(0.0, ge=0, le=HEAVIEST, description="weight of the entropy bonus")

    @model_validator(mode="after")
    def _measures_something(self) -> Self:
        if self.kl_in == "reward" and self.kl_to == "behaviour":
            cure = 'what sampled the response does not differ from itself; set kl_to = "reference"'
            refuse("train.objective.penalties.kl_in", self.kl_in, cure)
        if self.kl_target is not None and not self.kl_weight:
            cure = "there is no weight to adapt; set kl_weight, 0.01 say"
            refuse("train.objective.penalties.kl_target", self.kl_target, cure)
        for name, counts_with in KL_COUNTS_WITH.items():
            # An explicit weight of 0 is allowed, because a sweep over weights may include 0.
            value, given = getattr(self, name), self.model_fields_set
            if value != type(self).model_fields[name].default and counts_with not in given:
                cure = f"it changes nothing without {counts_with}; leave it out, or set that, too"
                refuse(f"train.objective.penalties.{name}", value, cure)
        return self

    @property
    def uses_reference(self) -> bool:
        """True if the reference policy's log-probs are needed."""
        return self.kl_weight > 0 and self.kl_to == "reference"


class ObjectiveBase(Section):
    """Keys that all objectives share."""

    advantage: Advantage = Advantage()
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum", "constant"] = Field(
        "token-mean",
        description="token-mean: the mean loss of all tokens; the others are means over responses: of a response's "
        "mean loss, of its sum, or of its sum over engine.max_new_tokens (constant)",
    )


class PartsObjective(ObjectiveBase):
    """A preset objective, with the parts that a recipe changes."""

    kind: PresetName = Field("grpo", description="a preset; a recipe may change its parts one by one")
    ratio: Ratio = Ratio()
    surrogate: Surrogate = Clip()
    correction: Correction = Correction()
    penalties: Penalties = Penalties()

    @model_validator(mode="wrap")
    @classmethod
    def _with_kinds(cls, tree: Any, made: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in the preset's parts where the recipe gives none; parts of the preset do not count as set."""
        preset = PRESETS.get(str(tree.get("kind", "grpo"))) if isinstance(tree, Mapping) else None
        if preset is None:
            return made(tree)
        given = _as_parts(tree)
        found = made(with_kinds(cls, _merge_parts(preset.parts, given)))
        if not given.keys() >= RECORDED:
            _check_counts(found.correction, given.get("correction"))
            _check_ratio(found, given.get("ratio"))
            check_new(found)
        _set_only(found, given)
        return found

    @model_validator(mode="after")
    def _corrected_once(self) -> Self:
        if self.correction.weighs and self.ratio.to == "behaviour" and self.ratio_counts:
            cure = (
                "the surrogate's ratio is to the behaviour policy, too, so samples would be corrected twice; "
                'set ratio.to = "proximal", or correction.weigh = false with outside = "mask"'
            )
            refuse("train.objective.correction.outside", self.correction.outside, cure)
        return self

    @property
    def ratio_counts(self) -> bool:
        """True if the surrogate's loss depends on a ratio."""
        return not isinstance(self.surrogate, PolicyGradient) or self.surrogate.weighs


class ImportObjective(ObjectiveBase, Imported):
    """A user-defined objective, imported by its path."""

    kind: Literal["import"] = Field("import", description="your own class, derived from Objective")


ObjectiveConfig = Annotated[PartsObjective | ImportObjective, Field(discriminator="kind")]


def _merge_parts(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the recipe's parts into the preset, key by key. A part of another kind replaces the preset's whole part."""
    found = dict(preset)
    for name, value in given.items():
        own = found.get(name)
        if isinstance(own, Mapping) and isinstance(value, Mapping) and value.get("kind") in (None, own.get("kind")):
            value = {**own, **value}
        found[name] = value
    return found


# A recorded run stores every part with every key. A config tree with all of these keys is accepted without checks of
# keys that have no effect, so that the run can be replayed. A form also sends every key; so `check_new` repeats the
# important checks when a run is created.
RECORDED = frozenset({"ratio", "surrogate", "correction", "advantage", "aggregation", "penalties"})


def _check_counts(correction: Correction, given: Any) -> None:
    """Reject a correction's key that was given but has no effect."""
    if not isinstance(given, Mapping):
        return
    for name, kinds in COUNTS_WITH.items():
        value, default = getattr(correction, name), Correction.model_fields[name].default
        if name in given and value != default and correction.outside not in kinds:
            wanted = " or ".join(f'"{kind}"' for kind in kinds)
            here = f'it changes nothing while outside = "{correction.outside}"'
            refuse(f"train.objective.correction.{name}", value, f"{here}; leave it out, or set outside to {wanted}")
    judged_alone = correction.outside == "mask" and not correction.weigh and correction.judge is not None
    if judged_alone and given.get("level", "token") != "token":
        cure = "it changes nothing where a mask only judges, by `judge`; leave it out, or set weigh = true"
        refuse("train.objective.correction.level", correction.level, cure)


def _check_ratio(objective: PartsObjective, given: Any) -> None:
    """Reject a key of the ratio that was given but has no effect.

    If the surrogate has no ratio, only `to` may have an effect: the ratio of a correction uses it.
    """
    if objective.ratio_counts or not isinstance(given, Mapping):
        return
    for name in ("level",) if objective.correction.outside in ("clamp", "mask") else ("level", "to"):
        if name in given and (value := getattr(objective.ratio, name)) != Ratio.model_fields[name].default:
            cure = "it changes nothing while the surrogate has no ratio; leave it out, or set "
            refuse(f"train.objective.ratio.{name}", value, cure + "train.objective.surrogate.positive, [0, 2] say")


def check_new(objective: ObjectiveConfig) -> None:
    """Reject settings of a new run that do not train what they say; a recorded run may have such settings."""
    if isinstance(objective, PartsObjective):
        _check_length(objective)
        _check_k1(objective.penalties)


def _check_length(objective: PartsObjective) -> None:
    """Reject a sequence ratio unless the loss of a response is the mean over its tokens.

    A sequence ratio counts in the loss of each token, so a sum over tokens would count it once for each token.
    """
    once = objective.ratio.level != "sequence" or objective.aggregation == "sequence-mean"
    if once or not isinstance(objective.surrogate, Clip | BinaryTv):
        return
    cure = (
        f'with aggregation = "{objective.aggregation}" a response would count by the square of its length; set '
        'aggregation = "sequence-mean", or level = "geometric"'
    )
    refuse("train.objective.ratio.level", "sequence", cure)


def _check_k1(penalties: Penalties) -> None:
    """Reject the KL estimator k1 in the loss: its gradient is that of log pi, which moves stale tokens further away."""
    if penalties.kl == "k1" and penalties.kl_in == "loss" and penalties.kl_weight:
        cure = 'its gradient knows nothing of the other policy; choose "k2" or "k3", or a reference in the reward'
        refuse("train.objective.penalties.kl", "k1", cure)


def _set_only(section: Section, given: Mapping[str, Any]) -> None:
    """Mark only the given fields as set, in the section and in the sections that it contains."""
    section.__pydantic_fields_set__.intersection_update(given)
    for name, value in given.items():
        part = getattr(section, name, None)
        if isinstance(part, Section) and isinstance(value, Mapping):
            _set_only(part, value)


# Keys of older configs, from before objectives had parts, with their new places. Recorded runs with these keys can be
# replayed.
EARLIER = {
    "clip_low": ("surrogate", "low"),
    "clip_high": ("surrogate", "high"),
    "dual_clip": ("surrogate", "dual"),
    "weight_cap": ("correction", "high"),
}


def _as_parts(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Move the values of older keys into their parts; a value of null counts as not given."""
    found = {name: value for name, value in tree.items() if name not in EARLIER and value is not None}
    for name in EARLIER.keys() & tree.keys():
        part, key = EARLIER[name]
        if isinstance(now := found.get(part, {}), Mapping):
            found[part] = {key: tree[name], **now}
    return found
