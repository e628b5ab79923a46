"""Measures the load of an inference engine from changes that the engine reports, without polling."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from rollflow.storage.run_records.usage import CpuCost
from rollflow.tasks.engines.base import NO_DRAFTS, DraftCounts
from rollflow.tasks.runtime.actor_warnings import ActorWarning


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of an inference engine's work since its start.

    `tokens` counts only the tokens of responses that have ended.

    `busy_seconds` is the time in which the engine was not suspended and at least one request was running.

    `prompt_tokens` is the number of prompt tokens, of which `cached` came from the prefix cache. `drafts` counts the
    drafts of speculative decoding.
    """

    running: int
    tokens: int
    busy_seconds: float
    prompt_tokens: int = 0
    cached: int = 0
    costs: tuple[CpuCost, ...] = ()  # CPU time that the engine's actor and its child processes have used
    warned: tuple[ActorWarning, ...] = ()  # newest warnings of the engine's actor
    drafts: DraftCounts = NO_DRAFTS


def measure_prefix_hits(stats: Collection[EngineStats]) -> float:
    """Return the share of the prompt tokens that the engines found in their prefix caches."""
    return sum(one.cached for one in stats) / max(sum(one.prompt_tokens for one in stats), 1)


def sum_drafts(stats: Collection[EngineStats]) -> DraftCounts:
    """Add up the drafts of several engines."""
    return sum((one.drafts for one in stats), NO_DRAFTS)


class EngineMeter:
    """Computes `EngineStats` by adding up the changes that the inference engine reports."""

    def __init__(self) -> None:
        self._running = 0
        self._tokens = self._prompt_tokens = self._cached = 0
        self._drafts = NO_DRAFTS
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
        """Count the prompt and prefix tokens of a generation request that ended."""
        self._prompt_tokens += prompt_tokens
        self._cached += cached

    def count_drafts(self, drafts: DraftCounts) -> None:
        """Count the drafts of a generation request that ended."""
        self._drafts += drafts

    def read(self) -> EngineStats:
        self.change()
        return EngineStats(
            self._running, self._tokens, self._busy, self._prompt_tokens, self._cached, drafts=self._drafts
        )
