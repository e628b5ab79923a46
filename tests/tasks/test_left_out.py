"""Tests that a response that no scorer could judge is left out of its group: the response is stored with the reason,
and is not part of any baseline.
"""

from __future__ import annotations

import asyncio
import math
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch, pack_group
from rollflow.storage.log.entries import BatchCommitted, TrainedGroup, VersionPublished
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import (
    LEAST_JUDGED,
    Branch,
    DiscardReason,
    GroupKey,
    Outcome,
    PassRate,
    StoredObject,
    TrajectoryGroup,
    UnjudgedResponse,
)
from rollflow.storage.token_arrays import Float32s, Int64s
from rollflow.tasks.actors.batch_metrics import compute_batch_metrics, compute_domain_metrics
from rollflow.tasks.actors.turn_metrics import compute_turn_metrics
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.rollout.config import FilterConfig
from rollflow.tasks.rollout.limits import JudgingLimits
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers import base_config
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.testing.learners import batch_of, trajectory
from tests.support.expected import expected_of
from tests.support.log_runs import changed, committed, published, read, rebatched
from tests.support.pipeline import Pipeline
from tests.tasks.test_judging import AWAY, FlakyJudge

SIZE = 4
WHY = AWAY.reason


def build_pipeline(kind: type[Pipeline] = FlakyJudge, share: float = 0.3, tries: int = 1, **more: Any) -> Pipeline:
    """Build a pipeline that leaves out the responses that its judge could not judge."""
    judging = {"": JudgingLimits(tries, 10**6, leaves_out=True, compares_group=more.pop("compares", False))}
    choices = {"judging": judging, **more.pop("choices", {})}
    store = MemoryStore(uuid.uuid4().hex)
    pipeline = kind(store, **{"versions": 3, "group_size": SIZE, **more}, choices=choices)
    if isinstance(pipeline, FlakyJudge):
        pipeline.share = share
    return pipeline


def run_and_audit(pipeline: Pipeline, *, single_turn: bool = True) -> list[BatchCommitted]:
    """Run a pipeline, check it with a deep audit, and return the log's records of its batches."""
    run_virtual(asyncio.wait_for(pipeline.run(), 1e4))
    assert pipeline.state.version == pipeline.versions
    report = audit(pipeline.store, deep=True, expected=expected_of(pipeline, single_turn=single_turn))
    assert report.violations == []
    return [entry.body for entry in read(pipeline.store) if isinstance(entry.body, BatchCommitted)]


def read_groups(pipeline: Pipeline, body: BatchCommitted) -> list[TrajectoryGroup]:
    return TrajectoryBatch.from_bytes(pipeline.store.get(body.file.path)).groups()


def list_stored(pipeline: Pipeline, bodies: list[BatchCommitted]) -> Iterator[tuple[BatchCommitted, TrajectoryGroup]]:
    """Yield each stored group with the log's record of its batch."""
    for body in bodies:
        yield from ((body, group) for group in read_groups(pipeline, body))


@settings(max_examples=12, deadline=None)
@given(
    share=st.sampled_from([0.1, 0.3, 0.6]),
    tries=st.integers(1, 2),
    alpha=st.sampled_from([0.0, 1.0, 2.5]),
    seed=st.integers(0, 1000),
    redundant=st.integers(0, 2),
    compares=st.booleans(),
)
def test_unjudged_responses_are_stored_but_left_out_of_rewards(
    share: float, tries: int, alpha: float, seed: int, redundant: int, compares: bool
) -> None:
    choices = {"redundant_responses": redundant}
    pipeline = build_pipeline(
        share=share, tries=tries, async_ratio=alpha, seed=seed, choices=choices, compares=compares
    )
    for body, group in list_stored(pipeline, run_and_audit(pipeline)):
        left_out = [one for one in group.trajectories if one.left_out]
        assert left_out == [one for one in group.trajectories if one.outcome is Outcome.UNJUDGED]
        assert all(math.isnan(one.reward) and one.reason == WHY for one in left_out)
        assert SIZE - len(left_out) >= LEAST_JUDGED
        told = [one for one in body.unjudged if one.key == group.key]
        assert told == [UnjudgedResponse(*group.key, one.sample, WHY) for one in left_out]
        judged = [one.reward for one in group.trajectories if not one.left_out]
        assert group.episode_rewards == judged
        assert group.pass_rate == PassRate(group.key.prompt, judged.count(1.0), len(judged))
    assert pipeline.scheduler.scoring.waiting == 0


