"""Finds out whether a run's engines and its learner can work at the same time on the machines that the run has.

Asynchronous training lets engines and learner work at the same time. This saves time only if each side has hardware of
its own: GPUs, nodes, or CPU cores. On shared cores, each side slows the other down, so a run gains no time and its
samples only get staler. The answer is derived from the recipe and the machines alone: number of engines, threads and
ranks, placement, GPUs and cores. This module does not know how long generation and training take; `rollflow plan
--from-run` compares values of alpha (`async_ratio`) with the times of a recorded run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollflow.flows.keepalive.gpus import width_of
from rollflow.flows.ray_cluster import cluster
from rollflow.tasks.actors.placement import engine_cpus, is_fitting, learner_cpus
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.reward_models import model_gpus

# CPU cores that the scheduler, the actors of the engines, the scorers and the servers keep busy while engines generate.
BESIDE = 1.0
DEVICES = ("nvidia[0-9]*", "kfd")  # files in /dev of GPU drivers


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of one machine, whether the run's engines may run on it, and whether its learner may."""

    cores: float
    gpus: float = 0.0
    engines: bool = True
    learner: bool = True


@dataclass(frozen=True, slots=True)
class Overlap:
    """The hardware that engines and learner need to work at the same time, and the hardware that they have. Both are
    counted in GPUs, nodes or CPU cores.
    """

    of: Literal["GPU", "node", "core"]
    have: float
    rollout: float  # hardware that generation needs, including everything that runs beside the engines
    training: float

    @property
    def own(self) -> bool:
        """True if engines and learner have hardware of their own."""
        return self.have >= self.rollout + self.training

    @property
    def shared_speed(self) -> float:
        """Speed of engines or learner while both work, as a share of the speed while the other one is idle. If they
        share all hardware, each has half of its speed.
        """
        return max(0.5, min(1.0, self.have / (self.rollout + self.training)))

    @property
    def spread(self) -> float:
        """Factor by which the learner's number of cores grows while no engine works."""
        return max(1.0, self.have / self.training) if self.of == "core" else 1.0


def find_overlap(config: RunConfig, machines: Sequence[Machine]) -> Overlap:
    """Find out which hardware engines and learner share on these machines. A separate evaluation engine is left out,
    because it rarely works.
    """
    gpus = sum(machine.gpus for machine in machines) - model_gpus(config)
    if gpus > 0 and not isinstance(config.engine, TimedEngineConfig):
        return Overlap("GPU", gpus, float(config.engine.replicas * width_of(config)), float(config.train.ranks))
    if not any(machine.engines and machine.learner for machine in machines):
        return Overlap("node", 2.0, 1.0, 1.0)
    cores = sum(machine.cores for machine in machines if machine.engines or machine.learner)
    engines = config.engine.replicas * engine_cpus(config.engine)
    return Overlap("core", cores, engines + BESIDE, max(1.0, learner_cpus(config)))


def read_machine() -> Machine:
    """Return the hardware of this machine, on which a private Ray cluster would run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Importing Ray takes a second, so Ray counts the GPUs only where there may be some.
    has_gpus = any(True for pattern in DEVICES for _ in Path("/dev").glob(pattern))
    return Machine(float(cores), cluster.count_machine_gpus() if has_gpus else 0.0)


def machines_of(config: RunConfig, nodes: Iterable[Mapping[str, Any]]) -> list[Machine]:
    """Convert Ray's descriptions of its nodes to machines. The run's placement decides where engines and learner may
    run.
    """
    return [
        Machine(
            float(node["Resources"].get("CPU", 0.0)),
            float(node["Resources"].get("GPU", 0.0)),
            is_fitting(node, config, "engine"),
            is_fitting(node, config, "learner"),
        )
        for node in nodes
    ]


def advise_alpha(config: RunConfig, overlap: Overlap) -> str:
    """Return a note that says whether asynchronous training saves time on this hardware, why, and which config key to
    set.
    """
    where, alpha = _describe(overlap), config.async_ratio
    if overlap.own:
        do = (
            f"async_ratio = {alpha:g} uses this"
            if alpha
            else "set async_ratio = 1 or more if that matters more than fresh samples"
        )
        return f"asynchrony pays here: {where}, so generation and training can run at the same time; {do}"
    if alpha == 0 and _threads(config, overlap) is None:
        return f"async_ratio = 0 fits: {where}, so asynchrony would overlap little and only make samples staler"
    return (
        f"asynchrony overlaps little here: {where}, and both compute; set {keys_in_turns(config, overlap)}, or "
        "async_ratio = 1 if a few responses are much longer than the others "
        "(`rollflow plan --from-run RUN` compares them by simulation)"
    )


def keys_in_turns(config: RunConfig, overlap: Overlap) -> str:
    """Return the config keys with which generation and training alternate, so that each of them can use all cores."""
    threads = _threads(config, overlap)
    return "async_ratio = 0" if threads is None else f"async_ratio = 0 and train.threads = {threads}"


def _threads(config: RunConfig, overlap: Overlap) -> int | None:
    """Return the number of threads with which a learner alone would use all cores. Return None if it already has that
    many.
    """
    threads = int(overlap.have // config.train.ranks)
    return threads if overlap.of == "core" and threads > config.train.threads else None


def _describe(overlap: Overlap) -> str:
    if overlap.of == "node":
        return "engines and learner run on different nodes"
    need = f"generation needs {overlap.rollout:g} and training {overlap.training:g}"
    have = f"{overlap.have:.3g} {overlap.of}{'' if overlap.have == 1 else 's'}"
    if overlap.own:
        return f"engines and learner have {overlap.of}s of their own ({have}; {need})"
    return f"engines and learner share {have} ({need})"
