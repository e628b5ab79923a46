"""Runs an environment in a thread of its own, for a caller that has no event loop.

The event loop of the thread runs until `close`, so the environment's worker processes stay alive between two calls.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollflow.tasks.environments import build_environment, close_environment
from rollflow.tasks.environments.config import EnvironmentConfig

T = TypeVar("T")


class EnvironmentThread:
    """An environment, and the thread in which its event loop runs."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """Create the environment, and start the thread.

        Raises:
            ConfigError: there is no environment class at the import path in the config.
        """
        self.environment = build_environment(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="environment", daemon=True)
        self._thread.start()
        self._is_blocked = False  # True if the environment has blocked the event loop for too long

    def run(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run a coroutine in the thread, and return its result.

        Raises:
            TimeoutError: the environment has blocked the thread for `seconds`, so no time limit of the coroutine works.
        """
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result(seconds)
        except TimeoutError:
            self._is_blocked = not running.done()
            raise

    def close(self) -> None:
        """End the environment's processes and the thread. A blocked thread ends later, or with this process."""
        if self._is_blocked:
            self._loop.call_soon_threadsafe(self._loop.stop)
            return
        try:
            self.run(close_environment(self.environment))
            self.run(self._loop.shutdown_default_executor())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
