"""Defines the learner's Ray actor, which trains one policy version after another, each on one batch.

    restore v --> lease batch v --> check --> step --> probe --> publish v + 1 --> acknowledge --> prune
                       ^                                  |
                       +--- v + 1, while publishing ------+

The learner starts from storage alone: it restores the newest published version, or creates version 0. A version is
committed together with the batch that it was trained on. A learner that another learner has replaced gets the error
`Deposed` and stops. A batch that differs from its commit in the log is rejected and formed again. With
`train.not_finite = "skip"`, a batch that makes weights NaN is also rejected and formed again.

While version v + 1 is being published (see `publishing`), batch v + 1 may already be trained on if `async_ratio` is 1
or more. If publishing fails or the learner dies, the training after version v is repeated.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version as package_version
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.deltas.parent import ParentWeights
from rollflow.storage.errors import Corrupt, Missing, NotFinite, Stale, StoreFailed, Unreachable
from rollflow.storage.log.entries import VersionPublished
from rollflow.storage.log.run_log import Writer
from rollflow.storage.log.state import Deposed, EntryRefused
from rollflow.storage.policies import PolicyStore
from rollflow.storage.trajectories import TrajectoryStore, verify
from rollflow.tasks.actors.batch_metrics import compute_batch_metrics, compute_domain_metrics, compute_skip_metrics
from rollflow.tasks.actors.channel import BatchFeed, RayChannel
from rollflow.tasks.actors.gauges import Gauges
from rollflow.tasks.actors.lease import Lease
from rollflow.tasks.actors.placement import actor_options, learner_cpus
from rollflow.tasks.actors.publishing import Publishing
from rollflow.tasks.actors.ranks import rank_hosts
from rollflow.tasks.actors.statuses import LearnerPhase, LearnerStatus
from rollflow.tasks.actors.turn_metrics import compute_turn_metrics
from rollflow.tasks.learners.base import AGAIN, Learner
from rollflow.tasks.learners.checkpoint.sharded_files import copy_parent, stage_files, stage_weights
from rollflow.tasks.learners.distributed.rank_protocol import NEAR
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext, claim
from rollflow.tasks.run.restore import RestoredVersion, new_learner, restore
from rollflow.tasks.runtime.actor_warnings import warnings_of
from rollflow.tasks.runtime.cpu import CpuClock
from rollflow.tasks.runtime.meter import BusyMeter
from rollflow.tasks.runtime.spans import Spans, open_spans

LEARNER = "learner"
LEASE_SECONDS = 10.0
MAKINGS = 8  # number of times that a batch may be damaged or make weights NaN before the run fails
# largest number of concurrent calls to the learner's actor, from old and new Prefect flows and from observers
CALLS = 32


def start_learner(context: RunContext, gpus: float, address: str) -> Any:
    """Start the run's learner actor on the Ray cluster at `address`, or find the actor if it is running."""
    options = {
        "name": LEARNER,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_concurrency": CALLS,
        **actor_options(context.config, "learner", learner_cpus(context.config), gpus=gpus, imports="learner"),
    }
    return ray.remote(LearnerActor).options(**options).remote(context, address, lease=Lease.of(context))


