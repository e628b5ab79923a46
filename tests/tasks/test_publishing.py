"""Publishing a version while the next step runs: versions are complete, in order and bit-identical; failures are
repaired.

The batches are `ahead`: a batch may be trained on while the version that it starts from is still being published.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from _pytest.mark import ParameterSet

from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import NotFinite, StoreFailed
from rollflow.storage.log.entries import BatchVoided, VersionPublished
from rollflow.storage.log.state import Deposed
from rollflow.storage.objects.base import Data
from rollflow.storage.objects.local import LocalStore
from rollflow.tasks.actors.learner import LearnerActor
from rollflow.tasks.actors.publishing import Publishing
from rollflow.tasks.learners.base import WaitForPublish, no_wait
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.run.context import RunContext
from tests.support.log_runs import of_kind
from tests.support.small_run import ALL_ROLES, StoreFeed, prepare_small
from tests.support.waiting import HANG_SECONDS
from tests.tasks.test_quarantine import Poisoned
from tests.tasks.test_restore import consumed, hashes, restored

Prepare = Callable[..., RunContext]
TRAINS: Mapping[str, Any] = {
    "plain": {},
    "roles": ALL_ROLES,
    "ranks": {"ranks": 2},
    "in parts": {"ranks": 2, "sharded": True, "minibatches": 2},
}
SOAK = pytest.mark.soak
SLOW = 4  # the version whose upload is slow: it ends when the next step has settled or failed


def kept(*names: str) -> list[ParameterSet]:
    """Return all cases of `TRAINS`, of which only those with these names are in `make test`."""
    return [pytest.param(keys, id=name, marks=() if name in names else SOAK) for name, keys in TRAINS.items()]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))

    def prepared(run_id: str = "small", async_ratio: float = 1, **train: object) -> RunContext:
        return prepare_small(tmp_path, run_id, train=train, async_ratio=async_ratio, keep_last=10, state_every=2)

    return prepared


class Slow:
    """Delay the upload of version `SLOW` until the learner trains on the next batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, context: RunContext) -> None:
        self.context, self.begun = context, threading.Event()
        self.meanwhile: Callable[[], object] = lambda: None  # called in the next step, before the upload may go on
        self.failure: Exception | None = None  # the error that the upload then raises
        self.committed: list[int] = []  # the newest version at the start of the next step
        self._put, self._step = LocalStore.put, TorchLearner.step
        slow = self
        monkeypatch.setattr(LocalStore, "put", lambda store, path, data: slow.put(store, path, data))
        monkeypatch.setattr(TorchLearner, "step", lambda *given: slow.step(*given))

    def put(self, store: LocalStore, path: str, data: Data) -> str:
        """Store as `LocalStore` does."""
        if path.startswith(f"policies/{SLOW:08d}/"):
            assert self.begun.wait(HANG_SECONDS), "the next step did not start"
            if self.failure is not None:
                raise self.failure
        return self._put(store, path, data)

    def step(
        self, learner: TorchLearner, batch: TrajectoryBatch, version: int, settle: WaitForPublish = no_wait
    ) -> object:
        """Train as `TorchLearner` does."""
        if version != SLOW or self.begun.is_set():
            return self._step(learner, batch, version, settle)
        self.committed.append(self.context.policies.newest())
        self.meanwhile()

        def settled() -> None:
            self.begun.set()
            settle()

        try:
            return self._step(learner, batch, version, settled)
        finally:
            self.begun.set()


def train(context: RunContext, feed: StoreFeed | None = None) -> LearnerActor:
    """Run the learner to the end, or until it raises an error."""
    actor = LearnerActor(context, channel=feed or StoreFeed(context, ahead=True))
    actor.run()
    return actor


