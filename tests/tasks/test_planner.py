"""The planner: its results for workloads worked by hand, and its guarantees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.config import load_hardware, load_recipe
from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.config import PolicyConfig
from rollflow.tasks.rollout.config import RolloutConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.bounds import bounds_of, work_of
from rollflow.tasks.simulation.candidates import Candidate, CandidateOutcome, PlanLimits, SimulationBudget
from rollflow.tasks.simulation.figures import Figures
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.planner import Plan, choose, plan, settled_bias
from rollflow.tasks.simulation.world import simulate

SMALL = SimulationBudget(40, 4, 100, 12, 300)
PLAIN = Candidate(4, 2.0, False, 1.0, 0, 0, False, "drop")


def recipe(**changes: Any) -> RunConfig:
    """A recipe of 24 responses per step."""
    keys = {"groups": 12, "group_size": 2, "policy": PolicyConfig(path="x")}
    return RunConfig.model_validate({**keys, **changes})


def hardware(**sections: dict[str, Any]) -> Hardware:
    """Engines of one slot, responses of 5 s each, and 2.5 GPU-seconds of training per response."""
    parts: dict[str, dict[str, Any]] = {
        "engines": {"max_concurrent_requests": 1, "seconds_per_token": 0.1},
        "responses": {"median": 50.0, "sigma": 0.0, "cap": 100},
        "learner": {"seconds_per_trajectory": 2.5},
    }
    return Hardware.model_validate({name: parts.get(name, {}) | sections.get(name, {}) for name in parts | sections})


# --- the search ---------------------------------------------------------------------------------------------


def test_best_gpu_split_matches_a_hand_example() -> None:
    """With e engines of 6 GPUs rollout takes 24 x 5 / e and training 24 x 2.5 / (6 - e): 30 s both at 4:2; 40 s at
    3:3, 60 s at 5:1. One after the other they take 60 s at best. Nothing can be below 180 / 6."""
    planned = plan(recipe(), hardware(), 6, budget=SMALL)
    one = planned.recommended
    assert one is not None
    assert (one.candidate.engines, one.candidate.learner_gpus, one.candidate.async_ratio) == (4, 2, 1)
    assert one.figures.step_seconds == pytest.approx(30.0, rel=0.01)
    assert one.figures.bounds.conserving == pytest.approx(30.0)
    assert planned.sync.figures.step_seconds == pytest.approx(60.0, rel=0.001)
    assert planned.sync.candidate.engines in (3, 4)
    assert planned.settled  # no larger alpha is tried, because none can be faster
    assert planned.alphas == (0.0, 1.0)
    assert one.bias == pytest.approx(0.0, abs=1e-9)


def test_synchronous_mode_is_recommended_if_switching_is_free() -> None:
    """All six GPUs generate for 20 s, then train for 10 s: no GPU waits, so alpha = 0 is enough."""
    planned = plan(recipe(), hardware(learner={"colocated": True}), 6, budget=SMALL)
    assert planned.recommended is planned.sync
    assert planned.sync.candidate.colocated
    assert planned.sync.figures.step_seconds == pytest.approx(30.0, rel=0.001)


@pytest.mark.long
def test_planner_counts_all_gpus_of_multi_gpu_engines() -> None:
    """With two GPUs per engine, 120 / e and 60 / (6 - 2 e) are 60 and 30 s at 2 engines, 120 and 15 s at one."""
    planned = plan(recipe(), hardware(engines={"gpus_per_engine": 2}), 6, budget=SMALL)
    assert planned.recommended is not None
    candidate = planned.recommended.candidate
    assert (candidate.engines, candidate.learner_gpus) == (2, 2)
    assert candidate.changes(recipe(), hardware(engines={"gpus_per_engine": 2}))["engine.tensor_parallel"] == 2


@pytest.mark.long
def test_same_input_gives_the_same_plan() -> None:
    uneven = hardware(responses={"sigma": 0.8, "cap": 1000})
    seen: list[int] = []
    small = replace(SMALL, simulations=24)
    first = plan(recipe(), uneven, 6, largest=2, budget=small, watch=lambda count, one: seen.append(count))
    assert first == plan(recipe(), uneven, 6, largest=2, budget=small)
    assert seen == list(range(1, first.simulations + 1))
    assert first.simulations <= 24
    assert max(first.alphas) <= 2


def test_option_alpha_limits_the_search_of_the_planner() -> None:
    assert plan(recipe(), hardware(), 6, largest=0, budget=SMALL).alphas == (0.0,)
    assert plan(recipe(), hardware(), 6, largest=0.5, budget=SMALL).alphas == (0.0, 0.5)


def test_planner_skips_options_that_the_recipe_forbids() -> None:
    """If batches wait for the groups that were started first, nothing may be preempted."""
    waiting = recipe(rollout=RolloutConfig(on_stale="wait", batch_order="started"))
    seen: list[Candidate] = []
    plan(waiting, hardware(), 6, largest=1, budget=SMALL, watch=lambda _, one: seen.append(one.candidate))
    assert {candidate.redundant_groups for candidate in seen} == {0}
    assert {candidate.redundant_responses for candidate in seen} == {0, 1}


@pytest.mark.long
def test_planner_tries_on_stale_wait_if_dropping_wastes_too_much() -> None:
    """No waste is allowed: groups that are dropped as too old are waste, groups that a batch waits for are not."""
    uneven = hardware(engines={"max_concurrent_requests": 2}, responses={"sigma": 1.2, "cap": 1000})
    dropping = recipe(rollout=RolloutConfig(on_stale="drop"))
    planned = plan(dropping, uneven, 6, largest=1, budget=SMALL, limits=PlanLimits(bias=0.02, waste=0.0))
    assert planned.recommended is not None
    assert planned.recommended.candidate.on_stale == "wait"
    assert planned.recommended.candidate.async_ratio == 1
    assert planned.recommended.wasted == 0
    assert "wasteful" in max(planned.finals, key=lambda one: one.wasted).marks(PlanLimits(waste=0.0))


@pytest.mark.long
def test_planner_tries_a_larger_alpha_at_equal_batches_ahead() -> None:
    """A few responses take much longer than a step: a batch at alpha = 1 waits for them, at alpha = 4 it need not."""
    uneven = hardware(engines={"max_concurrent_requests": 2}, responses={"sigma": 1.2, "cap": 1000})
    seen: list[Candidate] = []
    planned = plan(
        recipe(),
        uneven,
        6,
        largest=4,
        budget=SMALL,
        limits=PlanLimits(bias=1.0),
        watch=lambda _, one: seen.append(one.candidate),
    )
    assert {(one.async_ratio, one.max_batches_ahead) for one in seen} >= {(4.0, 1.0)}
    assert planned.recommended is not None
    if (wider := planned.wider) is not None:
        assert wider.candidate.lead == planned.recommended.candidate.lead
        assert wider.throughput > planned.recommended.throughput


@pytest.mark.parametrize(
    ("gpus", "sections", "sentence"),
    [
        (1, {}, r"--gpus 1: an engine takes 1 .* give 2 or more"),
        (4, {"engines": {"gpus_per_engine": 4}}, r"--gpus 4: an engine takes 4 .* give 5 or more"),
        (6, {"learner": {"measured": [2.0]}}, r"learner.measured = \[2, ...\].*seconds_per_trajectory"),
        (
            6,
            {"faults": {"deaths": [{"at_seconds": 1, "engine": 5}]}},
            r"faults.deaths names engine 5, .*deaths_per_hour",
        ),
    ],
)
def test_input_that_cannot_be_planned_is_refused(gpus: int, sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan(recipe(), hardware(**sections), gpus, budget=SMALL)


def test_plan_of_the_40_gpu_example_splits_24_to_16() -> None:
    """Compare the lower bounds on the step time of all divisions, because the planner itself takes a minute for this
    example.
    """
    config, file = load_recipe(Path("flows/recipes/rlvr.toml"), ["groups=128"]), load_hardware(Path("rlvr-40"))

    def least(engines: int) -> float:
        candidate = replace(PLAIN, engines=engines, learner_gpus=40 - engines)
        changed, divided = candidate.config(config, file), candidate.hardware(file)
        return bounds_of(work_of(changed, divided, [2607], divided.speeds(changed))).conserving_split

    assert min(range(1, 40), key=least) == 24


# --- the choice ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def figures() -> Figures:
    """Return the results of a short simulation."""
    candidate = replace(PLAIN, async_ratio=0.0)
    return simulate(candidate.config(recipe(), hardware()), candidate.hardware(hardware()), versions=4).figures


def outcome(figures: Figures, alpha: float, speed: float, bias: float = 0.0, wasted: float = 0.0) -> CandidateOutcome:
    fast = replace(figures, trajectories_per_second=speed)
    return CandidateOutcome(replace(PLAIN, async_ratio=alpha), 4, fast, bias, 0.001, wasted)


def test_smallest_alpha_within_tolerance_is_recommended(figures: Figures) -> None:
    finals = [outcome(figures, alpha, speed) for alpha, speed in ((0, 50), (1, 94.9), (2, 95.1), (3, 99), (4, 100))]
    best, taken = choose(finals, PlanLimits())
    assert best is finals[4]
    assert taken is finals[2]


def test_planner_ignores_candidates_over_a_limit(figures: Figures) -> None:
    plain = outcome(figures, 2, 100)
    finals = [plain, outcome(figures, 1, 120, bias=-0.03), outcome(figures, 1, 120, wasted=0.2)]
    assert choose(finals, PlanLimits()) == (plain, plain)
    assert choose(finals[1:], PlanLimits()) == (None, None)
    assert choose(finals, PlanLimits(bias=0.1))[1] is finals[1]


def test_plan_reports_the_gain_of_a_larger_staleness_bound(figures: Figures) -> None:
    narrow, deep = outcome(figures, 1, 100), outcome(figures, 4, 120)
    wide = replace(
        deep,
        candidate=replace(deep.candidate, max_batches_ahead=1.0),
        figures=replace(figures, trajectories_per_second=110),
    )

    def planned(*finals: CandidateOutcome) -> CandidateOutcome | None:
        return Plan(finals, narrow, narrow, narrow, (), True, 0, 0).wider

    assert planned(narrow, deep, wide) is wide  # a deeper candidate is not compared
    assert planned(narrow, replace(wide, bias=-0.3)) is None  # this plan's bias exceeds the limit
    assert planned(narrow, deep) is None
    assert planned(narrow, replace(wide, figures=replace(figures, trajectories_per_second=100.5))) is None


def test_planner_prefers_less_waste_among_equally_fast_plans(figures: Figures) -> None:
    finals = [outcome(figures, 1, 100, wasted=0.1), outcome(figures, 1, 99.5, wasted=0.01)]
    assert choose(finals, PlanLimits())[1] is finals[1]


def test_length_bias_above_two_standard_errors_is_marked(figures: Figures) -> None:
    one = outcome(figures, 1, 100, bias=-0.03)
    assert one.marks(PlanLimits()) == ("biased",)
    assert replace(one, bias_error=0.006).marks(PlanLimits()) == ()


# --- the bias in the steady state --------------------------------------------------------------------------


def trained(figures: Figures, *tokens: int) -> Figures:
    bias = replace(figures.bias, trained=2 * len(tokens))
    return replace(figures, versions=len(tokens), warm_up=2, trained_tokens=tokens, bias=bias)


def test_start_of_a_run_does_not_count_as_length_bias(figures: Figures) -> None:
    drawn = [50, 50] * 8
    assert settled_bias(trained(figures, 60, 80, *[100] * 6), drawn) == pytest.approx((0.0, 0.0), abs=1e-12)
    assert settled_bias(trained(figures, 60, 80, *[95] * 6), drawn) == pytest.approx((-0.05, 0.0), abs=1e-12)


def test_fluctuation_increases_the_standard_error_of_the_bias(figures: Figures) -> None:
    """Ahead by 0, 0.2, 0, 0.2, 0, 0.2, 0 of a version: the line is level at 0.6 / 7, missed by 0.107 with 5 degrees of
    freedom."""
    slope, error = settled_bias(trained(figures, 100, 100, 120, 80, 120, 80, 120, 80), [50, 50] * 8)
    misses = 4 * (0.6 / 7) ** 2 + 3 * (0.2 - 0.6 / 7) ** 2
    assert slope == pytest.approx(0.0, abs=1e-12)
    assert error == pytest.approx(2**0.5 * (misses / 5) ** 0.5 / 6)
