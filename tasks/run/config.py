"""Defines the config of a run: all settings that a user may choose, with their types and defaults.

One recipe (the TOML file of a run) is parsed into one `RunConfig`. Each folder of `tasks` defines its own part of the
config tree (`engines/config.py`, `rollout/config.py`, ...). This module imports only pydantic, so that a config is
checked fast.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rollflow.tasks.engines.config import EngineBase, EngineConfig, TransformersEngineConfig, VllmEngineConfig
from rollflow.tasks.environments.config import EnvironmentConfig, SingleTurnEnvironment, split_environments
from rollflow.tasks.learners.config import DeepSpeedTrain, TorchTrain, TrainConfig
from rollflow.tasks.objectives.config import find_turn_faults
from rollflow.tasks.policies.config import ColdStart, PolicyConfig
from rollflow.tasks.prompts.config import FileBase, PromptConfig, SortingPrompts, find_set_faults
from rollflow.tasks.prompts.games.config import find_game_faults
from rollflow.tasks.rollout.config import EvaluationConfig, RolloutConfig
from rollflow.tasks.run.cluster_config import ClusterConfig
from rollflow.tasks.runtime.names import RecipeName
from rollflow.tasks.runtime.renamed_keys import RECIPE, Renames
from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Section, check_storable, refusal, refuse_all
from rollflow.tasks.runtime.store_config import StoreConfig
from rollflow.tasks.scorers.base_config import find_judging_faults
from rollflow.tasks.scorers.config import ExactReward, ReasoningGymReward, RewardConfig, list_remote, name_section

Refusals = Iterator[PydanticCustomError]


class RecoveryConfig(Section):
    """How often, and after what delay, processes of a run that crashed or are stuck are restarted."""

    restarts: int = Field(
        5,
        ge=0,
        description="the run fails if one role, e.g. the learner, needs more restarts than this within window_seconds",
    )
    window_seconds: float = Field(
        600.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="length of the window, in seconds, in which restarts count; older restarts of a role do not count",
    )
    backoff_seconds: float = Field(
        1.0,
        ge=0,
        description="delay before the second restart of a role within window_seconds, in seconds; the delay doubles "
        "with each further restart",
    )
    answer_seconds: float = Field(
        30.0, gt=0, le=LONGEST_SECONDS, description="seconds without an answer after which a Ray actor is restarted"
    )


class TrackingConfig(Section):
    """The MLflow server that shows a run, and the OpenTelemetry collector that receives the run's spans."""

    fixed: ClassVar[Mapping[str, str]] = {"study": "the run's page in MLflow was created below this study"}

    uri: str | None = Field(
        None,
        description="URI of the MLflow tracking store; a file path is relative to the recipe file; default: a "
        "SQLite database in the run home",
    )
    experiment: str | None = Field(
        None, min_length=1, description="name of the run's MLflow experiment; default: the value of the key name"
    )
    study: str | None = Field(
        None,
        pattern=r"^[\w.:/ -]+$",
        description="name of the parent MLflow run, under which MLflow groups all runs of one study; the parent is "
        "created if it does not exist",
    )
    spans: str | None = Field(
        None,
        pattern=r"^https?://[\w.:\[\]-]+(/[\w./-]*)?$",
        description='address of an OpenTelemetry collector (OTLP over HTTP), e.g. "http://127.0.0.1:4318", that '
        "receives spans of the path from prompt to train step; default: no spans are sent",
    )
    spans_share: float = Field(
        1.0, ge=0, le=1, description="share of the prompts for which trace spans are sent; 0: none, 1: all prompts"
    )


def _read_key(section: object, key: str) -> object:
    """Return the value of a key of a config section, which is a pydantic model or a mapping."""
    return section.get(key) if isinstance(section, Mapping) else getattr(section, key, None)


