"""Tests of environments of kind `gymnasium`, in real worker processes."""

from __future__ import annotations

import pytest

from rollflow.storage.records import Outcome
from tests.environments.worlds import gym, play


def test_rewards_of_all_steps_are_added() -> None:
    score, episode, environment = play(gym(), "1", "I go to 0, no, 1", "1", "1")
    assert score is not None
    assert (score.value, score.reason) == (6.0, "the environment ended the episode")
    assert episode.heard == ["\n1\n", "\n2\n"]
    assert environment.health.steps == 3


def test_each_turn_gets_the_reward_of_its_step() -> None:
    score, episode, _ = play(gym(rewards="turns"), "1", "no 1", "1")
    assert score is not None
    assert (score.value, score.outcome) == (0.0, Outcome.CORRECT)  # the accuracy follows from the outcome
    turns = episode.lived.current.turns
    assert [turn.reward for turn in turns] == [1.0, 2.0, 3.0]
    assert len({turn.state for turn in turns}) == 3


@pytest.mark.parametrize(
    ("keys", "said", "value"),
    [
        ({"actions": {"Left": 0, "go right": 1, "right": 1}}, "left, no: RIGHT!", 6.0),
        ({"actions": {"go on": 1}}, "I go on", 6.0),
        ({"actions": {"->": 1, "<-": 0}}, "<- or ->", 6.0),
        ({"actions": {"-1": 1, "1": 0}}, "1, no, -1", 6.0),
        ({"actions": {"go": 0, "go on": 1}}, "I go on", 6.0),
        ({"actions": {"": 0, "1": 1}}, "1", 6.0),
        ({"act": "odd_worlds:act_by_arrow"}, ">", 6.0),
        ({"options": {"goal": 1}}, "1", 1.0),
        ({"max_turns": 2}, "1", 3.0),
    ],
)
def test_text_of_the_policy_names_an_action(keys: dict[str, object], said: str, value: float) -> None:
    score, _, _ = play(gym(**keys), said)
    assert score is not None
    assert score.value == value


@pytest.mark.parametrize(
    ("keys", "heard"),
    [
        ({}, "\nerror: no action; the actions are 0, 1\n"),
        ({"act": "odd_worlds:act_by_arrow"}, "\nerror: draw an arrow\n"),
    ],
)
def test_text_without_an_action_leaves_the_state_unchanged(keys: dict[str, object], heard: str) -> None:
    score, episode, environment = play(gym(max_turns=2, **keys), "jump")
    assert score is not None
    assert (score.value, score.outcome) == (0.0, Outcome.WRONG)
    assert episode.heard == [heard]
    assert environment.health.failures == 0


def test_episode_with_an_infinite_reward_gets_reward_zero() -> None:
    score, _, _ = play(gym(options={"wrong": "infinite"}), "1")
    assert score is not None
    assert (score.value, score.outcome) == (0.0, Outcome.UNPARSABLE)


def test_episodes_of_a_prompt_begin_in_the_same_state() -> None:
    prompts = [play(gym(observe="odd_worlds:observe_drawn"), "1")[1].prompt.input.flat for _ in range(2)]
    assert prompts[0] == prompts[1]


def test_frozen_lake_of_gymnasium_is_played_to_the_goal() -> None:
    from rollflow.tasks.environments.config import GymnasiumEnvironment

    actions = {"left": 0, "down": 1, "right": 2, "up": 3}
    config = GymnasiumEnvironment(id="FrozenLake-v1", options={"is_slippery": False}, actions=actions)
    way = ["down", "down", "right", "right", "down", "right"]
    score, episode, _ = play(config, *way)
    assert score is not None
    assert (score.value, score.outcome) == (1.0, Outcome.CORRECT)
    assert "".join(map(chr, episode.prompt.input.flat)) == "Count.\n\n[S]FFF\nFHFH\nFFFH\nHFFG\n\n"
    assert episode.heard[0] == "\n  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\n\n"
