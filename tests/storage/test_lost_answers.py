"""Tests of late and lost answers of the store: an appended entry is stored exactly once and durably, and its writer
learns this.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import stat
import uuid
from pathlib import Path

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import Unreachable
from rollflow.storage.log import entries as entries_module
from rollflow.storage.log import run_log as log_module
from rollflow.storage.log.entries import entry_path
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import local as local_backend
from rollflow.storage.objects.base import Data
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.trajectories import TrajectoryStore
from tests.support.batches import begin, staged, train
from tests.support.log_actors import Learner, Supervisor, create_run
from tests.support.log_runs import Actors


class Late(MemoryStore):
    """A store in which an unanswered write takes effect later, while the writer waits to retry."""

    def __init__(self) -> None:
        super().__init__(uuid.uuid4().hex)
        self.loses, self.late = False, list[tuple[str, Data]]()

    def create(self, path: str, data: Data) -> None:
        if self.loses:
            self.loses = False
            self.late.append((path, data))
            raise Unreachable("no answer")
        super().create(path, data)

    def arrive(self) -> None:
        while self.late:
            super().create(*self.late.pop())


def test_append_succeeds_if_another_thread_reads_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Late()
    begin(store, 1.0)
    train(store, 1)
    log = Log(store)

    def meanwhile(seconds: float) -> None:
        store.arrive()
        log.follow()  # another thread of this process could read the log at this moment

    monkeypatch.setattr(log_module.time, "sleep", meanwhile)
    store.loses = True
    writer = log.claim("scheduler")
    store.loses = True
    entry, _ = TrajectoryStore(log).commit(writer, staged())
    ids = [json.loads(store.get(path))["id"] for path in store.list("log")]
    assert len(set(ids)) == len(ids)
    assert [one.entry for one in log.state.waiting.values()] == [entry.n]


def test_retried_append_syncs_its_log_entry_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry can be read before it is durable, so the append must sync it."""
    store = LocalStore(tmp_path / "store")
    create_run(store)
    claim = Supervisor(store).writer.claim
    fsync, link, linked, synced = os.fsync, os.link, list[Path](), list[str]()

    def failing_once(descriptor: int) -> None:
        if linked and stat.S_ISDIR(os.fstat(descriptor).st_mode):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if len(linked) == 1:
                linked.append(Path(name))
                raise OSError(errno.EIO, "Input/output error")
            synced.append(Path(name).name)
        fsync(descriptor)

    def linking(source: Path, target: Path) -> None:
        link(source, target)
        linked.append(target)

    learner = Learner(store, claim)
    monkeypatch.setattr(local_backend.os, "fsync", failing_once)
    monkeypatch.setattr(local_backend.os, "link", linking)
    learner.publish()
    assert linked[1].name == "log"
    assert "log" in synced


def test_pickled_store_forgets_which_folders_are_synced(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.create("a/b", b"x")
    sent = pickle.loads(pickle.dumps(store))  # noqa: S301 - Ray pickles stores
    assert (sent, sent.get("a/b")) == (store, b"x")
    assert (bool(store._synced), sent._synced) == (True, set())


def test_log_entry_with_a_missing_index_object_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries_module, "LARGEST", 600)
    store = MemoryStore(uuid.uuid4().hex)
    Actors.begin(store).train(30)
    assert audit(store, deep=True).clean
    assert [*store.list("log_segments")]
    indexed = [n for n, path in enumerate(store.list("log")) if 6 < n < 60 and b'"index"' in store.get(path)]
    store.delete(json.loads(store.get(entry_path(indexed[0])))["index"]["path"])
    assert [violation.kind for violation in audit(store, deep=True).violations][:1] == ["missing"]
