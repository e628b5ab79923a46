"""Several roles of one policy in an episode: each has its own context, reward and baseline; no token is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch, pack_group
from rollflow.storage.log.entries import BatchCommitted, TrainedGroup
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Branch, GroupKey, Outcome, StopReason, StoredObject, Trajectory, TrajectoryGroup
from rollflow.storage.token_arrays import Float32s
from rollflow.tasks.actors.batch_metrics import compute_batch_metrics
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.config import ImportEnvironment
from rollflow.tasks.environments.imported import ImportedEnvironment
from rollflow.tasks.learners.forward.pre_update import compute_targets
from rollflow.tasks.objectives.advantage_config import Advantage
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.rollout.config import FilterConfig
from rollflow.tasks.rollout.episode import PlayedEpisode
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, ScoreRequest, validate_score
from tests.support.expected import expected_of
from tests.support.log_runs import read
from tests.support.pipeline import Pipeline
from tests.tasks.test_branches import LONGEST, PROMPT, RESPONSES, Sampler
from tests.tasks.test_scheduler import trained

ROLES = ("", "buyer", "seller")


@dataclass(frozen=True)
class Step:
    """One step of a scripted episode: a role acts, after its prompt, a branch, or tokens of the environment."""

    role: str  # "": the role does not change
    prompt: int | None = None  # number of tokens of another prompt, if the role has not acted yet
    kept: int | None = None  # number of tokens of the response that a new branch keeps; None: no new branch
    added: int = 0
    said: int = 1  # 0: the policy is not asked
    reward: float | None = None


class Bargain(Environment):
    """Plays the steps of a script as far as they fit into the responses."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps

    async def play(self, episode: Episode) -> Score | None:
        for step in self.steps:
            if step.role:
                episode.take_role(step.role)
            if step.prompt is not None and not episode.response and step.prompt - 2 < episode.room:
                episode.replace_prompt([7] * step.prompt)
            if step.kept is not None:
                episode.start_branch([*episode.response[: step.kept], 9][: LONGEST // 2])
            episode.add([8] * min(step.added, episode.room))
            if step.said and episode.room and await episode.generate(max_tokens=step.said) and step.reward is not None:
                episode.reward(step.reward)
        await episode.generate(max_tokens=1)
        return Score(0.5, "done", roles={"buyer": 1.0})


def play(environment: Environment, sampler: Sampler) -> tuple[Trajectory, ...]:
    async def keep(_: PlayedEpisode) -> bool:
        return True

    async def score(_: ScoreRequest) -> Score:
        raise AssertionError("the environment scores")

    async def run() -> tuple[Trajectory, ...]:
        episode = PlayedEpisode(PROMPT, LONGEST, sampler.ask, keep, score)
        found = await episode.play(environment)
        assert found is not None
        return episode.trajectories(found, 1, RESPONSES)

    return asyncio.run(run())


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(ROLES),
        st.none() | st.integers(0, 4),
        st.none() | st.integers(0, 5),
        st.integers(0, 2),
        st.integers(0, 3),
        st.none() | st.integers(-2, 2).map(float),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_every_token_of_each_role_is_delivered_once(steps: list[Step]) -> None:
    """The context of a token is what the engine read, so no role reads the context of another one."""
    sampler = Sampler()
    found = play(Bargain(steps), sampler)
    delivered = [
        (token, tuple(one.tokens[:at]))
        for one in found
        for at, (token, mine) in enumerate(zip(one.tokens, one.loss_mask, strict=True))
        if mine
    ]
    assert len(delivered) == len(sampler.sampled)
    assert dict(delivered) == sampler.sampled
    buyer, seller = ({token for one in found if one.role == role for token in one.tokens} for role in ROLES[1:])
    assert not any(token >= 1000 for token in buyer & seller)
    assert {one.reward for one in found if one.role == "buyer"} <= {1.0}
    assert {one.reward for one in found if one.role != "buyer"} <= {0.5}
    group = TrajectoryGroup(GroupKey(0, 0), "p", "test", found)
    batch = TrajectoryBatch.from_bytes(TrajectoryBatch.from_groups([pack_group(group)]).to_bytes())
    assert batch.episodes == group.episodes == 1
    assert batch.roles == [one.role for one in found]
    assert batch.episode_rewards.tolist() == group.episode_rewards
    first = [one for one in found if one.role == found[0].role]
    assert group.episode_rewards == [found[0].reward + sum(one.total_reward - one.reward for one in first)]


def test_role_continues_its_context_and_prompt() -> None:
    steps = [
        Step("buyer", prompt=3, said=2),
        Step("seller", said=1, reward=4.0),
        Step("buyer", added=1, said=1, reward=-1.0),
        Step("seller", kept=0, said=1),
    ]
    buyer, seller, again = play(Bargain(steps), Sampler())
    assert buyer.tokens == (7, 7, 7, 1000, 1001, 8, 1003)
    assert seller.tokens == (1, 2, 1002)
    assert again.tokens == (1, 2, 9, 1004, 1005)
    assert [one.role for one in (buyer, seller, again)] == ["buyer", "seller", "seller"]
    assert (seller.branch, again.branch) == (Branch(1, 0), Branch(1 + RESPONSES, 2))
    assert [value for value in Float32s.of(buyer.token_rewards or ()) if value == value] == [-1.0]
    assert [value for value in Float32s.of(seller.token_rewards or ()) if value == value] == [4.0]
    assert again.token_rewards is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "the name of a role must have 1 to 100 characters, not 0"),
        ("x" * 101, "the name of a role must have 1 to 100 characters, not 101"),
        ("\ud800", "surrogates not allowed"),
        (3, "the name of a role must be a string, not a int"),
    ],
)
def test_role_with_an_invalid_name_is_an_error(name: Any, reason: str) -> None:
    class Wrong(Environment):
        async def play(self, episode: Episode) -> Score | None:
            episode.take_role(name)
            return None

    with pytest.raises((ValueError, TypeError), match=reason):
        play(Wrong(), Sampler())


