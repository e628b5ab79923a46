"""Collects what is logged to MLflow besides metrics: the description of a run at its start, and its result at its end.
The description and the result are read from the run's storage. This module does not import MLflow.
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
from rollflow.tasks.rollout.evaluation import read_evaluation
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.response_reader import ResponseReader

PACKAGES = ("rollflow", "torch", "transformers", "vllm", "deepspeed", "ray", "prefect", "mlflow", "pyarrow", "numpy")
SAMPLES = 32  # Number of rows in MLflow's table of sample responses.
MODELS = 20  # Largest number of stored policy versions that are logged to MLflow. The newest ones are logged.


@dataclass(frozen=True, slots=True)
class PromptSourceFacts:
    """A source of prompts, as MLflow's list of datasets shows it. `digest` is the hash of the prompts, which must not
    change during the run.
    """

    name: str
    digest: str
    source: str
    kind: str


@dataclass(frozen=True, slots=True)
class ConfigChanges:
    """The changes of a run's config. `table` has one column for each property of a configuration change, `texts` has
    the recipe after each change, and `keys` has the new values of changed keys.
    """

    count: int = 0
    table: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The description of a run for MLflow. `study` is the name of the study (set of compared runs) that the run belongs
    to, or None.
    """

    study: str | None = None
    texts: Mapping[str, str] = field(default_factory=dict)  # file name -> text
    prompts: Sequence[PromptSourceFacts] = ()
    changes: ConfigChanges = ConfigChanges()


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A policy version whose weights are still stored."""

    number: int
    tags: Mapping[str, str]
    accuracy: float | None  # Accuracy of the policy version on held-out prompts, or None if it was not evaluated.


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of a run for MLflow. `samples` is a table of sample responses, as a mapping from columns to values."""

    version: int = 0
    # Time of the newest policy version in seconds since the epoch. It does not change if the result is logged twice.
    when: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    models: Sequence[KeptVersion] = ()
    samples: Mapping[str, Sequence[Any]] = field(default_factory=dict)


def build_run_facts(context: RunContext) -> RunFacts:
    """Collect the description of a run for MLflow, such as its recipe and the versions of libraries."""
    texts = {"recipe.toml": recipe_of(context, 0), "environment.json": json.dumps(list_versions(), indent=2)}
    return RunFacts(context.config.tracking.study, texts, tuple(_list_prompts(context)), _list_config_changes(context))


def _list_config_changes(context: RunContext) -> ConfigChanges:
    changes = list(enumerate(list_changes(context), 1))
    texts = {f"recipe-from-version-{recorded.version}.toml": recipe_of(context, which) for which, recorded in changes}
    tags = {one.key: f"{one.after} from version {one.version}" for _, each in changes for one in shown_changes(each)}
    return ConfigChanges(len(changes), change_table(context), texts, tags)


def list_versions() -> dict[str, str]:
    """Return the versions of Python, of the platform and of the packages that affect a run's results most."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = package_version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _list_prompts(context: RunContext) -> Iterator[PromptSourceFacts]:
    for source, pin in zip(context.config.prompts, context.created.prompts, strict=False):
        whole = str(pin.get("sha256", ""))
        yield PromptSourceFacts(source.domain, whole[:32], redact(str(pin.get("path", source.kind))), source.kind)


def build_outcome(context: RunContext, summary: Mapping[str, Any]) -> RunOutcome:
    """Collect the result of a trained run for MLflow. `summary` is the run's summary, from the function `summarize`."""
    newest = context.policies.find(context.policies.newest())
    texts = {"summary.json": json.dumps(without_secrets(summary), indent=2)}
    return RunOutcome(
        newest.number,
        newest.at,
        list_figures(summary),
        texts,
        tuple(_list_kept(context)),
        _sample_responses(context, newest),
    )


def list_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that MLflow shows as the results of a run, from the run's summary. Numbers with the prefix
    `idle_` are shares of a stage's time. Numbers with the prefix `speculation_` count the drafts of speculative
    decoding. `waste` is the share of tokens that were discarded.
    """
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
        "alarms": len(summary.get("alarms", ())),
        "recoveries": sum(summary["recoveries"].values()),
        "cpu_hours": sum(summary["cpu_seconds"].values()) / 3600,
        "audit_clean": summary["audit"] == "clean",
        **{f"idle_{stage}": share for stage, share in summary["idle"].items()},
        **{f"speculation_{name}": value for name, value in summary.get("speculation", {}).items()},
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _list_kept(context: RunContext) -> Iterator[KeptVersion]:
    retention, newest = context.policies.retention, context.policies.newest()
    numbers = [number for number in range(newest, -1, -1) if retention.keeps(number, newest)]
    for number in islice(numbers, MODELS):
        version, held_out = context.policies.find(number), read_evaluation(context.store, number)
        if not context.policies.has_weights(version):
            continue  # The weights of this policy version were deleted before the user raised `store.keep_last`.
        tags = {
            "rollflow.version": str(number),
            "rollflow.weights": f"{redact(context.store.uri)}/{version.weights[0].path}",
            "rollflow.sha256": version.sha256,
        }
        yield KeptVersion(number, tags, held_out.accuracy if held_out else None)


def _sample_responses(context: RunContext, version: PolicyVersion) -> dict[str, list[Any]]:
    """Return a table of sample responses from the batch on which a policy version was trained."""
    if version.batch_entry is None:
        return {}
    file = context.batches.read_commit(version.batch_entry).file
    groups = TrajectoryBatch.from_bytes(context.batches.read(file)).groups()
    every = [(group, sample) for group in groups for sample in group.trajectories][:: max(1, len(groups) // 8)]
    rows, reader = every[:SAMPLES], ResponseReader(context)
    return {
        "version": [version.number for _ in rows],
        "domain": [group.domain for group, _ in rows],
        "prompt": [context.tokenizer.decode(prompt_tokens(sample)) for _, sample in rows],
        "response": [reader.read(group.key.prompt, sample) for group, sample in rows],
        "reward": [None if sample.left_out else sample.reward for _, sample in rows],
        "reason": [sample.reason for _, sample in rows],
        "tokens": [sample.response_tokens for _, sample in rows],
    }