def whole(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    """Train the same run, with each version published before the next step."""

    def in_line(publishing: Publishing, job: Callable[[], None]) -> None:
        job()

    with monkeypatch.context() as patch:
        patch.setattr(Publishing, "begin", in_line)
        train(context)
    return context


def assert_same(context: RunContext, other: RunContext) -> None:
    """Check that all versions are equal and that the audit is clean."""
    found = [[[o.sha256 for o in run.policies.find(v).objects] for v in range(7)] for run in (context, other)]
    assert found[0] == found[1]
    assert hashes(restored(context, 5)[0]) == hashes(restored(other, 5)[0])
    report = audit(context.store, deep=True)
    assert report.violations == []
    published = [e.body.number for e in of_kind(context.store, VersionPublished)]  # type: ignore[union-attr]
    assert published == list(range(7))


@pytest.mark.parametrize("train_keys", kept("plain", "roles"))
def test_next_train_step_starts_before_the_weights_are_stored(
    small: Prepare, monkeypatch: pytest.MonkeyPatch, train_keys: Mapping[str, Any]
) -> None:
    """Every version has the same bits as without concurrent publishing."""
    quiet, context = whole(small("quiet", **train_keys), monkeypatch), small(**train_keys)
    slow = Slow(monkeypatch, context)
    assert train(context).version == 6
    assert slow.committed == [SLOW - 1]
    assert_same(context, quiet)


@pytest.mark.parametrize("async_ratio", [0, 0.5])
def test_learner_at_alpha_zero_waits_until_weights_are_stored(small: Prepare, async_ratio: float) -> None:
    """The learner asks for each batch once: by then the version that the batch starts from is published."""
    context, asked = small(async_ratio=async_ratio), list[int]()

    class Looking(StoreFeed):
        def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
            asked.append(number)
            assert self.context.log.state.version == number
            return super().lease(number, deadline, afresh=afresh)

    assert train(context, Looking(context)).version == 6
    assert asked == list(range(6))


@pytest.mark.parametrize("train_keys", kept("plain", "roles"))
def test_failed_weight_upload_is_raised_by_the_next_train_step(
    small: Prepare, monkeypatch: pytest.MonkeyPatch, train_keys: Mapping[str, Any]
) -> None:
    """After a failed upload nothing is committed. The next batch waits, and a restarted learner trains on it once."""
    quiet, context = whole(small("quiet", **train_keys), monkeypatch), small(**train_keys)
    with monkeypatch.context() as patch:
        slow = Slow(patch, context)
        slow.failure = StoreFailed("the store is full")
        with pytest.raises(StoreFailed, match=r"^the store is full$"):
            train(context)
    assert context.policies.newest() == SLOW - 1
    assert sorted(context.log.state.waiting) == [SLOW - 1, SLOW]
    assert train(context).version == 6
    assert_same(context, quiet)


def test_learner_replaced_while_publishing_stops(small: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, context = whole(small("quiet"), monkeypatch), small()
    with monkeypatch.context() as patch:
        slow = Slow(patch, context)
        slow.meanwhile = lambda: replace(context).log.claim("learner", who="the second one")
        with pytest.raises(Deposed, match="the second one"):
            train(context)
    assert context.policies.newest() == SLOW - 1
    assert train(context).version == 6
    assert_same(context, quiet)


def test_batch_voided_while_publishing_is_formed_again(small: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is lost, and its batch is trained on again after the batch that replaces the voided one."""
    context = small()
    slow, feed, behind = Slow(monkeypatch, context), StoreFeed(context, ahead=True), list[int]()

    def void() -> None:
        state = context.log.state
        behind.append(state.waiting[SLOW].entry)
        assert feed.batches.reject(feed.writer, SLOW - 1, state.waiting[SLOW - 1].entry, "of no use")

    slow.meanwhile = void
    assert train(context, feed).version == 6
    assert [key.attempt for key in consumed(context, SLOW)] == [1, 1]
    assert [context.policies.find(SLOW + 1).batch_entry] == behind
    report = audit(context.store, deep=True)
    assert report.violations == []
    assert context.log.state.voids == 1


def test_nan_in_the_next_step_keeps_the_published_version(small: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    context, stopped = small(not_finite="skip"), small("stopped")
    with monkeypatch.context() as patch:
        slow = Slow(patch, context)
        assert train(context, Poisoned(context, SLOW, ahead=True)).version == 6
        assert slow.committed == [SLOW - 1]
    [void] = of_kind(context.store, BatchVoided)
    assert getattr(void.body, "number", None) == SLOW
    assert [key.attempt for key in consumed(context, SLOW + 1)] == [1, 1]
    assert audit(context.store, deep=True).violations == []
    with monkeypatch.context() as patch:
        Slow(patch, stopped)
        with pytest.raises(NotFinite, match=f"a log-prob of batch {SLOW} is -inf"):
            train(stopped, Poisoned(stopped, SLOW, ahead=True))
    assert stopped.policies.newest() == SLOW


def test_error_of_the_earlier_failed_version_is_raised(small: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    context = small()
    slow = Slow(monkeypatch, context)
    slow.failure = StoreFailed("the store is full")
    with pytest.raises(StoreFailed, match=r"^the store is full$"):
        train(context, Poisoned(context, SLOW, ahead=True))
