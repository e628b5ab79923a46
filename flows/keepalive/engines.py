"""Keeps the Ray actors of a run's inference engines alive: starts them, checks their health and restarts them.

    missing --> starting --> ready --> joining the scheduler --> serving --dead or silent--> missing

No function of this module waits for a single engine. The scheduler begins with the first ready engine, and the other
engines join later. While an engine restarts, the other engines serve and take over its requests. A separate engine for
evaluations is started when the first evaluation begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollflow.flows.keepalive.gpus import gpu_shares
from rollflow.flows.keepalive.restarts import RecoveryReporter, Restarts, RestartsExhausted, first_line
from rollflow.flows.keepalive.vitals import Vitals
from rollflow.flows.ray_cluster import cluster
from rollflow.flows.ray_cluster.actor_process import explain_lost_call
from rollflow.storage.errors import ConfigError, EngineFailed, StoreFailed, Unreachable
from rollflow.tasks.actors.run_engines import EVALUATION, engine_name, start_engine
from rollflow.tasks.actors.statuses import RolloutStatus
from rollflow.tasks.run.context import RunContext

START_SECONDS = 900.0
START_POLL_SECONDS = 0.1


@dataclass
class _Engine:
    """The state of one inference engine, with references to the unfinished Ray calls to the engine's actor."""

    number: int
    actor: Any = None
    joined: bool = False  # True if the current scheduler uses the engine
    starting: Any = None  # Ray reference of the unfinished call to the engine's `start` method.
    joining: Any = None  # Ray reference of the unfinished call to the scheduler's `join` method.
    health: Any = None  # Ray reference of the last health check of the engine.
    # Reason why the scheduler had already removed the engine when the health check began, or None.
    failure: str | None = None
    began: float = 0.0  # Monotonic time at which the engine's `start` method was called.
    asked: float = 0.0
    vitals: Vitals | None = None  # Watches the process of an engine that does not answer.

    @property
    def name(self) -> str:
        return engine_name(self.number)

    @property
    def ready(self) -> bool:
        return self.actor is not None and self.starting is None

    def forget(self) -> None:
        """Drop the references to the engine's Ray actor and to all unfinished calls."""
        self.actor = self.starting = self.joining = self.health = self.failure = None
        self.joined = False


