"""Writes the closing summary of a run, `summary.json`, to the run's storage. The summary is computed from the run's
log, its evaluations and its audit.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollflow.flows.views.no_signal import count_newest_without, count_without_signal
from rollflow.flows.views.progress import RunProgress, length_bias
from rollflow.flows.views.reward_alarms import find_flip_alarms, scan_alarms
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.policies import PolicyVersion
from rollflow.storage.run_records.environment_figures import read_environment_uses
from rollflow.storage.run_records.recoveries import RecoveryLog
from rollflow.storage.run_records.sandbox_figures import list_figures, read_sandbox_uses
from rollflow.storage.run_records.second_verdicts import read_all_counts
from rollflow.storage.run_records.usage import read_usage
from rollflow.tasks.actors.statuses import RolloutStatus
from rollflow.tasks.engines.base import DraftCounts
from rollflow.tasks.prompts.epochs import list_epochs
from rollflow.tasks.rollout.evaluation import DomainResult, Evaluation, read_evaluations, read_skipped
from rollflow.tasks.run.context import RunContext

SUMMARY = "summary.json"


def summarize(
    context: RunContext,
    report: AuditReport,
    idle: Mapping[str, float],
    rollout: RolloutStatus,
    pages: Mapping[str, str],
) -> dict[str, Any]:
    """Write the run's summary to its storage, and return the summary.

    `report` is the report of the run's audit, and `idle` has the share of time in which each stage of the run was idle.
    `rollout` is the last status of the rollout actor. `pages` has the addresses of the run's pages in Prefect and
    MLflow.
    """
    summary = {**_collect(context, report), **_measure(idle, rollout), **pages}
    context.store.put(SUMMARY, json.dumps(summary, indent=2).encode())
    return summary


def _collect(context: RunContext, report: AuditReport) -> dict[str, Any]:
    """Collect the parts of a run's summary that are computed from the run's storage."""
    progress = RunProgress(context)
    progress.advance()
    stored = read_evaluations(context.store)
    points, passes = {e.version: e.accuracy for e in stored}, {e.version: e.pass_at for e in stored if e.pass_at}
    versions, trained = max(progress.version, 0), list(context.policies.since(1))
    return {
        "run_id": context.run_id,
        "accuracy": {"before": points.get(0), "after": points.get(versions), "by_version": points},
        "pass_at": {"before": passes.get(0), "after": passes.get(versions), "by_version": passes},
        "evaluation_sets": {name: one.accuracy for name, one in stored[-1].sets.items()} if stored else {},
        **_list_measures(stored),
        "not_evaluated": {one.version: one.reason for one in read_skipped(context.store)},
        "versions": versions,
        "no_signal": count_no_signal(trained),
        "alarms": [*(alarm.sentence for alarm in scan_alarms(trained, context.config.shares)), *_list_flips(context)],
        **_list_turns(trained),
        **_list_places(context),
        "second_verdicts": {name: asdict(one) for name, one in read_all_counts(context.store).items()},
        "seconds": round(max(0.0, time.time() - context.created_at), 2),
        "training_seconds": round(progress.training_seconds, 2),
        "paused_seconds": round(progress.paused_seconds, 2),
        "tokens": progress.tokens,
        "tokens_per_second": round(progress.tokens_per_second, 1),
        "trajectories": report.trajectories,
        "staleness": {str(age): count for age, count in sorted(report.staleness.items())},
        "async_ratio": context.config.async_ratio,
        "fates": dict(report.fates),
        "domains": domain_shares(report.domains, context.config.shares, stored[-1].domains if stored else {}),
        "skipped": _list_skipped(context),
        "cpu_seconds": read_usage(context.store).totals(),
        "recoveries": dict(Counter(recovery.role for recovery in RecoveryLog(context.store).read())),
        "discarded_tokens": report.discarded_tokens,
        **({"left_out_responses": report.left_out} if report.left_out else {}),
        "length_bias": round(summary_bias(report), 4),
        "audit": "clean" if report.clean else [f"{v.kind}: {v.where}: {v.what}" for v in report.violations],
        "engine": context.config.engine.kind,
        "seed": context.config.seed,
        "storage": context.store.uri,
    }


def _list_measures(stored: Sequence[Evaluation]) -> dict[str, dict[str, dict[int, float]]]:
    """Return the measures of the environment by name and version. Return an empty mapping if the environment measures
    nothing.
    """
    names = sorted({name for one in stored for name in one.measures})
    found = {name: {one.version: one.measures[name] for one in stored if name in one.measures} for name in names}
    return {"measures": found} if found else {}


def _list_turns(trained: Sequence[PolicyVersion]) -> dict[str, dict[str, float]]:
    """Return the metrics of turns and outcomes of the newest policy version; no metrics if its episodes have a single
    turn."""
    newest = trained[-1].metrics if trained else {}
    found = {name: round(newest[name], 4) for name in sorted(newest) if name.startswith(("turn", "outcome_"))}
    return {"turns": found} if "turns" in found else {}


def _list_places(context: RunContext) -> dict[str, dict[str, dict[str, float]]]:
    """Return the counts of each kind of sandbox and of environment that the run has used."""
    sandboxes = {kind: list_figures(one) for kind, one in read_sandbox_uses(context.store).totals().items()}
    environments = read_environment_uses(context.store).totals()
    return {name: found for name, found in (("sandboxes", sandboxes), ("environments", environments)) if found}


def _list_flips(context: RunContext) -> list[str]:
    """Return a sentence for each scorer whose verdicts flipped when responses were judged again."""
    counts = read_all_counts(context.store)
    verdicts, flips = ({name: getattr(one, count) for name, one in counts.items()} for count in ("verdicts", "flips"))
    return [alarm.sentence for alarm in find_flip_alarms(verdicts, flips)]


def _list_skipped(context: RunContext) -> dict[str, dict[int, float]]:
    """List the share of its questions that each epoch skipped, for each prompt source that skips solved questions.

    The sources are listed by their prompt domain. A second source of the same domain is listed with its number.
    """
    found: dict[str, dict[int, float]] = {}
    for source in context.log.state.epochs:
        domain = context.config.prompts[source].domain
        shares = {
            epoch.number: round(len(epoch.skipped) / (epoch.asked + len(epoch.skipped)), 4)
            for epoch in list_epochs(context.log, source)
        }
        found[domain if domain not in found else f"{domain} {source}"] = shares
    return found


def count_no_signal(trained: Sequence[PolicyVersion]) -> dict[str, int]:
    """Count the policy versions without a learning signal, in the whole run and in a row at its end."""
    return {"versions": count_without_signal(trained), "newest": count_newest_without(trained)}


def summary_bias(report: AuditReport) -> float:
    """Return the length bias of a whole run: how much shorter or longer trained responses are than all generated
    ones.
    """
    gone = sum(count for fate, count in report.fates.items() if fate.startswith("discarded"))
    return length_bias(report.trained_tokens, report.fates["trained"], report.discarded_tokens, gone)


def _measure(idle: Mapping[str, float], rollout: RolloutStatus) -> dict[str, Any]:
    """Return the parts of a run's summary that only the run's processes can measure, rounded."""
    return {
        "idle": {stage: round(share, 3) for stage, share in idle.items()},
        "held_back_by_alpha": round(rollout.held, 3),
        "waited_at_the_bound": round(rollout.waited, 3),
        "dropped_tokens": round(rollout.dropped, 3),
        "prefix_cache_hits": round(rollout.prefix_hits, 3),
        **_describe_drafts(rollout.drafts),
    }


def _describe_drafts(drafts: DraftCounts) -> dict[str, Any]:
    """Return the numbers of speculative decoding, or {} if no draft was verified."""
    if not drafts.verified:
        return {}
    return {"speculation": {**asdict(drafts), "tokens_per_step": round(drafts.length, 3)}}


def read_summary(context: RunContext) -> dict[str, Any]:
    """Return the summary of a run. Return an empty mapping if the run has no summary, because it has not finished."""
    try:
        found: dict[str, Any] = json.loads(context.store.get(SUMMARY))
    except (Missing, Corrupt, ValueError):
        return {}
    return found


def domain_shares(
    trained: Mapping[str, int], shares: Mapping[str, float], held_out: Mapping[str, DomainResult]
) -> dict[str, dict[str, float]]:
    """Return for each prompt domain the number of trained groups of responses, their share of all trained groups, and
    the configured share. The domain's accuracy and reward in the evaluation `held_out` are added.
    """
    total = max(sum(trained.values()), 1)
    return {
        domain: {"groups": trained.get(domain, 0), "share": round(trained.get(domain, 0) / total, 4), "asked": asked}
        | ({"accuracy": held_out[domain].accuracy, "reward": held_out[domain].reward} if domain in held_out else {})
        for domain, asked in shares.items()
    }
