"""Measures an engine's load from the changes that the engine reports, without polling."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollflow.storage.run_records.usage import CpuCost
from rollflow.tasks.runtime.actor_warnings import ActorWarning


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of an engine since its start. `tokens` counts only the tokens of generations that have ended.

    `busy_seconds` is the time in which at least one request was running and the engine was not suspended.

    `prompt_tokens` is the number of prompt tokens, of which `cached` came from the prefix cache.
    """

    running: int
    tokens: int
    busy_seconds: float
    prompt_tokens: int = 0
    cached: int = 0
    costs: tuple[CpuCost, ...] = ()  # CPU time of the engine's actor and its child processes
    warned: tuple[ActorWarning, ...] = ()  # warnings of the engine's actor


class EngineMeter:
    """Adds up `EngineStats` from the changes that the engine reports."""

    def __init__(self) -> None:
        self._running = 0
        self._tokens = self._prompt_tokens = self._cached = 0
        self._busy = 0.0
        self._suspended = False
        self._since = time.monotonic()

    def change(self, running: int = 0, tokens: int = 0, suspended: bool | None = None) -> None:
        now = time.monotonic()
        if self._running > 0 and not self._suspended:
            self._busy += now - self._since
        self._since = now
        self._running += running
        self._tokens += tokens
        self._suspended = self._suspended if suspended is None else suspended

    def count_prefill(self, prompt_tokens: int, cached: int) -> None:
        """Count the prompt and prefix tokens of a request that ended."""
        self._prompt_tokens += prompt_tokens
        self._cached += cached

    def read(self) -> EngineStats:
        self.change()
        return EngineStats(self._running, self._tokens, self._busy, self._prompt_tokens, self._cached)
