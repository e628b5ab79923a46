"""Compares values of alpha (`async_ratio`, the largest staleness) for one recipe, by simulation on fixed hardware.

- All values of alpha are simulated with the same prompts and response lengths, and with the scheduler of a real run.
- The chosen alpha is the smallest whose step time is within `TOLERANCE` of the shortest step time, because samples are
  staler with a larger alpha. This choice costs at most the share `TOLERANCE` of the throughput.
- At alpha = 0, the learner trains while the engines are idle, so it may use more cores. `spread` is the factor of this
  increase; the simulation assumes that twice the threads train twice as fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.figures import WARM_UP, Figures
from rollflow.tasks.simulation.hardware import Hardware, LearnerHardware
from rollflow.tasks.simulation.planner import TOLERANCE
from rollflow.tasks.simulation.world import simulate

ALPHAS = (0.0, 1.0, 2.0)
MEASURED = 12  # smallest number of policy versions that a simulation measures after its warm-up
TRAJECTORIES = 500  # smallest number of trajectories that a simulation measures


@dataclass(frozen=True, slots=True)
class AlphaOutcome:
    """The result of the simulation with one value of alpha."""

    async_ratio: float
    figures: Figures

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a train step after the warm-up."""
        return self.figures.step_seconds


def compare_alphas(
    config: RunConfig, hardware: Hardware, alphas: Sequence[float] = ALPHAS, *, spread: float = 1.0
) -> list[AlphaOutcome]:
    """Simulate the recipe with its own alpha (`async_ratio`) and with each value in `alphas`; return the results,
    sorted by alpha.

    `spread` is the factor by which the learner has more cores at alpha = 0 than beside working engines. An alpha that
    the recipe's other keys do not allow is left out.
    """
    found = []
    for alpha in sorted({*alphas, config.async_ratio}):
        learner = spread_learner(hardware.learner, spread) if alpha == 0 else hardware.learner
        for changed in _with_alpha(config, alpha):
            measured = max(MEASURED, -(-TRAJECTORIES // (config.groups * config.group_size)))
            versions = WARM_UP + changed.capacity + measured
            own = hardware.model_copy(update={"learner": learner})
            found.append(AlphaOutcome(alpha, simulate(changed, own, versions=versions).figures))
    return found


def choose_alpha(outcomes: Sequence[AlphaOutcome]) -> AlphaOutcome:
    """Return the outcome with the smallest alpha whose throughput is within `TOLERANCE` of the best throughput."""
    best = min(one.step_seconds for one in outcomes)
    near = [one for one in outcomes if one.step_seconds * (1.0 - TOLERANCE) <= best]
    return min(near, key=lambda one: one.async_ratio)


def spread_learner(learner: LearnerHardware, times: float) -> LearnerHardware:
    """Return a learner whose train steps are `times` times as fast."""
    names = ("seconds_per_version", "seconds_per_trajectory", "seconds_per_token")
    shorter = {name: getattr(learner, name) / times for name in names}
    return learner.model_copy(update={**shorter, "measured": tuple(seconds / times for seconds in learner.measured)})


def _with_alpha(config: RunConfig, alpha: float) -> Iterator[RunConfig]:
    """Yield the recipe with another alpha, or nothing if its other keys do not allow this alpha."""
    tree = config.model_dump(mode="json", exclude_unset=True) | {"async_ratio": alpha}
    ahead = config.rollout.max_batches_ahead
    if ahead is not None and ahead > alpha:
        tree["rollout"] = {key: value for key, value in tree["rollout"].items() if key != "max_batches_ahead"}
    if "engine" in tree:
        tree["engine"].setdefault("kind", config.engine.kind)
    try:
        yield RunConfig.model_validate(tree)
    except ValidationError:
        return
