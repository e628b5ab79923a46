"""Tests the effects of the scheduler's config keys, on a virtual clock."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.baselines import BatchScheduler
from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.model_input import ModelInput
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Cursor, Discard, DiscardReason, GroupKey
from rollflow.tasks.actors.rollout import find_first_cause
from rollflow.tasks.engines.base import Generation, GenerationRequest
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.policies.config import PolicyConfig
from rollflow.tasks.rollout.config import FilterConfig, RolloutConfig, Routing
from rollflow.tasks.rollout.issue_order import Issue, IssueOrder
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.proxy import InferenceProxy, RequestOptions, WeightsProbe
from rollflow.tasks.rollout.scheduler import RolloutScheduler
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.limits import build_limits
from rollflow.tasks.runtime.clock import run_virtual
from tests.support.expected import expected_of
from tests.support.pipeline import Pipeline

NO_PROBE = WeightsProbe((), (), 0.1)
DROP: Any = {"on_stale": "drop"}


def ran(**kwargs: Any) -> tuple[Pipeline, float]:
    """Run a pipeline to its end and audit it; return the pipeline, and the virtual seconds that it took."""

    async def timed() -> tuple[Pipeline, float]:
        pipeline = Pipeline(MemoryStore(uuid.uuid4().hex), **kwargs)
        await pipeline.run()
        return pipeline, asyncio.get_running_loop().time()

    pipeline, seconds = run_virtual(timed())
    assert audit(pipeline.store, expected=expected_of(pipeline)).violations == []
    return pipeline, seconds


def commits(pipeline: Pipeline) -> list[BatchCommitted]:
    """List the trained batches in order."""
    entries = [pipeline.policies.find(version).batch_entry for version in range(1, pipeline.versions + 1)]
    return [pipeline.batches.read_commit(entry) for entry in entries if entry is not None]


def batches(pipeline: Pipeline) -> list[TrajectoryBatch]:
    return [TrajectoryBatch.from_bytes(pipeline.batches.read(commit.file)) for commit in commits(pipeline)]


def reasons(pipeline: Pipeline) -> Counter[str]:
    return Counter(d.reason.value for commit in commits(pipeline) for d in commit.discards)


# --- redundancy and tail batching ---------------------------------------------------------------------------


def test_redundant_prompts_shorten_a_step_and_are_reissued() -> None:
    common = {"versions": 30, "groups": 8, "async_ratio": 0.0, "slots": 64, "train_seconds": 0.0}
    common |= {"seconds_per_token": 0.1, "sigma": 0.5}
    _, plain = ran(**common)
    pipeline, spared = ran(**common, choices={"redundant_groups": 4, **DROP})
    assert spared < 0.9 * plain
    assert set(reasons(pipeline)) == {"redundant"}
    waiting = {key.prompt for key in pipeline.state.in_flight}
    trained = {key.prompt for commit in commits(pipeline) for key in commit.groups}
    assert waiting | trained == set(range(pipeline.state.issued[0]))  # every preempted prompt will be issued again


def test_group_keeps_the_first_group_size_responses_to_end() -> None:
    common = {"versions": 20, "async_ratio": 0.0, "slots": 64, "group_size": 4, "train_seconds": 0.0}
    common |= {"seconds_per_token": 0.1, "sigma": 0.5}
    _, plain = ran(**common)
    pipeline, spared = ran(**common, choices={"redundant_responses": 2})
    assert spared < 0.9 * plain
    assert pipeline.scheduler.counts.surplus_tokens > 0
    assert commits(pipeline)[0].rows == len(batches(pipeline)[0]) == 4 * 4
    assert reasons(pipeline) == {}


def test_slow_prompts_get_their_own_batch() -> None:
    choices = {"redundant_groups": 2, "tail_batching": True, **DROP}
    pipeline, _ = ran(versions=40, groups=6, async_ratio=0.0, slots=64, sigma=1.5, choices=choices)
    made = commits(pipeline)
    attempts = [{key.attempt > 0 for key in commit.groups} for commit in made]
    assert attempts.count({True}) >= 5  # long rounds (for slow prompts) have only preempted prompts
    assert {False, True} not in attempts[:-1]
    # the last round takes the waiting prompts, and only extra groups do not fit into it
    assert len(pipeline.state.open) <= 1


def test_batch_of_slow_prompts_has_no_redundant_prompts() -> None:
    limits = RolloutLimits(
        0, 9, 2, 1, 0.0, 9, 1, 9, 1.0, redundant_groups=1, redundant_responses=1, tail_batching=True, **DROP
    )
    order = IssueOrder(limits, Cursor((5,), (0,)), [GroupKey(4, 0), GroupKey(3, 1)], [(3, 1)])
    assert order.count_extra_groups(0) == 1
    assert order.next_issue(0).key == GroupKey(4, 0)
    order.note_discard(Discard(GroupKey(4, 0), DiscardReason.REDUNDANT, 0, 7))
    assert order.count_extra_groups(0) == 1  # this round stays short to its end
    assert order.next_issue(0).key == GroupKey(5, 0)
    order.advance(1)
    assert order.count_extra_groups(1) == 0
    issued = [order.next_issue(1), order.next_issue(1)]
    assert [issue.key for issue in issued] == [GroupKey(3, 1), GroupKey(4, 1)]
    assert all(issue.awaited and issue.responses == 1 for issue in issued)
    assert order.next_issue(1).key == GroupKey(6, 0)  # no slow prompt is waiting


def test_last_batch_contains_all_preempted_prompts() -> None:
    limits = RolloutLimits(
        0, 3, 2, 1, 0.0, 9, 1, 9, 1.0, redundant_groups=1, redundant_responses=1, tail_batching=True, **DROP
    )
    assert limits.batches == 3
    order = IssueOrder(limits, Cursor((5,), (0,)), [GroupKey(3, 1)], [(3, 1)])
    assert order.count_extra_groups(1) == 1
    assert order.next_issue(1).key == GroupKey(5, 0)  # one prompt is too few for a long round
    assert order.count_extra_groups(2) == 0
    issued = [order.next_issue(2), order.next_issue(2)]
    assert [issue.key for issue in issued] == [GroupKey(3, 1), GroupKey(6, 0)]
    assert [issue.awaited for issue in issued] == [True, False]
    assert all(issue.responses == 1 for issue in issued)


def spoken(pipeline: Pipeline) -> dict[tuple[int, int], tuple[int, ...]]:
    """Map (prompt, sample) to its trained tokens."""
    groups = [group for batch in batches(pipeline) for group in batch.groups()]
    return {(group.key.prompt, one.sample): one.tokens for group in groups for one in group.trajectories}


def test_preempted_prompt_gets_the_same_response_lengths_again() -> None:
    """With new draws, preempted groups would usually get shorter responses, so redundant groups would bias lengths."""
    common = {"versions": 30, "groups": 8, "async_ratio": 0.0, "slots": 64, "sigma": 1.5}
    plain, _ = ran(**common)
    pipeline, _ = ran(**common, choices={"redundant_groups": 8, **DROP})
    drawn, kept = spoken(plain), spoken(pipeline)
    again = {key.prompt for commit in commits(pipeline) for key in commit.groups if key.attempt}
    assert len(again) > 30
    assert all(kept[which] == drawn[which] for which in kept.keys() & drawn.keys())


@pytest.mark.long
def test_batch_waits_for_a_prompt_after_max_preemptions() -> None:
    """The first 4 of 10 groups make a batch, so the group with the longest responses would wait forever. After
    `max_preemptions`, the batch waits for this group.
    """
    common: dict[str, Any] = {"versions": 60, "async_ratio": 0.0, "slots": 64, "sigma": 1.5}
    common["choices"] = {"redundant_groups": 6, **DROP}
    starving, _ = ran(**common | {"choices": common["choices"] | {"max_preemptions": 10**6}})
    times = Counter(d.key.prompt for commit in commits(starving) for d in commit.discards)
    assert max(times.values()) > 5
    for most in (1, 2):
        pipeline, _ = ran(**common | {"choices": common["choices"] | {"max_preemptions": most}})
        slow = Counter(d.key.prompt for commit in commits(pipeline) for d in commit.discards if d.slow)
        assert most <= max(slow.values()) <= most + 2


def test_restarted_scheduler_knows_preempted_prompts() -> None:
    order = IssueOrder(limits_for(max_preemptions=2), Cursor((9,), (0,)), [GroupKey(3, 5), GroupKey(4, 1)], [(4, 2)])
    assert [order.next_issue(0) for _ in range(2)] == [Issue(GroupKey(3, 5), 1, False), Issue(GroupKey(4, 1), 1, True)]
    order.note_discard(Discard(GroupKey(3, 5), DiscardReason.STALE, 0, 7))
    order.advance(1)
    assert order.next_issue(1) == Issue(GroupKey(3, 6), 1, False)  # preempted once, so it does not count as slow yet


def test_preemption_counts_of_finished_prompts_are_deleted() -> None:
    order = IssueOrder(
        limits_for(max_preemptions=2), Cursor((9,), (0,)), [GroupKey(3, 5), GroupKey(4, 1)], [(3, 1), (4, 2)]
    )
    order.forget_slowness([4, 8])
    order.note_discard(Discard(GroupKey(3, 5), DiscardReason.FILTERED, 0, 7))
    assert not order._behind


@pytest.mark.parametrize("reason", list(DiscardReason))
@pytest.mark.parametrize("tokens", [0, 7])
def test_only_preempted_running_prompts_count_as_slow(reason: DiscardReason, tokens: int) -> None:
    """An engine's death, a corrupt batch, or a request that had no time to start does not make a prompt slow."""
    order = IssueOrder(limits_for(tail_batching=True), Cursor((9,), (0,)), [])
    order.note_discard(discard := Discard(GroupKey(3, 0), reason, 0, tokens))
    slow = tokens > 0 and reason in (DiscardReason.REDUNDANT, DiscardReason.STALE)
    assert discard.slow == slow
    order.advance(5)
    waits_in_the_tail = reason.issued_again and order.next_issue(5).key.prompt != 3
    assert waits_in_the_tail == slow


