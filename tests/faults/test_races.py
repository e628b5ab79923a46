"""Tests races of writers for the same log entry: the log decides which writer succeeds, and the others stop."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from rollflow.storage.errors import Conflict
from rollflow.storage.log.entries import BatchCommitted, Claimed, VersionPublished
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.log.state import EntryRefused
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.records import GroupKey
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.rollout.resuming.resume_point import ResumePoint
from tests.support.batches import begin, file_of, learning, publish, ready, scheduling, staged, train
from tests.support.described import describe
from tests.support.log_model import Model, read_log
from tests.support.log_runs import of_kind
from tests.support.waiting import HANG_SECONDS

pytestmark = pytest.mark.slow

FORK = multiprocessing.get_context("fork")
ROUNDS = 100

Results = multiprocessing.Queue  # a queue of [(round, name of the written entry)]

# (root, round, racer) -> what the racer wrote; raises Conflict if the racer lost
Step = Callable[[Path, int, int], str]


def race(root: Path, step: Step, rounds: int, racers: int = 2) -> list[list[str]]:
    """Let several processes start each round at the same moment; return the entries that the winners of each round
    wrote.
    """
    barrier, results = FORK.Barrier(racers), FORK.Queue()
    children = [FORK.Process(target=_racer, args=(root, step, rounds, n, barrier, results)) for n in range(racers)]
    for child in children:
        child.start()
    won: list[list[str]] = [[] for _ in range(rounds)]
    for _ in children:
        for number, wrote in results.get(timeout=HANG_SECONDS):
            won[number].append(wrote)
    for child in children:
        child.join()
    return won


def _racer(root: Path, step: Step, rounds: int, racer: int, barrier: Barrier, results: Results) -> None:
    won = []
    for number in range(rounds):
        barrier.wait(HANG_SECONDS)
        try:
            won.append((number, step(root, number, racer)))
        except Conflict:
            continue
    results.put(won)


def check_story(store: LocalStore) -> Model:
    """Check the log without the code that runs use to read it: its chain of hashes, one fate per dispatch, and each
    version's batch.
    """
    model = read_log(store)
    model.check_story()
    return model


def learner(root: Path, number: int, _: int) -> str:
    """Claim the learner's role and publish version `number` + 1."""
    policies, writer = learning(LocalStore(root))
    if number not in policies.log.state.waiting:
        raise EntryRefused(f"version {number + 1} is there")
    return str(publish(policies, writer, number + 1).claim)


def scheduler(root: Path, number: int, _: int) -> str:
    """Claim the scheduler's role and commit batch `number`."""
    batches, writer = scheduling(LocalStore(root))
    entry, _data = batches.commit(writer, staged(number))
    assert isinstance(entry.body, BatchCommitted)
    return entry.body.file.path


def supervisor(root: Path, _: int, racer: int) -> str:
    """Claim the supervisor's role."""
    return str(Log(LocalStore(root)).claim("supervisor", who=f"racer {racer}", cluster="here").claim)


def test_two_racing_learners_publish_each_version_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    batches, writer = ready(store, async_ratio=ROUNDS)
    for number in range(ROUNDS):
        batches.commit(writer, staged(number))
    won = race(tmp_path, learner, ROUNDS)
    assert [len(winners) for winners in won] == [1] * ROUNDS
    assert [str(entry.claim) for entry in of_kind(store, VersionPublished)[1:]] == [winner for [winner] in won]
    assert check_story(store).latest == ROUNDS


def test_two_racing_schedulers_commit_each_batch_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    ready(store, async_ratio=ROUNDS)
    won = race(tmp_path, scheduler, ROUNDS)
    assert [len(winners) for winners in won] == [1] * ROUNDS
    assert [file_of(TrajectoryStore(Log(store)), number).path for number in range(ROUNDS)] == [w for [w] in won]
    check_story(store)


def test_only_the_newest_of_racing_supervisors_continues(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    describe(store)
    won = race(tmp_path, supervisor, ROUNDS // 2, racers=4)
    claims = sorted(int(claim) for winners in won for claim in winners)
    assert claims == list(range(1, 4 * (ROUNDS // 2) + 1))  # every claim is a log entry of its own
    log = Log(store)
    Writer(log, "supervisor", claims[-1]).check()
    for claim in claims[:-1]:
        with pytest.raises(Conflict, match="another supervisor"):
            Writer(log, "supervisor", claim).check()


def void_begin_or_commit(root: Path, number: int, racer: int) -> str:
    """Do what the number of the racer says: void batch 0 as the learner, start another scheduler, or commit batch 1 as
    the old scheduler.
    """
    store = LocalStore(root / str(number))
    if racer == 0:
        batches = TrajectoryStore(Log(store))
        return f"voided: {batches.void(_holder(store, 'learner'), 0, 'gone')}"
    if racer == 1:
        batches, _writer = scheduling(store)
        return f"began: {len(batches.log.state.holes)}"
    writer = _holder(store, "scheduler")
    TrajectoryStore(writer.log).commit(writer, staged(1))
    return "committed"


def _holder(store: LocalStore, role: str) -> Writer:
    """Return a writer with the first claim of a role and a view of the log of its own."""
    claim = next(entry for entry in of_kind(store, Claimed) if entry.role == role)
    return Writer(Log(store), claim.role, claim.claim)


def test_racing_batch_writes_give_each_prompt_one_outcome(tmp_path: Path) -> None:
    """The commit either succeeds before the new scheduler's claim, so that the new scheduler sees it, or it fails. No
    dispatch has two fates.
    """
    for number in range(20):
        store = LocalStore(tmp_path / str(number))
        begin(store, async_ratio=1)
        train(store, 1)
        batches, writer = scheduling(store)
        batches.commit(writer, staged(0))
        store.delete(file_of(batches, 0).path)
    won = race(tmp_path, void_begin_or_commit, 20, racers=3)
    for number, outcomes in enumerate(won):
        store = LocalStore(tmp_path / str(number))
        assert "voided: True" in outcomes
        assert any(outcome.startswith("began") for outcome in outcomes)
        found = ResumePoint.of_state(Log(store).state)
        again = {GroupKey(0, 1), GroupKey(1, 1), GroupKey(2, 1)}  # the third dispatch was preempted before
        assert set(found.again) == again | ({GroupKey(5, 1)} if "committed" in outcomes else set())
        assert (found.missing, found.number) == ((0,), 2 if "committed" in outcomes else 1)
        check_story(store)
