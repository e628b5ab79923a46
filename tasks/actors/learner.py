"""The learner's actor: follows the chain of versions, one batch at a time.

    restore v --> lease batch v --> check --> step --> probe --> publish v + 1 --> acknowledge --> prune
                       ^                                  |
                       +--- v + 1, beside the publishing -+

It begins from storage alone: it restores the newest published version, or makes version 0. A version is committed
together with the batch it was trained on. Once another learner has claimed the run, this one is `Deposed` and stops. A
batch that is not what was committed is voided and formed anew, never trained on; so is one that is not finite, where
`train.not_finite = "next"`.

While version v + 1 is published (see `publishing`), batch v + 1 may be leased and trained on, if alpha is 1 or more.
Versions are committed in their order: batch v + 1 waits, as it was, until v + 2 is. Where v + 1 fails or its learner
dies, what was trained on top of it is lost, and batch v + 1 is trained on again.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version as package_version
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import ray

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt, Missing, NotFinite, Stale, StoreFailed, Unreachable
from rollflow.storage.log.entries import BatchCommitted, VersionPublished
from rollflow.storage.log.run_log import Writer
from rollflow.storage.log.state import Deposed, Refused
from rollflow.storage.policies import PolicyStore
from rollflow.storage.records import Discard
from rollflow.storage.trajectories import TrajectoryStore, verify
from rollflow.tasks.actors.channel import RayChannel
from rollflow.tasks.actors.gauges import Gauges
from rollflow.tasks.actors.lease import Lease
from rollflow.tasks.actors.placement import actor_options, learner_cpus
from rollflow.tasks.actors.publishing import Publishing
from rollflow.tasks.actors.ranks import rank_hosts
from rollflow.tasks.actors.statuses import LearnerPhase, LearnerStatus
from rollflow.tasks.learners.base import AGAIN, Learner
from rollflow.tasks.learners.gathered import staged
from rollflow.tasks.learners.rank_orders import NEAR
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext, claim
from rollflow.tasks.run.restore import Restored, new_learner, restore
from rollflow.tasks.runtime.actor_warnings import warnings_of
from rollflow.tasks.runtime.cpu import CpuClock
from rollflow.tasks.runtime.meter import Meter
from rollflow.tasks.verifiers import build_verifier
from rollflow.tasks.verifiers.base import judge

LEARNER = "learner"
LEASE_SECONDS = 10.0
UNSAFE = re.compile(r"[^\w.-]")  # in the name of a metric
MAKINGS = 8  # times that one batch may turn out damaged, or not finite, before something else is to blame
CALLS = 32  # at a time: `run` of the stage's flow and of dead ones before it, `status` of whoever looks


class BatchFeed(Protocol):
    """What the learner needs of the channel; see `RayChannel`."""

    def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer: ...

    def finish(self, number: int, version: int) -> None: ...

    def announce(self, version: int) -> None: ...


def start_learner(context: RunContext, gpus: float, address: str) -> Any:
    """Start the run's learner actor (or find it, after a restart of its flow), on the cluster at `address`."""
    options = {
        "name": LEARNER,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_concurrency": CALLS,
        **actor_options(context.config, "learner", learner_cpus(context.config), gpus=gpus, imports="learner"),
    }
    return ray.remote(LearnerActor).options(**options).remote(context, address, lease=Lease.of(context))


