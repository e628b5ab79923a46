"""The `[train]` section of the configuration, with one class for each kind of learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from rollflow.tasks.objectives.config import ObjectiveConfig, PartsObjective
from rollflow.tasks.runtime.sections import Section, refuse, with_kinds

STORED = "the learner's stored state depends on this key"


class CriticConfig(Section):
    """Options of the critic, a model that estimates the expected reward at each token. A critic is used only if
    `train.objective.advantage.baseline` is "critic".
    """

    fixed: ClassVar[Mapping[str, str]] = {"model": STORED}

    model: Literal["own", "head"] = Field(
        "own",
        description="architecture of the critic. own: the critic is a second copy of the policy with its own weights; "
        "head: the critic is one linear layer on the policy's hidden states",
    )
    learning_rate: float = Field(
        1e-3,
        gt=0,
        description="learning rate of the critic's AdamW optimizer; the warm-up and the schedule are the same as "
        "for the policy",
    )
    value_clip: float = Field(
        0.2,
        gt=0,
        description="clip range of the critic's loss: largest difference between a clipped value and the value that "
        "the critic estimated before the policy version's first optimizer step",
    )


class ReferenceConfig(Section):
    """Options of the reference policy, a frozen copy of the policy that a KL penalty compares with the trained policy.
    A reference policy is used only if a KL penalty needs it.
    """

    every: int = Field(
        0,
        ge=0,
        description="number of policy versions after which the reference policy is replaced by the newest policy "
        "version; if 0, the reference policy is always version 0",
    )


class Lora(Section):
    """Options of LoRA, which trains a small adapter beside each linear layer and keeps the policy's own weights
    fixed.
    """

    rank: int = Field(16, gt=0, description="rank of the two low-rank matrices of each LoRA adapter")
    alpha: float = Field(
        32.0, gt=0, description="alpha of LoRA: the output of an adapter is multiplied by alpha / rank"
    )
    targets: tuple[str, ...] = Field(
        (),
        description='names, or ends of names, of the linear layers that get a LoRA adapter, e.g. ["q_proj"]; if '
        "the list is empty, all linear layers of the decoder get an adapter",
    )


class TrainBase(Section):
    """Options of training that all kinds of learners share. Learners that always run in one process declare `ranks:
    Literal[1]`."""

    fixed: ClassVar[Mapping[str, str]] = {"kind": STORED, "lora": STORED, "master_dtype": STORED}

    objective: ObjectiveConfig = PartsObjective()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    lora: Lora | None = None
    learning_rate: float = Field(
        5e-4, gt=0, description="learning rate of the policy's AdamW optimizer after the warm-up"
    )
    warmup_versions: int = Field(
        5,
        ge=0,
        description="number of policy versions over which the learning rate rises linearly to learning_rate; if 0, "
        "there is no warm-up",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="course of the learning rate after the warm-up. constant: it stays at learning_rate; linear: it "
        "falls with the number of remaining policy versions, to a tenth of learning_rate; cosine: it falls along half "
        "a cosine to a tenth of learning_rate",
    )
    weight_decay: float = Field(
        0.0, ge=0, description="weight decay of the AdamW optimizer; if 0, there is no weight decay"
    )
    decayed: Literal["matrices", "all"] = Field(
        "matrices",
        description="weights to which weight_decay applies. matrices: not the biases and the weights of norms, which "
        "have one dimension; all: every weight",
    )
    betas: tuple[float, float] = Field(
        (0.9, 0.95),
        description="AdamW's two decay rates: the first for the running average of the gradient, the second for the "
        "running average of the squared gradient",
    )
    no_signal: Literal["report", "stop"] = Field(
        "report",
        description="what happens if all advantages are 0 in no_signal_versions consecutive policy versions. "
        "report: a warning is logged; stop: the run ends",
    )
    no_signal_versions: int = Field(
        3,
        gt=0,
        description="number of consecutive policy versions in which all advantages are 0, after which the action of "
        "the key no_signal is taken",
    )
    max_grad_norm: float = Field(
        1.0,
        gt=0,
        description="largest norm of the gradient; a larger gradient is scaled down to this norm",
    )
    master_dtype: Literal["float32", "policy"] = Field(
        "float32",
        description="data type of the optimizer's copy of the weights and of AdamW's moments. float32: always float32; "
        "policy: the data type of the policy (policy.dtype)",
    )
    minibatches: int = Field(
        1,
        gt=0,
        description="number of optimizer steps in which each batch is trained; each optimizer step uses a different "
        "part of the batch's prompts",
    )
    share_prefixes: Literal["all", "prompts", "none"] = Field(
        "all",
        description="leading tokens that a pass computes only once for all rows of a group. all: every token that "
        "rows share; prompts: the prompt of the group, where that saves work; none: every row is computed alone",
    )
    checkpoint_activations: bool = Field(
        False,
        description="whether the backward pass recomputes the activations of each layer instead of storing them, "
        "which saves memory and takes more time",
    )
    fused_adamw: bool = Field(
        True,
        description="whether the learner uses torch's fused AdamW, which reads the weights only once for each "
        "optimizer step",
    )
    deterministic: bool = Field(
        False,
        description="whether a GPU uses only deterministic algorithms, which give the same bits each time but are "
        "slower; a learner on a CPU with one thread is always deterministic",
    )
    attention: Literal["exact", "default"] = Field(
        "exact",
        description="implementation of attention. exact: an implementation that follows every option of the policy's "
        "config, such as a soft cap of the attention scores; default: the implementation that the library transformers "
        "chooses",
    )
    advantage_dtype: Literal["float64", "float32"] = Field(
        "float64", description="data type in which advantages are computed from rewards"
    )
    micro_tokens: int = Field(
        4096,
        gt=0,
        description="largest number of tokens, including padding, in one forward and backward pass; a batch with "
        "more tokens is split into several passes",
    )
    not_finite: Literal["stop", "skip"] = Field(
        "stop",
        description="what happens if a batch contains or produces a NaN or an infinity. stop: the run ends; skip: the "
        "batch is rejected, and training continues on a new batch of other responses to the same prompts",
    )

    threads: int = Field(1, gt=0, description="number of CPU threads of each learner process")
    ranks: int = Field(
        1,
        gt=0,
        description="number of learner processes (ranks); each process trains on a part of every batch, and on a "
        "GPU of its own",
    )
    multi_node: bool = Field(
        False,
        description="whether the learner processes (ranks) may run on several machines; each rank is then a Ray "
        "actor with its own GPU",
    )
    rank_seconds: float = Field(
        600.0,
        gt=0,
        description="number of seconds that a learner process (rank) waits for another rank; after this time the "
        "missing rank is reported, and all ranks end",
    )

    @model_validator(mode="before")
    @classmethod
    def _with_kinds(cls, tree: Any) -> Any:
        """Fill in omitted `kind` keys, and move the keys of older configurations into the parts of the objective."""
        return with_kinds(cls, _as_parts(tree) if isinstance(tree, Mapping) else tree)

    @model_validator(mode="after")
    def _critic_of_an_adapter(self) -> Self:
        if self.lora and self.objective.advantage.baseline == "critic" and self.critic.model == "own":
            refuse(
                "train.critic.model",
                "own",
                'the critic "own" is a whole model, and [train.lora] trains only adapters; choose "head"',
            )
        return self

    @model_validator(mode="after")
    def _multi_node_has_ranks(self) -> Self:
        if self.multi_node and self.ranks == 1:
            refuse(
                "train.multi_node",
                True,
                "with train.ranks = 1 there is only one process; set train.ranks to 2 or more, or multi_node = false",
            )
        return self


class TorchTrain(TrainBase):
    kind: Literal["torch"] = Field(
        "torch", description="training with torch, in which each learner process (rank) has one device"
    )
    sharded: bool = Field(
        False,
        description="whether each learner process (rank) stores only a shard of the weights, gradients and optimizer "
        "moments (torch's FSDP2); if false, each rank stores all of them",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.sharded and self.ranks == 1:
            refuse("train.ranks", 1, "sharded = true needs 2 or more ranks; choose 2 or more, or set sharded = false")
        if self.sharded and self.lora:
            cure = "sharded = true trains whole models; remove [train.lora], or set sharded = false"
            refuse("train.lora.rank", self.lora.rank, cure)
        if self.sharded and self.objective.advantage.baseline == "critic" and self.critic.model == "head":
            refuse(
                "train.critic.model",
                "head",
                'sharded = true shards the critic, too, which a head does not support; choose "own"',
            )
        return self


class DeepSpeedTrain(TrainBase):
    # In the JSON schema, DeepSpeed requires `kind`, so that a section without `kind` matches only the torch learner.
    model_config = ConfigDict(json_schema_extra={"required": ["kind"]})

    kind: Literal["deepspeed"] = Field(
        "deepspeed", description="training with DeepSpeed's ZeRO optimizers, in two or more learner processes (ranks)"
    )
    ranks: int = Field(
        2,
        gt=1,
        description="number of learner processes (ranks); each process trains on a part of every batch, and on a "
        "GPU of its own",
    )
    zero: Literal[1, 2, 3] = Field(
        2,
        description="stage of ZeRO, which decides what is sharded across the learner processes. 1: optimizer "
        "moments; 2: moments and gradients; 3: moments, gradients and weights",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="what DeepSpeed keeps in CPU memory. none: nothing; optimizer: the optimizer's moments and its "
        "copy of the weights; all (only with zero = 3): also the policy's weights",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="additional keys of DeepSpeed's config; a DeepSpeed key that rollflow sets itself is rejected",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.lora:
            refuse(
                "train.kind",
                "deepspeed",
                'DeepSpeed trains whole models; remove [train.lora], or set train.kind = "torch"',
            )
        if self.objective.advantage.baseline == "critic" and self.critic.model == "head":
            refuse(
                "train.critic.model",
                "head",
                'DeepSpeed needs an engine of its own for the critic, which a head does not have; choose "own"',
            )
        if self.master_dtype == "policy":
            refuse("train.master_dtype", "policy", 'DeepSpeed keeps its master weights in float32; choose "float32"')
        if self.offload == "all" and self.zero < 3:
            refuse(
                "train.offload",
                "all",
                'weights can be offloaded only with zero = 3; set zero = 3, or choose "optimizer"',
            )
        for name, own in OURS.items():
            outer, _, inner = name.partition(".")
            given = self.options.get(outer)
            if given is not None and (not inner or (isinstance(given, Mapping) and inner in given)):
                refuse(f"train.options.{name}", given if not inner else given[inner], f"remove this key; set {own}")
        return self


def with_ranks(train: TrainConfig, ranks: int) -> TrainConfig:
    """Return the same training config for `ranks` processes on one machine. If `ranks` is 1, the result is the config
    of the torch learner without sharding."""
    given = train.model_dump() | {"ranks": ranks, "multi_node": False}
    if ranks > 1:
        return type(train).model_validate(given)
    return TorchTrain.model_validate({name: given[name] for name in TrainBase.model_fields})


# Maps each DeepSpeed key that the learner sets to the rollflow key that determines its value.
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
    """Move the advantage keys of an older recipe or run into the section of the objective."""
    old = {name: tree[name] for name in EARLIER if name in tree}
    objective = tree.get("objective", {})
    if not old or not isinstance(objective, Mapping) or not isinstance(old.get("normalize", True), bool):
        return tree
    # In older configs, the baseline "none" also meant that advantages are not scaled.
    plain = old.get("baseline") == "none"
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