def limits_for(**choices: Any) -> RolloutLimits:
    return replace(RolloutLimits(0, 99, 2, 1, 0.0, 9, 1, 9, 1.0, **DROP), **choices)


# --- what a batch is made of --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "bound"),
    [
        ({}, "wait"),
        ({"redundant_responses": 1}, "wait"),
        ({"redundant_groups": 1}, "drop"),
        ({"tail_batching": True}, "drop"),
        ({"tail_batching": True, "on_stale": "wait"}, "wait"),
        ({"on_stale": "drop"}, "drop"),
    ],
)
def test_no_responses_are_dropped_by_default(choices: dict[str, Any], bound: str) -> None:
    config = RunConfig(policy=PolicyConfig(path="x"), rollout=RolloutConfig(**choices))
    assert build_limits(config).on_stale == bound


def test_simulation_with_on_stale_wait_drops_no_responses() -> None:
    common = {"versions": 30, "async_ratio": 1.0, "train_seconds": 0.01, "slots": 32, "seconds_per_token": 0.01}
    dropping, fast = ran(**common, choices=DROP)
    waiting, slow = ran(**common, choices={"on_stale": "wait"})
    assert reasons(dropping)["stale"] > 0
    assert reasons(waiting) == {}
    assert fast < slow


def test_batch_order_started_takes_the_oldest_prompts() -> None:
    pipeline, _ = ran(versions=12, async_ratio=1.0, choices={"batch_order": "started"})
    taken = [sorted(key.prompt for key in commit.groups) for commit in commits(pipeline)]
    assert taken == [list(range(4 * n, 4 * n + 4)) for n in range(12)]


