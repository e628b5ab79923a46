"""The comparison with TRL: seeds that never reach the target give lower bounds, and results are separate by setting."""

from __future__ import annotations

from pathlib import Path

from benchmarks.time_to_reward import SWEEP, Plan, Run, fastest_rows, rows_of, sweep_rows

HALF = 0.5


def ran(system: str, seed: int, *accuracies: float, step: float = 10.0) -> Run:
    return Run(system, seed, [(5 * n, step * n, found) for n, found in enumerate(accuracies)], before=30.0)


def ratios(*runs: Run) -> dict[tuple[str, str], float]:
    return {(row.case, row.metric): row.value for row in rows_of(runs, [HALF]) if row.metric.startswith("TRL's")}


def test_time_to_reward_ends_at_the_first_high_measurement() -> None:
    assert ran("trl", 0, 0.2, 0.5, 0.4, 0.6).seconds(HALF) == 10.0
    assert ran("trl", 0, 0.2, 0.4).seconds(HALF) is None


def test_ratio_with_an_unfinished_run_is_a_lower_bound() -> None:
    what = "TRL's seconds over ours to 0.5"
    quick = [ran("alpha-2", seed, 0.2, 0.6, 0.6, step=5.0) for seed in range(3)]
    slow = [ran("trl", 0, 0.2, 0.6), ran("trl", 1, 0.2, 0.3, 0.6), ran("trl", 2, 0.2, 0.3, 0.3)]
    assert ratios(*slow, *quick) == {
        ("alpha-2, seed 0", what): 2.0,
        ("alpha-2, seed 1", what): 4.0,
        ("alpha-2, seed 2", f"{what}, at least"): 4.0,
        ("alpha-2", f"{what}: median of 3"): 4.0,
    }
    assert ratios(ran("trl", 0, 0.2, 0.6), ran("alpha-0", 0, 0.2, 0.3, 0.3)) == {
        ("alpha-0, seed 0", f"{what}, at most"): 0.5
    }
    assert ratios(ran("trl", 0, 0.2), ran("alpha-0", 0, 0.2)) == {}
    assert ratios(ran("alpha-0", 0, 0.6)) == {}


def test_ratios_with_lower_bounds_have_no_median() -> None:
    """A measured ratio and a bound of a ratio have no median."""
    runs = [ran("trl", 0, 0.2, 0.6), ran("trl", 1, 0.2, 0.6), ran("alpha-0", 0, 0.2, 0.3), ran("alpha-0", 1, 0.2, 0.6)]
    assert [case for case, _ in ratios(*runs)] == ["alpha-0, seed 0", "alpha-0, seed 1"]


def test_synchronous_baseline_runs_all_responses_at_once() -> None:
    plan = Plan(Path("flows/recipes/reasoning.toml"), Path(), 1, 1, 1, 1, "vllm")
    assert plan._in_turns() == {"engine.max_concurrent_requests": 512, "train.threads": 2}


def test_seconds_per_version_exclude_the_first_interval() -> None:
    """The first versions are slow: 20 s to version 2, then 3 s each."""
    run = Run("trl", 0, [(0, 0.0, 0.2), (2, 20.0, 0.3), (4, 26.0, 0.4), (6, 32.0, 0.6)], before=30.0)
    assert run.step_seconds == 3.0
    assert run.versions(HALF) == 6
    assert Run("trl", 0, [(0, 0.0, 0.2), (2, 20.0, 0.3)], before=30.0).step_seconds == 10.0


def test_fastest_micro_batch_of_the_sweep_is_used(tmp_path: Path) -> None:
    """The sweep is read from its file, so no training is needed."""
    (tmp_path / SWEEP).write_text('{"64": 2.0, "128": 1.5, "256": 1.75}')
    plan = Plan(Path("flows/recipes/sorting.toml"), tmp_path, 1, 1, None, 1, "vllm")
    assert fastest_rows(plan.sweep(0)) == 128
    rows = {row.metric: row.value for row in sweep_rows(plan.sweep(0))}
    assert rows["seconds of a version with micro-batches of 128 rows, the micro-batch of all runs"] == 1.5
    assert rows["seconds of a version with micro-batches of 64 rows"] == 2.0
