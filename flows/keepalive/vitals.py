"""Decides from outside whether a silent actor is dead, stuck or busy, by asking Ray and watching its process.

    not created yet             it is starting; if its worker died before it registered, the error says so
    its process computes        it is busy: on a machine short of CPUs, or in a library that holds Python's lock
    its process is idle         it is stuck once that lasts as long as an actor may be silent

A busy actor may still be stuck: `keepalive.actors` restarts one that makes no progress for its patience.
"""

from __future__ import annotations

import time
from typing import Any

from rollflow.flows.services.actor_process import explain_lost_actor, find_actor_process
from rollflow.storage.errors import Unreachable

START_SECONDS = 900.0  # longest time until an actor is created
LEAST_SHARE = 0.02  # share of a CPU; an idle process uses less


class Vitals:
    """Watches the life of one actor, from one answer to the next."""

    def __init__(self, name: str, actor: Any, silent_seconds: float) -> None:
        """Watch an actor that may neither answer nor compute for at most `silent_seconds`."""
        self._name, self._id, self._longest = name, actor._actor_id, silent_seconds
        self._began = time.monotonic()
        self._window: tuple[float, float] | None = None  # time of a look at its process, and its CPU time until then

    def note_answer(self) -> None:
        """Record that the actor answered just now."""
        self._began, self._window = time.monotonic(), None

    def is_starting(self) -> bool:
        """Check an actor that does not answer; return whether it is still being created.

        Raises:
            Unreachable: it is dead or stuck; the message has the evidence.
        """
        if why := explain_lost_actor(self._id):
            raise Unreachable(f"waited for {self._name}: {why}")
        now = time.monotonic()
        if self._window and now - self._window[0] < self._longest:
            return False
        found = find_actor_process(self._id)
        if found is None or not found.created:
            if now - self._began > START_SECONDS:
                raise Unreachable(f"waited {START_SECONDS:g} s for {self._name} to start")
            return True
        used, window = found.cpu_seconds() or 0.0, self._window
        if window and used - window[1] < LEAST_SHARE * (now - window[0]):
            raise Unreachable(f"waited {now - self._began:.0f} s for the status of {self._name}, whose process is idle")
        self._window = now, used
        return False
