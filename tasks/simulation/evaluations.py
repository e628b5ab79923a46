"""Simulates the evaluations of a run: the production code of evaluations runs on borrowed simulated engines.

- Evaluations are simulated only if they borrow engines of the run.
- Evaluations before and after the run are left out, because a simulation shows the steady run between them.
- Responses to held-out prompts draw their lengths like all other responses, and their scoring does not delay training.
- `spent` counts the tokens that engines sampled for evaluations.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollflow.tasks.engines.base import Engine
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.evaluation import Evaluation, EvaluationPorts, Evaluations, EvaluationSkipped, Evaluator
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.parts import SimulatedPrompts, TimedRewards
from rollflow.tasks.simulation.records import SimulationRecords

# smallest index of held-out prompts, which training never reaches; the index is the only token of a prompt
HELD_OUT = 1 << 30
TRIES = 1_000  # largest number of engine failures during one evaluation


def takes_engines(config: RunConfig, hardware: Hardware) -> bool:
    """Return whether evaluations borrow engines that would otherwise generate training data."""
    lends = config.evaluation_engine(on_cpu=False) is None and config.engine.replicas > 1
    return lends and not hardware.learner.colocated


class TimedEvaluations:
    """Simulates the evaluation of published policy versions during training. `config` is the run's config with
    simulated engines."""

    def __init__(self, config: RunConfig, hardware: Hardware, proxy: InferenceProxy) -> None:
        settings, engine = config.evaluation, config.engine
        prompts = SimulatedPrompts(config, hardware.reward)
        held = [prompts.at(HELD_OUT + place) for place in range(settings.prompts)]
        rewards = TimedRewards(hardware.reward, config.seed, SimulationRecords())
        self._proxy, self._fetch_seconds = proxy, hardware.update.fetch_seconds
        self._spent = 0
        # the borrowed engine, and the number of tokens that it had sampled before the loan
        self._lent: tuple[TimedEngine, int] | None = None
        self.done: list[Evaluation] = []
        means = EvaluationPorts(
            wanted=lambda version: version > 0 and config.evaluates(version),
            evaluated=self._is_evaluated,
            engine=self._borrow,
            fetch=self._fetch,
            evaluator=Evaluator(held, settings.samples, settings.temperature, engine.max_new_tokens, rewards.score),
            keep=self._keep,
            slots=engine.max_concurrent_requests,
            tries=TRIES,
        )
        self._evaluations = Evaluations(means, config.versions)

    @property
    def spent(self) -> int:
        """Number of tokens sampled for evaluations so far."""
        return self._spent + self._lent_tokens()

    def note_published(self, version: int) -> None:
        """Record that all policy versions up to `version` are published."""
        self._evaluations.note_published(version)

    async def run(self) -> None:
        """Evaluate the policy versions that are due; return when the run's last version is evaluated."""
        await self._evaluations.run()

    def _lent_tokens(self) -> int:
        if self._lent is None:
            return 0
        engine, before = self._lent
        return engine.usage.tokens - before

    @asynccontextmanager
    async def _borrow(self) -> AsyncIterator[Engine]:
        async with self._proxy.borrow_engine() as engine:
            assert isinstance(engine, TimedEngine)
            self._lent = engine, engine.usage.tokens
            try:
                yield engine
            finally:
                self._spent, self._lent = self.spent, None

    async def _is_evaluated(self, version: int) -> bool:
        return False

    async def _fetch(self, version: int) -> tuple[Path, WeightsProbe]:
        await asyncio.sleep(self._fetch_seconds)
        return Path(), WeightsProbe((), (), 0.0)

    async def _keep(self, found: Evaluation | EvaluationSkipped) -> None:
        if isinstance(found, Evaluation):
            self.done.append(found)
