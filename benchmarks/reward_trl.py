"""Runs TRL's side of `benchmarks.time_to_reward`: `GRPOTrainer` on a recipe's task, with the recipe's hyperparameters.

A version consists of one generation with the recipe's number of groups, and one optimizer step per minibatch. Learning
rate, warm-up, decay, clip, dual clip, betas and sampling are the recipe's. TRL has no weight for negative advantages,
so they are weighted after TRL has computed them. Every few versions the clock stops for an evaluation on held-out
prompts.

`python -m benchmarks.reward_trl RECIPE FOLDER SEED VERSIONS EVERY ROWS` prints the start of training (since the epoch),
and (version, training seconds, accuracy) of each evaluation.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.recipe_task import RecipeTask
from benchmarks.reward_task import THREADS, task_of
from rollflow.tasks.learners.torch_learner import load_model
from rollflow.tasks.objectives.config import PartsObjective
from rollflow.tasks.objectives.surrogate_config import Clip
from rollflow.tasks.run.config import RunConfig

Point = tuple[int, float, float]


def train(task: RecipeTask, folder: Path, versions: int, every: int, rows: int) -> tuple[float, list[Point]]:
    """Train with micro-batches of `rows`; return the start time, and (version, training seconds, accuracy)."""
    trl, datasets, transformers = map(importlib.import_module, ("trl", "datasets", "transformers"))
    config, model = task.config, load_model(folder, "float32", trained=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked = [task.prompts.prompt(index) for index in range(versions * config.groups)]
    if any(list(p.tokens) != tokenizer(p.text)["input_ids"] for p in asked[:64]):
        raise SystemExit("the two tokenizers differ")
    columns = {"prompt": [p.text for p in asked], "reference": [json.dumps(dict(p.reference)) for p in asked]}
    clock = _clock(task, model, every, config.train.minibatches, transformers.TrainerCallback)
    with tempfile.TemporaryDirectory() as place:
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=_reward_of(task),
            args=trl.GRPOConfig(place, **_settings(config, versions, rows)),
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=tokenizer,
            optimizers=_optimizers(model, config, versions),
            callbacks=[clock],
        )
        _weigh(trainer, config.train.objective.advantage.negative_weight)
        clock.begin()
        began = time.time()
        trainer.train()
    return began, list(clock.points)


def _reward_of(task: RecipeTask) -> Callable[..., list[float]]:
    def reward(completions: list[str], reference: list[str], **_: Any) -> list[float]:
        return [task.score(text, json.loads(said)) for text, said in zip(completions, reference, strict=True)]

    return reward


def _settings(config: RunConfig, versions: int, rows: int) -> dict[str, Any]:
    objective, train = config.train.objective, config.train
    assert isinstance(objective, PartsObjective)
    clip = objective.surrogate
    assert isinstance(clip, Clip)
    responses = config.groups * config.group_size
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": responses // train.minibatches // rows,
        "generation_batch_size": responses,
        "num_generations": config.group_size,
        "max_steps": versions * train.minibatches,
        "shuffle_dataset": False,
        "max_completion_length": config.engine.max_new_tokens,
        "loss_type": "dapo",  # DAPO's loss is the mean over tokens
        "epsilon": clip.low,
        "epsilon_high": clip.high,
        "delta": clip.dual,
        "max_grad_norm": train.max_grad_norm,
        "seed": config.seed,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _optimizers(model: Any, config: RunConfig, versions: int) -> tuple[Any, Any]:
    """Create AdamW and the recipe's learning-rate schedule, which is constant over the minibatches of a version."""
    train = config.train
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train.learning_rate, betas=train.betas, weight_decay=train.weight_decay, fused=True
    )

    def share(step: int) -> float:
        version = step // train.minibatches
        left = 1.0 - version / versions if train.schedule == "linear" else 1.0
        return min(1.0, (version + 1) / max(train.warmup_versions, 1)) * max(left, 0.1)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def _weigh(trainer: Any, negative: float) -> None:
    score = trainer._generate_and_score_completions

    def weighed(inputs: Any) -> Any:
        made = score(inputs)
        made["advantages"] = torch.where(made["advantages"] < 0, negative, 1.0) * made["advantages"]
        return made

    trainer._generate_and_score_completions = weighed


def _clock(task: RecipeTask, model: Any, every: int, steps: int, callback: Any) -> Any:
    """Create a callback that evaluates on held-out prompts every few versions of `steps` optimizer steps."""

    class Clock(callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.points: list[Point] = []

        def begin(self) -> None:
            self._look(0, 0.0)
            self._began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            version, rest = divmod(state.global_step, steps)
            if rest or version % every:
                return
            stopped = time.perf_counter()
            self._look(version, stopped - self._began)
            self._began += time.perf_counter() - stopped

        def _look(self, version: int, seconds: float) -> None:
            self.points.append((version, seconds, task.accuracy(model)))
            print(f"version {version}: {seconds:.1f} s, {self.points[-1][2]:.3f}", file=sys.stderr)

    return Clock()


def main() -> None:
    recipe, place, seed, *numbers = sys.argv[1:]
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # TRL's own output goes to standard error, not into the result
    torch.set_num_threads(THREADS)
    versions, every, rows = map(int, numbers)
    folder = Path(place)
    found = train(task_of(recipe, folder, seed), folder, versions, every, rows)
    print(json.dumps(found), file=told, flush=True)


if __name__ == "__main__":
    main()
