"""The config tree of a run: what a person may set, typed and frozen, with defaults that were run.

One recipe is one `RunConfig`. The same tree is the parameter form of the Prefect deployment, what MLflow
records, and what the run's log keeps. Imports pydantic only, so that checking a recipe needs no torch, Ray or vLLM.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from rollflow.tasks.names import RecipeName


class Section(BaseModel):
    """A frozen part of the config tree; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# --- the policy that is trained -----------------------------------------------------------------------------


class ColdStart(Section):
    """Build a small Llama policy and supervise it on demonstrations until it is weak but real."""

    hidden_size: int = Field(128, gt=0, description="width; a multiple of heads")
    layers: int = Field(2, gt=0)
    heads: int = Field(4, gt=0)
    context: int = Field(256, gt=0, description="longest prompt plus response, in tokens")
    vocabulary: int = Field(320, ge=260, description="size of the byte-level BPE vocabulary")
    learning_rate: float = Field(2e-3, gt=0)
    batch: int = Field(48, gt=0, description="demonstrations per supervised step")
    target_accuracy: float = Field(0.3, gt=0, lt=1, description="stop supervising at this held-out accuracy")
    max_steps: int = Field(2000, gt=0)
    evaluate_every: int = Field(10, gt=0)


class PolicyConfig(Section):
    """Where the policy comes from: a Hugging Face folder (or hub name), or a cold start."""

    path: str | None = Field(None, description="a local Hugging Face folder or a hub name")
    cold_start: ColdStart | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"


# --- what is asked, and how an answer is judged -------------------------------------------------------------


class ReasoningGymPrompts(Section):
    """Procedural prompts of one reasoning-gym family."""

    kind: Literal["reasoning-gym"] = "reasoning-gym"
    family: str = "chain_sum"
    share: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="weight of this source's groups among all that are trained on"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="the family's own options, e.g. {min_digits = 2}")
    chat: bool = Field(False, description="put the question through the tokenizer's chat template")
    system: str | None = Field(None, description="system message, with chat = true")

    @property
    def domain(self) -> str:
        """What its prompts are called in counts."""
        return self.family


class JsonlPrompts(Section):
    """Your own prompts: one JSON object a line with `question` and `answer`."""

    kind: Literal["jsonl"] = "jsonl"
    path: str
    share: float = Field(1.0, gt=0, allow_inf_nan=False)
    held_out: float = Field(0.1, ge=0, lt=1, description="part of the lines kept for evaluation")
    chat: bool = False
    system: str | None = None

    @property
    def domain(self) -> str:
        """What its prompts are called in counts."""
        return Path(self.path).stem


PromptConfig = Annotated[ReasoningGymPrompts | JsonlPrompts, Field(discriminator="kind")]


class RewardConfig(Section):
    """Verifiers, run in worker processes that are killed at their deadline."""

    kind: Literal["reasoning-gym", "exact"] = Field(
        "reasoning-gym", description="the family's own scorer, or equality with the reference answer"
    )
    answer: Literal["all", "tag"] = Field(
        "all", description="judge the whole response, or what stands in <answer></answer>"
    )
    workers: int = Field(1, gt=0)
    deadline_seconds: float = Field(
        10.0, gt=0, description="longest time for one response; later it scores 0 with a reason"
    )


# --- generation ---------------------------------------------------------------------------------------------


class EngineBase(Section):
    """What all engines share."""

    replicas: int = Field(1, gt=0)
    slots: int = Field(256, gt=0, description="requests one engine runs at a time")
    max_new_tokens: int = Field(64, gt=0)
    temperature: float = Field(1.0, gt=0)
    in_flight: Literal["continue", "restart"] = Field(
        "continue", description="what running requests do at a weight update"
    )
    probe_tolerance: float = Field(
        0.01, gt=0, description="largest log-prob difference (nats) between engine and learner"
    )


class VllmEngineConfig(EngineBase):
    kind: Literal["vllm"] = "vllm"
    kv_cache_bytes: int | None = Field(None, gt=0, description="default: 256 MiB on a CPU, vLLM's own choice on a GPU")
    prefix_caching: bool = Field(
        True, description="compute what responses to one prompt share once; never across versions"
    )
    tensor_parallel: int = Field(1, gt=0)
    threads: int = Field(1, gt=0, description="CPU threads of one engine")


class TransformersEngineConfig(EngineBase):
    kind: Literal["transformers"] = "transformers"
    threads: int = Field(1, gt=0)


