"""Tests ten thousand random schedules, or a twentieth of them in `make test`. Whatever options are drawn and whatever
happens, no prompt is lost or trained on twice, no trajectory is older than alpha, no engine gets more requests than it
has slots, and batches continue to be formed. The module `tests/support/ledger.py` checks each schedule with a simple
model of the log.

The schedules of `test_scheduler` also write batch files and are audited; the schedules of this module are faster, and
many more.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from rollflow.storage.records import DiscardReason
from rollflow.tasks.rollout.config import RolloutConfig
from tests.support.counts import examples
from tests.support.ledger import Ledger
from tests.support.schedules import FILTERS, Case, Stop, Trouble, ran

MANY = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],  # without Phase.explain, which takes minutes
)

TENTHS = st.sampled_from([0.0, 0.1, 0.3, 1.0])


def at(longest: int) -> st.SearchStrategy[float]:
    """Draw a time of an event in steps of 0.05 seconds: many other events happen at whole tenths of a second, and few
    between them.
    """
    return st.integers(0, 20 * longest).map(lambda twentieths: twentieths / 20)


def cases(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[Case]:
    """Draw a workload whose options are compatible with each other."""
    return st.builds(Case, **COMMON | more).map(possible)


def possible(case: Case) -> Case:
    """Return the nearest valid case, without options that the config rejects or that filter out all groups."""
    changes: dict[str, Any] = {}
    if case.redundant_groups:  # redundant groups are discarded while they run
        changes |= {"on_stale": "drop", "batch_order": "finished"}
    if case.filter == "spread" and case.group_size == 1:
        changes["filter"] = "above 0"
    if case.questions:
        changes["questions"] = tuple(islice(cycle(case.questions), len(case.shares)))
    return replace(case, **changes)


COMMON: dict[str, st.SearchStrategy[Any]] = {
    "async_ratio": st.sampled_from([0.0, 1.0, 2.0, 0.5, 0.3, 1.5, 2.9]),
    "groups": st.integers(1, 4),
    "group_size": st.integers(1, 3),
    "slots": st.integers(1, 5),
    "speeds": st.sampled_from([(1.0,), (1.0, 1.0), (1.0, 3.0), (2.0, 1.0, 0.5)]),
    "max_inflight_groups": st.sampled_from([64, 1, 2, 3, 5]),
    "max_unscored": st.sampled_from([None, 1, 3]),
    "limited": st.booleans(),
    "routing": st.sampled_from(["least-work", "prefix"]),
    "in_flight": st.sampled_from(["continue", "restart"]),
    "sigma": st.sampled_from([1.0, 0.0, 2.0]),
    "train_seconds": st.sampled_from([(0.3,), (0.0,), (1.0, 0.0), (0.1, 4.0)]),
    "reward_seconds": st.sampled_from([(0.0,), (0.1,), (0.0, 0.5)]),
    "update_seconds": TENTHS,
    "turns": st.sampled_from([1, 1, 1, 2, 3]),
    "kv_tokens": st.sampled_from([None, None, 1, 10, 30, 200]),
    "seed": st.integers(0, 1000),
}
CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "redundant_groups": st.integers(0, 3),
    "redundant_responses": st.integers(0, 2),
    "tail_batching": st.booleans(),
    "max_preemptions": st.sampled_from([None, 1, 2, 5]),
    "max_batches_ahead": st.sampled_from([1.0, 0.0, 0.5, 0.95]),
    "on_stale": st.sampled_from(["drop", "wait"]),
    "batch_order": st.sampled_from(["finished", "started"]),
    "staleness_from": st.sampled_from(["started", "oldest-token"]),
    "filter": st.sampled_from(list(FILTERS)),
    "shares": st.sampled_from([(1.0,), (1.0, 1.0), (0.7, 0.2, 0.1)]),
    "questions": st.sampled_from([(), (1,), (2,), (3, 0), (0, 4, 2), (7,)]),
    "solved_every": st.sampled_from([2, 3]),
}
TIMES: dict[str, st.SearchStrategy[Any]] = {
    "fetch_seconds": TENTHS,
    "commit_seconds": st.sampled_from([0.0, 0.1, 2.0]),
    "prompt_seconds": st.sampled_from([(0.0,), (0.0,), (0.1,), (0.0, 0.5)]),
    "latency": st.sampled_from([0.0, 0.1, 0.05]),
    "slowing": st.sampled_from([0.0, 0.5]),
}
TROUBLE = {
    "trouble": st.lists(
        st.builds(Trouble, at(6), st.integers(0, 2), st.sampled_from(["kill", "replace"]), TENTHS), max_size=4
    ).map(tuple),
    "patience": st.sampled_from([1e6, 0.1, 0.35]),
    "attempts": st.just(10**6),  # with fewer attempts, a run could rightly fail
}
ALIKE = {  # options that discard no running group at alpha = 0
    **{
        name: CHOICES[name]
        for name in ("on_stale", "batch_order", "staleness_from", "filter", "shares", "questions", "solved_every")
    },
    "async_ratio": st.just(0.0),
}
WAITING = {
    **{
        name: CHOICES[name]
        for name in (
            "redundant_responses",
            "max_batches_ahead",
            "batch_order",
            "staleness_from",
            "filter",
            "shares",
            "questions",
            "solved_every",
        )
    },
    "on_stale": st.just("wait"),
    "async_ratio": st.sampled_from([1.0, 2.0, 3.0, 4.0, 0.5, 2.9]),
    "groups": st.integers(1, 6),
    "slots": st.sampled_from([1, 3, 8, 20]),
    "batches": st.sampled_from([4, 8, 12]),
}
OUTER = ("slots", "speeds", "max_inflight_groups", "max_unscored", "limited", "routing", "in_flight", "train_seconds")
OUTER += ("reward_seconds", "kv_tokens")
OUTER += ("update_seconds", "fetch_seconds", "commit_seconds", "latency", "slowing", "trouble")
STOPS = {"stops": st.lists(st.builds(Stop, at(6), st.integers(0, 2)), max_size=3).map(tuple)}


@pytest.mark.many
@settings(MANY, max_examples=examples(3000))
@given(cases(**CHOICES, **TIMES))
@example(Case(async_ratio=0.5, groups=2, slots=2, train_seconds=(40.0,)))  # generation is always half a batch ahead
@example(Case(redundant_groups=2, train_seconds=(40.0,)))  # extra groups start when their batch is formed
def test_random_schedule_passes_the_audit(case: Case) -> None:
    ran(case)


@pytest.mark.many
@settings(MANY, max_examples=examples(2500))
@given(cases(**CHOICES, **TIMES, **TROUBLE))
def test_random_schedule_with_engine_deaths_passes_the_audit(case: Case) -> None:
    ran(case)


@pytest.mark.many
@settings(MANY, max_examples=examples(2000))
@given(cases(**CHOICES, **TIMES, **STOPS))
@example(
    Case(async_ratio=2.0, max_batches_ahead=0.0, redundant_groups=2, slots=5, stops=(Stop(2.0, 1),))
)  # batch 0 is lost, batch 1 is not
def test_random_schedule_with_restarts_passes_the_audit(case: Case) -> None:
    ran(case)


@pytest.mark.many
@settings(MANY, max_examples=examples(2000))
@given(cases(**CHOICES, **TIMES, **TROUBLE, **STOPS))
def test_random_schedule_with_all_faults_passes_the_audit(case: Case) -> None:
    ran(case)


@pytest.mark.many
@settings(MANY, max_examples=examples(1500))
@given(cases(**WAITING, **TIMES))
@example(Case(async_ratio=2.0, groups=2, slots=5, speeds=(1.0, 3.0), slowing=0.5, batches=8, on_stale="wait"))
def test_on_stale_wait_drops_no_group_of_responses(case: Case) -> None:
    """With `on_stale = "wait"`, the run waits for a group that has reached the largest staleness, and does not drop the
    group.
    """
    assert not ran(case).discards.keys() - {DiscardReason.FILTERED}


@pytest.mark.many
@settings(MANY, max_examples=examples(500))
@given(cases(**ALIKE), cases(**TIMES, **TROUBLE, **STOPS))
def test_training_at_alpha_zero_ignores_timing_and_faults(case: Case, other: Case) -> None:
    changed = {name: getattr(other, name) for name in OUTER}
    disturbed = possible(replace(case, **changed, stops=other.stops, patience=1e6))
    assert said(ran(disturbed)) == said(ran(case))


def said(ledger: Ledger) -> list[list[tuple[int, list[tuple[int, ...]]]]]:
    """List the prompts and responses on which each version was trained, without the number of the attempt. After the
    loss of a batch, prompts are issued as another attempt, with the same random draws.
    """
    return [[(key.prompt, answers) for key, answers in groups] for groups in ledger.trained]


def test_random_schedules_cover_every_rollout_option() -> None:
    """A config key whose values are not drawn could hide a deadlock."""
    drawn = set(COMMON) | set(CHOICES) | set(TROUBLE) | set(TIMES)
    drawn |= {"durable_turns", "max_snapshot_bytes"}  # test_turn_journal.py and test_snapshots.py draw them
    named = {"patience_seconds": "patience", "attempts": "attempts", "admit_by": "kv_tokens"}
    assert {named.get(key, key) for key in RolloutConfig.model_fields} <= drawn


@pytest.mark.parametrize("seconds", [4.0, 400.0])
def test_half_batch_left_over_waits_for_the_next_version(seconds: float) -> None:
    """At alpha = 0.5, half a batch is generated ahead at each version. This half must wait for the next version, and
    must not be discarded.
    """
    ledger = ran(Case(async_ratio=0.5, groups=4, slots=4, train_seconds=(seconds,)))
    assert ledger.issued == [16]
    assert ledger.discards[DiscardReason.STALE] <= 3 * 2


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_very_large_alpha_does_not_slow_the_scheduler(on_stale: Literal["wait", "drop"]) -> None:
    case = Case(async_ratio=20.0, groups=3, group_size=2, slots=4, on_stale=on_stale, batches=8)
    assert said(ran(replace(case, async_ratio=1e9))) == said(ran(case))  # with a slow scheduler, the test would not end


@pytest.mark.parametrize("alpha", [0.5, 1.5, 2.9])
def test_fractional_alpha_discards_no_group(alpha: float) -> None:
    ledger = ran(Case(async_ratio=alpha, on_stale="wait", groups=4, slots=4, batches=8))
    assert not ledger.discards
    assert ledger.issued[0] <= 4 * 8 + 4 * int(alpha)
