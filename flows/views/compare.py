"""Compares several runs: reads each run from its storage, and finds how the runs differ.

A chart shows runs that differ only in their seed, name or storage as one band.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rollflow.flows.views.config_history import UNSET, flat_history
from rollflow.flows.views.pauses import paused_seconds
from rollflow.flows.views.progress import RECENT
from rollflow.flows.views.reward_alarms import SHOWN_PARTS, list_parts
from rollflow.flows.views.status import read_status
from rollflow.flows.views.summary import read_summary
from rollflow.storage.deltas.chain import name_of
from rollflow.storage.policies import PolicyVersion
from rollflow.storage.run_records.usage import read_usage
from rollflow.tasks.rollout.evaluation import Evaluation, read_evaluations, safe_name
from rollflow.tasks.run.context import RunContext

Numbers = npt.NDArray[np.float64]
NO_RECIPE = ("seed", "name", "store.uri", "tracking.uri", "tracking.experiment", "tracking.study")
DOMAIN_CURVES = {"reward": "reward", "training accuracy": "accuracy", "response length": "response_length"}
HELD_OUT = "held-out accuracy of "
# Beginnings of the names of curves that belong to one prompt domain or reward part.
BY_DOMAIN = (HELD_OUT, "reward of ", "training accuracy of ", "response length of ", "part ")
# Prefix of configuration keys that say where a run is trained, which does not affect the run's results.
PLACES = "cluster."


@dataclass(frozen=True, slots=True, eq=False)
class VersionCurve:
    """The values of one metric, one for each policy version. `tokens` is the number of response tokens that the run had
    trained on at each policy version.

    `seconds` is the time from policy version 0 to each version, without pauses.
    """

    versions: Numbers
    tokens: Numbers
    seconds: Numbers
    values: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class ComparedRun:
    """A run in a comparison, with the texts and curves that the comparison shows. `result`, `cost` and `idle` (the idle
    share of each stage) are texts for users. `config` maps configuration keys to texts.
    """

    name: str
    config: Mapping[str, str]
    result: Mapping[str, str]
    cost: Mapping[str, str]
    idle: Mapping[str, str]
    curves: Mapping[str, VersionCurve]
    # Maps each policy version to the sha256 of each of its weight files, by file name.
    policies: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    @property
    def recipe(self) -> tuple[tuple[str, str], ...]:
        """The run's configuration without seed, names and addresses. The returned configuration is equal for runs that
        differ only in their seed.
        """
        own = {key: value for key, value in self.config.items() if key not in NO_RECIPE and not key.startswith(PLACES)}
        return tuple(sorted(own.items()))


def read_compared(contexts: Sequence[RunContext]) -> list[ComparedRun]:
    """Read the runs for a comparison. Each run is named by its run id, or by its address if two runs have the same run
    id.
    """
    ids = [context.run_id for context in contexts]
    return [
        _read_run(context, context.run_id if ids.count(context.run_id) == 1 else context.uri) for context in contexts
    ]


def diff_configs(runs: Sequence[ComparedRun]) -> dict[str, tuple[str, ...]]:
    """Return the configuration keys whose values differ between the runs, with the value in every run."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = {key: tuple(run.config.get(key, UNSET) for run in runs) for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def group_seeds(runs: Iterable[ComparedRun]) -> list[list[ComparedRun]]:
    """Group runs that differ only in their seed, name or storage, in the order of each group's first run."""
    groups: dict[tuple[tuple[str, str], ...], list[ComparedRun]] = {}
    for run in runs:
        groups.setdefault(run.recipe, []).append(run)
    return list(groups.values())


def describe_same_weights(runs: Sequence[ComparedRun]) -> list[str]:
    """Return a sentence for each run after the first. Each sentence names the earlier run with which the run shares the
    most policy versions with equal weights, and their number.
    """
    lines = []
    for place, run in enumerate(runs[1:], 1):
        shared = [(_count_shared(run, other), other) for other in runs[:place]]
        count, other = max(shared, key=lambda one: one[0])
        lines.append(_describe_pair(run, other, count))
    return lines


def _count_shared(run: ComparedRun, other: ComparedRun) -> int:
    """Count how many policy versions, from version 0 on, have the same weights in both runs, judged by the hashes of
    the weight files.
    """
    both = range(min(len(run.policies), len(other.policies)))
    return next((v for v in both if run.policies[v] != other.policies[v]), len(both))


def _describe_pair(run: ComparedRun, other: ComparedRun, count: int) -> str:
    names, both = f"{run.name} and {other.name}", min(len(run.policies), len(other.policies))
    if not both:
        return f"{names}: no version to compare"
    if count == both:
        return f"{names}: the same weights in versions 0 to {both - 1}, all that both have, by sha256"
    files = run.policies[count].keys() == other.policies[count].keys()
    how = "other weights" if files else "weights in other files, which hashes cannot compare,"
    return f"{names}: {f'the same weights up to version {count - 1}, ' if count else ''}{how} from version {count} on"


def _read_run(context: RunContext, name: str) -> ComparedRun:
    versions = list(context.policies.since(0))
    curves = _read_curves(context, versions)
    status, summary = read_status(context), read_summary(context)
    stages = status.stages if status else {}
    return ComparedRun(
        name,
        flat_history(context) | {f"{key}.path, its file": code[:12] for key, code in context.created.own_code.items()},
        {"version": f"{len(versions) - 1 if versions else 'none'} of {context.config.versions}", **_result_rows(curves)}
        | ({"weights, sha256": versions[-1].sha256[:12]} if versions else {})
        | {"audit": _audit_text(summary), "state": status.phase if status else "not started"},
        _cost_rows(context, versions, curves),
        {stage: f"{one.idle:.0%}" for stage, one in stages.items()},
        curves,
        {one.number: {name_of(stored): stored.sha256 for stored in one.weights} for one in versions},
    )


