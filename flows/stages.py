"""The three stages as the supervisor sees them: child flow runs, and the actors behind them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment

from rollflow.flows import cluster
from rollflow.flows.status import StageStatus
from rollflow.flows.supervision import StageFailed
from rollflow.storage.errors import RollflowError
from rollflow.storage.ray_channel import CHANNEL
from rollflow.tasks.learners.actor import LEARNER
from rollflow.tasks.rewards.actor import REWARD
from rollflow.tasks.rollout.actor import ROLLOUT, engine_name
from rollflow.tasks.run import RunContext

ACTORS = {"rollout": ROLLOUT, "reward": REWARD, "train": LEARNER}
STATE_SECONDS = 2.0  # how often the states of the child runs are read
STATUS_SECONDS = 10.0
START_SECONDS = 300.0
END_SECONDS = 120.0


def deployment() -> str:
    """The name under which this runner serves the flows."""
    return os.environ.get("ROLLFLOW_DEPLOYMENT", "rollflow")


@dataclass
class Stages:
    """Started, watched and ended together. `idle` and `notes` keep the last that was seen."""

    context: RunContext
    address: str
    attempt: str
    runs: dict[str, UUID] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    seen: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _looked: float = 0.0
    _started: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Start the three child flow runs (each exactly once for this attempt)."""
        for role in ACTORS:
            run = run_deployment(
                name=f"{role}/{deployment()}",
                parameters={"run": self.context.uri, "ray_address": self.address},
                timeout=0,
                idempotency_key=f"{self.context.run_id}:{role}:{self.attempt}",
                flow_run_name=f"{role} of {self.context.run_id}",
            )
            self.runs[role] = run.id  # type: ignore[union-attr]
            self.states[role] = "Scheduled"

    def look(self) -> None:
        """Read the stages' states and statuses.

        Raises:
            StageFailed: one of them ended other than completed; the message has its reason.
        """
        for role, name in ACTORS.items():
            if self.states[role] == "Running":
                self._ask(role, name)
        if time.monotonic() - self._looked < STATE_SECONDS:
            return
        self._looked = time.monotonic()
        with get_client(sync_client=True) as client:
            for role, run in self.runs.items():
                state = client.read_flow_run(run).state
                if state is None:
                    continue
                self.states[role] = state.name or state.type.value
                if state.is_final() and not state.is_completed():
                    raise StageFailed(f"the {role} stage ended {state.name}: {reason_of(state.message)}")
                if not state.is_final() and not state.is_running() and self._waited() > START_SECONDS:
                    raise StageFailed(f"waited {START_SECONDS:g} s for a runner to start the {role} stage")

    def _waited(self) -> float:
        return time.monotonic() - self._started

    def _ask(self, role: str, name: str) -> None:
        try:
            actor = cluster.actor(name, self.context.run_id)
            self.seen[role] = cluster.call(actor.status.remote(), STATUS_SECONDS, f"the status of {role}")
        except RollflowError:
            return  # not up yet, or ended; the stage's own flow says which

    def ended(self, *roles: str) -> bool:
        """Whether these stages completed."""
        return all(self.states[role] == "Completed" for role in roles)

    def end(self) -> None:
        """After rollout and train have ended: end the reward stage, then every actor."""
        actor = cluster.actor(REWARD, self.context.run_id)
        cluster.call(actor.finish.remote(), STATUS_SECONDS, "the reward stage to take note of the end")
        limit = time.monotonic() + END_SECONDS
        while not self.ended(*ACTORS):
            if time.monotonic() > limit:
                raise StageFailed(f"waited {END_SECONDS:g} s for the stages to end; they are {self.states}")
            time.sleep(0.2)
            self._looked = 0.0
            self.look()
        kill_actors(self.context)

    def abandon(self) -> None:
        """Something failed: kill the run's actors and cancel the stages that still run."""
        kill_actors(self.context)
        cancel(self.runs.values())

    def statuses(self) -> dict[str, StageStatus]:
        """For the live view."""
        return {role: self._status(role) for role in ACTORS}

    def _status(self, role: str) -> StageStatus:
        seen = self.seen.get(role, {})
        return StageStatus(self.states.get(role, "Waiting"), note_of(role, seen), float(seen.get("idle", 0.0)))


def kill_actors(context: RunContext) -> None:
    """End every actor of a run; the processes they started end with them."""
    engines = [engine_name(i) for i in range(context.config.engine.replicas)]
    cluster.kill_named([*ACTORS.values(), *engines, CHANNEL], context.run_id)


def cancel(runs: Any) -> None:
    """Cancel flow runs that have not ended; their runner then ends their processes."""
    from prefect.states import Cancelling

    with get_client(sync_client=True) as client:
        for run in runs:
            state = client.read_flow_run(run).state
            if state is None or not state.is_final():
                client.set_flow_run_state(run, Cancelling())


def reason_of(message: str | None) -> str:
    """A flow run's reason without Prefect's introduction; of a traceback its last line."""
    lines = (message or "").strip().splitlines() or ["no reason was given"]
    return lines[-1].removeprefix("Flow run encountered an exception: ").strip()


def note_of(role: str, seen: Mapping[str, Any]) -> str:
    """One line of a stage's status."""
    if not seen:
        return ""
    match role:
        case "rollout" if seen["waits_for"]:
            return f"waits for {seen['waits_for']}"
        case "rollout":
            discards = sum(seen["discards"].values())
            lost = f", {discards} discarded" if discards else ""
            return f"version {seen['version']}, {seen['trajectories']} trajectories{lost}"
        case "reward":
            late = f", {seen['timeouts']} timed out" if seen["timeouts"] else ""
            return f"{seen['scored']} scored{late}"
        case _:
            return str(seen["note"])
