"""Opens the task of both sides of `benchmarks.time_to_reward`: a recipe's prompts and reward, with equal initial
weights.

- `python -m benchmarks.reward_task start RECIPE FOLDER SEED` creates a policy with the recipe's cold start.
- `python -m benchmarks.reward_task points RECIPE FOLDER SEED RUN` prints the time when a run began to sample, and for
  each stored version its publication time and its accuracy on the held-out prompts. Both sides use the same function.
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
HELD_OUT = 400  # number of held-out prompts; at an accuracy of 80%, the standard error is two percentage points


def task_of(recipe: str, folder: Path, seed: str) -> RecipeTask:
    """Return the task of a recipe and a seed, tokenized for the policy in `folder`."""
    return RecipeTask(load_recipe(Path(recipe), [f"seed={seed}", f"evaluation.prompts={HELD_OUT}"]), folder)


def sampling_began(log: Log) -> float:
    """Return the time (since the epoch) when the scheduler took its role, after its engines were ready."""
    told = (one.entry for one in iterate_written(log, 0, log.state.n))
    return next(entry.at for entry in told if isinstance(entry.body, Claimed) and entry.role == "scheduler")


def points(task: RecipeTask, folder: Path, run: str) -> tuple[float, list[tuple[int, float, float]]]:
    """Return the start of sampling, and (version, time since the epoch, accuracy) of each stored version."""
    from safetensors.torch import load_file

    context = attach_run(run)
    model, found = load_model(folder, "float32", trained=True), []
    context.policies.newest()  # this call reads the log
    for version in context.policies.since(0):
        try:
            context.policies.check_kept(version)
        except Missing:
            continue
        for file in context.weights(version.number).glob("*.safetensors"):
            model.load_state_dict(load_file(file), strict=False)  # a file stores tied tensors only once
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
