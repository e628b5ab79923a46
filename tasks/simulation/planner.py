"""The planner: finds by simulation how to divide GPUs between rollout and training, and how stale samples may be.

The recommended settings were simulated with the production scheduler, and do not exceed the limits on waste and on
length bias (`PlanLimits`). Among all candidates within `TOLERANCE` of the best throughput, the one with the smallest
alpha (staleness limit) is recommended.

    1. synchronous     the baseline for gains: all GPUs in turns if the hardware says so, otherwise the best split of
                       the GPUs between rollout and training
    2. alpha = 1 ...   the best split for each alpha: the search starts from beta* (Proposition 2), and later from the
                       best split of the previous alpha. If dropping old groups exceeds a limit, waiting for them is
                       simulated, too. The stage ends early if no schedule could be 5 % faster
    3. choices         one change of an option at a time: extra groups, extra responses, tail batching, dropping old
                       groups or waiting for them, a wider staleness limit. If the fastest change helps, the best split
                       is searched again
    4. finals          longer simulations of the best candidates of each stage, and of the fastest candidate that
                       exceeded a limit. Only these outcomes are shown, and one of them is recommended

A division of the GPUs is not simulated if the lower bound on its step time exceeds the best step time so far.

The length bias is measured after the warm-up: by how many tokens the trained responses of a policy version differ from
the drawn responses, as a share of the drawn tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from pydantic import ValidationError

from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.bounds import Bounds, bounds_of, work_of
from rollflow.tasks.simulation.candidates import FULL, LIMITS, Candidate, CandidateOutcome, PlanLimits, SimulationBudget
from rollflow.tasks.simulation.figures import WARM_UP, Figures, simulate_population
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.world import simulate

TOLERANCE = 0.05  # share of the best throughput that may be lost for a smaller staleness limit alpha
TIE = 0.01  # relative difference below which two throughputs count as equal
ALPHAS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
FINALISTS = 12  # number of simulations reserved for the final comparison of candidates
WIDER = 4  # factor by which the planner widens the staleness limit alpha without letting rollout run further ahead


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of the planner: the outcomes of the final simulations, fastest first, and the recommended outcome."""

    finals: tuple[CandidateOutcome, ...]
    sync: CandidateOutcome  # outcome of synchronous training (alpha = 0) with the options in the user's config
    best: CandidateOutcome | None  # outcome of the fastest candidate that exceeds no limit
    recommended: CandidateOutcome | None
    alphas: tuple[float, ...]  # values of the staleness limit alpha that were simulated
    settled: bool  # True if no larger staleness limit alpha can be faster by more than the tolerance
    simulations: int
    trajectories: int
    limits: PlanLimits = LIMITS

    @property
    def wider(self) -> CandidateOutcome | None:
        """The fastest outcome with a wider staleness limit than the recommendation; None if no outcome is much
        faster."""
        one = self.recommended
        if one is None:
            return None
        same = [
            other
            for other in self.finals
            if other.candidate.async_ratio > one.candidate.async_ratio
            and other.candidate.lead == one.candidate.lead
            and other.throughput > (1.0 + TIE) * one.throughput
            and not other.marks(self.limits)
        ]
        return max(same, key=lambda other: other.throughput, default=None)


def plan(
    config: RunConfig,
    hardware: Hardware,
    gpus: int,
    *,
    largest: float = 8.0,
    budget: SimulationBudget = FULL,
    limits: PlanLimits = LIMITS,
    watch: Callable[[int, CandidateOutcome], None] = lambda count, outcome: None,
) -> Plan:
    """Search for the best configuration; call `watch` after each simulation with the number of simulations so far.

    Raises:
        ConfigError: there are too few GPUs, or the hardware file cannot describe another division of the GPUs.
    """
    return _Search(config, hardware, gpus, largest, budget, limits, watch).run()


def choose(
    finals: Sequence[CandidateOutcome], limits: PlanLimits
) -> tuple[CandidateOutcome | None, CandidateOutcome | None]:
    """Return two outcomes that exceed no limit: the fastest outcome, and the recommended outcome.

    The recommended outcome has the smallest staleness limit alpha within `TOLERANCE` of the fastest outcome, and wastes
    the fewest tokens among equal ones.
    """
    kept = [outcome for outcome in finals if not outcome.marks(limits)]
    if not kept:
        return None, None
    best = max(kept, key=lambda outcome: outcome.throughput)
    near = [outcome for outcome in kept if outcome.throughput >= (1.0 - TOLERANCE) * best.throughput]
    smallest = min(outcome.candidate.async_ratio for outcome in near)
    near = [outcome for outcome in near if outcome.candidate.async_ratio == smallest]
    fastest = max(outcome.throughput for outcome in near)
    equal = [outcome for outcome in near if outcome.throughput >= (1.0 - TIE) * fastest]
    return best, min(equal, key=lambda outcome: (round(outcome.wasted, 3), -outcome.throughput))


