"""The learner's actor: follows the chain of versions, one batch at a time.

    newest version in storage --> lease batch v --> step --> probe --> publish v + 1 --> acknowledge --> lease ...

It begins from storage alone: from the newest published version, or by making version 0. What it publishes is
committed together with what it consumed; if another learner published first, it gets `Conflict` and stops.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import RollflowError, Stale, Unreachable
from rollflow.storage.policies import Manifest
from rollflow.storage.ray_channel import RayChannel
from rollflow.storage.trajectories import BatchCommit, TrajectoryStore, commit_path
from rollflow.tasks.meter import Meter
from rollflow.tasks.policies.folder import resolve_policy
from rollflow.tasks.rewards.verifier import answer_of, verifier
from rollflow.tasks.run import RunContext

if TYPE_CHECKING:  # torch is loaded in the actor alone: the flow that starts it needs only the class
    from rollflow.tasks.learners.torch_learner import TorchLearner

LEARNER = "learner"
LEASE_SECONDS = 10.0


def start_learner(context: RunContext, gpus: float) -> Any:
    """Start the run's learner actor (or find it, after a restart of its flow)."""
    threads = str(context.config.train.threads)
    options = {
        "name": LEARNER,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "num_gpus": gpus,
        "max_concurrency": 2,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads}},
    }
    return ray.remote(LearnerActor).options(**options).remote(context)