class RunConfig(Section):
    """The config of a run, as read from the recipe (the run's TOML file)."""

    fixed: ClassVar[Mapping[str, str]] = {
        "name": "the run's id contains this name",
        "seed": "the prompts and random draws of earlier versions follow from this key",
        "policy": "version 0 was made from this policy",
        "prompts": "the log names prompts by their positions in these sources",
    }
    renames: ClassVar[Renames] = RECIPE

    name: RecipeName = Field(
        "run", description="name of the recipe; the id of a run is this name and the time at which the run started"
    )
    seed: int = Field(0, ge=0, description="seed of all random draws: prompts, sampling and initial weights")
    versions: int = Field(100, gt=0, description="number of policy versions to train, one per train step")
    async_ratio: float = Field(
        2.0,
        ge=0,
        le=1e9,
        description="alpha: the largest staleness of a response that is trained on, in policy versions; 0: "
        "synchronous training, in which generation and training alternate",
    )
    groups: int = Field(
        32, gt=0, description="number of prompts in a training batch; all responses to one prompt form a group"
    )
    group_size: int = Field(8, gt=0, description="number of responses that are generated and trained on per prompt")
    policy: PolicyConfig = PolicyConfig(cold_start=ColdStart())
    prompts: tuple[PromptConfig, ...] = (SortingPrompts(),)
    engine: EngineConfig = VllmEngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = SingleTurnEnvironment()
    reward: RewardConfig = ExactReward()
    rewards: dict[str, RewardConfig] = Field(
        default_factory=dict, description="further scorers by name; a prompt source selects one by the key `reward`"
    )
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
        """Choose the scorer of reasoning-gym for prompts of reasoning-gym if the config names no scorer."""
        if not isinstance(tree, Mapping) or not isinstance(sources := tree.get("prompts", ()), Sequence):
            return tree
        reward = tree.get("reward", {})
        families = any(_read_key(one, "kind") == "reasoning-gym" and not _read_key(one, "reward") for one in sources)
        if families and isinstance(reward, Mapping) and "kind" not in reward:
            return {**tree, "reward": {"kind": "reasoning-gym", **reward}}
        return tree

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Check the rules that concern several sections of the config, and report all violations together."""
        rules = self._batches, self._policy, self._rollout, self._places, self._names, self._scores, self._trainable
        refuse_all(refused for rule in rules for refused in rule())
        return self

    def _batches(self) -> Refusals:
        baseline = self.train.objective.advantage.baseline
        if baseline in ("group", "leave-one-out") and self.group_size < 2:
            both = 'baseline and scale of train.objective.advantage to "none"'
            cure = f'the baseline "{baseline}" needs group_size = 2 or more; choose 2 or more, or set {both}'
            yield refusal("group_size", self.group_size, cure)
        if self.groups % self.train.minibatches:
            cure = f"minibatches must divide groups = {self.groups}; choose a divisor"
            yield refusal("train.minibatches", self.train.minibatches, cure)
        if not self.prompts:
            yield refusal("prompts", [], "give at least one [[prompts]] source")

    def _policy(self) -> Refusals:
        cold = self.policy.cold_start
        if sum(given is not None for given in (self.policy.path, self.policy.from_run, cold)) != 1:
            cure = "give exactly one of policy.path, [policy.from_run] and [policy.cold_start]"
            yield refusal("policy.path", self.policy.path, cure)
        if cold and cold.hidden_size % cold.heads:
            cure = f"heads must divide hidden_size = {cold.hidden_size}; choose a divisor"
            yield refusal("policy.cold_start.heads", cold.heads, cure)
        if cold and cold.context <= self.engine.max_new_tokens:
            cure = f"it must be below policy.cold_start.context = {cold.context}; lower it, or raise the context"
            yield refusal("engine.max_new_tokens", self.engine.max_new_tokens, cure)
        if self._is_quantized and self.policy.dtype != "bfloat16":
            cure = 'vLLM quantizes weights in bfloat16 only; set policy.dtype = "bfloat16", or remove the key'
            yield refusal("engine.quantization", getattr(self.engine, "quantization", None), cure)
        for section, scorer in list_remote(self.scorers).items() if cold else ():
            cure = "a cold start compares its responses with answers, without a judge or a reward model; set "
            yield refusal(f"{section}.kind", scorer.kind, f"{cure}policy.path to a trained policy")

    def _rollout(self) -> Refusals:
        rollout = self.rollout
        if rollout.redundant_groups and (rollout.bound == "wait" or rollout.batch_order == "started"):
            cure = (
                'redundant groups have to be dropped; set rollout.on_stale = "drop" and rollout.batch_order = '
                '"finished"'
            )
            yield refusal("rollout.redundant_groups", rollout.redundant_groups, cure)
        if rollout.admit_by == "kv" and getattr(self.engine, "kv_tokens", None) is None:
            yield refusal("rollout.admit_by", "kv", 'set engine.kv_tokens of a vLLM engine, or choose "slots"')
        if rollout.admit_by == "kv" and isinstance(self.environment, SingleTurnEnvironment):
            cure = 'the episodes of environment.kind = "single-turn" have no later turn to keep tokens for; set "slots"'
            yield refusal("rollout.admit_by", "kv", cure)
        if rollout.max_batches_ahead is not None and rollout.max_batches_ahead > self.async_ratio:
            cure = (
                f"max_batches_ahead must not be above async_ratio = {self.async_ratio:g}, because groups started "
                "further ahead become too old; lower max_batches_ahead"
            )
            yield refusal("rollout.max_batches_ahead", rollout.max_batches_ahead, cure)

    def _places(self) -> Refusals:
        """Check the settings of the evaluation engine, the reward and environment actors and the tracking server."""
        replicas = self.engine.replicas
        if self.evaluation.engine == "lent" and replicas < 2:
            cure = f'with engine.replicas = {replicas} no engine would be left to generate; set "own" or "transformers"'
            yield refusal("evaluation.engine", self.evaluation.engine, cure)
        spread = sum(scorer.worker_processes for scorer in self.scorers.values() if scorer.has_helpers)
        yield from self.cluster.reward_actors.find_idle(spread)
        kinds = split_environments(self.environment).values()
        has_processes = any(kind.has_worker_processes for kind in kinds)
        yield from self.cluster.environment_actors.find_useless(has_processes=has_processes)
        place = urlsplit(self.tracking.uri or "")
        if place.password:
            cure = (
                "the address contains a password, and a run stores its config; remove the password, and set "
                "MLFLOW_TRACKING_PASSWORD (or PGPASSWORD)"
            )
            yield refusal("tracking.uri", f"{place.scheme}://...@{place.hostname}", cure)

    def _names(self) -> Refusals:
        """Check the names of scorers, and check that every scorer named by a prompt source exists."""
        for name in self.rewards:
            if not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII):
                yield refusal("rewards", name, "the name of a scorer has letters, digits, - and _; rename the scorer")
        for which, source in enumerate(self.prompts):
            if source.reward is not None and source.reward not in self.rewards:
                yield refusal(f"prompts.{which}.reward", source.reward, self.explain_missing(source.reward))
        cold = self.policy.cold_start
        faults = *find_set_faults(self.prompts), *find_game_faults(self.prompts, self.environment, cold)
        yield from (refusal(*fault) for fault in faults)
        sections = {name_section(name): scorer for name, scorer in self.scorers.items()}
        yield from (refusal(*fault) for fault in find_judging_faults(sections, self.group_size))

    def explain_missing(self, name: str) -> str:
        """Return what the user can do about a scorer name that does not exist."""
        return f"there is no scorer of this name; add [rewards.{name}], or name one of {sorted(self.rewards)}"

    def _scores(self) -> Refusals:
        """Check that each prompt source has a scorer that can score its responses."""
        refused = dict[str, PydanticCustomError]()
        for source in self.prompts:
            for error in self._check_source(source):
                refused.setdefault(error.message(), error)
        yield from refused.values()

    def _check_source(self, source: PromptConfig) -> Refusals:
        section, reward = name_section(source.reward or ""), self.scorers.get(source.reward or "")
        rest = {"column-sums": f', {section}.answer = "tag"', "sorting": ""}.get(source.kind)
        if isinstance(reward, ReasoningGymReward) and rest is not None:
            cure = (
                f'prompts of kind "{source.kind}" belong to no reasoning-gym family; set {section}.kind = "exact"{rest}'
            )
            yield refusal(f"{section}.kind", reward.kind, cure)
        if isinstance(reward, ExactReward) and reward.answer == "all" and source.kind == "column-sums":
            cure = f'answers to "column-sums" are worked steps that end in a tag; set {section}.answer = "tag"'
            yield refusal(f"{section}.answer", reward.answer, cure)

    def _trainable(self) -> Refusals:
        """Reject credit per turn in an environment without turns. Reject a critic with DeepSpeed if the policy is not
        float32, because DeepSpeed needs one data type for all parameters, and the head of a critic is float32.
        """
        for environment in split_environments(self.environment).values():
            yield from find_turn_faults(self.train.objective, environment)
        short = self.policy.dtype != "float32" and self.train.objective.advantage.baseline == "critic"
        if short and isinstance(self.train, DeepSpeedTrain):
            cure = 'with a critic, DeepSpeed supports only float32; choose "float32", or set train.kind = "torch"'
            yield refusal("policy.dtype", self.policy.dtype, cure)

    def evaluates(self, version: int) -> bool:
        """Return whether policy version `version` is to be evaluated."""
        every = self.evaluation.every
        return version in (0, self.versions) or bool(every and version % every == 0)

    def evaluation_engine(self, *, on_cpu: bool) -> EngineConfig | None:
        """Return the config of the separate engine for evaluations, or None if evaluations borrow an engine."""
        choice, engine = self.evaluation.engine, self.engine
        if choice == "lent" or (choice == "auto" and engine.replicas > 1):
            return None
        if choice == "transformers" or (choice == "auto" and on_cpu and isinstance(engine, VllmEngineConfig)):
            shared = {name: getattr(engine, name) for name in EngineBase.model_fields}
            return TransformersEngineConfig(**shared, threads=getattr(engine, "threads", 1))
        return engine

    @property
    def _is_quantized(self) -> bool:
        return isinstance(self.engine, VllmEngineConfig) and self.engine.quantization != "none"

    @property
    def probe_tolerance(self) -> float:
        """The largest accepted difference, in nats, between the log-probs of an engine and those of the learner.

        Log-probs in bfloat16 differ by up to 0.5 nats between correct engines and the learner, because of rounding.
        Engines with outdated weights have log-probs that differ by more than one nat. Log-probs of a quantized engine
        differ by up to 0.9 nats from those of the learner (a random policy on a CPU).
        """
        chosen = self.engine.probe_tolerance
        if chosen is None and self._is_quantized:
            return 2.0
        return chosen if chosen is not None else 1.0 if self.policy.dtype == "bfloat16" else 0.01

    @property
    def capacity(self) -> int:
        """The largest number of batches between rollout and learner: `async_ratio`, rounded down, plus one."""
        return math.floor(self.async_ratio) + 1

    @property
    def scorers(self) -> dict[str, RewardConfig]:
        """The scorers that the run uses, by name; the scorer in `[reward]` has the name "".

        If the rows of a prompt file may name their scorers, all scorers in `[rewards]` are used.
        """
        used = {source.reward or "" for source in self.prompts}
        if any(isinstance(source, FileBase) and source.reward_column for source in self.prompts):
            used |= self.rewards.keys()
        return {name: reward for name, reward in {"": self.reward, **self.rewards}.items() if name in used}

    @property
    def scorer_sections(self) -> dict[str, RewardConfig]:
        """All scorers that the config defines, by the names of their sections: `reward` and `rewards.<name>`."""
        return {name_section(name): reward for name, reward in {"": self.reward, **self.rewards}.items()}

    @property
    def judges_again(self) -> bool:
        """True if a response that could not be judged is judged again instead of getting reward 0."""
        return all(reward.judge_tries > 0 for reward in self.scorers.values())

    @property
    def scorer_workers(self) -> int:
        """Total number of worker processes of the scorers that the run uses."""
        return sum(reward.worker_processes for reward in self.scorers.values())

    @property
    def accuracy_shares(self) -> dict[str, float]:
        """The weight of each prompt domain in an evaluation's accuracy; empty if all responses weigh the same."""
        return self.shares if self.evaluation.mean == "share" and len(self.shares) > 1 else {}

    @property
    def shares(self) -> dict[str, float]:
        """The share of the training data that each prompt domain should get, by domain."""
        total = sum(source.share for source in self.prompts)
        shares: dict[str, float] = {}
        for source in self.prompts:
            shares[source.domain] = shares.get(source.domain, 0.0) + source.share / total
        return shares

    def sha256(self) -> str:
        """Compute the SHA-256 hash of the config's canonical JSON."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()
