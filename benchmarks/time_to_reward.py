"""Compares the time to a held-out accuracy of `rollflow run` and of TRL's GRPOTrainer, from the same weights.

Both sides use a recipe's prompts, reward and hyperparameters. The policy comes from the recipe's cold start, once per
seed. TRL generates with transformers on two threads, as it does on a CPU (its releases support other versions of vLLM).
TRL trains with its fastest micro-batch, which a short sweep finds; the batch of an optimizer step is always the same.
At alpha 0, engine and learner alternate: all responses of a version run at once, and the learner has both cores. Only
training time counts (TRL: `train()` without evaluations; rollflow: from the time when its engines are ready to the
version with the accuracy). The time before, for imports, servers and engines, is reported separately. The accuracy is
that of greedy answers to held-out prompts. The same function measures it for both sides, outside of the measured time.
The run's own evaluation during training uses only one prompt.

Each run is stored as a file in `--runs` and is not repeated, so the measurement can be split:
`python -m benchmarks.time_to_reward --runs FOLDER --systems trl --seeds 0 1`. The table covers all runs in the folder.
With `--recipe benchmarks/long_answers.toml`, the lengths of the right answers have a long tail.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import Row, arguments, publish
from benchmarks.reward_task import THREADS
from rollflow.flows.commands.cli.toml_edit import to_toml
from rollflow.flows.config import load_recipe

SYSTEMS = ("trl", "alpha-0", "alpha-1", "alpha-2")
ROWS = (64, 128, 256, 512)  # rows of TRL's micro-batches in the sweep
SWEPT = 3  # versions that TRL trains with each micro-batch of the sweep; the first one is not timed
SWEEP = "sweep.json"
ROOT = Path(__file__).resolve().parent.parent
NO_TRL = "TRL is not measured: install it beside rollflow with `pip install trl==1.16.*`."


Point = tuple[int, float, float]  # version, training seconds, accuracy


@dataclass(frozen=True, slots=True)
class Run:
    """One run: (version, training seconds, accuracy), and the seconds before its training began."""

    system: str
    seed: int
    points: Sequence[Point]
    before: float

    def seconds(self, accuracy: float) -> float | None:
        """Return the training seconds to the first evaluated version with this accuracy; None if there is none."""
        return next((seconds for _, seconds, found in self.points if found >= accuracy), None)

    def versions(self, accuracy: float) -> int | None:
        """Return the first evaluated version with this accuracy; None if there is none."""
        return next((version for version, _, found in self.points if found >= accuracy), None)

    @property
    def step_seconds(self) -> float:
        """The training seconds of a version, measured after the first evaluated version. NaN without evaluated
        versions.
        """
        looks = [(version, seconds) for version, seconds, _ in self.points if version]
        if not looks:
            return math.nan
        (first, began), (last, ended) = looks[0], looks[-1]
        return (ended - began) / (last - first) if last > first else ended / last


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings that all runs share."""

    recipe: Path
    runs: Path
    versions: int
    every: int
    rows: int | None
    micro_tokens: int
    engine: str

    def start(self, seed: int) -> Path:
        """Create the initial policy of a seed."""
        folder = self.runs / f"start-{seed}"
        if not (folder / "model.safetensors").exists():
            _child("benchmarks.reward_task", "start", str(self.recipe), str(folder), str(seed))
        return folder.absolute()

    def made(self, system: str, seed: int) -> Run:
        """Return the run from its file, or execute it."""
        file = self.runs / f"{system}-{seed}.json"
        if not file.exists():
            run = self._trl(seed) if system == "trl" else self._rollflow(system, seed)
            file.write_text(json.dumps(asdict(run), indent=2))
        return _read(file)

    def _trl(self, seed: int) -> Run:
        folder = self.start(seed)
        rows = self.rows or fastest_rows(self.sweep(seed))
        began = time.time()
        first, points = self._train_trl(folder, seed, self.versions, self.every, rows)
        return Run("trl", seed, points, first - began)

    def _train_trl(self, folder: Path, seed: int, versions: int, every: int, rows: int) -> tuple[float, list[Point]]:
        """Train with TRL; return the start time, and the evaluated versions."""
        words = map(str, (self.recipe, folder, seed, versions, every, rows))
        told = _child("benchmarks.reward_trl", *words, log=self.runs / f"log-trl-{seed}.txt")
        first, points = json.loads(told)
        return first, points

    def sweep(self, seed: int) -> Mapping[int, float]:
        """Return TRL's seconds of a version for each number of rows in a micro-batch. Read them from the file, or
        measure them by short trainings.
        """
        file = self.runs / SWEEP
        if not file.exists():
            config, folder = load_recipe(self.recipe, []), self.start(seed)
            most = config.groups * config.group_size // config.train.minibatches
            found = {}
            for rows in [rows for rows in ROWS if most % rows == 0] or [most]:
                _, points = self._train_trl(folder, seed, SWEPT, 1, rows)
                found[rows] = (points[-1][1] - points[1][1]) / (SWEPT - 1)
            file.write_text(json.dumps(found))
        return {int(rows): seconds for rows, seconds in json.loads(file.read_text()).items()}

    def _rollflow(self, system: str, seed: int) -> Run:
        folder, run_id = self.start(seed), f"{system}-{seed}-{int(time.time())}"
        tree = tomllib.loads(self.recipe.read_text()) | {"policy": {"path": str(folder)}}
        recipe = self.runs / f"{run_id}.toml"
        recipe.write_text(to_toml(tree))
        home, began = (self.runs / "home").absolute(), time.time()
        settings = {
            "seed": seed,
            "versions": self.versions,
            "async_ratio": system.removeprefix("alpha-"),
            "engine.kind": self.engine,
            "train.micro_tokens": self.micro_tokens,
            "store.keep_every": self.every,
            "evaluation.every": 0,
            "evaluation.prompts": 1,
            **(self._in_turns() if system == "alpha-0" else {}),
        }
        options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        command = ("rollflow.flows.commands.cli", "run", str(recipe), "--run-id", run_id, *options)
        _child(*command, log=self.runs / f"{run_id}.log", home=home)
        place = home / "store/runs" / run_id
        words = map(str, (self.recipe, folder, seed, place))
        first, told = json.loads(_child("benchmarks.reward_task", "points", *words, home=home))
        looks = [(version, max(at - first, 0.0), found) for version, at, found in told if version % self.every == 0]
        return Run(system, seed, looks, first - began)

    def _in_turns(self) -> dict[str, int]:
        """Return the best settings for engine and learner if they never run at the same time."""
        config = load_recipe(self.recipe, [])
        return {"engine.max_concurrent_requests": config.groups * config.group_size, "train.threads": THREADS}