class TimedEngineConfig(EngineBase):
    """A latency model in place of a language model: for tests and simulation."""

    kind: Literal["timed"] = "timed"
    median_tokens: float = Field(16.0, gt=0, description="median response length")
    sigma: float = Field(1.0, ge=0, description="spread of the lognormal response length")
    correlation: float = Field(0.0, ge=0, le=1, description="of the lengths of responses to one prompt")
    lengths: tuple[int, ...] = Field((), description="measured response lengths, in place of the lognormal ones")
    seconds_per_token: float = Field(0.002, ge=0)
    prefill_seconds: float = Field(0.0, ge=0)
    update_seconds: float = Field(0.05, ge=0)
    slowing: float = Field(0.0, ge=0, description="c: with n requests running each decodes at 1/(1 + c(n - 1) + r t)")
    reading: float = Field(0.0, ge=0, description="r: of each of the t tokens in the KV cache")
    kv_tokens: int | None = Field(None, gt=0, description="tokens the KV cache holds; default: no limit but slots")
    prompt_tokens: int = Field(0, ge=0, description="of each prompt, in the KV cache")
    prefill_seconds_per_token: float = Field(0.0, ge=0, description="that the whole engine is held up; with prefixes")
    speed: float = Field(1.0, gt=0, description="of this engine, relative to the seconds above")
    grain: int = Field(1, gt=0, description="real tokens that one simulated token, as in max_new_tokens, stands for")


EngineConfig = Annotated[VllmEngineConfig | TransformersEngineConfig | TimedEngineConfig, Field(discriminator="kind")]


Routing = Literal["least-work", "prefix", "group"]


class FilterConfig(Section):
    """Dynamic sampling: groups that carry no signal are counted, and replaced by groups of other prompts."""

    min_mean: float | None = Field(None, description="groups with a mean reward at or below it are not trained on")
    max_mean: float | None = Field(None, description="groups with a mean reward at or above it are not trained on")
    min_std: float | None = Field(None, ge=0, description="nor those whose rewards have this deviation or less")
    most: int = Field(1000, gt=0, description="groups filtered in a row before the run fails: nothing would be left")


class RolloutConfig(Section):
    """How generation runs ahead and what it waits for."""

    mode: Literal["queue", "batch"] = Field(
        "queue", description="batch: whole batches, rewards after the last response; the baseline, slower"
    )
    routing: Routing = Field(
        "least-work",
        description="which engine a request goes to: the one that would be done first; prefix: one that runs the same "
        "prompt; group: a prompt holds the slots of one engine until its slowest response ends, a baseline",
    )
    depth: int | None = Field(
        None, gt=0, description="most prompt groups in flight; default: as many as keep all slots of the engines busy"
    )
    ahead: float | None = Field(
        None,
        ge=0,
        description="batches that generation may run ahead of training, at most async_ratio (the default): how much is "
        "in flight, where async_ratio is how old it may get",
    )
    extra_groups: int = Field(
        0, ge=0, description="groups started beyond a batch; those left over are issued again, later"
    )
    extra_responses: int = Field(0, ge=0, description="responses started beyond group_size; the first to end are kept")
    tail_batching: bool = Field(
        False, description="collect prompts that were too slow, and give them a batch of their own that waits for all"
    )
    tail_after: int | None = Field(
        None,
        gt=0,
        description="times a prompt is left behind before a batch waits for it: one of its own with tail_batching "
        "(default: 1), else the next one (default: 3)",
    )
    at_bound: Literal["drop", "wait"] | None = Field(
        None,
        description="what a batch does with a group that would be too old for the next one: wait for it (the default), "
        "or drop it, to be issued again (the default with extra_groups or tail_batching)",
    )
    order: Literal["finished", "started"] = Field(
        "finished", description="which groups make a batch: the first to finish, or the first that were started"
    )
    staleness: Literal["started", "oldest-token"] = Field(
        "started", description="a response's age counts from its request, or from its oldest token"
    )
    filter: FilterConfig | None = None
    attempts: int = Field(3, gt=0, description="times a request that failed is sent before the run fails")
    patience_seconds: float = Field(600.0, gt=0, description="longest wait without any progress before the stage fails")

    @property
    def bound(self) -> Literal["drop", "wait"]:
        """`at_bound`, as it is when a person does not say: nothing is dropped unless something is to be left over."""
        return self.at_bound or ("drop" if self.extra_groups or self.tail_batching else "wait")

    @property
    def leaves_behind(self) -> bool:
        """Whether a group that runs may be given up and issued again: then its draws have to be kept."""
        return self.bound == "drop" or self.tail_batching


