"""Decides whether a Ray actor that does not answer is dead, stuck or busy, by asking Ray and watching the actor's
process.

    not created yet             the actor is starting; if its worker died before it registered, the error says so
    its process computes        the actor is busy: the machine is short of CPUs, or a library holds Python's lock
    its process is idle         the actor is stuck once this lasts as long as an actor may be silent

A busy actor may still be stuck: `keepalive.actors` restarts an actor that makes no progress for `patience` seconds.
"""

from __future__ import annotations

import time
from typing import Any

from rollflow.flows.ray_cluster.actor_process import explain_lost_actor, find_actor_process
from rollflow.storage.errors import Unreachable

START_SECONDS = 900.0  # Longest time in seconds that the creation of a Ray actor may take.
LEAST_SHARE = 0.02  # Smallest share of a CPU's time that a computing process uses; an idle process uses less.


class Vitals:
    """Checks whether a Ray actor that does not answer is dead, stuck or busy."""

    def __init__(self, name: str, actor: Any, silent_seconds: float) -> None:
        """Set `silent_seconds`, the longest time for which the actor may neither answer nor compute."""
        self._name, self._id, self._longest = name, actor._actor_id, silent_seconds
        self._began = time.monotonic()
        # The start of the observed interval: its monotonic time, and the process's CPU seconds at that time.
        self._window: tuple[float, float] | None = None

    def note_answer(self) -> None:
        """Record that the actor has just answered a call."""
        self._began, self._window = time.monotonic(), None

    def check_actor(self) -> bool:
        """Decide whether an actor that does not answer is still being created, busy, dead or stuck. Return True if Ray
        is still creating the actor.

        Raises:
            Unreachable: the actor is dead or stuck; the message says how this was found.
        """
        if why := explain_lost_actor(self._id):
            raise Unreachable(f"cannot wait any longer for {self._name}: {why}")
        now = time.monotonic()
        if self._window and now - self._window[0] < self._longest:
            return False
        found = find_actor_process(self._id)
        if found is None or not found.created:
            if now - self._began > START_SECONDS:
                raise Unreachable(f"the process of {self._name} did not start within {START_SECONDS:g} s")
            return True
        used, window = found.cpu_seconds() or 0.0, self._window
        if window and used - window[1] < LEAST_SHARE * (now - window[0]):
            raise Unreachable(
                f"the process of {self._name} hangs: it uses no CPU time, but has not answered a status call for "
                f"{now - self._began:.0f} s"
            )
        self._window = now, used
        return False
