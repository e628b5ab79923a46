"""The log where processes are killed, race each other, and where an S3 service fails six requests of ten."""

from __future__ import annotations

import multiprocessing
import random
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from rollflow.storage.errors import Conflict
from rollflow.storage.log.log import Log
from rollflow.storage.log.state import Refused
from rollflow.storage.objects import s3_requests
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.objects.s3 import S3Store
from rollflow.storage.objects.s3_requests import Patience
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.log_actors import Learner, Scheduler, Supervisor, chained, create_run, entries
from tests.support.s3_server import s3_server, use
from tests.support.waiting import HANG_SECONDS

pytestmark = pytest.mark.slow

FORK = multiprocessing.get_context("fork")
KINDS = (Fault.THROTTLE, Fault.ERROR, Fault.RESET, Fault.LOST, Fault.TRUNCATED, Fault.SLOW)
KILLS = 60
RACES = 100


def work(root: Path, role: Literal["scheduler", "learner"]) -> None:
    """One role's process: begins from storage, and goes on until somebody kills it."""
    store = LocalStore(root)
    under = Log(store).state.newest_claim("supervisor")
    actor = Scheduler(store, under) if role == "scheduler" else Learner(store, under)
    while True:
        actor.log.follow()
        if isinstance(actor, Scheduler):
            if actor.next <= actor.log.state.version + 2:
                actor.commit()
        elif actor.log.state.version < 0 or actor.log.state.version in actor.log.state.waiting:
            actor.publish()
            if actor.log.state.releasable:
                actor.prune()


def test_processes_that_are_killed_at_any_moment_leave_a_whole_log(tmp_path: Path) -> None:
    store, draw = LocalStore(tmp_path), random.Random(0)
    create_run(store)
    Supervisor(store)
    roles: dict[Literal["scheduler", "learner"], multiprocessing.process.BaseProcess] = {}
    for kill in range(KILLS):
        for role in ("scheduler", "learner"):
            if role not in roles:
                roles[role] = FORK.Process(target=work, args=(tmp_path, role), daemon=True)
                roles[role].start()
        time.sleep(draw.uniform(0.0, 0.3))
        victim = roles.pop(draw.choice(("scheduler", "learner")))
        victim.kill()
        victim.join(HANG_SECONDS)
        if kill % 20 == 19:
            Supervisor(store)
    for process in roles.values():
        process.kill()
        process.join(HANG_SECONDS)
    log = Log(store)
    state = log.state
    assert state.version > 0
    assert state.totals.groups["trained"] == 2 * state.version
    assert chained(entries(store))
    named = {waiting.file.path for waiting in state.waiting.values()}
    assert all(store.exists(path) for path in named)


def race(root: Path, racer: int, rounds: int, barrier: object, results: multiprocessing.Queue[tuple[int, int]]) -> None:
    """Claim, commit and publish at the same moment as another; say who of the two published what."""
    store = LocalStore(root)
    for number in range(rounds):
        barrier.wait(HANG_SECONDS)  # type: ignore[attr-defined]  # a barrier
        under = Log(store).state.newest_claim("supervisor")
        try:
            learner = Learner(store, under)
            learner.log.follow()
            if learner.log.state.version == number - 1:
                learner.publish()
                results.put((number, racer))
        except (Conflict, KeyError):
            pass
        barrier.wait(HANG_SECONDS)  # type: ignore[attr-defined]
        if racer == 0:
            finish_round(store, number, under)


def finish_round(store: LocalStore, number: int, under: int) -> None:
    """Version `number`, if both have deposed each other, and the batch that the next one is trained on."""
    learner = Learner(store, under)
    if learner.log.state.version < number:
        learner.publish()
    scheduler = Scheduler(store, under)
    scheduler.commit()


def test_of_two_learners_one_publishes_each_version(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    create_run(store)
    Supervisor(store)
    barrier, results = FORK.Barrier(2), FORK.Queue()
    racers = [FORK.Process(target=race, args=(tmp_path, n, RACES, barrier, results)) for n in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(10 * HANG_SECONDS)
        assert racer.exitcode == 0
    winners: Counter[int] = Counter()
    while not results.empty():
        winners[results.get()[0]] += 1
    assert max(winners.values()) == 1
    assert Log(store).state.version == RACES - 1
    assert chained(entries(store))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server("log-faults") as endpoint:
        yield endpoint


def test_on_a_service_that_fails_six_requests_of_ten(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost answer is not a lost entry, and never two."""
    monkeypatch.setattr(s3_requests, "PATIENT", Patience(tries=25, pause_seconds=0.01, longest_pause_seconds=0.1))
    store = S3Store(f"log-faults/{uuid.uuid4().hex}")
    with FaultyProxy(server, dict.fromkeys(KINDS, 0.1), seed=11) as proxy:
        use(proxy.endpoint, monkeypatch)
        create_run(store)
        supervisor = Supervisor(store)
        scheduler, learner = Scheduler(store, supervisor.writer.claim), Learner(store, supervisor.writer.claim)
        learner.publish()
        for version in range(12):
            if version == 6:
                scheduler = Scheduler(store, supervisor.writer.claim)
            scheduler.log.follow()
            try:
                scheduler.commit()
            except Refused:
                pytest.fail("the only scheduler was refused")
            learner.log.follow()
            learner.publish()
            learner.prune()
        learner.log.settle()
        state = Log(store).state
        assert all(proxy.faults[kind] for kind in KINDS)
    use(server, monkeypatch)
    assert (state.version, state.totals.groups) == (12, {"trained": 24})
    listed = entries(store)
    assert chained(listed)
    assert len(listed) == state.n + 1
