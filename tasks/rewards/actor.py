"""The reward stage's actor and its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import ray

from rollflow.storage.errors import Unreachable
from rollflow.tasks.coalesce import Coalescer
from rollflow.tasks.cpu import CpuClock
from rollflow.tasks.rewards.pool import RewardPool, ScoreRequest
from rollflow.tasks.rewards.verifier import Score
from rollflow.tasks.run import RunContext

REWARD = "reward"
AGAIN_SECONDS = 0.2


class RewardActor:
    """`RewardPool` in an actor: one per run."""

    def __init__(self, context: RunContext) -> None:
        """Reads nothing: while storage is waited for, `status` says so."""
        self.context = context
        self._began = 0.0
        self._finished = asyncio.Event()
        self._pool: asyncio.Task[RewardPool] | None = None
        self._cpu = CpuClock(REWARD, "reward workers")

    async def run(self) -> int:
        """Keep the workers until the run is finished; returns how many responses they scored.

        It may be called again, by a stage flow that took over from a dead one.
        """
        pool = await self._started()
        await self._finished.wait()
        await pool.close()
        return pool.scored

    async def _started(self) -> RewardPool:
        """The pool; the first who asks has it started."""
        if self._pool is None:
            self._pool = asyncio.create_task(self._start())
        return await asyncio.shield(self._pool)

    async def _start(self) -> RewardPool:
        pool = await asyncio.to_thread(lambda: RewardPool(self.context.config.reward, self.context.policy_folder))
        await pool.start()
        return pool

    async def finish(self) -> None:
        """Nothing more is to be scored."""
        self._finished.set()

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """See `RewardPool.score`."""
        pool = await self._started()
        self._began = self._began or time.monotonic()
        return await pool.score(requests)

    async def status(self) -> dict[str, Any]:
        """What the stage's flow and the live view show."""
        told = {"waits_for": self.context.store.waits, "costs": self._cpu.read()}
        if not self._began or self._pool is None:
            return {"scored": 0, "timeouts": 0, "idle": 0.0, **told}
        pool = self._pool.result()
        lasted = max(time.monotonic() - self._began, 1e-9) * self.context.config.reward.workers
        idle = max(0.0, 1.0 - pool.busy_seconds / lasted)
        return {"scored": pool.scored, "timeouts": pool.timeouts, "idle": idle, **told}


def start_reward(context: RunContext) -> Any:
    """Start the run's reward actor (or find it, after a restart of its flow)."""
    options = {"name": REWARD, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0, "max_concurrency": 256}
    return ray.remote(RewardActor).options(**options).remote(context)


class RewardClient:
    """Scores single responses through the run's reward actor; concurrent ones share a call.

    Scoring changes nothing, so it is repeated at the actor's successor when the actor dies.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience = patience_seconds
        self._actor: Any = None
        self._calls: Coalescer[ScoreRequest, Score] = Coalescer(self._send)

    async def score(self, request: ScoreRequest) -> Score:
        """The score of one response; `Unreachable` if no reward actor gives one in time."""
        return await self._calls.ask(request)

    async def _send(self, requests: Sequence[ScoreRequest]) -> Sequence[Score]:
        try:
            async with asyncio.timeout(self._patience):
                while True:
                    scores = await self._try(list(requests))
                    if scores is not None:
                        return scores
                    await asyncio.sleep(AGAIN_SECONDS)
        except TimeoutError:
            raise Unreachable(
                f"the reward stage did not score {len(requests)} responses in {self._patience:g} s"
            ) from None

    async def _try(self, requests: list[ScoreRequest]) -> list[Score] | None:
        """The scores, or None if the actor is gone (another will come)."""
        try:
            self._actor = self._actor or await asyncio.to_thread(ray.get_actor, REWARD)
            return list(await self._actor.score.remote(requests))
        except (ray.exceptions.RayActorError, ValueError):  # ValueError: no actor of that name
            self._actor = None
            return None