def test_group_with_too_few_judged_responses_is_issued_again() -> None:
    pipeline = build_pipeline(share=0.6, versions=4)
    bodies = run_and_audit(pipeline)
    gone = [one.key for body in bodies for one in body.discards if one.reason is DiscardReason.UNJUDGED]
    told = {one.key: one.why for body in bodies for one in body.unjudged if one.key in gone}
    assert gone
    assert told == dict.fromkeys(gone, f"at most 1 of {SIZE} responses can be judged: {WHY}")
    trained = {group.key for body in bodies for group in body.groups}
    assert {GroupKey(key.prompt, key.attempt + 1) for key in gone} & (trained | {*gone})


def test_log_names_the_reason_of_each_unjudged_group() -> None:
    """The log contains the reason even if the config has no `unjudged = "leave_out"`."""
    judging = {"": JudgingLimits(1, 10**6)}
    pipeline = build_pipeline(share=0.3, choices={"judging": judging})
    bodies = run_and_audit(pipeline)
    gone = [one.key for body in bodies for one in body.discards if one.reason is DiscardReason.UNJUDGED]
    assert gone
    assert sorted((one.key, one.why) for body in bodies for one in body.unjudged) == sorted((key, WHY) for key in gone)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_leave_out_changes_no_batch_if_all_responses_are_judged(alpha: float) -> None:
    """If the scorer judges all responses, a run writes the same batches with and without `unjudged = "leave_out"`."""
    found = []
    for leaves_out in (False, True):
        judging = {"": JudgingLimits(1, 10**6, leaves_out=leaves_out)}
        pipeline = build_pipeline(share=0.0, async_ratio=alpha, choices={"judging": judging})
        bodies = run_and_audit(pipeline)
        assert not any(body.unjudged for body in bodies)
        texts = [pipeline.store.get(path) for path in [*pipeline.store.list("log")][1:]]
        assert not [text for text in texts if b'"unjudged"' in text]
        found.append([body.file.sha256 for body in bodies])
    assert found[0] == found[1]


def test_filter_of_groups_sees_only_judged_responses() -> None:
    """A group is filtered if all its judged responses are right. The log names the unjudged responses of a filtered
    group.
    """
    pipeline = build_pipeline(share=0.3, versions=4, choices={"filter": FilterConfig(max_mean=0.999)})
    bodies = run_and_audit(pipeline)
    filtered = {one.key for body in bodies for one in body.discards if one.reason is DiscardReason.FILTERED}
    partly = {one.key for body in bodies for one in body.unjudged if one.key in filtered}
    assert partly
    rates = {rate.prompt: rate for body in bodies for rate in body.rates}
    for key in partly:
        rate = rates[key.prompt]
        assert LEAST_JUDGED <= rate.responses < SIZE
        assert rate.correct == rate.responses


class Walking(Environment):
    """An environment with two turns, of which the second is scored. Some episodes fail before or after the first
    turn.
    """

    def __init__(self, before: float, after: float, seed: int, *, branches: bool = False) -> None:
        self.draw, self.before, self.after, self.branches = random.Random(seed), before, after, branches

    async def play(self, episode: Episode) -> Score | float | None:
        if self.draw.random() < self.before:
            return Score(0.0, "the world did not open", Outcome.UNJUDGED)
        if await episode.generate(max_tokens=3) is None:
            return None
        episode.reward(0.5)
        if self.draw.random() < self.after:
            return Score(0.0, "the world ended", Outcome.UNJUDGED)
        if self.branches:
            episode.start_branch([7, 8])
        made = await episode.generate(max_tokens=4)
        return None if made is None else await episode.judge(made.tokens)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_failed_episode_is_left_out_with_all_its_branches(seed: int, branches: bool) -> None:
    pipeline = build_pipeline(share=0.1, environment=Walking(0.0, 0.2, seed, branches=branches), seed=seed)
    bodies = run_and_audit(pipeline, single_turn=False)
    reasons = Counter(one.why for body in bodies for one in body.unjudged)
    assert reasons["the world ended"]
    assert reasons[WHY]
    for _, group in list_stored(pipeline, bodies):
        episodes = {one.sample: one.left_out for one in group.trajectories if one.branch is None}
        for one in group.trajectories:
            assert one.left_out == episodes[one.sample if one.branch is None else one.branch.parent]
        assert len(group.episode_rewards) == [*episodes.values()].count(None)


