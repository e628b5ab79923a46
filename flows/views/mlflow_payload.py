"""What MLflow is told of a run beside its points: at its beginning what it is, at its end what came of it.

All of it is read from the run's storage. Nothing here knows MLflow.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from itertools import islice
from typing import Any

from rollflow.flows.services.reachability import redact
from rollflow.flows.views.config_history import change_table, list_changes, recipe_of, shown_changes
from rollflow.flows.views.parameters import without_secrets
from rollflow.flows.views.turns import prompt_tokens
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.policies import PolicyVersion
from rollflow.storage.records import Trajectory
from rollflow.tasks.rollout.evaluation import read_evaluation
from rollflow.tasks.run.context import RunContext

PACKAGES = ("rollflow", "torch", "transformers", "vllm", "deepspeed", "ray", "prefect", "mlflow", "pyarrow", "numpy")
SAMPLES = 32  # rows of the table of samples
MODELS = 20  # newest kept versions that MLflow is told of


@dataclass(frozen=True, slots=True)
class Prompts:
    """One source of prompts; `digest` is the hash that the run was pinned to."""

    name: str
    digest: str
    source: str
    kind: str


@dataclass(frozen=True, slots=True)
class Changes:
    """The `count` changes of a run's config: a table by column, the recipe after each, the values of changed keys."""

    count: int = 0
    table: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a run is. `study` is the name of what it is a part of."""

    study: str | None = None
    texts: Mapping[str, str] = field(default_factory=dict)  # file name -> text
    prompts: Sequence[Prompts] = ()
    changes: Changes = Changes()


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version whose weights stay in the store."""

    number: int
    tags: Mapping[str, str]
    accuracy: float | None  # held out


@dataclass(frozen=True, slots=True)
class Ending:
    """What came of a run; `samples` is a table, by column."""

    version: int = 0
    when: float = 0.0  # seconds since the epoch, of its newest version: the same however often it is told
    figures: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    models: Sequence[KeptVersion] = ()
    samples: Mapping[str, Sequence[Any]] = field(default_factory=dict)


def beginning(context: RunContext) -> Beginning:
    """Of any run that is prepared."""
    texts = {"recipe.toml": recipe_of(context, 0), "environment.json": json.dumps(environment(), indent=2)}
    return Beginning(context.config.tracking.study, texts, tuple(_prompts(context)), _changes(context))


def _changes(context: RunContext) -> Changes:
    changes = list(enumerate(list_changes(context), 1))
    texts = {f"recipe-from-version-{recorded.version}.toml": recipe_of(context, which) for which, recorded in changes}
    tags = {one.key: f"{one.after} from version {one.version}" for _, each in changes for one in shown_changes(each)}
    return Changes(len(changes), change_table(context), texts, tags)


def environment() -> dict[str, str]:
    """Versions of what a run's figures depend on most."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = package_version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _prompts(context: RunContext) -> Iterator[Prompts]:
    for source, pin in zip(context.config.prompts, context.created.prompts, strict=False):
        whole = str(pin.get("sha256", ""))
        yield Prompts(source.domain, whole[:32], redact(str(pin.get("path", source.kind))), source.kind)


def ending(context: RunContext, summary: Mapping[str, Any]) -> Ending:
    """Of a run that is trained; `summary` as `summarize` made it."""
    newest = context.policies.find(context.policies.newest())
    texts = {"summary.json": json.dumps(without_secrets(summary), indent=2)}
    return Ending(newest.number, newest.at, figures(summary), texts, tuple(_kept(context)), _samples(context, newest))


def figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """The closing figures. Idle shares are of a stage's time, waste of all tokens, hours of the processors."""
    accuracy = summary["accuracy"]
    lost, used = summary["discarded_tokens"], summary["tokens"]
    found = {
        "accuracy": accuracy["after"],
        "accuracy_before": accuracy["before"],
        "seconds": summary["seconds"],
        "training_seconds": summary["training_seconds"],
        "tokens": used,
        "tokens_per_second": summary["tokens_per_second"],
        "waste": lost / (lost + used) if lost + used else 0.0,
        "length_bias": summary.get("length_bias"),
        "recoveries": sum(summary["recoveries"].values()),
        "cpu_hours": sum(summary["cpu_seconds"].values()) / 3600,
        "audit_clean": summary["audit"] == "clean",
        **{f"idle_{stage}": share for stage, share in summary["idle"].items()},
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _kept(context: RunContext) -> Iterator[KeptVersion]:
    retention, newest = context.policies.retention, context.policies.newest()
    numbers = [number for number in range(newest, -1, -1) if retention.keeps(number, newest)]
    for number in islice(numbers, MODELS):
        version, held_out = context.policies.find(number), read_evaluation(context.store, number)
        if not context.policies.has_weights(version):
            continue  # pruned before store.keep_last was raised
        tags = {
            "rollflow.version": str(number),
            "rollflow.weights": f"{redact(context.store.uri)}/{version.weights[0].path}",
            "rollflow.sha256": version.sha256,
        }
        yield KeptVersion(number, tags, held_out.accuracy if held_out else None)


def _samples(context: RunContext, version: PolicyVersion) -> dict[str, list[Any]]:
    """Of the batch that a version was trained on."""
    if version.batch_entry is None:
        return {}
    file = context.batches.committed(version.batch_entry).file
    groups = TrajectoryBatch.from_bytes(context.batches.read(file)).groups()
    told = [(group, sample) for group in groups for sample in group.trajectories][:: max(1, len(groups) // 8)]
    return {
        "version": [version.number for _ in told[:SAMPLES]],
        "domain": [group.domain for group, _ in told[:SAMPLES]],
        "prompt": [context.tokenizer.decode(prompt_tokens(one)) for _, one in told[:SAMPLES]],
        "response": [_response(context, one) for _, one in told[:SAMPLES]],
        "reward": [one.reward for _, one in told[:SAMPLES]],
        "reason": [one.reason for _, one in told[:SAMPLES]],
        "tokens": [one.response_tokens for _, one in told[:SAMPLES]],
    }


def _response(context: RunContext, one: Trajectory) -> str:
    tokens = [token for token, mask in zip(one.tokens, one.loss_mask, strict=True) if mask]
    return context.tokenizer.decode_response(tokens, context.config.reward.special_tokens)