class LearnerActor:
    """Trains one run. `run` blocks its thread until the last version; `status` answers from another."""

    def __init__(self, context: RunContext) -> None:
        self.context, self.config = context, context.config
        self.policies = context.policies()
        self.batches = TrajectoryStore(context.store)
        self.channel = RayChannel()
        self.version = -1
        self.note = "starting"
        self.meter = Meter()
        self._parent: str | None = None
        self.learner: TorchLearner

    def status(self) -> dict[str, Any]:
        """What the stage's flow and the live view show."""
        return {"version": self.version, "note": self.note, "idle": self.meter.idle_share()}

    def run(self) -> int:
        """Train up to the last version; returns it."""
        self._begin()
        self.meter.begin()
        while self.version < self.config.versions:
            waited = time.monotonic()
            data = self._lease(self.version)
            waited = time.monotonic() - waited
            with self.meter.busy():
                self._train(data, waited)
            self.channel.finish(self.version - 1, self.version)
        self.note = "done"
        return self.version

    def _begin(self) -> None:
        import torch

        from rollflow.tasks.learners.torch_learner import TorchLearner, load_model

        torch.set_num_threads(self.config.train.threads)
        torch.manual_seed(self.config.seed)
        newest = self.policies.latest()
        folder, trained = self._origin(newest < 0)
        model = load_model(folder, self.config.policy.dtype, trained=trained)
        self.learner = TorchLearner(
            model,
            self.config.train,
            temperature=self.config.engine.temperature,
            versions=self.config.versions,
            seed=self.config.seed,
        )
        if newest < 0:
            self._make_first()
        else:
            self._restore(newest)
        self.channel.announce(self.version)
        self.note = "training"

    def _origin(self, fresh: bool) -> tuple[Path, bool]:
        """The folder to build the model from, and whether its weights count: only a fresh `policy.path` has any."""
        path = self.config.policy.path
        if fresh and path is not None:
            return resolve_policy(path), True
        return self.context.policy_folder, False

    def _make_first(self) -> None:
        if self.config.policy.cold_start is not None:
            self._supervise()
            self._keep_weights()
        self._publish(0, Manifest(0, None, (), (), None), {})

    def _supervise(self) -> None:
        from rollflow.tasks.policies.cold_start import answers, cold_start

        cold = self.config.policy.cold_start
        assert cold is not None
        order, tokenizer = self.context.order(), self.context.tokenizer
        held, verify = order.held_out(), verifier(self.config.reward.kind)
        model = self.learner.model

        def accuracy(model: Any) -> float:
            prompts, longest = [p.tokens for p in held], self.config.engine.max_new_tokens
            temperature = self.config.evaluation.temperature
            made = answers(model, prompts, tokenizer.stop_tokens[0], longest, temperature, self.config.seed)
            texts = [answer_of(tokenizer.decode(a), self.config.reward.answer) for a in made]
            return sum(verify(t, p.reference).reward == 1.0 for t, p in zip(texts, held, strict=True)) / len(held)

        def report(step: int, found: float) -> None:
            self.note = f"cold start: step {step}, accuracy {found:.2f} of {cold.target_accuracy:.2f}"

        self.note = "cold start"
        cold_start(model, cold, order, tokenizer, accuracy, report, self.config.seed)

    def _keep_weights(self) -> None:
        """The cold start's result completes the run's policy folder: it can be the `policy.path` of another run."""
        for name, data in self.learner.weights().items():
            self.context.store.put(f"policy/{name.rpartition('/')[2]}", data)

    def _restore(self, newest: int) -> None:
        manifest = self.policies.manifest(newest)
        weights = {o.path: self.policies.read(o) for o in manifest.weights}
        self.learner.load(weights, {o.path: self.policies.read(o) for o in manifest.learner})
        self.version, self._parent = newest, self.policies.manifest_sha256(newest)

    def _lease(self, number: int) -> pa.Buffer:
        """Batch `number`; waits as long as the rollout stage is given for progress."""
        patience = time.monotonic() + self.config.rollout.patience_seconds
        while True:
            try:
                return self.channel.lease(number, LEASE_SECONDS)
            except TimeoutError:
                if time.monotonic() > patience:
                    raise Unreachable(
                        f"the learner waited {self.config.rollout.patience_seconds:g} s for batch {number} "
                        "from the rollout stage"
                    ) from None

    def _train(self, data: pa.Buffer, waited: float) -> None:
        began = time.monotonic()
        batch, commit = TrajectoryBatch.from_bytes(data), self.batches.record(self.version)
        self._check_fresh(batch)
        metrics = dict(self.learner.step(batch, self.version))
        stepped = time.monotonic()
        metrics |= batch_metrics(batch, commit, self.version)
        metrics |= {"wait_seconds": waited, "step_seconds": stepped - began}
        manifest = Manifest(
            version=self.version + 1,
            parent=self._parent,
            weights=(),
            learner=(),
            batch=hashlib.sha256(self.context.store.get(commit_path(self.version))).hexdigest(),
            consumed=commit.groups,
            discarded=commit.discards,
            cursor=commit.cursor,
        )
        self._publish(self.version + 1, manifest, metrics)

    def _check_fresh(self, batch: TrajectoryBatch) -> None:
        """The bound, checked once more on the rows themselves before they are trained on."""
        oldest = min(batch.table["started_version"].to_pylist())
        if oldest < self.version - self.config.async_ratio:
            raise Stale(f"batch {self.version} holds a trajectory started under version {oldest}")

    def _publish(self, version: int, manifest: Manifest, metrics: Mapping[str, float]) -> None:
        began = time.monotonic()
        weights = self.policies.stage(version, self.learner.weights())
        state = self.policies.stage(version, self.learner.state())
        probe = self.learner.logprobs(self.context.probe_tokens)
        if not all(np.isfinite(probe)):
            raise RollflowError(f"version {version} has log-probs that are not finite; lower train.learning_rate")
        found = {name: float(value) for name, value in metrics.items() if np.isfinite(value)}
        complete = replace(
            manifest,
            weights=weights,
            learner=state,
            probe=probe,
            metrics={**found, "publish_seconds": time.monotonic() - began},
            config_sha256=self.config.sha256(),
            code_version=package_version("rollflow"),
            writer=self.policies.writer,
            created_at=time.time(),
        )
        self._parent = self.policies.publish(complete)
        self.version = version


def batch_metrics(batch: TrajectoryBatch, commit: BatchCommit, version: int) -> dict[str, float]:
    """What a batch says about the policy that made it."""
    rewards = batch.table["reward"].to_numpy()
    staleness = version - batch.table["started_version"].to_numpy()
    tokens = np.array(commit.response_tokens)
    return {
        "reward": float(rewards.mean()),
        "accuracy": float((rewards == 1.0).mean()),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "response_tokens": float(tokens.sum()),
        "response_length": float(tokens.sum() / len(batch)),
        "discarded_groups": float(len(commit.discards)),
        **{
            f"staleness_{age}": float(count)
            for age, count in zip(*np.unique(staleness, return_counts=True), strict=True)
        },
    }