def test_prompt_of_an_episode_without_tokens_is_issued_again() -> None:
    pipeline = build_pipeline(share=0.0, environment=Walking(0.1, 0.0, 1))
    bodies = run_and_audit(pipeline, single_turn=False)
    why = "the policy sampled no token of the response: the world did not open"
    assert {one.why for body in bodies for one in body.unjudged} == {why}
    assert {one.reason for body in bodies for one in body.discards} == {DiscardReason.UNJUDGED}


class Mumbling(Environment):
    """An environment that ends some episodes with a reason that UTF-8 cannot encode."""

    draw = random.Random(0)

    async def play(self, episode: Episode) -> Score | float | None:
        if self.draw.random() < 0.2:
            return Score(0.0, "\ud800" + "x" * 1000, Outcome.UNJUDGED)
        return None if await episode.generate() is None else 1.0


def test_reason_that_utf8_cannot_encode_is_escaped() -> None:
    bodies = run_and_audit(build_pipeline(share=0.0, environment=Mumbling()), single_turn=False)
    reasons = {one.why for body in bodies for one in body.unjudged}
    assert len(reasons) == 1
    assert "\\ud800xxx" in reasons.pop()


class Bargaining(Environment):
    """An environment in which two roles speak in turn, and the scorer judges what the second role says."""

    async def play(self, episode: Episode) -> Score | float | None:
        for role in ("buyer", "seller"):
            episode.take_role(role)
            made = await episode.generate(max_tokens=3)
            if made is None:
                return None
        score = await episode.judge(made.tokens)
        return score and replace(score, roles={"buyer": 1.0 - score.value, "seller": score.value})


def test_all_roles_of_an_unjudged_episode_are_left_out() -> None:
    pipeline = build_pipeline(share=0.3, environment=Bargaining())
    found = Counter[tuple[str | None, bool | None]]()
    for _, group in list_stored(pipeline, run_and_audit(pipeline, single_turn=False)):
        found.update((one.role, one.left_out) for one in group.trajectories)
        assert all(math.isnan(one.reward) == bool(one.left_out) for one in group.trajectories)
    assert found["buyer", True] == found["seller", True] > 0
    assert found["buyer", None] == found["seller", None] > 0


# --- what the learner reads ----------------------------------------------------------------------------------


def draw_group(draw: random.Random, index: int) -> TrajectoryGroup:
    """Draw a random group of episodes. Some have branches, roles, states of turns or rewards of tokens, and some are
    left out.
    """
    rows, size = [], draw.randint(3, 5)
    for sample in range(size):
        left_out = True if sample > 1 and draw.random() < 0.5 else None
        for number in range(draw.choice([1, 1, 2])):
            made = trajectory([5, 6], [draw.randint(1, 200) for _ in range(draw.randint(1, 6))])
            worth = [math.nan] * 2 + [draw.choice([math.nan, 0.5]) for _ in made.tokens[2:]]
            made = replace(
                made,
                sample=sample + number * size,
                reward=math.nan if left_out else draw.choice([0.0, 0.25, 1.0]),
                outcome=Outcome.UNJUDGED if left_out else Outcome.PARTIAL,
                reason=WHY if left_out else "",
                branch=Branch(sample, 2) if number else None,
                role=draw.choice(["buyer", "seller"]) if index % 2 else None,
                turn_starts=(2,),
                turn_states=Int64s.of([draw.randint(0, 3)]) if left_out or index == 3 else None,
                token_rewards=Float32s.of(worth) if left_out or index == 2 else None,
                left_out=left_out,
            )
            rows.append(made)
    return TrajectoryGroup(GroupKey(index, 0), f"p{index}", f"d{index % 2}", tuple(rows))


