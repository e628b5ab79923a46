"""Tests two run homes that serve the same run on one Prefect server: the second is refused, and neither deletes the
other's deployments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollflow.flows.registration import registering
from rollflow.flows.registration.prefect_api import OF_SESSION
from rollflow.flows.registration.registering import DEAD_SECONDS, check_unserved, home_tag, withdraw
from rollflow.storage.errors import ConfigError

NAME = "run-1234"


class Server(SimpleNamespace):
    """A made-up Prefect server with deployments and a clock; a wait advances the clock."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for one in self.there:
            if one.served:
                one.last_polled = datetime.fromtimestamp(self.now, UTC)

    def add(self, home: Path, name: str = NAME, *, served: bool = True) -> Any:
        made = datetime.fromtimestamp(self.now, UTC)
        tags = [OF_SESSION, home_tag(home)]
        one = SimpleNamespace(id=len(self.there), name=name, tags=tags, last_polled=made, created=made, served=served)
        self.there.append(one)
        return one

    def read_deployments(self, **_: Any) -> list[Any]:
        return list(self.there)

    def delete_deployment(self, number: int) -> None:
        self.there = [one for one in self.there if one.id != number]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server(there=[])

    @contextlib.contextmanager
    def api() -> Iterator[Server]:
        yield made

    monkeypatch.setattr(registering, "open_client", api)
    monkeypatch.setattr(registering, "time", made)
    return made


def test_run_that_another_run_home_trains_is_refused(server: Server, tmp_path: Path) -> None:
    server.add(tmp_path / "other")
    with pytest.raises(
        ConfigError, match=f"{NAME} is already running on this Prefect server, started by another command"
    ):
        check_unserved(NAME, tmp_path / "mine")


def test_run_command_waits_until_a_dead_run_command_expires(server: Server, tmp_path: Path) -> None:
    server.add(tmp_path / "other", served=False)
    check_unserved(NAME, tmp_path / "mine")
    assert server.now - 1000.0 == pytest.approx(DEAD_SECONDS, abs=2.0)


def test_run_is_not_blocked_by_its_own_run_home_or_other_runs(server: Server, tmp_path: Path) -> None:
    server.add(tmp_path / "mine")
    server.add(tmp_path / "other", "another-run")
    check_unserved(NAME, tmp_path / "mine")
    assert server.now == 1000.0


def test_run_command_deletes_its_own_prefect_deployments(server: Server, tmp_path: Path) -> None:
    mine, other = server.add(tmp_path / "mine"), server.add(tmp_path / "other")
    before = server.add(tmp_path / "mine")
    before.tags = [OF_SESSION]  # an older version of rollflow registered deployments without the home's tag
    withdraw(NAME, tmp_path / "mine")
    assert server.there == [other]
    assert mine is not other
