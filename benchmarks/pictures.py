"""Draws the two pictures of the README: the architecture, and the curves of the quick start.

    python -m benchmarks.pictures [--folder docs/figures] [--data FILE.jsonl] [--commit COMMIT --runs RUN RUN ...]

The pictures depend only on this program and on the data file, so the program writes the same bytes on every machine.
With `--runs` the program first replaces the data file by the curves of the given runs. The first run gets thick curves.
`--commit` is the commit that the runs executed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

from benchmarks.svg import LARGE, SMALL, Picture
from rollflow.flows.locations import attach_run
from rollflow.tasks.rollout.evaluation import read_evaluations

ARCHITECTURE, CURVES = "architecture.svg", "quick_start.svg"


@dataclass(frozen=True, slots=True)
class StoredCurves:
    """The curves of one finished run.

    `weights` is the sha256 of the newest version's weights. `accuracy` has pairs of a version and its held-out
    accuracy. `reward` has the mean training reward of each version from 1 on. `staleness` has, for each version from 1
    on, the number of trained trajectories by their staleness, from 0 to alpha.
    """

    run: str
    began: str
    commit: str
    recipe: str
    seed: int
    async_ratio: float
    weights: str
    accuracy: Sequence[tuple[int, float]]
    reward: Sequence[float]
    staleness: Sequence[Sequence[int]]


def read_run(uri: str, commit: str) -> StoredCurves:
    """Read a finished run from its storage."""
    context = attach_run(uri)
    config, versions = context.config, list(context.policies.since(1))
    ages = range(int(config.async_ratio) + 1)
    return StoredCurves(
        context.run_id,
        datetime.fromtimestamp(context.created_at, UTC).isoformat(timespec="seconds"),
        commit,
        config.name,
        config.seed,
        config.async_ratio,
        versions[-1].sha256,
        [(one.version, one.accuracy) for one in read_evaluations(context.store)],
        [round(one.metrics["reward"], 4) for one in versions],
        [[int(one.metrics.get(f"staleness_{age}", 0)) for age in ages] for one in versions],
    )


def load_runs(file: Path) -> list[StoredCurves]:
    """Read the runs that `--runs` has written, one per line."""
    return [StoredCurves(**json.loads(line)) for line in file.read_text().splitlines()]


# Maps an actor to its box: left edge, width, and the text below the actor's name.
ACTORS = {
    "engines": (156, 136, "vLLM, transformers"),
    "scheduler": (356, 136, "prompts to batches"),
    "reward workers": (556, 136, "call the scorer"),
    "learner": (716, 130, "torch, DeepSpeed"),
}
LEFT, RIGHT = 156, 846  # edges of the boxes in a layer


def draw_architecture() -> str:
    """Draw the architecture: the flows that decide, the actors that compute, and what is stored."""
    text = (
        "A supervisor, started by the command line, the Prefect page or a schedule, starts three Prefect flows: "
        "rollout, reward and train. Each flow restarts its own Ray actors. The scheduler sends prompts to the engines "
        "and responses to the reward workers, and commits batches to storage. A bounded Ray channel passes the batches "
        "to the learner. The learner commits new policy versions, and the engines load their weights while they "
        "generate. Storage has one append-only log. Metrics go to MLflow."
    )
    picture = Picture(880, 614, "Architecture: flows decide, actors compute, storage remembers", text)
    _draw_layers(picture)
    _draw_flows(picture)
    _draw_actors(picture)
    _draw_storage(picture)
    return picture.to_svg()


def _draw_layers(picture: Picture) -> None:
    layers = (
        (76, 168, "Prefect flows", "decide", "flows/"),
        (260, 176, "Ray actors", "compute", "tasks/"),
        (452, 146, "Storage", "remembers", "storage/"),
    )
    for top, height, who, what, folder in layers:
        picture.box(16, top, 848, height, fill="grey", radius=8)
        middle = top + height / 2
        picture.text(30, middle - 14, who, size=LARGE, bold=True)
        picture.text(30, middle + 6, what)
        picture.text(30, middle + 26, folder, size=SMALL, ink="soft")


def _draw_flows(picture: Picture) -> None:
    picture.text(LEFT, 42, "command line · Prefect page · schedule", size=LARGE, bold=True)
    picture.line([(318, 52), (318, 88)], line="blue", tip=True)
    _box(picture, (716, 130), (16, 40), "blue", "MLflow", fill="page")
    picture.line([(781, 90), (781, 58)], line="blue", tip=True)
    picture.text(773, 71, "metrics", size=SMALL, ink="soft", at="end")
    text = "starts and watches the stages, ends them in order, audits the run"
    _box(picture, (LEFT, RIGHT - LEFT), (90, 48), "blue", "supervisor", text)
    stages = {"rollout": ("engines", "scheduler"), "reward": ("reward workers",), "train": ("learner",)}
    for name, actors in stages.items():
        edges = [ACTORS[actor][0] for actor in actors], [sum(ACTORS[actor][:2]) for actor in actors]
        left, right = min(edges[0]), max(edges[1])
        picture.line([((left + right) / 2, 138), ((left + right) / 2, 174)], line="blue", tip=True)
        _box(picture, (left, right - left), (176, 52), "blue", name, "restarts its actors")
        for middle in (ACTORS[actor][0] + ACTORS[actor][1] / 2 for actor in actors):
            picture.line([(middle, 228), (middle, 274)], line="blue", dash="4 3", tip=True)


def _draw_actors(picture: Picture) -> None:
    for name, (left, width, text) in ACTORS.items():
        _box(picture, (left, width), (276, 60), "green", name, text)
    _draw_exchange(picture, 356, 292, "prompts", "tokens")
    _draw_exchange(picture, 492, 556, "texts", "scores")
    _box(picture, (412, 350), (366, 30), "green", "Ray channel: bounded, a cache of storage", fill="page")
    picture.line([(440, 336), (440, 364)], line="green", tip=True)
    picture.text(448, 355, "batches", size=SMALL, ink="soft")
    picture.line([(740, 366), (740, 338)], line="green", tip=True)
    picture.text(732, 355, "batches", size=SMALL, ink="soft", at="end")


def _draw_exchange(picture: Picture, start: float, end: float, there: str, back: str) -> None:
    """Draw an arrow from `start` to `end` and another one back, each with the name of what it carries."""
    side = 2 if end > start else -2
    middle = (start + end) / 2
    picture.line([(start, 300), (end - side, 300)], line="green", tip=True)
    picture.text(middle, 293, there, size=SMALL, ink="soft", at="middle")
    picture.line([(end, 314), (start + side, 314)], line="green", tip=True)
    picture.text(middle, 330, back, size=SMALL, ink="soft", at="middle")


def _draw_storage(picture: Picture) -> None:
    for y, words in ((484, "S3 or a local folder."), (501, "Resume, audit and replay"), (518, "read storage alone.")):
        picture.text(LEFT, y, words, size=SMALL, ink="soft")
    _box(picture, (356, 160), (470, 48), "amber", "trajectories", "Arrow files")
    _box(picture, (686, 160), (470, 48), "amber", "policies", "weights, learner states")
    picture.line([(384, 336), (384, 468)], line="amber", tip=True)
    picture.line([(820, 336), (820, 468)], line="amber", tip=True)
    picture.line([(785, 470), (785, 416), (224, 416), (224, 338)], line="amber", tip=True)
    picture.text(590, 431, "new weights, loaded while the engines generate", size=SMALL, ink="soft", at="middle")
    text = "an entry commits a batch or a version, after the files it names"
    _box(picture, (356, 490), (538, 48), "amber", "log: append-only, the only authority", text)
    for middle in (436, 766):
        picture.line([(middle, 518), (middle, 536)], line="amber", tip=True)


def _box(
    picture: Picture,
    columns: tuple[float, float],
    rows: tuple[float, float],
    colour: str,
    name: str,
    text: str = "",
    fill: str = "",
) -> None:
    """Draw a box with its name and, below the name, a text; `columns` is left edge and width, `rows` top and height."""
    (left, width), (top, height) = columns, rows
    picture.box(left, top, width, height, fill=fill or f"{colour}-fill", line=colour)
    middle, centre = left + width / 2, top + height / 2
    picture.text(middle, centre + (-3 if text else 5), name, bold=True, at="middle")
    if text:
        picture.text(middle, centre + 15, text, size=SMALL, at="middle")


CHART = (64, 736)  # left and right edge of both charts; the labels of the curves are to the right
ACCURACY, STALENESS = (64, 264), (318, 398)  # top and bottom edge of each chart
AGES = (("green", 0.35), ("green", 0.6), ("green", 0.85))  # colour and opacity by staleness


def draw_curves(runs: Sequence[StoredCurves]) -> str:
    """Draw the first run with thick curves and its staleness, and the other runs with thin curves."""
    first, last = runs[0], len(runs[0].reward)
    seeds = " and ".join(str(run.seed) for run in runs[1:])
    shares = _share_ages(first)
    ages = ", ".join(f"{_name_age(age)}: {share:.0%}" for age, share in enumerate(shares))
    text = (
        f"By policy version, from 0 to {last}. Held-out accuracy of seed {first.seed}: {_describe_accuracy(first)}. "
        f"Mean training reward: {first.reward[0]:.1%} in version 1, {first.reward[-1]:.1%} in version {last}. "
        f"Staleness of the trained trajectories: {ages}."
    )
    picture = Picture(880, 452, "The quick start: held-out accuracy, training reward and staleness by version", text)
    picture.text(24, 32, "The quick start: a policy learns to sort five digits", size=LARGE, bold=True)
    picture.text(856, 32, f"thick: seed {first.seed} · thin: seeds {seeds}", size=SMALL, ink="soft", at="end")
    _draw_axes(picture, last)
    for run in reversed(runs):
        _draw_run(picture, run, last, thick=run is first)
    _label_ends(picture, first)
    _draw_staleness(picture, first, shares)
    return picture.to_svg()


def _describe_accuracy(run: StoredCurves) -> str:
    return ", ".join(f"{share:.1%} at version {version}" for version, share in run.accuracy)


def _name_age(age: int) -> str:
    return f"{age} version{'' if age == 1 else 's'}"


def _share_ages(run: StoredCurves) -> list[float]:
    """Return the share of all trained trajectories with each staleness."""
    counts = [sum(column) for column in zip(*run.staleness, strict=True)]
    return [count / sum(counts) for count in counts]


def _draw_axes(picture: Picture, last: int) -> None:
    for percent in range(0, 101, 25):
        y = _height(percent / 100, ACCURACY)
        picture.line([(CHART[0], y), (CHART[1], y)], line="edge", width=1)
        picture.text(CHART[0] - 8, y + 4, f"{percent}%", size=SMALL, ink="soft", at="end")
    for version in range(0, last + 1, 25):
        picture.text(_place(version, last), STALENESS[1] + 20, str(version), size=SMALL, ink="soft", at="middle")
    picture.text(sum(CHART) / 2, STALENESS[1] + 40, "policy version", size=SMALL, ink="soft", at="middle")


def _draw_run(picture: Picture, run: StoredCurves, last: int, *, thick: bool) -> None:
    width = 2.2 if thick else 0.9
    reward = [(_place(number, last), _height(value, ACCURACY)) for number, value in enumerate(run.reward, 1)]
    picture.line(reward, line="amber", width=width)
    accuracy = [(_place(version, last), _height(share, ACCURACY)) for version, share in run.accuracy]
    picture.line(accuracy, line="blue", width=width)
    for x, y in accuracy:
        picture.dot(x, y, fill="blue", radius=4 if thick else 2.5)


def _label_ends(picture: Picture, run: StoredCurves) -> None:
    x = CHART[1] + 12
    accuracy, reward = run.accuracy[-1][1], run.reward[-1]
    top = _height(accuracy, ACCURACY)
    picture.text(x, top + 2, f"{accuracy:.1%}", ink="blue", bold=True)
    picture.text(x, top + 18, "held-out accuracy", size=SMALL, ink="blue")
    low = max(_height(reward, ACCURACY), top + 34)
    picture.text(x, low + 8, f"{reward:.1%}", ink="amber", bold=True)
    picture.text(x, low + 24, "training reward", size=SMALL, ink="amber")


def _draw_staleness(picture: Picture, run: StoredCurves, shares: Sequence[float]) -> None:
    """Draw, for each version, the shares of its trajectories by staleness, from the freshest at the bottom."""
    title = f"Staleness of the trajectories of each version, seed {run.seed} (at most alpha = {run.async_ratio:g})"
    picture.text(CHART[0], STALENESS[0] - 12, title, size=SMALL)
    last = len(run.staleness)
    edges = [[0.0, *accumulate(count / sum(counts) for count in counts)] for counts in run.staleness]
    ends = [0.0, *accumulate(shares)]
    for age, (colour, opacity) in enumerate(AGES[: len(shares)]):
        top = _outline([edge[age + 1] for edge in edges], last)
        bottom = _outline([edge[age] for edge in edges], last)
        picture.area([*top, *reversed(bottom)], fill=colour, opacity=opacity)
        middle = _height((ends[age] + ends[age + 1]) / 2, STALENESS)
        picture.text(CHART[1] + 12, middle + 4, f"{_name_age(age)}: {shares[age]:.0%}", size=SMALL, ink="green")


def _outline(values: Sequence[float], last: int) -> list[tuple[float, float]]:
    """Return the upper edge of a bar chart with one bar per version."""
    points = []
    for number, value in enumerate(values):
        y = _height(value, STALENESS)
        points += [(_place(number, last), y), (_place(number + 1, last), y)]
    return points


def _place(version: float, last: int) -> float:
    return CHART[0] + (CHART[1] - CHART[0]) * version / last


def _height(share: float, edges: tuple[int, int]) -> float:
    return edges[1] - (edges[1] - edges[0]) * share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, default=Path("docs/figures"), help="folder for the pictures")
    parser.add_argument("--data", type=Path, default=Path("docs/figures/quick_start.jsonl"), help="a line for each run")
    parser.add_argument("--runs", nargs="*", default=[], help="finished runs, each as the address of its storage")
    parser.add_argument("--commit", default="", help="the commit that the runs executed")
    options = parser.parse_args()
    if options.runs:
        lines = [json.dumps(asdict(read_run(uri, options.commit))) for uri in options.runs]
        options.data.write_text("".join(f"{line}\n" for line in lines))
    (options.folder / ARCHITECTURE).write_text(draw_architecture())
    (options.folder / CURVES).write_text(draw_curves(load_runs(options.data)))


if __name__ == "__main__":
    main()
