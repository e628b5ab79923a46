"""Keeps the Ray actors of a run's reward models alive. Each actor of a reward model is watched in a thread of its own.

    reward actor's keeper --after each status--> check: did a keeper give up?
    model 0's keeper   } started before the reward actor's keeper, and ended after it
    model 1's keeper   }

A reward model that restarts delays only the responses that it scores.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any

from rollflow.flows.keepalive.actors import ActorKeeper, WatchedActor
from rollflow.flows.ray_cluster import cluster
from rollflow.storage.errors import RollflowError
from rollflow.tasks.actors.reward_models import model_names, start_model
from rollflow.tasks.actors.statuses import RewardStatus
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.reward_models import list_models

FINISH_SECONDS = 30.0  # Longest time in seconds until all reward models have ended.


class ModelKeepers:
    """Watches and restarts all copies of a run's reward models."""

    def __init__(self, context: RunContext, log: Callable[[str], None]) -> None:
        """Start a thread that watches each copy of a reward model."""
        self._context, self._log = context, log
        self._failures: list[Exception] = []
        self._names = model_names(context.config)
        self._threads = [self._start_keeper(name, *place) for name, place in self._names.items()]

    def _start_keeper(self, name: str, section: str, number: int) -> threading.Thread:
        model = WatchedActor[RewardStatus](
            name=name,
            start=partial(start_model, self._context, section, number),
            redone=lambda status: ("the responses that it had not scored yet", 0),
            patience=list_models(self._context.config)[section].deadline_seconds,
        )
        keeper = ActorKeeper(self._context, model, self._log)
        # A daemon thread does not delay the end of a flow that has failed.
        thread = threading.Thread(target=copy_context().run, args=(self._keep, keeper), name=name, daemon=True)
        thread.start()
        return thread

    def _keep(self, keeper: ActorKeeper[RewardStatus]) -> None:
        try:
            keeper.run()
        except Exception as error:  # noqa: BLE001 - `check` raises it in the flow's thread
            self._failures.append(error)

    def check(self, *_: Any) -> None:
        """Raise the error of a reward model that could not be restarted."""
        if self._failures:
            raise self._failures[0]

    def finish(self) -> None:
        """End the reward models and their watching threads after the last response was scored, so that finished
        recoveries are recorded.
        """
        limit, calls = time.monotonic() + FINISH_SECONDS, dict[str, Any]()
        for name in self._names:
            with contextlib.suppress(RollflowError):  # A dead copy of a reward model has no response left to score.
                calls[name] = cluster.find_actor(name).finish.remote()
        for name, call in calls.items():
            try:
                cluster.call_within(call, max(0.0, limit - time.monotonic()), f"{name} to take note of the end")
            except RollflowError as error:
                self._log(f"{name} does not answer at the run's end: {error}")
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))
