"""Opens a recipe's task without Ray actors: its prompts, its verifier, and a policy from its cold start."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollflow.storage.records import Prompt
from rollflow.tasks.learners.torch_learner import load_model
from rollflow.tasks.policies.cold_start import HeldOutAccuracy, cold_start, generate_answers
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.run.cold_start.demonstrated_episodes import open_pool
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import open_prompts
from rollflow.tasks.run.prompt_pins import read_once
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.verifier import score_response


class RecipeTask:
    """The prompts of a run's config, tokenized for a policy, and their verifier."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config = config
        self.tokenizer = PolicyTokenizer(folder)
        self.prompts = open_prompts(config, self.tokenizer, read_once())
        self.held = self.prompts.held_out()
        self.end = self.tokenizer.stop_tokens[0]
        self._verify = build_verifier(config.reward)

    def reward(self, response: list[int], prompt: Prompt) -> float:
        """Return the reward of a response without its end token."""
        return self.score(self.tokenizer.decode_response(response), prompt.reference)

    def score(self, text: str, reference: Mapping[str, Any]) -> float:
        """Return the reward of a response's text."""
        return score_response(self._verify, self.config.reward.answer, text, reference).value

    def accuracy(self, model: Any) -> float:
        """Return the greedy accuracy of the model on held-out prompts."""
        made = generate_answers(
            model, [p.tokens for p in self.held], self.end, self.config.engine.max_new_tokens, 0.0, 0
        )
        return sum(self.reward(answer, p) == 1.0 for answer, p in zip(made, self.held, strict=True)) / len(self.held)


def start_policy(config: RunConfig, folder: Path) -> None:
    """Write a policy folder with weights from the recipe's cold start."""
    cold = config.policy.cold_start
    assert cold is not None
    folder.mkdir(parents=True)
    for name, data in build_cold_folder(cold, open_prompts(config, None, read_once()).texts(2000)).items():
        (folder / name).write_bytes(data)
    torch.manual_seed(config.seed)
    task, model = RecipeTask(config, folder), load_model(folder, "float32", trained=False)
    report = partial(print, file=sys.stderr)

    def accuracy(model: Any) -> HeldOutAccuracy:
        return HeldOutAccuracy(task.accuracy(model), {})

    cold_start(model, cold, open_pool(config, task.prompts, task.tokenizer), accuracy, report)
    with tempfile.TemporaryDirectory() as place:  # `save_pretrained` would also overwrite the config
        model.save_pretrained(place)
        (folder / "model.safetensors").write_bytes((Path(place) / "model.safetensors").read_bytes())