# --- training -----------------------------------------------------------------------------------------------


class GrpoObjective(Section):
    """PPO clipping of pi/mu on the recorded behaviour log-probs, with group advantages."""

    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float | None = Field(None, gt=1, description="largest ratio a negative advantage counts with")


class DecoupledPpoObjective(Section):
    """Decoupled PPO: clip pi/pi_p, weight by sg(pi_p/mu) capped at `weight_cap`."""

    kind: Literal["decoupled-ppo"] = "decoupled-ppo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    weight_cap: float = Field(5.0, gt=0)


ObjectiveConfig = Annotated[GrpoObjective | DecoupledPpoObjective, Field(discriminator="kind")]


class TrainConfig(Section):
    """The learner."""

    learner: Literal["torch"] = "torch"
    objective: ObjectiveConfig = GrpoObjective()
    baseline: Literal["group", "none"] = Field("group", description="what is subtracted from the reward")
    normalize: bool = Field(True, description="divide advantages by the group's standard deviation")
    negative_weight: float = Field(
        1.0, ge=0, description="weight of negative advantages; below 1 steadies stale batches"
    )
    aggregation: Literal["token-mean", "sequence-mean"] = "token-mean"
    learning_rate: float = Field(5e-4, gt=0)
    warmup_versions: int = Field(5, ge=0)
    schedule: Literal["constant", "linear"] = Field(
        "constant", description="linear decays to a tenth at the last version"
    )
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = Field(1.0, gt=0)
    minibatches: int = Field(1, gt=0, description="optimizer steps per version; each sees its part of the groups")
    micro_tokens: int = Field(16384, gt=0, description="padded tokens in one forward and backward pass")
    threads: int = Field(1, gt=0, description="CPU threads of the learner")


# --- the run ------------------------------------------------------------------------------------------------


class EvaluationConfig(Section):
    """Evaluation on held-out prompts: before, during and after."""

    every: int = Field(25, ge=0, description="versions between evaluations; 0 evaluates only before and after")
    prompts: int = Field(256, gt=0, description="held-out prompts, never trained on")
    samples: int = Field(1, gt=0, description="responses per held-out prompt")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    engine: Literal["auto", "lent", "own", "transformers"] = Field(
        "auto",
        description="where, beside training: on one of the run's engines, lent for as long as it takes; on one of "
        "its own, like [engine]; or on one of its own of kind transformers, on a CPU. auto: lent where engine.replicas "
        "is 2 or more, else transformers in place of vLLM on a CPU, else own",
    )


class StoreConfig(Section):
    """Where runs are stored, and for how long a version keeps its weights and learner state."""

    uri: str | None = Field(None, description="s3://bucket/prefix or a folder; default: a folder in the run home")
    keep_last: int = Field(
        5, ge=2, description="newest versions that keep their objects; async_ratio + 1 where that is more"
    )
    keep_every: int = Field(10, gt=0, description="every n-th version keeps its objects, too")
    state_every: int = Field(
        1, gt=0, description="every n-th version stores the learner's state; recovery replays the batches in between"
    )
    keep_prompts_bytes: int = Field(
        2**28, ge=0, description="largest file of prompts that is kept with the run; of a larger one its hash"
    )
    patience_seconds: float = Field(
        3600.0, gt=0, description="longest wait for a store that does not answer; the run goes on when it does"
    )
    shard_bytes: int = Field(2**28, gt=0, description="largest weight file; shards are hashed and moved in parallel")


class RecoveryConfig(Section):
    """How long the supervisors go on restarting what died or hangs."""

    restarts: int = Field(5, ge=0, description="restarts of one role within the window before the run fails")
    window_seconds: float = Field(600.0, gt=0)
    backoff_seconds: float = Field(
        1.0, ge=0, description="pause before the second restart within the window; doubled for each one after it"
    )
    answer_seconds: float = Field(30.0, gt=0, description="an actor that is silent for so long is stuck")


class ClusterConfig(Section):
    """The Ray cluster."""

    address: str = Field("auto", description="host:port of a Ray head; auto: a cluster of its own on this machine")


class TrackingConfig(Section):
    """MLflow."""

    uri: str | None = Field(None, description="an MLflow tracking URI; default: SQLite in the run home")
    experiment: str = "rollflow"


SUMS = {
    "min_terms": 3,
    "max_terms": 3,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
}