def _child(module: str, *arguments: str, log: Path | None = None, home: Path | None = None) -> str:
    """Run a process and return its standard output; other output goes to `log`."""
    own = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # for prompts of the recipe
    environment = {**os.environ, "PYTHONPATH": own, **({"ROLLFLOW_HOME": str(home)} if home else {})}
    command = [sys.executable, "-m", module, *arguments]
    with open(log or os.devnull, "w") as errors:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed; see {log}\n{done.stdout[-2000:]}")
    return done.stdout


def _read(file: Path) -> Run:
    return Run(**json.loads(file.read_text()))


def rows_of(runs: Sequence[Run], accuracies: Sequence[float]) -> Iterator[Row]:
    """Return rows with each system's medians over seeds, its number of successful seeds, and per seed the ratio of
    TRL's time to rollflow's.
    """
    for system in SYSTEMS:
        own = [run for run in runs if run.system == system]
        if own:
            yield Row(system, f"best accuracy, median of {len(own)}", statistics.median(_best(run) for run in own))
            yield Row(system, "seconds before training", statistics.median(run.before for run in own))
            yield Row(system, "seconds of a version", statistics.median(run.step_seconds for run in own))
        for accuracy in accuracies:
            yield from _to(own, system, accuracy)
    theirs = {run.seed: run for run in runs if run.system == "trl"}
    for system in SYSTEMS[1:]:
        pairs = [(run, theirs[run.seed]) for run in runs if run.system == system and run.seed in theirs]
        if pairs:
            ratio = statistics.median(mine.step_seconds / other.step_seconds for mine, other in pairs)
            yield Row(system, "seconds of a version over TRL's: median", ratio)
        for accuracy in accuracies:
            yield from _over(pairs, system, accuracy)


