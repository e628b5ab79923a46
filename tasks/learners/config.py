"""The `[train]` section: one class for each kind of learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from rollflow.tasks.objectives.config import ObjectiveConfig, PartsObjective
from rollflow.tasks.runtime.sections import Section, refuse, with_kinds

STORED = "the learner's stored state depends on it"


class CriticConfig(Section):
    """The critic estimates future rewards; it is used if `objective.advantage.baseline` is "critic"."""

    fixed: ClassVar[Mapping[str, str]] = {"model": STORED}

    model: Literal["own", "head"] = Field(
        "own", description="own: a copy of the policy, trained beside it; head: one layer on the policy's hidden states"
    )
    learning_rate: float = Field(
        1e-3, gt=0, description="learning rate of the critic's AdamW, with the warm-up and schedule of the policy's"
    )
    value_clip: float = Field(
        0.2,
        gt=0,
        description="largest change of a value by the updates of one version, measured from before the first update",
    )


class ReferenceConfig(Section):
    """The frozen policy from which a KL penalty measures the divergence; used only if a penalty needs a reference."""

    every: int = Field(
        0,
        ge=0,
        description="versions between two updates of the reference to the newest version; 0: it stays the version "
        "that the run began with",
    )


class Lora(Section):
    """Train a small adapter beside each linear layer of the policy's decoder; the policy's weights stay fixed."""

    rank: int = Field(16, gt=0, description="rank of the adapter's matrices")
    alpha: float = Field(32.0, gt=0, description="the output of the adapter is multiplied by alpha / rank")
    targets: tuple[str, ...] = Field(
        (),
        description='layers that get an adapter, by names or ends of names, e.g. ["q_proj"]; empty: all linear layers',
    )


class TrainBase(Section):
    """Keys that all learners share."""

    fixed: ClassVar[Mapping[str, str]] = {"kind": STORED, "lora": STORED, "master_dtype": STORED}

    objective: ObjectiveConfig = PartsObjective()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    lora: Lora | None = None
    learning_rate: float = Field(5e-4, gt=0, description="learning rate of AdamW after the warm-up")
    warmup_versions: int = Field(5, ge=0, description="versions over which the learning rate rises to learning_rate")
    schedule: Literal["constant", "linear"] = Field(
        "constant",
        description="learning rate after the warm-up; linear: in proportion to the versions left, but at least a tenth",
    )
    weight_decay: float = Field(0.0, ge=0, description="weight decay of AdamW")
    betas: tuple[float, float] = Field(
        (0.9, 0.95), description="decay rates of AdamW's averages of the gradient and of its square"
    )
    no_signal: Literal["report", "stop"] = Field(
        "report", description="what to do if all advantages are 0 in no_signal_versions consecutive versions"
    )
    no_signal_versions: int = Field(
        3, gt=0, description="consecutive versions without a nonzero advantage after which no_signal applies"
    )
    max_grad_norm: float = Field(
        1.0, gt=0, description="largest norm of the gradient; a larger gradient is scaled down to it"
    )
    master_dtype: Literal["float32", "policy"] = Field(
        "float32",
        description="data type of the weights that the optimizer updates, and of its moments; policy: that of "
        "policy.dtype",
    )
    minibatches: int = Field(
        1, gt=0, description="optimizer steps in each version; each uses a part of the batch's groups"
    )
    share_prompts: bool = Field(
        True,
        description="compute a prompt once for the responses of its group, where that saves work",
    )
    checkpoint_activations: bool = Field(
        False,
        description="recompute each layer in the backward pass instead of storing its activations, which saves memory",
    )
    fused_adamw: bool = Field(True, description="use torch's fused AdamW, which reads the weights once")
    deterministic: bool = Field(
        False,
        description="on a GPU, use only algorithms that give the same bits each time, which are slower; one CPU "
        "thread always does",
    )
    attention: Literal["exact", "default"] = Field(
        "exact",
        description="implementation of attention. exact: one that computes everything in the policy's config, such as "
        "a soft cap of the scores; default: the one that transformers chooses",
    )
    advantage_dtype: Literal["float64", "float32"] = Field(
        "float64", description="data type in which advantages are computed from rewards"
    )
    micro_tokens: int = Field(4096, gt=0, description="padded tokens in one forward and backward pass")
    not_finite: Literal["stop", "skip"] = Field(
        "stop",
        description="what to do if a batch contains or produces a NaN or an infinity. stop: the run ends; skip: the "
        "batch is quarantined, and the version is trained on another batch, with other responses to the "
        "same prompts",
    )

    @model_validator(mode="before")
    @classmethod
    def _with_kinds(cls, tree: Any) -> Any:
        """Apply `with_kinds`; move keys of older configs, from before objectives had parts, into the objective."""
        return with_kinds(cls, _as_parts(tree) if isinstance(tree, Mapping) else tree)

    @model_validator(mode="after")
    def _critic_of_an_adapter(self) -> Self:
        if self.lora and self.objective.advantage.baseline == "critic" and self.critic.model == "own":
            refuse("train.critic.model", "own", 'it trains a whole model beside [train.lora]; choose "head"')
        return self


class RankedTrain(TrainBase):
    """Keys that learners of several processes share."""

    threads: int = Field(1, gt=0, description="CPU threads of each of the learner's processes")
    ranks: int = Field(
        1, gt=0, description="processes that train together, each on a part of the batch and with its own GPU"
    )
    multi_node: bool = Field(
        False, description="allow ranks on several machines; each rank is then a Ray actor with its own GPU"
    )
    rank_seconds: float = Field(
        600.0,
        gt=0,
        description="seconds that a rank waits for another one; then the missing rank is reported, and all ranks end",
    )

    @model_validator(mode="after")
    def _multi_node_has_ranks(self) -> Self:
        if self.multi_node and self.ranks == 1:
            refuse("train.multi_node", True, "with train.ranks = 1 there is one process; choose more, or false")
        return self


class TorchTrain(RankedTrain):
    kind: Literal["torch"] = Field("torch", description="torch, on one device per rank")
    sharded: bool = Field(
        False,
        description="each rank holds a shard of the weights, gradients and moments instead of all of them (FSDP2)",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.sharded and self.ranks == 1:
            refuse("train.ranks", 1, "with sharded = true there are two or more; choose that, or sharded = false")
        if self.sharded and self.lora:
            cure = "with sharded = true whole models are trained; take [train.lora] away, or set sharded = false"
            refuse("train.lora.rank", self.lora.rank, cure)
        if self.sharded and self.objective.advantage.baseline == "critic" and self.critic.model == "head":
            refuse("train.critic.model", "head", 'with sharded = true a critic is in parts, too; choose "own"')
        return self


class DeepSpeedTrain(RankedTrain):
    # In the JSON schema, `kind` is required for DeepSpeed: a form without `kind` must match the torch section only.
    model_config = ConfigDict(json_schema_extra={"required": ["kind"]})

    kind: Literal["deepspeed"] = Field("deepspeed", description="DeepSpeed's ZeRO optimizers, over several ranks")
    ranks: int = Field(
        2, gt=1, description="processes that train together, each on a part of the batch and with its own GPU"
    )
    zero: Literal[1, 2, 3] = Field(
        2, description="what is sharded over the ranks: moments (1), gradients too (2), weights too (3)"
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="what is kept in CPU memory: masters and moments (optimizer); with zero = 3 weights, too (all)",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="more keys of DeepSpeed's config; keys that this section sets are refused"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.lora:
            refuse("train.kind", "deepspeed", 'it trains whole models; take [train.lora] away, or choose "torch"')
        if self.objective.advantage.baseline == "critic" and self.critic.model == "head":
            refuse("train.critic.model", "head", 'with kind = "deepspeed" a critic has an engine; choose "own"')
        if self.master_dtype == "policy":
            refuse("train.master_dtype", "policy", 'DeepSpeed keeps float32; choose "float32"')
        if self.offload == "all" and self.zero < 3:
            refuse("train.offload", "all", 'weights are in parts only with zero = 3; choose that, or "optimizer"')
        for name, own in OURS.items():
            outer, _, inner = name.partition(".")
            given = self.options.get(outer)
            if given is not None and (not inner or (isinstance(given, Mapping) and inner in given)):
                refuse(f"train.options.{name}", given if not inner else given[inner], f"take it away; set {own}")
        return self


def with_ranks(train: TorchTrain | DeepSpeedTrain, ranks: int) -> TorchTrain | DeepSpeedTrain:
    """Return the config of the same training by `ranks` processes of one machine; for one rank, unsharded torch."""
    given = train.model_dump() | {"ranks": ranks, "multi_node": False}
    if ranks > 1:
        return type(train).model_validate(given)
    return TorchTrain.model_validate({name: given[name] for name in RankedTrain.model_fields})


# Keys of DeepSpeed's config that the learner sets, and the rollflow keys that set them.
OURS = {
    "train_batch_size": "train.ranks",
    "train_micro_batch_size_per_gpu": "train.micro_tokens",
    "gradient_accumulation_steps": "train.micro_tokens",
    "gradient_clipping": "train.max_grad_norm",
    "optimizer": "train.learning_rate, train.betas and train.weight_decay",
    "scheduler": "train.schedule",
    "bf16": "policy.dtype",
    "fp16": "policy.dtype",
    "data_types": "train.master_dtype",
    "zero_optimization.stage": "train.zero",
    "zero_optimization.offload_optimizer": "train.offload",
    "zero_optimization.offload_param": "train.offload",
}

EARLIER = ("baseline", "normalize", "negative_weight", "aggregation")


def _as_parts(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the config tree of an older run or recipe, whose advantage keys applied to every objective."""
    old = {name: tree[name] for name in EARLIER if name in tree}
    objective = tree.get("objective", {})
    if not old or not isinstance(objective, Mapping) or not isinstance(old.get("normalize", True), bool):
        return tree
    plain = old.get("baseline") == "none"  # the older "none" also left rewards unscaled
    advantage = {"baseline": old["baseline"]} if "baseline" in old else {}
    if plain or old.get("normalize") is False:
        advantage["scale"] = "none"
    if "negative_weight" in old and not plain:
        advantage["negative_weight"] = old["negative_weight"]
    given = objective.get("advantage", {})
    if isinstance(given, Mapping):
        objective = {**objective, "advantage": {**advantage, **given}}
    moved = {"aggregation": old["aggregation"]} if "aggregation" in old else {}
    rest = {name: value for name, value in tree.items() if name not in EARLIER}
    return {**rest, "objective": {**moved, **objective}}


TrainConfig = Annotated[TorchTrain | DeepSpeedTrain, Field(discriminator="kind")]
