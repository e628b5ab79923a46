"""Compares asynchronous episodes of environments with environments in lock-step.

Most sections are simulations on a virtual clock. They use the shipped scheduler, episodes, proxy and channel, with
timed engines and timed environments. In lock-step, all environments of a batch step together (`benchmarks.lockstep`).
Ratios are the seconds per step of lock-step divided by those of asynchronous episodes, unless a row says otherwise. The
bound of a row is the largest speed-up that any schedule can reach with the same environments (which are never idle),
engines and learner. The bound at alpha 1 is the largest speed-up of schedules that train the prompts in their order.
Two steps then take at least as long as the slowest episode of a batch plus a train step, because an episode of batch b
starts after version b - 1 is published.

Two sections run in real time, and take some minutes. `twins` compares the virtual clock with Ray actors
(`benchmarks.environment_twins`). `faults` measures real worker processes with faults (`benchmarks.environment_faults`).

    python -m benchmarks.environments [--only gaussian ...] [--quick] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.environment_faults import compare_faults
from benchmarks.environment_twins import compare_twins
from benchmarks.environment_workloads import ALFWORLD, SWE, Episodes, gaussian
from benchmarks.lockstep import ArealRun, LockstepRun
from benchmarks.report import Row, arguments, at_least, at_most, publish
from benchmarks.workloads import ROLL, ran
from rollflow.tasks.simulation.figures import Figures
from rollflow.tasks.simulation.world import SimulatedRun

QUICK_VERSIONS = 3
OF_BOUND = 0.95
BIAS = 0.01  # largest relative difference of the mean number of turns


def bias(case: str, figures: Figures) -> Iterator[Row]:
    """Return rows with the bias: how trained episodes differ from all drawn episodes in length and turns."""
    off = figures.bias
    yield Row(case, "bias: mean trained tokens, %", 100 * off.mean_difference)
    yield at_most(case, "bias: mean trained turns, % (either way)", 100 * abs(off.turns_difference), 100 * BIAS)


def compared(work: Episodes, versions: int, aim: float | None = None) -> Iterator[Row]:
    """Compare asynchronous episodes with lock-step, at alpha 0 and at alpha 1."""
    together = ran(work.recipe(0), work.hardware(), max(3, versions // 3), LockstepRun)
    alone, ours = (ran(work.recipe(alpha), work.hardware(), versions) for alpha in (0, 1))
    limit, limit_in_order = (together.step_seconds / least for least in work.bounds(versions))
    speed_up = together.step_seconds / ours.step_seconds
    yield Row(work.name, "lock-step, s", together.step_seconds)
    yield Row(work.name, "asynchronous episodes, alpha 1, s", ours.step_seconds)
    yield Row(work.name, "asynchronous episodes, alpha 0, over lock-step", together.step_seconds / alone.step_seconds)
    yield Row(work.name, "bound of the speed-up", limit)
    metric = "asynchronous episodes, alpha 1, over lock-step"
    yield Row(work.name, metric, speed_up) if aim is None else at_least(work.name, metric, speed_up, aim)
    yield at_least(work.name, "share of the bound", speed_up / limit, OF_BOUND)
    yield Row(work.name, "bound at alpha 1, prompts in order", limit_in_order)
    yield at_least(work.name, "share of the bound at alpha 1", speed_up / limit_in_order, OF_BOUND)
    yield Row(work.name, "mean staleness", ours.staleness_mean)
    yield from bias(work.name, ours)


def step_latency(versions: int) -> Iterator[Row]:
    """Simulate ROLL Flash's study of step latencies, whose published speed-up is 2.46x at sigma 10."""
    for sigma in (1, 3, 5, 7, 10):
        yield from compared(gaussian(sigma), versions, 2.46 if sigma == 10 else None)


def mixes(versions: int) -> Iterator[Row]:
    """Simulate workloads whose turns and latencies are like those of ALFWorld (published speed-up 2.72x) and of SWE
    agents.
    """
    yield from compared(ALFWORLD, versions, 3.0)
    yield from compared(SWE, versions, 2.1)


# Some environments are slow, as RollArt reports for shared clusters. Episodes differ in their number of turns, so that
# a preference for episodes that end first shows as a bias.
SLOW = Episodes(
    "5% slow environments",
    16,
    8,
    {
        "median_turns": 10,
        "turns_sigma": 0.4,
        "max_turns": 40,
        "correlation": 0.5,
        "turn_tokens": 300,
        "step_seconds": 5.0,
        "step_sigma": 3.0,
        "slow_share": 0.05,
        "slow_factor": 4.0,
    },
    tokens_per_tick=100,
)
HANGING = replace(
    SLOW,
    name="5% slow environments, 0.1% of the steps hang",
    environment={**SLOW.environment, "hangs": 0.001, "hang_seconds": 600.0},
)


def redundancy(versions: int) -> Iterator[Row]:
    """Simulate more groups and larger groups than a batch needs, at alpha 0: their speed-up, cost and bias."""
    for faulty in (SLOW, HANGING):
        base = 0.0
        for groups in (0, 2, 4):
            for size in (0, 1, 2):
                found = simulate_redundant(faulty, groups, size, versions)
                base = base or found.step_seconds
                case = f"{faulty.name}, {groups} more groups, groups larger by {size}"
                wasted = sum(found.tokens.wasted.values()) / found.tokens.sampled
                yield Row(case, "over no redundancy", base / found.step_seconds)
                yield Row(case, "tokens not trained on, %", 100 * wasted)
                yield Row(case, "bias: mean trained turns, %", 100 * found.bias.turns_difference)


