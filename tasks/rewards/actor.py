"""The reward stage's actor and its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import ray

from rollflow.storage.errors import Unreachable
from rollflow.tasks.coalesce import Coalescer
from rollflow.tasks.rewards.pool import RewardPool, ScoreRequest
from rollflow.tasks.rewards.verifier import Score
from rollflow.tasks.run import RunContext

REWARD = "reward"


class RewardActor:
    """`RewardPool` in an actor: one per run."""

    def __init__(self, context: RunContext) -> None:
        self.pool = RewardPool(context.config.reward, context.policy_folder)
        self._workers = context.config.reward.workers
        self._began = 0.0
        self._finished = asyncio.Event()

    async def run(self) -> int:
        """Keep the workers until the run is finished; returns how many responses they scored."""
        await self.pool.start()
        await self._finished.wait()
        await self.pool.close()
        return self.pool.scored

    async def finish(self) -> None:
        """Nothing more is to be scored."""
        self._finished.set()

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """See `RewardPool.score`."""
        self._began = self._began or time.monotonic()
        return await self.pool.score(requests)

    async def status(self) -> dict[str, Any]:
        """What the stage's flow and the live view show."""
        lasted = max(time.monotonic() - self._began, 1e-9) if self._began else 1e-9
        idle = max(0.0, 1.0 - self.pool.busy_seconds / (lasted * self._workers)) if self._began else 0.0
        return {"scored": self.pool.scored, "timeouts": self.pool.timeouts, "idle": idle}


def start_reward(context: RunContext) -> Any:
    """Start the run's reward actor (or find it, after a restart of its flow)."""
    options = {"name": REWARD, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0, "max_concurrency": 256}
    return ray.remote(RewardActor).options(**options).remote(context)


class RewardClient:
    """Scores single responses through the actor; concurrent ones share a call."""

    def __init__(self, actor: Any, patience_seconds: float) -> None:
        self._actor, self._patience = actor, patience_seconds
        self._calls: Coalescer[ScoreRequest, Score] = Coalescer(self._send)

    async def score(self, request: ScoreRequest) -> Score:
        """The score of one response; `Unreachable` if the actor is gone or silent."""
        return await self._calls.ask(request)

    async def _send(self, requests: Sequence[ScoreRequest]) -> Sequence[Score]:
        try:
            return list(await asyncio.wait_for(self._actor.score.remote(list(requests)), self._patience))
        except TimeoutError:
            raise Unreachable(
                f"the reward stage did not score {len(requests)} responses in {self._patience:g} s"
            ) from None
        except ray.exceptions.RayActorError as error:
            raise Unreachable(f"the reward stage's actor died: {error}") from error