class Engines:
    """All inference engines of a run."""

    def __init__(self, context: RunContext, log: Callable[[str], None]) -> None:
        self.context, self._log = context, log
        self.restarts = Restarts.of_run(context)
        self.reporter = RecoveryReporter(context, log)
        self._answer = context.config.recovery.answer_seconds
        # Longest time in seconds for which an engine may compute without answering a call.
        self._patience = context.config.rollout.patience_seconds
        self._gpus = gpu_shares(context.config).engine
        self._engines = [_Engine(number) for number in range(context.config.engine.replicas)]
        own = context.config.evaluation_engine(on_cpu=not self._gpus) is not None
        self._evaluating = [_Engine(EVALUATION)] if own else []

    def start(self) -> None:
        """Start all inference engines that are not running, in parallel. Return as soon as one inference engine is
        ready.
        """
        for engine in (*self._engines, *self._evaluating):
            self._reconnect(engine)
        while not any(engine.ready for engine in self._engines):
            self.look(None, RolloutStatus())
            time.sleep(START_POLL_SECONDS)

    def look(self, scheduler: Any, status: RolloutStatus) -> None:
        """Advance every inference engine by one step: start the engine, add it to the scheduler, or check its health.

        Raises:
            RestartsExhausted: an engine was restarted too often.
            ConfigError: the configuration prevents an engine from starting, so a restart would not help.
            StoreFailed: the run's storage rejects writes, so a restart would not help.
        """
        due = [engine for engine in self._evaluating if engine.actor is not None or status.evaluations_due]
        for engine in (*self._engines, *due):
            try:
                self._step(engine, scheduler, status)
            except (ConfigError, StoreFailed, RestartsExhausted):
                raise  # A restart would not help, because the user must act first.
            except Exception as error:  # noqa: BLE001 - the supervisor restarts it, whatever ended it
                self._schedule_restart(engine, first_line(error))

    def _step(self, engine: _Engine, scheduler: Any, status: RolloutStatus) -> None:
        if engine.actor is None:
            if self.restarts.may_start(engine.name):
                self._start(engine)
        elif engine.starting is not None:
            self._check_start(engine)
        elif engine.joining is not None:
            self._check_join(engine)
        elif scheduler is not None and not engine.joined:
            engine.joining = scheduler.join.remote(engine.number)
        else:
            self._check_health(engine, status.failed.get(engine.number))

    def _check_start(self, engine: _Engine) -> None:
        if not cluster.has_ended(engine.starting, 0):
            if why := explain_lost_call(engine.starting):
                raise EngineFailed(why)
            if time.monotonic() - engine.began > START_SECONDS:
                raise EngineFailed(f"{engine.name} did not start within {START_SECONDS:g} s")
            return
        starting, engine.starting = engine.starting, None
        cluster.call_within(starting, self._answer, f"{engine.name} to start")
        self._log(f"{engine.name} is ready")
        self.restarts.note_progress(engine.name, 0.0)  # The engine serves requests once the scheduler has added it.

    def _check_join(self, engine: _Engine) -> None:
        if not cluster.has_ended(engine.joining, 0):
            return
        joining, engine.joining = engine.joining, None
        try:
            cluster.call_within(joining, self._answer, f"the scheduler to take {engine.name}")
        # The scheduler died; the next call of `look` adds the engine to the new scheduler.
        except Unreachable as error:
            self._log(f"{engine.name}: {first_line(error)}")
            return
        engine.joined = True
        self.reporter.report_recovery(self.restarts.mark_up(engine.name))

    def _check_health(self, engine: _Engine, failure: str | None) -> None:
        """Check the health of an inference engine, with one call at a time. `failure` is the reason why the scheduler
        has removed the engine, or None.
        """
        # A health check that was sent before the engine failed does not show whether the engine works now.
        if engine.health is None or (failure and not engine.failure):
            engine.health, engine.asked, engine.failure = engine.actor.health.remote(), time.monotonic(), failure
            engine.vitals = Vitals(engine.name, engine.actor, self._answer)
        elif cluster.has_ended(engine.health, 0):
            answered, engine.health = engine.health, None
            try:
                cluster.call_within(answered, self._answer, f"the health of {engine.name}")
            except EngineFailed as error:  # The Ray actor of the engine lives, and can start a new engine.
                self._schedule_restart(engine, failure or first_line(error), within=True)
            else:
                if failure:
                    raise EngineFailed(failure)
        elif time.monotonic() - engine.asked > self._patience:
            raise EngineFailed(
                f"{engine.name} did not answer for {self._patience:g} s, the limit of recovery.answer_seconds"
            )
        elif engine.vitals:
            engine.vitals.check_actor()

    def _schedule_restart(self, engine: _Engine, reason: str, *, within: bool = False) -> None:
        """Schedule a restart of the inference engine after a pause. If `within` is true, the engine's Ray actor stays
        alive and restarts the engine. If `within` is false, the engine's Ray actor is killed and replaced.
        """
        self.reporter.report_restart(
            self.restarts.mark_down(engine.name, reason, "the engine's start; requests continue on other engines")
        )
        if not within:
            cluster.kill_named([engine.name])
        engine.forget()

    def _start(self, engine: _Engine) -> None:
        engine.actor = start_engine(self.context, engine.number, self._gpus)
        engine.starting, engine.began = engine.actor.start.remote(), time.monotonic()
        self.restarts.mark_launched(engine.name)

    def _reconnect(self, engine: _Engine) -> None:
        """Find the Ray actor of an inference engine that is already running or starting, after this flow or the
        scheduler was restarted.
        """
        known = engine.actor is not None
        engine.forget()
        try:
            engine.actor = cluster.find_actor(engine.name)
            engine.starting, engine.began = engine.actor.start.remote(), time.monotonic()
        except Unreachable as error:
            if known:  # The engine's Ray actor died together with the scheduler.
                self._schedule_restart(engine, first_line(error))
