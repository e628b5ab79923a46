"""Tests that each benchmark runs at its smallest size in its own process, and writes its table.

Short benchmarks are in `make test`; whole runs and servers are in `make soak`. Every module of `benchmarks/` must have
a row here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import RUN_SECONDS

ROOT = Path(__file__).parents[1]
RUN = """
import importlib, json, sys
module = importlib.import_module(f"benchmarks.{sys.argv[1]}")
for name, value in json.loads(sys.argv[2]).items():
    assert hasattr(module, name), name
    setattr(module, name, value)
sys.argv = [module.__file__, *sys.argv[3:]]
module.main()
"""
BRIEF = "--set versions=1 --set groups=2 --set policy.cold_start.target_accuracy=0.01"
SORTING = str(ROOT / "flows/recipes/sorting.toml")


@dataclass(frozen=True)
class Smoke:
    """The smallest size of a benchmark: its options (`{}` stands for an empty folder), and new values for constants of
    its module.

    `table`: true if the benchmark writes its rows with `--json`.
    """

    options: str = ""
    constants: Mapping[str, Any] = field(default_factory=dict)
    table: bool = True


SHORT = {
    "batch_columns": Smoke("--quick"),
    "bias": Smoke(constants={"BANDITS": 1, "STALENESS": [0.3], "COPIES": 100}),
    "data_plane": Smoke("--quick --turns 1 --only batches"),
    "pictures": Smoke("--folder {}", table=False),
    "time_to_reward": Smoke("--runs {} --systems"),
}
LONG = {  # benchmarks that start servers or whole runs, and take seconds to minutes on one core
    "asynchrony": Smoke("--versions 1 --turns 1"),
    "chaos": Smoke("--timed 1 --vllm 0 --roles scheduler"),
    "environments": Smoke("--quick --only kv faults"),
    "delta_weights": Smoke("--size tiny --steps 2 --turns 1"),
    "episodes": Smoke("--quick"),
    "gpu": Smoke(),
    "learner_step": Smoke("--only tiny --turns 1 --sweep-steps 1 --sides rollflow plain"),
    "ledger_growth": Smoke("--largest 100", {"WHOLE": [30, 60], "TURNS": 1}),
    "liveness": Smoke("--resumes 1 --heads 1 --busy 1 --stops 1 --away 31"),
    "prefix_trees": Smoke("--only agent-tiny --turns 1"),
    "publishing": Smoke("--sizes tiny --tokens 8"),
    "quick_start": Smoke("--seeds 0 --home {} --set versions=1 --set policy.cold_start.target_accuracy=0.01"),
    "ranks": Smoke("--only tiny --ranks 1 --sides rollflow --turns 1"),
    "rewards": Smoke("--only sandboxes", constants={"RUNS": 20, "SECONDS": 0.5, "LIVE": 10}),
    "rollout_overhead": Smoke("--turns 1"),
    "scale": Smoke(constants={"ENGINES": [4], "TURNS": 1}),
    "scheduling": Smoke("--only queue"),
    "scheduling_limits": Smoke(constants={"PARTS": 32, "WIDTH": 16, "VERSIONS": 3, "CHOICES": [(2, None), (3, 2)]}),
    "speculation": Smoke("--home {} --turns 1 --set versions=2", {"QUESTIONS": 40}),
    "stale": Smoke(f"{SORTING} --starts {{}} --every 1 {BRIEF}", table=False),
    "tokens": Smoke(constants={"SETTLE_SECONDS": 1.0}),
    "turn_kills": Smoke("--kills 1"),
    "wall_clock": Smoke("--versions 8 --turns 1"),
}
PARTS = {  # modules that a benchmark above or a separate test runs
    "baselines": "scheduling",
    "chaos_table": "chaos",
    "defaults": "scheduling",
    "distant_store": "delta_weights",
    "environment_faults": "environments",
    "environment_twins": "environments",
    "environment_workloads": "environments",
    "faulty_s3": "chaos",
    "faulty_world": "environments",
    "gpu_bits": "gpu",
    "gpu_checks": "gpu",
    "gpu_engine": "gpu",
    "gpu_memory": "gpu",
    "gpu_models": "gpu",
    "gpu_rows": "gpu",
    "gpu_speed": "gpu",
    "lockstep": "environments",
    "learner_batches": "learner_step",
    "learner_sides": "learner_step",
    "publishing_sides": "publishing",
    "rank_sides": "ranks",
    "recipe_task": "stale",
    "report": "bias",
    "reward_places": "rewards",
    "reward_schedule": "rewards",
    "long_answers": "time_to_reward",
    "reward_task": "time_to_reward",
    "reward_trl": "time_to_reward",
    "stability": "stale",
    "svg": "pictures",
    "victims": "chaos",
    "witnessed_turns": "turn_kills",
    "workloads": "scheduling",
}


def run(name: str, smoke: Smoke, tmp_path: Path) -> list[dict[str, Any]]:
    """Run the benchmark and return its rows."""
    rows, folder = tmp_path / "rows.json", tmp_path / "folder"
    folder.mkdir()
    options = [option.replace("{}", str(folder)) for option in smoke.options.split()]
    options += ["--json", str(rows)] if smoke.table else []
    home = {"ROLLFLOW_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, name, json.dumps(dict(smoke.constants)), *options]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **home}, capture_output=True, text=True, timeout=RUN_SECONDS
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return list(json.loads(rows.read_text())) if smoke.table else [{"value": done.stdout}]


@pytest.mark.long
@pytest.mark.parametrize("name", SHORT)
def test_benchmark_passes_at_a_small_size(name: str, tmp_path: Path) -> None:
    rows = run(name, SHORT[name], tmp_path)
    assert rows or name == "time_to_reward"  # time_to_reward has no rows if no system is given


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", LONG)
def test_benchmark_of_whole_runs_passes_at_a_small_size(name: str, tmp_path: Path) -> None:
    assert run(name, LONG[name], tmp_path)


def test_every_benchmark_has_a_smoke_run() -> None:
    modules = {file.stem for file in (ROOT / "benchmarks").glob("*.py")} - {"__init__"}
    listed = [*SHORT, *LONG, *PARTS]
    assert sorted(listed) == sorted(modules)
    assert set(PARTS.values()) <= SHORT.keys() | LONG.keys()