def settled_bias(figures: Figures, drawn_R: Sequence[int]) -> tuple[float, float]:
    """Compute the length bias after the warm-up, as a share of a policy version's tokens, and its standard error.

    The bias is the slope, over policy versions, of the cumulative trained tokens minus drawn tokens. `drawn_R` has the
    lengths of the responses to all prompts, in order.
    """
    versions, warm = figures.versions, figures.warm_up
    responses = figures.bias.trained // versions
    drawn_V = np.array(drawn_R[: versions * responses]).reshape(versions, -1).sum(axis=1)
    ahead = np.cumsum(np.array(figures.trained_tokens) - drawn_V)[warm - 1 :] / drawn_V.mean()
    moments = np.arange(len(ahead))
    slope, level = np.polyfit(moments, ahead, 1)
    missed = ahead - slope * moments - level
    deviation = math.sqrt(float(missed @ missed) / max(1, len(ahead) - 2))
    return float(slope), math.sqrt(2.0) * deviation / (len(ahead) - 1)


class _Search:
    def __init__(
        self,
        config: RunConfig,
        hardware: Hardware,
        gpus: int,
        largest: float,
        budget: SimulationBudget,
        limits: PlanLimits,
        watch: Callable[[int, CandidateOutcome], None],
    ) -> None:
        self._config, self._hardware, self._gpus, self._width = config, hardware, gpus, hardware.engines.gpus_per_engine
        self._largest, self._budget, self._limits, self._watch = largest, budget, limits, watch
        self._most = math.floor((gpus - 1) / self._width)  # largest number of engines if the learner has one GPU
        self._check()
        self._known: dict[tuple[Candidate, int], CandidateOutcome] = {}
        self._lengths: list[int] = []
        self._passing: list[CandidateOutcome] = []  # outcomes that exceeded a limit in their first simulation
        self._trajectories = 0

    def run(self) -> Plan:
        sync = self._synchronous()
        plain, settled = self._asynchronous()
        redundant = self._redundant([sync, *plain])
        finalists = [sync, *plain, *self._second(plain), *self._passing, *redundant]
        most = max(outcome.candidate.async_ratio for outcome in finalists)
        versions = _warm_up(most) + self._budget.finals(self._config)
        candidates = list(dict.fromkeys(outcome.candidate for outcome in finalists))
        left = max(1, self._budget.simulations - len(self._known))
        finals = [self._simulate(candidate, versions) for candidate in candidates[:left]]
        best, recommended = choose(finals, self._limits)
        return Plan(
            finals=tuple(sorted(finals, key=lambda outcome: -outcome.throughput)),
            sync=finals[0],
            best=best,
            recommended=recommended,
            alphas=(0.0, *(outcome.candidate.async_ratio for outcome in plain)),
            settled=settled,
            simulations=len(self._known),
            trajectories=self._trajectories,
            limits=self._limits,
        )

    def _check(self) -> None:
        learner, faults = self._hardware.learner, self._hardware.faults
        if self._most < 1:
            least = math.ceil(self._width + 1)
            raise ConfigError(
                f"--gpus {self._gpus}: an engine takes {self._width:g} GPUs (engines.gpus_per_engine), and the "
                f"learner takes at least 1; give {least} or more"
            )
        if learner.measured:
            raise ConfigError(
                f"learner.measured = [{learner.measured[0]:g}, ...]: step times that were measured on one number "
                "of GPUs say nothing about other numbers; give learner.seconds_per_trajectory instead"
            )
        if faults.deaths:
            raise ConfigError(
                f"faults.deaths names engine {faults.deaths[0].engine}, but not every compared split of the GPUs "
                "has this engine; give faults.deaths_per_hour instead"
            )

    # --- the stages ---------------------------------------------------------------------------------------

    def _synchronous(self) -> CandidateOutcome:
        if self._hardware.learner.colocated:
            return self._screen(self._candidate(math.floor(self._gpus / self._width), 0.0, colocated=True))
        return self._descend(self._start(0.0), self._stride())

    def _asynchronous(self) -> tuple[list[CandidateOutcome], bool]:
        """Find the best division of the GPUs for each staleness limit; also return whether larger limits can be
        skipped."""
        found: list[CandidateOutcome] = []
        for alpha in self._alphas():
            if found and self._is_spent():
                break
            last = self._candidate(found[-1].candidate.engines, alpha) if found else None
            plain = self._descend(last or self._start(alpha), 2 if last else self._stride())
            found.append(self._try_waiting(plain) or plain)
            limit = self._bounds(found[-1].candidate).conserving
            if limit >= (1.0 - TOLERANCE) * found[-1].figures.step_seconds:
                return found, True
        return found, False

    def _alphas(self) -> tuple[float, ...]:
        """List the values of the staleness limit alpha to simulate, in ascending order."""
        return (*takewhile(lambda a: a < self._largest, ALPHAS), *([self._largest] if self._largest else []))

    def _try_waiting(self, plain: CandidateOutcome) -> CandidateOutcome | None:
        """Simulate waiting for old groups of responses if dropping them exceeds a limit, and return the outcome if
        waiting helps.
        """
        other = replace(plain.candidate, on_stale="wait")
        drops = plain.candidate.drops and plain.marks(self._limits)
        if not drops or not self._is_allowed(other) or self._is_spent():
            return None
        self._passing.append(plain)
        waiting = self._descend(other, 2)
        return None if waiting.marks(self._limits) else waiting

    def _second(self, plain: Sequence[CandidateOutcome]) -> list[CandidateOutcome]:
        """Return the second best division of the GPUs for the smallest staleness limit that seems fast enough.

        The first simulation of a candidate is short, so it may rank the best two divisions in the wrong order.
        """
        if not plain:
            return []
        needed = _smallest_alpha(plain)
        same = [
            outcome
            for (candidate, _), outcome in self._known.items()
            if replace(candidate, engines=0, learner_gpus=0) == replace(needed.candidate, engines=0, learner_gpus=0)
        ]
        return sorted(same, key=lambda outcome: -outcome.throughput)[1:2]

    def _redundant(self, plain: Sequence[CandidateOutcome]) -> list[CandidateOutcome]:
        """Find the best candidate with redundant responses for each alpha, and the fastest candidate that exceeds a
        limit."""
        gains, passing = [], []
        needed = _smallest_alpha(plain).candidate.async_ratio
        for outcome in (outcome for outcome in plain if outcome.candidate.async_ratio <= needed):
            looked = [self._screen(other) for other in self._others(outcome.candidate) if not self._is_spent()]
            marked = {other.candidate: bool(other.marks(self._limits)) for other in looked}
            kept = [other for other in looked if not marked[other.candidate]]
            passing += [other for other in looked if marked[other.candidate]]
            fastest = max(kept, key=lambda other: other.throughput, default=outcome)
            if fastest.throughput > (1.0 + TIE) * outcome.throughput:
                gains.append(self._descend(fastest.candidate, 1))
        return gains + sorted(passing, key=lambda other: -other.throughput)[:1]

    def _others(self, base: Candidate) -> Iterator[Candidate]:
        """Yield the candidates that differ from `base` in one rollout option, if their config is valid."""
        groups, size = self._config.groups, self._config.group_size
        eighth, quarter = max(1, groups // 8), max(1, groups // 4)
        more = [
            replace(base, redundant_groups=eighth),
            replace(base, redundant_responses=max(1, size // 8)),
            replace(base, tail_batching=True, redundant_groups=quarter, redundant_responses=max(1, size // 4)),
        ]
        if base.async_ratio:
            more.append(replace(base, tail_batching=not base.tail_batching))
            more.append(replace(base, on_stale="wait" if base.drops else "drop"))
            more.append(
                replace(
                    base,
                    async_ratio=min(WIDER * base.async_ratio, self._largest),
                    max_batches_ahead=base.lead,
                )
            )
        return (other for other in more if other != base and self._is_allowed(other))

    def _is_allowed(self, candidate: Candidate) -> bool:
        try:
            candidate.config(self._config, self._hardware)
        except ValidationError:
            return False
        return True

    # --- the split ----------------------------------------------------------------------------------------

    def _descend(self, start: Candidate, stride: int) -> CandidateOutcome:
        """Move from a division of the GPUs to better neighbouring divisions, with ever smaller strides."""
        best = self._screen(start)
        while stride and not best.candidate.colocated:
            better = self._better(best, stride)
            best, stride = (better, stride) if better else (best, stride // 2)
        return best

    def _better(self, best: CandidateOutcome, stride: int) -> CandidateOutcome | None:
        """Return a better neighbouring division of the GPUs, or None; first try more GPUs for the busier stage."""
        idle = best.figures.idle
        toward = -stride if idle.learner < idle.engines else stride
        for engines in (best.candidate.engines + toward, best.candidate.engines - toward):
            if 1 <= engines <= self._most and not self._is_spent():
                candidate = self._with(best.candidate, engines)
                if self._bounds(candidate).conserving_split < best.figures.step_seconds:
                    found = self._screen(candidate)
                    if found.throughput > best.throughput:
                        return found
        return None

    def _start(self, alpha: float) -> Candidate:
        """Return the candidate with the share beta* of the GPUs for training (Proposition 2 of ROLL Flash)."""
        middle = self._candidate(max(1, self._most // 2), alpha)
        share = self._bounds(middle).best_training_share
        engines = round((1.0 - share) * self._gpus / self._width)
        return self._with(middle, min(max(1, engines), self._most))

    def _stride(self) -> int:
        return max(1, self._most // 8)

    def _candidate(self, engines: int, alpha: float, *, colocated: bool = False) -> Candidate:
        """Return a candidate with this number of engines and the rollout options of the run's config."""
        rollout, learner = self._config.rollout, self._gpus if colocated else self._gpus - engines * self._width
        redundancy = (rollout.redundant_groups, rollout.redundant_responses, rollout.tail_batching, rollout.on_stale)
        ahead = None if rollout.max_batches_ahead is None else min(rollout.max_batches_ahead, alpha)
        return Candidate(engines, learner, colocated, alpha, *redundancy, ahead)

    def _with(self, candidate: Candidate, engines: int) -> Candidate:
        return replace(candidate, engines=engines, learner_gpus=self._gpus - engines * self._width)

    # --- simulations --------------------------------------------------------------------------------------

    def _is_spent(self) -> bool:
        """Return whether the remaining simulations are reserved for the final comparison of candidates."""
        return len(self._known) >= self._budget.simulations - FINALISTS

    def _screen(self, candidate: Candidate) -> CandidateOutcome:
        return self._simulate(candidate, _warm_up(candidate.async_ratio) + self._budget.count_screening(self._config))

    def _simulate(self, candidate: Candidate, versions: int) -> CandidateOutcome:
        """Simulate a candidate for a number of policy versions, or return the earlier result of the same simulation."""
        if (known := self._known.get((candidate, versions))) is not None:
            return known
        config, hardware = candidate.config(self._config, self._hardware), candidate.hardware(self._hardware)
        figures = simulate(config, hardware, versions=versions).figures
        wasted = sum(figures.tokens.wasted.values()) / max(1, figures.tokens.sampled)
        bias, error = settled_bias(figures, self._population(versions))
        outcome = CandidateOutcome(candidate, versions, figures, bias, error, wasted)
        self._known[candidate, versions] = outcome
        self._trajectories += versions * config.groups * config.group_size
        self._watch(len(self._known), outcome)
        return outcome

    def _bounds(self, candidate: Candidate) -> Bounds:
        """Compute the bounds of Proposition 2 (ROLL Flash) for the lengths that a candidate's first simulation
        draws."""
        config, hardware = candidate.config(self._config, self._hardware), candidate.hardware(self._hardware)
        lengths = self._population(_warm_up(0.0) + self._budget.count_screening(config))
        return bounds_of(work_of(config, hardware, lengths, hardware.speeds(config)))

    def _population(self, versions: int) -> list[int]:
        """Return the drawn lengths, in tokens, of the responses to at least the prompts of the first policy
        versions."""
        count = versions * self._config.groups
        if len(self._lengths) < count * self._config.group_size:
            timed = self._config.model_copy(update={"engine": self._hardware.engine(self._config)})
            grain = timed.engine.tokens_per_tick  # type: ignore[union-attr]  # it is a timed engine
            self._lengths = [one.tokens * grain for one in simulate_population(timed, count)]
        return self._lengths


def _smallest_alpha(outcomes: Sequence[CandidateOutcome]) -> CandidateOutcome:
    """Return the outcome with the smallest staleness limit whose throughput may come close enough to the best."""
    best = max(outcome.throughput for outcome in outcomes)
    near = [outcome for outcome in outcomes if outcome.throughput >= (1.0 - 1.5 * TOLERANCE) * best]
    return min(near, key=lambda outcome: (outcome.candidate.async_ratio, -outcome.throughput))


def _warm_up(alpha: float) -> int:
    """Return how many policy versions at the start of a simulation are excluded from measurement as a warm-up."""
    return WARM_UP + math.floor(alpha)
