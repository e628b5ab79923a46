"""Measures the stability of objectives on stale samples: held-out accuracy by version, alpha and seed.

    python -m benchmarks.stability [--trainings FILE] [--figure FILE.svg] [--json FILE]

Each unchanged preset replaces the recipe's objective; `RECIPES` lists the other differences. All samples for version v
come from version v - alpha (see `benchmarks.stale`); a real run with this alpha has fresher samples, too. Each training
is a line of `--trainings` and is not repeated, so several processes can compute the grid in parts. The table and the
figure use all lines of the file.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Row, arguments, at_most, publish
from benchmarks.stale import Point, points
from rollflow.flows.commands.cli.toml_edit import to_toml
from rollflow.flows.config import load_recipe

OBJECTIVES = ("grpo", "ppo", "decoupled-ppo", "tis", "cispo", "topr", "roll-current")
UNCORRECTED = "roll-current"  # a preset whose ratio has the current policy as its base; it has no target
RECIPES = {  # recipe -> changed keys, for fewer versions with fewer responses
    "sorting": {"versions": 120},
    "reasoning": {"versions": 120, "groups": 32},
}
ALPHAS = (0, 2, 8)
LAST = 3  # the number of last evaluations whose mean is the final accuracy


@dataclass(frozen=True, slots=True)
class Training:
    """One training of the grid."""

    recipe: str
    objective: str
    alpha: int
    seed: int
    points: Sequence[Point]

    @property
    def case(self) -> tuple[str, str, int]:
        """The recipe, objective and alpha, without the seed."""
        return self.recipe, self.objective, self.alpha

    @property
    def end(self) -> float:
        """The mean accuracy over the last evaluations of the training."""
        return statistics.mean(point.accuracy for point in self.points[-LAST:])


def train(recipe: str, objective: str, alpha: int, seed: int, place: Path) -> Training:
    """Execute one training, from the same cold start as all others of its recipe and seed."""
    tree = tomllib.loads(Path(f"flows/recipes/{recipe}.toml").read_text())
    tree["train"]["objective"] = {"kind": objective}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(to_toml(tree))
        changed = {**RECIPES[recipe], "seed": seed, "async_ratio": alpha}
        config = load_recipe(file, [f"{key}={value}" for key, value in changed.items()])
    looks = points(config, place, config.versions // 20)
    short = [Point(p.version, round(p.accuracy, 4), round(p.reward, 4), round(p.seconds, 1)) for p in looks]
    return Training(recipe, objective, alpha, seed, short)


def made(file: Path) -> list[Training]:
    """Return all stored trainings."""
    return [_of(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def _of(tree: dict[str, Any]) -> Training:
    return Training(**{**tree, "points": [Point(**point) for point in tree["points"]]})


def rows_of(trainings: Sequence[Training]) -> Iterator[Row]:
    """Return rows with each case's mean final accuracy over seeds, and the percentage points that it loses against
    alpha 0.
    """
    ends: dict[tuple[str, str, int], list[float]] = {}
    for training in trainings:
        ends.setdefault(training.case, []).append(training.end)
    for recipe, objective, alpha in product(RECIPES, OBJECTIVES, ALPHAS):
        found, fresh = ends.get((recipe, objective, alpha)), ends.get((recipe, objective, 0))
        if not found:
            continue
        case = f"{recipe}, {objective}, alpha {alpha}"
        yield Row(case, f"held-out accuracy at the end, mean of {len(found)} seeds (%)", 100 * statistics.mean(found))
        if alpha and fresh:
            lost = 100 * (statistics.mean(fresh) - statistics.mean(found))
            yield _lost(case, lost, judged=alpha == 2 and objective != UNCORRECTED)


def _lost(case: str, lost: float, *, judged: bool) -> Row:
    metric = "points below alpha 0"
    return at_most(case, metric, lost, 2.0) if judged else Row(case, metric, lost)


def draw(trainings: Sequence[Training], file: Path) -> None:
    """Draw one panel per recipe and objective, with one line per alpha: the mean over seeds, and minimum to maximum."""
    from matplotlib.figure import Figure

    recipes = [recipe for recipe in RECIPES if any(t.recipe == recipe for t in trainings)]
    figure = Figure(figsize=(2.1 * len(OBJECTIVES), 2.4 * len(recipes) + 0.5), layout="constrained")
    panels = figure.subplots(len(recipes), len(OBJECTIVES), sharey="row", sharex="row", squeeze=False)
    for (row, recipe), (column, objective) in product(enumerate(recipes), enumerate(OBJECTIVES)):
        axes = panels[row][column]
        for colour, alpha in zip(("#1b7837", "#2166ac", "#b2182b"), ALPHAS, strict=True):
            lines = [t.points for t in trainings if t.case == (recipe, objective, alpha)]
            if lines:
                _line(axes, lines, colour, alpha)
        axes.set_title(objective, fontsize=9)
        axes.grid(alpha=0.3)
        if not column:
            axes.set_ylabel(f"{recipe}\nheld-out accuracy (%)", fontsize=8)
    figure.supxlabel("version", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(ALPHAS), fontsize=8)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _line(axes, lines: Sequence[Sequence[Point]], colour: str, alpha: int) -> None:  # type: ignore[no-untyped-def]
    looks = list(zip(*lines, strict=False))  # a training that ended early has fewer evaluations
    versions = [look[0].version for look in looks]
    found = [[100 * point.accuracy for point in look] for look in looks]
    axes.plot(
        versions, [statistics.mean(values) for values in found], color=colour, label=f"alpha {alpha}", linewidth=1.3
    )
    axes.fill_between(versions, [min(v) for v in found], [max(v) for v in found], color=colour, alpha=0.15, linewidth=0)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trainings", type=Path, default=Path("docs/figures/stability.jsonl"), help="a line each")
    parser.add_argument("--starts", type=Path, default=Path(".rollflow/starts"), help="folder of the cold starts")
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--objectives", nargs="*", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--alphas", nargs="*", type=int, choices=ALPHAS, default=list(ALPHAS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--figure", type=Path, help="SVG file to which the curves are drawn")
    options = parser.parse_args()
    options.trainings.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for seed, recipe, alpha, objective in product(options.seeds, options.recipes, options.alphas, options.objectives):
        if (recipe, objective, alpha, seed) not in {(*one.case, one.seed) for one in made(options.trainings)}:
            training = train(recipe, objective, alpha, seed, options.starts)
            with open(options.trainings, "a") as file:
                file.write(json.dumps(asdict(training)) + "\n")
            print(f"{recipe}, {objective}, alpha {alpha}, seed {seed}: {training.end:.3f}", file=sys.stderr)
    found = made(options.trainings)
    if options.figure:
        draw(found, options.figure)
    publish(list(rows_of(found)), "stability", options.json)


if __name__ == "__main__":
    main()