def drop_left_out(group: TrajectoryGroup) -> TrajectoryGroup:
    return replace(group, trajectories=tuple(one for one in group.trajectories if not one.left_out))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_learner_reads_only_the_judged_responses_of_a_group(seed: int, groups: int) -> None:
    """The learner's rows are those of the judged responses alone, and so are all baselines, denominators and
    metrics.
    """
    draw = random.Random(seed)
    made = [draw_group(draw, index) for index in range(groups)]
    whole = TrajectoryBatch.from_bytes(TrajectoryBatch.from_groups([pack_group(one) for one in made]).to_bytes())
    alone = TrajectoryBatch.from_groups([drop_left_out(one) for one in made])
    assert repr(whole.judged.table.to_pylist()) == repr(alone.table.to_pylist())
    assert whole.judged.table.schema.equals(alone.table.schema)
    found, expected = BatchRows.of(whole.judged), BatchRows.of(alone)
    for field in fields(BatchRows):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name))
    assert sum(map(len, (one.left_out for one in made))) == whole.episodes - alone.episodes


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_metrics_of_a_batch_count_only_judged_responses(seed: int) -> None:
    draw = random.Random(seed)
    made = [draw_group(draw, index) for index in range(4)]
    whole, alone = (TrajectoryBatch.from_groups(some) for some in (made, [*map(drop_left_out, made)]))
    [found, expected] = [
        compute_batch_metrics(batch, commit_of(some), [], 1) | compute_domain_metrics(batch, {"d0", "d1"})
        for batch, some in ((whole, made), (alone, [*map(drop_left_out, made)]))
    ]
    lost = sum(one.response_tokens for group in made for one in group.trajectories if one.left_out)
    if lost:
        assert found.pop("left_out_tokens") == lost
        expected["response_tokens"] += lost
    assert found == pytest.approx(expected)
    shares, plain = compute_turn_metrics(whole), compute_turn_metrics(alone)
    assert {name: shares[name] for name in ("turns", "turn_length")} == {n: plain[n] for n in ("turns", "turn_length")}
    assert shares["outcome_unjudged"] == (whole.episodes - alone.episodes) / whole.episodes


def commit_of(groups: list[TrajectoryGroup]) -> BatchCommitted:
    """Build the log's record of these groups."""
    told = tuple(TrainedGroup(*one.key, 0, 0, one.response_tokens) for one in groups)
    return BatchCommitted(0, StoredObject("", 0, ""), 0, told, ())


def test_batch_without_left_out_responses_is_read_unchanged() -> None:
    batch = batch_of([trajectory([5], [7]), trajectory([5], [8], 1)])
    assert batch.judged is batch


def test_judged_minimum_is_equal_in_config_and_storage() -> None:
    assert base_config.LEAST_JUDGED == LEAST_JUDGED


# --- the audit -----------------------------------------------------------------------------------------------

Groups = list[TrajectoryGroup]


def change_rows(select: Callable[[Any], bool], **change: Any) -> Callable[[Groups], Groups]:
    """Return a function that changes the first row of the groups for which `select` is True."""

    def apply(groups: Groups) -> Groups:
        place = next((g, t) for g, one in enumerate(groups) for t, row in enumerate(one.trajectories) if select(row))
        rows = [*groups[place[0]].trajectories]
        rows[place[1]] = replace(rows[place[1]], **change)
        groups[place[0]] = replace(groups[place[0]], trajectories=tuple(rows))
        return groups

    return apply


def is_left_out(row: Any) -> bool:
    return bool(row.left_out)


def is_judged(row: Any) -> bool:
    return not row.left_out


@pytest.fixture
def sound() -> Pipeline:
    """Build a run that passes the audit and has left-out responses in batch 1."""
    pipeline = build_pipeline(share=0.25, async_ratio=0.0)
    run_and_audit(pipeline)
    body = committed(pipeline.store, 1).body
    assert isinstance(body, BatchCommitted)
    assert body.unjudged
    return pipeline


def find_faults(pipeline: Pipeline) -> list[str]:
    expected = expected_of(pipeline)
    return [f"{one.kind}: {one.what}" for one in audit(pipeline.store, deep=True, expected=expected).violations]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (change_rows(is_left_out, left_out=None, reward=0.0), "unjudged: nobody judged trajectory"),
        (change_rows(is_left_out, reward=0.0), "but it has the reward 0"),
        (change_rows(is_left_out, outcome=Outcome.WRONG), "is left out, but its outcome is wrong"),
        (change_rows(is_left_out, reason="because"), "the batch file and the log entry disagree on response"),
        (change_rows(is_judged, left_out=True), "is left out, but its outcome is"),
        (change_rows(is_judged, reward=math.nan), "lineage: a trajectory has a reward that is not finite"),
        (
            change_rows(is_judged, left_out=True, reward=math.nan, outcome=Outcome.UNJUDGED, reason="no time"),
            "the batch file and the log entry disagree on response",
        ),
    ],
)
def test_audit_finds_each_alteration_of_left_out_responses(
    sound: Pipeline, change: Callable[[Groups], Groups], what: str
) -> None:
    rebatched(sound.store, 1, change)
    assert what in " | ".join(find_faults(sound))


def leave_out_all(groups: Groups) -> Groups:
    """Leave out all responses but one of the first group."""
    first = groups[0].trajectories
    lost = [replace(row, left_out=True, reward=math.nan, outcome=Outcome.UNJUDGED) for row in first[1:]]
    return [replace(groups[0], trajectories=(first[0], *lost)), *groups[1:]]


