"""The supervisor's watch over a run: it checks the stages twice a second, and the status and the users' requests once a
second.

A user may end the run through its storage (`rollflow stop`), or by pausing its flow run. The watch then raises
`RunEnded`. A stop waits for the next version. A stop at once (a cancel) or a pause loses the work since the newest
version.
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
    """The watch of one supervisor, from its first step to its last."""

    def __init__(self, stages: Stages, writer: StatusWriter, supervisor: Writer) -> None:
        self._stages, self._writer, self._supervisor = stages, writer, supervisor
        self._patience = writer.context.config.store.patience_seconds
        self._told, self._answered = float("-inf"), time.monotonic()
        self._asked_at: int | None = None  # the newest version when a stop request was first seen

    def to_version(self, version: int) -> None:
        """Watch until the version is published, or the stages have ended.

        Raises:
            Ended: the user ended the run.
            RestartsExhausted: a stage failed.
            ConfigError: the policy learns nothing, and the recipe asks to stop such a run.
        """
        self._until(lambda: self._writer.progress.version >= version)

    def to_end(self) -> None:
        """Watch until the last version is trained, loaded and evaluated, which ends the rollout and train stages."""
        self._until(lambda: False)

    def heed_before(self) -> None:
        """Obey a stop request that came before the stages started; such a stop does not wait for a version.

        Raises:
            Ended: the user ended the run.
        """
        with contextlib.suppress(Unreachable, OSError):
            if asked := read_request(self._writer.context.store):
                raise RunEnded(f"the run ended while it was starting, because of `rollflow {asked.how}`")

    def check_stop_requests(self) -> None:
        """Obey a pause or a cancel that came during a step after training.

        Raises:
            Ended: the user ended the run.
        """
        self._stages.look_at_own()
        with contextlib.suppress(Unreachable, OSError):
            self._check_request()

    def _until(self, reached: Callable[[], bool]) -> None:
        while not (reached() or self._stages.have_ended("rollout", "train")):
            self._stages.look()
            if time.monotonic() - self._told > TELL_SECONDS:
                self._told = time.monotonic()
                self._tell()
            time.sleep(POLL_SECONDS)

    def _tell(self) -> None:
        """Write the run's status and check for requests; the store may be unreachable for as long as the run waits for
        storage.
        """
        try:
            self._supervisor.check()
            self._writer.refresh()
            self._check_request()
            self._check_signal()
            self._answered = time.monotonic()
        # a store in a folder raises OSError at once; other stores wait for storage themselves
        except (Unreachable, OSError):
            if time.monotonic() - self._answered > self._patience:
                raise

    def _check_signal(self) -> None:
        """Fail a run that learns nothing, if the recipe says `train.no_signal = "stop"`.

        Raises:
            ConfigError: the newest versions have no learning signal.
        """
        train = self._writer.context.config.train
        if train.no_signal == "stop" and self._writer.no_signal:
            raise ConfigError(f"train.no_signal = 'stop': {self._writer.no_signal}")

    def _check_request(self) -> None:
        if self._stages.paused:
            raise RunEnded("paused", pause=True)
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
