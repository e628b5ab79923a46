"""A small real run without Ray: its own policy folder, made-up batches, the real learner's actor in this process."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollflow.flows.config import parse
from rollflow.flows.prepare import prepare
from rollflow.storage.records import Cursor, Discard, DiscardReason, Ending, GroupKey, Trajectory, TrajectoryGroup
from rollflow.storage.settlement import settled
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore
from rollflow.tasks.learners.actor import LearnerActor
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.run import RunContext
from rollflow.tasks.settings import ColdStart

GROUPS, SIZE = 2, 4


class Halt(Exception):
    """The learner is to end here, as if it had been killed while it waited."""


class StoreFeed:
    """`BatchFeed` straight from storage; the first thing it is asked for beyond `until` ends the learner."""

    def __init__(self, batches: TrajectoryStore, until: int) -> None:
        self.batches, self.until = batches, until

    def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
        """The committed batch."""
        if number >= self.until:
            raise Halt
        return self.batches.read(number)[1]

    def finish(self, number: int, version: int) -> None:
        """Nothing to do."""

    def announce(self, version: int) -> None:
        """Nothing to do."""


def prepare_small(
    folder: Path,
    run_id: str = "small",
    versions: int = 6,
    prompts: Sequence[Mapping[str, object]] = (),
    **store: object,
) -> RunContext:
    """A prepared run in `ROLLFLOW_HOME`, with `versions` committed batches and no policy version yet."""
    policy = folder / "policy"
    if not policy.exists():
        make_policy(policy)
    config = parse(
        {
            "policy": {"path": str(policy)},
            "versions": versions,
            "groups": GROUPS,
            "group_size": SIZE,
            "async_ratio": 1,
            "engine": {"kind": "transformers", "max_new_tokens": 8},
            "train": {"warmup_versions": 0, "learning_rate": 1e-3},
            "evaluation": {"prompts": 4},
            "store": store,
            **({"prompts": prompts} if prompts else {}),
        }
    )
    context = prepare(config, run_id)
    for number in range(versions):
        TrajectoryStore(context.store).commit(batch(context, number), 1.0)
    return context


def make_policy(folder: Path) -> None:
    """A policy folder with random weights."""
    folder.mkdir(parents=True)
    small = ColdStart(hidden_size=32, layers=2, heads=2, context=128)
    for name, data in build_cold_folder(small, ["Calculate 1 + 1 + 1.", "3"] * 10).items():
        (folder / name).write_bytes(data)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


def batch(context: RunContext, number: int) -> StagedBatch:
    """Made-up answers to the run's own prompts; in batch 2 one was discarded as stale and issued again."""
    order, draw = context.order(), random.Random(number)
    groups = []
    for index in range(number * GROUPS, (number + 1) * GROUPS):
        prompt = order.prompt(index)
        key = GroupKey(index, 1 if index == 2 * GROUPS else 0)
        samples = (trajectory(prompt.tokens, sample, number, draw) for sample in range(SIZE))
        groups.append(TrajectoryGroup(key, prompt.id, prompt.domain, tuple(samples)))
    gone = (Discard(GroupKey(2 * GROUPS, 0), DiscardReason.STALE, 0, 21),) if number == 2 else ()
    issued, sources = (number + 1) * GROUPS + 1, len(context.config.prompts)
    cursor = Cursor(tuple(len(range(s, issued, sources)) for s in range(sources)), (0,) * sources)
    return StagedBatch(number, tuple(groups), cursor, (GroupKey(issued - 1, 0),), gone, order=number)


def batch_again(context: RunContext, number: int) -> StagedBatch:
    """The next edition of a voided batch: its prompts issued again."""
    batches = TrajectoryStore(context.store)
    last = settled(batches, number)
    assert last is not None
    groups = tuple(replace(g, key=GroupKey(g.key.prompt, g.key.attempt + 1)) for g in batch(context, number).groups)
    flying = tuple(key for key in last.in_flight if key not in {g.key for g in groups})
    edition = batches.edition(number)
    return StagedBatch(number, groups, last.cursor, flying, (), edition, last.order + 1, last.voids)


def trajectory(prompt: tuple[int, ...], sample: int, number: int, draw: random.Random) -> Trajectory:
    """A made-up answer: begun a version before its batch where there is one, ended under the batch's own."""
    started, length = max(number - 1, 0), draw.randint(2, 8)
    versions = tuple(started if t < length // 2 else number for t in range(length))
    response = tuple(draw.randint(3, 250) for _ in range(length))
    quiet = len(prompt)
    return Trajectory(
        sample,
        started,
        prompt + response,
        (False,) * quiet + (True,) * length,
        (0.0,) * quiet + tuple(draw.uniform(-7, -4) for _ in response),
        (-1,) * quiet + versions,
        float(sample % 2),
        "right" if sample % 2 else "wrong: 7 is not the answer",
        Ending.STOP if length < 8 else Ending.LENGTH,
    )


def train_small(context: RunContext, until: int | None = None) -> LearnerActor:
    """Train to the end, or until batch `until` is asked for; returns the learner's actor as it then is."""
    batches = TrajectoryStore(context.store)
    actor = LearnerActor(context, StoreFeed(batches, context.config.versions if until is None else until))
    try:
        actor.run()
    except Halt:
        assert actor.version == until
    return actor
