"""Defines the status of a run, which the live view and `rollflow status` show and `status.json` stores. Unknown keys in
`status.json` are ignored, so that an older rollflow can show a newer run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args
from uuid import UUID

from rollflow.storage.errors import Corrupt, Missing, RollflowError
from rollflow.tasks.actors.lease import STATUS

if TYPE_CHECKING:
    from rollflow.tasks.run.context import RunContext

Phase = Literal["starting", "cold start", "training", "evaluating", "ending", "paused", "done", "failed", "stopped"]
ENDED: tuple[Phase, ...] = ("done", "failed", "stopped")
# Names of the states of a stage that has ended or is ending.
STAGE_ENDS = ("completed", "failed", "crashed", "cancelled", "cancelling")


@dataclass(frozen=True, slots=True)
class StageStatus:
    """The status of one stage of a run (rollout, reward or train): its state, a note, and the share (0 to 1) of time in
    which the stage was idle.
    """

    state: str
    note: str = ""
    idle: float = 0.0


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a training run at one time.

    `reward` is the mean training reward over the newest policy versions, and `rewards` has the mean reward of each of
    them, oldest first. `accuracy` has pairs `(version, held-out accuracy)` of policy version 0 and of the newest
    evaluated versions. `pass_at` maps k to the pass@k of the newest held-out evaluation. `pass_at` is empty if each
    prompt has one sample. `staleness` counts trained groups of responses by the staleness of their oldest response, and
    `domains` counts trained groups by prompt domain. `shares` has the configured share of each prompt domain. `skipped`
    has the share of solved questions that each prompt domain skips in its newest epoch. `tokens_per_second` is a mean
    over the newest policy versions, and `tokens_per_second_total` is a mean over the whole run. `buffer_groups` is the
    number of response groups that are ready for the learner, and `buffer_capacity` is the largest possible number.
    `alarms` has a sentence for each sign of reward hacking in the newest policy versions, and for each scorer whose
    verdicts flip. `sandboxes` has the counts of each kind of sandbox that the run has used, and `environments` has
    those of each kind of environment with worker processes or tools. `flow_run` is the id of the supervising Prefect
    flow run that wrote the status.
    """

    run_id: str
    phase: Phase = "starting"
    version: int = 0
    versions: int = 0
    reward: float | None = None
    rewards: tuple[float, ...] = ()
    accuracy: tuple[tuple[int, float], ...] = ()
    pass_at: Mapping[int, float] = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)
    domains: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, float] = field(default_factory=dict)
    tokens_per_second: float = 0.0
    tokens_per_second_total: float = 0.0
    buffer_groups: int = 0
    buffer_capacity: int = 0
    in_flight_groups: int = 0
    stages: Mapping[str, StageStatus] = field(default_factory=dict)
    sandboxes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    environments: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    alarms: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    flow_run: str = ""

    @property
    def ended(self) -> bool:
        """True if the run has ended. The status of an ended run does not change."""
        return self.phase in ENDED

    def at_end(self, phase: Phase, *messages: str) -> RunStatus:
        """Return a copy of this status with the final phase `phase`, in which all stages of the run have ended."""
        stages = {
            role: stage if stage.state.lower() in STAGE_ENDS else replace(stage, state="Cancelled")
            for role, stage in self.stages.items()
        }
        more = [message for message in messages if message not in self.messages]
        return replace(self, phase=phase, stages=stages, messages=(*self.messages, *more))

    def to_json(self) -> str:
        """Return the status of the run as one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RunStatus:
        """Return the status of a run from JSON text that `to_json` has written.

        Raises:
            ValueError: the text is not the JSON object of a status.
        """
        raw: Any = json.loads(text)
        if not isinstance(raw, dict) or "run_id" not in raw:
            raise ValueError("this object is not the status of a run, because it has no run_id")
        known = {key: value for key, value in raw.items() if key in {f.name for f in fields(cls)}}
        if known.get("phase", "starting") not in get_args(Phase):
            raise ValueError(f"this object is not the status of a run, because its phase {known['phase']!r} is unknown")
        known["rewards"] = tuple(known.get("rewards", ()))
        known["alarms"] = tuple(known.get("alarms", ()))
        known["messages"] = tuple(known.get("messages", ()))
        known["accuracy"] = tuple((int(version), float(value)) for version, value in known.get("accuracy", ()))
        known["pass_at"] = {int(k): float(share) for k, share in known.get("pass_at", {}).items()}
        known["staleness"] = {int(key): int(count) for key, count in known.get("staleness", {}).items()}
        known["stages"] = {name: _read_stage(value) for name, value in known.get("stages", {}).items()}
        return cls(**known)


def _read_stage(raw: Mapping[str, Any]) -> StageStatus:
    return StageStatus(**{key: value for key, value in raw.items() if key in {f.name for f in fields(StageStatus)}})


def read_status(context: RunContext, flow_run: UUID | None = None) -> RunStatus | None:
    """Return the run's status from `status.json`. Return None if the status was written by a supervising flow run other
    than `flow_run`.

    A damaged `status.json` gives None, too, because the supervising flow run replaces the file within a second.
    """
    try:
        status = RunStatus.from_json(context.store.get(STATUS))
    except (Missing, Corrupt, ValueError, TypeError, AttributeError):
        return None
    return status if flow_run is None or status.flow_run == str(flow_run) else None


def record_end(context: RunContext, phase: Phase, why: str) -> None:
    """Store in `status.json` that the run has ended, unless this is stored already."""
    with contextlib.suppress(RollflowError, OSError):
        last = read_status(context) or RunStatus(context.run_id, versions=context.config.versions)
        if not last.ended:
            context.store.put(STATUS, last.at_end(phase, why).to_json().encode())
