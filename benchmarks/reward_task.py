"""What both sides of `benchmarks.time_to_reward` learn: a recipe's prompts and reward, from the same weights.

- `python -m benchmarks.reward_task start RECIPE FOLDER SEED` makes a policy by the recipe's cold start.
- `python -m benchmarks.reward_task points RECIPE FOLDER SEED RUN` prints when a run began to sample, and for each
  version that it has kept, when that was published and how many of the held-out prompts it answers right. Both sides
  are judged by the same function.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.recipe_task import RecipeTask, start_policy
from rollflow.flows.config import load_recipe
from rollflow.flows.locations import attach_run
from rollflow.storage.errors import Missing
from rollflow.storage.log.entries import Claimed
from rollflow.storage.log.reading import iterate_written
from rollflow.storage.log.run_log import Log
from rollflow.tasks.learners.torch_learner import load_model

THREADS = 2


def task_of(recipe: str, folder: Path, seed: str) -> RecipeTask:
    """The task of a recipe and a seed, as the policy in `folder` reads it."""
    return RecipeTask(load_recipe(Path(recipe), [f"seed={seed}"]), folder)


def sampling_began(log: Log) -> float:
    """Seconds since the epoch: the scheduler takes its role when its engines are ready."""
    told = (one.entry for one in iterate_written(log, 0, log.state.n))
    return next(entry.at for entry in told if isinstance(entry.body, Claimed) and entry.role == "scheduler")


def points(task: RecipeTask, folder: Path, run: str) -> tuple[float, list[tuple[int, float, float]]]:
    """When sampling began, and (version, seconds since the epoch, accuracy) of each version whose weights are kept."""
    from safetensors.torch import load_file

    context = attach_run(run)
    model, found = load_model(folder, "float32", trained=True), []
    context.policies.newest()  # reads the log
    for version in context.policies.since(0):
        try:
            context.policies.check_kept(version)
        except Missing:
            continue
        for file in context.weights(version.number).glob("*.safetensors"):
            model.load_state_dict(load_file(file), strict=False)  # a tensor that is tied is stored once
        found.append((version.number, version.at, task.accuracy(model)))
    return sampling_began(context.policies.log), found


def main() -> None:
    what, recipe, place, seed, *run = sys.argv[1:]
    folder = Path(place)
    torch.set_num_threads(THREADS)
    if what == "start":
        start_policy(load_recipe(Path(recipe), [f"seed={seed}"]), folder)
    else:
        print(json.dumps(points(task_of(recipe, folder, seed), folder, *run)))


if __name__ == "__main__":
    main()
