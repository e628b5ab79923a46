"""The status of a run at one moment: the value behind the live view, `rollflow status` and `status.json`.

`from_json(to_json(status)) == status`. The reader ignores unknown keys in the JSON, so that an older rollflow can show
a newer run.
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
STAGE_ENDS = ("completed", "failed", "crashed", "cancelled", "cancelling")  # states of a stage that has ended


@dataclass(frozen=True, slots=True)
class StageStatus:
    """One stage (rollout, reward, train): its state, a note, and the share (0 to 1) of its time in which it was
    idle.
    """

    state: str
    note: str = ""
    idle: float = 0.0


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run at one moment.

    `reward` is the recent mean training reward, and `rewards` holds the mean reward of each of the newest versions
    (oldest first). `accuracy` holds the held-out points `(version, accuracy)` of version 0 and of the newest evaluated
    versions. `pass_at` holds pass@k by k in the newest evaluation (empty with one sample for each prompt). `staleness`
    counts trained groups by the staleness of their oldest response, `domains` counts trained groups by domain, and
    `shares` has the domains' configured shares. `tokens_per_second` covers the newest versions,
    `tokens_per_second_total` the whole run. `buffer_groups` of `buffer_capacity` groups are ready for the learner.
    `flow_run` is the supervisor that wrote the status.
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
    tokens_per_second: float = 0.0
    tokens_per_second_total: float = 0.0
    buffer_groups: int = 0
    buffer_capacity: int = 0
    in_flight_groups: int = 0
    stages: Mapping[str, StageStatus] = field(default_factory=dict)
    seconds: float = 0.0
    messages: tuple[str, ...] = ()
    flow_run: str = ""

    @property
    def ended(self) -> bool:
        """True if the run has ended, so that its status will not change."""
        return self.phase in ENDED

    def at_end(self, phase: Phase, *messages: str) -> RunStatus:
        """Return a copy of this status in which the run has ended as `phase`, and all stages have ended."""
        stages = {
            role: stage if stage.state.lower() in STAGE_ENDS else replace(stage, state="Cancelled")
            for role, stage in self.stages.items()
        }
        more = [message for message in messages if message not in self.messages]
        return replace(self, phase=phase, stages=stages, messages=(*self.messages, *more))

    def to_json(self) -> str:
        """Return the status as one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RunStatus:
        """Return the status that `to_json` wrote.

        Raises:
            ValueError: the text is not such a JSON object.
        """
        raw: Any = json.loads(text)
        if not isinstance(raw, dict) or "run_id" not in raw:
            raise ValueError("the object is not the status of a run: it has no run_id")
        known = {key: value for key, value in raw.items() if key in {f.name for f in fields(cls)}}
        if known.get("phase", "starting") not in get_args(Phase):
            raise ValueError(f"the object is not the status of a run: its phase is {known['phase']!r}")
        known["rewards"] = tuple(known.get("rewards", ()))
        known["messages"] = tuple(known.get("messages", ()))
        known["accuracy"] = tuple((int(version), float(value)) for version, value in known.get("accuracy", ()))
        known["pass_at"] = {int(k): float(share) for k, share in known.get("pass_at", {}).items()}
        known["staleness"] = {int(key): int(count) for key, count in known.get("staleness", {}).items()}
        known["stages"] = {name: _read_stage(value) for name, value in known.get("stages", {}).items()}
        return cls(**known)


def _read_stage(raw: Mapping[str, Any]) -> StageStatus:
    return StageStatus(**{key: value for key, value in raw.items() if key in {f.name for f in fields(StageStatus)}})


def read_status(context: RunContext, flow_run: UUID | None = None) -> RunStatus | None:
    """Return the run's `status.json`, or None if another supervisor than `flow_run` wrote it.

    A damaged status counts as missing, because the supervisor writes the next status within a second.
    """
    try:
        status = RunStatus.from_json(context.store.get(STATUS))
    except (Missing, Corrupt, ValueError, TypeError, AttributeError):
        return None
    return status if flow_run is None or status.flow_run == str(flow_run) else None


def record_end(context: RunContext, phase: Phase, why: str) -> None:
    """Store that the run has ended, unless the supervisor has stored an end; ignore a store that fails."""
    with contextlib.suppress(RollflowError, OSError):
        last = read_status(context) or RunStatus(context.run_id, versions=context.config.versions)
        if not last.ended:
            context.store.put(STATUS, last.at_end(phase, why).to_json().encode())
