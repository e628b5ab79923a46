"""Simulates one run: the production scheduler and its parts, on a virtual clock.

    prompts --> RolloutScheduler --> InferenceProxy --> timed engines <-- faults
                  |    |                  ^
        timed rewards  |                  |        (evaluations borrow an engine)
                       v                  |
                    Channel         WeightSync
                       |                  ^
                       v                  |
                  timed learner --version-+

The scheduler plans a few more batches than are trained, so that the simulation measures a steady run without its
end.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollflow.storage.channel import Channel
from rollflow.storage.errors import ConfigError, EngineFailed, RollflowError
from rollflow.storage.records import TrajectoryGroup
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.engines.timed_runs import EngineUsage
from rollflow.tasks.environments.base import Environment
from rollflow.tasks.environments.config import TimedEnvironmentConfig
from rollflow.tasks.environments.limits import NO_LIMITS, EpisodeLimits
from rollflow.tasks.environments.ports import EnvironmentPorts
from rollflow.tasks.environments.single_turn import SINGLE_TURN
from rollflow.tasks.environments.timed import TimedEnvironment
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from rollflow.tasks.rollout.resuming.resume_point import ResumePoint
from rollflow.tasks.rollout.scheduler import RolloutScheduler, SchedulerPorts
from rollflow.tasks.rollout.weight_sync import VersionCallbacks, WeightSync
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.limits import build_cache_limits, build_limits
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.simulation.evaluations import TimedEvaluations, takes_engines
from rollflow.tasks.simulation.figures import Figures, figures_of
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.parts import (
    FOREVER,
    Faults,
    Memory,
    SimulatedPrompts,
    TimedLearner,
    TimedRewards,
    check_fresh,
)
from rollflow.tasks.simulation.records import SimulationRecords, Snapshot, Span
from rollflow.tasks.simulation.shared_cores import SharedCores, SharingEngine
from rollflow.tasks.simulation.timeline import Sampler, Timeline


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulation."""

    figures: Figures
    timeline: Timeline | None


def simulate(
    config: RunConfig,
    hardware: Hardware,
    *,
    versions: int | None = None,
    timeline: bool = False,
    watch: Callable[[int], None] = lambda version: None,
    world_type: type[SimulatedRun] | None = None,
) -> SimulationResult:
    """Simulate a run on `hardware` until `versions` policy versions are trained, by default all versions of the run.

    Args:
        timeline: record how busy each part of the run is over time, which slows the simulation by a few per cent.
        watch: this function is called with each published policy version.
        world_type: the class of the simulated run; benchmarks pass subclasses with other schedulers.

    Raises:
        ConfigError: the hardware file does not fit the run's config.
    """
    versions = versions or config.versions
    simulated = config.model_copy(
        update={"engine": hardware.engine(config), "versions": versions + config.capacity + 1}
    )

    async def main() -> SimulationResult:
        world = (world_type or SimulatedRun)(simulated, hardware, config, timeline)
        await world.run(versions, watch)
        figures = figures_of(world.records, simulated, hardware, versions)
        return SimulationResult(figures, world.timeline() if timeline else None)

    with _pause_collector():
        return run_virtual(main())


