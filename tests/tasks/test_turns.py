"""Turns of an episode: their starts, the rewards of single turns, and the states in which turns act."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.model_input import ModelInput
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import UNNAMED_STATE, Prompt, StopReason, Trajectory, TrajectoryGroup
from rollflow.storage.token_arrays import Float32s
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.config import ImportEnvironment
from rollflow.tasks.environments.imported import ImportedEnvironment
from rollflow.tasks.environments.single_turn import SINGLE_TURN
from rollflow.tasks.environments.turns import hash_state
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, ScoreRequest
from tests.support.pipeline import Pipeline
from tests.tasks.test_scheduler import trained

PROMPT = Prompt("p", 0, "test", "?", ModelInput.of((1, 2)))


@dataclass(frozen=True)
class Step:
    """One turn of a scripted episode: tokens of the environment, its state, and what the policy says."""

    added: int = 0
    state: str | None = None
    said: int = 1
    rewards: tuple[float, ...] = ()


class Scripted(Environment):
    """Plays the steps of a script."""

    def __init__(self, steps: Sequence[Step], score: Score | None = None) -> None:
        self.steps, self.end = steps, score or Score(0.5, "done")

    async def play(self, episode: Episode) -> Score | None:
        for step in self.steps:
            episode.add([9] * step.added)
            if step.state is not None:
                episode.enter_state(step.state)
            if await episode.generate(max_tokens=step.said) is None:
                return None
            for value in step.rewards:
                episode.reward(value)
        return self.end


def play(environment: Environment, said: Sequence[int] = ()) -> Trajectory:
    """Play an episode; the policy says `max_tokens` tokens in each turn, or as many as `said` lists."""

    async def ask(turn: Turn) -> VersionedGeneration:
        count = said[turn.number] if said else turn.max_new_tokens
        made = TokenSpan.of([5] * count, [-1.0] * count, [3] * count)
        return VersionedGeneration(Generation("", made, StopReason.STOP), 3)

    async def keep(_: PlayedEpisode) -> bool:
        return True

    async def score(request: ScoreRequest) -> Score:
        return Score(1.0, "judged")

    async def run() -> Trajectory:
        episode = PlayedEpisode(PROMPT, 10_000, ask, keep, score)
        found = await episode.play(environment)
        assert found is not None
        [one] = episode.trajectories(found)
        return one

    return asyncio.run(run())


STEP = st.builds(
    Step,
    st.integers(0, 3),
    st.none() | st.sampled_from(["hall", "cellar"]),
    st.integers(1, 4),
    st.lists(st.integers(-3, 3).map(float), max_size=2).map(tuple),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=6))
def test_recorded_turns_states_and_rewards_match_the_episode(steps: list[Step]) -> None:
    one = play(Scripted(steps))
    at, starts, rewards = 2, [], {}
    for step in steps:
        starts.append(at + step.added)
        at += step.added + step.said
        if step.rewards:
            rewards[at - 1] = sum(step.rewards)
    assert one.turn_starts == tuple(starts)
    found = {} if one.token_rewards is None else dict(enumerate(one.token_rewards))
    assert {at: value for at, value in found.items() if not math.isnan(value)} == rewards
    assert one.total_reward == 0.5 + sum(rewards.values())
    named = [step.state for step in steps]
    if not any(name is not None for name in named):
        assert one.turn_states is None
    else:
        assert one.turn_states is not None
        expected = [UNNAMED_STATE if name is None else hash_state(name) for name in named]
        assert list(one.turn_states) == expected


def test_episode_with_a_single_turn_records_no_turns() -> None:
    one = play(SINGLE_TURN, said=[4])
    assert (one.turn_starts, one.turn_states, one.token_rewards) == (None, None, None)


def test_generation_without_tokens_does_not_count_as_a_turn() -> None:
    one = play(Scripted([Step(), Step(added=1), Step(added=1, rewards=(2.0,))]), said=[2, 0, 1])
    assert one.turn_starts == (2, 6)
    assert list(np.flatnonzero(~np.isnan(Float32s.of(one.token_rewards or ()).array))) == [6]


def test_rewards_of_turns_are_added_to_token_values() -> None:
    values = [None, 0.25, 4.0]  # the second token is the environment's
    steps = [Step(rewards=(1.0,)), Step(added=1, rewards=(-1.0,))]
    one = play(Scripted(steps, Score(0.0, token_values=Float32s.of([math.nan, *values[1:]]))))
    rewards = Float32s.of(one.token_rewards or ())
    assert [None if math.isnan(value) else value for value in rewards] == [None, None, 1.25, None, 3.0]


class Wrong(Environment):
    """Calls a method of the episode in a wrong way."""

    def __init__(self, call: str) -> None:
        self.call = call

    async def play(self, episode: Episode) -> Score | None:
        calls: dict[str, Any] = {
            "early": lambda: episode.reward(1.0),
            "infinite": lambda: episode.reward(math.inf),
            "text": lambda: episode.reward("1"),  # type: ignore[arg-type]
            "state": lambda: episode.enter_state(5),  # type: ignore[arg-type]
        }
        if self.call == "early":
            calls["early"]()
        await episode.generate(max_tokens=2)
        episode.reward(0.25)
        calls[self.call]()
        return Score(1.0)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("infinite", "ValueError: the reward of a turn is inf, which is not a finite float32 number"),
        ("text", "TypeError: the reward of a turn must be a number, not a str"),
        ("state", "TypeError: the key of a state must be a string, not a int"),
    ],
)
def test_invalid_reward_of_a_turn_fails_its_episode(call: str, reason: str) -> None:
    """The failed episode keeps the rewards of its turns, else a policy could escape a penalty by a failure."""
    one = play(ImportedEnvironment(ImportEnvironment(path=f"{__name__}:Wrong", options={"call": call})))
    assert (one.reward, one.total_reward) == (0.0, 0.25)
    assert one.reason == f"environment {__name__}:Wrong failed: {reason}"


def test_reward_before_the_first_turn_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="the episode has no turn that could get the reward yet; give a reward after `generate`"
    ):
        play(Wrong("early"))


def test_state_names_are_stored_as_64_bit_hashes() -> None:
    assert hash_state("hall") == hash_state("hall") != hash_state("cellar")
    assert all(-(1 << 63) <= hash_state(str(n)) < 1 << 63 for n in range(100))
    assert UNNAMED_STATE not in {hash_state(str(n)) for n in range(100)}
    assert hash_state("\ud800") != hash_state("\udfff")


class Rooms(Environment):
    """Two turns in two rooms, with a reward for each turn."""

    async def play(self, episode: Episode) -> Score | None:
        for number, room in enumerate(("hall", "cellar")):
            episode.enter_state(room)
            if await episode.generate(max_tokens=4) is None:
                return None
            episode.reward(float(number))
            episode.add((7, 8))
        return Score(1.0)


def test_run_stores_turns_states_and_rewards() -> None:
    pipeline = Pipeline(MemoryStore("rooms"), versions=2, environment=Rooms())
    run_virtual(pipeline.run())
    assert audit(pipeline.store).clean
    groups: list[TrajectoryGroup] = [group for _, batch in trained(pipeline.store) for group in batch.groups()]
    assert groups
    for one in [one for group in groups for one in group.trajectories]:
        given = one.loss_mask.index(True)
        assert one.turn_starts == (given, given + 6)
        assert one.turn_states == (hash_state("hall"), hash_state("cellar"))
        assert one.total_reward == 2.0


def test_run_with_single_turn_episodes_stores_no_turns() -> None:
    pipeline = Pipeline(MemoryStore("one turn"), versions=1)
    run_virtual(pipeline.run())
    [(_, batch)] = trained(pipeline.store)
    assert isinstance(batch, TrajectoryBatch)
    assert all(batch.optional(name) is None for name in ("turn_starts", "turn_states", "token_rewards"))
