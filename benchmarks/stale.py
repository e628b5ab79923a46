"""Trains a recipe in one process, with all samples as stale as alpha (`async_ratio`) allows.

The training uses the shipped learner, prompts, verifier and cold start, but no actors and no engine. Version v is
trained on samples of version max(0, v - alpha); in a real run most samples are fresher. transformers samples the tokens
with log-probs.

`python -m benchmarks.stale RECIPE --alpha 2 --set train.objective.kind=tis` trains one policy and prints its progress.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.recipe_task import RecipeTask, start_policy
from rollflow.flows.config import load_recipe
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import NotFinite
from rollflow.storage.records import GroupKey, Prompt, StopReason, Trajectory, TrajectoryGroup
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.checkpoint.shards import from_files
from rollflow.tasks.learners.torch_learner import load_model
from rollflow.tasks.run.config import RunConfig

Sampled = tuple[list[int], list[float]]  # the tokens of a response, and the log-probs of these tokens
TOLD = ("entropy", "grad_norm", "kl_behaviour", "explained_variance", "kl_reference", "clipped")


@dataclass(frozen=True, slots=True)
class Point:
    """An evaluated version: held-out accuracy, mean reward of its batch, seconds of sampling and training."""

    version: int
    accuracy: float
    reward: float
    seconds: float


@torch.no_grad()
def sample(model: Any, prompts: Sequence[Sequence[int]], config: RunConfig, draw: torch.Generator) -> list[Sampled]:
    """Sample `config.group_size` responses per prompt, with left-padded prompts; finished rows are dropped."""
    size, end, width = config.group_size, model.config.eos_token_id, max(map(len, prompts))
    tokens = torch.tensor([[end] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    place = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=tokens, attention_mask=mask, position_ids=place, use_cache=True, logits_to_keep=1)
    out.past_key_values.batch_repeat_interleave(size)
    mask, logits_RV = mask.repeat_interleave(size, 0), out.logits[:, -1].repeat_interleave(size, 0)
    found: list[Sampled] = [([], []) for _ in mask]
    running = torch.arange(len(mask))
    while True:
        logp_RV = torch.log_softmax(logits_RV.float() / config.engine.temperature, -1)
        tokens = torch.multinomial(logp_RV.exp(), 1, generator=draw)
        logps = logp_RV.gather(1, tokens)[:, 0]
        for row, token, logp in zip(running.tolist(), tokens[:, 0].tolist(), logps.tolist(), strict=True):
            found[row][0].append(token)
            found[row][1].append(logp)
        goes_on = (tokens[:, 0] != end).nonzero()[:, 0]
        if not len(goes_on) or len(found[int(running[goes_on[0]])][0]) == config.engine.max_new_tokens:
            return found
        running, tokens = running[goes_on], tokens[goes_on]
        mask = torch.cat([mask[goes_on], torch.ones(len(goes_on), 1, dtype=mask.dtype)], 1)
        past, place = out.past_key_values, mask.sum(-1, keepdim=True) - 1
        past.batch_select_indices(goes_on)
        out = model(input_ids=tokens, attention_mask=mask, position_ids=place, past_key_values=past, use_cache=True)
        logits_RV = out.logits[:, -1]


class Stale:
    """A learner, and the weights of its last versions. Samples come from the oldest kept version."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.task = config, RecipeTask(config, folder)
        start = LearnerStart(
            folder,
            trained=True,
            dtype=config.policy.dtype,
            temperature=config.engine.temperature,
            versions=config.versions,
            longest=config.engine.max_new_tokens,
            seed=config.seed,
            first=lambda: folder,
        )
        self.learner = build_learner(config.train, start)
        self.sampler = load_model(folder, config.policy.dtype, trained=True).eval()
        self.held: deque[Mapping[str, Tensor]] = deque(maxlen=int(config.async_ratio) + 1)
        self.draw = torch.Generator().manual_seed(config.seed)
        self._keep()

    def _keep(self) -> None:
        self.held.append({name: tensor.clone() for name, tensor in from_files(self.learner.weights()).items()})

    def batch(self, version: int) -> TrajectoryBatch:
        """Sample a batch from the oldest kept policy."""
        self._load(self.held[0])
        sampled_by = version + 1 - len(self.held)
        groups, size = self.config.groups, self.config.group_size
        prompts = [self.task.prompts.prompt(version * groups + i) for i in range(groups)]
        made = sample(self.sampler, [p.tokens for p in prompts], self.config, self.draw)
        return TrajectoryBatch.from_groups(
            [self._group(p, made[i * size : (i + 1) * size], sampled_by) for i, p in enumerate(prompts)]
        )

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        self.sampler.load_state_dict(weights, strict=False)  # tied tensors are stored only once

    def _group(self, prompt: Prompt, made: Sequence[Sampled], version: int) -> TrajectoryGroup:
        told = (self._trajectory(i, prompt, one, version) for i, one in enumerate(made))
        return TrajectoryGroup(GroupKey(prompt.index, 0), prompt.id, prompt.domain, tuple(told))

    def _trajectory(self, number: int, prompt: Prompt, made: Sampled, version: int) -> Trajectory:
        response, logps = made
        before, ended = len(prompt.tokens), response[-1] == self.task.end
        return Trajectory(
            sample=number,
            started_version=version,
            tokens=(*prompt.tokens, *response),
            loss_mask=(False,) * before + (True,) * len(response),
            logprobs=(0.0,) * before + tuple(logps),
            versions=(-1,) * before + (version,) * len(response),
            reward=self.task.reward(response[:-1] if ended else response, prompt),
            reason="",
            ending=StopReason.STOP if ended else StopReason.LENGTH,
        )

    def accuracy(self) -> float:
        """Return the held-out accuracy of the newest policy."""
        self._load(self.held[-1])
        return self.task.accuracy(self.sampler)

    def train(self, every: int) -> Iterator[tuple[Point, Mapping[str, float]]]:
        """Train, and yield a point for each evaluated version, with the learner's metrics of the version before."""
        spent, reward = 0.0, 0.0
        told: Mapping[str, float] = {}
        for version in range(self.config.versions + 1):
            if version % every == 0 or version == self.config.versions:
                yield Point(version, self.accuracy(), reward, spent), told
            if version == self.config.versions:
                return
            began = time.perf_counter()
            batch = self.batch(version)
            reward = sum(batch.table["reward"].to_pylist()) / len(batch)
            told = self.learner.step(batch, version)
            self._keep()
            spent += time.perf_counter() - began


def policy_of(config: RunConfig, place: Path) -> Path:
    """Return the folder with the config's cold start; create it if it is missing."""
    folder = place / f"start-{config.name}-{config.seed}"
    if not (folder / "model.safetensors").exists():
        start_policy(config, folder)
    return folder


def points(config: RunConfig, place: Path, every: int, *, told: bool = False) -> list[Point]:
    """Execute a whole training. It ends early if a metric is not finite."""
    made: list[Point] = []
    try:
        for point, figures in Stale(config, policy_of(config, place)).train(every):
            made.append(point)
            if told:
                shown = {name: round(figures[name], 4) for name in TOLD if name in figures}
                print(json.dumps({**asdict(point), **shown}), flush=True)
    except NotFinite as error:
        print(f"ended: {error}", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--starts", type=Path, default=Path(".rollflow/starts"), help="folder of the cold starts")
    parser.add_argument("--alpha", type=int, default=0)
    parser.add_argument("--every", type=int, default=10, help="number of versions between two evaluations")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = load_recipe(options.recipe, [*options.set, f"async_ratio={options.alpha}"])
    points(config, options.starts, options.every, told=True)


if __name__ == "__main__":
    main()
