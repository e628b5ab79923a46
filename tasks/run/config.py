"""The config tree of a run: all settings that a user may choose, typed and frozen, with tested defaults.

One recipe is one `RunConfig`. Each folder defines its own part of the tree (`engines/config.py`, `rollout/config.py`,
...). The same tree is the parameter form of the Prefect deployment, and MLflow and the run's log record the tree. This
module imports only pydantic, so that checking a recipe needs no torch, Ray or vLLM.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rollflow.tasks.engines.config import EngineBase, EngineConfig, TransformersEngineConfig, VllmEngineConfig
from rollflow.tasks.environments.config import EnvironmentConfig, SingleTurnEnvironment
from rollflow.tasks.learners.config import DeepSpeedTrain, TorchTrain, TrainConfig
from rollflow.tasks.policies.config import ColdStart, PolicyConfig
from rollflow.tasks.prompts.config import PromptConfig, SortingPrompts
from rollflow.tasks.rollout.config import EvaluationConfig, RolloutConfig
from rollflow.tasks.runtime.names import RecipeName
from rollflow.tasks.runtime.renamed_keys import RECIPE, Renames
from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Section, check_storable, refusal, refuse, refuse_all
from rollflow.tasks.scorers.config import ExactReward, ReasoningGymReward, RewardConfig

Refusals = Iterator[PydanticCustomError]


class StoreConfig(Section):
    """Where runs are stored, and how long a version keeps its weights and learner state."""

    fixed: ClassVar[Mapping[str, str]] = {
        "uri": "the run is stored there",
        "keep_every": "versions were kept or pruned by it",
        "state_every": "versions were published with the learner's state, or without it, by it",
        "keep_prompts_bytes": "files of prompts were kept, or not, when the run began",
    }

    uri: str | None = Field(
        None, description="s3://bucket/prefix, or a folder relative to the recipe; default: a folder in the run home"
    )
    keep_last: int = Field(5, ge=2, description="newest versions whose objects are kept; at least async_ratio + 1")
    keep_every: int = Field(10, gt=0, description="every n-th version is kept, too")
    state_every: int = Field(
        1,
        gt=0,
        description="every n-th version stores the learner's state; recovery trains the versions since then again",
    )
    keep_prompts_bytes: int = Field(
        2**28,
        ge=0,
        description="largest file of prompts that is stored with the run, in bytes; of a larger file only the hash is "
        "stored",
    )
    patience_seconds: float = Field(
        3600.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="seconds to wait for a store that does not answer; the run goes on when it answers",
    )
    shard_bytes: int = Field(
        2**28, gt=0, description="largest size of a weight file, in bytes; files are hashed and moved in parallel"
    )


class RecoveryConfig(Section):
    """How often and how quickly the supervisors restart what died or is stuck."""

    restarts: int = Field(5, ge=0, description="restarts of one role within window_seconds before the run fails")
    window_seconds: float = Field(600.0, gt=0, le=LONGEST_SECONDS, description="seconds for which a restart counts")
    backoff_seconds: float = Field(
        1.0, ge=0, description="seconds before the second restart within the window; doubled before each further one"
    )
    answer_seconds: float = Field(
        30.0, gt=0, le=LONGEST_SECONDS, description="seconds without an answer after which an actor counts as stuck"
    )


class RolePlacement(Section):
    """The nodes that may run the actors of a role."""

    labels: dict[str, str] = Field(
        default_factory=dict, description='Ray labels that a node must have, e.g. {"ray.io/market-type" = "spot"}'
    )
    resource: str | None = Field(
        None, min_length=1, description="custom Ray resource that a node must have; each actor takes 0.001 of it"
    )


class PlacementConfig(Section):
    """Where a run's actors are placed on the cluster, and what they reserve there besides their GPUs."""

    strategy: Literal["spread", "pack"] = Field(
        "spread",
        description="spread: engines on the nodes in turn; pack: as Ray packs, a node is half full before the next "
        "one is used",
    )
    reserve_cpus: bool = Field(
        False, description="reserve CPUs for the threads of the actors; otherwise other work may use these CPUs"
    )
    engine: RolePlacement = RolePlacement()
    learner: RolePlacement = RolePlacement()
    scheduler: RolePlacement = RolePlacement()
    reward: RolePlacement = RolePlacement()


