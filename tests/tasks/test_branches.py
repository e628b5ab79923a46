"""Tests of the branches of an episode: each sampled token is delivered once, and the branches count as one episode."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.rows import count_rows
from rollflow.storage.batch import TrajectoryBatch, pack_group
from rollflow.storage.log.entries import BatchCommitted, TrainedGroup
from rollflow.storage.model_input import ModelInput
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import (
    Branch,
    GroupKey,
    Outcome,
    Prompt,
    StopReason,
    StoredObject,
    Trajectory,
    TrajectoryGroup,
)
from rollflow.storage.token_arrays import Float32s
from rollflow.tasks.actors.batch_metrics import compute_batch_metrics, compute_domain_metrics
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.objectives.aggregation import row_weights
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.rollout.config import FilterConfig
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, ScoreRequest
from tests.support.log_runs import read
from tests.support.pipeline import Pipeline
from tests.tasks.test_scheduler import trained

PROMPT = Prompt("p", 0, "test", "?", ModelInput.of((1, 2)))
RESPONSES = 4  # episodes of the prompt
LONGEST = 30


@dataclass(frozen=True)
class Step:
    """One step of a scripted episode: a branch, or tokens of the environment, then a turn of the policy."""

    kept: int | None = None  # number of tokens of the response that a new branch keeps; None: no new branch
    added: int = 0
    said: int = 1  # 0: the policy is not asked
    reward: float | None = None


@dataclass
class Sampler:
    """A policy that samples each token only once, and records the whole context of each token."""

    sampled: dict[int, tuple[int, ...]] = field(default_factory=dict)  # token -> all tokens before it
    numbers: Any = field(default_factory=lambda: count(1000))

    async def ask(self, turn: Turn) -> VersionedGeneration:
        context, made = tuple(turn.prompt.flat), []
        for _ in range(turn.max_new_tokens):
            token = next(self.numbers)
            self.sampled[token] = (*context, *made)
            made.append(token)
        span = TokenSpan.of(made, [-1.0] * len(made), [3 + turn.number] * len(made))
        return VersionedGeneration(Generation("", span, StopReason.STOP), 3)


class Scripted(Environment):
    """Plays the steps of a script as far as they fit into the response."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps

    async def play(self, episode: Episode) -> Score | None:
        await episode.generate(max_tokens=1)
        for step in self.steps:
            if step.kept is not None:
                episode.start_branch([*episode.response[: step.kept], 9])
            episode.add([8] * min(step.added, episode.room))
            if step.said and episode.room:
                await episode.generate(max_tokens=step.said)
            if step.reward is not None:
                episode.reward(step.reward)
        return Score(0.5, "done")


def play(environment: Environment, sampler: Sampler, staleness_from: str = "started") -> tuple[Trajectory, ...]:
    async def keep(_: PlayedEpisode) -> bool:
        return True

    async def score(request: ScoreRequest) -> Score:
        return Score(1.0, "judged", token_values=Float32s.of([0.5] * len(request.tokens)))

    async def run() -> tuple[Trajectory, ...]:
        episode = PlayedEpisode(PROMPT, LONGEST, sampler.ask, keep, score)
        found = await episode.play(environment)
        assert found is not None
        return episode.trajectories(found, 1, RESPONSES, staleness_from)

    return asyncio.run(run())


