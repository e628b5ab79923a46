"""Defines the statuses of a run's Ray actors, one frozen type per actor, for the Prefect flows and the supervisor.

An actor is considered stuck if the `progress` of its status stays the same for too long. `progress` has the fields that
change only when the actor has worked, and `TICKING` names all other fields.

This module imports neither Ray nor torch, so that a process that only reads statuses starts fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from rollflow.storage.run_records.environment_figures import EnvironmentUse
from rollflow.storage.run_records.sandbox_figures import SandboxUse
from rollflow.storage.run_records.usage import CpuCost
from rollflow.tasks.engines.base import NO_DRAFTS, DraftCounts
from rollflow.tasks.runtime.actor_warnings import ActorWarning

WORTH_SAYING = 0.02  # smallest share of time or tokens (0 to 1) that a status line reports


class LearnerPhase(Enum):
    """The phase of a learner."""

    STARTING = "starting"
    COLD_START = "cold start"
    RESTORING = "restoring"
    TRAINING = "training"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class ActorStatus(ABC):
    """The fields that the statuses of all actors have in common.

    `waits_for` says what an idle actor waits for, or is "". `costs` are the CPU seconds that the actor has used so far.
    `idle` is the share of the time (0 to 1) in which the actor had no work. `warned` has the newest warnings of the
    actor's process. `attended` is True if the Prefect flow of the actor's stage watches the actor. `sandboxes` has the
    usage numbers of each kind of sandbox that the actor's processes have used.
    """

    waits_for: str = ""
    costs: Sequence[CpuCost] = ()
    idle: float = 0.0
    warned: Sequence[ActorWarning] = ()
    attended: bool = field(default=True, kw_only=True)
    sandboxes: Sequence[SandboxUse] = field(default=(), kw_only=True)

    # names of the status fields that may change although the actor does no work
    TICKING: ClassVar[frozenset[str]] = frozenset({"waits_for", "costs", "idle", "warned", "attended", "sandboxes"})

    @property
    @abstractmethod
    def progress(self) -> Mapping[str, object]:
        """The fields of the status, by name, that change only when the actor does work."""

    @property
    @abstractmethod
    def made(self) -> float:
        """Amount of work that the actor has done; a restarted actor has recovered once this amount grows."""

    @property
    @abstractmethod
    def line(self) -> str:
        """The actor's status as one line for people."""


@dataclass(frozen=True, slots=True)
class RolloutStatus(ActorStatus):
    """The status of the rollout actor; the default values describe an actor that has not read the run's state yet.

    `running` counts the prompts with unfinished responses. `buffered` counts the groups of scored responses that are
    not yet in a batch. `waiting` counts the batches that the learner has not yet trained on. `trajectories` and
    `tokens` count what the rollout actor has generated. `discards` and `filtered` count discarded groups of responses,
    by reason. `held` is the share of the time in which engines had free slots, but the limit on staleness
    (`async_ratio`) allowed no new prompt. `waited` is the share of the time in which the learner was idle while a full
    batch waited for one slow group of responses. `unscored` counts the responses that wait for a score. `backlogged` is
    the share of the time in which only the limit `rollout.max_unscored` prevented new prompts. `dropped` is the share
    of generated tokens in groups of responses that were discarded as too slow or not needed. `prefix_hits` is the share
    of prompt tokens that engines found in their prefix cache. `drafts` counts the drafts of speculative decoding.
    `failed` maps the number of each failed engine to the reason for its failure. `environments` has the counters of
    environments with worker processes.
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
    unscored: int = 0
    backlogged: float = 0.0
    dropped: float = 0.0
    prefix_hits: float = 0.0
    drafts: DraftCounts = NO_DRAFTS
    restarted: int = 0
    update_seconds: float = 0.0
    failed: Mapping[int, str] = field(default_factory=dict)
    evaluations_due: int = 0
    judged: int = 0
    environments: Sequence[EnvironmentUse] = ()

    TICKING: ClassVar[frozenset[str]] = ActorStatus.TICKING | {"held", "waited", "backlogged"}

    @property
    def progress(self) -> Mapping[str, object]:
        """The fields of the status, by name, that change only when the actor does work."""
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
            "unscored": self.unscored,
            "dropped": self.dropped,
            "prefix_hits": self.prefix_hits,
            "drafts": self.drafts,
            "restarted": self.restarted,
            "update_seconds": self.update_seconds,
            "failed": self.failed,
            "evaluations_due": self.evaluations_due,
            "judged": self.judged,
            "environments": self.environments,
        }

    @property
    def made(self) -> float:
        """Number of trajectories that the rollout actor has generated."""
        return float(self.trajectories)

    @property
    def line(self) -> str:
        """The actor's status as one line for people."""
        if self.waits_for:
            return f"waits for {self.waits_for}"
        lost = f", {sum(self.discards.values())} discarded" if any(self.discards.values()) else ""
        slow = f", drops {self.dropped:.0%} of its tokens as too slow" if self.dropped > WORTH_SAYING else ""
        held = f", held back by alpha {self.held:.0%}" if self.held > WORTH_SAYING else ""
        behind = f", held back by rewards {self.backlogged:.0%}" if self.backlogged > WORTH_SAYING else ""
        drafts = f", {self.drafts.length:.1f} tokens a step with a draft" if self.drafts.verified else ""
        return f"version {self.version}, {self.trajectories} trajectories{lost}{slow}{held}{behind}{drafts}"


