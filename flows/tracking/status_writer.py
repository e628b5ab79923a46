"""Writes a run's status once a second to `status.json`, and logs its metrics to MLflow. The status and the metrics are
computed from the run's log and from the status of each stage (rollout, reward and train). No decision of rollflow
depends on the status or the metrics.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Protocol
from uuid import uuid4

from prefect.runtime import flow_run

from rollflow.flows.tracking.mlflow_run import EVALUATED, MetricPoint
from rollflow.flows.tracking.tracking import Curves, Tracker, evaluation_point, version_point
from rollflow.flows.views.config_history import change_sentence, list_changes
from rollflow.flows.views.log_lines import set_log_facts
from rollflow.flows.views.no_signal import count_newest_without, describe_no_signal
from rollflow.flows.views.pauses import paused_seconds
from rollflow.flows.views.progress import KEPT, RECENT, RunProgress, system_figures
from rollflow.flows.views.reward_alarms import FlipAlarm, RewardAlarm, find_alarms, find_flip_alarms
from rollflow.flows.views.status import Phase, RunStatus, StageStatus
from rollflow.storage.errors import Unreachable
from rollflow.storage.policies import PolicyVersion
from rollflow.storage.run_records.environment_figures import read_environment_uses, store_environment_uses
from rollflow.storage.run_records.recoveries import RecoveryLog
from rollflow.storage.run_records.sandbox_figures import list_figures, read_sandbox_uses, store_sandbox_uses
from rollflow.storage.run_records.usage import CpuUsage, store_usage
from rollflow.tasks.actors.lease import STATUS
from rollflow.tasks.actors.statuses import LearnerPhase, LearnerStatus, RewardStatus, RolloutStatus
from rollflow.tasks.prompts.epochs import share_skipped
from rollflow.tasks.rollout.evaluation import Evaluation, read_evaluations
from rollflow.tasks.run.context import RunContext

TELL_SECONDS = 1.0
MESSAGES = 3  # Number of messages that the live view shows; the newest ones are shown.
# Names of the counts of adaptive time limits in `RewardStatus`.
DEADLINE_COUNTS = ("kills", "rechecked", "false_kills")
VERDICT_COUNTS = ("second_verdicts", "flips")  # Names of the counts of second verdicts in `RewardStatus`.
USAGE_SECONDS = 30.0  # Seconds between two writes of the CPU usage of a run's actors.


class LastStages(Protocol):
    """The last status of each stage (rollout, reward and train), and the CPU usage of the stages' actors."""

    @property
    def usage(self) -> CpuUsage: ...

    @property
    def rollout(self) -> RolloutStatus: ...

    @property
    def reward(self) -> RewardStatus: ...

    @property
    def learner(self) -> LearnerStatus: ...

    def statuses(self) -> Mapping[str, StageStatus]: ...


