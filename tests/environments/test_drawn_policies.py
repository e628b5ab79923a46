"""Tests that an episode in a correct environment gets a finite score, and never counts as a failure of the environment,
for any responses of the policy and any config.
"""

from __future__ import annotations

import asyncio
import math
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollflow.storage.records import Outcome
from rollflow.tasks.environments.config import GymnasiumEnvironment, TrlEnvironment
from rollflow.tasks.scorers.base import Score
from tests.environments.worlds import GUESTS, build, call, close, gym, play, speak, trl

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CALLS = st.builds(
    lambda name, given: call(name, **given), st.sampled_from(["add", "double", "reset", "x"]), st.just({})
)
NUMBERS = st.integers(-5, 5).map(lambda number: call("add", number=number))
ODD = JSON.map(lambda value: call("add", number=value))
SAID = st.text(max_size=30) | CALLS | NUMBERS | ODD | st.tuples(NUMBERS, st.text(max_size=5), ODD).map("".join)
RESPONSES = st.lists(SAID | st.sampled_from(["0", "1", "<tool_call>"]), min_size=1, max_size=5)


@pytest.mark.parametrize("config", [trl("Counter", max_turns=6), gym(max_turns=6)], ids=["trl", "gymnasium"])
def test_any_policy_gets_a_finite_score(config: object) -> None:
    environment = build(config)  # type: ignore[arg-type]
    runner = asyncio.Runner()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(RESPONSES, st.integers(200, 600))
    def play_drawn(responses: list[str], longest: int) -> None:
        score = runner.run(environment.play(speak(config, *responses, longest=longest)))
        assert isinstance(score, Score)
        assert math.isfinite(score.value)
        assert score.outcome is not Outcome.UNJUDGED

    try:
        play_drawn()
        assert environment.health.failures == environment.health.crashes == 0
    finally:
        runner.run(close(environment))
        runner.close()


SECONDS = st.floats(20.0, 1e9)
SHARED: dict[str, st.SearchStrategy[Any]] = {
    "interpreter": st.sampled_from(["", sys.executable]),
    "folder": st.just(str(GUESTS)),
    "at_once": st.integers(1, 4),
    "max_turns": st.integers(1, 5),
    "max_turn_tokens": st.none() | st.integers(1, 30),
    "max_episode_tokens": st.none() | st.integers(1, 100),
    "unparsable_penalty": st.floats(0, 2),
    "start_seconds": SECONDS,
    "setup_seconds": SECONDS,
    "turn_seconds": SECONDS,
    "close_seconds": SECONDS,
    "page_frames": st.integers(0, 100),
    "resets_ahead": st.integers(0, 4),
    "episode_seconds": SECONDS,
    "max_failures": st.integers(1, 30),
}
TRL: dict[str, st.SearchStrategy[Any]] = {
    **SHARED,
    "path": st.just("odd_worlds:Counter"),
    "options": st.fixed_dictionaries({}, optional={"start": st.integers(-3, 3)}),
}
GYM: dict[str, st.SearchStrategy[Any]] = {
    **SHARED,
    "id": st.none(),
    "path": st.just("odd_worlds:Walk"),
    "options": st.fixed_dictionaries({}, optional={"goal": st.integers(-3, 3)}),
    "rewards": st.sampled_from(["episode", "turns"]),
    "observe": st.sampled_from([None, "odd_worlds:observe_drawn"]),
    "actions": st.sampled_from([{}, {"1": 1, "0": 0}, {"Left": 0, "->": 1, "go on": 1}]),
    "act": st.none(),
}
ACTING = {**GYM, "actions": st.just({}), "act": st.just("odd_worlds:act_by_arrow")}


def test_drawn_configs_have_every_key_of_trl_and_gymnasium() -> None:
    assert TRL.keys() == TrlEnvironment.model_fields.keys() - {"kind"}
    assert GYM.keys() == GymnasiumEnvironment.model_fields.keys() - {"kind"}


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.builds(TrlEnvironment, **TRL)  # type: ignore[arg-type]
    | st.builds(GymnasiumEnvironment, **GYM)  # type: ignore[arg-type]
    | st.builds(GymnasiumEnvironment, **ACTING),  # type: ignore[arg-type]
    RESPONSES,
    st.integers(200, 600),
)
def test_episode_with_any_drawn_config_gets_a_finite_score(
    config: TrlEnvironment | GymnasiumEnvironment, responses: list[str], longest: int
) -> None:
    assert type(config).model_validate_json(config.model_dump_json()) == config
    score, episode, environment = play(config, *responses, longest=longest)
    assert score is not None
    assert math.isfinite(score.value)
    assert score.outcome is not Outcome.UNJUDGED
    assert episode.asked.count("generate") <= config.max_turns
    assert environment.health.failures == environment.health.crashes == 0
