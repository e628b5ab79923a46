"""The planner: how to divide GPUs between rollout and training, and how far to let rollout run ahead, by simulation.

Guarantees: what it recommends was simulated, on the shipped objects, for the versions it names. It keeps both limits
(`Limits`). And no simulated candidate of a smaller alpha that keeps them comes within `TOLERANCE` of the best.

    1. synchronous     all GPUs in turns where the hardware says so, the best split otherwise: what gains are over
    2. alpha = 1 ...   for each, the best split: downhill from beta* (Proposition 2), later from the last alpha's best;
                       with waiting at the bound where the recipe drops and that passes a limit. Ends early where no
                       schedule could be 5 % faster
    3. choices         extra groups, extra responses, tail batching, dropping at the bound, a wider bound at the same
                       depth: one after another at the alphas in play; what gains gets a split of its own
    4. finals          the best of each again, for longer, also where a short look marked it: only these are shown and
                       chosen from

A split whose bound is above the best step so far is not simulated. All simulations share a seed. So candidates are
compared on the same prompts and lengths, and the same input gives the same plan.

The length bias here is the *settled* one: by how many tokens a version after the warm-up falls behind the prompts that
become due with it. It leaves out the ramp of a run, which finishes short groups first while long ones are still in
flight: that happens once in a run, not in each version. It is chance which long groups are in flight at the window's
ends; the standard error says how much.
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
from rollflow.tasks.simulation.candidates import FULL, LIMITS, Budget, Candidate, Limits, Outcome
from rollflow.tasks.simulation.figures import WARM_UP, Figures, population
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.world import simulate

TOLERANCE = 0.05  # of the best throughput: what a smaller alpha may cost ("the ratio needed")
TIE = 0.01  # throughputs that differ by less are taken as equal
ALPHAS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
FINALISTS = 12  # simulations kept for the finals
WIDER = 4  # times alpha: the bound that is looked at where only the depth stays


@dataclass(frozen=True, slots=True)
class Planned:
    """The finals, best first, and the choice."""

    finals: tuple[Outcome, ...]
    sync: Outcome  # the recipe itself at alpha = 0
    best: Outcome | None  # the fastest that keeps the limits
    recommended: Outcome | None
    alphas: tuple[float, ...]  # that were simulated
    settled: bool  # larger ones need not be: no schedule could be faster by more than the tolerance
    simulations: int
    trajectories: int
    limits: Limits = LIMITS

    @property
    def wider(self) -> Outcome | None:
        """The fastest of a wider bound within the limits, at the depth of what is recommended; None: none is faster."""
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
    budget: Budget = FULL,
    limits: Limits = LIMITS,
    watch: Callable[[int, Outcome], None] = lambda count, outcome: None,
) -> Planned:
    """Search; `watch` is called after each simulation with how many there were.

    Raises:
        ConfigError: the GPUs are too few, or the hardware file does not say how other splits would do.
    """
    return _Search(config, hardware, gpus, largest, budget, limits, watch).run()


def choose(finals: Sequence[Outcome], limits: Limits) -> tuple[Outcome | None, Outcome | None]:
    """The fastest, and the one to take: the smallest alpha within `TOLERANCE` of it; of equally fast ones the least
    wasteful. Only of those that keep the limits."""
    kept = [outcome for outcome in finals if not outcome.marks(limits)]
    if not kept:
        return None, None
    best = max(kept, key=lambda one: one.throughput)
    near = [one for one in kept if one.throughput >= (1.0 - TOLERANCE) * best.throughput]
    smallest = min(one.candidate.async_ratio for one in near)
    near = [one for one in near if one.candidate.async_ratio == smallest]
    fastest = max(one.throughput for one in near)
    equal = [one for one in near if one.throughput >= (1.0 - TIE) * fastest]
    return best, min(equal, key=lambda one: (round(one.wasted, 3), -one.throughput))


def settled_bias(figures: Figures, drawn_R: Sequence[int]) -> tuple[float, float]:
    """The slope of what trained tokens (by version) are ahead of drawn ones, as a share of a version's; and its
    standard error, from how far the line is missed. `drawn_R` are the lengths of all responses, by prompt.
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
        budget: Budget,
        limits: Limits,
        watch: Callable[[int, Outcome], None],
    ) -> None:
        self._config, self._hardware, self._gpus, self._width = config, hardware, gpus, hardware.engines.gpus_per_engine
        self._largest, self._budget, self._limits, self._watch = largest, budget, limits, watch
        self._most = math.floor((gpus - 1) / self._width)  # engines, where the learner has one GPU
        self._check()
        self._known: dict[tuple[Candidate, int], Outcome] = {}
        self._lengths: list[int] = []
        self._passing: list[Outcome] = []  # by a first look over a limit
        self._trajectories = 0

    def run(self) -> Planned:
        sync = self._synchronous()
        plain, settled = self._asynchronous()
        redundant = self._redundant([sync, *plain])
        finalists = [sync, *plain, *self._second(plain), *self._passing, *redundant]
        most = max(one.candidate.async_ratio for one in finalists)
        versions = _warm_up(most) + self._budget.finals(self._config)
        candidates = list(dict.fromkeys(one.candidate for one in finalists))
        left = max(1, self._budget.simulations - len(self._known))
        finals = [self._simulate(candidate, versions) for candidate in candidates[:left]]
        best, recommended = choose(finals, self._limits)
        return Planned(
            finals=tuple(sorted(finals, key=lambda one: -one.throughput)),
            sync=finals[0],
            best=best,
            recommended=recommended,
            alphas=(0.0, *(one.candidate.async_ratio for one in plain)),
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
                f"--gpus {self._gpus}: an engine takes {self._width:g} (engines.gpus_per_engine) and the learner at "
                f"least 1; give {least} or more"
            )
        if learner.measured:
            raise ConfigError(
                f"learner.measured = [{learner.measured[0]:g}, ...]: measured steps do not say what other numbers of "
                "GPUs would take; give learner.seconds_per_trajectory instead"
            )
        if faults.deaths:
            raise ConfigError(
                f"faults.deaths: engine {faults.deaths[0].engine} is not in every split; give faults.deaths_per_hour"
            )

    # --- the stages ---------------------------------------------------------------------------------------

    def _synchronous(self) -> Outcome:
        if self._hardware.learner.colocated:
            return self._screen(self._candidate(math.floor(self._gpus / self._width), 0.0, colocated=True))
        return self._descend(self._start(0.0), self._stride())

    def _asynchronous(self) -> tuple[list[Outcome], bool]:
        """The best split of each alpha, and whether larger ones need not be looked at."""
        found: list[Outcome] = []
        for alpha in self._alphas():
            if found and self._spent():
                break
            last = self._candidate(found[-1].candidate.engines, alpha) if found else None
            plain = self._descend(last or self._start(alpha), 2 if last else self._stride())
            found.append(self._waiting(plain) or plain)
            limit = self._bounds(found[-1].candidate).conserving
            if limit >= (1.0 - TOLERANCE) * found[-1].figures.step_seconds:
                return found, True
        return found, False

    def _alphas(self) -> tuple[float, ...]:
        """That are to be looked at, in order."""
        return (*takewhile(lambda a: a < self._largest, ALPHAS), *([self._largest] if self._largest else []))

    def _waiting(self, plain: Outcome) -> Outcome | None:
        """Where dropping what is too old passes a limit: waiting for it instead, if that keeps them."""
        other = replace(plain.candidate, at_bound="wait")
        drops = plain.candidate.drops and plain.marks(self._limits)
        if not drops or not self._allowed(other) or self._spent():
            return None
        self._passing.append(plain)
        waiting = self._descend(other, 2)
        return None if waiting.marks(self._limits) else waiting

    def _second(self, plain: Sequence[Outcome]) -> list[Outcome]:
        """The next best split of the alpha that seems needed: a short look may have put them in the wrong order."""
        if not plain:
            return []
        needed = _needed(plain)
        same = [
            one
            for (candidate, _), one in self._known.items()
            if replace(candidate, engines=0, learner_gpus=0) == replace(needed.candidate, engines=0, learner_gpus=0)
        ]
        return sorted(same, key=lambda one: -one.throughput)[1:2]

    def _redundant(self, plain: Sequence[Outcome]) -> list[Outcome]:
        """For each alpha up to the needed one what redundancy gains most, and the fastest that passes a limit."""
        gains, passing = [], []
        needed = _needed(plain).candidate.async_ratio
        for one in (one for one in plain if one.candidate.async_ratio <= needed):
            looked = [self._screen(other) for other in self._others(one.candidate) if not self._spent()]
            marked = {other.candidate: bool(other.marks(self._limits)) for other in looked}
            kept = [other for other in looked if not marked[other.candidate]]
            passing += [other for other in looked if marked[other.candidate]]
            fastest = max(kept, key=lambda other: other.throughput, default=one)
            if fastest.throughput > (1.0 + TIE) * one.throughput:
                gains.append(self._descend(fastest.candidate, 1))
        return gains + sorted(passing, key=lambda other: -other.throughput)[:1]

    def _others(self, base: Candidate) -> Iterator[Candidate]:
        """A candidate with one thing changed, where the recipe allows it."""
        groups, size = self._config.groups, self._config.group_size
        eighth, quarter = max(1, groups // 8), max(1, groups // 4)
        more = [
            replace(base, extra_groups=eighth),
            replace(base, extra_responses=max(1, size // 8)),
            replace(base, tail_batching=True, extra_groups=quarter, extra_responses=max(1, size // 4)),
        ]
        if base.async_ratio:
            more.append(replace(base, tail_batching=not base.tail_batching))
            more.append(replace(base, at_bound="wait" if base.drops else "drop"))
            more.append(replace(base, async_ratio=min(WIDER * base.async_ratio, self._largest), ahead=base.lead))
        return (other for other in more if other != base and self._allowed(other))

    def _allowed(self, candidate: Candidate) -> bool:
        try:
            candidate.config(self._config, self._hardware)
        except ValidationError:
            return False
        return True

    # --- the split ----------------------------------------------------------------------------------------

    def _descend(self, start: Candidate, stride: int) -> Outcome:
        """From a split to its better neighbours, with strides that halve where there are none."""
        best = self._screen(start)
        while stride and not best.candidate.colocated:
            better = self._better(best, stride)
            best, stride = (better, stride) if better else (best, stride // 2)
        return best

    def _better(self, best: Outcome, stride: int) -> Outcome | None:
        """A neighbour with a shorter step; first the one that gives GPUs to the busier stage."""
        idle = best.figures.idle
        toward = -stride if idle.learner < idle.engines else stride
        for engines in (best.candidate.engines + toward, best.candidate.engines - toward):
            if 1 <= engines <= self._most and not self._spent():
                candidate = self._with(best.candidate, engines)
                if self._bounds(candidate).conserving_split < best.figures.step_seconds:
                    found = self._screen(candidate)
                    if found.throughput > best.throughput:
                        return found
        return None

    def _start(self, alpha: float) -> Candidate:
        """Split by beta*."""
        middle = self._candidate(max(1, self._most // 2), alpha)
        share = self._bounds(middle).best_training_share
        engines = round((1.0 - share) * self._gpus / self._width)
        return self._with(middle, min(max(1, engines), self._most))

    def _stride(self) -> int:
        return max(1, self._most // 8)

    def _candidate(self, engines: int, alpha: float, *, colocated: bool = False) -> Candidate:
        """The recipe itself, on so many engines."""
        rollout, learner = self._config.rollout, self._gpus if colocated else self._gpus - engines * self._width
        redundancy = (rollout.extra_groups, rollout.extra_responses, rollout.tail_batching, rollout.at_bound)
        ahead = None if rollout.ahead is None else min(rollout.ahead, alpha)
        return Candidate(engines, learner, colocated, alpha, *redundancy, ahead)

    def _with(self, candidate: Candidate, engines: int) -> Candidate:
        return replace(candidate, engines=engines, learner_gpus=self._gpus - engines * self._width)

    # --- simulations --------------------------------------------------------------------------------------

    def _spent(self) -> bool:
        """Whether what is left is for the finals."""
        return len(self._known) >= self._budget.simulations - FINALISTS

    def _screen(self, candidate: Candidate) -> Outcome:
        return self._simulate(candidate, _warm_up(candidate.async_ratio) + self._budget.screening(self._config))

    def _simulate(self, candidate: Candidate, versions: int) -> Outcome:
        """Once for each candidate and number of versions."""
        if (known := self._known.get((candidate, versions))) is not None:
            return known
        config, hardware = candidate.config(self._config, self._hardware), candidate.hardware(self._hardware)
        figures = simulate(config, hardware, versions=versions).figures
        wasted = sum(figures.tokens.wasted.values()) / max(1, figures.tokens.sampled)
        bias, error = settled_bias(figures, self._population(versions))
        outcome = Outcome(candidate, versions, figures, bias, error, wasted)
        self._known[candidate, versions] = outcome
        self._trajectories += versions * config.groups * config.group_size
        self._watch(len(self._known), outcome)
        return outcome

    def _bounds(self, candidate: Candidate) -> Bounds:
        """Proposition 2, by the lengths of a first look."""
        config, hardware = candidate.config(self._config, self._hardware), candidate.hardware(self._hardware)
        lengths = self._population(_warm_up(0.0) + self._budget.screening(config))
        return bounds_of(work_of(config, hardware, lengths, hardware.speeds(config)))

    def _population(self, versions: int) -> list[int]:
        """Tokens of what the prompts of the first versions draw, at least."""
        count = versions * self._config.groups
        if len(self._lengths) < count * self._config.group_size:
            timed = self._config.model_copy(update={"engine": self._hardware.engine(self._config)})
            grain = timed.engine.grain  # type: ignore[union-attr]  # it is a timed engine
            self._lengths = [tokens * grain for tokens in population(timed, count)]
        return self._lengths


def _needed(outcomes: Sequence[Outcome]) -> Outcome:
    """The smallest alpha that may come within the tolerance of the best, by a first look."""
    best = max(one.throughput for one in outcomes)
    near = [one for one in outcomes if one.throughput >= (1.0 - 1.5 * TOLERANCE) * best]
    return min(near, key=lambda one: (one.candidate.async_ratio, -one.throughput))


def _warm_up(alpha: float) -> int:
    """Versions that `Figures` leaves out."""
    return WARM_UP + math.floor(alpha)
