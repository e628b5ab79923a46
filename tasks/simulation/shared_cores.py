"""Simulates engines and a learner that share cores or GPUs.

While engines and learner both work, each of them runs at the share `learner.shared_speed` of its own speed. While only
one of them works, it runs at full speed. When an engine starts or stops, the learner notices this within 1/64 of a
train step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine

SLICES = 64  # number of parts of a train step; before each part, the learner checks whether an engine works


class SharingEngine(TimedEngine):
    """A timed engine that slows down while the learner works on the same cores or GPUs."""

    def __init__(self, config: TimedEngineConfig, policy_folder: Path | None = None) -> None:
        super().__init__(config, policy_folder)
        self._full_speed = config.speed

    @property
    def is_working(self) -> bool:
        """True while the engine generates tokens."""
        return self.active > 0 and not self._suspended

    def run_at(self, share: float) -> None:
        """Run at this share of the engine's full speed from now on."""
        speed = self._full_speed * share
        if speed != self._config.speed:
            self._advance()
            self._config = self._config.model_copy(update={"speed": speed})
            self._pace()


class SharedCores:
    """The cores or GPUs that a simulated learner shares with the engines."""

    def __init__(self, engines: Mapping[int, TimedEngine], share: float) -> None:
        self._engines, self._share = engines, share

    async def train(self, seconds: float) -> None:
        """Wait as long as a train step lasts that takes `seconds` without engines; slow down the engines meanwhile."""
        for _ in range(SLICES):
            engines = self._list_engines()
            for engine in engines:
                engine.run_at(self._share)
            slowed = any(engine.is_working for engine in engines)
            await asyncio.sleep(seconds / SLICES / (self._share if slowed else 1.0))
        for engine in self._list_engines():
            engine.run_at(1.0)

    def _list_engines(self) -> list[SharingEngine]:
        """List the engines. A simulated death may have replaced an engine by another one."""
        return [engine for engine in self._engines.values() if isinstance(engine, SharingEngine)]