def test_audit_finds_a_group_with_one_judged_response(sound: Pipeline) -> None:
    rebatched(sound.store, 1, leave_out_all)
    assert "judged responses; responses are left out only of groups with at least 2" in " | ".join(find_faults(sound))


def test_audit_finds_a_learner_that_left_out_too_few_responses(sound: Pipeline) -> None:
    """A learner that trained on an unjudged response reports a smaller number of left-out responses, or none."""
    changed(sound.store, published(sound.store, 2).n, lambda body: replace(body, metrics={}))
    [fault] = find_faults(sound)
    assert fault.startswith("unjudged: the learner left out 0 responses, but its batch has ")
    body = published(sound.store, 2).body
    assert isinstance(body, VersionPublished)
    assert body.batch_entry == committed(sound.store, 1).n


def test_audit_finds_an_unjudged_response_of_another_group(sound: Pipeline) -> None:
    stranger = UnjudgedResponse(10**6, 0, 0, WHY)
    changed(sound.store, committed(sound.store, 1).n, lambda body: replace(body, unjudged=(*body.unjudged, stranger)))
    assert "an unjudged response of dispatch 1000000.0" in " | ".join(find_faults(sound))


def test_audit_finds_a_response_that_the_log_names_twice(sound: Pipeline) -> None:
    changed(sound.store, committed(sound.store, 1).n, lambda body: replace(body, unjudged=body.unjudged * 2))
    assert "the batch file and the log entry disagree on response" in " | ".join(find_faults(sound))


Records = list[UnjudgedResponse]


@pytest.mark.parametrize(
    ("reason", "change", "what"),
    [
        (DiscardReason.UNJUDGED, lambda one: [one._replace(sample=-1)], "has no such unjudged responses: [-1]"),
        (DiscardReason.UNJUDGED, lambda one: [one._replace(sample=SIZE)], "has no such unjudged responses: [4]"),
        (DiscardReason.UNJUDGED, lambda one: [one, one], "has no such unjudged responses: "),
        (
            DiscardReason.UNJUDGED,
            lambda one: [one, one._replace(sample=(one.sample + 1) % SIZE)],
            "has too many unjudged responses: ",
        ),
        (
            DiscardReason.FILTERED,
            lambda one: [one._replace(sample=number) for number in range(3)],
            "has too many unjudged responses: [0, 1, 2]",
        ),
    ],
)
def test_audit_finds_impossible_records_of_discarded_groups(
    reason: DiscardReason, change: Callable[[UnjudgedResponse], Records], what: str
) -> None:
    pipeline = build_pipeline(share=0.5, async_ratio=0.0, choices={"filter": FilterConfig(max_mean=0.7)})
    run_and_audit(pipeline)
    told = [
        (entry.n, discard.key, [one for one in entry.body.unjudged if one.key == discard.key])
        for entry in read(pipeline.store)
        if isinstance(entry.body, BatchCommitted)
        for discard in entry.body.discards
        if discard.reason is reason
    ]
    n, key, [one, *_] = next(found for found in told if found[2])

    def forge(body: BatchCommitted) -> BatchCommitted:
        made = change(one)
        rates = [rate._replace(correct=0, responses=1) if rate.prompt == key.prompt else rate for rate in body.rates]
        return replace(
            body,
            unjudged=(*(other for other in body.unjudged if other.key != key), *made),
            rates=body.rates if reason is DiscardReason.UNJUDGED else tuple(rates),
        )

    changed(pipeline.store, n, forge)
    assert [fault for fault in find_faults(pipeline) if fault.startswith("unjudged: ") and what in fault]


def test_audit_finds_filtered_unjudged_groups_without_leave_out() -> None:
    """Without `unjudged = "leave_out"`, a group with an unjudged response is discarded before the filter sees it."""
    choices = {"filter": FilterConfig(max_mean=0.7), "judging": {"": JudgingLimits(1)}}
    pipeline = build_pipeline(share=0.0, async_ratio=0.0, choices=choices)
    bodies = run_and_audit(pipeline)
    [body, *_] = [body for body in bodies if body.discards]
    one = UnjudgedResponse(*body.discards[0].key, 0, WHY)
    rates = tuple(rate._replace(correct=3, responses=3) if rate.prompt == one.prompt else rate for rate in body.rates)
    forged = replace(body, unjudged=(one,), rates=rates)
    changed(pipeline.store, committed(pipeline.store, body.number).n, lambda body: forged)
    [fault] = find_faults(pipeline)
    assert fault.endswith(
        'was discarded as filtered with unjudged responses, but the config has no unjudged = "leave_out"'
    )


