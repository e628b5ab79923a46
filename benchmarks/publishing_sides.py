"""Runs a process of `benchmarks.publishing`, which either trains and publishes or restores the published version.

Run it as `python -m benchmarks.publishing_sides (publish|restore) FOLDER SETTING`, where FOLDER has a policy's
`config.json`, and SETTING is a `Setting` as JSON. The results are printed as a line of JSON. Bytes are the peak memory
of each rank, as reported by the kernel (VmHWM, which is reset before the measurement). The first rank comes first.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers.models.auto.modeling_auto  # noqa: F401 - imported early, so that publishing is measured without this import

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.entries import RunCreated, VersionPublished
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.objects.base import Data
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.policies import PolicyStore
from rollflow.storage.records import GroupKey, StopReason, StoredObject, Trajectory, TrajectoryGroup
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.actors.publishing import Publishing
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import Learner, LearnerStart
from rollflow.tasks.learners.checkpoint.sharded_files import stage_files
from rollflow.tasks.learners.config import DeepSpeedTrain, TorchTrain, TrainConfig
from rollflow.tasks.learners.malloc_trim import release_memory
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.run.restore import restore

GROUPS, SIZE, PROMPT = 4, 4, 16
VOCABULARY = 1000  # random tokens are drawn below this id


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a measurement: policy, learner, ranks and responses."""

    dtype: str  # data type of the policy's weights
    masters: str  # the value of `train.master_dtype`
    ranks: int
    learner: str  # "torch", "sharded" (FSDP2) or "deepspeed"
    tokens: int  # length of a response in tokens; with 0, no step is taken and only memory is measured

    @property
    def train(self) -> TrainConfig:
        """The keys of `[train]`."""
        given = {"ranks": self.ranks, "master_dtype": self.masters, "micro_tokens": 512, "warmup_versions": 0}
        if self.learner == "deepspeed":
            return DeepSpeedTrain.model_validate(given)
        return TorchTrain.model_validate({**given, "sharded": self.learner == "sharded"})


class Memory:
    """The memory of this process and of its children."""

    def __init__(self) -> None:
        gc.collect()
        self._level = _of(os.getpid(), "VmRSS")

    @contextmanager
    def peaks(self) -> Iterator[list[int]]:
        """Return the peak bytes of each rank, above the memory of this process when this object was created."""
        found: list[int] = []
        pids = _ranks()
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        yield found
        found += [_of(pid, "VmHWM") - self._level for pid in pids]

    def whole_peaks(self) -> list[int]:
        """Return the peak bytes of each rank since the start of its process."""
        return [_of(pid, "VmHWM") - self._level for pid in _ranks()]

    @property
    def level(self) -> int:
        """The bytes of memory of this process when this object was created, mostly for imported modules."""
        return self._level


def _ranks() -> list[int]:
    """Return this process and its ranks."""
    below = psutil.Process().children(recursive=True)
    return [os.getpid(), *(one.pid for one in below if one.name().startswith("rank"))]


