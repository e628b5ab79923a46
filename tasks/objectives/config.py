"""Defines the config section `[train.objective]`, which builds a loss from parts (ratio, surrogate, correction,
advantage, penalties).

The key `kind` names a preset objective (see `presets.py`). Parts and keys that the recipe (the TOML file of a run)
leaves out are taken from the preset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, model_validator
from pydantic_core import PydanticCustomError

from rollflow.tasks.objectives.advantage_config import Advantage
from rollflow.tasks.objectives.presets import PRESETS, UNBOUNDED, PresetName
from rollflow.tasks.objectives.surrogate_config import HEAVIEST, BinaryTv, Clip, Level, PolicyGradient, Ratio, Surrogate
from rollflow.tasks.runtime.sections import Imported, Section, refusal, refuse, with_kinds


class Correction(Section):
    """Options of the off-policy correction, which changes the loss of tokens that an older policy sampled."""

    outside: Literal["none", "clamp", "mask", "second-moment"] = Field(
        "none",
        description="what happens to a token whose probability ratio is outside low to high. none: nothing; clamp: "
        "the ratio is clamped; mask: the loss of the token is 0; second-moment: the tokens with the largest squared "
        "log-ratios are dropped",
    )
    level: Level = Field(
        "token",
        description="level at which the probability ratio of the correction is computed: for each token, or for each "
        "response, as in train.objective.ratio.level",
    )
    low: float = Field(
        0.0, ge=0, le=UNBOUNDED, description="smallest allowed probability ratio of the off-policy correction"
    )
    high: float = Field(
        UNBOUNDED, gt=0, le=UNBOUNDED, description="largest allowed probability ratio of the off-policy correction"
    )
    weigh: bool = Field(
        True,
        description='with outside = "mask": whether the loss of each token that is kept is multiplied by its '
        "probability ratio",
    )
    judge: Level | None = Field(
        None,
        description='with outside = "mask": level of the probability ratio that is compared with low and high '
        "(token, sequence or geometric); default: the value of the key level",
    )
    second_moment: float = Field(
        0.04,
        gt=0,
        le=UNBOUNDED,
        description='with outside = "second-moment": limit on the mean squared log-ratio of the tokens that are kept',
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.low > self.high:
            refuse(
                "train.objective.correction.low",
                self.low,
                f"low must not be above high = {self.high:g}; choose a smaller low",
            )
        return self

    @property
    def weighs(self) -> bool:
        """True if the correction multiplies losses by a probability ratio."""
        return self.outside == "clamp" or (self.outside == "mask" and self.weigh)


COUNTS_WITH = {  # key of a correction -> values of `outside` with which the key has an effect
    "level": ("clamp", "mask"),
    "low": ("clamp", "mask"),
    "high": ("clamp", "mask"),
    "weigh": ("mask",),
    "judge": ("mask",),
    "second_moment": ("second-moment",),
}


KL_COUNTS_WITH = {"kl": "kl_weight", "kl_to": "kl_weight", "kl_in": "kl_weight", "kl_gain": "kl_target"}


class Penalties(Section):
    """Options of the KL penalty and the entropy bonus, which change the loss of tokens or the reward of responses."""

    kl: Literal["k1", "k2", "k3"] = Field(
        "k3", description='estimator of the KL divergence; k1 is allowed only with kl_in = "reward"'
    )
    kl_to: Literal["behaviour", "reference"] = Field(
        "behaviour",
        description="policy from which the KL divergence of the trained policy is measured. behaviour: the policy "
        "that sampled the response; reference: the frozen policy of train.reference",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description="where the KL penalty is applied. loss: it is added to the loss of each token; reward: it is "
        "subtracted from the reward of each response",
    )
    kl_weight: float = Field(
        0.0, ge=0, le=HEAVIEST, description="weight of the KL penalty; if 0, there is no KL penalty"
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description="target of the KL divergence, in nats per token; kl_weight is adapted to this target after each "
        "policy version; default: kl_weight stays constant",
    )
    kl_gain: float = Field(
        0.1,
        gt=0,
        le=1,
        description="speed at which kl_weight is adapted to kl_target: after each policy version, kl_weight changes by "
        "at most the fraction kl_gain / 5",
    )
    entropy_weight: float = Field(
        0.0, ge=0, le=HEAVIEST, description="weight of the entropy bonus; if 0, there is no bonus"
    )

    @model_validator(mode="after")
    def _measures_something(self) -> Self:
        if self.kl_in == "reward" and self.kl_to == "behaviour":
            cure = 'the policy that sampled a response does not diverge from itself; set kl_to = "reference"'
            refuse("train.objective.penalties.kl_in", self.kl_in, cure)
        if self.kl_target is not None and not self.kl_weight:
            cure = "kl_target adapts kl_weight, which is 0; set kl_weight, for example to 0.01"
            refuse("train.objective.penalties.kl_target", self.kl_target, cure)
        for name, counts_with in KL_COUNTS_WITH.items():
            # A KL weight of 0 is accepted, because a sweep over KL weights may include 0.
            value, given = getattr(self, name), self.model_fields_set
            if value != type(self).model_fields[name].default and counts_with not in given:
                cure = f"this key has no effect without {counts_with}; remove it, or set {counts_with}, too"
                refuse(f"train.objective.penalties.{name}", value, cure)
        return self

    @property
    def uses_reference(self) -> bool:
        """True if the objective needs the log-probs of the reference policy."""
        return self.kl_weight > 0 and self.kl_to == "reference"


class ObjectiveBase(Section):
    """Options that all kinds of objectives share."""

    advantage: Advantage = Advantage()
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum", "constant"] = Field(
        "token-mean",
        description="how token losses are averaged. token-mean: over all tokens; otherwise over responses, where a "
        "response counts with the mean of its token losses (sequence-mean), their sum (sequence-sum), or their sum "
        "divided by engine.max_new_tokens (constant)",
    )
    observation_weight: float = Field(
        0.0,
        ge=0,
        le=HEAVIEST,
        description="weight of the observation loss, the cross-entropy of the tokens that the environment adds (ECHO); "
        "if 0, there is no such loss",
    )


class PartsObjective(ObjectiveBase):
    """A named preset of an objective (loss function), of which the recipe may change single parts."""

    kind: PresetName = Field(
        "grpo", description="name of a preset objective; a recipe may change single parts of the preset"
    )
    ratio: Ratio = Ratio()
    surrogate: Surrogate = Clip()
    correction: Correction = Correction()
    penalties: Penalties = Penalties()

    @model_validator(mode="wrap")
    @classmethod
    def _with_kinds(cls, tree: Any, made: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in the parts of the preset that the recipe leaves out, without marking them as set by the user."""
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
                "the surrogate's ratio is already to the behaviour policy, so this correction would correct "
                'samples twice; set ratio.to = "proximal", or correction.weigh = false with outside = "mask"'
            )
            refuse("train.objective.correction.outside", self.correction.outside, cure)
        return self

    @property
    def trains_tokens(self) -> bool:
        """True if each token can have an advantage of its own. A clipped ratio of the whole response gives all tokens
        of the response the same gradient.
        """
        return self.ratio.level == "token" or not isinstance(self.surrogate, Clip | BinaryTv)

    @property
    def ratio_counts(self) -> bool:
        """True if the surrogate loss depends on a ratio."""
        return not isinstance(self.surrogate, PolicyGradient) or self.surrogate.weighs