@dataclass(frozen=True, slots=True)
class LearnerStatus(ActorStatus):
    """The status of the learner's Ray actor.

    `version` is the newest published policy version, or -1. `trained` counts the policy versions that this learner
    actor has trained. `steps` counts finished steps of work between two policy versions, such as an accuracy check
    during a cold start. `restored_from` is the policy version that the learner loaded at its start. `replayed` is the
    number of policy versions that the learner computed again from their batches. `note` describes in words what the
    learner is doing.
    """

    phase: LearnerPhase = LearnerPhase.STARTING
    note: str = "starting"
    version: int = -1
    trained: int = 0
    steps: int = 0
    restored_from: int = -1
    replayed: int = 0

    # `note` may change although the learner does no work
    TICKING: ClassVar[frozenset[str]] = ActorStatus.TICKING | {"note"}

    @property
    def progress(self) -> Mapping[str, object]:
        """The fields of the status, by name, that change only when the actor does work."""
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
        """Number of policy versions that the learner has trained."""
        return float(self.trained)

    @property
    def line(self) -> str:
        """The actor's status as one line for people."""
        return self.note


@dataclass(frozen=True, slots=True)
class RewardStatus(ActorStatus):
    """The status of the reward actor; counts are sums over the actor and its helpers. `timeouts` counts responses whose
    scoring took too long.

    `kills` counts test cases that an adaptive deadline ended early. `rechecked` counts those of them that ran again
    with the longest deadline, and `false_kills` those that then passed. `kills`, `rechecked` and `false_kills` count
    from the beginning of the run. `second_verdicts` counts the responses that were judged twice, and `flips` those
    whose two verdicts differ. Both are keyed by the config section of the scorer. `actors` is the number of actors that
    score, including helpers.
    """

    scored: int = 0
    timeouts: int = 0
    kills: int = 0
    rechecked: int = 0
    false_kills: int = 0
    second_verdicts: Mapping[str, int] = field(default_factory=dict)
    flips: Mapping[str, int] = field(default_factory=dict)
    actors: int = 1

    # Second verdicts of one scorer say nothing about responses that wait for their first verdict.
    TICKING: ClassVar[frozenset[str]] = ActorStatus.TICKING | {"second_verdicts", "flips", "actors"}

    @property
    def progress(self) -> Mapping[str, object]:
        """The fields of the status, by name, that change only when the actor does work."""
        return {
            "scored": self.scored,
            "timeouts": self.timeouts,
            "kills": self.kills,
            "rechecked": self.rechecked,
            "false_kills": self.false_kills,
        }

    @property
    def made(self) -> float:
        """Number of responses that the reward actor has scored."""
        return float(self.scored)

    @property
    def line(self) -> str:
        """The actor's status as one line for people."""
        by = f" by {self.actors} reward actors" if self.actors > 1 else ""
        late = f", {self.timeouts} timed out" if self.timeouts else ""
        if twice := sum(self.second_verdicts.values()):
            late += f", {sum(self.flips.values())} of {twice} flipped when judged again"
        if not self.kills:
            return f"{self.scored} scored{by}{late}"
        checked = f", {self.false_kills} of {self.rechecked} rechecked wrongly" if self.rechecked else ""
        return f"{self.scored} scored{by}{late}, {self.kills} test cases killed early{checked}"
