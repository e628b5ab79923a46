"""Provides runs in memory as fixtures, for tests of the audit."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.log import snapshots
from rollflow.storage.objects.memory import MemoryStore
from tests.support.audited import WATCHING, Watched, lagging
from tests.support.log_runs import forget


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a snapshot after every fourth entry."""
    monkeypatch.setattr(snapshots, "EVERY", 4)


@pytest.fixture(scope="session")
def objects() -> Mapping[str, bytes]:
    """Create a run by `lagging`, and return its objects, except snapshots and results of audits."""
    made = MemoryStore(uuid.uuid4().hex)
    lagging(made)
    assert audit(made).clean
    forget(made)
    return {path: made.get(path) for path in made.list()}


@pytest.fixture
def run(store: MemoryStore, objects: Mapping[str, bytes]) -> MemoryStore:
    """Return a store with a copy of the run's objects."""
    for path, data in objects.items():
        store.put(path, data)
    return store


@pytest.fixture
def watched(store: MemoryStore) -> Watched:
    WATCHING[store.name] = lambda path: None
    return Watched(store.name)