def test_reward_of_a_role_without_a_turn_is_an_error() -> None:
    class Early(Environment):
        async def play(self, episode: Episode) -> Score | None:
            episode.take_role("buyer")
            await episode.generate(max_tokens=1)
            episode.take_role("seller")
            episode.reward(1.0)
            return None

    with pytest.raises(ValueError, match="the episode has no turn that could get the reward yet"):
        play(Early(), Sampler())


def test_prompt_is_replaced_only_before_the_first_turn() -> None:
    """Also in an empty branch, because the tokens of the earlier branch follow the earlier prompt."""

    class Late(Environment):
        async def play(self, episode: Episode) -> Score | None:
            await episode.generate(max_tokens=1)
            episode.start_branch([])
            episode.replace_prompt([7])
            return None

    with pytest.raises(ValueError, match="the prompt cannot grow by"):
        play(Late(), Sampler())


@pytest.mark.parametrize("roles", [{"a": float("nan")}, {"a": "1"}, dict.fromkeys(map(str, range(65)), 0.0)])
def test_invalid_rewards_of_roles_fail_the_episode(roles: Any) -> None:
    assert validate_score("environment x", Score(1.0, roles=roles)).outcome is Outcome.UNPARSABLE
    assert validate_score("environment x", Score(1.0, roles={"a": 2})).roles == {"a": 2.0}


# --- advantages ----------------------------------------------------------------------------------------------


def row(sample: int, role: str, reward: float, branch: Branch | None = None) -> Trajectory:
    """Return a trajectory of a prompt token and two sampled tokens."""
    return Trajectory(
        sample, 0, (1, 5, 6), (False, True, True), (0.0, -1.0, -1.0), (-1, 0, 0), reward, "", StopReason.STOP,
        branch=branch, role=role, outcome=Outcome.CORRECT,
    )  # fmt: skip


def game(rewards: Sequence[Sequence[float]], key: int = 0) -> TrajectoryGroup:
    """Return a group of episodes, each with the rewards of its first and of its second role."""
    rows = list[Trajectory]()
    for sample, (first, second) in enumerate(rewards):
        rows += [row(sample, "a", first), row(sample + 10, "b", second, Branch(sample, 1))]
    return TrajectoryGroup(GroupKey(key, 0), f"p{key}", "d", tuple(rows))


def advantages(group: TrajectoryGroup, **keys: Any) -> list[float]:
    """Return the advantage of the first token of each row."""
    data = BatchRows.of(TrajectoryBatch.from_groups([group]))
    found = compute_targets(Advantage(**keys), data, 10)
    return found.advantage_B[torch.from_numpy(data.starts[:-1])].tolist()


def test_each_role_has_its_own_baseline() -> None:
    """The roles of a zero-sum game have the baselines 1 and -1. A common baseline would be 0."""
    group = game([(2, -2), (1, -1), (0, 0)])
    assert advantages(group, scale="none") == pytest.approx([1, -1, 0, 0, -1, 1])
    assert advantages(group, scale="none", baseline="leave-one-out") == pytest.approx([1.5, -1.5, 0, 0, -1.5, 1.5])
    assert advantages(group, scale="none", credit="turn") == pytest.approx([1, -1, 0, 0, -1, 1])
    assert advantages(game([(1, 0), (1, 2)]), scale="none") == pytest.approx([0, -1, 0, 1])


@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(-8, 8)), min_size=2, max_size=6))
def test_advantages_of_a_role_equal_those_without_other_roles(rewards: list[tuple[int, int]]) -> None:
    """The advantages of a role are those of a group that has only this role, with each kind of credit."""
    whole = game(rewards)
    for keys in ({}, {"scale": "none"}, {"scale": "none", "credit": "turn"}, {"baseline": "leave-one-out"}):
        found = advantages(whole, **keys)
        for place, role in enumerate("ab"):
            rows = tuple(replace(one, branch=None) for one in whole.trajectories if one.role == role)
            assert found[place::2] == pytest.approx(advantages(replace(whole, trajectories=rows), **keys), abs=1e-5)