class RunConfig(Section):
    """A run: what one recipe says."""

    name: RecipeName = "run"
    seed: int = Field(0, ge=0)
    versions: int = Field(100, gt=0, description="policy versions to train")
    async_ratio: float = Field(2.0, ge=0, description="alpha: the largest staleness that may be trained on")
    groups: int = Field(32, gt=0, description="prompt groups in a train step")
    group_size: int = Field(8, gt=0, description="responses to one prompt")
    policy: PolicyConfig = PolicyConfig(cold_start=ColdStart())
    prompts: tuple[PromptConfig, ...] = (ReasoningGymPrompts(family="basic_arithmetic", options=SUMS),)
    engine: EngineConfig = VllmEngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    store: StoreConfig = StoreConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """What only the whole tree can tell."""
        if self.train.baseline == "group" and self.group_size < 2:
            refuse("group_size", self.group_size, 'a group baseline needs 2 or more; or set train.baseline = "none"')
        if self.groups % self.train.minibatches:
            cure = f"it must divide groups = {self.groups}; choose a divisor"
            refuse("train.minibatches", self.train.minibatches, cure)
        if (self.policy.path is None) == (self.policy.cold_start is None):
            refuse("policy.path", self.policy.path, "give either policy.path or [policy.cold_start], one of the two")
        rollout = self.rollout
        if rollout.extra_groups and (rollout.bound == "wait" or rollout.order == "started"):
            cure = 'extra groups are left behind: set rollout.at_bound = "drop" and rollout.order = "finished"'
            refuse("rollout.extra_groups", rollout.extra_groups, cure)
        if rollout.ahead is not None and rollout.ahead > self.async_ratio:
            cure = f"it must not be above async_ratio = {self.async_ratio:g}: what runs further ahead gets too old"
            refuse("rollout.ahead", rollout.ahead, cure)
        if self.evaluation.engine == "lent" and self.engine.replicas < 2:
            cure = f'engine.replicas = {self.engine.replicas}, and one engine has to go on: set "own" or "transformers"'
            refuse("evaluation.engine", self.evaluation.engine, cure)
        place = urlsplit(self.tracking.uri or "")
        if place.password:
            cure = "a run keeps its config: take the password out, and set MLFLOW_TRACKING_PASSWORD (or PGPASSWORD)"
            refuse("tracking.uri", f"{place.scheme}://...@{place.hostname}", cure)
        if not self.prompts:
            refuse("prompts", [], "give at least one [[prompts]] source")
        cold = self.policy.cold_start
        if cold and cold.hidden_size % cold.heads:
            refuse("policy.cold_start.heads", cold.heads, f"it must divide hidden_size = {cold.hidden_size}")
        if cold and cold.context <= self.engine.max_new_tokens:
            cure = f"it must be below policy.cold_start.context = {cold.context}"
            refuse("engine.max_new_tokens", self.engine.max_new_tokens, cure)
        return self

    def evaluates(self, version: int) -> bool:
        """Whether `version` is to be evaluated."""
        every = self.evaluation.every
        return version in (0, self.versions) or bool(every and version % every == 0)

    def evaluation_engine(self, *, on_cpu: bool) -> EngineConfig | None:
        """The engine that evaluates, on a machine with or without GPUs; None: one of the run's own is lent."""
        choice, engine = self.evaluation.engine, self.engine
        if choice == "lent" or (choice == "auto" and engine.replicas > 1):
            return None
        if choice == "transformers" or (choice == "auto" and on_cpu and isinstance(engine, VllmEngineConfig)):
            shared = {name: getattr(engine, name) for name in EngineBase.model_fields}
            return TransformersEngineConfig(**shared, threads=getattr(engine, "threads", 1))
        return engine

    @property
    def capacity(self) -> int:
        """Batches the channel may hold: what alpha lets generation run ahead."""
        return math.floor(self.async_ratio) + 1

    @property
    def shares(self) -> dict[str, float]:
        """Domain -> its share of the groups that are trained on, which the scheduler holds."""
        total = sum(source.share for source in self.prompts)
        shares: dict[str, float] = {}
        for source in self.prompts:
            shares[source.domain] = shares.get(source.domain, 0.0) + source.share / total
        return shares

    def sha256(self) -> str:
        """Hash of the canonical JSON of the tree."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def refuse(key: str, value: object, cure: str) -> None:
    """What a validator raises: the key, its value, and what to do."""
    raise PydanticCustomError("rollflow", "{key} = {value}: {cure}", {"key": key, "value": repr(value), "cure": cure})
