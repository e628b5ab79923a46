"""Tests the simulator against hand calculations, against independent calculations, and against the simulator's own
bounds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.errors import ConfigError, RollflowError
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Trajectory
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.engines.base import GenerationRequest
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.lengths import ResponseLengths
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.policies.config import PolicyConfig
from rollflow.tasks.rollout.config import EvaluationConfig, FilterConfig, RolloutConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.simulation.bounds import Workload, bounds_of
from rollflow.tasks.simulation.figures import Figures
from rollflow.tasks.simulation.fit import RecordedVersion, correlation_of, fit_hardware, normal_scores
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.world import SimulatedRun, simulate


def recipe(**changes: Any) -> RunConfig:
    """Return a small recipe with 8 groups of 4 per step, and without evaluations."""
    rollout = RolloutConfig(**{key: changes.pop(key) for key in ("max_inflight_groups", "on_stale") if key in changes})
    keys: dict[str, Any] = {
        "versions": 8,
        "groups": 8,
        "group_size": 4,
        "async_ratio": 1.0,
        "policy": PolicyConfig(path="x"),
    }
    keys["evaluation"] = EvaluationConfig(every=0)
    return RunConfig(**{**keys, "rollout": rollout, **changes})


def hardware(**sections: dict[str, Any]) -> Hardware:
    """Return hardware with two engines of 8 slots, lognormal response lengths with median 100, and 0.1 s per token."""
    parts: dict[str, dict[str, Any]] = {
        "engines": {"count": 2, "max_concurrent_requests": 8, "seconds_per_token": 0.1},
        "responses": {"median": 100.0, "sigma": 0.8, "cap": 1000, "correlation": 0.7},
        "learner": {"seconds_per_version": 20.0},
    }
    return Hardware.model_validate({name: parts.get(name, {}) | sections.get(name, {}) for name in parts | sections})


ONE = ModelInput.of((1,))
CONSTANT = {"median": 50.0, "sigma": 0.0, "cap": 100}


def test_synchronous_step_takes_the_sum_of_rollout_and_training() -> None:
    one = hardware(
        engines={"count": 1, "max_concurrent_requests": 1, "prefill_seconds": 0.25},
        responses=CONSTANT,
        reward={"seconds": 2.0},
        learner={"seconds_per_version": 3.0, "seconds_per_trajectory": 0.5, "epochs": 2, "gpus": 4},
        update={"seconds": 0.5, "fetch_seconds": 0.125},
    )
    figures = simulate(recipe(groups=3, group_size=2, async_ratio=0.0, max_inflight_groups=3), one).figures
    generation = 6 * (0.25 + 50 * 0.1)  # six responses, one after another
    train = 3.0 + 2 * 6 * 0.5 / 4
    step = generation + 2.0 + train + 0.5 + 0.125
    assert figures.step_seconds == pytest.approx(step, abs=1e-4)
    assert figures.steps[1:] == pytest.approx([step] * 7, abs=1e-4)
    assert figures.shares is not None
    expected = (generation / step, 2.0 / step, train / step, 0.625 / step)
    assert dataclasses.astuple(figures.shares) == pytest.approx(expected, abs=1e-5)
    assert figures.idle.learner == pytest.approx(1 - train / step, abs=1e-5)
    assert figures.idle.engines == pytest.approx(1 - generation / step, abs=1e-5)
    assert figures.tokens.trained == figures.tokens.sampled == 8 * 6 * 50
    assert figures.staleness == {0: 6 * 6}
    assert figures.tokens_per_second == pytest.approx(6 * 50 / step, rel=1e-5)


def test_asynchronous_step_takes_as_long_as_its_slower_stage() -> None:
    """One engine slot generates 6 responses of 5 s in 30 s. Training takes 12 s or 40 s at the same time."""
    for seconds, step in ((12.0, 30.0), (40.0, 40.0)):
        one = hardware(
            engines={"count": 1, "max_concurrent_requests": 1},
            responses=CONSTANT,
            learner={"seconds_per_version": seconds},
        )
        figures = simulate(recipe(groups=3, group_size=2, max_inflight_groups=6, versions=12), one).figures
        assert figures.step_seconds == pytest.approx(step, rel=1e-3)
        assert figures.shares is None
        assert max(figures.staleness) <= 1


def test_engine_slowdown_and_speed_match_a_hand_example() -> None:
    """With four requests at a time and slowdown 0.5, each request runs at speed 1 / 2.5, on an engine of twice the
    speed. A response takes 5 s x 2.5 / 2.
    """
    full = hardware(
        engines={"count": 1, "max_concurrent_requests": 4, "batch_slowdown": 0.5, "speeds": (2.0,)},
        responses=CONSTANT,
        learner={"seconds_per_version": 1.0},
    )
    figures = simulate(recipe(groups=2, group_size=2, async_ratio=0.0), full).figures
    assert figures.step_seconds == pytest.approx(5.0 * 2.5 / 2 + 1.0, abs=1e-4)


def test_simulated_results_depend_only_on_the_seed() -> None:
    busy = hardware(reward={"seconds": 1.0, "sigma": 0.5, "workers": 3}, engines={"speed_spread": 0.3})
    first, again = (simulate(recipe(async_ratio=0.0), busy).figures for _ in range(2))
    assert first == again
    assert simulate(recipe(async_ratio=0.0, seed=1), busy).figures.seconds != first.seconds


@pytest.mark.long
def test_long_simulations_approach_the_lower_bound_of_a_step() -> None:
    for alpha in (0.0, 1.0, 3.0):
        figures = simulate(recipe(async_ratio=alpha, versions=80, max_inflight_groups=64), hardware()).figures
        bounds = figures.bounds
        # the mean length of the last responses differs from the mean of the distribution
        assert figures.step_seconds >= bounds.conserving_split * 0.98
        if alpha:
            assert figures.step_seconds <= bounds.asynchronous_split
    assert figures.step_seconds <= bounds.conserving_split * 1.08


@pytest.mark.long
@pytest.mark.parametrize(
    "sections",
    [
        {
            "engines": {"count": 1, "max_concurrent_requests": 8, "batch_slowdown": 3.0}
        },  # eight requests at a time are slower than one after another
        {"learner": {"measured": (90.0, 10.0, 30.0, 10.0)}},  # the first step took longest
        {
            "engines": {
                "count": 2,
                "max_concurrent_requests": 8,
                "kv_read_cost": 0.001,
                "kv_tokens": 900,
                "prefill_seconds_per_token": 0.01,
            }
        },
    ],
)
def test_no_simulated_step_is_faster_than_the_lower_bound(sections: dict[str, Any]) -> None:
    machine = hardware(**sections)
    for alpha, slots in ((0.0, 64), (2.0, 64), (2.0, 1)):
        config = recipe(async_ratio=alpha, versions=24, rollout=RolloutConfig(max_inflight_groups=slots))
        figures = simulate(config, machine).figures
        assert figures.step_seconds >= 0.97 * figures.bounds.conserving_split
    assert figures.bounds.guaranteed == ("kv_read_cost" not in sections.get("engines", {}))


def test_step_time_bounds_match_the_paper() -> None:
    work = Workload(
        100,
        mu=2.0,
        mu_least=2.0,
        longest=30.0,
        mu_train=1.0,
        rollout_gpus=6,
        train_gpus=4,
        colocated=False,
        async_ratio=2,
    )
    bounds = bounds_of(work)
    assert bounds.conserving == pytest.approx(100 * 3 / 10)
    assert bounds.sync == pytest.approx(30 + 30)
    assert bounds.asynchronous == pytest.approx(30 + 10)
    assert bounds.best_training_share == pytest.approx(100 / (200 + 10 * 30 / 3 + 100))
    assert bounds.largest_gain == pytest.approx(1 + 10 * 30 / (100 * 3))
    assert bounds.conserving_split == pytest.approx(200 / 6)
    assert bounds.asynchronous_split == pytest.approx(200 / 6 + 10)
    turns = bounds_of(dataclasses.replace(work, rollout_gpus=10, train_gpus=10, colocated=True))
    assert turns.conserving == turns.conserving_split == pytest.approx(30)


def test_simulated_lengths_do_not_depend_on_the_schedule() -> None:
    figures: list[Figures] = []
    for alpha, count in ((0.0, 2), (2.0, 1)):
        figures.append(simulate(recipe(async_ratio=alpha), hardware(engines={"count": count})).figures)
    assert figures[0].bias.mean_difference == figures[0].bias.p99_difference == 0
    assert figures[0].bias.population_mean == figures[1].bias.population_mean
    assert figures[0].bias.trained == 8 * 32


def test_tokens_lost_by_a_weight_update_are_counted() -> None:
    slow = hardware(learner={"seconds_per_version": 6.0}, update={"seconds": 1.0})
    kept, restarted = (
        simulate(recipe(engine=TimedEngineConfig(on_weight_update=mode), max_inflight_groups=64), slow).figures
        for mode in ("continue", "restart")
    )
    assert kept.restarted == 0
    assert "restarted" not in kept.tokens.wasted
    assert restarted.restarted > 0
    assert 0 < restarted.tokens.wasted["restarted"] < restarted.tokens.sampled
    assert kept.update_share > 0


def test_simulated_dead_engines_are_replaced() -> None:
    deaths = [{"at_seconds": 5.0, "engine": 0}, {"at_seconds": 40.0, "engine": 1}]
    figures = simulate(recipe(), hardware(faults={"deaths": deaths, "restart_seconds": 15.0})).figures
    assert figures.deaths == 2
    assert figures.taken_over > 0
    assert figures.bias.trained == 8 * 32
    mortal = simulate(recipe(), hardware(faults={"deaths_per_hour": 60.0, "restart_seconds": 5.0})).figures
    assert mortal.deaths > 2


def test_slow_engine_lengthens_a_simulated_step() -> None:
    well, ill = (
        simulate(recipe(async_ratio=0.0), hardware(faults={"slow_share": 1.0, "slow_factor": factor})).figures
        for factor in (1.0, 4.0)
    )
    assert well.shares is not None
    assert ill.step_seconds == pytest.approx(20 + 4 * (well.step_seconds - 20), rel=1e-6)


def test_simulated_timeline_shows_each_busy_interval() -> None:
    one = hardware(
        engines={"count": 1, "max_concurrent_requests": 2}, responses=CONSTANT, reward={"seconds": 2.0},
        learner={"seconds_per_version": 3.0},
    )  # fmt: skip
    config = recipe(groups=1, group_size=2, async_ratio=0.0, versions=5)
    timeline = simulate(config, one, timeline=True).timeline
    assert timeline is not None
    assert timeline.engines.shape == (1, len(timeline.rewards))
    assert timeline.seconds == pytest.approx(5 * 10.0, rel=0.02)
    assert timeline.engines.mean() == pytest.approx(0.5, abs=0.02)  # 5 of 10 s
    assert timeline.rewards.mean() == pytest.approx(2 * 0.2, abs=0.02)
    assert [span.version for span in timeline.steps] == [1, 2, 3, 4, 5]
    assert all(span.seconds == pytest.approx(3.0) for span in timeline.steps)


def test_hardware_file_that_does_not_fit_the_recipe_is_refused() -> None:
    with pytest.raises(ConfigError, match="the simulation has no such engine; name one from 0 to 1"):
        simulate(recipe(), hardware(faults={"deaths": [{"at_seconds": 1.0, "engine": 7}]}))
    with pytest.raises(ConfigError, match=r"learner.colocated = True: at async_ratio = 1"):
        simulate(recipe(), hardware(learner={"colocated": True}))


# --- the timed engine ---------------------------------------------------------------------------------------


def by_hand(arrivals: list[float], works: list[float], slots: int, slowing: float, speed: float) -> list[float]:
    """Compute from event to event when each request ends, if the engine shares its speed among the running requests."""
    left, ends, now = dict(enumerate(works)), [0.0] * len(works), 0.0
    order = sorted(range(len(works)), key=lambda i: (arrivals[i], i))
    while left:
        running = [i for i in order if i in left and arrivals[i] <= now][:slots]
        coming = [arrivals[i] for i in left if arrivals[i] > now]
        if not running:
            now = min(coming)
            continue
        rate = speed / (1 + slowing * (len(running) - 1))
        step = min([left[i] / rate for i in running] + [at - now for at in coming])
        now += step
        for i in running:
            left[i] -= step * rate
            if left[i] <= 1e-9:
                del left[i]
                ends[i] = now
    return ends


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(1, 40)), min_size=1, max_size=12, unique_by=lambda pair: pair[0]
    ),
    st.integers(1, 5),
    st.floats(0, 1),
    st.floats(0.2, 3),
)
def test_timed_engine_slows_down_under_load_as_calculated(
    requests: list[tuple[int, int]], slots: int, slowing: float, speed: float
) -> None:
    config = TimedEngineConfig(
        max_concurrent_requests=slots, batch_slowdown=slowing, speed=speed, seconds_per_token=0.1, prefill_seconds=0.3,
        median_tokens=1000, sigma=0.0,
    )  # fmt: skip

    async def one(engine: TimedEngine, number: int, at: int, tokens: int) -> float:
        await asyncio.sleep(at / 1000)
        await engine.generate(GenerationRequest(f"r{number}", ONE, tokens, seed=number))
        return asyncio.get_running_loop().time()

    async def main() -> tuple[list[float], float]:
        engine = TimedEngine(config)
        await engine.update(0, Path())
        began = asyncio.get_running_loop().time()
        calls = (one(engine, i, at, tokens) for i, (at, tokens) in enumerate(requests))
        ends = await asyncio.gather(*calls)
        return [end - began for end in ends], engine.usage.slot_seconds

    ends, busy = run_virtual(main())
    works = [0.3 + 0.1 * tokens for _, tokens in requests]
    assert ends == pytest.approx(by_hand([at / 1000 for at, _ in requests], works, slots, slowing, speed), abs=1e-4)
    if slots == 1:
        assert busy == pytest.approx(sum(works) / speed, abs=1e-4)


def test_weight_update_repeats_prefill_of_running_requests() -> None:
    config = TimedEngineConfig(
        max_concurrent_requests=4,
        seconds_per_token=0.1,
        prefill_seconds=1.0,
        update_seconds=0.5,
        median_tokens=20,
        sigma=0.0,
    )

    async def main() -> None:
        engine = TimedEngine(config)
        await engine.update(0, Path())
        began = asyncio.get_running_loop().time()
        task = asyncio.create_task(engine.generate(GenerationRequest("a", ONE, 64, seed=1)))
        await asyncio.sleep(2.0)  # one second of prefill, ten tokens
        await engine.suspend("continue")
        await engine.update(1, Path())
        await engine.resume()
        made = await task
        assert asyncio.get_running_loop().time() - began == pytest.approx(1.0 + 2.0 + 0.5 + 1.0, abs=1e-4)
        assert made.versions == (0,) * 10 + (1,) * 10

    run_virtual(main())


def step_by_step(lengths: list[int], config: TimedEngineConfig) -> list[float]:
    """Compute when each request ends on an engine that decodes one token of every running request at a time. All
    requests arrive at time 0. If the KV cache is full, the last running request is preempted, and continues once it
    fits again.
    """
    said, ends, now = [0] * len(lengths), [0.0] * len(lengths), 0.0
    waiting, running = list(range(len(lengths))), list[int]()
    room = config.kv_tokens or 10**9
    while waiting or running:
        held = sum(said[i] + config.prompt_tokens for i in running)
        while waiting and len(running) < config.max_concurrent_requests:
            comes = said[waiting[0]] + config.prompt_tokens
            if running and held + comes > room - 16 * (len(running) + 1):
                break
            held += comes
            now += comes * config.prefill_seconds_per_token
            running.append(waiting.pop(0))
        while len(running) > 1 and held + len(running) > room:
            waiting.insert(0, running.pop())
            held -= said[waiting[0]] + config.prompt_tokens
        now += config.seconds_per_token * (1 + config.batch_slowdown * (len(running) - 1) + config.kv_read_cost * held)
        for i in running:
            said[i] += 1
            if said[i] == lengths[i]:
                ends[i] = now
        running = [i for i in running if said[i] < lengths[i]]
    return ends


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=10),
    slots=st.integers(1, 6),
    kv_tokens=st.sampled_from([None, 2000, 700, 450]),
    reading=st.sampled_from([0.0, 0.001, 0.01]),
    prompt_tokens=st.sampled_from([0, 30]),
    prefill=st.sampled_from([0.0, 0.002]),
)
def test_kv_cache_costs_match_a_token_by_token_model(
    lengths: list[int], slots: int, kv_tokens: int | None, reading: float, prompt_tokens: int, prefill: float
) -> None:
    config = TimedEngineConfig(
        max_concurrent_requests=slots, batch_slowdown=0.1, seconds_per_token=0.1, median_tokens=1e6, sigma=0.0,
        kv_read_cost=reading, kv_tokens=kv_tokens, prompt_tokens=prompt_tokens, prefill_seconds_per_token=prefill,
    )  # fmt: skip
    held: list[float] = []

    async def main() -> list[float]:
        engine = TimedEngine(config)
        await engine.update(0, Path())
        began = asyncio.get_running_loop().time()

        async def one(number: int, length: int) -> float:
            made = await engine.generate(GenerationRequest(f"{number}", ONE, length, seed=number))
            assert len(made.tokens) == len(made.versions) == length
            held.append(engine._resident)
            return asyncio.get_running_loop().time() - began

        ends = await asyncio.gather(*(one(i, length) for i, length in enumerate(lengths)))
        assert engine.usage.tokens == sum(lengths)
        assert engine._resident == pytest.approx(0, abs=1e-3)
        return ends

    ends, expected = run_virtual(main()), step_by_step(lengths, config)
    if kv_tokens is None:
        assert ends == pytest.approx(expected, rel=0.02, abs=0.5)
    assert max(ends) == pytest.approx(max(expected), rel=0.1, abs=1.0)
    if kv_tokens:
        assert max(held) <= max(kv_tokens, max(lengths) + prompt_tokens) + 1


def test_full_kv_cache_preempts_the_last_request() -> None:
    config = TimedEngineConfig(
        max_concurrent_requests=2,
        seconds_per_token=0.1,
        median_tokens=1e6,
        sigma=0.0,
        kv_tokens=100,
        prefill_seconds_per_token=0.01,
    )

    async def main() -> None:
        engine = TimedEngine(config)
        await engine.update(0, Path())
        began = asyncio.get_running_loop().time()
        one, other = (
            asyncio.create_task(engine.generate(GenerationRequest(f"{n}", ONE, 80, seed=n))) for n in range(2)
        )
        await one  # after 5 s, 50 tokens each fill the cache; this request continues alone
        assert asyncio.get_running_loop().time() - began == pytest.approx(8.0, abs=1e-4)
        assert engine.usage.preempted == 1
        await engine.suspend("continue")
        await engine.update(1, Path())
        await engine.resume()
        made = await other  # 50 tokens again in 0.5 s, once: it was not in the cache at the update; then 30 more
        assert asyncio.get_running_loop().time() - began == pytest.approx(8.0 + 0.05 + 0.5 + 3.0, abs=1e-4)
        assert made.versions[:50] == (0,) * 50
        assert made.versions[-29:] == (1,) * 29

    run_virtual(main())


def test_weight_update_delays_an_engine_by_recomputed_tokens() -> None:
    config = TimedEngineConfig(
        max_concurrent_requests=2, seconds_per_token=0.1, median_tokens=1e6, sigma=0.0, prefill_seconds_per_token=0.01,
        prompt_tokens=100, update_seconds=0.25,
    )  # fmt: skip

    async def main() -> None:
        engine = TimedEngine(config)
        await engine.update(0, Path())
        began = asyncio.get_running_loop().time()
        both = asyncio.gather(*(engine.generate(GenerationRequest(f"{n}", ONE, 80, seed=n)) for n in range(2)))
        await asyncio.sleep(2.0 + 4.0)  # two prompts, then 40 tokens each
        await engine.suspend("continue")
        await engine.update(1, Path())
        await engine.resume()
        for made in await both:
            assert made.versions == (0,) * 40 + (1,) * 40
        assert asyncio.get_running_loop().time() - began == pytest.approx(6.0 + 0.25 + 2.8 + 4.0, abs=1e-4)

    run_virtual(main())


def test_tokens_per_tick_does_not_change_the_simulated_time() -> None:
    async def took(grain: int) -> tuple[float, int]:
        engine = TimedEngine(
            TimedEngineConfig(median_tokens=1000, sigma=0.7, seconds_per_token=0.01, tokens_per_tick=grain)
        )
        made = await engine.generate(GenerationRequest("a", ModelInput.of((5,)), 4000 // grain, seed=3))
        return asyncio.get_running_loop().time(), len(made.tokens)

    (fine, tokens), (coarse, few) = run_virtual(took(1)), run_virtual(took(40))
    assert fine == pytest.approx(coarse, abs=1e-6)
    assert few == pytest.approx(tokens / 40, abs=0.5)


def test_response_lengths_have_the_configured_correlation() -> None:
    config = TimedEngineConfig(median_tokens=1000, sigma=1.0, correlation=0.7)
    lengths = ResponseLengths(config)
    drawn = np.log([[lengths.draw((p,), random.Random(1000 * p + s)) for s in range(8)] for p in range(2000)])
    between = np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]
    assert between == pytest.approx(0.7, abs=0.03)
    assert np.median(np.exp(drawn)) == pytest.approx(1000, rel=0.06)
    assert drawn.std() == pytest.approx(1.0, abs=0.05)
    measured = ResponseLengths(config.model_copy(update={"lengths": (5, 10, 20, 40)}))
    found = [measured.draw((p,), random.Random(p)) for p in range(4000)]
    assert {length: found.count(length) / 4000 for length in (5, 10, 20, 40)} == pytest.approx(
        dict.fromkeys((5, 10, 20, 40), 0.25), abs=0.04
    )


# --- fitting ------------------------------------------------------------------------------------------------


def recorded(version: int, active: float, draw: np.random.Generator) -> RecordedVersion:
    """Return a recorded version with 20 groups of 4 responses. The engine has 0.2 s of prefill, 0.05 s per token for
    one request, and slowdown 0.1.
    """
    shared = np.repeat(draw.normal(size=20), 4)
    z = np.sqrt(0.6) * shared + np.sqrt(0.4) * draw.normal(size=80)
    tokens = np.maximum(1, np.rint(50 * np.exp(0.5 * z)))
    seconds = (0.2 + 0.05 * tokens) * (1 + 0.1 * (active - 1))
    lasted = float(seconds.sum()) / active
    groups = np.repeat(np.arange(20), 4).tolist()
    return RecordedVersion(version, lasted, 0.5, 0.03, 0.1, groups, tokens.tolist(), seconds.tolist(), [0.02] * 80)


@pytest.mark.long
def test_fitted_hardware_matches_the_record() -> None:
    draw = np.random.default_rng(0)
    versions = [recorded(v, active, draw) for v, active in enumerate((4.0, 8.0, 12.0, 16.0, 20.0) * 3)]
    assert correlation_of(versions) == pytest.approx(0.6, abs=0.08)
    fit = fit_hardware(versions, recipe(groups=20))
    assert fit.update.seconds == 0.03
    assert fit.update.fetch_seconds == pytest.approx(0.1)
    assert set(fit.reward.measured) == {0.02}
    assert fit.learner.measured[0] == pytest.approx(versions[0].seconds, abs=1e-5)  # no wait for a batch
    assert np.median(fit.responses.lengths) == pytest.approx(50, rel=0.1)


class Noting(SimulatedRun):
    """A simulated run that is recorded like a real run."""

    def __init__(self, config: RunConfig, machine: Hardware) -> None:
        timed = config.model_copy(
            update={"engine": machine.engine(config), "versions": config.versions + config.capacity + 1}
        )
        super().__init__(timed, machine, config, timeline=False)
        self.batches: list[list[Trajectory]] = []
        self.indices: list[list[int]] = []

    async def _commit(self, staged: StagedBatch) -> None:
        self.batches.append([t for group in staged.groups for t in group.trajectories])
        self.indices.append([group.key.prompt for group in staged.groups for _ in group.trajectories])
        await super()._commit(staged)

    def recorded(self, first: int) -> list[RecordedVersion]:
        """Return the recorded versions from `first` on."""
        steps, found = self.records.steps, []
        paused = {update.version: update for update in self.records.updates}
        for before, after in pairwise(steps):
            number = after.version - 1
            if after.version > first and after.version in paused:
                update, batch = paused[after.version], self.batches[number]
                found.append(
                    RecordedVersion(
                        version=after.version,
                        seconds=after.ended - before.ended,
                        waited=after.began - before.ended,
                        pause=update.seconds,
                        fetched=update.began - after.ended,
                        groups_R=self.indices[number],
                        tokens_R=[t.response_tokens for t in batch],
                        generation_R=[t.generation_seconds for t in batch],
                        reward_R=[t.reward_seconds for t in batch],
                    )
                )
        return found


def test_simulated_evaluation_occupies_an_engine() -> None:
    """With 5 s per response, 16 held-out prompts occupy one engine of 8 slots for 10 s. With two engines, the run takes
    5 s longer.
    """
    machine = hardware(responses=CONSTANT, learner={"seconds_per_version": 1.0})
    without, with_them = (
        simulate(recipe(versions=40, evaluation=EvaluationConfig(every=every, prompts=16)), machine).figures
        for every in (0, 10)
    )
    assert (without.evaluations, with_them.evaluations) == (0, 3)  # versions 10, 20 and 30 are evaluated
    assert with_them.tokens.evaluated == 3 * 16 * 50
    assert with_them.seconds - without.seconds == pytest.approx(3 * 5.0, abs=5.0)
    assert with_them.tokens.trained == without.tokens.trained == 40 * 32 * 50
    assert with_them.tokens.unfinished == pytest.approx(without.tokens.unfinished, abs=16 * 50)
    assert not with_them.tokens.wasted


@pytest.mark.parametrize("in_flight", ["continue", "restart"])
def test_repeated_evaluations_are_not_counted_as_waste(in_flight: str) -> None:
    machine = hardware(
        engines={"count": 3},
        responses=CONSTANT,
        learner={"seconds_per_version": 1.0},
        faults={"deaths_per_hour": 120.0},
    )
    keys = {
        "engine": TimedEngineConfig(replicas=3, max_concurrent_requests=8, on_weight_update=in_flight),
        "versions": 60,
    }
    figures = simulate(recipe(evaluation=EvaluationConfig(every=5, prompts=24), **keys), machine).figures
    assert figures.deaths > 3
    assert figures.evaluations >= 10
    assert figures.tokens.evaluated >= 10 * 24 * 50
    assert figures.tokens.unfinished <= 4 * 32 * 50  # responses of two batches ahead and of the running requests
    wasted = sum(figures.tokens.wasted.values())
    assert figures.tokens.sampled == figures.tokens.trained + wasted + figures.tokens.unfinished


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluation": EvaluationConfig(every=2, engine="own")},
        {"evaluation": EvaluationConfig(every=0)},
    ],
)
def test_separate_evaluation_engine_costs_training_nothing(changes: dict[str, Any]) -> None:
    figures = simulate(recipe(**changes), hardware()).figures
    assert figures.evaluations == figures.tokens.evaluated == 0
    assert figures == simulate(recipe(), hardware()).figures


@pytest.mark.soak
@pytest.mark.parametrize("slowing", [0.05, 0.5])
def test_simulation_fitted_at_alpha_0_predicts_other_alphas(slowing: float) -> None:
    """The fit must distinguish an engine that hardly slows down under load from an engine that slows down almost in
    proportion to its load.
    """
    machine = hardware(
        engines={
            "count": 1,
            "max_concurrent_requests": 16,
            "batch_slowdown": slowing,
            "seconds_per_token": 0.05,
            "prefill_seconds": 0.5,
        },
        responses={"median": 60.0, "sigma": 0.6, "cap": 400, "tokens_per_tick": 1},
        learner={"seconds_per_version": 8.0},
        update={"seconds": 0.5, "fetch_seconds": 0.2},
    )
    recipes = {
        alpha: recipe(
            async_ratio=alpha, versions=40, engine=TimedEngineConfig(max_concurrent_requests=16, max_new_tokens=400)
        )
        for alpha in (0.0, 1.0, 2.0)
    }
    world = Noting(recipes[0.0], machine)
    run_virtual(world.run(40, lambda version: None))
    fit = fit_hardware(world.recorded(4), recipes[0.0])
    for config in recipes.values():
        predicted, truth = (simulate(config, on).figures.step_seconds for on in (fit, machine))
        assert predicted == pytest.approx(truth, rel=0.15), config.async_ratio


def test_equal_numbers_get_equal_normal_scores() -> None:
    scores = normal_scores(np.array([3.0, 1.0, 3.0, 2.0]))
    assert scores[0] == scores[2]
    assert scores[1] < scores[3] < scores[0]


def test_fatal_error_ends_a_simulation_with_an_error_message() -> None:
    agreed = hardware(reward={"agreeing": 1.0})
    config = recipe()
    strict = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"filter": FilterConfig(min_std=0.0, max_consecutive=5)})}
    )
    with pytest.raises(RollflowError, match=r"rollout.filter removed 5 groups in a row"):
        simulate(strict, agreed)


def test_results_with_preempted_groups_repeat_with_the_seed() -> None:
    """Groups are not preempted in the order of a set, which would depend on the hashes of objects and strings."""
    tight = hardware(learner={"seconds_per_version": 4.0}, responses={"sigma": 1.2})
    first, again = (
        simulate(recipe(versions=12, max_inflight_groups=64, on_stale="drop"), tight).figures for _ in range(2)
    )
    assert "stale" in first.tokens.wasted
    assert first == again