class LearnerActor:
    """Trains one run, in one thread of its own; `run` waits for it, `status` looks at it, as often as one likes."""

    config: RunConfig
    policies: PolicyStore
    batches: TrajectoryStore
    writer: Writer
    learner: Learner

    def __init__(
        self, context: RunContext, address: str = "", channel: BatchFeed | None = None, lease: Lease | None = None
    ) -> None:
        """Reads nothing, so that `status` can tell while storage is waited for. `address` is that of the actor's
        cluster, `lease` that of an actor that is detached.
        """
        if lease:
            lease.hold(LEARNER)
        self.context, self._address = context, address
        self.channel: BatchFeed = channel or RayChannel()
        self.version = -1  # the newest that is committed
        self.reached = -1  # the version that the learner's tensors are: `version`, or the one on its way there
        self.trained = 0  # versions, by this actor
        self.phase, self.note = LearnerPhase.STARTING, "starting"
        self.steps = 0  # done on the way to a version
        self.restored: Restored | None = None
        self._metrics: Mapping[str, float] = {}  # of the newest version that this actor made
        self._gauges = Gauges(LEARNER, context.uri)
        self.meter = Meter()
        self.cpu = CpuClock(LEARNER)
        self._worker = ThreadPoolExecutor(1, "learner")
        self._publishing = Publishing()
        self._work: Future[int] | None = None
        self._starting = threading.Lock()

    def status(self) -> LearnerStatus:
        """What the stage's flow and the live view show."""
        restored = self.restored or Restored(self.version)
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
        return self._gauges.told(status, self._metrics)

    def run(self) -> int:
        """Train up to the last version; returns it. A second call joins the first and ends with it."""
        with self._starting:
            if self._work is None:
                self._work = self._worker.submit(self._train_all)
        return self._work.result()

    def _train_all(self) -> int:
        self._begin()
        self.meter.begin()
        try:
            while self.version < self.config.versions:
                self._go_on()
        finally:
            self._settle()  # what ended the training is no reason to lose the version before it
        self.phase, self.note = LearnerPhase.DONE, "done"
        return self.version

    def _go_on(self) -> None:
        """Train one version more, or wait for the last one; go back to before a batch that was voided meanwhile."""
        try:
            if self.reached < self.config.versions:
                self._train_next(self.reached)
            else:
                self._settle()
        except Deposed:
            raise
        except Refused:
            self._publishing.forget()
            self._restore(self.version)

    def _train_next(self, number: int) -> None:
        waited = time.monotonic()
        batch, entry = self._next_batch(number)
        told = batch_metrics(batch, self.batches.committed(entry), self.batches.discards(entry), number)
        told |= domain_metrics(batch, self.config.shares) | {"wait_seconds": time.monotonic() - waited}
        with self.meter.busy():
            self._train(number, batch, entry, told)
            if self.config.async_ratio < 1:
                self._settle()  # the next batch begins under this version

    def _settle(self) -> None:
        """Wait for the version that is being published; raises what that failed with."""
        self._publishing.settle()

    def _begin(self) -> None:
        self.writer = claim(self.context, "learner", self._address)
        self.config = self.context.config_under(self.writer.claim)
        self.policies, self.batches = self.context.policies, self.context.batches
        if self.config.train.ranks > 1:
            self.cpu = CpuClock(LEARNER, "learner ranks")
        self.version = self.policies.newest()
        ranks = rank_hosts(self.context) if self.config.train.spread else NEAR
        if self.version < 0:
            cold = self.config.policy.cold_start is not None  # else there are weights to begin with
            self.learner = new_learner(self.context, None if cold else self.context.first_weights, ranks=ranks)
            self._make_first()
        else:
            self.learner = new_learner(self.context, blank=True, ranks=ranks)
            self._restore(self.version)
        self.channel.announce(self.version)

    def _step(self, note: str) -> None:
        """Something was done on the way to a version, or is begun once what was before it is done."""
        self.note, self.steps = note, self.steps + 1

    def _make_first(self) -> None:
        if self.config.policy.cold_start is not None:
            self._supervise()
            self._check_finite(0)
            self._keep_weights()
        self._publish(0, None, {})
        self._settle()

    def _supervise(self) -> None:
        from rollflow.tasks.policies.cold_start import answers, cold_start

        cold = self.config.policy.cold_start
        assert cold is not None
        prompts, tokenizer = self.context.prompts(), self.context.tokenizer
        held, verify, where = prompts.held_out(), build_verifier(self.config.reward), self.config.reward.answer
        model = self.learner.model

        def accuracy(model: Any) -> float:
            prompts, longest = [p.tokens for p in held], self.config.engine.max_new_tokens
            temperature = self.config.evaluation.temperature
            made = answers(model, prompts, tokenizer.stop_tokens[0], longest, temperature, self.config.seed)
            texts = [tokenizer.decode_response(answer, self.config.reward.special_tokens) for answer in made]
            pairs = [(text, p.reference) for text, p in zip(texts, held, strict=True)]
            return sum(judge(verify, where, *pair).reward == 1.0 for pair in pairs) / len(held)

        def report(step: int, found: float) -> None:
            self._step(f"cold start: step {step}, accuracy {found:.2f} of {cold.target_accuracy:.2f}")

        self.phase, self.note = LearnerPhase.COLD_START, "cold start"
        cold_start(model, cold, prompts, tokenizer, accuracy, report, self.config.seed)

    def _keep_weights(self) -> None:
        """Complete the run's policy folder with the result of the cold start, so that it can be the `policy.path` of
        another run.
        """
        for name, data in self.learner.weights().items():
            self.writer.check()  # another learner may have completed it since, with its own
            self.context.store.put(f"policy/{name.rpartition('/')[2]}", data)

    def _restore(self, newest: int) -> None:
        self.phase = LearnerPhase.RESTORING
        self.restored = restore(self.policies, self.batches, self.learner, newest, heal=True, note=self._step)
        self.reached = newest
        self.phase, self.note = LearnerPhase.TRAINING, self.restored.sentence() or "training"

    def _next_batch(self, number: int) -> tuple[TrajectoryBatch, int]:
        """Batch `number`, byte for byte what an entry committed, and that entry; a damaged one is voided, to be made
        anew."""
        reason = ""
        for attempt in range(MAKINGS):
            try:
                data = self._lease(number, afresh=attempt > 0)
                waiting = self.batches.waiting(number)
                if waiting is None:
                    continue  # voided a moment ago; the lease waits until it is made again
                verify(waiting.file, data)
                return TrajectoryBatch.from_bytes(data), waiting.entry
            except Corrupt as error:
                self._settle()  # it may be the log that is damaged
                reason = str(error)
                self._step(f"batch {number} is made again: {reason}")
                self.batches.void(self.writer, number, reason)  # nothing, if only the channel's copy was damaged
        raise Corrupt(f"batch {number} was damaged {MAKINGS} times: {reason}; check the store, then resume the run")

    def _lease(self, number: int, *, afresh: bool) -> pa.Buffer:
        """Batch `number`; waits as long as the rollout stage may take to make progress, plus the time that storage is
        away.
        """
        patience, waited, why = self.config.rollout.patience_seconds, 0.0, ""
        while waited < patience:
            try:
                return self.channel.lease(number, LEASE_SECONDS, afresh=afresh)
            except (TimeoutError, Unreachable) as error:
                why = str(error)
            self._settle()  # what is waited for may begin only then
            self.learner.check_ranks()
            self.writer.check()  # returns once storage answers: the deadline does not count that time
            waited += LEASE_SECONDS
        raise Unreachable(f"the learner waited {patience:g} s for batch {number} from the rollout stage ({why})")

    def _train(self, number: int, batch: TrajectoryBatch, entry: int, told: Mapping[str, float]) -> None:
        """Train on batch `number` and begin to publish what comes of it; one that is not finite is voided, where it may
        be.
        """
        began = time.monotonic()
        self._check_fresh(number, batch)
        try:
            metrics = {**self.learner.step(batch, number, self._settle), **told}
            metrics["step_seconds"] = time.monotonic() - began
            self._publish(number + 1, entry, metrics)
        except NotFinite as error:
            self._settle()  # of two versions that fail, the earlier one is told
            if self.config.train.not_finite == "stop":
                raise
            self._quarantine(number, entry, error)

    def _quarantine(self, number: int, entry: int, error: NotFinite) -> None:
        """Void batch `number`, and be as before it; from storage, as some of its minibatches may have been taken."""
        why = str(error).partition("; ")[0]  # without the cure of a run that stops
        self.batches.reject(self.writer, number, entry, why)
        if (times := self.context.log.state.not_finite) >= MAKINGS:
            cure = f"mend the engine or the verifier and resume, or {AGAIN}, and a lower train.learning_rate"
            raise NotFinite(f"batch {number} was quarantined {times} times: {why}; {cure}") from error
        self._restore(number)
        self.note = f"batch {number} is quarantined and formed anew: {why}"

    def _check_fresh(self, number: int, batch: TrajectoryBatch) -> None:
        """The bound, checked once more on the rows themselves before they are trained on."""
        oldest = min(batch.table["started_version"].to_pylist())
        if oldest < number - self.config.async_ratio:
            raise Stale(f"batch {number} holds a trajectory started under version {oldest}")

    def _publish(self, version: int, batch_entry: int | None, metrics: Mapping[str, float]) -> None:
        """Begin to publish what the learner is now; it is committed by the next `_settle`."""
        began = time.monotonic()
        probe = self._check_finite(version)
        stateful = self.policies.retention.stores_state(version) or version == self.config.versions
        weights, state = self.learner.weights(), self.learner.state() if stateful else {}
        found = {name: float(value) for name, value in metrics.items() if np.isfinite(value)}

        def publish() -> None:
            weight_objects, state_objects = (
                staged(self.policies, self.writer, version, files) for files in (weights, state)
            )
            told, code = found | {"publish_seconds": time.monotonic() - began}, package_version("rollflow")
            self.policies.publish(
                self.writer, VersionPublished(version, batch_entry, weight_objects, state_objects, probe, told, code)
            )
            self._metrics = told
            self._published(version)

        self._publishing.begin(publish)
        self.reached, self.phase = version, LearnerPhase.TRAINING
        untold = sorted(metrics.keys() - found.keys())
        self.note = f"version {version} is told without {', '.join(untold)}: not finite" if untold else "training"

    def _published(self, version: int) -> None:
        """It is committed."""
        self.version = version
        self.trained += 1
        if version:
            self.channel.finish(version - 1, version)
            self._prune()

    def _prune(self) -> None:
        """Prune what retention releases; what a failure leaves is removed the next time, or by `rollflow gc`."""
        with contextlib.suppress(Missing, Corrupt, Unreachable, StoreFailed):
            self.policies.prune(self.writer)

    def _check_finite(self, version: int) -> tuple[float, ...]:
        """The probe's log-probs under the weights that are to become `version`; nothing is stored of broken ones."""
        broken, probe = self.learner.broken(), self.learner.logprobs(self.context.probe_tokens)
        if broken is None and all(np.isfinite(probe)):
            return probe
        what = f"{broken} has a NaN or an infinity" if broken else "the probe's log-probs are not finite"
        raise NotFinite(f"version {version} is not published: {what}; {self._cure(version)}")

    def _cure(self, version: int) -> str:
        """What a person can do about a version that is not finite."""
        if version:
            return f"{AGAIN}, and a lower train.learning_rate"
        cold = self.config.policy.cold_start is not None
        return f"begin another run with {'a lower policy.cold_start.learning_rate' if cold else 'another policy.path'}"