def test_batch_scheduler_scores_only_after_the_last_response() -> None:
    common = {"versions": 5, "groups": 8, "async_ratio": 0.0, "slots": 4, "reward_seconds": 2.0}
    for scheduler, waits in ((RolloutScheduler, False), (BatchScheduler, True)):
        pipeline, _ = ran(**common, scheduler_type=scheduler)
        seconds = batches(pipeline)[3].table["reward_seconds"].to_pylist()
        assert min(seconds) == pytest.approx(2.0, abs=1e-5)
        assert (max(seconds) > 2.01) == waits


def test_filtered_prompts_are_replaced_and_not_reissued() -> None:
    pipeline, _ = ran(
        versions=12, group_size=3, async_ratio=4.0, choices={"filter": FilterConfig(min_mean=0.0, max_mean=1.0)}
    )
    gone = {d.key.prompt for commit in commits(pipeline) for d in commit.discards}
    assert set(reasons(pipeline)) == {"filtered"}
    assert gone.isdisjoint(key.prompt for commit in commits(pipeline) for key in commit.groups)
    assert set(pipeline.scheduler.counts.filtered) == {"mean reward at or below 0", "mean reward at or above 1"}


def test_filter_that_keeps_no_prompt_fails_with_advice() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        ran(choices={"filter": FilterConfig(min_mean=1.0, max_consecutive=20)})
    why = find_first_cause(caught.value)
    assert isinstance(why, ConfigError)  # not a restart, because a restarted run would also filter the next 20 groups
    assert "removed 20 groups in a row (the last group: mean reward at or below 1); widen the filter" in str(why)