def simulate_redundant(faulty: Episodes, groups: int, size: int, versions: int) -> Figures:
    """Simulate `groups` more groups than a batch needs. All groups are larger by `size` episodes, and each episode has
    its own environment.
    """
    places = (faulty.groups + groups) * (faulty.size + size)
    work = replace(
        faulty,
        environment={**faulty.environment, "places": places},
        engines={"max_concurrent_requests": -(-places // 8)},
    )
    return ran(work.recipe(0, redundant_groups=groups, redundant_responses=size), work.hardware(), versions)


def rivals(versions: int) -> Iterator[Row]:
    """Simulate the scheduling rules of other systems on the workload like SWE agents. A row names the side whose bound
    on age is larger.

    ROLL's group queues deliver the groups that were started first. AReaL bounds the number of started episodes, but not
    the age of an episode, so its episodes may be older. With `async_ratio = 2` and `max_batches_ahead = 1`, rollflow
    starts as many episodes as AReaL, and bounds their age by the largest age under AReaL's rule.
    """
    work = SWE
    ours = ran(work.recipe(1), work.hardware(), versions)
    others = {
        "ROLL's group queues, alpha 1": ran(work.recipe(1, **ROLL), work.hardware(), versions),
        "AReaL's rule, eta 1 (larger bound: ages above 1)": ran(work.recipe(1), work.hardware(), versions, ArealRun),
        "ours, alpha 2, one batch ahead": ran(work.recipe(2, max_batches_ahead=1), work.hardware(), versions),
    }
    yield Row(work.name, "ours, alpha 1, s", ours.step_seconds)
    yield Row(work.name, "ours, alpha 1: oldest trained episode, versions", max(ours.staleness))
    for name, other in others.items():
        yield Row(work.name, f"{name}: over ours", other.step_seconds / ours.step_seconds)
        yield Row(work.name, f"{name}: oldest trained episode, versions", max(other.staleness))
        yield Row(work.name, f"{name}: bias of turns, %", 100 * other.bias.turns_difference)


# One engine with 64 slots, whose KV cache holds a quarter of the tokens of 64 episodes: a prompt of 4,000 tokens, and
# half of 30 turns of 700 tokens. Prefill at 10,000 tokens/s and decoding at 50 tokens/s are of the order of a 32B model
# on one node; ThunderAgent reports 3.01x for such a scheduler.
HELD = 4_000 + 15 * 700
CROWDED = Episodes(
    "KV cache oversubscribed 4 times",
    8,
    8,
    {
        "median_turns": 30,
        "turns_sigma": 0.3,
        "max_turns": 60,
        "turn_tokens": 300,
        "turn_tokens_sigma": 0.5,
        "observation_tokens": 400,
        "distribution": "lognormal",
        "step_seconds": 2.0,
        "step_sigma": 1.0,
    },
    engines={
        "count": 1,
        "max_concurrent_requests": 64,
        "seconds_per_token": 0.02,
        "batch_slowdown": 0.01,
        "kv_tokens": 64 * HELD // 4,
        "prefill_seconds_per_token": 1e-4,
    },
    prompt_tokens=4_000,
)


class CountingRun(SimulatedRun):
    """A simulated run that counts how many prompt and prefix tokens the engines found in their caches."""

    hit = 0.0

    async def _close(self) -> None:
        usages = self._usages()
        type(self).hit = sum(usage.cached for usage in usages) / sum(usage.context for usage in usages)
        await super()._close()


def caches(versions: int) -> Iterator[Row]:
    """Compare by simulation two rules of admission: by the tokens in the KV cache, and by slots."""
    name = CROWDED.name
    found: dict[str, Figures] = {}
    for admit in ("slots", "kv"):
        found[admit] = ran(CROWDED.recipe(1, admit_by=admit), CROWDED.hardware(), versions, CountingRun)
        yield Row(name, f"admission by {admit}, s", found[admit].step_seconds)
        hit = 100 * CountingRun.hit
        metric = f"admission by {admit}: tokens of the context found in the cache, %"
        yield Row(name, metric, hit) if admit == "slots" else at_least(name, metric, hit, 90)
    gain = found["slots"].step_seconds / found["kv"].step_seconds
    yield at_least(name, "admission by kv over slots (ThunderAgent 3.01)", gain, 2)
    yield from bias(name, found["kv"])


# Maps the name of a section to its function, and to the number of versions that it simulates.
SECTIONS: dict[str, tuple[Callable[[int], Iterator[Row]], int]] = {
    "gaussian": (step_latency, 12),
    "mixes": (mixes, 24),
    "redundancy": (redundancy, 16),
    "rivals": (rivals, 24),
    "kv": (caches, 24),
    "twins": (compare_twins, 10),
    "faults": (compare_faults, 8),
}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--quick", action="store_true", help="simulate only a few versions")
    options = parser.parse_args()
    chosen = [SECTIONS[name] for name in options.only]
    rows = [row for section, versions in chosen for row in section(QUICK_VERSIONS if options.quick else versions)]
    publish(rows, "environments", options.json)


if __name__ == "__main__":
    main()
