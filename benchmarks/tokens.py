"""Measures the CPU time per token, and the memory per response in flight, in the scheduler's process.

    python -m benchmarks.tokens [--json FILE]

The shipped scheduler, proxy, engine client, buffer and batches run as in a real run. Fakes replace the engines' actor
and the verifier, and answer at once with prepared bytes; requests and answers are pickled, as by Ray. A batch is
encoded as a file, but not written to disk.

- A token: the CPU time of long responses minus that of short ones, divided by the difference in tokens. So costs that
  do not depend on the length cancel out. Half of the responses first report half of their tokens, as slow responses do.
- A response in flight: the memory that Python has allocated, divided by the requests that wait for an engine's answer.
  In the second row each request has a report of 1,000 tokens.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Row, arguments, at_most, publish
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Prompt, StopReason
from rollflow.storage.token_arrays import Float32s, Int32s
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.actors.engine_client import RayEngine
from rollflow.tasks.actors.wire import ENDINGS, Collected, PackedPartials, PackedRequests
from rollflow.tasks.rollout.limits import RolloutLimits
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from rollflow.tasks.rollout.resuming.resume_point import ResumePoint
from rollflow.tasks.rollout.scheduler import RolloutScheduler, SchedulerPorts
from rollflow.tasks.scorers.base import Score, ScoreRequest

GROUPS, GROUP_SIZE, BATCHES = 16, 8, 6
SHORT, LONG, TURNS = 100, 8_000, 5
FLYING, REPORTED = 16_384, 1_000
PROMPT = 64  # length of a prompt in tokens
SETTLE_SECONDS = 20.0
TOKEN_MICROSECONDS, FLYING_BYTES = 0.05, 2_048  # the targets of the two measurements


class Call:
    """A remote method of the actor."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        """Start the call at once, as Ray does."""
        return asyncio.ensure_future(self._called(*arguments))

    async def _called(self, *arguments: Any) -> Any:
        """Call the method with pickled arguments and a pickled result."""
        found = await self._method(*pickle.loads(pickle.dumps(arguments, 5)))  # noqa: S301  made right here
        return pickle.loads(found) if isinstance(found, bytes) else found  # noqa: S301


@dataclass
class Actor:
    """A fake `EngineActor`: each response has `tokens` tokens of version 0; if `hangs`, no response ends."""

    tokens: int
    reported: int = 0
    hangs: bool = False
    asked: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __getattr__(self, name: str) -> Call:
        methods: dict[str, Callable[..., Any]] = {"submit": self._submit, "collect": self._collect}
        return Call(methods.get(name, self._nothing))

    async def _nothing(self, *arguments: object) -> None: ...

    async def _submit(self, owner: str, packed: PackedRequests) -> None:
        self.asked += packed[0]
        self.news.set()

    async def _collect(self, owner: str) -> bytes:
        await self.news.wait()
        self.news.clear()
        asked, self.asked = self.asked, []
        ended = [] if self.hangs else asked
        reported = self.columns(asked if self.hangs else asked[::2], self.reported or self.tokens // 2)
        endings = bytes([ENDINGS.index(StopReason.STOP)]) * len(ended)
        told: Collected = ((self.columns(ended, self.tokens), endings, [0] * len(ended), {}), [], reported)
        return pickle.dumps(told, 5)

    @staticmethod
    def columns(ids: list[str], tokens: int) -> PackedPartials:
        """Return columns with `tokens` tokens per response."""
        count = tokens * len(ids)
        columns = Int32s.same(7, count).data, Float32s.same(-1.5, count).data, Int32s.same(0, count).data
        return ids, *columns, [tokens] * len(ids)


class Here:
    """A `WeightsSource` without weights."""

    patience = None

    def weights(self, version: int) -> Path:
        """Return no weights."""
        return Path()


async def scheduler_of(
    actor: Actor, batches: int, groups: int, commit: Callable[[StagedBatch], Awaitable[None]]
) -> RolloutScheduler:
    """Create the scheduler of a run with one engine."""
    count = groups * GROUP_SIZE
    proxy = InferenceProxy([RayEngine(actor)], count)
    await proxy.update(0, Here(), WeightsProbe((), (), 0.0), "continue")
    limits = RolloutLimits(
        seed=0,
        batches=batches,
        groups=groups,
        group_size=GROUP_SIZE,
        async_ratio=float(batches),
        max_inflight_groups=groups,
        attempts=2,
        max_new_tokens=LONG,
        temperature=1.0,
        slots=count,
    )
    tokens = Int32s.same(5, PROMPT)
    ports = SchedulerPorts(lambda index: Prompt(f"p{index}", index, "d", "", ModelInput.of(tokens)), judged, commit)
    return RolloutScheduler(limits, ports, proxy, ResumePoint())


async def judged(request: ScoreRequest) -> Score:
    """Return a fixed score."""
    pickle.loads(pickle.dumps((Int32s.of(request.tokens).data, request.reference), 5))  # noqa: S301  made right here
    return Score(1.0, "")


async def committed(staged: StagedBatch) -> None:
    """Encode a batch as the bytes of its file."""
    TrajectoryBatch.from_groups(staged.groups).to_bytes()


def seconds(tokens: int) -> float:
    """Return the CPU seconds of a run with responses of `tokens` tokens."""
    gc.collect()
    began = time.process_time()

    async def main() -> None:
        scheduler = await scheduler_of(Actor(tokens), BATCHES, GROUPS, committed)
        await scheduler.run()

    asyncio.run(main())
    return time.process_time() - began


def microseconds_a_token() -> float:
    """Return the smallest of several measurements, because other work can only increase them."""
    seconds(SHORT)
    more = min(seconds(LONG) for _ in range(TURNS)) - min(seconds(SHORT) for _ in range(TURNS))
    return more / (BATCHES * GROUPS * GROUP_SIZE * (LONG - SHORT)) * 1e6


def bytes_in_flight(reported: int) -> float:
    """Return the memory of a running response, with its reported tokens."""

    async def main() -> float:
        actor = Actor(0, reported, hangs=True)
        scheduler = await scheduler_of(actor, 2, FLYING // GROUP_SIZE, committed)
        gc.collect()
        tracemalloc.start()
        running = asyncio.create_task(scheduler.run())
        await asyncio.sleep(SETTLE_SECONDS)  # wait until the engine has all requests and has reported tokens for them
        assert scheduler.running * GROUP_SIZE == FLYING
        gc.collect()
        found = tracemalloc.get_traced_memory()[0] / FLYING
        tracemalloc.stop()
        running.cancel()
        await asyncio.wait([running])
        return found

    return asyncio.run(main())


def rows() -> Sequence[Row]:
    """Return all rows."""
    bare, with_tokens = bytes_in_flight(0), bytes_in_flight(REPORTED)
    return [
        at_most("scheduler's process", "µs a token", microseconds_a_token(), TOKEN_MICROSECONDS),
        at_most("a response in flight", "bytes, without tokens", bare, FLYING_BYTES),
        Row("a response in flight", "bytes a token that was reported", (with_tokens - bare) / REPORTED),
    ]


def main() -> None:
    """Measure and print the table."""
    chosen = arguments(__doc__.splitlines()[0] if __doc__ else "").parse_args()
    publish(rows(), "tokens in the scheduler's process", chosen.json)


if __name__ == "__main__":
    main()
