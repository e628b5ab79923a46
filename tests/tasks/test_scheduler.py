"""Tests the scheduler on a virtual clock: whatever the schedule, no prompt is lost or trained on twice, and no
trajectory is older than alpha (the largest allowed staleness).

Each run is audited. The function `check` tests the same properties from the log entries and files, without the code
that both the audit and the run use to read the log.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import EngineFailed, Stale
from rollflow.storage.log.entries import BatchCommitted, BatchVoided, VersionPublished, WrittenEntry
from rollflow.storage.log.run_log import Log
from rollflow.storage.log.state import Deposed, GroupTooOld
from rollflow.storage.model_input import ModelInput
from rollflow.storage.objects import open_store
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import GroupKey, Prompt, TrajectoryGroup
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore, verify
from rollflow.tasks.actors import rollout as actor
from rollflow.tasks.engines.base import Generation, GenerationRequest
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.config import FilterConfig, Routing
from rollflow.tasks.rollout.group import GroupPorts, GroupRollout
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.clock import Deadlock, run_virtual
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.simulation.parts import check_fresh
from tests.support.counts import examples
from tests.support.described import describe
from tests.support.log_model import read_log
from tests.support.log_runs import read
from tests.support.pipeline import Damage, Pipeline


def fresh_store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def run_and_audit(pipeline: Pipeline) -> AuditReport:
    run_virtual(pipeline.run())
    check(pipeline)
    return audit(pipeline.store)


def trained(store: ObjectStore) -> Iterator[tuple[int, TrajectoryBatch]]:
    """Yield each version and the batch on which it was trained, using only log entries; check each batch file against
    its log entry.
    """
    entries = read(store)
    for entry in entries:
        if isinstance(entry.body, VersionPublished) and entry.body.batch_entry is not None:
            committed = entries[entry.body.batch_entry].body
            assert isinstance(committed, BatchCommitted)
            verify(committed.file, data := store.get(committed.file.path))
            yield entry.body.number, TrajectoryBatch.from_bytes(data)


def check(pipeline: Pipeline) -> None:
    """Check a finished run: all versions exist, each was trained on a fresh batch, and every dispatch has one fate."""
    keys = list[GroupKey]()
    for version, (number, batch) in enumerate(trained(pipeline.store), 1):
        assert version == number
        assert len(batch) == pipeline.groups * pipeline.group_size
        assert min(batch.table["started_version"].to_pylist()) >= version - 1 - pipeline.async_ratio
        keys += batch.keys
    assert len(set(keys)) == len(keys)
    read_log(pipeline.store).check_end(pipeline.versions, pipeline.groups, pipeline.state.in_flight)


@pytest.mark.long
@pytest.mark.many
@settings(max_examples=examples(400), deadline=None)
@given(
    alpha=st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]),
    groups=st.integers(1, 6),
    group_size=st.integers(1, 4),
    slots=st.integers(1, 16),
    engines=st.integers(1, 3),
    depth=st.integers(1, 40),
    train_seconds=st.floats(0.0, 2.0),
    sigma=st.floats(0.0, 2.0),
    in_flight=st.sampled_from(["continue", "restart"]),
    seed=st.integers(0, 1000),
)
def test_random_schedule_on_virtual_clock_passes_the_audit(
    alpha: float,
    groups: int,
    group_size: int,
    slots: int,
    engines: int,
    depth: int,
    train_seconds: float,
    sigma: float,
    in_flight: str,
    seed: int,
) -> None:
    report = run_and_audit(
        Pipeline(
            fresh_store(),
            groups=groups,
            group_size=group_size,
            slots=slots,
            engines=engines,
            max_inflight_groups=depth,
            async_ratio=alpha,
            train_seconds=train_seconds,
            sigma=sigma,
            in_flight=in_flight,
            seed=seed,
        )
    )
    assert report.violations == []
    assert report.versions == 6
    assert report.trajectories == 6 * groups * group_size
    assert max(report.staleness) <= alpha


CHOICES = st.fixed_dictionaries(
    {"on_stale": st.just("drop")},
    optional={
        "slots": st.integers(1, 24),
        "max_batches_ahead": st.just(0.0),
        "max_unscored": st.integers(1, 8),
        "max_preemptions": st.integers(1, 2),
        "redundant_groups": st.integers(1, 4),
        "redundant_responses": st.integers(1, 2),
        "tail_batching": st.just(True),
        "staleness_from": st.sampled_from(["started", "oldest-token"]),
        "filter": st.sampled_from([FilterConfig(min_mean=0.0), FilterConfig(max_mean=1.0)]),
    },
)
STRICT = st.fixed_dictionaries(
    {},
    optional={
        "slots": st.integers(1, 24),
        "max_batches_ahead": st.just(0.0),
        "on_stale": st.sampled_from(["drop", "wait"]),
        "batch_order": st.sampled_from(["finished", "started"]),
    },
)


@pytest.mark.long
@pytest.mark.many
@settings(max_examples=examples(400), deadline=None)
@given(
    alpha=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    groups=st.integers(1, 5),
    engines=st.integers(1, 3),
    depth=st.integers(1, 40),
    train_seconds=st.floats(0.0, 1.0),
    in_flight=st.sampled_from(["continue", "restart"]),
    routing=st.sampled_from(["least-work", "prefix"]),
    seed=st.integers(0, 1000),
    choices=CHOICES | STRICT,
    stops=st.lists(st.floats(0.05, 4.0), max_size=2),
    engine_deaths=st.lists(st.tuples(st.floats(0.0, 4.0), st.integers(0, 2)), max_size=2),
)
def test_random_rollout_options_lose_or_repeat_no_trajectory(
    alpha: float,
    groups: int,
    engines: int,
    depth: int,
    train_seconds: float,
    in_flight: str,
    routing: Routing,
    seed: int,
    choices: dict[str, Any],
    stops: list[float],
    engine_deaths: list[tuple[float, int]],
) -> None:
    store = fresh_store()

    def pipeline() -> Pipeline:
        return Pipeline(
            store,
            groups=groups,
            group_size=3,
            engines=engines,
            max_inflight_groups=depth,
            async_ratio=alpha,
            train_seconds=train_seconds,
            in_flight=in_flight,
            seed=seed,
            engine_deaths=engine_deaths,
            choices=choices,
            routing=routing,
        )

    for after in stops:
        run_virtual(stopped(pipeline(), after))
    report = run_and_audit(pipeline())
    assert report.violations == []
    assert report.versions == 6
    assert report.fates["trained"] == 6 * groups
    assert report.trajectories == 6 * groups * 3
    assert max(report.staleness) <= alpha


def test_alpha_zero_trains_only_on_the_current_version() -> None:
    report = run_and_audit(Pipeline(fresh_store(), async_ratio=0.0))
    assert set(report.staleness) == {0}
    assert report.fates == {"trained": 24}


def test_run_at_alpha_zero_reproduces_every_byte() -> None:
    stores = [fresh_store(), fresh_store()]
    for store, slots in zip(stores, (8, 8), strict=True):
        run_virtual(Pipeline(store, async_ratio=0.0, slots=slots).run())
    first, second = ([batch.table.to_pydict() for _, batch in trained(store)] for store in stores)
    assert first == second


def test_generation_overlaps_training_with_alpha_above_zero() -> None:
    """With alpha above 0, the run is faster than with alpha 0, because the learner does not wait for a whole batch at
    each step.
    """

    async def timed(alpha: float) -> float:
        await Pipeline(fresh_store(), versions=20, async_ratio=alpha).run()
        return asyncio.get_running_loop().time()

    synchronous, asynchronous = (run_virtual(timed(alpha)) for alpha in (0.0, 2.0))
    assert asynchronous < 0.8 * synchronous


def test_run_continues_from_storage_alone() -> None:
    """The run is stopped after three versions and continued by new objects; it still uses every prompt exactly once."""
    store = fresh_store()

    async def stopped() -> None:
        pipeline = Pipeline(store, versions=12, async_ratio=2.0)
        task = asyncio.create_task(pipeline.run())
        while not (hasattr(pipeline, "policies") and pipeline.policies.newest() >= 3):
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_virtual(stopped())
    half = audit(store)
    assert half.clean
    assert 3 <= half.versions < 12
    report = run_and_audit(Pipeline(store, versions=12, async_ratio=2.0))
    assert report.violations == []
    assert report.versions == 12


@pytest.mark.long
@pytest.mark.many
@settings(max_examples=examples(400), deadline=None)
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
        st.tuples(st.integers(0, 5), st.integers(0, 1)),
        st.sampled_from(["flipped", "cut", "gone", "not finite"]),
        max_size=4,
    ),
)
def test_deaths_and_corruption_lose_or_repeat_no_trajectory(
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
    """At random times, engines die, batch files are corrupted, and the whole process is stopped and resumed from its
    log.
    """
    store = fresh_store()

    def pipeline() -> Pipeline:
        return Pipeline(
            store,
            groups=groups,
            engines=engines,
            max_inflight_groups=depth,
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
    report = run_and_audit(last)
    assert report.violations == []
    assert report.versions == 6
    assert report.fates["trained"] == 6 * groups
    assert max(report.staleness) <= alpha
    voids = [entry for entry in read(store) if isinstance(entry.body, BatchVoided)]
    assert len(report.quarantined) == len(voids) == last.state.voids <= len(damage)


@pytest.mark.long
@pytest.mark.many
@settings(max_examples=examples(160), deadline=None)
@given(stops=st.lists(st.floats(0.05, 3.0), min_size=1, max_size=4), extra=st.integers(0, 2))
def test_killed_run_at_alpha_zero_trains_the_same_weights(stops: list[float], extra: int) -> None:
    """The trajectories must be equal, except for their times and the number of the attempt: a group that was preempted
    shortly before a kill may continue after the kill as the same attempt, with the same random draws.
    """

    def run(stops: list[float]) -> list[dict[str, Any]]:
        store, choices = fresh_store(), {"redundant_groups": extra, "on_stale": "drop"}
        for after in stops:
            run_virtual(stopped(Pipeline(store, async_ratio=0.0, group_size=3, choices=choices), after))
        run_virtual(Pipeline(store, async_ratio=0.0, group_size=3, choices=choices).run())
        other = ["attempt", "generation_seconds", "reward_seconds"]
        return [batch.table.drop_columns(other).to_pydict() for _, batch in trained(store)]

    assert run(stops) == run([])


async def stopped(pipeline: Pipeline, after: float) -> None:
    """Run for some virtual seconds, then stop without cleaning up."""
    task = asyncio.create_task(pipeline.run())
    await asyncio.wait([task], timeout=after)
    task.cancel()
    [outcome] = await asyncio.gather(task, return_exceptions=True)
    assert outcome is None or isinstance(outcome, asyncio.CancelledError)


class Dying(TimedEngine):
    """A timed engine that dies after some updates."""

    def __init__(self, config: TimedEngineConfig, updates: int) -> None:
        super().__init__(config)
        self.updates = updates

    async def update(self, version, weights):  # type: ignore[no-untyped-def]
        self.updates -= 1
        if self.updates < 0:
            raise EngineFailed("died on purpose")
        await super().update(version, weights)


def test_requests_of_a_dead_engine_move_to_another() -> None:
    config = TimedEngineConfig(max_concurrent_requests=8, max_new_tokens=64)
    engines = [TimedEngine(config), Dying(config, updates=2)]
    pipeline = Pipeline(fresh_store(), engine_list=engines)
    report = run_and_audit(pipeline)
    assert report.violations == []
    assert report.versions == 6
    assert list(pipeline.proxy.failed.values()) == ["died on purpose"]


def test_run_without_engines_fails_with_the_reason() -> None:
    engines = [Dying(TimedEngineConfig(max_concurrent_requests=8, max_new_tokens=64), updates=2)]
    with pytest.raises(BaseExceptionGroup) as caught:
        run_virtual(Pipeline(fresh_store(), engine_list=engines).run())
    assert "died on purpose" in str(caught.value.exceptions)


@pytest.mark.parametrize(("attempts", "fails"), [(3, False), (2, True)])
def test_failed_request_is_resent_and_its_group_kept(attempts: int, fails: bool) -> None:
    """For 2.5 s there is no engine. Each request waits for an engine for one second, so it fails twice."""

    class Noting(TimedEngine):
        given: tuple[str, ...] = ()

        async def generate(self, request: GenerationRequest) -> Generation:
            self.given += (request.id,)
            return await super().generate(request)

    async def main() -> None:
        config = TimedEngineConfig(max_concurrent_requests=4, max_new_tokens=64, sigma=1.5, seconds_per_token=0.1)
        engines = [Noting(config), Noting(config)]
        proxy = InferenceProxy(engines[:1], 4, 1.0)
        await proxy.update(0, Path(), WeightsProbe((), (), 0.0), "continue")
        ended = asyncio.Event()

        async def generated(_: int) -> None:
            ended.set()

        async def score(_: ScoreRequest) -> Score:
            return Score(1.0, "")

        limits = RolloutLimits(0, 1, 1, 4, 0.0, 9, attempts, 64, 1.0)
        rollout = GroupRollout(
            GroupKey(0, 0), GroupPorts(limits, proxy, score, generated, lambda *_: None), 4, 1, awaited=False
        )
        running = asyncio.create_task(rollout.run(Prompt("p", 0, "", "", ModelInput.of((1, 2)))))
        await ended.wait()
        engines[0].kill("killed by the test")
        await asyncio.sleep(2.5)
        await proxy.join(0, engines[1])
        if fails:
            with pytest.raises(BaseExceptionGroup) as caught:
                await running
            assert all(isinstance(error, EngineFailed) for error in caught.value.exceptions)
            return
        group = await running
        assert isinstance(group, TrajectoryGroup)
        assert sorted(t.sample for t in group.trajectories) == [0, 1, 2, 3]
        assert len(engines[0].given) == 4
        assert 0 < len(engines[1].given) < 4  # responses that had ended are not requested again

    run_virtual(main())


def test_group_older_than_alpha_is_not_committed() -> None:
    """Both checks of a batch, of which one is made in simulations and one by the log, reject the group."""
    pipeline = Pipeline(fresh_store(), async_ratio=0.0)
    run_virtual(pipeline.run())
    first, entry = next(trained(pipeline.store))[1].groups()[0], pipeline.state.n
    unused = GroupKey(pipeline.state.issued[0], 0)
    batch = StagedBatch(6, (replace(first, key=unused),), (unused.prompt,))
    with pytest.raises(Stale, match="started under version 0, but with async_ratio = 2 batch 6 takes only groups"):
        check_fresh(batch, 2.0)
    writer = Log(pipeline.store).claim("scheduler")
    with pytest.raises(
        GroupTooOld, match="started under version 0, but with async_ratio = 0 batch 6 takes only groups"
    ):
        TrajectoryStore(writer.log).commit(writer, batch)
    assert pipeline.state.n == entry + 1  # the only new entry is the claim


def test_virtual_clock_reports_a_deadlock() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtual(waits_for_ever())


def test_responses_older_than_alpha_are_started_again() -> None:
    """The learner is faster than the slowest responses, so slow groups become stale. They must be counted and issued
    again.
    """
    dropping = {"on_stale": "drop"}
    pipeline = Pipeline(fresh_store(), versions=12, async_ratio=1.0, train_seconds=0.01, slots=32, choices=dropping)
    report = run_and_audit(pipeline)
    assert report.violations == []
    assert report.fates["discarded: stale"] > 0
    assert report.discarded_tokens > 0
    assert report.fates["trained"] == 12 * pipeline.groups
    assert max(report.staleness) == 1


def test_replaced_scheduler_stops_at_its_next_read_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch of the old scheduler is still being formed, so no refused commit tells the old scheduler that it was
    replaced.
    """
    monkeypatch.setattr(actor, "NEWS_SECONDS", 0.0)
    describe(open_store(str(tmp_path)))
    context, looks, follow = RunContext(str(tmp_path), tmp_path / "cache"), list[int](), Log.follow
    context.log.claim("supervisor")

    def counted(self: Log) -> list[WrittenEntry]:
        looks.append(len(looks))
        if len(looks) == 3:
            Log(context.store).claim("scheduler", who="the second one")
        return follow(self)

    async def form() -> None:
        while len(looks) < 10:
            await asyncio.sleep(0.0)
        raise AssertionError("it goes on")

    async def watch() -> None:
        first = actor.RolloutActor(context, "")
        first.config, first.writer = context.config, context.log.claim("scheduler", who="the first one")
        first.feed = actor.StoreFeed(context, first.channel)
        monkeypatch.setattr(Log, "follow", counted)
        await first._wait_trained(asyncio.create_task(form()), 0)

    with pytest.raises(Deposed, match=r"another scheduler now \(the second one"):
        asyncio.run(watch())
    assert len(looks) == 3


class SlowlyScored(Pipeline):
    """A run whose scorer is slower than its engine. The run counts the responses that wait for a score."""

    waiting = most_waiting = 0

    async def _score(self, request: ScoreRequest) -> Score:
        self.waiting += 1
        self.most_waiting = max(self.waiting, self.most_waiting)
        score = await super()._score(request)
        self.waiting -= 1
        return score


@pytest.mark.parametrize("most", [1, 3, 6, None])
def test_queue_of_unscored_responses_is_bounded(most: int | None) -> None:
    pipeline = SlowlyScored(
        fresh_store(), async_ratio=8.0, reward_seconds=2.0, choices={"slots": 4, "max_unscored": most}
    )
    report = run_and_audit(pipeline)
    assert report.violations == []
    assert report.versions == 6
    running = 4 - 1 + pipeline.group_size  # responses that may still end when the queue is full
    if most is None:
        assert pipeline.most_waiting > 6 + running, "the scorer is fast enough without a bound"
    else:
        assert pipeline.most_waiting < most + running
    assert (pipeline.scheduler.counts.backlogged.seconds > 0) == (most is not None)
    assert pipeline.scheduler.scoring.waiting == 0
