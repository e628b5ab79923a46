"""Starts and watches the three stages of a run (rollout, reward and train) for the run's supervisor process. A stage
consists of a Prefect flow run and a Ray actor.

A stage is restarted if the process of its flow run was killed, or if the flow has not restarted a lost actor for
`UNATTENDED_SECONDS`. The new flow run uses the actors that are still alive. If a stage's flow run *failed*, the whole
run ends. A restarted supervisor continues with the stages of the dead supervisor.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID, uuid4

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State, StateType
from prefect.runtime import flow_run
from prefect.states import Running

from rollflow.flows.keepalive.prestart import begin_actors
from rollflow.flows.keepalive.restarts import RecoveryReporter, Restarts, RestartsExhausted, first_line
from rollflow.flows.ray_cluster import cluster
from rollflow.flows.ray_cluster.actor_process import explain_lost_call
from rollflow.flows.registration.prefect_api import (
    cancel_flow_run,
    open_client,
    reason_of,
    start,
    states_of,
    unfinished_runs,
)
from rollflow.flows.steps import build_tags, create_stand_in, run_title
from rollflow.flows.views.status import StageStatus
from rollflow.storage.errors import RollflowError, Unreachable
from rollflow.storage.run_records.usage import CpuUsage
from rollflow.tasks.actors.channel import CHANNEL, start_channel
from rollflow.tasks.actors.learner import LEARNER
from rollflow.tasks.actors.lease import Lease
from rollflow.tasks.actors.placement import actor_options
from rollflow.tasks.actors.reward import REWARD
from rollflow.tasks.actors.reward_models import model_names
from rollflow.tasks.actors.rollout import ROLLOUT
from rollflow.tasks.actors.run_engines import EVALUATION, engine_name
from rollflow.tasks.actors.statuses import ActorStatus, LearnerStatus, RewardStatus, RolloutStatus
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.actor_warnings import ActorWarning

ACTORS = {"rollout": ROLLOUT, "reward": REWARD, "train": LEARNER}
STATE_SECONDS = 2.0  # Seconds between two reads of the states of the stages' flow runs.
STATUS_SECONDS = 10.0
PING_SECONDS = 5.0  # Seconds that the channel actor may take to answer a ping. A dead actor is noticed immediately.
START_SECONDS = 300.0
END_SECONDS = 120.0
# Longest time in seconds for which a stage's Ray actor may be silent. Starting an inference engine takes less time.
UNATTENDED_SECONDS = 1200.0


def runner_deployment() -> str:
    """Return the name of the deployments that this Prefect runner serves."""
    return os.environ.get("ROLLFLOW_DEPLOYMENT", "rollflow")


@dataclass
class Stage:
    """The state of one stage of a run (rollout, reward or train), with its Prefect flow run and its Ray actor."""

    role: str
    run: UUID | None = None
    state: str = "Scheduled"  # Name of the flow run's state in Prefect.
    running: bool = False
    completed: bool = False
    seen: ActorStatus | None = None
    started: float = 0.0  # monotonic time at which the stage's flow run was created
    answered: float = 0.0  # monotonic time of the newest status of the stage's actor
    asked: Any = None  # Ray reference of the unfinished call for the status
    # Idempotency key of the stage's next flow run. Prefect creates only one flow run for each key.
    key: str = field(default_factory=lambda: uuid4().hex)

    @property
    def name(self) -> str:
        """The name of the stage in recovery records, such as "rollout stage"."""
        return f"{self.role} stage"


class Stages:
    """Starts, watches and ends the three stages of a run: rollout, reward and train."""

    def __init__(
        self,
        context: RunContext,
        address: str,
        log: Callable[[str], None],
        warn: Callable[[Sequence[ActorWarning]], None] = lambda warnings: None,
    ) -> None:
        """Start no flow run yet. `log` logs messages about stages, and `warn` logs the warnings of Ray actors."""
        self.context, self.address, self._log, self._warn = context, address, log, warn
        self.all = {role: Stage(role) for role in ACTORS}
        self.restarts = Restarts.of_run(context)
        self._reporter = RecoveryReporter(context, log)
        self.usage = CpuUsage()  # CPU usage of the actors
        self.paused = False  # True if a user paused the supervisor's flow run
        self._own = [UUID(flow_run.id)] if flow_run.id else []
        self._looked = 0.0
        self._channel: Any = None
        self._begun: list[Any] = []

    def start(self) -> None:
        """Create the flow runs of the three stages, except those that an earlier supervisor has created.

        If the run's configuration has changed, stages that use the older configuration are ended first.
        """
        limit = time.monotonic() + START_SECONDS
        self._end_older(limit)
        self._start_channel()
        self._begun = begin_actors(self.context, self.address)
        while True:
            try:
                with open_client() as client:
                    self._adopt(client)
                return
            except Unreachable:
                if time.monotonic() > limit:
                    raise
                time.sleep(STATE_SECONDS)

    def _end_older(self, limit: float) -> None:
        """End the stages (flow runs and Ray actors) that were started before the run's configuration was changed.

        Nothing is ended if the scheduler or the learner has already started with the new configuration.
        """
        state = self.context.log.state
        if len(state.configs) == 1 or state.claims.keys() & {"scheduler", "learner"}:
            return
        left = set[UUID]()
        while True:
            with contextlib.suppress(Unreachable), open_client() as client:
                left |= set(self._find_flow_runs(client).values())
                for run in left:
                    cancel_flow_run(client, run)
                states = states_of(client, list(left))
                if all(run not in states or states[run].is_final() for run in left):
                    break
            if time.monotonic() > limit:
                raise RestartsExhausted(
                    f"stages with the previous config did not end within {START_SECONDS:g} s; resume the run"
                )
            time.sleep(STATE_SECONDS)
        kill_actors(self.context)

    def _find_flow_runs(self, client: SyncPrefectClient) -> dict[str, UUID]:
        """Return the Prefect flow runs of the three stages that have not ended and are not being cancelled."""
        there = (run for run in unfinished_runs(client, runner_deployment()) if run.state_type != StateType.CANCELLING)
        ours = (run for run in there if run.parameters.get("run") == self.context.uri)
        return {role: run.id for run in ours for role in ACTORS if self._tags(role)[-1] in run.tags}

    def _adopt(self, client: SyncPrefectClient) -> None:
        under_way = self._find_flow_runs(client)
        for stage in self.all.values():
            stage.run, stage.started = under_way.get(stage.role), time.monotonic()
            if stage.run is None:
                self._start(stage, client)

    def _start(self, stage: Stage, client: SyncPrefectClient) -> None:
        """Create the Prefect flow run of a stage. A second call with the same key creates no second flow run."""
        parameters = {"run": self.context.uri, "ray_address": self.address}
        name = f"{run_title(self.context.config)} {stage.role}"
        stage.run = start(
            client,
            stage.role,
            runner_deployment(),
            parameters,
            name=name,
            key=stage.key,
            tags=self._tags(stage.role),
            parent=create_stand_in(client, name, stage.key),
        )
        stage.state, stage.running, stage.started = "Scheduled", False, time.monotonic()
        self.restarts.mark_launched(stage.name)

    def _tags(self, role: str) -> list[str]:
        """Return the tags of a stage's Prefect flow run. A restarted supervisor finds the flow run by its last tag."""
        return build_tags(self.context.config, self.context.run_id, role)

    def look(self) -> None:
        """Check the flow runs and Ray actors of the run's stages, and restart those that have crashed.

        Raises:
            RestartsExhausted: a stage failed, or was restarted too often.
        """
        self._look_after_channel()
        if time.monotonic() - self._looked < STATE_SECONDS:
            return
        self._looked = time.monotonic()
        for stage in self.all.values():
            self._poll_status(stage)
        try:
            with open_client() as client:
                states = states_of(client, [*self._own, *(stage.run for stage in self.all.values() if stage.run)])
                self._note_pause(states)
                for stage in self.all.values():
                    self._update_stage(stage, client, states)
        except Unreachable as error:
            self._log(f"{error}; the run continues meanwhile")

    def look_at_own(self) -> None:
        """Read, once the stages have ended, whether a user paused the supervisor's flow run."""
        with contextlib.suppress(Unreachable), open_client() as client:
            self._note_pause(states_of(client, self._own))

    def _note_pause(self, states: Mapping[UUID, State]) -> None:
        self.paused = any(states[own].is_paused() for own in self._own if own in states)

    def _update_stage(self, stage: Stage, client: SyncPrefectClient, states: Mapping[UUID, State]) -> None:
        if stage.run is None:
            if self.restarts.may_start(stage.name):
                self._start(stage, client)
            return
        state = states.get(stage.run)
        if state is None:
            return
        stage.state = state.name or state.type.value
        stage.running, stage.completed = state.is_running(), state.is_completed()
        if state.is_crashed():
            self._schedule_restart(stage, f"its flow run crashed: {reason_of(state.message).split('. ')[0]}")
        elif state.is_final() and not stage.completed:
            raise RestartsExhausted(f"the {stage.role} stage ended as {state.name}: {reason_of(state.message)}")
        elif state.is_paused():
            self._unpause(stage, client, stage.run)
        elif not state.is_final() and not stage.running:
            if time.monotonic() - stage.started > START_SECONDS:
                raise RestartsExhausted(f"no runner started the {stage.role} stage within {START_SECONDS:g} s")
        elif stage.running and self._is_unattended(stage):
            cancel_flow_run(client, stage.run)
            self._schedule_restart(stage, "its actor is gone, and its flow does not start a new actor")

    def _unpause(self, stage: Stage, client: SyncPrefectClient, run: UUID) -> None:
        """Restart a stage whose flow run a user paused, because a single stage cannot pause while its run continues."""
        client.set_flow_run_state(run, Running(), force=True)  # Without this, Prefect would not end the process.
        cancel_flow_run(client, run)
        self._log(f"the {stage.role} stage was paused and continues; to pause the run, pause the run's own flow run")
        self._schedule_restart(stage, "its flow run was paused")

    def _is_unattended(self, stage: Stage) -> bool:
        """Return True if the stage's Ray actor is silent for so long that its flow must have failed to restart it."""
        return time.monotonic() - max(stage.answered, stage.started) > UNATTENDED_SECONDS

    def _schedule_restart(self, stage: Stage, reason: str) -> None:
        self._reporter.report_restart(self.restarts.mark_down(stage.name, reason))
        # `_update_stage` creates the stage's next flow run after the pause.
        stage.run, stage.running, stage.key = None, False, uuid4().hex
        self._looked = 0.0

    def _poll_status(self, stage: Stage) -> None:
        """Read the status that the stage's Ray actor has sent, if any, and ask for the next one, without blocking."""
        if stage.asked is not None and not cluster.has_ended(stage.asked, 0):
            return
        asked, stage.asked = stage.asked, None
        try:
            if asked is not None:
                seen: ActorStatus = cluster.call_within(asked, STATUS_SECONDS, f"the status of {stage.role}")
                stage.seen = seen
                # If `attended` is false, the actor was created but no flow watches it yet; the stage's flow may hang.
                if seen.attended:
                    stage.answered = time.monotonic()
                self.usage.note(seen.costs)
                self._warn(seen.warned)
            stage.asked = cluster.find_actor(ACTORS[stage.role]).status.remote()
        except RollflowError:
            return  # The stage's Ray actor is starting or dead. The stage's flow restarts a dead actor.
        if stage.running:
            self._reporter.report_recovery(self.restarts.mark_up(stage.name))

    def _look_after_channel(self) -> None:
        """Restart the channel (the Ray actor that buffers trajectories) if it is dead."""
        outage = self.restarts.outage(CHANNEL)
        if outage and outage.launched is None:
            self._restart_channel()
            return
        try:
            if self._channel is None:
                patient = self.restarts.outage(CHANNEL) is None
                self._channel = cluster.find_actor(CHANNEL).ping.remote(PING_SECONDS if patient else 0.0)
            if why := explain_lost_call(self._channel):
                raise Unreachable(why)
            if cluster.has_ended(self._channel, 0):
                answered, self._channel = self._channel, None
                cluster.call_within(answered, STATUS_SECONDS, "the channel to answer")
                self._reporter.report_recovery(self.restarts.mark_up(CHANNEL))
        except RollflowError as error:
            self._channel = None
            self._reporter.report_restart(self.restarts.mark_down(CHANNEL, first_line(error), "a refill from storage"))
            cluster.kill_named([CHANNEL])
            self._restart_channel()

    def _restart_channel(self) -> None:
        """Restart the channel (the Ray actor that buffers trajectories) if the pause before its restart is over."""
        if self.restarts.may_start(CHANNEL):
            self._start_channel()
            self.restarts.mark_launched(CHANNEL)

    def _start_channel(self) -> None:
        """Start the channel, the Ray actor that buffers trajectories. The channel does not retry failed reads of the
        storage.
        """
        newest, hasty = self.context.policies.newest(), replace(self.context, patience=None)
        config = self.context.config
        placed = actor_options(config, "scheduler", 0.0)
        start_channel(hasty.store, config.capacity, newest, Lease.of(self.context), placed)

    def have_ended(self, *roles: str) -> bool:
        """Return whether the given stages, such as "rollout" and "train", have completed."""
        return all(self.all[role].completed for role in roles)

    def end(self) -> None:
        """End the reward stage and then every Ray actor of the run, after rollout and training have ended."""
        limit = time.monotonic() + END_SECONDS
        while not self.have_ended(*ACTORS):
            if time.monotonic() > limit:
                states = {stage.role: stage.state for stage in self.all.values()}
                raise RestartsExhausted(f"stages did not end within {END_SECONDS:g} s; their states: {states}")
            self._finish_reward()
            time.sleep(0.2)
            self._looked = 0.0
            self.look()
        kill_actors(self.context)
        self._reporter.notes.flush()

    def clear(self) -> None:
        """End the stages that a dead supervisor had started, if the last policy version is already trained."""
        left: dict[str, UUID] = {}
        with contextlib.suppress(Unreachable), open_client() as client:
            left = self._find_flow_runs(client)
            for role, run in left.items():
                self.all[role].run = run
            limit = time.monotonic() + END_SECONDS
            while left and time.monotonic() < limit:
                if "reward" in left:
                    self._finish_reward()
                time.sleep(STATE_SECONDS)
                states = states_of(client, list(left.values()))
                left = {role: run for role, run in left.items() if run in states and not states[run].is_final()}
        self.abandon()
        for stage in self.all.values():
            stage.completed = stage.role not in left
            stage.state = "Completed" if stage.completed else "Cancelled"

    def _finish_reward(self) -> None:
        try:
            actor = cluster.find_actor(REWARD)
            cluster.call_within(actor.finish.remote(), STATUS_SECONDS, "the reward stage to take note of the end")
        except RollflowError as error:
            self._log(f"the reward stage does not answer yet: {error}")

    def abandon(self) -> None:
        """Cancel the flow runs of all stages and kill the run's Ray actors."""
        try:
            with open_client() as client:
                for stage in self.all.values():
                    if stage.run is not None:
                        cancel_flow_run(client, stage.run)
        except Unreachable as error:
            self._log(f"{error}; the stages of the run are not cancelled")
        finally:
            kill_actors(self.context)

    def statuses(self) -> dict[str, StageStatus]:
        """Return the status of each stage for the live view."""
        return {
            role: StageStatus(stage.state, stage.seen.line, stage.seen.idle) if stage.seen else StageStatus(stage.state)
            for role, stage in self.all.items()
        }

    @property
    def rollout(self) -> RolloutStatus:
        """The last status of the rollout actor."""
        seen = self.all["rollout"].seen
        return seen if isinstance(seen, RolloutStatus) else RolloutStatus()

    @property
    def reward(self) -> RewardStatus:
        """The last status of the reward actor."""
        return seen if isinstance(seen := self.all["reward"].seen, RewardStatus) else RewardStatus()

    @property
    def learner(self) -> LearnerStatus:
        """The last status of the learner."""
        seen = self.all["train"].seen
        return seen if isinstance(seen, LearnerStatus) else LearnerStatus()


def kill_actors(context: RunContext) -> None:
    """Kill every Ray actor of a run. The child processes of an actor end with the actor."""
    most = max(config.engine.replicas for config in context.all_configs)
    engines = [engine_name(number) for number in (EVALUATION, *range(most))]
    models = {name for config in context.all_configs for name in model_names(config)}
    cluster.kill_named([*ACTORS.values(), *engines, *sorted(models), CHANNEL])