def _of(pid: int, what: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def batch(seed: int, tokens: int, *, still: bool = False) -> TrajectoryBatch:
    """Build a batch of random responses with `tokens` tokens. If `still` is true, all rewards are equal, so gradients
    are zero.
    """
    draw = random.Random(seed)
    known, likely = (False,) * PROMPT + (True,) * tokens, (0.0,) * PROMPT + (-math.log(VOCABULARY),) * tokens
    versions = (-1,) * PROMPT + (0,) * tokens

    def trajectory(sample: int, prompt: list[int]) -> Trajectory:
        text = (*prompt, *(draw.randrange(VOCABULARY) for _ in range(tokens)))
        reward = 1.0 if still else float(sample % 2)
        return Trajectory(sample, 0, text, known, likely, versions, reward, "made up", StopReason.STOP)

    def group(number: int) -> TrajectoryGroup:
        prompt = [draw.randrange(VOCABULARY) for _ in range(PROMPT)]
        made = tuple(trajectory(sample, prompt) for sample in range(SIZE))
        return TrajectoryGroup(GroupKey(number, 0), f"prompt-{number}", "made-up", made)

    return TrajectoryBatch.from_groups([group(number) for number in range(GROUPS)])


def published(folder: Path, setting: Setting) -> dict[str, Any]:
    """Train, publish version 0 alone, and stage version 1 during a step."""
    memory = Memory()
    learner = build_learner(setting.train, LearnerStart(folder, trained=False, dtype=setting.dtype, versions=9))
    first_step(learner, setting)
    log = Log(LocalStore(folder / "run"))
    log.create(RunCreated("publishing", {"async_ratio": 9, "group_size": SIZE, "store": {}}, "", 1))
    log.claim("supervisor")
    writer, policies = log.claim("learner"), PolicyStore(log)
    with memory.peaks() as peaks:
        began = time.monotonic()
        checked(learner)
        check = time.monotonic() - began
        weights, state = all_staged(policies, writer, 0, (learner.weights(), learner.state()))
        policies.publish(writer, VersionPublished(0, None, weights, state))
        line = time.monotonic() - began
    share = sum(stored.size for stored in policies.find(0).objects)
    parameters = sum(parameter.numel() for parameter in learner.model.parameters())
    found = {"parameters": parameters, "share": share, "level": memory.level, "peaks": peaks, "line": line}
    return found | {"check": check, **(beside(learner, policies, writer, setting) if setting.tokens else {})}


def first_step(learner: Learner, setting: Setting) -> None:
    """Take a first step, which creates AdamW's moments; without tokens the gradients of this step are zero."""
    if setting.tokens:
        learner.step(batch(0, setting.tokens), 0)
        return
    assert isinstance(learner, TorchLearner)
    for parameter in learner.policy.trained.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    learner.policy.apply()
    release_memory(learner.model.parameters())


def beside(learner: Learner, policies: PolicyStore, writer: Writer, setting: Setting) -> dict[str, float]:
    """Return the seconds of a step alone, and of a step during which a version is staged, with the seconds that this
    step waited.
    """
    began = time.monotonic()
    learner.step(batch(1, setting.tokens), 1)
    alone, waited = time.monotonic() - began, 0.0
    publishing, made = Publishing(), (learner.weights(), learner.state())

    def settle() -> None:
        nonlocal waited
        began = time.monotonic()
        publishing.settle()
        waited += time.monotonic() - began

    def stage() -> None:
        all_staged(policies, writer, 1, made)

    publishing.begin(stage)
    began = time.monotonic()
    learner.step(batch(2, setting.tokens), 2, settle)
    return {"step": alone, "step_beside": time.monotonic() - began, "waited": waited}


def all_staged(
    policies: PolicyStore, writer: Writer, version: int, made: Iterable[Mapping[str, Data]]
) -> list[tuple[StoredObject, ...]]:
    """Stage all files as a learner's actor does."""
    return [stage_files(policies, writer, version, files) for files in made]


def checked(learner: Learner) -> None:
    """Make the checks of a learner's actor before publishing."""
    assert learner.first_nonfinite() is None
    learner.logprobs(list(range(3, 19)))


def restored(folder: Path, setting: Setting) -> dict[str, Any]:
    """Restore version 0 into a learner without weights. Unsharded ranks then take a first step with zero gradients."""
    memory = Memory()
    began = time.monotonic()
    start = LearnerStart(folder, trained=False, blank=True, dtype=setting.dtype, versions=9)
    learner = build_learner(setting.train, start)
    built = time.monotonic() - began
    log = Log(LocalStore(folder / "run"))
    restore(PolicyStore(log), TrajectoryStore(log), learner, 0)
    seconds = time.monotonic() - began
    peaks = memory.whole_peaks()[:1]
    if setting.learner != "torch":
        checked(learner)  # after the checks, all ranks have restored their state
    elif setting.ranks > 1:
        learner.step(batch(3, 4, still=True), 0)
    everyone = memory.whole_peaks()
    return {"build": built, "seconds": seconds, "level": memory.level, "first": peaks[0], "peaks": everyone}


SIDES: Mapping[str, Callable[[Path, Setting], dict[str, Any]]] = {"publish": published, "restore": restored}


def main() -> None:
    side, folder, setting = sys.argv[1:]
    torch.set_num_threads(1)
    print(json.dumps(SIDES[side](Path(folder), Setting(**json.loads(setting)))), flush=True)


if __name__ == "__main__":
    main()
