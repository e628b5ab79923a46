"""Watches a run for its supervisor process: checks the stages (rollout, reward and train) twice a second, and writes
the run's status once a second.

A user ends a run with `rollflow stop`, or by pausing the run's Prefect flow run; in both cases `RunEnded` is raised.
`rollflow stop` ends the run after its next policy version. `rollflow stop --now` and a pause end the run immediately,
and the work since its newest version is lost.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from rollflow.flows.keepalive.stages import Stages
from rollflow.flows.tracking.status_writer import StatusWriter
from rollflow.storage.errors import ConfigError, Unreachable
from rollflow.storage.log.run_log import Writer
from rollflow.storage.run_records.stop_requests import RunEnded, read_request

POLL_SECONDS = 0.5
TELL_SECONDS = 1.0


class RunWatch:
    """Watches one run until a given policy version is published, or until the run's end."""

    def __init__(self, stages: Stages, writer: StatusWriter, supervisor: Writer) -> None:
        self._stages, self._writer, self._supervisor = stages, writer, supervisor
        self._patience = writer.context.config.store.patience_seconds
        self._told, self._answered = float("-inf"), time.monotonic()
        # Number of the policy version that was the newest one when a stop request was first seen.
        self._asked_at: int | None = None

    def to_version(self, version: int) -> None:
        """Watch the run until the policy version is published, or until rollout and training have ended.

        Raises:
            RunEnded: the user ended the run.
            RestartsExhausted: a stage of the run (rollout, reward or train) failed.
            ConfigError: the policy learns nothing, and `train.no_signal` is "stop".
        """
        self._watch_until(lambda: self._writer.progress.version >= version)

    def to_end(self) -> None:
        """Watch the run until rollout and training have ended and the last policy version is evaluated."""
        self._watch_until(lambda: False)

    def heed_before(self) -> None:
        """Raise `RunEnded` if a user asked to stop the run before its stages (rollout, reward and train) were
        started.
        """
        with contextlib.suppress(Unreachable, OSError):
            if asked := read_request(self._writer.context.store):
                raise RunEnded(f"the run ended while it was starting, because of `rollflow {asked.how}`")

    def check_stop_requests(self) -> None:
        """Raise `RunEnded` if a user has paused or stopped the run after its training ended.

        Raises:
            RunEnded: the user ended the run.
        """
        self._stages.look_at_own()
        with contextlib.suppress(Unreachable, OSError):
            self._check_request()

    def _watch_until(self, reached: Callable[[], bool]) -> None:
        while not (reached() or self._stages.have_ended("rollout", "train")):
            self._stages.look()
            if time.monotonic() - self._told > TELL_SECONDS:
                self._told = time.monotonic()
                self._tell()
            time.sleep(POLL_SECONDS)

    def _tell(self) -> None:
        """Write the run's status, and check whether a user asked to stop the run. If the storage fails for longer than
        `store.patience_seconds`, raise its error.
        """
        try:
            self._supervisor.check()
            self._writer.refresh()
            self._check_request()
            self._check_signal()
            self._answered = time.monotonic()
        # a store in a folder raises OSError immediately; other stores raise Unreachable after retries
        except (Unreachable, OSError):
            if time.monotonic() - self._answered > self._patience:
                raise

    def _check_signal(self) -> None:
        """Raise an error if the policy learns nothing and `train.no_signal` is "stop".

        Raises:
            ConfigError: the newest training batches had no learning signal (no advantage differs from 0).
        """
        train = self._writer.context.config.train
        if train.no_signal == "stop" and self._writer.no_signal:
            raise ConfigError(f"train.no_signal = 'stop': {self._writer.no_signal}")

    def _check_request(self) -> None:
        if self._stages.paused:
            raise RunEnded("the run was paused, because a user paused its flow run in Prefect", pause=True)
        asked = read_request(self._writer.context.store)
        if asked is None:
            return
        if asked.how == "cancel":
            raise RunEnded("the run was cancelled by `rollflow stop --now`")
        if self._asked_at is None:
            self._asked_at = self._writer.progress.version
            self._writer.messages.append("the run ends at its next version, because of `rollflow stop`")
        if self._writer.progress.version > self._asked_at:
            raise RunEnded(f"the run was stopped at version {self._writer.progress.version} by `rollflow stop`")