class StatusWriter:
    """Keeps `status.json` and the MLflow run of one run up to date."""

    def __init__(self, context: RunContext, stages: LastStages, tracker: Tracker) -> None:
        self.context, self.stages, self.tracker = context, stages, tracker
        self.progress = RunProgress(context)
        self.messages = [change_sentence(one) for one in list_changes(context)]
        self.failure = ""
        self.recoveries = RecoveryLog(context.store)
        self._recovered = 0  # Number of recoveries from crashes that have been logged to MLflow.
        # The wall clock is read only once for the run's age, so that a change of the clock cannot alter the age.
        self._began = time.monotonic() - max(0.0, time.time() - context.created_at)
        self._before: PolicyVersion | None = None  # The policy version that was last logged to MLflow.
        self._evaluated: dict[int, Evaluation] = {}
        self._written_at = 0.0
        self.no_signal = ""  # A sentence for the user if the newest policy versions have no learning signal, else "".
        self._hacking: list[RewardAlarm] = []  # Signs of reward hacking in the newest policy versions.
        self._flips: list[FlipAlarm] = []  # Scorers whose verdicts flip.
        self._writer, self._counted = f"actors-{uuid4().hex[:12]}", 0.0
        self.sandboxes = read_sandbox_uses(context.store)  # Counts of events in sandboxes of the whole run.
        self.environments = read_environment_uses(context.store)  # Counts of events in environments of the whole run.

    def refresh(self, phase: Phase | None = None) -> None:
        """Read the new entries of the run's log, log the metrics of new policy versions to MLflow, and write the run's
        status.
        """
        self._update_flips()
        stages = self.stages
        self.sandboxes.note_all(use for one in (stages.rollout, stages.reward, stages.learner) for use in one.sandboxes)
        self.environments.note(stages.rollout.environments)
        new = self.progress.advance()
        for place, version in enumerate(new, 1 - len(new)):
            self._update_alarms(place)
            if version.number:
                self.tracker.log_version(version.number, self._metrics_of(version), version.at)
            self._before = version
            set_log_facts(version=version.number)
        self._update_no_signal()
        for evaluation in self._new_evaluations():
            self._evaluated[evaluation.version] = evaluation
            self.tracker.log_evaluation(evaluation.version, evaluation.metrics, time.time())
        self._log_recoveries()
        if phase or time.monotonic() - self._counted > USAGE_SECONDS:
            self._counted = time.monotonic()
            store_usage(self.context.store, self._writer, self.stages.usage)
            store_sandbox_uses(self.context.store, self._writer, self.sandboxes)
            store_environment_uses(self.context.store, self._writer, self.environments)
        status = self.status(phase or self._phase())
        written = status.at_end(status.phase) if status.ended else status
        self._written_at = time.monotonic()
        self.context.store.put(STATUS, written.to_json().encode())

    def note_progress(self, phase: Phase) -> None:
        """Write the run's status, because a step of the supervising flow made progress. The status is written at most
        once a second.
        """
        if time.monotonic() - self._written_at > TELL_SECONDS:
            with contextlib.suppress(Unreachable, OSError):
                self.refresh(phase)

    def _metrics_of(self, version: PolicyVersion) -> dict[str, float]:
        """Return the metrics of a policy version. Metrics with the prefix `system/` are added unless the policy version
        is the first one that this process sees. Counts of adaptive time limits, of second verdicts, of sandboxes and of
        environments are added if there are any. The number of reward actors is added if it can exceed one.
        """
        reward, metrics = self.stages.reward, {**version.metrics, "alarms": float(len(self.alarms))}
        if reward.kills:
            metrics |= {f"reward/{name}": float(getattr(reward, name)) for name in DEADLINE_COUNTS}
        if any(reward.second_verdicts.values()):
            metrics |= {f"reward/{name}": float(sum(getattr(reward, name).values())) for name in VERDICT_COUNTS}
        if self.context.config.cluster.reward_actors.most > 1:
            metrics["reward/actors"] = float(reward.actors)
        for kind, figures in self.sandboxes.totals().items():
            metrics |= {f"sandboxes/{kind}/{name}": number for name, number in list_figures(figures).items()}
        for kind, counts in self.environments.totals().items():
            metrics |= {f"environments/{kind}/{name}": number for name, number in counts.items()}
        if self._before is None:
            return metrics
        return {**metrics, **system_figures(self._before, version, self.progress.pause_before(version))}

    def _new_evaluations(self) -> list[Evaluation]:
        """Return the held-out evaluations since the last call. The first call returns the newest evaluations and that
        of policy version 0.
        """
        if self._evaluated:
            return read_evaluations(self.context.store, max(self._evaluated))
        oldest = self.progress.version - KEPT
        if oldest <= 0:
            return read_evaluations(self.context.store)
        return [*read_evaluations(self.context.store, last=0), *read_evaluations(self.context.store, oldest)]

    def _update_no_signal(self) -> None:
        count, limit = count_newest_without(self.progress.versions), self.context.config.train.no_signal_versions
        found = describe_no_signal(self.progress.version, count) if count >= limit else ""
        if found and not self.no_signal:
            self.messages.append(found)
        elif found:
            self.messages = [found if message == self.no_signal else message for message in self.messages]
        self.no_signal = found

    def _update_alarms(self, newest: int) -> None:
        """Find the signs of reward hacking at one of the newest policy versions. `newest` counts from the end: 0 is the
        newest version, and -1 is the version before it.
        """
        versions = list(self.progress.versions)
        found = find_alarms(versions[: len(versions) + newest], self.context.config.shares)
        self._announce(found)
        self._hacking = found

    def _update_flips(self) -> None:
        """Find the scorers whose verdicts change when responses are judged again. While a newly started reward actor
        has no counts, keep the earlier result.
        """
        reward = self.stages.reward
        if reward.second_verdicts:
            found = find_flip_alarms(reward.second_verdicts, reward.flips)
            self._announce(found)
            self._flips = found

    def _announce(self, found: Sequence[RewardAlarm | FlipAlarm]) -> None:
        """Add the headlines of new alarms to the messages of the live view."""
        raised = {alarm.headline for alarm in self.alarms}
        self.messages += [alarm.headline for alarm in found if alarm.headline not in raised]

    @property
    def alarms(self) -> list[RewardAlarm | FlipAlarm]:
        """The alarms that are raised now."""
        return [*self._hacking, *self._flips]

    @property
    def warnings(self) -> list[str]:
        """The sentences about problems that a user should look at now: a missing learning signal, signs of reward
        hacking, or scorers whose verdicts flip.
        """
        return [self.no_signal] * bool(self.no_signal) + [alarm.sentence for alarm in self.alarms]

    def _log_recoveries(self) -> None:
        for recovery in self.recoveries.read()[self._recovered :]:
            self._recovered += 1
            by_role = {recovery.role.replace(" ", "_"): recovery.seconds}
            self.tracker.log_recovery(self._recovered, by_role, recovery.resumed_at)
            self.messages.append(f"recovered {recovery.sentence()}")

    @property
    def curves(self) -> Curves:
        """The points of the reward plot."""
        trained, evaluated = list(self.context.policies.since(1)), read_evaluations(self.context.store)
        return Curves(
            reward=[(v.number, v.metrics["reward"]) for v in trained],
            accuracy=[(one.version, one.accuracy) for one in evaluated],
            staleness=[(v.number, v.metrics["staleness_mean"]) for v in trained],
            title=self.context.run_id,
            pass_at={
                k: [(one.version, one.pass_at[k]) for one in evaluated if k in one.pass_at]
                for k in sorted({k for one in evaluated for k in one.pass_at})
            },
        )

    @property
    def accuracy(self) -> tuple[tuple[int, float], ...]:
        """The held-out accuracy of policy version 0 and of the newest evaluated versions, as pairs of version and
        accuracy.
        """
        points_of = sorted((version, one.accuracy) for version, one in self._evaluated.items())
        return (*points_of[:1], *points_of[1:][-KEPT:])

    @property
    def pass_at(self) -> Mapping[int, float]:
        """The pass@k of the newest evaluated policy version, as a mapping from k to pass@k."""
        return self._evaluated[max(self._evaluated)].pass_at if self._evaluated else {}

    @property
    def figures(self) -> str:
        """The newest reward and held-out accuracy of the run, as short text."""
        status = self.status(self._phase())
        reward = [] if status.reward is None else [f"reward {status.reward:.3f}"]
        held_out = [f"held-out {value:.3f} at {version}" for version, value in status.accuracy[-1:]]
        return ", ".join([*reward, *held_out])

    def status(self, phase: Phase) -> RunStatus:
        """Return the run's present status."""
        config, progress = self.context.config, self.progress
        trained = progress.domains
        rollout = self.stages.rollout
        rewards = progress.rewards
        return RunStatus(
            run_id=self.context.run_id,
            phase=phase,
            version=max(progress.version, 0),
            versions=config.versions,
            reward=sum(rewards[-RECENT:]) / len(rewards[-RECENT:]) if rewards else None,
            rewards=rewards,
            accuracy=self.accuracy,
            pass_at=self.pass_at,
            staleness=dict(progress.staleness),
            domains={domain: trained[domain] for domain in config.shares},
            shares=config.shares,
            skipped=share_skipped(progress.state, [source.domain for source in config.prompts]),
            tokens_per_second=progress.tokens_per_second_now,
            tokens_per_second_total=progress.tokens_per_second,
            buffer_groups=rollout.buffered + rollout.waiting * config.groups,
            buffer_capacity=int((1 + config.async_ratio) * config.groups),
            in_flight_groups=rollout.running,
            stages=self.stages.statuses(),
            sandboxes={kind: list_figures(figures) for kind, figures in self.sandboxes.totals().items()},
            environments=self.environments.totals(),
            seconds=time.monotonic() - self._began,
            flow_run=flow_run.id or "",
            alarms=tuple(alarm.sentence for alarm in self.alarms),
            messages=(*self.messages[-MESSAGES:], *([self.failure] if self.failure else [])),
        )

    def _phase(self) -> Phase:
        if self.progress.version < 0:
            return "cold start" if self.stages.learner.phase is LearnerPhase.COLD_START else "starting"
        return "training" if self.progress.version < self.context.config.versions else "evaluating"


def points_of(context: RunContext, marker: str, wanted: range) -> Iterator[MetricPoint]:
    """Yield the MLflow metrics of the policy versions in `wanted`. For the marker `EVALUATED`, yield the metrics of the
    held-out evaluations of these policy versions.
    """
    if marker == EVALUATED:
        for evaluation in read_evaluations(context.store, wanted.start - 1, wanted.stop - 1):
            yield evaluation_point(evaluation.version, evaluation.metrics, time.time())
    else:
        for before, version in pairwise(islice(context.policies.since(wanted.start - 1), len(wanted) + 1)):
            figures = system_figures(before, version, paused_seconds(context, before, version))
            yield version_point(version.number, {**version.metrics, **figures}, version.at)