STEPS = st.lists(
    st.builds(
        Step,
        st.none() | st.integers(0, 8),
        st.integers(0, 2),
        st.integers(0, 3),
        st.none() | st.integers(-2, 2).map(float),
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.sampled_from(["started", "oldest-token"]))
def test_every_sampled_token_is_delivered_once_with_its_context(steps: list[Step], staleness: str) -> None:
    sampler = Sampler()
    found = play(Scripted(steps), sampler, staleness)
    delivered = [
        (token, tuple(one.tokens[:at]))
        for one in found
        for at, (token, mine) in enumerate(zip(one.tokens, one.loss_mask, strict=True))
        if mine
    ]
    assert len(delivered) == len(sampler.sampled)
    assert dict(delivered) == sampler.sampled
    assert sum(one.total_reward - one.reward for one in found) == sum(
        step.reward for step in steps if step.reward is not None
    )
    assert {(one.reward, one.reason) for one in found} == {(0.5, "done")}
    group = TrajectoryGroup(GroupKey(0, 0), "p", "test", found)
    batch = TrajectoryBatch.from_bytes(TrajectoryBatch.from_groups([pack_group(group)]).to_bytes())
    assert batch.episodes == group.episodes == 1
    assert batch.episode_rewards.tolist() == group.episode_rewards
    assert {*batch.first_rows.tolist()} == {0}


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_branch_equals_its_parent_up_to_the_branch_point(steps: list[Step]) -> None:
    first, *others = play(Scripted(steps), Sampler())
    assert (first.sample, first.branch) == (1, None)
    earlier = {first.sample: first}
    for number, one in enumerate(others, 1):
        assert one.sample == 1 + number * RESPONSES
        assert one.branch is not None
        parent, position = one.branch
        assert one.tokens[:position] == earlier[parent].tokens[:position]
        longest = min(len(one.tokens), len(earlier[parent].tokens))
        assert position == longest or one.tokens[position] != earlier[parent].tokens[position]
        assert not any(one.loss_mask[:position])
        earlier[one.sample] = one


class Rewriting(Environment):
    """Begins each later turn in a new branch with the last three tokens of the response, and rewards each turn."""

    async def play(self, episode: Episode) -> Score | None:
        for number in range(3):
            if number:
                episode.start_branch((*episode.response[-3:], 7))
            episode.enter_state(f"room {number}")
            if await episode.generate(max_tokens=6) is None:
                return None
            episode.reward(number / 4)
        return Score(float(len(episode.response) % 2), parts={"rooms": 3.0})


def run_rewriting(name: str, **keys: Any) -> Pipeline:
    pipeline = Pipeline(MemoryStore(name), versions=3, environment=Rewriting(), **keys)
    run_virtual(pipeline.run())
    return pipeline


def test_run_with_branches_counts_each_episode_once() -> None:
    pipeline = run_rewriting("branches", choices={"redundant_responses": 1, "on_stale": "drop"})
    report = audit(pipeline.store)
    assert report.clean, report.violations
    episodes = 3 * pipeline.groups * pipeline.group_size
    assert report.trajectories == episodes
    assert pipeline.scheduler.counts.trajectories >= episodes
    rows, tokens = 0, 0
    for body in (entry.body for entry in read(pipeline.store)):
        if isinstance(body, BatchCommitted):
            rows += body.rows
            tokens += sum(group.tokens for group in body.groups)
    assert rows == episodes
    batches = [batch for _, batch in trained(pipeline.store)]
    assert sum(map(len, batches)) == 3 * episodes
    assert tokens == sum(one.response_tokens for batch in batches for g in batch.groups() for one in g.trajectories)
    for batch in batches:
        assert count_rows(batch, 0).staleness.total() == batch.episodes
        assert batch.episode_rewards.tolist() == [value for group in batch.groups() for value in group.episode_rewards]
        for group in batch.groups():
            assert group.pass_rate is not None
            assert group.pass_rate.responses == pipeline.group_size
            assert group.episode_rewards == [one.reward + 0.75 for one in group.trajectories if one.branch is None]


def test_staleness_from_the_oldest_token_is_counted_by_branch() -> None:
    pipeline = run_rewriting("oldest", choices={"staleness_from": "oldest-token"})
    assert audit(pipeline.store).clean
    for one in [t for _, batch in trained(pipeline.store) for g in batch.groups() for t in g.trajectories]:
        assert one.started_version == min(v for v, mine in zip(one.versions, one.loss_mask, strict=True) if mine)


def test_filter_sees_the_rewards_of_all_branches() -> None:
    """Without the branches, each episode's rewards of turns would sum to 0, and the filter would remove the group."""
    choices = {"filter": FilterConfig(min_mean=0.7, min_std=None, max_mean=None)}
    pipeline = run_rewriting("filtered", choices=choices, sigma=0.0)
    assert not pipeline.scheduler.counts.filtered


def two_rows(**change: Any) -> TrajectoryGroup:
    """Return a group of two episodes, of which the first has a branch."""
    nan = math.nan

    def one(sample: int, reward: float, said: int, **more: Any) -> Trajectory:
        tokens = (1, *range(5, 5 + said))
        values = more.pop("token_rewards", [nan] * said)
        return Trajectory(
            sample, 2, tokens, (False, *[True] * said), (0.0, *[-1.0] * said), (-1, *[2] * said), reward, "",
            StopReason.STOP, outcome=Outcome.CORRECT if reward == 1 else Outcome.WRONG, reward_parts={"a": reward},
            token_rewards=Float32s.of([nan, *values]), **more,
        )  # fmt: skip

    branch = one(9, 1.0, 2, token_rewards=[2.0, 4.0], branch=Branch(0, 1))
    rows = one(0, 1.0, 4, token_rewards=[nan, 1.0, nan, nan]), branch, one(1, 0.0, 3)
    return TrajectoryGroup(GroupKey(0, 0), "p", "a", rows)


def test_batch_metrics_count_an_episode_with_branches_once() -> None:
    batch = TrajectoryBatch.from_groups([two_rows()])
    commit = BatchCommitted(2, StoredObject("x", 1, ""), 2, (TrainedGroup(0, 0, 2, 2, 9),), (0,))
    found = compute_batch_metrics(batch, commit, (), 2)
    assert (found["reward"], found["accuracy"], found["response_length"]) == (0.5, 0.5, 4.5)
    assert found["token_reward"] == 3.5
    assert (found["staleness_0"], found["response_tokens"]) == (2.0, 9.0)
    domains = compute_domain_metrics(batch, ["a", "b"])
    assert (domains["reward_a"], domains["response_length_a"], domains["part_a_a"]) == (0.5, 4.5, 0.5)


def test_branches_share_the_weight_of_their_episode() -> None:
    batch = TrajectoryBatch.from_groups([two_rows()])
    tokens_R, episodes_R = torch.from_numpy(BatchRows.of(batch).masked_tokens), torch.from_numpy(batch.first_rows)
    for aggregation, expected in {
        "token-mean": [1 / 9] * 3,
        "sequence-mean": [1 / 12, 1 / 12, 1 / 6],
        "sequence-sum": [1 / 2] * 3,
        "constant": [1 / 20] * 3,
    }.items():
        weights = row_weights(tokens_R, aggregation, 10, episodes_R)
        assert weights.tolist() == pytest.approx(expected), aggregation


def test_branch_with_a_missing_parent_can_be_read() -> None:
    group = two_rows()
    rows = (group.trajectories[0], replace(group.trajectories[1], branch=Branch(5, 1)), group.trajectories[2])
    batch = TrajectoryBatch.from_groups([replace(group, trajectories=rows)])
    assert batch.first_rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([5] * (LONGEST + 1), "a branch of 31 tokens does not fit into a response of 30 tokens"),
        ([-1], "-1 is not a token of the policy"),
    ],
)
def test_branch_with_wrong_or_too_many_tokens_is_refused(tokens: list[int], reason: str) -> None:
    class Wrong(Environment):
        async def play(self, episode: Episode) -> Score | None:
            episode.start_branch(tokens)
            return None

    with pytest.raises(ValueError, match=reason):
        play(Wrong(), Sampler())


def test_token_values_of_a_score_belong_to_the_last_branch() -> None:
    class Judged(Environment):
        async def play(self, episode: Episode) -> Score | None:
            await episode.generate(max_tokens=2)
            episode.start_branch([9])
            made = await episode.generate(max_tokens=2)
            assert made is not None
            return await episode.judge(made.tokens)

    first, second = play(Judged(), Sampler())
    assert first.token_rewards is None
    assert np.nan_to_num(Float32s.of(second.token_rewards or ()).array).tolist() == [0.0, 0.0, 0.0, 0.5, 0.5]
