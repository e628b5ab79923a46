"""The lease of a run's detached actors: they end by themselves once no supervisor watches the run any more.

    supervisor -- status.json, once a second --> run's storage <-- a look now and then -- a timer thread in each actor

- An actor ends, with the processes that it started, when the supervisor has written no status for
  `cluster.lease_seconds`. The stages' flows watch the same lease, and fail a little earlier: they start no actor again.
- Any change of the status counts; clocks of different machines are never compared.
- A pause of the actor or of its machine is not the supervisor's: a look that comes late counts as one look.
- While storage does not answer, nobody can renew a lease: then `store.patience_seconds` are added to it.
- The thread that works has no say: an actor whose event loop is blocked ends as well. (One in which a library holds
  Python's lock ends when that is released.)
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

STATUS = "status.json"  # where the supervisor keeps its view of the run, in the run's storage
LOOKS = 20  # in the time of one lease
ACTOR_SHARE = 1.15  # of a lease: an actor that ends later than its flow is not started again
READ_SECONDS = 5.0  # the longest wait for a store that does not answer


@dataclass(frozen=True, slots=True)
class Lease:
    """What an actor is told of its lease. `uri` is the run's storage; `seconds` 0: it never runs out."""

    uri: str
    seconds: float
    patience: float  # seconds that the run may wait for its storage

    @classmethod
    def of(cls, context: RunContext) -> Lease:
        """Read the lease from the run's config."""
        config = context.config
        return cls(context.uri, config.cluster.lease_seconds, config.store.patience_seconds)

    @property
    def sentence(self) -> str:
        """The log line for a lease that has run out."""
        return (
            f"no supervisor has watched {self.uri} for {self.seconds:g} s (cluster.lease_seconds), so its actors end; "
            f"go on with: rollflow resume {self.uri}"
        )

    def hold(self, role: str) -> None:
        """End this process when the lease has run out; to be called once, by an actor that begins."""
        if self.seconds:
            threading.Thread(target=self._hold, args=(role,), name="lease", daemon=True).start()

    def _hold(self, role: str) -> None:
        watch = LeaseWatch(self, share=ACTOR_SHARE)
        while not watch.ran_out():
            time.sleep(watch.pause)
        print(f"{role}: {self.sentence}", file=sys.stderr, flush=True)
        end_process()


class LeaseWatch:
    """Finds out whether a lease has run out: by changes of the status, on this process's own clock."""

    def __init__(
        self,
        lease: Lease,
        read: Callable[[], bytes | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        share: float = 1.0,
    ) -> None:
        """`read` returns the status, b"" if there is none yet, None if storage does not answer.

        `share`: of the lease's seconds, after which it has run out.
        """
        self._longest = share * lease.seconds
        self.lease, self.pause = lease, lease.seconds / LOOKS
        self._read, self._clock = read or self._status, clock
        self._seen: bytes | None = None
        self._looked = clock()
        self._unwatched = 0.0  # seconds without a change

    def ran_out(self) -> bool:
        """Look, unless the last look was a moment ago; returns whether the lease has run out."""
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
        """Storage does not answer: what was seen before says nothing any more."""
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
    """End this process at once, and first those that it started; Ray takes an actor that ends so for dead."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(1)
