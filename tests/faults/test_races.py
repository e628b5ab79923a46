"""Of two writers that want the same name at the same moment exactly one gets it, and the other stops with Conflict."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from rollflow.storage.errors import Conflict
from rollflow.storage.log.log import Log, Writer
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.policies import PolicyStore
from rollflow.storage.records import Cursor, GroupKey
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore
from rollflow.tasks.rollout.scheduler import Beginning
from tests.storage.test_stores import group, publish, staged
from tests.support.described import describe
from tests.support.waiting import HANG_SECONDS

pytestmark = pytest.mark.slow

FORK = multiprocessing.get_context("fork")
ROUNDS = 100

Results = multiprocessing.Queue  # of [(round, what was written)]

Step = Callable[[Path, int, int], str]  # (root, round, racer) -> what it wrote; raises Conflict if it lost


def race(root: Path, step: Step, rounds: int, racers: int = 2) -> list[list[str]]:
    """Take each round at the same moment in several processes; returns what each round's winners wrote."""
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


def learner(root: Path, number: int, _: int) -> str:
    """Publish version `number` + 1."""
    policies = PolicyStore(LocalStore(root))
    publish(policies, number + 1)
    return policies.writer


def scheduler(root: Path, number: int, _: int) -> str:
    """Commit batch `number`."""
    batches = TrajectoryStore(LocalStore(root))
    record, _ = batches.commit(staged(number, number), 0)
    return record.file


def supervisor(root: Path, _: int, racer: int) -> str:
    """Claim the run."""
    return str(Log(LocalStore(root)).claim("supervisor", who=f"racer {racer}", cluster="here").claim)


def test_two_learners_race_for_every_version(tmp_path: Path) -> None:
    publish(PolicyStore(LocalStore(tmp_path)), 0)
    won = race(tmp_path, learner, ROUNDS)
    assert [len(winners) for winners in won] == [1] * ROUNDS
    policies = PolicyStore(LocalStore(tmp_path))
    assert policies.latest() == ROUNDS
    for number, [winner] in enumerate(won):
        manifest = policies.manifest(number + 1)
        assert manifest.writer == winner
        assert manifest.parent == policies.manifest_sha256(number)


def test_two_schedulers_race_for_every_batch(tmp_path: Path) -> None:
    won = race(tmp_path, scheduler, ROUNDS)
    assert [len(winners) for winners in won] == [1] * ROUNDS
    batches = TrajectoryStore(LocalStore(tmp_path))
    assert [batches.read(number)[0].file for number in range(ROUNDS)] == [winner for [winner] in won]


def test_of_all_supervisors_only_the_newest_goes_on(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    describe(store)
    won = race(tmp_path, supervisor, ROUNDS // 2, racers=4)
    claims = sorted(int(claim) for winners in won for claim in winners)
    assert claims == list(range(1, 4 * (ROUNDS // 2) + 1))  # every claim is an entry of its own
    log = Log(store)
    Writer(log, "supervisor", claims[-1]).check()
    for claim in claims[:-1]:
        with pytest.raises(Conflict, match="another supervisor"):
            Writer(log, "supervisor", claim).check()


def settle_or_commit(root: Path, number: int, racer: int) -> str:
    """One begins anew and settles a void; the other does not know of it and commits the next batch."""
    batches = TrajectoryStore(LocalStore(root / str(number)))
    if racer == 0:
        Beginning.of(batches, 0)
        return "settled"
    batches.commit(StagedBatch(1, (group(1),), Cursor((2,), (0,)), (), (), order=1), async_ratio=1)
    return "committed"


def test_a_settlement_and_a_commit_race_for_one_name(tmp_path: Path) -> None:
    """Either the commit comes first and the settlement counts it in, or it fails: no dispatch gets two fates."""
    for number in range(20):
        store = LocalStore(tmp_path / str(number))
        record, _ = TrajectoryStore(store).commit(
            StagedBatch(0, (group(0),), Cursor((2,), (0,)), (GroupKey(1, 0),), ()), 0
        )
        store.delete(record.file)
        TrajectoryStore(store).void(0, "gone")
    won = race(tmp_path, settle_or_commit, 20)
    assert all("settled" in outcomes for outcomes in won)
    for number, outcomes in enumerate(won):
        found = Beginning.of(TrajectoryStore(LocalStore(tmp_path / str(number))), 0)
        if "committed" in outcomes:
            assert set(found.again) == {GroupKey(0, 1)}
        else:
            assert set(found.again) == {GroupKey(0, 1), GroupKey(1, 0)}