def test_minibatch_contains_both_roles_of_its_prompts() -> None:
    batch = TrajectoryBatch.from_groups([game([(1, -1), (0, 0)], key) for key in range(4)])
    data = BatchRows.of(batch)
    for part in range(2):
        rows = [number for number, group in enumerate(data.groups) if group % 2 == part]
        assert Counter((batch.roles[one], batch.table["index"][one].as_py()) for one in rows) == {
            (role, key): 2 for role in "ab" for key in (part, part + 2)
        }
    assert len(set(data.groups.tolist())) == 8
    assert data.episodes is not None
    assert len(set(data.episodes.tolist())) == 16
    assert not data.branches.any()


def test_metrics_contain_the_reward_of_each_role() -> None:
    group = game([(2, -2), (1, -1), (0, 3)])
    late = row(30, "b", 3.0, Branch(12, 1))
    batch = TrajectoryBatch.from_groups([replace(group, trajectories=(*group.trajectories, late))])
    commit = BatchCommitted(2, StoredObject("x", 1, ""), 2, (TrainedGroup(0, 0, 2, 2, 14),), (0,))
    found = compute_batch_metrics(batch, commit, (), 2)
    assert (found["reward_role_a"], found["reward_role_b"], found["reward"]) == (1.0, 0.0, 1.0)


# --- runs ----------------------------------------------------------------------------------------------------


class Auction(Environment):
    """Two roles with prompts of their own, each with two turns; the winner's reward is 1, the other's is -1."""

    async def play(self, episode: Episode) -> Score | None:
        for turn in range(2):
            for number, role in enumerate(("bidder", "house")):
                episode.take_role(role)
                if turn == 0:
                    episode.replace_prompt([40 + number])
                else:
                    episode.add([30])
                made = await episode.generate(max_tokens=2)
                if made is None:
                    return None
        won = 1.0 if sum(made.tokens) % 2 else -1.0
        return Score(won, roles={"house": -won})


def run_auction(name: str, **keys: Any) -> Pipeline:
    pipeline = Pipeline(MemoryStore(name), versions=3, sigma=0.0, environment=Auction(), **keys)
    run_virtual(pipeline.run())
    return pipeline


def test_run_with_roles_counts_each_episode_once() -> None:
    pipeline = run_auction("roles", choices={"redundant_responses": 1, "on_stale": "drop"})
    report = audit(pipeline.store)
    assert report.clean, report.violations
    episodes = pipeline.groups * pipeline.group_size
    assert report.trajectories == 3 * episodes
    for _, batch in trained(pipeline.store):
        assert batch.episodes == episodes
        assert Counter(batch.roles) == {"bidder": episodes, "house": episodes}
        rewards = [one.reward for group in batch.groups() for one in group.trajectories]
        assert sum(rewards) == 0
        for group in batch.groups():
            assert group.pass_rate is not None
            assert group.pass_rate.responses == pipeline.group_size
            for one in group.trajectories:
                assert one.tokens[0] == (40 if one.role == "bidder" else 41)
                assert one.loss_mask.count(True) == 4
    tokens = sum(g.tokens for e in read(pipeline.store) if isinstance(e.body, BatchCommitted) for g in e.body.groups)
    assert tokens == 3 * episodes * 8


def test_filter_sees_the_rewards_of_the_first_role() -> None:
    """The rewards of both roles sum to 0 in each episode, so their sum would have no spread."""
    pipeline = run_auction("filter", choices={"filter": FilterConfig(min_mean=None, min_std=0.5, max_mean=None)})
    for _, batch in trained(pipeline.store):
        for group in batch.groups():
            assert len({one.reward for one in group.trajectories if one.role == "bidder"}) == 2


def test_audit_accepts_prompts_replaced_by_the_environment() -> None:
    pipeline = run_auction("prompts")
    whole = expected_of(pipeline, single_turn=False)
    assert whole.limits is not None
    report = audit(pipeline.store, expected=whole)
    assert {violation.kind for violation in report.violations} == {"lineage"}
    assert "begins with other tokens instead of the tokens of that prompt" in report.violations[0].what
    limits = whole.limits
    replaced = replace(whole, limits=lambda config: replace(limits(config), replaces_prompts=True))
    assert audit(pipeline.store, expected=replaced).clean


def test_failed_environment_measure_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    own = ImportedEnvironment(ImportEnvironment(path=f"{__name__}:Measured"))
    found = []
    for value in (1.5, float("inf"), -1):

        async def logprobs(_: Sequence[int], value: float = value) -> Sequence[float]:
            return [value]

        found.append(asyncio.run(own.measure(logprobs, None)))  # type: ignore[arg-type]
    assert found == [{"mean": 1.5}, {}, {"mean": -1.0}]
    assert "an evaluation has no measures" in caplog.text


class Measured(Auction):
    """An environment that measures the mean log-prob of a token."""

    async def measure(self, logprobs: Any, ports: Any) -> dict[str, float]:
        return {"mean": fmean(await logprobs([1, 2]))}