SECRET_NAME = re.compile(r"SECRET|PASSWORD|PASSWD|CREDENTIAL|PRIVATE_KEY|API_KEY|AUTH_STRING|(^|_)(TOKEN|KEY)$", re.I)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ClusterConfig(Section):
    """The Ray cluster that the run uses."""

    address: str = Field("auto", description="host:port of a Ray head; auto: a private cluster on this machine")
    lease_seconds: float = Field(
        600.0,
        ge=0,
        le=LONGEST_SECONDS,
        description="seconds without a supervisor after which the run's actors end and free their GPUs; 0: never",
    )
    placement: PlacementConfig = PlacementConfig()
    env: dict[str, str] = Field(
        default_factory=dict, description='environment variables of the actors, e.g. {NCCL_SOCKET_IFNAME = "eth0"}'
    )
    runtime_env: dict[str, Any] = Field(
        default_factory=dict, description="Ray's runtime_env of the actors, without env_vars"
    )

    @model_validator(mode="after")
    def _usable_environment(self) -> Self:
        for name, value in self.env.items():
            if not VARIABLE.fullmatch(name):
                refuse(f"cluster.env.{name}", "...", "it is no name of a variable; correct it")
            if "\0" in value:
                refuse(f"cluster.env.{name}", value, "a variable cannot hold a NUL character; remove it")
            if SECRET_NAME.search(name):
                refuse(f"cluster.env.{name}", "...", "a run keeps its config: set a secret on the nodes themselves")
        if "env_vars" in self.runtime_env:
            refuse("cluster.runtime_env.env_vars", "...", "give them as cluster.env")
        if any(map(has_password, _list_texts(self.runtime_env))):
            cure = "an address in it has a password, and a run keeps its config: set the secret on the nodes"
            refuse("cluster.runtime_env", "...", cure)
        return self


def _list_texts(tree: object) -> Iterator[str]:
    """Yield every string in a tree."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        yield from (text for value in tree.values() for text in _list_texts(value))
    elif isinstance(tree, Sequence):
        yield from (text for value in tree for text in _list_texts(value))


def has_password(text: str) -> bool:
    """Return whether a text contains an address with a password."""
    return bool(re.search(r"://[^/@\s]*:[^/@\s]+@", text))


class TrackingConfig(Section):
    """The MLflow server and the run's place there."""

    fixed: ClassVar[Mapping[str, str]] = {"study": "the run's page in MLflow was created below it"}

    uri: str | None = Field(
        None, description="MLflow tracking URI; a file is relative to the recipe; default: SQLite in the run home"
    )
    experiment: str | None = Field(
        None, min_length=1, description="name of the MLflow experiment; default: the recipe's name"
    )
    study: str | None = Field(
        None,
        pattern=r"^[\w.:/ -]+$",
        description="name of the MLflow run that is the parent of all runs of a study; created if missing",
    )
    spans: str | None = Field(
        None,
        pattern=r"^https?://[\w.:\[\]-]+(/[\w./-]*)?$",
        description="an OpenTelemetry collector that gets spans from each prompt to its policy version, by OTLP over "
        'HTTP, such as "http://127.0.0.1:4318"; default: no spans',
    )
    spans_share: float = Field(1.0, ge=0, le=1, description="share of the prompts that `spans` gets")


def _read_kind(source: object) -> object:
    """Return the kind of a section, given as a model or as a tree."""
    return source.get("kind") if isinstance(source, Mapping) else getattr(source, "kind", None)


