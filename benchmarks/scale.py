"""Measures how the cost of scheduling grows with the requests in flight, and simulates a million trajectories.

    python -m benchmarks.scale [--json FILE]

The results are CPU seconds of one process on the virtual clock. The time of a simulation includes its engines and its
event loop. So the same number of requests also runs on engines and verifiers alone, with equally many at a time. The
cost of this second run is subtracted; the rest is the cost of scheduler, dispatches, proxy, buffer and batches.
Response lengths are lognormal, one simulated token stands for 500, and Python's garbage collector is off.

A simulation generates more than it trains on, because responses run or wait for training at its end. So costs are
divided by the *generated* trajectories: the generated tokens over the mean tokens of a trained trajectory. The time
after the last version, in which Python frees the objects of the simulation, does not count.

The cost of tokens is measured separately, with all tokens and with the garbage collector. Each group is packed into
Arrow columns, each batch is encoded as a file, and requests and generations are pickled, `ON_WIRE` at a time.
"""

from __future__ import annotations

import asyncio
import gc
import math
import pickle
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import Row, arguments, at_most, publish
from rollflow.storage.batch import TrajectoryBatch, pack_group
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import GroupKey, PackedGroup, StopReason, TrajectoryGroup
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.actors.wire import pack_generations, pack_requests, unpack_generations, unpack_requests
from rollflow.tasks.engines.base import Generation, GenerationRequest, TokenSpan
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import ScoreRequest
from rollflow.tasks.simulation.hardware import Hardware, ResponsesHardware
from rollflow.tasks.simulation.parts import TimedRewards
from rollflow.tasks.simulation.records import SimulationRecords
from rollflow.tasks.simulation.world import SimulatedRun, simulate

SLOTS, GROUP = 256, 16
ENGINES = (4, 16, 64, 256, 1024)
TURNS = 4  # number of trajectories per slot
ON_WIRE = 64  # number of requests in one call of an engine's actor
TOKENS = {"median": 400, "cap": 8000, "tokens_per_tick": 1}


class Whole(SimulatedRun):
    """A simulated run that also encodes Arrow columns for each group, and a file for each batch."""

    tokens = 0

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._packed: dict[GroupKey, PackedGroup] = {}

    def _pack(self, group: TrajectoryGroup) -> TrajectoryGroup:
        self._packed[group.key] = pack_group(group)
        return group

    async def _commit(self, staged: StagedBatch) -> None:
        TrajectoryBatch.from_groups([self._packed.pop(group.key) for group in staged.groups]).to_bytes()
        self.tokens += sum(group.response_tokens for group in staged.groups)
        await super()._commit(staged)


def workload(engines: int, groups: int) -> tuple[RunConfig, Hardware]:
    """Return a workload with busy engines, and a learner that trains at once."""
    config = {"groups": groups, "group_size": GROUP, "async_ratio": 4, "policy": {"path": "simulated"}}
    hardware = {
        "engines": {
            "count": engines,
            "max_concurrent_requests": SLOTS,
            "seconds_per_token": 0.01,
            "batch_slowdown": 0.002,
        },
        "responses": {"median": 1600, "cap": 32000, "tokens_per_tick": 500},
        "reward": {"seconds": 1.0},
        "update": {"seconds": 1.0},
    }
    return RunConfig.model_validate(config), Hardware.model_validate(hardware)


