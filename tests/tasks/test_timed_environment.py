"""The timed environment: what its draws depend on, and how it ends; runs with it in real and simulated worlds."""

from __future__ import annotations

import asyncio
import math
import statistics
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from benchmarks.lockstep import LockstepRun
from benchmarks.workloads import changed, recipe
from rollflow.storage.audit.audit import audit
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import DiscardReason, Outcome
from rollflow.tasks.environments.config import TimedEnvironmentConfig
from rollflow.tasks.environments.ports import NO_PORTS
from rollflow.tasks.environments.timed import TimedEnvironment
from rollflow.tasks.rollout.group import sample_seed
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.simulation.figures import Figures
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.world import SimulatedRun, simulate
from rollflow.testing.environments import ScriptedEpisode
from tests.support.log_runs import read
from tests.support.pipeline import Pipeline
from tests.tasks.test_scheduler import trained


def timed(**keys: object) -> TimedEnvironment:
    return TimedEnvironment(TimedEnvironmentConfig.model_validate({"kind": "timed", **keys}))


def seconds(environment: TimedEnvironment, seed: int, attempt: int = 0) -> list[float]:
    return [step.seconds for step in islice(environment.draw_steps(seed, attempt), 50)]


def test_environment_delays_depend_on_seed_and_attempt() -> None:
    """A long episode that was discarded is long again, but runs on another machine."""
    spread = {"median_turns": 8, "turns_sigma": 1.0, "turn_tokens": 20, "turn_tokens_sigma": 0.5, "step_sigma": 0.5}
    one, other = timed(**spread), timed(**spread)
    assert one.draw_limits(3, 7) == other.draw_limits(3, 7) != one.draw_limits(3, 8)
    assert seconds(one, 7) == seconds(other, 7) != seconds(one, 8)
    assert seconds(one, 7) != seconds(one, 7, attempt=1)


def test_gaussian_step_times_have_their_mean_and_no_negatives() -> None:
    """With mean and deviation 10, the mean of max(0, x) is 10 (0.8413 + 0.2420) = 10.83."""
    environment = timed(step_seconds=10, step_sigma=10)
    drawn = [step.seconds for seed in range(400) for step in islice(environment.draw_steps(seed), 1, 51)]
    assert min(drawn) == 0.0
    assert statistics.fmean(drawn) == pytest.approx(10.83, abs=0.15)


def test_lognormal_step_times_have_the_configured_median() -> None:
    environment = timed(distribution="lognormal", step_seconds=4, step_sigma=1.5)
    drawn = [step.seconds for seed in range(400) for step in islice(environment.draw_steps(seed), 1, 51)]
    assert statistics.median(drawn) == pytest.approx(4, rel=0.05)


def test_turn_counts_of_one_prompt_are_correlated() -> None:
    environment = timed(median_turns=20, turns_sigma=0.5, max_turns=1000, correlation=1.0)
    assert len({len(environment.draw_limits(4, seed)) for seed in range(20)}) == 1
    assert len({len(environment.draw_limits(prompt, 4)) for prompt in range(20)}) > 5


@pytest.mark.parametrize(("keys", "reason", "took"), [({"failures": 1}, "failed", 2.0), ({"hangs": 1}, "hung", 30.0)])
def test_failed_environment_leaves_the_episode_unjudged(keys: dict[str, float], reason: str, took: float) -> None:
    environment = timed(step_seconds=2, hang_seconds=30, **keys)

    async def play() -> tuple[object, float]:
        score = await environment.play(ScriptedEpisode(NO_PORTS))
        return score, asyncio.get_running_loop().time()

    score, at = run_virtual(play())
    assert score is not None
    assert (score.outcome, score.value, at) == (Outcome.UNJUDGED, 0.0, took)  # type: ignore[attr-defined]
    assert reason in score.reason  # type: ignore[attr-defined]


def test_key_places_limits_concurrent_environments() -> None:
    """With `places = 2`, six episodes take 15 s if each has a reset of 1 s and two steps of 2 s."""

    async def play() -> float:
        environment = timed(median_turns=2, step_seconds=2, reset_seconds=1, places=2)
        await asyncio.gather(*(environment.play(ScriptedEpisode(NO_PORTS, seed=seed)) for seed in range(6)))
        return asyncio.get_running_loop().time()

    assert run_virtual(play()) == pytest.approx(15)


def test_sum_of_failure_probabilities_above_one_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"hangs"):
        timed(failures=0.7, hangs=0.4)


def test_redundant_episode_ends_while_its_environment_hangs() -> None:
    """Some steps hang for an hour; two extra responses per prompt keep the run from waiting, and are counted."""
    environment = timed(median_turns=3, turn_tokens=4, step_seconds=0.1, hangs=0.02, hang_seconds=3600)
    choices = {"redundant_responses": 2, "on_stale": "drop"}
    pipeline = Pipeline(MemoryStore("hangs"), versions=6, environment=environment, choices=choices)

    async def run() -> float:
        await pipeline.run()
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) < 3600
    assert audit(pipeline.store).clean
    committed = [entry.body for entry in read(pipeline.store) if isinstance(entry.body, BatchCommitted)]
    assert sum(body.surplus_tokens for body in committed) > 0


def test_failed_environment_is_never_scored() -> None:
    """The scorer's `judge_tries` is 0, which gives the reward 0 only to what the scorer cannot judge."""
    environment = timed(median_turns=3, turn_tokens=4, step_seconds=0.1, failures=0.05)
    pipeline = Pipeline(MemoryStore("failures"), versions=6, environment=environment)
    run_virtual(pipeline.run())
    assert pipeline.scheduler.limits.judge_tries("") == 0
    assert audit(pipeline.store).clean
    assert pipeline.scheduler.counts.discards[DiscardReason.UNJUDGED] > 0
    rows = [one for _, batch in trained(pipeline.store) for group in batch.groups() for one in group.trajectories]
    assert all(one.outcome is not Outcome.UNJUDGED for one in rows)