class LearnerActor:
    """Ray actor that trains a run's policy in one thread; `status` may be called at any time."""

    config: RunConfig
    policies: PolicyStore
    batches: TrajectoryStore
    writer: Writer
    learner: Learner

    def __init__(
        self, context: RunContext, address: str = "", channel: BatchFeed | None = None, lease: Lease | None = None
    ) -> None:
        """Create the actor without reading storage, so that `status` can report that the actor waits for storage.

        Args:
            address: the address of the Ray cluster on which the actor runs.
            lease: the lease with which a detached actor ends itself, if any.
        """
        if lease:
            lease.hold(LEARNER)
        self.context, self._address = context, address
        self.channel: BatchFeed = channel or RayChannel()
        self.version = -1  # newest committed version
        self.reached = -1  # policy version of the learner's tensors, which may not be published yet
        self.trained = 0  # number of policy versions that this actor has trained
        self.phase, self.note = LearnerPhase.STARTING, "starting"
        self.steps = 0  # number of finished steps of work; a growing number shows that the learner is alive
        self.restored: RestoredVersion | None = None
        self._metrics: Mapping[str, float] = {}  # metrics of the newest trained policy version
        self._gauges = Gauges(LEARNER, context.uri)
        self.meter = BusyMeter()
        self.cpu = CpuClock(LEARNER)
        self._worker = ThreadPoolExecutor(1, "learner")
        self._publishing = Publishing()
        self._spans = Spans()
        self._work: Future[int] | None = None
        self._starting = threading.Lock()

    def status(self) -> LearnerStatus:
        """Return the learner's status, for the Prefect flow of the training stage and for the live view."""
        restored = self.restored or RestoredVersion(self.version)
        status = LearnerStatus(
            waits_for=self.context.store.waits,
            costs=self.cpu.read(),
            idle=self.meter.idle_share(),
            warned=warnings_of(LEARNER).read(),
            phase=self.phase,
            note=self.note,
            version=self.version,
            trained=self.trained,
            steps=self.steps,
            restored_from=restored.base,
            replayed=restored.replayed,
        )
        return self._gauges.show(status, self._metrics)

    def run(self) -> int:
        """Train up to the run's last policy version and return its number; a second call waits for the first."""
        with self._starting:
            if self._work is None:
                self._work = self._worker.submit(self._train_all)
        return self._work.result()

    def _train_all(self) -> int:
        self._begin()
        self.meter.begin()
        try:
            while self.version < self.config.versions:
                self._train_one_more()
        finally:
            try:
                self._settle()  # wait until publishing has ended, even after an error
            finally:
                self._spans.flush()
        self.phase, self.note = LearnerPhase.DONE, "done"
        return self.version

    def _train_one_more(self) -> None:
        """Train one more policy version or, after the last batch, wait until the last version is published.

        If the batch was rejected, the learner restores the policy version before it.
        """
        try:
            if self.reached < self.config.versions:
                self._train_next(self.reached)
            else:
                self._settle()
        except Deposed:
            raise
        except EntryRefused:
            self._publishing.forget()
            self._restore(self.version)

    def _train_next(self, number: int) -> None:
        waited = time.monotonic()
        batch, entry = self._next_batch(number)
        metrics = compute_batch_metrics(batch, self.batches.read_commit(entry), self.batches.discards(entry), number)
        metrics |= compute_domain_metrics(batch, self.config.shares) | compute_turn_metrics(batch)
        metrics |= {"wait_seconds": time.monotonic() - waited}
        metrics |= compute_skip_metrics(self.context.log.state, self.config)
        with self.meter.busy():
            self._train(number, batch, entry, metrics)
            if self.config.async_ratio < 1:
                self._settle()  # the responses of the next batch must come from this policy version

    def _settle(self) -> None:
        """Wait until the newest policy version is published; raise the error if publishing failed."""
        self._publishing.settle()

    def _begin(self) -> None:
        self.writer = claim(self.context, "learner", self._address)
        self.config = self.context.config_under(self.writer.claim)
        tracking = self.config.tracking
        self._spans = open_spans(tracking.spans, tracking.spans_share, self.context.key, self.context.run_id, LEARNER)
        self.policies, self.batches = self.context.policies, self.context.batches
        self._parent = ParentWeights(self.policies.retention.full_every)
        if self.config.train.ranks > 1:
            self.cpu = CpuClock(LEARNER, "learner ranks")
        self.version = self.policies.newest()
        ranks = rank_hosts(self.context) if self.config.train.multi_node else NEAR
        if self.version < 0:
            # Without a cold start (supervised training), the policy folder already has the weights.
            cold = self.config.policy.cold_start is not None
            self.learner = new_learner(self.context, None if cold else self.context.first_weights, ranks=ranks)
            self._make_first()
        else:
            self.learner = new_learner(self.context, blank=True, ranks=ranks)
            self._restore(self.version)
        self.channel.announce(self.version)

    def _step(self, note: str) -> None:
        """Count a finished step of work, and set the note that the learner's status shows."""
        self.note, self.steps = note, self.steps + 1

    def _make_first(self) -> None:
        if self.config.policy.cold_start is not None:
            self._run_cold_start()
            self._check_finite(0)
            self._keep_weights()
        self._publish(0, None, {})
        self._settle()

    def _run_cold_start(self) -> None:
        from rollflow.tasks.policies.cold_start import cold_start
        from rollflow.tasks.run.cold_start.demonstrated_episodes import open_pool
        from rollflow.tasks.run.held_out_accuracy import HeldOutJudge

        cold = self.config.policy.cold_start
        assert cold is not None

        def report(step: int, found: float) -> None:
            self._step(f"cold start: step {step}, held-out accuracy {found:.2f} of {cold.target_accuracy:.2f}")

        self.phase, self.note = LearnerPhase.COLD_START, "cold start"
        pool = open_pool(self.config, self.context.prompts(), self.context.tokenizer)
        with contextlib.closing(pool), HeldOutJudge(self.context) as accuracy:
            cold_start(self.learner.model, cold, pool, accuracy, report)

    def _keep_weights(self) -> None:
        """Store the weights after supervised training (cold start) in the run's policy folder.

        Another run can use the policy folder as its `policy.path`.
        """
        for name, data in self.learner.weights().items():
            self.writer.check()  # raise `Deposed` if a newer process has replaced this learner
            self.context.store.put(f"policy/{name.rpartition('/')[2]}", data)

    def _restore(self, newest: int) -> None:
        self.phase = LearnerPhase.RESTORING
        self.restored = restore(self.policies, self.batches, self.learner, newest, heal=True, note=self._step)
        copy_parent(self._parent, newest, self.learner.weights, self.policies.find(newest).weights)
        self.reached, self.phase, self.note = newest, LearnerPhase.TRAINING, self.restored.sentence() or "training"

    def _next_batch(self, number: int) -> tuple[TrajectoryBatch, int]:
        """Return batch `number`, verified against the log, and the number of its log entry.

        A damaged batch is rejected, and the rollout stage forms a new one.
        """
        reason = ""
        for attempt in range(MAKINGS):
            try:
                data = self._lease(number, afresh=attempt > 0)
                waiting = self.batches.find_waiting(number)
                if waiting is None:
                    continue  # the batch was rejected, so the next lease waits for the new batch
                verify(waiting.file, data)
                return TrajectoryBatch.from_bytes(data), waiting.entry
            except Corrupt as error:
                # A damaged log also makes publishing fail, and the error of publishing is raised here.
                self._settle()
                reason = str(error)
                self._step(f"batch {number} is damaged and is formed again: {reason}")
                # The batch is rejected, unless the stored batch is intact.
                self.batches.void(self.writer, number, reason)
        raise Corrupt(f"batch {number} was damaged {MAKINGS} times ({reason}); check the store, then resume the run")

    def _lease(self, number: int, *, afresh: bool) -> pa.Buffer:
        """Get batch `number` from the channel; wait at most `rollout.patience_seconds` until the rollout stage has
        formed it.

        The wait excludes the time in which storage does not answer.
        """
        patience, waited, why = self.config.rollout.patience_seconds, 0.0, ""
        while waited < patience:
            try:
                return self.channel.lease(number, LEASE_SECONDS, afresh=afresh)
            except (TimeoutError, Unreachable) as error:
                why = str(error)
            self._settle()  # the rollout stage may need the new policy version to form the batch
            self.learner.check_ranks()
            # `check` waits while storage does not answer, and this time does not count as waiting for a batch.
            self.writer.check()
            waited += LEASE_SECONDS
        raise Unreachable(f"the rollout stage did not send batch {number} within {patience:g} s ({why})")

    def _train(self, number: int, batch: TrajectoryBatch, entry: int, batch_metrics: Mapping[str, float]) -> None:
        """Train on batch `number`, and start publishing the new policy version.

        With `train.not_finite = "skip"`, a batch that makes weights NaN or infinite is rejected and replaced.
        """
        began = time.monotonic()
        self._check_fresh(number, batch)
        try:
            metrics = {**self.learner.step(batch, number, self._settle), **batch_metrics}
            metrics["step_seconds"] = time.monotonic() - began
            self._publish(number + 1, entry, metrics)
        except NotFinite as error:
            self._settle()  # raises the error of publishing the previous policy version, if any
            if self.config.train.not_finite == "stop":
                raise
            self._quarantine(number, entry, error)

    def _quarantine(self, number: int, entry: int, error: NotFinite) -> None:
        """Reject batch `number`, and restore the policy version before it from storage.

        The weights are restored, because some minibatches of the batch may have changed them.
        """
        why = str(error).partition("; ")[0]  # the message without the advice that applies only if the run stops
        self.batches.reject(self.writer, number, entry, why)
        if (times := self.context.log.state.not_finite) >= MAKINGS:
            cure = f"fix the engine or the verifier and resume the run, or {AGAIN} and a lower train.learning_rate"
            raise NotFinite(f"batch {number} was rejected {times} times, the last time: {why}; {cure}") from error
        self._restore(number)
        self.note = f"batch {number} is quarantined and formed again: {why}"

    def _check_fresh(self, number: int, batch: TrajectoryBatch) -> None:
        """Check that no trajectory of the batch is older than `async_ratio` policy versions."""
        oldest = min(batch.table["started_version"].to_pylist())
        if oldest < number - self.config.async_ratio:
            raise Stale(
                f"batch {number} has a trajectory that was started under version {oldest}, older than async_ratio "
                f"= {self.config.async_ratio:g} allows"
            )

    def _publish(self, version: int, batch_entry: int | None, metrics: Mapping[str, float]) -> None:
        """Start publishing the learner's state as policy version `version`.

        The next call of `_settle` waits until the version is published.
        """
        began = time.monotonic()
        probe = self._check_finite(version)
        stateful = self.policies.retention.stores_state(version) or version == self.config.versions
        weights, state = self.learner.weights(), self.learner.state() if stateful else {}
        found = {name: float(value) for name, value in metrics.items() if np.isfinite(value)}

        def publish() -> None:
            stored = stage_weights(self.policies, self.writer, version, weights, self._parent)
            state_objects = stage_files(self.policies, self.writer, version, state)
            logged, code = found | {"publish_seconds": time.monotonic() - began}, package_version("rollflow")
            fields = (state_objects, probe, logged, code, stored.deltas)
            self.policies.publish(self.writer, VersionPublished(version, batch_entry, stored.weights, *fields))
            self._metrics = logged
            self._note_published(version)
            self._record_spans(version, batch_entry, logged)

        self._publishing.begin(publish)
        self.reached, self.phase = version, LearnerPhase.TRAINING
        omitted = sorted(metrics.keys() - found.keys())
        self.note = f"version {version} is logged without {', '.join(omitted)}: not finite" if omitted else "training"

    def _record_spans(self, version: int, batch_entry: int | None, seconds: Mapping[str, float]) -> None:
        """Record OpenTelemetry spans of a policy version, and of the prompts that it was trained on."""
        if batch_entry is None or not self._spans.on:
            return
        wait, step, publish = (seconds.get(f"{part}_seconds", 0.0) for part in ("wait", "step", "publish"))
        self._spans.record_version(version, "wait for batch", wait, step + publish)
        self._spans.record_version(version, "train step", step, publish)
        self._spans.record_version(version, "publish", publish)
        self._spans.record_version(version, "version", wait + step + publish)
        for group in self.batches.read_commit(batch_entry).groups:
            self._spans.record_prompt(group.key, "train", step + publish, **{"rollflow.version": version})

    def _note_published(self, version: int) -> None:
        """Record that a policy version is published, acknowledge its batch in the channel, and delete old versions."""
        self.version = version
        self.trained += 1
        if version:
            self.channel.finish(version - 1, version)
            self._prune()

    def _prune(self) -> None:
        """Delete weights and states that are no longer retained; a failed deletion is tried again later."""
        with contextlib.suppress(Missing, Corrupt, Unreachable, StoreFailed):
            self.policies.prune(self.writer)

    def _check_finite(self, version: int) -> tuple[float, ...]:
        """Return the learner's log-probs of the run's probe tokens. Engines that load the weights must compute the same
        log-probs, up to a tolerance.

        Raises: NotFinite: the policy version has a NaN or an infinity. If `NotFinite` is raised, nothing of the policy
            version has been stored.
        """
        broken, probe = self.learner.first_nonfinite(), self.learner.logprobs(self.context.probe_tokens)
        if broken is None and all(np.isfinite(probe)):
            return probe
        what = f"{broken} has a NaN or an infinity" if broken else "the log-probs of its probe are not finite"
        raise NotFinite(f"version {version} is not published, because {what}; {self._suggest_fix(version)}")

    def _suggest_fix(self, version: int) -> str:
        """Return advice for the user on what to do if the weights of a policy version are NaN or infinite."""
        if version:
            return f"{AGAIN} and a lower train.learning_rate"
        cold = self.config.policy.cold_start is not None
        return f"start another run with {'a lower policy.cold_start.learning_rate' if cold else 'another policy.path'}"