class RunConfig(Section):
    """The config of a run: what one recipe sets."""

    fixed: ClassVar[Mapping[str, str]] = {
        "name": "the run is named after it",
        "seed": "the prompts and draws of earlier versions follow from it",
        "policy": "version 0 was made from it",
        "prompts": "the log names prompts by their places in these sources",
    }
    renames: ClassVar[Renames] = RECIPE

    name: RecipeName = Field(
        "run", description="name of the recipe; the id of a run is this name and the time of its start"
    )
    seed: int = Field(0, ge=0, description="seed of all random draws: prompts, sampling, initial weights")
    versions: int = Field(100, gt=0, description="number of policy versions to train")
    async_ratio: float = Field(
        2.0, ge=0, le=1e9, description="alpha: the largest staleness of a trained trajectory, in policy versions"
    )
    groups: int = Field(32, gt=0, description="prompt groups in a batch; each batch trains one version")
    group_size: int = Field(8, gt=0, description="responses to each prompt")
    policy: PolicyConfig = PolicyConfig(cold_start=ColdStart())
    prompts: tuple[PromptConfig, ...] = (SortingPrompts(),)
    engine: EngineConfig = VllmEngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = SingleTurnEnvironment()
    reward: RewardConfig = ExactReward()
    train: TrainConfig = TorchTrain()
    evaluation: EvaluationConfig = EvaluationConfig()
    store: StoreConfig = StoreConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _storable(cls, tree: Any) -> Any:
        check_storable(tree)
        return tree

    @model_validator(mode="before")
    @classmethod
    def _with_fitting_reward(cls, tree: Any) -> Any:
        """Choose the scorer of reasoning-gym for prompts of reasoning-gym if the recipe names no verifier."""
        if not isinstance(tree, Mapping) or not isinstance(sources := tree.get("prompts", ()), Sequence):
            return tree
        reward = tree.get("reward", {})
        families = any(_read_kind(source) == "reasoning-gym" for source in sources)
        if families and isinstance(reward, Mapping) and "kind" not in reward:
            return {**tree, "reward": {"kind": "reasoning-gym", **reward}}
        return tree

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Check the rules that concern several sections, and report all violations together."""
        rules = self._batches, self._policy, self._rollout, self._places, self._judged, self._trainable
        refuse_all(refused for rule in rules for refused in rule())
        return self

    def _batches(self) -> Refusals:
        baseline = self.train.objective.advantage.baseline
        if baseline in ("group", "leave-one-out") and self.group_size < 2:
            both = 'baseline and scale of train.objective.advantage to "none"'
            cure = f'the baseline "{baseline}" needs 2 or more; or set {both}'
            yield refusal("group_size", self.group_size, cure)
        if self.groups % self.train.minibatches:
            cure = f"it must divide groups = {self.groups}; choose a divisor"
            yield refusal("train.minibatches", self.train.minibatches, cure)
        if not self.prompts:
            yield refusal("prompts", [], "give at least one [[prompts]] source")

    def _policy(self) -> Refusals:
        cold = self.policy.cold_start
        if (self.policy.path is None) == (cold is None):
            yield refusal(
                "policy.path", self.policy.path, "give either policy.path or [policy.cold_start], one of the two"
            )
        if cold and cold.hidden_size % cold.heads:
            yield refusal("policy.cold_start.heads", cold.heads, f"it must divide hidden_size = {cold.hidden_size}")
        if cold and cold.context <= self.engine.max_new_tokens:
            cure = f"it must be below policy.cold_start.context = {cold.context}"
            yield refusal("engine.max_new_tokens", self.engine.max_new_tokens, cure)

    def _rollout(self) -> Refusals:
        rollout = self.rollout
        if rollout.redundant_groups and (rollout.bound == "wait" or rollout.batch_order == "started"):
            cure = 'redundant groups are given up: set rollout.on_stale = "drop" and rollout.batch_order = "finished"'
            yield refusal("rollout.redundant_groups", rollout.redundant_groups, cure)
        if rollout.max_batches_ahead is not None and rollout.max_batches_ahead > self.async_ratio:
            cure = f"it must not be above async_ratio = {self.async_ratio:g}: what runs further ahead gets too old"
            yield refusal("rollout.max_batches_ahead", rollout.max_batches_ahead, cure)

    def _places(self) -> Refusals:
        """Check the engine for evaluations and the tracking server."""
        if self.evaluation.engine == "lent" and self.engine.replicas < 2:
            cure = f'engine.replicas = {self.engine.replicas}, and one engine has to go on: set "own" or "transformers"'
            yield refusal("evaluation.engine", self.evaluation.engine, cure)
        place = urlsplit(self.tracking.uri or "")
        if place.password:
            cure = "a run keeps its config: take the password out, and set MLFLOW_TRACKING_PASSWORD (or PGPASSWORD)"
            yield refusal("tracking.uri", f"{place.scheme}://...@{place.hostname}", cure)

    def _judged(self) -> Refusals:
        """Check that the verifier can score the responses to every source, instead of always returning 0."""
        kinds = {source.kind for source in self.prompts}
        if isinstance(self.reward, ReasoningGymReward):
            for kind, rest in (("column-sums", ', reward.answer = "tag"'), ("sorting", "")):
                if kind in kinds:
                    cure = f'prompts of kind "{kind}" are of no family; set reward.kind = "exact"{rest}'
                    yield refusal("reward.kind", self.reward.kind, cure)
        if isinstance(self.reward, ExactReward) and self.reward.answer == "all" and "column-sums" in kinds:
            cure = 'answers to "column-sums" are steps that end in a tag; set reward.answer = "tag"'
            yield refusal("reward.answer", self.reward.answer, cure)

    def _trainable(self) -> Refusals:
        """Check the parameter type: DeepSpeed has one type for all parameters, and a critic's head is in float32."""
        short = self.policy.dtype != "float32" and self.train.objective.advantage.baseline == "critic"
        if short and isinstance(self.train, DeepSpeedTrain):
            cure = 'with a critic train.kind = "deepspeed" takes float32 only; choose that, or kind = "torch"'
            yield refusal("policy.dtype", self.policy.dtype, cure)

    def evaluates(self, version: int) -> bool:
        """Return whether `version` is to be evaluated."""
        every = self.evaluation.every
        return version in (0, self.versions) or bool(every and version % every == 0)

    def evaluation_engine(self, *, on_cpu: bool) -> EngineConfig | None:
        """Return the separate engine for evaluations; None if evaluations borrow one of the run's engines."""
        choice, engine = self.evaluation.engine, self.engine
        if choice == "lent" or (choice == "auto" and engine.replicas > 1):
            return None
        if choice == "transformers" or (choice == "auto" and on_cpu and isinstance(engine, VllmEngineConfig)):
            shared = {name: getattr(engine, name) for name in EngineBase.model_fields}
            return TransformersEngineConfig(**shared, threads=getattr(engine, "threads", 1))
        return engine

    @property
    def probe_tolerance(self) -> float:
        """Nats by which an engine's log-probs may differ from the learner's.

        In bfloat16 a logit of 16 is rounded by up to 0.06, and engine and learner round in different orders. The
        log-probs of correct engines differed from the learner's by up to 0.5 nats on single tokens. The log-probs of
        engines whose weights were not loaded differed by more than one nat.
        """
        chosen = self.engine.probe_tolerance
        return chosen if chosen is not None else 1.0 if self.policy.dtype == "bfloat16" else 0.01

    @property
    def capacity(self) -> int:
        """Number of batches that the channel may hold: the number that alpha lets generation run ahead."""
        return math.floor(self.async_ratio) + 1

    @property
    def shares(self) -> dict[str, float]:
        """Map of each domain to its share of the trained groups, which the scheduler maintains."""
        total = sum(source.share for source in self.prompts)
        shares: dict[str, float] = {}
        for source in self.prompts:
            shares[source.domain] = shares.get(source.domain, 0.0) + source.share / total
        return shares

    def sha256(self) -> str:
        """Hash the canonical JSON of the tree."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
