"""Writes the inputs of `benchmarks.learner_step`: a policy folder with weights, and one batch of trajectories.

Policy and batch are drawn from a seed. The behaviour log-probs are the policy's log-probs with some noise, so that
tokens of both signs are clipped. In a *still* group all rewards are equal, so all advantages are zero.

`python -m benchmarks.learner_batches WORKLOAD FOLDER SHARE` writes policy and batch, and prints the number of response
tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollflow.flows.config import load_recipe
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.records import GroupKey, StopReason, Trajectory, TrajectoryGroup
from rollflow.tasks.learners.torch_learner import load_model
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.run.context import open_prompts
from rollflow.tasks.run.prompt_pins import read_once

RECIPE = Path("flows/recipes/sorting.toml")
BATCH = "batch.arrow"
NOISE = 0.25  # nats between the log-probs of the policy and of the behaviour policy
PROMPT = (16, 65)  # the range of a random prompt's length in tokens
Pair = tuple[Sequence[int], Sequence[int]]  # tokens of a prompt and of a response to it
TURNS, THOUGHT, ACTION, ANSWER = 10, 24, 16, 40  # turns of an agent's episode, and tokens of a turn's parts


@dataclass(frozen=True, slots=True)
class Workload:
    """A policy and the shape of its batch. Random responses have lognormal lengths, correlated within a group."""

    groups: int
    group_size: int
    cold: ColdStart | None = None  # None: the quick start's policy, prompts and answers
    vocabulary: int = 0  # vocabulary size of a random policy
    median: float = 0.0  # median length of a random response in tokens
    sigma: float = 1.0
    cap: int = 0
    correlation: float = 0.7
    prompt: tuple[int, int] = PROMPT
    agent: bool = False  # if true, the responses are the turns of an agent's episodes


_DEEP = ColdStart(hidden_size=192, layers=4, heads=4, context=1024)
_WIDE = ColdStart(hidden_size=128, layers=2, heads=4, context=1024)
_WIDEST = ColdStart(hidden_size=512, layers=4, heads=8, context=1024)
_LONG, _LONG_WIDEST = (cold.model_copy(update={"context": 2048}) for cold in (_DEEP, _WIDEST))
WORKLOADS = {
    "quick-start": Workload(256, 4),
    "wide": Workload(8, 4, _WIDE, vocabulary=151_936, median=64.0, cap=512),
    "ragged": Workload(16, 4, _DEEP, vocabulary=8_000, median=64.0, cap=512),
    "prompt": Workload(4, 8, _DEEP, vocabulary=8_000, median=64.0, sigma=0.0, cap=64, prompt=(512, 513)),
    "prompt-wide": Workload(2, 8, _WIDEST, vocabulary=8_000, median=64.0, sigma=0.0, cap=64, prompt=(512, 513)),
    "agent": Workload(1, 4, _LONG, vocabulary=8_000, prompt=(1024, 1025), agent=True),
    "agent-wide": Workload(1, 2, _LONG_WIDEST, vocabulary=8_000, prompt=(1024, 1025), agent=True),
    "agent-tiny": Workload(1, 2, _LONG, vocabulary=300, prompt=(16, 17), agent=True),
    "tiny": Workload(4, 4, _WIDE, vocabulary=20_000, median=16.0, cap=64),
}


def write(workload: Workload, folder: Path, still: float) -> int:
    """Write the policy's files and `BATCH` into `folder`; return the number of response tokens.

    In the fraction `still` of the groups all rewards are equal.
    """
    config = load_recipe(RECIPE)
    cold = workload.cold or config.policy.cold_start
    assert cold is not None
    folder.mkdir(parents=True, exist_ok=True)
    texts = open_prompts(config, None, read_once()).texts(2000)
    for name, data in build_cold_folder(cold, texts).items():
        (folder / name).write_bytes(data)
    described = folder / "config.json"
    if workload.vocabulary:
        described.write_text(json.dumps(json.loads(described.read_text()) | {"vocab_size": workload.vocabulary}))
    torch.manual_seed(0)
    model = load_model(folder, "float32", trained=False)
    model.save_pretrained(folder)
    invent = _episodes if workload.agent else _made_up
    made = invent(workload) if workload.cold else _answers(workload, folder)
    groups = [_group(model, number, pairs, number < still * workload.groups) for number, pairs in enumerate(made)]
    (folder / BATCH).write_bytes(TrajectoryBatch.from_groups(groups).to_bytes())
    return sum(group.response_tokens for group in groups)


def _answers(workload: Workload, folder: Path) -> Iterator[list[Pair]]:
    """Return the quick start's prompts, each paired with its own answer and with answers to other prompts."""
    config, tokenizer = load_recipe(RECIPE), PolicyTokenizer(folder)
    prompts: RunPrompts = open_prompts(config, tokenizer, read_once())
    asked = [prompts.demonstration(index) for index in range(workload.groups + workload.group_size)]
    responses = [[*tokenizer.encode(answer), tokenizer.stop_tokens[0]] for _, answer in asked]
    for index in range(workload.groups):
        yield [(asked[index][0].tokens, responses[index + sample]) for sample in range(workload.group_size)]