def simulated(engines: int, trajectories: int, groups: int) -> tuple[float, int, float]:
    """Return the CPU seconds of a whole simulation, its trained trajectories, and the seconds per generated one."""
    config, hardware = workload(engines, groups)
    began = time.process_time()
    published = [began]
    figures = simulate(
        config,
        hardware,
        versions=max(2, trajectories // (groups * GROUP)),
        watch=lambda version: published.append(time.process_time()),
    ).figures
    trained, tokens = figures.bias.trained, figures.tokens
    generated = trained * tokens.sampled / tokens.trained
    return time.process_time() - began, trained, (published[-1] - began) / generated


def bare(engines: int, trajectories: int) -> float:
    """Return the CPU seconds of the same number of requests on engines and verifiers alone, one after another in each
    slot.
    """
    config, hardware = workload(engines, 1)
    section = hardware.engine(config)
    assert isinstance(section, TimedEngineConfig)

    async def main() -> None:
        async def slot(engine: TimedEngine, number: int) -> None:
            for turn in range(trajectories // (engines * SLOTS)):
                seed = number * 1000 + turn
                request = GenerationRequest(
                    f"{seed}", ModelInput.of((seed // GROUP,)), section.max_new_tokens, seed=seed
                )
                made = await engine.generate(request)
                await rewards.score(ScoreRequest(made.tokens, {"accuracy": 0.5}))

        rewards = TimedRewards(hardware.reward, 0, SimulationRecords())
        all_of = [TimedEngine(section) for _ in range(engines)]
        for engine in all_of:
            await engine.update(0, Path())
        await asyncio.gather(*(slot(e, SLOTS * n + s) for n, e in enumerate(all_of) for s in range(SLOTS)))

    gc.disable()  # a simulation also runs without the garbage collector
    began = time.process_time()
    run_virtual(main())
    gc.enable()
    return time.process_time() - began


def whole(engines: int, trajectories: int) -> float:
    """Return the CPU microseconds per trained token, including engines and verifiers, with the garbage collector."""
    config, hardware = workload(engines, engines * SLOTS // GROUP // 2)
    hardware = hardware.model_copy(update={"responses": ResponsesHardware(**TOKENS)})
    versions = max(2, trajectories // (config.groups * GROUP))
    timed = config.model_copy(update={"engine": hardware.engine(config), "versions": versions + config.capacity + 1})
    world = Whole(timed, hardware, config, timeline=False)
    began = time.process_time()
    run_virtual(world.run(versions, lambda version: None))
    return (time.process_time() - began) / world.tokens * 1e6


def wire(turns: int) -> float:
    """Return the CPU microseconds per token for pickling and unpickling an engine actor's requests and answers."""
    drawn = random.Random(0)
    took, tokens = 0.0, 0
    for _ in range(turns):
        lengths = [min(8000, round(400 * math.exp(drawn.gauss(0, 1)))) + 1 for _ in range(ON_WIRE)]
        requests = [GenerationRequest(f"{i}", ModelInput.of((1,) * 64), 8000, seed=i) for i in range(ON_WIRE)]
        made = [
            Generation(f"{i}", TokenSpan.of(range(n), (-1.5,) * n, (3,) * n), StopReason.STOP)
            for i, n in enumerate(lengths)
        ]
        began = time.process_time()
        unpack_requests(pickle.loads(pickle.dumps(pack_requests(requests), 5)))  # noqa: S301  made right here
        unpack_generations(pickle.loads(pickle.dumps(pack_generations(made), 5)))  # noqa: S301  made right here
        took, tokens = took + time.process_time() - began, tokens + sum(lengths)
    return took / tokens * 1e6


def measured(engines: int) -> tuple[float, int, float, float]:
    """Return a simulation's seconds, its trained trajectories, and the seconds per generated trajectory: of the whole
    simulation, and of engines and verifiers alone.
    """
    flying = engines * SLOTS
    return *simulated(engines, TURNS * flying, flying // GROUP // 2), bare(engines, TURNS * flying) / (TURNS * flying)


def rows() -> Iterator[Row]:
    """Return rows with microseconds per trajectory, by the number in flight."""
    first = 0.0
    for engines in ENGINES:
        flying = engines * SLOTS
        print(f" {flying:,} in flight", file=sys.stderr)
        found = [measured(engines) for _ in range(9 if engines < 64 else 1)]  # times of short ones vary by a tenth
        seconds, trained, whole_of, alone = sorted(found, key=lambda one: one[2] - one[3])[len(found) // 2]
        cost = whole_of - alone
        first = first or cost
        case = f"{flying:,} in flight"
        yield Row(case, "whole simulation, µs a trajectory", whole_of * 1e6)
        yield Row(case, "engines and verifiers alone, µs a trajectory", alone * 1e6)
        growth = "scheduling / that at 1,024"
        if engines < 1024:
            yield Row(case, growth, cost / first)
        else:
            yield at_most(case, growth, cost / first, 1.3)
            yield at_most(case, f"minutes on one core for {trained:,} trajectories", seconds / 60, 10)


def per_token() -> Iterator[Row]:
    """Return rows with microseconds per token."""
    case = f"{4 * SLOTS:,} in flight, every token"
    yield Row(case, "simulation with packing, Arrow and collector, µs a trained token", whole(4, 4 * SLOTS * TURNS))
    yield Row(case, "wire, both ways and ends, µs a token", wire(50))


def main() -> None:
    """Simulate and print the table."""
    chosen = arguments(__doc__.splitlines()[0]).parse_args()
    publish([*rows(), *per_token()], "scale, simulated", chosen.json)


if __name__ == "__main__":
    main()
