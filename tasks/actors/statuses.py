"""What the run's actors say of themselves: one frozen type for each, read by its stage's flow and by the supervisor.

`progress` is what a hang is told by: a status whose `progress` stays the same too long is that of an actor that is
stuck. So it holds exactly the fields that change only when something was done; every other field is named in
`TICKING`. A field that is in neither is in no status: a test sees to it.

Imports neither Ray nor torch: who only reads a status does not wait for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from rollflow.storage.run_records.usage import Cost
from rollflow.tasks.runtime.actor_warnings import Warned

WORTH_SAYING = 0.02  # a share below this is left out of a note


class LearnerPhase(Enum):
    """What a learner is at."""

    STARTING = "starting"
    COLD_START = "cold start"
    RESTORING = "restoring"
    TRAINING = "training"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class ActorStatus(ABC):
    """What each of them says. `waits_for`: whom it waits for by design, "" for nobody; `costs`: CPU seconds so far.

    `idle` is the share (0 to 1) of its time in which it had nothing to do; `warned` the newest warnings of its process;
    `attended`: whether its stage's flow has found it, which sees to it from then on.
    """

    waits_for: str = ""
    costs: Sequence[Cost] = ()
    idle: float = 0.0
    warned: Sequence[Warned] = ()
    attended: bool = field(default=True, kw_only=True)

    # May change though nothing was done. What an actor waits for is no progress: who waits is not stuck meanwhile.
    TICKING: ClassVar[frozenset[str]] = frozenset({"waits_for", "costs", "idle", "warned", "attended"})

    @property
    @abstractmethod
    def progress(self) -> Mapping[str, object]:
        """What changes only when something was done."""

    @property
    @abstractmethod
    def made(self) -> float:
        """What grows with the actor's work: a successor for which it has grown has resumed."""

    @property
    @abstractmethod
    def line(self) -> str:
        """One line for people."""


@dataclass(frozen=True, slots=True)
class RolloutStatus(ActorStatus):
    """Of the rollout actor. Without arguments: one that has not read yet how far the run has come.

    Groups are `running`, `buffered` (scored, in no batch yet); `waiting` counts batches ahead of the learner.
    `trajectories` and `tokens` are those of this actor, `discards` and `filtered` groups by reason. Shares of the time:
    `held`, in which engines had free slots and alpha let nothing start, and `waited`, in which a full batch waited
    for a slow group. Shares of tokens: `dropped`, of groups that were too slow, and `prefix_hits`, of the prompts'
    tokens those that engines had in their prefix cache. `failed` says by their number why engines are out.
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
        """See `ActorStatus`."""
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
        """See `ActorStatus`."""
        return float(self.trajectories)

    @property
    def line(self) -> str:
        """See `ActorStatus`."""
        if self.waits_for:
            return f"waits for {self.waits_for}"
        lost = f", {sum(self.discards.values())} discarded" if any(self.discards.values()) else ""
        slow = f", drops {self.dropped:.0%} of its tokens as too slow" if self.dropped > WORTH_SAYING else ""
        held = f", held back by alpha {self.held:.0%}" if self.held > WORTH_SAYING else ""
        return f"version {self.version}, {self.trajectories} trajectories{lost}{slow}{held}"


@dataclass(frozen=True, slots=True)
class LearnerStatus(ActorStatus):
    """Of the learner. `version` is what it holds (-1: nothing yet), `trained` counts the versions it made itself.

    `steps` counts what it did on the way to a version: checks of a cold start, versions trained again, batches that
    had to be made again. `restored_from` and `replayed` say how it began; `note` says all this to people.
    """

    phase: LearnerPhase = LearnerPhase.STARTING
    note: str = "starting"
    version: int = -1
    trained: int = 0
    steps: int = 0
    restored_from: int = -1
    replayed: int = 0

    TICKING: ClassVar[frozenset[str]] = ActorStatus.TICKING | {"note"}  # words: `phase` and `steps` change with them

    @property
    def progress(self) -> Mapping[str, object]:
        """See `ActorStatus`."""
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
        """See `ActorStatus`."""
        return float(self.trained)

    @property
    def line(self) -> str:
        """See `ActorStatus`."""
        return self.note


@dataclass(frozen=True, slots=True)
class RewardStatus(ActorStatus):
    """Of the reward actor: responses `scored`, and those of them that the verifier took too long for (`timeouts`)."""

    scored: int = 0
    timeouts: int = 0

    @property
    def progress(self) -> Mapping[str, object]:
        """See `ActorStatus`."""
        return {"scored": self.scored, "timeouts": self.timeouts}

    @property
    def made(self) -> float:
        """See `ActorStatus`."""
        return float(self.scored)

    @property
    def line(self) -> str:
        """See `ActorStatus`."""
        return f"{self.scored} scored" + (f", {self.timeouts} timed out" if self.timeouts else "")