def _over(pairs: Sequence[tuple[Run, Run]], system: str, accuracy: float) -> Iterator[Row]:
    """Return TRL's seconds divided by rollflow's, per seed. If one side never reached the accuracy, the time of its
    last version gives a bound.

    The median counts a seed with a bound as larger, or smaller, than all other seeds. A seed where neither side reached
    the accuracy is left out.
    """
    what, found = f"TRL's seconds over ours to {accuracy:g}", list[float]()
    for mine, other in pairs:
        ours, theirs = mine.seconds(accuracy), other.seconds(accuracy)
        if ours is None and theirs is None:
            continue
        ratio = (theirs or other.points[-1][1]) / (ours or mine.points[-1][1])
        bound = ", at least" if theirs is None else ", at most" if ours is None else ""
        found.append(math.inf if theirs is None else 0.0 if ours is None else ratio)
        yield Row(f"{system}, seed {mine.seed}", what + bound, ratio)
    if found and statistics.median_low(found) > 0 and statistics.median_high(found) < math.inf:
        yield Row(system, f"{what}: median of {len(found)}", statistics.median(found))


def _to(own: Sequence[Run], system: str, accuracy: float) -> Iterator[Row]:
    there = [seconds for run in own if (seconds := run.seconds(accuracy)) is not None]
    if own:
        yield Row(system, f"seeds that got to {accuracy:g}, of {len(own)}", len(there))
    if there:
        versions = [found for run in own if (found := run.versions(accuracy)) is not None]
        yield Row(system, f"versions to {accuracy:g}: median", statistics.median(versions))
        yield Row(system, f"training seconds to {accuracy:g}: median", statistics.median(there))
        yield Row(system, f"training seconds to {accuracy:g}: least", min(there))
        yield Row(system, f"training seconds to {accuracy:g}: most", max(there))


def fastest_rows(sweep: Mapping[int, float]) -> int:
    """Return the rows of the micro-batch with which a version takes the fewest seconds."""
    return min(sweep, key=lambda rows: sweep[rows])


def sweep_rows(sweep: Mapping[int, float]) -> Iterator[Row]:
    """Return rows with TRL's seconds of a version for each micro-batch of the sweep."""
    for rows, seconds in sorted(sweep.items()):
        chosen = ", the micro-batch of all runs" if rows == fastest_rows(sweep) else ""
        yield Row("trl", f"seconds of a version with micro-batches of {rows} rows{chosen}", seconds)


def _best(run: Run) -> float:
    return max(found for _, _, found in run.points)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--recipe", type=Path, default=Path("flows/recipes/sorting.toml"))
    parser.add_argument("--runs", type=Path, default=Path(".rollflow/time_to_reward"), help="folder of the runs")
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--accuracies", nargs="*", type=float, default=[0.8, 0.95])
    parser.add_argument("--versions", type=int, default=50)
    parser.add_argument("--every", type=int, default=2, help="number of versions between two evaluations")
    parser.add_argument("--rows", type=int, help="rows in TRL's micro-batches (default: the fastest of a sweep)")
    parser.add_argument("--micro-tokens", type=int, default=1024, help="padded tokens in rollflow's micro-batches")
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm", help="ours")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    settings = options.versions, options.every, options.rows, options.micro_tokens, options.engine
    plan = Plan(options.recipe, options.runs, *settings)
    here = importlib.util.find_spec("trl") is not None
    for seed in options.seeds:
        for system in options.systems:
            if system != "trl" or here:
                print(plan.made(system, seed), file=sys.stderr)
    if not here:
        print(NO_TRL)
    found = [_read(file) for system in SYSTEMS for file in sorted(options.runs.glob(f"{system}-*.json"))]
    swept = list(sweep_rows(plan.sweep(0))) if (options.runs / SWEEP).exists() else []
    publish([*swept, *rows_of(found, options.accuracies)], "time to a held-out accuracy", options.json)


if __name__ == "__main__":
    main()