@pytest.mark.parametrize(
    "keys",
    [
        {"turns_sigma": 11},
        {"turn_tokens": 5, "turn_tokens_sigma": 1e4},
        {"median_turns": 1e300},
        {"distribution": "lognormal", "step_sigma": 11},
        {"distribution": "lognormal", "reset_sigma": 11},
        {"slow_factor": 1e300},
    ],
    ids=str,
)
def test_timed_environment_with_infinite_delays_is_refused(keys: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(reversed(keys))):
        timed(**keys)


DRAWN: dict[str, st.SearchStrategy[Any]] = {
    **{name: st.none() | st.floats(1, 1e9) for name in ("setup_seconds", "turn_seconds", "episode_seconds")},
    **{name: st.none() | st.integers(1, 1000) for name in ("max_turn_tokens", "max_episode_tokens")},
    "unparsable_penalty": st.floats(0, 1e9),
    "median_turns": st.floats(1, 1e6),
    "turns_sigma": st.floats(0, 10),
    "max_turns": st.integers(1, 50),
    "correlation": st.floats(0, 1),
    "turn_tokens": st.none() | st.integers(1, 10**6),
    "turn_tokens_sigma": st.floats(0, 10),
    "observation_tokens": st.integers(0, 100),
    "distribution": st.sampled_from(["gaussian", "lognormal"]),
    "step_seconds": st.floats(0, 1e9),
    "step_sigma": st.floats(0, 10),
    "reset_seconds": st.floats(0, 1e9),
    "reset_sigma": st.floats(0, 10),
    "slow_share": st.floats(0, 1),
    "slow_factor": st.floats(1, 1e6),
    "failures": st.floats(0, 0.5),
    "hangs": st.floats(0, 0.5),
    "hang_seconds": st.floats(0.001, 1e9),
    "places": st.none() | st.integers(1, 100),
}


def test_random_settings_cover_every_timed_environment_key() -> None:
    assert DRAWN.keys() == TimedEnvironmentConfig.model_fields.keys() - {"kind"}


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional=DRAWN), st.integers(0, 2**62), st.integers(0, 2**40))
def test_random_settings_give_finite_environment_delays(keys: dict[str, Any], seed: int, prompt: int) -> None:
    environment = timed(**keys)
    limits = environment.draw_limits(prompt, seed)
    assert 1 <= len(limits) <= keys.get("max_turns", 50)
    assert all(limit is None or limit >= 1 for limit in limits)
    assert all(0 <= one.seconds < math.inf for one in islice(environment.draw_steps(seed), 9))


# --- simulations ------------------------------------------------------------------------------------------------

STEPS = {"median_turns": 4, "turn_tokens": 100, "step_seconds": 10, "step_sigma": 10, "places": 16}


def config(alpha: float, **keys: object) -> RunConfig:
    whole = recipe(alpha, 4, 4, cap=100_000).model_dump()
    return RunConfig.model_validate({**whole, "environment": {"kind": "timed", **STEPS, **keys}})


def hardware(**engines: object) -> Hardware:
    endless = {"median": 1e9, "sigma": 0.0, "correlation": 0.0, "tokens_per_tick": 10}
    slots = {"count": 2, "max_concurrent_requests": 8, "seconds_per_token": 0.01}
    return changed(Hardware(), engines=slots | engines, responses=endless)


def figures(run: RunConfig, world_type: type[SimulatedRun] = SimulatedRun) -> Figures:
    return simulate(run, hardware(), versions=12, world_type=world_type).figures


def test_simulated_episodes_have_the_drawn_turns() -> None:
    """Every episode has 4 turns of 100 tokens; nothing is discarded, so there is no bias."""
    found = figures(config(1)).bias
    assert (found.trained_turns, found.population_turns) == (4, 4)
    assert found.trained_mean == found.population_mean == 400


def test_synchronous_run_trains_all_drawn_turns() -> None:
    found = figures(config(0, turns_sigma=0.7, turn_tokens_sigma=0.5)).bias
    assert found.trained_turns == found.population_turns > 4
    assert found.trained_mean == found.population_mean


def test_lockstep_waits_for_the_slowest_step_of_each_round() -> None:
    """Each of the 4 rounds takes 1 s of generation and the longest of 16 steps, plus a reset that takes no time."""
    run = config(0)
    together, ours = figures(run, LockstepRun), figures(run)
    environment = TimedEnvironment(run.environment, 10)  # type: ignore[arg-type]
    expected = list[float]()
    for version in range(12):
        seeds = [sample_seed(run.seed, prompt, i) for prompt in range(4 * version, 4 * version + 4) for i in range(4)]
        drawn = [[step.seconds for step in islice(environment.draw_steps(seed), 1, 5)] for seed in seeds]
        expected.append(4 * 1.0 + sum(max(round_of) for round_of in zip(*drawn, strict=True)))
    assert together.steps == pytest.approx(expected)
    assert ours.step_seconds < together.step_seconds / 1.3


def test_lockstep_run_with_varying_turns_is_slower() -> None:
    run = config(0, turns_sigma=0.7)
    together, ours = figures(run, LockstepRun), figures(run)
    assert together.bias.trained_turns == ours.bias.trained_turns
    assert ours.step_seconds < together.step_seconds


def test_simulation_with_environments_repeats_its_results() -> None:
    assert figures(config(1, turns_sigma=0.5)) == figures(config(1, turns_sigma=0.5))
