"""What both sides of `benchmarks.time_to_reward` learn: the quick start's prompts and reward, from the same weights.

- `python -m benchmarks.reward_task start FOLDER SEED` makes a policy by the recipe's cold start.
- `python -m benchmarks.reward_task points RUN FOLDER SEED` prints, for each version that a run has kept, when it was
  published and how many of the held-out prompts it answers right. Both sides are judged by the same function.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollflow.flows.config import load_recipe
from rollflow.flows.locations import attach_run
from rollflow.storage.errors import Missing
from rollflow.tasks.learners.torch_learner import load_model
from rollflow.tasks.policies.cold_start import answers, cold_start
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.pins import read_once
from rollflow.tasks.run_context import open_prompts
from rollflow.tasks.verifiers.reasoning_gym import family_score

RECIPE = Path("flows/recipes/arithmetic.toml")
THREADS = 2


class Task:
    """The prompts of a seed, as a policy's tokenizer reads them, and their verifier."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.config = load_recipe(RECIPE, [f"seed={seed}"])
        self.tokenizer = PolicyTokenizer(folder)
        self.prompts = open_prompts(self.config, self.tokenizer, read_once())
        self._held = self.prompts.held_out()

    def accuracy(self, model: Any) -> float:
        """The share of held-out prompts that the model answers right when it chooses greedily."""
        asked, longest = [p.tokens for p in self._held], self.config.engine.max_new_tokens
        made = answers(model, asked, self.tokenizer.stop_tokens[0], longest, 0.0, 0)
        scores = (
            family_score(self.tokenizer.decode(answer), p.reference).reward
            for answer, p in zip(made, self._held, strict=True)
        )
        return sum(score == 1.0 for score in scores) / len(self._held)


def start(folder: Path, seed: int) -> None:
    """A policy folder with weights: the recipe's cold start."""
    config = load_recipe(RECIPE, [f"seed={seed}"])
    cold = config.policy.cold_start
    assert cold is not None
    folder.mkdir(parents=True)
    for name, data in build_cold_folder(cold, open_prompts(config, None, read_once()).texts(2000)).items():
        (folder / name).write_bytes(data)
    torch.manual_seed(seed)
    task, model = Task(folder, seed), load_model(folder, "float32", trained=False)
    report = partial(print, file=sys.stderr)
    cold_start(model, cold, task.prompts, task.tokenizer, task.accuracy, report, seed)
    with tempfile.TemporaryDirectory() as place:  # it would write the config, too, in its own way
        model.save_pretrained(place)
        (folder / "model.safetensors").write_bytes((Path(place) / "model.safetensors").read_bytes())


def points(run: str, folder: Path, seed: int) -> list[tuple[int, float, float]]:
    """(version, seconds since the epoch, accuracy) of each version whose weights are kept."""
    from safetensors.torch import load_file

    context, task = attach_run(run), Task(folder, seed)
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
    return found


def main() -> None:
    what, *rest = sys.argv[1:]
    torch.set_num_threads(THREADS)
    if what == "start":
        start(Path(rest[0]), int(rest[1]))
    else:
        print(json.dumps(points(rest[0], Path(rest[1]), int(rest[2]))))


if __name__ == "__main__":
    main()