def _read_curves(context: RunContext, versions: Sequence[PolicyVersion]) -> dict[str, VersionCurve]:
    """Return a run's curves by name. A run without policy version 0 has no curves."""
    if not versions:
        return {}
    trained = versions[1:]
    at = np.array([one.at for one in versions])
    pauses = np.cumsum([0.0, *(paused_seconds(context, before, after) for before, after in pairwise(versions))])
    seconds = np.maximum(at - at[0] - pauses, 0.0)
    tokens = np.cumsum([0.0, *(_metric(trained, "response_tokens"))])
    numbers = np.array([float(one.number) for one in versions])
    left_out = np.array([one.metrics.get("left_out_tokens", 0.0) for one in trained])
    lost = _metric(trained, "discarded_tokens") + _metric(trained, "surplus_tokens") + left_out
    used = np.diff(tokens) - left_out
    values = {
        "reward": _metric(trained, "reward"),
        "staleness": _metric(trained, "staleness_mean"),
        "idle": _share(_metric(trained, "wait_seconds"), np.diff(seconds)),
        "waste": _share(lost, lost + used),
    }
    found = {
        name: VersionCurve(numbers[1:], tokens[1:], seconds[1:], value) for name, value in values.items() if trained
    }
    for name, metric in _list_domain_metrics(trained, context.config.shares).items():
        rows = np.array([place for place, one in enumerate(trained, 1) if metric in one.metrics])
        values_of = np.array([trained[place - 1].metrics[metric] for place in rows])
        found[name] = VersionCurve(numbers[rows], tokens[rows], seconds[rows], values_of)
    done = read_evaluations(context.store, last=versions[-1].number)
    for name, shares in _list_accuracies(done).items():
        places = np.array(list(shares), dtype=np.int64) - versions[0].number
        accuracy = np.array(list(shares.values()))
        found[name] = VersionCurve(numbers[places], tokens[places], seconds[places], accuracy)
    return found


def _list_accuracies(evaluations: Sequence[Evaluation]) -> dict[str, dict[int, float]]:
    """Return the held-out accuracy of each evaluated policy version, over all prompt domains together and in each
    domain.
    """
    found = {"accuracy": {one.version: one.accuracy for one in evaluations}}
    for one in evaluations:
        for domain, result in one.domains.items():
            found.setdefault(f"{HELD_OUT}{domain}", {})[one.version] = result.accuracy
    return {name: shares for name, shares in found.items() if shares}


def _list_domain_metrics(versions: Sequence[PolicyVersion], domains: Collection[str]) -> dict[str, str]:
    """Map the name of each curve to the name of its metric, for the metrics of prompt domains and reward parts that the
    policy versions have.
    """
    names = {
        f"{what} of {domain}": f"{metric}_{safe_name(domain)}"
        for domain in domains
        for what, metric in DOMAIN_CURVES.items()
    }
    for domain in domains:
        parts = islice(list_parts(versions, domain, domains).items(), SHOWN_PARTS)
        names |= {f"part {part} of {domain}": name for part, name in parts}
    known = {name for version in versions for name in version.metrics}
    return {name: metric for name, metric in names.items() if metric in known}


def _metric(versions: Sequence[PolicyVersion], name: str) -> Numbers:
    return np.array([one.metrics.get(name, 0.0) for one in versions], dtype=np.float64)


def _share(part: Numbers, whole: Numbers) -> Numbers:
    """Return `part / whole`, clipped to [0, 1]. Where `whole` is 0, the result is 0."""
    shares: Numbers = np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
    return np.clip(shares, 0.0, 1.0)


def _result_rows(curves: Mapping[str, VersionCurve]) -> dict[str, str]:
    found = {}
    if (accuracy := curves.get("accuracy")) is not None:
        found["held-out accuracy"] = f"{accuracy.values[0]:.3f} to {accuracy.values[-1]:.3f}"
        found["best held-out"] = (
            f"{accuracy.values.max():.3f} at version {accuracy.versions[accuracy.values.argmax()]:g}"
        )
    if (reward := curves.get("reward")) is not None:
        found[f"reward, last {RECENT}"] = f"{reward.values[-RECENT:].mean():.3f}"
        found["staleness, mean"] = f"{curves['staleness'].values.mean():.2f}"
        found["waste, mean"] = f"{curves['waste'].values.mean():.1%}"
    for name, curve in curves.items():
        if name.startswith(BY_DOMAIN):
            found[f"{name}, last {RECENT}"] = f"{curve.values[-RECENT:].mean():.3f}"
    return found


def _audit_text(summary: Mapping[str, Any]) -> str:
    found = summary.get("audit", "not at its end")
    return found if isinstance(found, str) else f"{len(found)} violations"


def _cost_rows(
    context: RunContext, versions: Sequence[PolicyVersion], curves: Mapping[str, VersionCurve]
) -> dict[str, str]:
    """Return the table rows with a run's costs. Seconds are counted from policy version 0 to the newest version,
    without pauses.
    """
    if (reward := curves.get("reward")) is None:
        return {}
    seconds, tokens = reward.seconds[-1], reward.tokens[-1]
    return {
        "training seconds": f"{seconds:,.0f}",
        "tokens trained on": f"{tokens:,.0f}",
        "tokens a second": f"{tokens / seconds:,.0f}" if seconds else "",
        "seconds a version": f"{seconds / (len(versions) - 1):.2f}",
        "CPU seconds": f"{sum(read_usage(context.store).totals().values()):,.0f}",
    }
