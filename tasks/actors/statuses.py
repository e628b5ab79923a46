"""The statuses of a run's actors: one frozen type per actor, read by its stage's flow and by the supervisor.

`progress` serves to detect a hang: an actor whose `progress` stays the same for too long is stuck. `progress` has
exactly the fields that change only when work was done. `TICKING` names all other fields. A test checks that each field
is either in `progress` or in `TICKING`.

This module imports neither Ray nor torch, so that a process that only reads a status starts quickly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from rollflow.storage.run_records.usage import CpuCost
from rollflow.tasks.runtime.actor_warnings import ActorWarning

WORTH_SAYING = 0.02  # smallest share (0 to 1) that a status line mentions


class LearnerPhase(Enum):
    """The phase of a learner."""

    STARTING = "starting"
    COLD_START = "cold start"
    RESTORING = "restoring"
    TRAINING = "training"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class ActorStatus(ABC):
    """The common fields of all statuses.

    `waits_for`: the actor that this actor waits for by design, or ""; `costs`: CPU seconds so far; `idle`: share of the
    time (0 to 1) without work; `warned`: newest warnings of the actor's process; `attended`: True if the stage's flow
    has found the actor and watches over it.
    """

    waits_for: str = ""
    costs: Sequence[CpuCost] = ()
    idle: float = 0.0
    warned: Sequence[ActorWarning] = ()
    attended: bool = field(default=True, kw_only=True)

    # The fields that may change without work. `waits_for` is no progress, because an actor may wait by design.
    TICKING: ClassVar[frozenset[str]] = frozenset({"waits_for", "costs", "idle", "warned", "attended"})

    @property
    @abstractmethod
    def progress(self) -> Mapping[str, object]:
        """The values that change only when work was done."""

    @property
    @abstractmethod
    def made(self) -> float:
        """Amount of work done; a restarted actor has resumed once its amount of work has grown."""

    @property
    @abstractmethod
    def line(self) -> str:
        """The status as one line for people."""


@dataclass(frozen=True, slots=True)
class RolloutStatus(ActorStatus):
    """The status of the rollout actor; the defaults are those of an actor that has not read the run's state.

    Groups are `running` or `buffered` (scored, but in no batch); `waiting` counts batches ahead of the learner.
    `trajectories` and `tokens` count what this actor has made; `discards` and `filtered` count groups by reason. `held`
    is the share of the time in which engines had free slots but alpha let no group start. `waited` is the share of the
    time in which a full batch waited for a slow group. `dropped` is the share of tokens that belonged to groups that
    were too slow. `prefix_hits` is the share of prompt tokens that engines found in their prefix cache. `failed` maps
    an engine's number to the reason of the engine's failure.
    """

    version: int = -1
    batch: int = 0
    running: int = 0
    buffered: int = 0
    waiting: int = 0
    tokens: int = 0
    trajectories: int = 0
    discards: Mapping[str, int] = field(default_factory=dict)
    filtered: Mapping[str, int] = field(default_factory=dict)
    wasted_tokens: int = 0
    held: float = 0.0
    waited: float = 0.0
    dropped: float = 0.0
    prefix_hits: float = 0.0
    restarted: int = 0
    update_seconds: float = 0.0
    failed: Mapping[int, str] = field(default_factory=dict)
    evaluations_due: int = 0
    judged: int = 0

    TICKING: ClassVar[frozenset[str]] = ActorStatus.TICKING | {"held", "waited"}

    @property
    def progress(self) -> Mapping[str, object]:
        """The values that change only when work was done."""
        return {
            "version": self.version,
            "batch": self.batch,
            "running": self.running,
            "buffered": self.buffered,
            "waiting": self.waiting,
            "tokens": self.tokens,
            "trajectories": self.trajectories,
            "discards": self.discards,
            "filtered": self.filtered,
            "wasted_tokens": self.wasted_tokens,
            "dropped": self.dropped,
            "prefix_hits": self.prefix_hits,
            "restarted": self.restarted,
            "update_seconds": self.update_seconds,
            "failed": self.failed,
            "evaluations_due": self.evaluations_due,
            "judged": self.judged,
        }

    @property
    def made(self) -> float:
        """Number of trajectories."""
        return float(self.trajectories)

    @property
    def line(self) -> str:
        """The status as one line for people."""
        if self.waits_for:
            return f"waits for {self.waits_for}"
        lost = f", {sum(self.discards.values())} discarded" if any(self.discards.values()) else ""
        slow = f", drops {self.dropped:.0%} of its tokens as too slow" if self.dropped > WORTH_SAYING else ""
        held = f", held back by alpha {self.held:.0%}" if self.held > WORTH_SAYING else ""
        return f"version {self.version}, {self.trajectories} trajectories{lost}{slow}{held}"


@dataclass(frozen=True, slots=True)
class LearnerStatus(ActorStatus):
    """The status of the learner. `version`: the version in its tensors (-1: none); `trained`: versions it trained.

    `steps` counts steps of work on the way to a version: checks of a cold start, replayed versions, batches formed
    again. `restored_from` and `replayed` record how the learner started. `note` describes the other fields in words.
    """

    phase: LearnerPhase = LearnerPhase.STARTING
    note: str = "starting"
    version: int = -1
    trained: int = 0
    steps: int = 0
    restored_from: int = -1
    replayed: int = 0

    TICKING: ClassVar[frozenset[str]] = ActorStatus.TICKING | {"note"}  # `note` changes with other fields

    @property
    def progress(self) -> Mapping[str, object]:
        """The values that change only when work was done."""
        return {
            "phase": self.phase.value,
            "version": self.version,
            "trained": self.trained,
            "steps": self.steps,
            "restored_from": self.restored_from,
            "replayed": self.replayed,
        }

    @property
    def made(self) -> float:
        """Number of versions trained."""
        return float(self.trained)

    @property
    def line(self) -> str:
        """The status as one line for people."""
        return self.note


@dataclass(frozen=True, slots=True)
class RewardStatus(ActorStatus):
    """The status of the reward actor: `scored` counts scored responses, `timeouts` those without a score in time."""

    scored: int = 0
    timeouts: int = 0

    @property
    def progress(self) -> Mapping[str, object]:
        """The values that change only when work was done."""
        return {"scored": self.scored, "timeouts": self.timeouts}

    @property
    def made(self) -> float:
        """Number of responses scored."""
        return float(self.scored)

    @property
    def line(self) -> str:
        """The status as one line for people."""
        return f"{self.scored} scored" + (f", {self.timeouts} timed out" if self.timeouts else "")
