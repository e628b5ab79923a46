"""Calibrates the speed of simulated engines, so that a simulation of a recorded run matches the record.

If the number of concurrent requests was constant, the record of a run does not show how the time per token depends on
this number. A simulation of the same recipe is therefore compared with the recorded times of short and long responses,
and of the whole rollout. For some values of the slowdown c, the seconds per token and the prefill seconds are fitted,
so that generation times by response length match the record. The value of the slowdown c whose simulated times are
closest to the recorded times is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.simulation.figures import WARM_UP
from rollflow.tasks.simulation.hardware import EnginesHardware, Hardware
from rollflow.tasks.simulation.world import SimulatedRun

# values of c, the slowdown of a request by each other concurrent request; at c = 1, more requests give no more
# throughput
SLOWINGS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
ROUNDS = 3  # number of simulations for each value of the slowdown c
TRAJECTORIES = 2000  # smallest number of trajectories that a simulation measures
FEWEST = 4  # smallest number of policy versions that a simulation measures
BINS = 6  # number of bins into which response lengths are divided

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ObservedRollout:
    """The lengths and generation seconds of R responses, and the seconds of rollout per training step.

    With alpha = 0 (synchronous training), `rollout` is the time that the learner waited; otherwise it is the time of
    the whole step.
    """

    tokens_R: Floats
    seconds_R: Floats
    rollout: float

    def line(self) -> tuple[float, float]:
        """Fit a line to the generation seconds by response length; return the mean seconds, and the seconds per
        token."""
        spread = self.tokens_R - self.tokens_R.mean()
        slope = float(spread @ self.seconds_R) / max(float(spread @ spread), 1e-12)
        return float(self.seconds_R.mean()), max(slope, 1e-12)

    def times(self, edges: Floats) -> Floats:
        """Return the mean seconds of each bin of lengths, followed by the seconds of the rollout, repeated once for
        each bin.
        """
        places = np.digitize(self.tokens_R, edges)
        mean = float(self.seconds_R.mean())
        bins = [self.seconds_R[places == i].mean() if np.any(places == i) else mean for i in range(len(edges) + 1)]
        return np.array([*bins, *([self.rollout] * len(bins))])


def calibrate_hardware(seen: ObservedRollout, config: RunConfig, hardware: Hardware) -> Hardware:
    """Return the hardware with the engine speeds that match the record best."""
    edges = np.unique(np.quantile(seen.tokens_R, np.arange(1, BINS) / BINS))
    found = [_with(slowing, seen, edges, config, hardware) for slowing in SLOWINGS]
    found.sort(key=lambda fit: fit[0])
    between = _between(found[0][1].batch_slowdown, found[1][1].batch_slowdown)
    return _on(hardware, min([*found[:1], _with(between, seen, edges, config, hardware)], key=lambda fit: fit[0])[1])


def _with(
    slowing: float, seen: ObservedRollout, edges: Floats, config: RunConfig, hardware: Hardware
) -> tuple[float, EnginesHardware]:
    """Fit the engine speeds for one value of the slowdown c; return the error of the fit, and the engines."""
    mean, slope = seen.line()
    share = 1.0 + slowing * (config.engine.max_concurrent_requests - 1)
    per_token, prefill = slope / share, max(0.0, mean - slope * float(seen.tokens_R.mean())) / share
    found: list[tuple[float, EnginesHardware]] = []
    for _ in range(ROUNDS):
        engines = hardware.engines.model_copy(
            update={"seconds_per_token": per_token, "prefill_seconds": prefill, "batch_slowdown": slowing}
        )
        simulated = _observe_simulation(config, _on(hardware, engines))
        missed = np.log(np.maximum(simulated.times(edges), 1e-9) / np.maximum(seen.times(edges), 1e-9))
        found.append((float(np.square(missed).mean()), engines))
        mean_now, slope_now = simulated.line()
        whole = mean / mean_now * (prefill + per_token * float(seen.tokens_R.mean()))
        per_token = max(1e-9, min(per_token * slope / slope_now, whole / float(seen.tokens_R.mean())))
        prefill = max(0.0, whole - per_token * float(seen.tokens_R.mean()))
    return min(found, key=lambda fit: fit[0])


def _observe_simulation(config: RunConfig, hardware: Hardware) -> ObservedRollout:
    """Simulate the run, and measure the same quantities that were measured in the recorded run."""
    warm = WARM_UP + config.capacity
    versions = warm + max(FEWEST, -(-TRAJECTORIES // (config.groups * config.group_size)))
    timed = config.model_copy(update={"engine": hardware.engine(config), "versions": versions + config.capacity + 1})
    world = SimulatedRun(timed, hardware, config, timeline=False)
    run_virtual(world.run(versions, lambda version: None))
    formed, steps = world.records.formed, world.records.steps
    first, last = (sum(batch.trajectories for batch in formed[:count]) for count in (warm, versions))
    ends = np.array([step.ended for step in steps[:versions]])
    waits = np.array([step.began for step in steps[1:versions]]) - ends[:-1]
    return ObservedRollout(
        np.array(world.records.trained_lengths[first:last], float),
        np.array(world.records.generation_seconds[first:last], float),
        float((waits if config.async_ratio == 0 else np.diff(ends))[warm - 1 :].mean()),
    )


def _between(one: float, other: float) -> float:
    return float(np.sqrt(max(one, 1e-3) * max(other, 1e-3)))


def _on(hardware: Hardware, engines: EnginesHardware) -> Hardware:
    return hardware.model_copy(update={"engines": engines})