@contextmanager
def _pause_collector() -> Iterator[None]:
    """Turn off Python's garbage collector during a simulation, which is then twice as fast."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class SimulatedRun:
    """One simulated run, with all its parts connected. `recipe` is the user's config; `config` is a copy of it with
    simulated engines."""

    proxy_type: type[InferenceProxy] = InferenceProxy
    scheduler_type: type[RolloutScheduler] = RolloutScheduler
    prompts_type: type[SimulatedPrompts] = SimulatedPrompts
    rewards_type: type[TimedRewards] = TimedRewards
    environment_type: type[TimedEnvironment] = TimedEnvironment
    check_batch: Callable[[StagedBatch, float], None] = staticmethod(check_fresh)

    def __init__(self, config: RunConfig, hardware: Hardware, recipe: RunConfig, timeline: bool) -> None:
        assert isinstance(config.engine, TimedEngineConfig)
        self.config, self.hardware, self.engine = config, hardware, config.engine
        self.records = SimulationRecords()
        self.speeds = hardware.speeds(recipe)
        self.engines = {place: self._engine(place) for place in range(len(self.speeds))}
        self._past = [0.0] * len(self.speeds)  # seconds in which slots of dead engines were busy, by engine number
        self._buried: list[EngineUsage] = []
        _check(config, hardware)
        self.rewards = self.rewards_type(hardware.reward, config.seed, self.records)
        self.memory = Memory()
        self._build()
        self.sampler = Sampler(self._read, self._shortest_bin()) if timeline else None
        self._fetched = 0.0

    def _build(self) -> None:
        """Create and connect the parts of the run."""
        config = self.config
        engines = list(self.engines.values())
        slots, cache = self.engine.max_concurrent_requests, build_cache_limits(config)
        self.proxy = self.proxy_type(engines, slots, FOREVER, config.rollout.routing, cache)
        self.channel: Channel[StagedBatch] = Channel(config.capacity, self.memory)
        prompts = self.prompts_type(config, self.hardware.reward)
        given = EnvironmentPorts(limits=self._find_limits())
        environment = self._build_environment()
        ports = SchedulerPorts(prompts.at, self.rewards.score, self._commit, self._pack, environment, given)
        self.scheduler = self.scheduler_type(build_limits(config), ports, self.proxy, ResumePoint())
        hooks = VersionCallbacks(self._note_published, self._note_updated)
        self.sync = WeightSync(self.proxy, self, config.engine.on_weight_update, hooks)
        share = self.hardware.learner.shared_speed
        spend = SharedCores(self.engines, share).train if share < 1.0 else asyncio.sleep
        self.learner = TimedLearner(self.hardware, self.engine.tokens_per_tick, self.channel, self.records, spend)
        lends = takes_engines(config, self.hardware)
        self.evaluations = TimedEvaluations(config, self.hardware, self.proxy) if lends else None
        faults = self.hardware.faults
        self.faults = Faults(faults, self.proxy, self.engines, self._replace, self.records)

    async def run(self, versions: int, watch: Callable[[int], None]) -> None:
        """Run the simulation until `versions` policy versions are published.

        Raises:
            RollflowError: an error that would also end a real run.
        """

        def published(version: int) -> None:
            self.records.snapshots[version] = self._snapshot()
            watch(version)

        for engine in self.engines.values():
            await engine.start()
        failure: RollflowError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [self.sync.run(versions), self.scheduler.run(), self.faults.run(self.config.seed)]
                beside += [part.run() for part in (self.sampler, self.evaluations) if part is not None]
                running = [tasks.create_task(coroutine) for coroutine in beside]
                await self.learner.run(versions, published)
                await self._close()
                for task in running:
                    task.cancel()
        except* RollflowError as failed:
            failure = _first(failed)
        if failure is not None:
            raise failure

    def timeline(self) -> Timeline:
        """Return the timeline that shows how busy each part of the run was over time."""
        assert self.sampler is not None
        growth = self.sampler.growth()
        engines, rewards = growth[:-1] / np.float32(self.engine.max_concurrent_requests), growth[-1]
        steps, updates = tuple(self.records.steps), tuple(self.records.updates)
        return Timeline(self.sampler.bin_seconds, engines, rewards, steps, updates, self.engine.max_concurrent_requests)

    async def newer(self, version: int) -> int:
        """Wait for a policy version newer than `version`, as `VersionFeed.newer` specifies."""
        return await self.channel.wait_version(version, FOREVER)

    async def fetch(self, version: int) -> tuple[Path, WeightsProbe]:
        """Wait as long as fetching weights would take; a simulation has no weights."""
        await asyncio.sleep(self.hardware.update.fetch_seconds)
        self._fetched = asyncio.get_running_loop().time()
        return Path(), WeightsProbe((), (), 0.0)

    def _note_published(self, version: int) -> None:
        self.scheduler.note_published(version)
        if self.evaluations is not None:
            self.evaluations.note_published(version)

    def _note_updated(self, version: int) -> None:
        self.records.updates.append(Span(self._fetched, asyncio.get_running_loop().time(), version))
        self.scheduler.wake()

    async def _commit(self, staged: StagedBatch) -> None:
        """Store a batch in memory, and put the batch into the channel to the learner."""
        self.check_batch(staged, self.config.async_ratio)
        self.records.form(staged)
        self.memory.batches[staged.number] = staged
        await self.channel.put(staged.number, staged, FOREVER)
        for trained in [number for number in self.memory.batches if number < self.channel.version]:
            del self.memory.batches[trained]

    def _pack(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """Return the group of responses unchanged, because a simulation stores nothing."""
        return group

    def _build_environment(self) -> Environment:
        """Build the timed environment of the recipe; all other environments have a single turn here."""
        section = self.config.environment
        if not isinstance(section, TimedEnvironmentConfig):
            return SINGLE_TURN
        return self.environment_type(section, self.engine.tokens_per_tick)

    def _find_limits(self) -> EpisodeLimits:
        """Return the limits of the timed environment, in simulated tokens."""
        section = self.config.environment
        if not isinstance(section, TimedEnvironmentConfig):
            return NO_LIMITS
        return section.limits.scale_tokens(self.engine.tokens_per_tick)

    def _engine(self, place: int) -> TimedEngine:
        engine_type = SharingEngine if self.hardware.learner.shared_speed < 1.0 else TimedEngine
        return engine_type(self.engine.model_copy(update={"speed": self.speeds[place]}))

    async def _replace(self, place: int) -> TimedEngine:
        """Replace a dead engine by a new one; the work of the dead engine still counts in the results."""
        dead = self.engines[place].usage
        self._past[place] += dead.slot_seconds
        self._buried.append(dead)
        self.engines[place] = self._engine(place)
        await self.engines[place].start()
        return self.engines[place]

    def _snapshot(self) -> Snapshot:
        usages = self._usages()
        rewards = self.rewards.gauge.usage
        evaluated = self.evaluations.spent if self.evaluations is not None else 0
        return Snapshot(
            at=asyncio.get_running_loop().time(),
            engine_busy=sum(usage.busy_seconds for usage in usages),
            engine_slots=sum(usage.slot_seconds for usage in usages),
            engine_tokens=sum(usage.tokens for usage in usages) - evaluated,
            reward_busy=rewards.busy_seconds,
        )

    def _usages(self) -> list[EngineUsage]:
        """Return the usage counters of every engine, including dead engines."""
        return [*self._buried, *(engine.usage for engine in self.engines.values())]

    def _shortest_bin(self) -> float:
        """Return the initial width of the timeline's bins: a fraction of one response's time."""
        lengths = sorted(self.engine.lengths)
        typical = lengths[len(lengths) // 2] if lengths else self.engine.median_tokens
        return max(1e-4, (self.engine.prefill_seconds + typical * self.engine.seconds_per_token) / 32)

    def _read(self) -> list[float]:
        """Read the counters from which the timeline is computed."""
        slots = [self._past[place] + engine.usage.slot_seconds for place, engine in self.engines.items()]
        return [*slots, self.rewards.gauge.usage.slot_seconds]

    async def _close(self) -> None:
        """Record the proxy's counters, and prevent any new work from starting."""
        self.records.restarted, self.records.taken_over = self.proxy.restarted, self.proxy.taken_over
        self.records.restarted_tokens = sum(usage.restarted for usage in self._usages())
        if self.evaluations is not None:
            self.records.evaluations = len(self.evaluations.done)
            self.records.evaluation_tokens = self.evaluations.spent
        for engine in self.engines.values():
            with suppress(EngineFailed):
                await engine.suspend("continue")


def _check(config: RunConfig, hardware: Hardware) -> None:
    """Check that the hardware file fits the run's config."""
    last = config.engine.replicas - 1
    for death in hardware.faults.deaths:
        if death.engine > last:
            raise ConfigError(
                f"faults.deaths.engine = {death.engine}: the simulation has no such engine; name one from 0 to {last}"
            )
    if hardware.learner.colocated and config.async_ratio > 0:
        raise ConfigError(
            f"learner.colocated = True: at async_ratio = {config.async_ratio:g} learner and engines run at "
            "the same time; give the learner GPUs of its own, or set async_ratio = 0"
        )


def _first(failed: BaseExceptionGroup[RollflowError]) -> RollflowError:
    inner = failed.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
