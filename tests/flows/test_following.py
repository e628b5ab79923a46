"""A supervisor is stuck when it writes no status, and not while nobody can read one; a crash is followed up."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from rollflow.flows import following, recover
from rollflow.flows.following import AWAY, Following
from rollflow.flows.status import RunStatus
from rollflow.storage.errors import Unreachable
from rollflow.storage.objects import open_store
from rollflow.tasks.run import FORMAT, RunContext
from rollflow.tasks.settings import RunConfig

RUNNING = SimpleNamespace(
    is_completed=lambda: False, is_crashed=lambda: False, is_failed=lambda: False, is_final=lambda: False
)


class Clock(SimpleNamespace):
    """Stands where it is put."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def test_a_supervisor_that_nobody_can_read_of_is_not_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig()
    described = {"format": FORMAT, "run_id": "long", "config": config.model_dump(mode="json")}
    open_store(str(tmp_path)).put("run.json", json.dumps(described).encode())
    clock, crashes, answers = Clock(), list[str](), list[RunStatus | None]()

    def read(*_: Any) -> RunStatus | None:
        if not answers:
            raise Unreachable("object storage did not answer")
        return answers.pop()

    monkeypatch.setattr(following, "time", clock)
    monkeypatch.setattr(following, "read_status", read)
    monkeypatch.setattr(following, "flow_state", lambda _: RUNNING)
    monkeypatch.setattr(Following, "_crash", lambda self, reason: crashes.append(reason))
    monkeypatch.setattr(Following, "_start_again", lambda self, status: status)
    upkeep: Any = SimpleNamespace(look=lambda _: None, cluster_lost_at=0.0, services={})
    followed = Following(RunContext(str(tmp_path), tmp_path), uuid4(), upkeep)
    status = RunStatus("long", "training", seconds=5.0)

    def looks(seconds: float) -> None:
        nonlocal status
        until = clock.now + seconds
        while clock.now < until:
            clock.now += 10.0
            status = followed.look(followed.read(status))

    looks(10 * config.rollout.patience_seconds)
    assert crashes == []
    assert status.messages == (AWAY,)
    answers += [RunStatus("long", "training", seconds=5.0)] * 100  # it can be read again, and does not change
    looks(config.rollout.patience_seconds + 10)
    assert crashes == ["it wrote no status for too long"]


def test_a_run_whose_storage_is_away_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rollflow serve` looks after all crashed runs, in turn."""
    here, told, away = uuid4(), list[str](), ["s3://bucket/runs/first"]
    crashed = [
        SimpleNamespace(id=uuid4(), deployment_id=here, state_type="CRASHED", name=name, parameters={"storage": uri})
        for name, uri in (("first", away[0]), ("second", "/a/folder/runs/second"))
    ]
    client = SimpleNamespace(read_deployment_by_name=lambda _: SimpleNamespace(id=here))

    @contextlib.contextmanager
    def api() -> Iterator[Any]:
        yield client

    def start_again(flow_run: UUID, context: RunContext) -> Any:
        if context.uri in away:
            raise Unreachable("object storage did not answer")
        return recover.Successor(context, flow_run, recover.Pending("supervisor", "killed", 1))

    monkeypatch.setattr(recover, "api", api)
    monkeypatch.setattr(recover, "supervisors", lambda _: crashed)
    monkeypatch.setattr(recover, "start_again", start_again)
    monkeypatch.setattr(recover.Successor, "up", lambda _: False)
    pick_up = recover.PickUp("rollflow")
    pick_up.look(told.append)
    pick_up.look(told.append)
    assert told == ["run second goes on: killed"]
    away.clear()
    pick_up.look(told.append)
    assert told == ["run second goes on: killed", "run first goes on: killed"]