def test_staleness_can_count_from_the_oldest_token() -> None:
    """A request that waits inside an engine during an update gets its first token from the newer version."""
    choices = {"staleness_from": "oldest-token"}
    pipeline, _ = ran(versions=20, async_ratio=2.0, choices=choices)
    for batch in batches(pipeline):
        for group in batch.groups():
            assert all(t.started_version == min(v for v in t.versions if v >= 0) for t in group.trajectories)


def test_idle_time_caused_by_async_ratio_is_measured() -> None:
    common = {"versions": 10, "slots": 8, "train_seconds": 2.0, "max_inflight_groups": 10**6}
    (bound, seconds), (free, _) = (ran(**common, async_ratio=alpha, choices={"slots": 8}) for alpha in (1.0, 100.0))
    assert 0.5 * seconds < bound.scheduler.counts.held.seconds < seconds
    assert free.scheduler.counts.held.seconds == 0.0


def test_time_the_learner_waits_for_slow_responses_is_measured() -> None:
    """A full batch waits for a group that would be too old for the next batch."""
    common = {"versions": 30, "slots": 64, "train_seconds": 0.01, "sigma": 1.5}
    (waiting, seconds), (free, _) = (ran(**common, async_ratio=alpha) for alpha in (1.0, 100.0))
    assert 0.1 * seconds < waiting.scheduler.counts.waited.seconds < seconds
    assert free.scheduler.counts.waited.seconds == 0.0


def test_tokens_of_dropped_responses_are_counted() -> None:
    common = {"versions": 30, "async_ratio": 1.0, "train_seconds": 0.01, "slots": 32}
    dropping, _ = ran(**common, choices=DROP)
    slow = [d for commit in commits(dropping) for d in commit.discards if d.slow]
    assert 0 < sum(d.response_tokens for d in slow) <= dropping.scheduler.counts.dropped_tokens
    waiting, _ = ran(**common)
    assert waiting.scheduler.counts.dropped_tokens == 0


# --- engines ------------------------------------------------------------------------------------------------


@dataclass
class Seen(TimedEngine):
    """A timed engine that records the largest number of running requests, and its prompts."""

    config: TimedEngineConfig
    most: int = 0
    now: int = 0
    given: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.config)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.given.append(request.id)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await super().generate(request)
        finally:
            self.now -= 1


def engine(slots: int, seconds_per_token: float = 0.01) -> Seen:
    return Seen(
        TimedEngineConfig(max_concurrent_requests=slots, seconds_per_token=seconds_per_token, max_new_tokens=64)
    )


async def asked(engines: Sequence[Seen], routing: Routing, groups: int, size: int) -> float:
    proxy = InferenceProxy(engines, 4, routing=routing)
    await proxy.update(0, Path(), NO_PROBE, "continue")

    async def one(group: int, sample: int) -> None:
        request = GenerationRequest(f"{group}.{sample}", ModelInput.of((group,)), 64, seed=group * 100 + sample)
        await proxy.generate(request, RequestOptions(group, group))

    await asyncio.gather(*(one(group, sample) for group in range(groups) for sample in range(size)))
    return asyncio.get_running_loop().time()


def test_engine_never_gets_more_requests_than_slots() -> None:
    engines = [engine(4) for _ in range(3)]
    run_virtual(asked(engines, "least-work", 20, 3))
    assert [e.most for e in engines] == [4, 4, 4]


def test_faster_engine_gets_more_requests() -> None:
    fast, slow = engine(4, 0.005), engine(4, 0.02)
    run_virtual(asked([fast, slow], "least-work", 100, 2))
    assert len(fast.given) > 2 * len(slow.given)


def test_prefix_routing_keeps_a_prompt_on_one_engine() -> None:
    def homes(routing: Routing) -> float:
        engines = [engine(4) for _ in range(4)]
        run_virtual(asked(engines, routing, 8, 2))
        at = {id: place for place, e in enumerate(engines) for id in e.given}
        return sum(at[f"{group}.0"] == at[f"{group}.1"] for group in range(8)) / 8

    assert homes("prefix") == 1.0
    assert homes("least-work") < 0.5