class ImportObjective(ObjectiveBase, Imported):
    """Options of a user-defined objective (loss function)."""

    kind: Literal["import"] = Field("import", description="your own objective: a class that derives from Objective")


ObjectiveConfig = Annotated[PartsObjective | ImportObjective, Field(discriminator="kind")]


def _merge_parts(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the recipe's parts of an objective into the preset's parts, key by key. If a part of the recipe has another
    `kind` than the preset's part, it replaces that part as a whole.
    """
    found = dict(preset)
    for name, value in given.items():
        own = found.get(name)
        if isinstance(own, Mapping) and isinstance(value, Mapping) and value.get("kind") in (None, own.get("kind")):
            value = {**own, **value}
        found[name] = value
    return found


NO_STATES = ("trl", "timed")  # kinds of environments that never name the state in which a turn acts


def find_turn_faults(objective: ObjectiveBase, environment: Section) -> Iterator[PydanticCustomError]:
    """Yield the errors of an objective that does not fit the environment, for example because it needs turns that the
    environment does not have."""
    kind, credit = str(getattr(environment, "kind", "")), objective.advantage.credit
    cure = 'episodes of environment.kind = "single-turn" have one turn; remove the key, or choose another environment'
    for key, value, plain in (
        ("advantage.credit", credit, "episode"),
        ("observation_weight", objective.observation_weight, 0.0),
    ):
        if kind == "single-turn" and value != plain:
            yield refusal(f"train.objective.{key}", value, cure)
    if credit == "state" and kind in NO_STATES:
        cure = f'environment.kind = "{kind}" names no states of turns; set credit = "turn"'
        yield refusal("train.objective.advantage.credit", credit, cure)
    for key, given, none in (
        ("rewards", getattr(environment, "rewards", "episode"), "episode"),
        ("unparsable_penalty", getattr(environment, "unparsable_penalty", 0.0), 0.0),
    ):
        if given != none and isinstance(objective, PartsObjective) and not objective.trains_tokens:
            cure = (
                "the objective trains all tokens of a response alike, and cannot use the reward of a turn; remove the "
                'key, or set train.objective.ratio.level = "token"'
            )
            yield refusal(f"environment.{key}", given, cure)


# If a config has all these keys, as the config of a recorded run does, a key without an effect is accepted.
RECORDED = frozenset({"ratio", "surrogate", "correction", "advantage", "aggregation", "penalties"})


def _check_counts(correction: Correction, given: Any) -> None:
    """Reject a key of the correction that is set but has no effect."""
    if not isinstance(given, Mapping):
        return
    for name, kinds in COUNTS_WITH.items():
        value, default = getattr(correction, name), Correction.model_fields[name].default
        if name in given and value != default and correction.outside not in kinds:
            wanted = " or ".join(f'"{kind}"' for kind in kinds)
            here = f'this key has no effect while outside = "{correction.outside}"'
            refuse(f"train.objective.correction.{name}", value, f"{here}; remove it, or set outside to {wanted}")
    judged_alone = correction.outside == "mask" and not correction.weigh and correction.judge is not None
    if judged_alone and given.get("level", "token") != "token":
        cure = (
            "this key has no effect, because the mask decides at the level `judge`, and kept tokens are not "
            "weighted; remove it, or set weigh = true"
        )
        refuse("train.objective.correction.level", correction.level, cure)


def _check_ratio(objective: PartsObjective, given: Any) -> None:
    """Reject a key of the section `ratio` that is set but has no effect.

    If the surrogate loss uses no ratio, only the key `to` can have an effect, in a correction.
    """
    if objective.ratio_counts or not isinstance(given, Mapping):
        return
    for name in ("level",) if objective.correction.outside in ("clamp", "mask") else ("level", "to"):
        if name in given and (value := getattr(objective.ratio, name)) != Ratio.model_fields[name].default:
            cure = "this key has no effect while the surrogate has no ratio; remove it, or set "
            refuse(
                f"train.objective.ratio.{name}",
                value,
                cure + "train.objective.surrogate.positive, for example to [0, 2]",
            )


def check_new(objective: ObjectiveConfig) -> None:
    """Reject settings of an objective that would train something else than their names suggest; call `check_new` only
    for new runs.
    """
    if isinstance(objective, PartsObjective):
        _check_length(objective)
        _check_credit(objective)
        _check_k1(objective.penalties)


def _check_length(objective: PartsObjective) -> None:
    """Reject a ratio of whole responses (level `sequence`) unless the loss of a response is the mean over its
    tokens.

    With a sum over tokens, the ratio of the whole response would be applied once for each token.
    """
    once = objective.ratio.level != "sequence" or objective.aggregation == "sequence-mean"
    if once or not isinstance(objective.surrogate, Clip | BinaryTv):
        return
    cure = (
        f'with aggregation = "{objective.aggregation}" a response would count by the square of its '
        'length; set aggregation = "sequence-mean", or level = "geometric"'
    )
    refuse("train.objective.ratio.level", "sequence", cure)


def _check_credit(objective: PartsObjective) -> None:
    """Reject advantages of single turns (the key `credit`) with a clipped ratio of whole responses, because such a
    ratio gives all tokens of a response the same gradient.
    """
    part, level = objective.advantage, objective.ratio.level
    if part.credit != "episode" and not objective.trains_tokens:
        cure = f'with ratio.level = "{level}" all turns of a response are trained alike; set ratio.level = "token"'
        refuse("train.objective.advantage.credit", part.credit, cure)


def _check_k1(penalties: Penalties) -> None:
    """Reject the KL estimator k1 in the loss, because its gradient does not depend on the policy to which the trained
    policy is compared.
    """
    if penalties.kl == "k1" and penalties.kl_in == "loss" and penalties.kl_weight:
        cure = (
            'the gradient of k1 in the loss does not depend on the other policy; choose "k2" or "k3", or '
            'set kl_in = "reward" with a reference'
        )
        refuse("train.objective.penalties.kl", "k1", cure)


def _set_only(section: Section, given: Mapping[str, Any]) -> None:
    """Mark only the given fields of a section and its subsections as set by the user."""
    section.__pydantic_fields_set__.intersection_update(given)
    for name, value in given.items():
        part = getattr(section, name, None)
        if isinstance(part, Section) and isinstance(value, Mapping):
            _set_only(part, value)


# older config key -> (part of the objective, key), so that runs with older keys can be replayed
EARLIER = {
    "clip_low": ("surrogate", "low"),
    "clip_high": ("surrogate", "high"),
    "dual_clip": ("surrogate", "dual"),
    "weight_cap": ("correction", "high"),
}


def _as_parts(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Move the values of older config keys into the parts of an objective. An older key with the value null counts as
    not set."""
    found = {name: value for name, value in tree.items() if name not in EARLIER and value is not None}
    for name in EARLIER.keys() & tree.keys():
        part, key = EARLIER[name]
        if isinstance(now := found.get(part, {}), Mapping):
            found[part] = {key: tree[name], **now}
    return found
