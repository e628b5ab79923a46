"""One run, one file: the typed, frozen config tree, and how a recipe becomes one.

The same tree is the parameter form of the Prefect deployment, what MLflow records, and what `run.json` keeps.
Imports pydantic only. Every refusal is one sentence with the key, the value and the cure.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from rollflow.storage.errors import ConfigError
from rollflow.tasks.settings import (
    ColdStart,
    EngineConfig,
    PolicyConfig,
    PromptConfig,
    ReasoningGymPrompts,
    RewardConfig,
    RolloutConfig,
    Section,
    TrainConfig,
    VllmEngineConfig,
)


class EvaluationConfig(Section):
    """Evaluation on held-out prompts: before, during and after."""

    every: int = Field(25, ge=0, description="versions between evaluations; 0 evaluates only before and after")
    prompts: int = Field(256, gt=0, description="held-out prompts, never trained on")
    samples: int = Field(1, gt=0, description="responses per held-out prompt")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")


class StoreConfig(Section):
    """Where runs are stored, and for how long a version keeps its weights and learner state."""

    uri: str | None = Field(None, description="s3://bucket/prefix or a folder; default: a folder in the run home")
    keep_last: int = Field(5, ge=2, description="newest versions that keep their objects")
    keep_every: int = Field(10, gt=0, description="every n-th version keeps its objects, too")


class ClusterConfig(Section):
    """The Ray cluster."""

    address: str | None = Field(None, description='"auto" or host:port; default: a cluster of its own on this machine')


class TrackingConfig(Section):
    """MLflow."""

    uri: str | None = Field(None, description="an MLflow tracking URI; default: SQLite in the run home")
    experiment: str = "rollflow"


class RunConfig(Section):
    """A run."""

    name: str = Field("run", min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0)
    versions: int = Field(100, gt=0, description="policy versions to train")
    async_ratio: float = Field(2.0, ge=0, description="alpha: the largest staleness that may be trained on")
    groups: int = Field(32, gt=0, description="prompt groups in a train step")
    group_size: int = Field(8, gt=0, description="responses to one prompt")
    policy: PolicyConfig = PolicyConfig(cold_start=ColdStart())
    prompts: tuple[PromptConfig, ...] = (ReasoningGymPrompts(),)
    engine: EngineConfig = VllmEngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    store: StoreConfig = StoreConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """What only the whole tree can tell."""
        if self.train.baseline == "group" and self.group_size < 2:
            _refuse("group_size", self.group_size, 'a group baseline needs 2 or more; or set train.baseline = "none"')
        if self.groups % self.train.minibatches:
            cure = f"it must divide groups = {self.groups}; choose a divisor"
            _refuse("train.minibatches", self.train.minibatches, cure)
        if (self.policy.path is None) == (self.policy.cold_start is None):
            _refuse("policy.path", self.policy.path, "give either policy.path or [policy.cold_start], one of the two")
        if not self.prompts:
            _refuse("prompts", [], "give at least one [[prompts]] source")
        cold = self.policy.cold_start
        if cold and cold.hidden_size % cold.heads:
            _refuse("policy.cold_start.heads", cold.heads, f"it must divide hidden_size = {cold.hidden_size}")
        if cold and cold.context <= self.engine.max_new_tokens:
            cure = f"it must be below policy.cold_start.context = {cold.context}"
            _refuse("engine.max_new_tokens", self.engine.max_new_tokens, cure)
        return self

    @property
    def capacity(self) -> int:
        """Batches the channel may hold: what alpha lets generation run ahead."""
        return math.floor(self.async_ratio) + 1

    def sha256(self) -> str:
        """Hash of the canonical JSON of the tree."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _refuse(key: str, value: object, cure: str) -> None:
    raise PydanticCustomError("rollflow", "{key} = {value}: {cure}", {"key": key, "value": repr(value), "cure": cure})


def load_recipe(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a recipe, apply `key.path=value` overrides, check it.

    Raises:
        ConfigError: with one sentence for the first thing a person must change.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"recipe {str(path)!r} cannot be read ({error.strerror}); give the path of a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {str(path)!r} is not valid TOML: {error}; correct that line") from None
    for override in overrides:
        _override(tree, override)
    return parse(tree)


def parse(tree: Mapping[str, Any]) -> RunConfig:
    """The typed tree, or `ConfigError`."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(sentence(error.errors()[0])) from None


def _override(tree: dict[str, Any], override: str) -> None:
    """Apply one `key.path=value`; the value is TOML, or a bare string where it is none."""
    key, sep, text = override.partition("=")
    if not sep or not key:
        raise ConfigError(f"--set {override!r} is not of the form key=value, e.g. --set train.learning_rate=1e-4")
    *parents, last = key.strip().split(".")
    node: Any = tree
    for position, name in enumerate(parents):
        node = node.setdefault(name, {}) if isinstance(node, dict) else _item(node, name, key)
        if not isinstance(node, (dict, list)):
            raise ConfigError(f"--set {key}: {'.'.join(parents[: position + 1])} is a value, not a section")
    value = _toml_value(text.strip())
    if isinstance(node, list):
        raise ConfigError(f"--set {key}: give a position and a key, e.g. --set {'.'.join(parents)}.0.{last}={text}")
    if last == "kind" and node.get("kind") != value:
        _change_kind(node, parents)
    node[last] = value


def _change_kind(node: dict[str, Any], parents: list[str]) -> None:
    """A section that changes its kind keeps only the keys all engines share: the others belong to the old kind."""
    from rollflow.tasks.settings import EngineBase

    if parents == ["engine"]:
        for name in [n for n in node if n not in EngineBase.model_fields]:
            del node[name]


def _item(node: list[Any], name: str, key: str) -> Any:
    if not name.isdigit() or int(name) >= len(node):
        raise ConfigError(f"--set {key}: {name!r} is not a position in a list of {len(node)}")
    return node[int(name)]


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def sentence(error: ErrorDetails) -> str:
    """One pydantic error as one sentence: the key, the value, the cure."""
    if error["type"] == "rollflow":
        return error["msg"]
    unions = {"vllm", "transformers", "timed", "reasoning-gym", "jsonl", "grpo", "decoupled-ppo"}
    key = ".".join(str(part) for part in error["loc"] if part not in unions)
    if error["type"] == "extra_forbidden":
        return f"{key} = {error['input']!r}: there is no such key{_nearest(key)}"
    message = error["msg"]
    return f"{key} = {error['input']!r}: {message[0].lower()}{message[1:]}"


def _nearest(key: str) -> str:
    """A hint towards the key that was probably meant."""
    import difflib

    known = sorted(set(_keys(RunConfig)))
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "; remove it, or see the README for the list of keys"


def _keys(section: type[Section], prefix: str = "") -> Iterable[str]:
    """All dotted keys below a section, with those of every choice of a union."""
    from typing import get_args

    for name, info in section.model_fields.items():
        yield prefix + name
        stack = [info.annotation]
        while stack:
            kind = stack.pop()
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from _keys(kind, f"{prefix}{name}.")
            else:
                stack.extend(get_args(kind))
