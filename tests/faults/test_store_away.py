"""Tests a store that is unreachable for longer than all other time-outs: the run loses only that time."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import RECIPE, TIMING, Victim
from benchmarks.victims import kill_everything
from rollflow.storage.errors import ConfigError, Unreachable
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects.base import Data
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.objects.s3 import S3Store
from rollflow.storage.run_records.recoveries import Notes, Recovery, RecoveryLog
from rollflow.tasks.actors.learner import LearnerActor
from rollflow.tasks.actors.reward import RewardActor
from rollflow.tasks.actors.rollout import RolloutActor
from rollflow.tasks.run.context import RunContext
from tests.support.faulty_proxy import FaultyProxy
from tests.support.s3_server import s3_server, use

pytestmark = pytest.mark.slow

BUCKET = "away"
ANSWER, PATIENCE = 15, 25  # the config keys answer_seconds and patience_seconds, whose defaults are 30 and 600
SILENT, REFUSED = 30, 50


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server(BUCKET) as endpoint:
        yield endpoint


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(server) as made:
        use(made.endpoint, monkeypatch)
        yield made


@pytest.mark.soak
def test_run_continues_when_object_storage_answers_again(
    tmp_path: Path, server: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = RECIPE.format(seed=1, versions=60, engine="timed", timing=TIMING["timed"])
    recipe += f"answer_seconds = {ANSWER}\n[rollout]\npatience_seconds = {PATIENCE}\n"
    victim = Victim(tmp_path / "home", recipe, "--set", f"store.uri=s3://{BUCKET}")
    use(server, monkeypatch)  # the test reads the store without the proxy
    victim.store = S3Store(f"{BUCKET}/runs/chaos")
    victim.log, victim.recoveries = Log(victim.store), RecoveryLog(victim.store)
    try:
        victim.wait_version(5, 300)
        spent = victim.recoveries.read()  # on a busy machine a slow start may count as a stuck actor
        proxy.fall_silent()
        time.sleep(SILENT)
        proxy.refuse()
        time.sleep(REFUSED)
        before = victim.version()
        assert before < 40, "it was to stand still"
        proxy.come_back()
        victim.wait_version(before + 3, 120)
        outcome = victim.finish([], 400)
    finally:
        kill_everything(victim.home)
    assert victim.recoveries.read() == spent
    assert outcome.right, victim.tail()
    assert sum(json.loads(victim.store.get("summary.json"))["recoveries"].values()) == len(spent)
    printed = (victim.home / "output.log").read_text(errors="replace")
    assert "the run's storage does not answer; the run waits for it" in printed


async def call(method: Callable[[], Any]) -> Any:
    """Call an actor's method as Ray does, and return the result."""
    if asyncio.iscoroutinefunction(method):
        return await method()
    return await asyncio.to_thread(method)


async def test_actors_report_that_they_wait_for_storage(proxy: FaultyProxy, tmp_path: Path) -> None:
    """The actors are started while the store is unreachable. The stages would restart an actor that does not answer."""
    proxy.fall_silent()
    kinds: list[Any] = [partial(RolloutActor, address=""), LearnerActor, RewardActor]
    actors = [kind(RunContext(f"s3://{BUCKET}/none", tmp_path, patience=60.0)) for kind in kinds]
    running: list[Awaitable[Any]] = [asyncio.create_task(call(actor.run)) for actor in actors]
    limit = time.monotonic() + 60
    for actor in actors:
        while not (waits := (await call(actor.status)).waits_for).startswith("object storage: "):
            assert time.monotonic() < limit, waits
            await asyncio.sleep(0.1)
    proxy.come_back()
    for actor, run in zip(actors, running, strict=True):
        with pytest.raises(ConfigError, match=r"there is no such run"):
            await run
        assert (await call(actor.status)).waits_for == ""


class Away(MemoryStore):
    """A store whose next writes fail, although the first one is stored."""

    failures = 3

    def create(self, path: str, data: Data) -> None:
        if Away.failures == 3:
            super().create(path, data)
        Away.failures -= 1
        if Away.failures >= 0:
            raise Unreachable("object storage did not answer")
        super().create(path, data)


def test_recovery_record_is_kept_until_storage_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.storage.run_records.recoveries.AGAIN_SECONDS", 0.01)
    run = Away(uuid.uuid4().hex)
    notes, made = Notes(run), [Recovery("learner", f"killed {n}", 1.0, 2.0, 3.0) for n in range(3)]
    for recovery in made:
        notes.add(recovery)
    assert notes.flush(60)
    assert RecoveryLog(run).read() == made
