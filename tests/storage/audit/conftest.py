"""Fixtures: runs to be audited, in memory."""

from __future__ import annotations

import uuid

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


@pytest.fixture
def run(store: MemoryStore) -> MemoryStore:
    """Return a run of `lagging`, without snapshots and stored audits."""
    lagging(store)
    assert audit(store).clean
    forget(store)
    return store


@pytest.fixture
def watched(store: MemoryStore) -> Watched:
    WATCHING[store.name] = lambda path: None
    return Watched(store.name)
