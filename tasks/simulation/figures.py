"""Computes the results of a simulation, such as times, shares and token counts, from the simulation's records.

Times, shares and staleness exclude a warm-up of `Figures.warm_up` policy versions; counts, tokens and lengths include
the warm-up. Lengths of trained responses are compared with the *population*: the responses to the first prompts in
order. The population has as many responses as were trained on, without those to filtered prompts, and does not depend
on the schedule.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.lengths import ResponseLengths
from rollflow.tasks.environments.config import TimedEnvironmentConfig
from rollflow.tasks.environments.timed import TimedEnvironment
from rollflow.tasks.rollout.group import sample_seed
from rollflow.tasks.rollout.mixing import Mixture
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.bounds import Bounds, bounds_of, earliest_publications, work_of
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.parts import SimulatedPrompts
from rollflow.tasks.simulation.records import SimulationRecords, Snapshot

WARM_UP = 2  # number of policy versions of warm-up, in addition to those that rollout may run ahead


@dataclass(frozen=True, slots=True)
class StepShares:
    """Shares of rollout, reward, training and weight update in the time of a synchronous step; the shares add up
    to 1.

    Rollout ends with the last response, reward with the last score, training with the new policy version, and the
    update once the engines have loaded the version.
    """

    rollout: float
    reward: float
    train: float
    update: float


@dataclass(frozen=True, slots=True)
class IdleShares:
    """Shares of the time in which engines, scorers and learner were idle; `slots` is the share of empty engine
    slots."""

    engines: float
    slots: float
    reward: float
    learner: float


@dataclass(frozen=True, slots=True)
class Bias:
    """Compares the lengths of trained responses with those of the population (all drawn responses), in tokens."""

    trained_mean: float
    population_mean: float
    trained_p99: float
    population_p99: float
    trained: int
    trained_turns: float = 1.0  # mean number of turns of the trained episodes
    population_turns: float = 1.0

    @property
    def mean_difference(self) -> float:
        """Relative difference between the mean length of the trained responses and that of the population."""
        return self.trained_mean / self.population_mean - 1.0

    @property
    def turns_difference(self) -> float:
        """Relative difference between the mean number of turns of the trained episodes and that of the population."""
        return self.trained_turns / self.population_turns - 1.0

    @property
    def p99_difference(self) -> float:
        """Relative difference between the 99th percentile of the trained lengths and that of the population."""
        return self.trained_p99 / self.population_p99 - 1.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Numbers of tokens that were sampled, trained on or wasted.

    `wasted` maps each reason to the number of tokens that were wasted; `groups` maps each reason to the number of
    discarded groups. `evaluated` is the number of tokens of evaluations, which no other field includes.
    """

    sampled: int
    trained: int
    wasted: Mapping[str, int]
    groups: Mapping[str, int]
    unfinished: int  # number of tokens of groups of responses that had not been trained on when the simulation ended
    evaluated: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of one simulation; all times are in virtual (simulated) seconds."""

    versions: int
    warm_up: int
    seconds: float
    step_seconds: float  # mean virtual seconds of a training step after the warm-up
    step_median: float
    steps: tuple[float, ...]  # virtual seconds of each training step
    trained_tokens: tuple[int, ...]  # number of tokens in each training step
    trajectories_per_second: float
    tokens_per_second: float  # trained tokens per second
    idle: IdleShares
    update_share: float  # share of the time in which engines were paused for a weight update
    staleness: Mapping[int, int]
    tokens: Tokens
    bias: Bias
    bounds: Bounds
    freshness_limit: float  # the freshness limit of the mean step (see `bounds`), for the batches that were trained
    shares: StepShares | None  # shares of the parts of a step, or None if training is asynchronous
    deaths: int
    restarted: int
    taken_over: int
    evaluations: int  # number of evaluations, each of which borrowed an engine

    @property
    def staleness_mean(self) -> float:
        """Mean age of the trained trajectories, in policy versions."""
        return sum(age * count for age, count in self.staleness.items()) / max(1, sum(self.staleness.values()))


def figures_of(records: SimulationRecords, config: RunConfig, hardware: Hardware, versions: int) -> Figures:
    """Compute all results of a simulation; `config` is the run's config with simulated engines."""
    assert isinstance(config.engine, TimedEngineConfig)
    warm = min(WARM_UP + config.capacity - 1, versions // 2)
    grain, speeds = config.engine.tokens_per_tick, hardware.speeds(config)
    published = [0.0, *(step.ended for step in records.steps)]
    steps = tuple(after - before for before, after in pairwise(published))
    began, ended = published[warm], published[versions]
    counted = [formed for formed in records.formed if warm <= formed.number < versions]
    lasted = max(ended - began, 1e-12)
    bias, population = _bias(records, config, versions, grain)
    return Figures(
        versions=versions,
        warm_up=warm,
        seconds=ended,
        step_seconds=lasted / (versions - warm),
        step_median=float(np.median(steps[warm:])),
        steps=steps,
        trained_tokens=tuple(formed.tokens * grain for formed in records.formed if formed.number < versions),
        trajectories_per_second=sum(formed.trajectories for formed in counted) / lasted,
        tokens_per_second=sum(formed.tokens for formed in counted) * grain / lasted,
        idle=_idle_shares(records, config, warm, versions),
        update_share=sum(max(0.0, min(u.ended, ended) - max(u.began, began)) for u in records.updates) / lasted,
        staleness=dict(sorted(sum((formed.staleness for formed in counted), Counter[int]()).items())),
        tokens=_tokens(records, versions, grain),
        bias=bias,
        bounds=bounds_of(work_of(config, hardware, population, speeds, range(warm + 1, versions + 1))),
        freshness_limit=_compute_freshness_limit(records, config, hardware, published[: warm + 1], versions),
        shares=_shares(records, warm, versions) if config.async_ratio == 0 else None,
        deaths=records.deaths,
        restarted=records.restarted,
        taken_over=records.taken_over,
        evaluations=records.evaluations,
    )


def _compute_freshness_limit(
    records: SimulationRecords, config: RunConfig, hardware: Hardware, published: Sequence[float], versions: int
) -> float:
    """Compute the freshness limit (a lower bound, see `bounds`) of the mean step time after the first versions, whose
    times of publication are taken from the records. Each longest response is assumed to run alone on the fastest
    engine.
    """
    assert isinstance(config.engine, TimedEngineConfig)
    engine, fastest, warm = config.engine, max(hardware.speeds(config)), len(published) - 1
    before = hardware.update.fetch_seconds + hardware.update.seconds + engine.prefill_seconds / fastest
    waits, training, first = list[float](), list[float](), 0
    for formed in records.formed[:versions]:
        last = first + formed.trajectories
        if formed.number >= warm:
            # a simulated token may stand for half as many real tokens as `tokens_per_tick` says
            longest = (max(records.trained_lengths[first:last]) - 0.5) * engine.tokens_per_tick
            waits.append(before + longest * engine.seconds_per_token / fastest + _mean_score_seconds(hardware))
            tokens = formed.tokens * engine.tokens_per_tick
            training.append(hardware.train_seconds(formed.number + 1, formed.trajectories, tokens))
        first = last
    earliest = earliest_publications(published, waits, training, config.async_ratio)
    return (earliest[-1] - published[-1]) / (versions - warm)


def _mean_score_seconds(hardware: Hardware) -> float:
    reward = hardware.reward
    return sum(reward.measured) / len(reward.measured) if reward.measured else reward.seconds


def _idle_shares(records: SimulationRecords, config: RunConfig, warm: int, versions: int) -> IdleShares:
    nothing = Snapshot(0.0, 0.0, 0.0, 0, 0.0)
    first, last = records.snapshots.get(warm, nothing), records.snapshots[versions]
    lasted = max(last.at - first.at, 1e-12)
    engines = config.engine.replicas
    training = sum(step.seconds for step in records.steps[warm:versions])
    return IdleShares(
        engines=1.0 - (last.engine_busy - first.engine_busy) / (lasted * engines),
        slots=1.0
        - (last.engine_slots - first.engine_slots) / (lasted * engines * config.engine.max_concurrent_requests),
        reward=1.0 - (last.reward_busy - first.reward_busy) / lasted,
        learner=1.0 - training / lasted,
    )


def _tokens(records: SimulationRecords, versions: int, grain: int) -> Tokens:
    trained = sum(formed.tokens for formed in records.formed if formed.number < versions)
    wasted = dict(records.discarded_tokens) | {"restarted": records.restarted_tokens}
    sampled = records.snapshots[versions].engine_tokens
    return Tokens(
        sampled=sampled * grain,
        trained=trained * grain,
        wasted={reason: tokens * grain for reason, tokens in wasted.items() if tokens},
        groups=dict(records.discarded_groups),
        unfinished=max(0, sampled - trained - sum(wasted.values())) * grain,
        evaluated=records.evaluation_tokens * grain,
    )


def _bias(records: SimulationRecords, config: RunConfig, versions: int, grain: int) -> tuple[Bias, Sequence[int]]:
    """Compare the lengths of trained responses with the lengths of the population; return the comparison and the
    population.
    """
    count = sum(formed.trajectories for formed in records.formed if formed.number < versions)
    trained = np.frombuffer(records.trained_lengths, np.int64)[:count] * grain
    population = simulate_population(config, -(-count // config.group_size), records.filtered)
    drawn = np.array([one.tokens for one in population], np.int64) * grain
    found = Bias(
        trained_mean=float(trained.mean()),
        population_mean=float(drawn.mean()),
        trained_p99=float(np.percentile(trained, 99)),
        population_p99=float(np.percentile(drawn, 99)),
        trained=count,
        trained_turns=float(np.frombuffer(records.trained_turns, np.int64)[:count].mean()),
        population_turns=float(np.mean([one.turns for one in population])),
    )
    return found, drawn.tolist()


class DrawnEpisode(NamedTuple):
    """An episode as drawn, before it is scheduled: its number of turns, and the number of simulated tokens that the
    policy samples.
    """

    turns: int
    tokens: int


def simulate_population(config: RunConfig, prompts: int, filtered: Collection[int] = ()) -> list[DrawnEpisode]:
    """Draw every episode of the first `prompts` prompts, except the prompts in `filtered`."""
    assert isinstance(config.engine, TimedEngineConfig)
    lengths, mixture = ResponseLengths(config.engine), Mixture([source.share for source in config.prompts])
    section = config.environment
    environment = (
        TimedEnvironment(section, config.engine.tokens_per_tick)
        if isinstance(section, TimedEnvironmentConfig)
        else None
    )
    drawn: list[DrawnEpisode] = []
    while len(drawn) < prompts * config.group_size:
        index = mixture.next()
        if index in filtered:
            mixture.note_filtered(index)
            continue
        for sample in range(config.group_size):
            drawn.append(_draw_episode(config, lengths, environment, index, sample))
    return drawn


def _draw_episode(
    config: RunConfig, lengths: ResponseLengths, environment: TimedEnvironment | None, index: int, sample: int
) -> DrawnEpisode:
    """Draw the numbers of turns and tokens that timed engine and timed environment would draw for an episode."""
    engine, seed, prompt = config.engine, sample_seed(config.seed, index, sample), SimulatedPrompts.tokens(index)
    assert isinstance(engine, TimedEngineConfig)
    grain, room, tokens, turns = engine.tokens_per_tick, engine.max_new_tokens, 0, 0
    limits: Sequence[int | None] = (None,) if environment is None else environment.draw_limits(index, seed)
    for limit in limits:
        draw = random.Random(sample_seed(config.seed, index, sample, turns))
        length = min(lengths.draw(prompt, draw), min(room, limit or room) * grain)
        made = max(1, round(length / grain))
        turns, tokens, added = turns + 1, tokens + made, environment.observation_tokens if environment else 0
        if room - made <= added:
            break
        room -= made + added
    return DrawnEpisode(turns, tokens)


def _shares(records: SimulationRecords, warm: int, versions: int) -> StepShares:
    """Compute the shares of rollout, reward, training and weight update in the time of the steps after the warm-up.

    A synchronous step begins when the engines have the previous policy version's weights.
    """
    updated = {update.version: update.ended for update in records.updates}
    formed = {batch.number: batch for batch in records.formed}
    parts = np.zeros(4)
    for step in records.steps[warm : versions - 1]:
        began, batch, ended = updated[step.version - 1], formed[step.version - 1], updated[step.version]
        moments = [began, batch.last_generation, batch.at, step.ended, ended]
        parts += np.diff(moments)
    return StepShares(*(float(part) for part in parts / max(parts.sum(), 1e-12)))
