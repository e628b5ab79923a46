"""Ends a run's detached actors when their lease expires, because no supervisor watches the run any more.

    supervisor -- status.json, every second --> run's storage <-- reads now and then -- a timer thread in each actor

- An actor ends, with the processes that it started, when the supervisor has written no status for
  `cluster.lease_seconds`. The flows of the stages fail a little earlier, so they restart no actor.
- Any change of the supervisor's status renews the lease, so clocks of different machines are never compared.
- The time in which an actor or its machine is paused does not count towards the lease.
- While storage does not answer, the lease is extended by `store.patience_seconds`.
- The timer does not depend on the actor's event loop, so an actor with a blocked event loop ends, too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from rollflow.storage.errors import Missing, RollflowError
from rollflow.storage.objects import open_store

if TYPE_CHECKING:
    from rollflow.tasks.run.context import RunContext

STATUS = "status.json"  # name of the supervisor's status file in the run's storage
LOOKS = 20  # number of times that an actor reads the supervisor's status during one lease
# an actor ends after this multiple of the lease, so that the Prefect flow that watches the actor ends first
ACTOR_SHARE = 1.15
READ_SECONDS = 5.0  # seconds to wait for the run's store if it does not answer


@dataclass(frozen=True, slots=True)
class Lease:
    """Parameters of the lease of a run's actors; a lease of 0 seconds never expires."""

    uri: str
    seconds: float
    patience: float  # seconds that the run may wait for storage that does not answer

    @classmethod
    def of(cls, context: RunContext) -> Lease:
        """Build the parameters of the actors' lease from the run's config."""
        config = context.config
        return cls(context.uri, config.cluster.lease_seconds, config.store.patience_seconds)

    @property
    def sentence(self) -> str:
        """The message that reports that the lease of the run's actors has expired."""
        return (
            f"no supervisor has watched the run {self.uri} for {self.seconds:g} s (cluster.lease_seconds), "
            f"so the run's actors end; continue the run with: rollflow resume {self.uri}"
        )

    def hold(self, role: str) -> None:
        """Start a thread that ends this process when the lease expires; an actor calls `hold` once."""
        if self.seconds:
            threading.Thread(target=self._hold, args=(role,), name="lease", daemon=True).start()

    def _hold(self, role: str) -> None:
        watch = LeaseWatch(self, share=ACTOR_SHARE)
        while not watch.check_expiry():
            time.sleep(watch.pause)
        print(f"{role}: {self.sentence}", file=sys.stderr, flush=True)
        end_process()


class LeaseWatch:
    """Detects that the supervisor's status has not changed for the time of the lease."""

    def __init__(
        self,
        lease: Lease,
        read: Callable[[], bytes | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        share: float = 1.0,
    ) -> None:
        """Start watching.

        Args:
            read: this function returns the supervisor's status, b"" if there is none, or None if storage does not
                answer.
            share: the lease counts as expired after this multiple of the lease's time.
        """
        self._longest = share * lease.seconds
        self.lease, self.pause = lease, lease.seconds / LOOKS
        self._read, self._clock = read or self._status, clock
        self._seen: bytes | None = None
        self._looked = clock()
        self._unwatched = 0.0  # number of seconds since the supervisor's status last changed

    def check_expiry(self) -> bool:
        """Read the supervisor's status, unless it was just read; return whether the lease has expired."""
        now = self._clock()
        passed = now - self._looked
        if not self.lease.seconds or passed < self.pause:
            return False
        self._looked, found = now, self._read()
        if found is None:
            return self._note_silence(passed)
        changed, self._seen = found != self._seen, found
        self._unwatched = 0.0 if changed else self._unwatched + min(passed, 2 * self.pause)
        return self._unwatched >= self._longest

    def _note_silence(self, passed: float) -> bool:
        """Count the time in which storage did not answer; return whether the lease has expired.

        The count of seconds restarts at zero when storage stops or resumes answering.
        """
        self._unwatched = passed + (self._unwatched if self._seen is None else 0.0)
        self._seen = None
        return self._unwatched >= self._longest + self.lease.patience

    def _status(self) -> bytes | None:
        try:
            return open_store(self.lease.uri, READ_SECONDS).get(STATUS)
        except Missing:
            return b""
        except (RollflowError, OSError):
            return None


def end_process() -> None:
    """Kill this process's children and then this process, so that Ray considers the actor dead."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(1)
