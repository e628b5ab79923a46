"""The shipped scheduler and channel on a run's log: any schedule, any death, any rot, and what the log says of it."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.batches import BatchLog
from rollflow.storage.log.entries import BatchCommitted, BatchVoided, Entry, VersionPublished
from rollflow.storage.log.log import Log
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import GroupKey
from rollflow.tasks.clock import run_virtual
from tests.support.log_pipeline import LogPipeline
from tests.support.pipeline import Damage
from tests.tasks.test_scheduler import CHOICES, STRICT, stopped


def fresh_store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def entries(store: ObjectStore) -> list[Entry]:
    """All of them, from the first."""
    log, found = Log(store), []
    for n in range(log.state.n + 1):
        written = log.read(n)
        assert written is not None
        found.append(written.entry)
    return found


def trained(store: ObjectStore) -> list[tuple[int, TrajectoryBatch]]:
    """(version it was trained into, batch), by the log, each file checked against its entry."""
    listed, batches, found = entries(store), BatchLog(Log(store)), []
    for entry in listed:
        if isinstance(entry.body, VersionPublished) and entry.body.batch_entry is not None:
            committed = listed[entry.body.batch_entry].body
            assert isinstance(committed, BatchCommitted)
            found.append((entry.body.number, TrajectoryBatch.from_bytes(batches.read(committed.file))))
    return found


def check(pipeline: LogPipeline) -> None:
    """What the log and the files say of a run that has ended: independent of the fold that let it happen."""
    config, rows = pipeline, trained(pipeline.store)
    assert [version for version, _ in rows] == list(range(1, config.versions + 1))
    keys: Counter[GroupKey] = Counter()
    for version, batch in rows:
        assert len(batch) == config.groups * config.group_size
        assert min(batch.table["started_version"].to_pylist()) >= version - 1 - config.async_ratio
        keys.update(batch.keys)
    assert max(keys.values()) == 1
    prompts = Counter(key.prompt for key in keys)
    assert max(prompts.values()) == 1
    voids = [entry.body for entry in entries(config.store) if isinstance(entry.body, BatchVoided)]
    assert len(voids) == config.state.voids
    fates: Counter[GroupKey] = Counter(keys)
    waiting = {waiting.entry for waiting in config.state.waiting.values()}
    voided = {void.entry for void in voids}
    for entry in entries(config.store):
        if isinstance(entry.body, BatchCommitted):
            fates.update(discard.key for discard in entry.body.discards)
            if entry.n in voided | waiting:
                fates.update(group.key for group in entry.body.groups)
    fates.update(config.state.in_flight)
    assert set(fates.values()) == {1}  # every dispatch, one fate
    for prompt in range(max(key.prompt for key in fates) + 1):
        attempts = sorted(key.attempt for key in fates if key.prompt == prompt)
        assert attempts == list(range(len(attempts)))


@settings(max_examples=60, deadline=None)
@given(
    alpha=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    groups=st.integers(1, 5),
    engines=st.integers(1, 3),
    depth=st.integers(1, 20),
    train_seconds=st.floats(0.0, 1.0),
    in_flight=st.sampled_from(["continue", "restart"]),
    seed=st.integers(0, 1000),
    shares=st.sampled_from([(1.0,), (0.6, 0.4), (0.5, 0.25, 0.25)]),
    choices=CHOICES | STRICT,
    stops=st.lists(st.floats(0.05, 4.0), max_size=4),
    engine_deaths=st.lists(st.tuples(st.floats(0.0, 4.0), st.integers(0, 2)), max_size=4),
    damage=st.dictionaries(
        st.tuples(st.integers(0, 5), st.integers(0, 1)), st.sampled_from(["flipped", "cut", "gone"]), max_size=4
    ),
)
def test_whatever_dies_or_rots_nothing_is_lost_or_doubled(
    alpha: float,
    groups: int,
    engines: int,
    depth: int,
    train_seconds: float,
    in_flight: str,
    seed: int,
    shares: tuple[float, ...],
    choices: dict[str, Any],
    stops: list[float],
    engine_deaths: list[tuple[float, int]],
    damage: dict[tuple[int, int], Damage],
) -> None:
    store = fresh_store()

    def pipeline() -> LogPipeline:
        return LogPipeline(
            store,
            groups=groups,
            engines=engines,
            depth=depth,
            async_ratio=alpha,
            train_seconds=train_seconds,
            in_flight=in_flight,
            seed=seed,
            shares=shares,
            engine_deaths=engine_deaths,
            choices=choices,
            damage=damage,
        )

    for after in stops:
        run_virtual(stopped(pipeline(), after))
    last = pipeline()
    run_virtual(last.run())
    check(last)


@settings(max_examples=20, deadline=None)
@given(stops=st.lists(st.floats(0.05, 3.0), min_size=1, max_size=4), extra=st.integers(0, 2))
def test_at_alpha_zero_a_run_that_was_killed_trains_the_same_trajectories(stops: list[float], extra: int) -> None:
    """Equal means trajectories. Entries tell of claims; and a group that was left behind when a commit was made, and
    had not noticed, goes on after a kill as the same attempt, with the same draws."""

    def run(store: ObjectStore, stops: list[float]) -> list[dict[str, Any]]:
        def pipeline() -> LogPipeline:
            return LogPipeline(store, async_ratio=0.0, group_size=3, choices={"extra_groups": extra})

        for after in stops:
            run_virtual(stopped(pipeline(), after))
        run_virtual(pipeline().run())
        other = ["attempt", "generation_seconds", "reward_seconds"]
        return [batch.table.drop_columns(other).to_pydict() for _, batch in trained(store)]

    assert run(fresh_store(), stops) == run(fresh_store(), [])