def test_audit_finds_left_out_responses_that_config_forbids(sound: Pipeline) -> None:
    sound.scheduler.limits = replace(sound.scheduler.limits, judging={"": JudgingLimits(1)})
    found = find_faults(sound)
    assert found
    assert all('the config has no unjudged = "leave_out" for its scorer' in fault for fault in found)


def test_audit_finds_a_branch_without_its_episode() -> None:
    pipeline = build_pipeline(share=0.3, environment=Walking(0.0, 0.0, 1, branches=True))
    run_and_audit(pipeline, single_turn=False)
    change = change_rows(lambda row: row.left_out and row.branch, left_out=None, reward=0.0, outcome=Outcome.WRONG)
    rebatched(pipeline.store, 1, change)
    found = audit(pipeline.store, deep=True, expected=expected_of(pipeline, single_turn=False)).violations
    assert "is left out without the other branches of its episode, or they without it" in " | ".join(
        one.what for one in found
    )


def test_audit_compares_the_filter_with_judged_rewards() -> None:
    """A group whose judged responses are all right must have been filtered, even if it also has an unjudged
    response.
    """
    pipeline = build_pipeline(share=0.25, async_ratio=0.0, choices={"filter": FilterConfig(max_mean=0.999)})
    run_and_audit(pipeline)

    def reward_all(groups: Groups) -> Groups:
        place = next(number for number, one in enumerate(groups) if one.left_out)
        rows = [row if row.left_out else replace(row, reward=1.0) for row in groups[place].trajectories]
        groups[place] = replace(groups[place], trajectories=tuple(rows))
        return groups

    rebatched(pipeline.store, 1, reward_all)
    assert "was trained on, although the config's filter removes it" in " | ".join(find_faults(pipeline))


def test_audit_counts_the_responses_that_are_left_out(sound: Pipeline) -> None:
    stored = [TrajectoryBatch.from_bytes(sound.store.get(path)) for path in sound.store.list("trajectories")]
    left_out = sum(batch.episodes - batch.judged.episodes for batch in stored)
    assert audit(sound.store, deep=True).left_out == left_out > 0
    assert audit(sound.store).left_out == left_out


# --- a group that is given up while the scorer computes ----------------------------------------------------------


class Asking(Environment):
    """An environment that waits for the score of its first turn before its second turn."""

    async def play(self, episode: Episode) -> Score | float | None:
        made = await episode.generate(max_tokens=3)
        if made is None:
            return None
        first = await episode.score(made.tokens)
        made = await episode.generate(max_tokens=3)
        return None if made is None else first.value


class StuckScorer(Pipeline):
    """A pipeline whose scorer never answers for the first dispatch of one prompt."""

    started = 0
    cancelled = 0
    left = SIZE

    async def _score(self, request: ScoreRequest) -> Score:
        if request.reference["index"] != 2 or not self.left:
            return await super()._score(request)
        self.left -= 1
        self.started += 1
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError("nobody waits so long")

    def _prompt(self, index: int) -> Any:
        return replace(super()._prompt(index), reference={"index": index})


def test_group_discarded_while_it_is_scored_is_counted_once() -> None:
    """A group becomes too old, and is discarded, while its environment waits for `episode.score`."""
    choices = {"on_stale": "drop", "max_batches_ahead": 1.0}
    pipeline = StuckScorer(
        MemoryStore("stuck"), versions=4, group_size=SIZE, environment=Asking(), async_ratio=1.5, choices=choices
    )
    run_virtual(asyncio.wait_for(pipeline.run(), 1e4))
    assert (pipeline.started, pipeline.cancelled) == (SIZE, SIZE)
    assert pipeline.scheduler.scoring.waiting == 0
    bodies = [entry.body for entry in read(pipeline.store) if isinstance(entry.body, BatchCommitted)]
    lost = [one for body in bodies for one in body.discards if one.key == GroupKey(2, 0)]
    [discard] = lost
    assert discard.reason is DiscardReason.STALE
    assert 0 < discard.response_tokens <= 3 * SIZE
    assert GroupKey(2, 1) in {group.key for body in bodies for group in body.groups}
    assert audit(pipeline.store, deep=True, expected=expected_of(pipeline, single_turn=False)).violations == []
