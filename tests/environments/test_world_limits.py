"""Tests that environments in worker processes have the same limits of episodes as other environments."""

from __future__ import annotations

from typing import Any

import pytest

from rollflow.storage.records import Outcome
from tests.environments.worlds import call, gym, play, trl


@pytest.mark.parametrize(
    ("keys", "turns", "tokens", "reason"),
    [
        ({"max_turns": 2, "options": {"goal": 9}}, 2, 4, "the episode reached environment.max_turns = 2"),
        (
            {"max_episode_tokens": 5, "options": {"goal": 9}},
            3,
            5,
            "the episode reached environment.max_episode_tokens = 5",
        ),
        ({"max_turn_tokens": 1}, 3, 3, "the environment ended the episode"),
    ],
)
def test_turn_and_token_limits_end_an_episode(keys: dict[str, Any], turns: int, tokens: int, reason: str) -> None:
    score, episode, _ = play(gym(actions={"1": 1, "10": 1}, **keys), "10")
    assert score is not None
    assert (len(episode.lived.current.turns), episode.generated, score.reason) == (turns, tokens, reason)
    assert score.value == sum(range(1, turns + 1))


@pytest.mark.parametrize(
    ("keys", "said", "late"),
    [
        ({"turn_seconds": 2.0}, 4 * call("rest"), "turn_seconds = 2"),
        ({"turn_seconds": 2.0}, call("rest"), ""),
        ({"episode_seconds": 1.0}, call("rest"), "episode_seconds = 1"),
    ],
)
def test_time_of_a_turn_and_an_episode_is_limited(keys: dict[str, float], said: str, late: str) -> None:
    """Two turns with a rest of 0.6 seconds each are within the limit of a turn, and four rests in one turn are not."""
    score, _, _ = play(trl("Slow", options={"rest": 0.6}, **keys), said, said, "Done.")
    assert score is not None
    assert score.outcome is (Outcome.TIMEOUT if late else Outcome.CORRECT)
    assert not late or f"the environment took more than environment.{late} s" in score.reason


def test_setup_counts_towards_the_time_of_an_episode() -> None:
    config = trl("Slow", options={"setup": 0.5, "rest": 1.5}, episode_seconds=1.7)
    score, _, _ = play(config, call("rest"), "Done.")
    assert score is not None
    assert score.outcome is Outcome.TIMEOUT
    assert "episode_seconds = 1.7" in score.reason


@pytest.mark.parametrize(
    ("config", "said"),
    [(gym(unparsable_penalty=0.25), "jump"), (trl("Counter", unparsable_penalty=0.25), "<tool_call>{</tool_call>")],
)
def test_unreadable_action_costs_the_penalty(config: Any, said: str) -> None:
    _, episode, _ = play(config.model_copy(update={"max_turns": 2}), said)
    assert [turn.reward for turn in episode.lived.current.turns] == [-0.25, -0.25]
