"""Makes a small run without Ray, with its own policy folder, artificial batches, and the real actor of the learner in
this process.

A batch is built when the learner asks for it. Its newest tokens are sampled by the version that the learner has
published last. Until that version is committed, the feed has no batch.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollflow.flows.config import parse_config
from rollflow.flows.prepare import prepare
from rollflow.storage.log.state import NOBODY
from rollflow.storage.records import Discard, DiscardReason, GroupKey, StopReason, Trajectory, TrajectoryGroup
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.actors.learner import LearnerActor
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.stop import stop_tokens
from rollflow.tasks.run.context import RunContext

GROUPS, SIZE = 2, 4
SUMS = {
    "kind": "reasoning-gym",
    "family": "basic_arithmetic",
    "options": {
        "min_terms": 3,
        "max_terms": 3,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ["+"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
}
# A recipe of a run whose simulated engine answers sorting questions; a test adds the section [reward].
SORTING_RECIPE = """
name = "sorting"
versions = {versions}
groups = {groups}
group_size = {size}

[policy]
path = "{policy}"

[[prompts]]
kind = "sorting"

[engine]
kind = "timed"
max_new_tokens = 16
median_tokens = 8
seconds_per_token = 0.01

[evaluation]
every = 0
prompts = 2
"""
# A learner with every optional part of its state.
ALL_ROLES = {
    "objective": {"kind": "ppo", "penalties": {"kl_to": "reference", "kl_weight": 0.1, "kl_target": 0.01}},
    "reference": {"every": 2},
    "minibatches": 2,
}


class Halt(Exception):
    """Raised to end the learner, as if it had been killed while it waited."""


class StoreFeed:
    """A `BatchFeed` of artificial batches; from batch `until` on, the first request ends the learner.

    Batch `until` is committed and waits for training. The feed claims the run as its scheduler, and as its supervisor
    if there is none.
    """

    def __init__(self, context: RunContext, until: int | None = None, *, ahead: bool = False) -> None:
        """Prepare the feed. With `ahead`, the tokens of a batch come at most from the version before the batch's own,
        as if this version was published late.
        """
        self.ahead = ahead
        self.context, self.log, self.batches = context, context.log, context.batches
        self.until = context.config.versions if until is None else until
        if self.log.state.newest_claim("supervisor") == NOBODY:
            self.log.claim("supervisor")
        self.writer = self.log.claim("scheduler")

    def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
        """Return the committed batch."""
        self.await_version(number)
        waiting = self.batches.find_waiting(number)
        if waiting is None:
            self.batches.commit(self.writer, batch(self.context, number, ahead=self.ahead))
            waiting = self.log.state.waiting[number]
        if number >= self.until:
            raise Halt
        return self.batches.read(waiting.file)

    def await_version(self, number: int) -> None:
        """Raise `TimeoutError` while batch `number` cannot be formed, because the version of its newest tokens is
        missing.
        """
        self.log.follow()
        if (newest := max(number - self.ahead, 0)) > self.log.state.version:
            raise TimeoutError(f"no batch {number} before version {newest}")

    def finish(self, number: int, version: int) -> None:
        """Do nothing."""

    def announce(self, version: int) -> None:
        """Do nothing."""


def prepare_small(
    folder: Path,
    run_id: str = "small",
    versions: int = 6,
    prompts: Sequence[Mapping[str, object]] = (),
    train: Mapping[str, object] | None = None,
    reward: Mapping[str, object] | None = None,
    dtype: str = "float32",
    async_ratio: float = 1,
    cluster: Mapping[str, object] | None = None,
    tracking: Mapping[str, object] | None = None,
    engine: Mapping[str, object] | None = None,
    environment: Mapping[str, object] | None = None,
    **store: object,
) -> RunContext:
    """Prepare a run of `versions` versions in `ROLLFLOW_HOME`, without claiming it."""
    if reward is None and any(source["kind"] == "jsonl" for source in prompts or ()):
        reward = {"kind": "exact"}  # the rows of these questions name no family of reasoning-gym
    policy = folder / "policy"
    if not policy.exists():
        make_policy(policy)
    config = parse_config(
        {
            "policy": {"path": str(policy), "dtype": dtype},
            "versions": versions,
            "groups": GROUPS,
            "group_size": SIZE,
            "async_ratio": async_ratio,
            "engine": {"kind": "transformers", "max_new_tokens": 8, **(engine or {})},
            "train": {"warmup_versions": 0, "learning_rate": 1e-3, **(train or {})},
            "evaluation": {"prompts": 4},
            "store": store,
            "cluster": cluster or {},
            "tracking": tracking or {},
            "prompts": prompts or [SUMS],
            **({"reward": reward} if reward else {}),
            **({"environment": environment} if environment else {}),
        }
    )
    return prepare(config, run_id)


def make_policy(folder: Path) -> None:
    """Make a policy folder with random weights."""
    folder.mkdir(parents=True)
    for name, data in _policy_files().items():
        (folder / name).write_bytes(data)


@cache
def _policy_files() -> Mapping[str, bytes]:
    """Build the policy once in each process."""
    small = ColdStart(hidden_size=32, layers=2, heads=2, context=128)
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file, data in build_cold_folder(small, ["Calculate 1 + 1 + 1.", "3"] * 10).items():
            (folder / file).write_bytes(data)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def copy_run(context: RunContext, folder: Path) -> RunContext:
    """Copy a run whose store is a folder. The copy has its own cache."""
    shutil.copytree(context.uri, folder)
    return RunContext(str(folder), folder.with_name(f"{folder.name}-cache"))


def batch(context: RunContext, number: int, *, ahead: bool = False) -> StagedBatch:
    """Build artificial responses to the run's own prompts; in batch 2 one prompt was discarded as stale and reissued.

    Responses begin alpha versions before the batch's version, if there are so many versions. They end under the batch's
    version, unless `ahead` is true. One more prompt is in flight than batches have used. A voided batch is built again
    from the next attempts.
    """
    started = max(number - int(context.config.async_ratio), 0)
    newest = started if ahead else number
    order, draw, state = context.prompts(), random.Random(number), context.log.state
    stop = stop_tokens(context.policy_folder)[0]
    again, first = number in state.holes, number * GROUPS
    gone = (Discard(GroupKey(first, 0), DiscardReason.STALE, 0, 21),) if number == 2 and not again else ()
    attempts = state.open | {discard.key.prompt: discard.key.attempt + 1 for discard in gone}
    groups = []
    for index in range(first, first + GROUPS):
        prompt = order.prompt(index)
        samples = (trajectory(prompt.tokens, sample, started, newest, draw, stop) for sample in range(SIZE))
        key = GroupKey(index, attempts.get(index, 0))
        groups.append(TrajectoryGroup(key, prompt.id, prompt.domain, tuple(samples)))
    issued = range(first + 1 if number else 0, first + GROUPS + 1)
    return StagedBatch(number, tuple(groups), () if again else tuple(issued), gone)


def trajectory(
    prompt: Sequence[int], sample: int, started: int, newest: int, draw: random.Random, stop: int
) -> Trajectory:
    """Build a response that begins and ends under these versions. A short response ends with the token `stop`."""
    length = draw.randint(2, 8)
    versions = tuple(started if t < length // 2 else newest for t in range(length))
    response = tuple(draw.randint(3, 250) for _ in range(length))
    response = response if length == 8 else (*response[:-1], stop)
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
        StopReason.STOP if length < 8 else StopReason.LENGTH,
    )


def train_small(context: RunContext, until: int | None = None) -> LearnerActor:
    """Train to the end, or until batch `until` is requested. Return the learner's actor in its state at that time."""
    actor = LearnerActor(context, channel=StoreFeed(context, until))
    try:
        actor.run()
    except Halt:
        assert actor.version == until
    return actor
