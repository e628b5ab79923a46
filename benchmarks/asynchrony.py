"""Compares the training time of the quick start at `async_ratio` (alpha) 2 with its time at 0 (synchronous).

The benchmark alternately starts whole runs of both kinds from the command line, each with `--versions` policy versions.
Training time is the time from version 0 to the last version, without start-up and cold start. Run it as `python -m
benchmarks.asynchrony`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import Row, arguments, publish

RECIPE = "flows/recipes/sorting.toml"
ALPHAS = (0, 2)


def train(alpha: int, versions: int, turn: int, home: Path) -> dict[str, Any]:
    """Execute one run and return its summary."""
    run_id = f"alpha{alpha}-turn{turn}"
    command = [sys.executable, "-m", "rollflow.flows.commands.cli", "run", RECIPE, "--run-id", run_id]
    command += ["--set", f"async_ratio={alpha}", "--set", f"versions={versions}", "--set", "evaluation.every=0"]
    environment = {**os.environ, "ROLLFLOW_HOME": str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{run_id}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return dict(json.loads((home / "store/runs" / run_id / "summary.json").read_text()))


def rows_of(alpha: int, found: list[dict[str, Any]]) -> list[Row]:
    """Return rows with the medians over all turns."""
    case = f"alpha = {alpha}"

    def median(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(value(summary) for summary in found)

    return [
        Row(case, "training seconds", median(lambda s: s["training_seconds"])),
        Row(case, "trained tokens/s", median(lambda s: s["tokens_per_second"])),
        Row(case, "rollout idle share", median(lambda s: s["idle"]["rollout"])),
        Row(case, "learner idle share", median(lambda s: s["idle"]["train"])),
        Row(case, "held-out accuracy after", median(lambda s: s["accuracy"]["after"])),
    ]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--versions", type=int, default=60)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    found: dict[int, list[dict[str, Any]]] = {alpha: [] for alpha in ALPHAS}
    with tempfile.TemporaryDirectory() as home:
        for turn in range(options.turns):
            for alpha in ALPHAS:
                found[alpha].append(train(alpha, options.versions, turn, Path(home)))
    pairs = zip(found[0], found[2], strict=True)
    ratio = statistics.median(a["training_seconds"] / b["training_seconds"] for a, b in pairs)
    rows = [row for alpha in ALPHAS for row in rows_of(alpha, found[alpha])]
    publish([*rows, Row("alpha = 2 over alpha = 0", "speed-up (median of turns)", ratio)], "asynchrony", options.json)


if __name__ == "__main__":
    main()
