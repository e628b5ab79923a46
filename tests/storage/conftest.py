"""Provides stores for a run as fixtures, in a folder and in memory."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from rollflow.storage.objects import ObjectStore, open_store
from rollflow.storage.objects.memory import MemoryStore


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)
