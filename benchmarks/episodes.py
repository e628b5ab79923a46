"""Measures how the cost of scheduling episodes grows with the number of episodes in flight, up to 100,000.

    python -m benchmarks.episodes [--quick] [--json FILE]

The results are CPU microseconds of one process on the virtual clock. The same episodes also run on engines and
environments alone. The cost of this second run is subtracted; the rest is the cost of scheduler, episodes, proxy,
buffer and batches for one turn. The results of a simulation, such as the bias, are computed after its end, and are not
part of the cost. Most episodes wait for their environments: a turn generates for 1 s, and a step takes 9 s. Python's
garbage collector is off. Each simulation runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from benchmarks.report import Row, arguments, at_most, publish
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Prompt
from rollflow.tasks.engines.base import Generation, GenerationRequest
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.environments.base import Episode
from rollflow.tasks.environments.config import TimedEnvironmentConfig
from rollflow.tasks.environments.ports import NO_PORTS, EnvironmentPorts
from rollflow.tasks.environments.timed import TimedEnvironment
from rollflow.tasks.rollout.group import sample_seed
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.world import SimulatedRun, simulate

GROUP = 8
SLOTS = 250
TURNS = 8
FLYING = (1_000, 10_000, 100_000)
QUICK_FLYING = (500, 1_000)
VERSIONS = 2  # number of versions; the batch of a version has half as many episodes as are in flight
AIM = 50.0  # target: CPU microseconds of scheduling for a turn


def workload(flying: int, turns: int = TURNS) -> tuple[RunConfig, Hardware]:
    """Return a workload with `flying` episodes in flight, and a learner that trains at once."""
    section = {
        "kind": "timed",
        "median_turns": turns,
        "max_turns": 10 * turns,
        "turn_tokens": 100,
        "observation_tokens": 100,
    }
    section |= {"step_seconds": 9.0, "step_sigma": 3.0, "turns_sigma": 0.3}
    config = {"groups": flying // GROUP // 2, "group_size": GROUP, "async_ratio": 2, "policy": {"path": "simulated"}}
    config |= {"evaluation": {"every": 0}, "engine": {"max_new_tokens": 1_000_000}, "environment": section}
    hardware = {
        "engines": {"count": flying // SLOTS, "max_concurrent_requests": SLOTS, "seconds_per_token": 0.01},
        "responses": {"median": 1e9, "sigma": 0.0, "correlation": 0.0, "tokens_per_tick": 50},
    }
    return RunConfig.model_validate(config), Hardware.model_validate(hardware)


@dataclass(eq=False, slots=True)
class BareEpisode:
    """An episode on one engine, without a scheduler: it sends each turn straight to the engine."""

    engine: TimedEngine
    prompt: Prompt
    seed: int
    attempt: int = 0
    length: int = 0
    turns: int = 0
    response: Sequence[int] = field(default=())

    @property
    def room(self) -> int:
        return 1_000_000 - self.length

    @property
    def ports(self) -> EnvironmentPorts:
        return NO_PORTS

    async def generate(self, stop: Sequence[str] = (), max_tokens: int | None = None) -> Generation | None:
        self.turns += 1
        id = f"{self.seed}.{self.turns}"
        limit, seed = max_tokens or self.room, self.seed + self.turns
        made = await self.engine.generate(GenerationRequest(id, self.prompt.input, limit, seed=seed))
        self.length += len(made.tokens)
        return made

    def add(self, tokens: Sequence[int]) -> None:
        self.length += len(tokens)

    async def judge(self, tokens: Sequence[int]) -> Score | None:
        return Score(1.0)

    async def score(self, tokens: Sequence[int], reference: Mapping[str, Any] | None = None) -> Score:
        return Score(1.0)


def bare(flying: int, episodes: int, turns: int = TURNS) -> tuple[float, int]:
    """Run this number of episodes on engines and environments alone. Return the CPU seconds and the number of turns."""
    config, hardware = workload(flying, turns)
    section, environment = hardware.engine(config), config.environment
    assert isinstance(section, TimedEngineConfig)
    assert isinstance(environment, TimedEnvironmentConfig)
    taken = 0

    async def main() -> None:
        async def play(engine: TimedEngine, place: int) -> None:
            nonlocal taken
            for number in range(place, episodes, flying):
                prompt = Prompt("p", number // GROUP, "d", "", ModelInput.of((number // GROUP,)))
                episode = BareEpisode(engine, prompt, sample_seed(0, number // GROUP, number % GROUP))
                # a `BareEpisode` has the methods that a timed environment calls
                await timed.play(cast(Episode, episode))
                taken += episode.turns

        timed = TimedEnvironment(environment, section.tokens_per_tick)
        engines = [TimedEngine(section) for _ in range(section.replicas)]
        for engine in engines:
            await engine.update(0, Path())
        await asyncio.gather(*(play(engines[place % len(engines)], place) for place in range(flying)))

    gc.disable()  # a simulation also runs without the garbage collector
    began = time.process_time()
    run_virtual(main())
    gc.enable()
    return time.process_time() - began, taken


class MeasuredRun(SimulatedRun):
    """A simulated run that measures its own CPU seconds, without those for the results."""

    began = seconds = 0.0

    async def run(self, versions: int, watch: Callable[[int], None]) -> None:
        self.began = time.process_time()
        await super().run(versions, watch)

    async def _close(self) -> None:
        type(self).seconds = time.process_time() - self.began
        await super()._close()


def simulated(flying: int, turns: int = TURNS) -> tuple[float, int, int]:
    """Return the CPU seconds of a simulation, an estimate of its turns, and its trained episodes."""
    config, hardware = workload(flying, turns)
    figures = simulate(config, hardware, versions=VERSIONS, world_type=MeasuredRun).figures
    grain = hardware.engine(config).tokens_per_tick
    per_turn = 100 // grain * grain  # tokens of each turn
    return MeasuredRun.seconds, figures.tokens.sampled // per_turn, figures.bias.trained


def read_peak() -> int:
    """Return the peak memory of this process in kB; `ru_maxrss` would include that of the parent process."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1])


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a turn in CPU microseconds, in a simulation and on engines and environments alone, and the kB per
    episode.
    """

    whole: float
    alone: float
    memory: float

    @property
    def scheduling(self) -> float:
        """The CPU microseconds of scheduling for a turn."""
        return self.whole - self.alone


def measure(flying: int) -> Cost:
    """Measure the cost of a turn, and the peak memory, with `flying` episodes in flight."""
    empty = read_peak()
    seconds, turns, trained = simulated(flying)
    memory = (read_peak() - empty) / flying
    alone, taken = bare(flying, trained)
    return Cost(seconds / turns * 1e6, alone / taken * 1e6, memory)


def measure_apart(flying: int) -> Cost:
    """Measure in a new process, so that its memory does not include that of earlier simulations."""
    command = [sys.executable, "-m", "benchmarks.episodes", "--one", str(flying)]
    return Cost(**json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))


def rows(flyings: Sequence[int]) -> Iterator[Row]:
    """Return rows with microseconds per turn, by the number of episodes in flight."""
    first = 0.0
    for flying in flyings:
        print(f" {flying:,} in flight", file=sys.stderr)
        found = [measure_apart(flying) for _ in range(3 if flying < 10_000 else 1)]
        median = sorted(found, key=lambda one: one.scheduling)[len(found) // 2]
        cost = median.scheduling
        first = first or cost
        case = f"{flying:,} episodes in flight"
        yield Row(case, "whole simulation, µs a turn", median.whole)
        yield Row(case, "engines and environments alone, µs a turn", median.alone)
        yield at_most(case, "scheduling, µs a turn", cost, AIM)
        yield at_most(case, f"scheduling / that at {flyings[0]:,}", cost / first, 1.3)
        yield Row(case, "memory, kB an episode in flight", median.memory)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="keep only a few episodes in flight")
    parser.add_argument("--one", type=int, help="measure this number of episodes in this process, and print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(measure(options.one))))
        return
    publish(list(rows(QUICK_FLYING if options.quick else FLYING)), "episodes in flight", options.json)


if __name__ == "__main__":
    main()