def _made_up(workload: Workload) -> Iterator[list[Pair]]:
    draw = np.random.default_rng(0)
    shared, own = workload.correlation**0.5, (1 - workload.correlation) ** 0.5
    for _ in range(workload.groups):
        prompt = draw.integers(workload.vocabulary, size=draw.integers(*workload.prompt)).tolist()
        z = shared * draw.normal() + own * draw.normal(size=workload.group_size)
        lengths = np.clip(workload.median * np.exp(workload.sigma * z), 1, workload.cap).astype(int)
        yield [(prompt, draw.integers(workload.vocabulary, size=length).tolist()) for length in lengths]


def _episodes(workload: Workload) -> Iterator[list[Pair]]:
    """Return the turns of agents' episodes, each with its context and its response.

    A response is a thought and an action. Later contexts have the action and its answer, but not the thought, so each
    turn is a branch.
    """
    draw = np.random.default_rng(0)
    for _ in range(workload.groups):
        prompt, pairs = draw.integers(workload.vocabulary, size=workload.prompt[0]).tolist(), list[Pair]()
        for _ in range(workload.group_size):
            context = prompt
            for _ in range(TURNS):
                parts = (draw.integers(workload.vocabulary, size=size).tolist() for size in (THOUGHT, ACTION, ANSWER))
                thought, action, answer = parts
                pairs.append((context, thought + action))
                context = context + action + answer
        yield pairs


def _group(model: Any, number: int, pairs: Sequence[Pair], still: bool) -> TrajectoryGroup:
    """Build a group in which every second response is correct. In a still group, every response is correct."""
    rewards = [1.0 if still or sample % 2 == 0 else 0.0 for sample in range(len(pairs))]
    made = (_trajectory(model, number, sample, pair) for sample, pair in enumerate(pairs))
    given = tuple(replace(found, reward=reward) for found, reward in zip(made, rewards, strict=True))
    return TrajectoryGroup(GroupKey(number, 0), f"prompt-{number}", "made-up", given)


@torch.no_grad()
def _trajectory(model: Any, number: int, sample: int, pair: Pair) -> Trajectory:
    prompt, response = pair
    tokens = torch.tensor([[*prompt, *response]])
    asked = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
    own = torch.log_softmax(asked, -1).gather(1, torch.tensor(response)[:, None]).squeeze(1).numpy()
    noise = np.random.default_rng((number, sample)).normal(scale=NOISE, size=len(response))
    before, chosen = (0.0,) * len(prompt), tuple((own + noise).tolist())
    return Trajectory(
        sample=sample,
        started_version=0,
        tokens=tuple(tokens[0].tolist()),
        loss_mask=(False,) * len(prompt) + (True,) * len(response),
        logprobs=before + chosen,
        versions=(-1,) * len(prompt) + (0,) * len(response),
        reward=0.0,
        reason="made up",
        ending=StopReason.STOP,
    )


if __name__ == "__main__":
    print(write(WORKLOADS[sys.argv[1]], Path(sys.argv[2]), float(sys.argv[3])))
