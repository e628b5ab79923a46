"""Property: whatever the policy says, an episode ends with a finite score, and is never blamed on the environment."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score
from tests.environments.worlds import build, call, close, gym, speak, trl

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
    def play(responses: list[str], longest: int) -> None:
        score = runner.run(environment.play(speak(config, *responses, longest=longest)))
        assert isinstance(score, Score)
        assert math.isfinite(score.value)
        assert score.outcome is not Outcome.UNJUDGED

    try:
        play()
        assert environment.health.failures == environment.health.crashes == 0
    finally:
        runner.run(close(environment))
        runner.close()