def batch_metrics(
    batch: TrajectoryBatch, commit: BatchCommitted, discards: Sequence[Discard], version: int
) -> dict[str, float]:
    """What a batch says about the policy that made it."""
    rewards = np.array(batch.table["reward"].to_pylist(), dtype=np.float32)
    staleness = version - np.array(batch.table["started_version"].to_pylist())
    tokens = np.array([group.tokens for group in commit.groups])
    return {
        "reward": float(rewards.mean()),
        "accuracy": float((rewards == 1.0).mean()),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "response_tokens": float(tokens.sum()),
        "surplus_tokens": float(commit.surplus_tokens),
        "discarded_tokens": float(sum(d.response_tokens for d in discards)),
        **{f"discarded_{reason}": float(n) for reason, n in Counter(d.reason.value for d in discards).items()},
        "response_length": float(tokens.sum() / len(batch)),
        "discarded_groups": float(len(discards)),
        **{
            f"staleness_{age}": float(count)
            for age, count in zip(*np.unique(staleness, return_counts=True), strict=True)
        },
    }


def domain_metrics(batch: TrajectoryBatch, domains: Iterable[str]) -> dict[str, float]:
    """Groups of each of the run's domains in a batch; their sums over the versions keep the run's shares."""
    found = batch.domains
    return {f"groups_{UNSAFE.sub('_', domain)}": float(found[domain]) for domain in domains}
