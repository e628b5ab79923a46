"""Defines the Ray actor that scores responses, and the client with which other actors request scores.

    score() ─┐                         ┌─ pool
    score() ─┼─ score([...]) ────────► │   answers when all are scored, or after PACKET_SECONDS with those that are
    score() ─┘   one per loop tick     │
        ▲                              │
        └──────── more(ticket) ◄───────┘   long poll for the missing scores

If all scores of a call are quick, one answer returns all of them. A slow score does not delay the other scores.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import ray

from rollflow.storage.errors import RollflowError, StoreFailed, Unreachable
from rollflow.storage.run_records.case_anchors import CaseAnchors, anchors_path, read_anchors
from rollflow.storage.run_records.judge_usage import JudgeUsage, judge_usage_path, read_judge_usage
from rollflow.storage.run_records.second_verdicts import SecondVerdictCounts, counts_path, read_counts
from rollflow.tasks.actors.gauges import Gauges
from rollflow.tasks.actors.lease import Lease
from rollflow.tasks.actors.placement import actor_options
from rollflow.tasks.actors.reward_helpers.calls import POLL_SECONDS, PackedRequest, ScoreCalls, Verdicts, stream_scores
from rollflow.tasks.actors.reward_helpers.owner import HelperOwner
from rollflow.tasks.actors.reward_helpers.reports import HelperReport
from rollflow.tasks.actors.reward_models import RayCopies
from rollflow.tasks.actors.statuses import RewardStatus
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.scorer_versions import record_scorers
from rollflow.tasks.runtime.actor_warnings import warnings_of
from rollflow.tasks.runtime.async_once import AsyncOnce
from rollflow.tasks.runtime.coalesce import Coalescer
from rollflow.tasks.runtime.cpu import CpuClock
from rollflow.tasks.runtime.gc_tuning import spare_collector
from rollflow.tasks.scorers import build_scorers
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest
from rollflow.tasks.scorers.config import has_adaptive_deadlines, list_remote, name_section
from rollflow.tasks.scorers.judge.config import JudgeReward
from rollflow.tasks.scorers.spread.spread import SpreadScorer, list_slots

REWARD = "reward"
AGAIN_SECONDS = 0.2
SAVE_SECONDS = 30.0  # seconds between two periodic calls of `_store_records`


class RewardActor:
    """Ray actor that runs the scorers of a run.

    With `cluster.reward_actors`, the actor owns helpers, which may run on other nodes and end with the actor.
    """

    def __init__(self, context: RunContext, lease: Lease | None = None) -> None:
        """Create the actor without reading storage, so that `status` can report that the actor waits for storage."""
        if lease:
            lease.hold(REWARD)
        self.context = context
        self._began = 0.0
        self._calls = ScoreCalls()
        self._finished = asyncio.Event()
        self._attended = False
        self._scorer = AsyncOnce(self._start)
        # name of a scorer with adaptive deadlines -> known times of programs on the test cases
        self._anchors: dict[str, CaseAnchors] = {}
        self._counts: dict[str, SecondVerdictCounts] = {}  # name of a scorer that judges responses twice -> its counts
        self._judges: dict[str, JudgeUsage] = {}  # config section of a judge -> how much the run has used the judge
        self._stored: dict[str, bytes] = {}  # path of a stored record -> the record
        self._saving: asyncio.Task[None] | None = None
        self._storing = asyncio.Lock()  # without this lock, an older record could overwrite a newer record
        self._helpers: HelperOwner | None = None
        self._cpu = CpuClock(REWARD, "reward workers")
        self._gauges = Gauges(REWARD, context.uri)

    @property
    def _workers(self) -> int:
        """Number of responses, or of calls of reward models, that can be scored at the same time."""
        return sum(reward.scoring_slots for reward in self.context.config.scorers.values())

    async def begin(self) -> None:
        """Start the scorers before the Prefect flow of the reward stage calls `run`."""
        await self._scorer.get()

    async def run(self) -> int:
        """Score responses until `finish` is called; return the number of scored responses.

        A restarted Prefect flow may call `run` a second time.

        Raises:
            ConfigError: a scorer cannot score any response.
        """
        self._attended = True
        scorer = await self._scorer.get()
        try:
            await scorer.serve(self._finished)
            if self._helpers:
                await self._helpers.close()
        finally:
            await self._store_records()
        return scorer.usage.scored

    async def _start(self) -> Scorer:
        scorer = await asyncio.to_thread(self._build_scorer)
        await scorer.start()
        config = self.context.config
        if config.cluster.reward_actors.most > 1:
            scorer = SpreadScorer(scorer, list_slots(scorer, config.scorers))
            self._helpers = HelperOwner(self.context, self._anchors, self._counts, scorer)
        if self._anchors or self._counts or self._judges:
            self._saving = asyncio.create_task(self._keep_records())
        spare_collector()
        return scorer

    def _build_scorer(self) -> Scorer:
        scorers = self.context.config.scorers
        for name in (name for name, config in scorers.items() if has_adaptive_deadlines(config)):
            self._anchors[name] = read_anchors(self.context.store, name_section(name))
        for name in (name for name, config in scorers.items() if config.second_verdict_share):
            self._counts[name] = read_counts(self.context.store, name_section(name))
        for section, judge in list_remote(scorers).items():
            if isinstance(judge, JudgeReward):
                self._judges[section] = read_judge_usage(self.context.store, section)
        folder, known = self.context.policy_folder, (self._anchors, self._counts, self._judges)
        scorer = build_scorers(scorers, folder, RayCopies, *known)
        # If storage fails, the run continues without a record of the scorers' versions.
        with contextlib.suppress(RollflowError, OSError):
            for change in record_scorers(self.context):
                logging.getLogger(__name__).warning("%s; `rollflow rejudge` shows what it decides differently", change)
        return scorer

    async def _keep_records(self) -> None:
        """Periodically store the records about the scorers, such as run times of test cases."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self._store_records()

    async def _store_records(self) -> None:
        """Store the records that have changed: program times of test cases, counts of second verdicts, and the use of
        judges.

        If storage fails, the next call of `_store_records` tries again.
        """
        async with self._storing:
            records = {anchors_path(name_section(name)): one.encode() for name, one in self._anchors.items()}
            records |= {counts_path(name_section(name)): one.encode() for name, one in self._counts.items()}
            records |= {judge_usage_path(section): one.encode() for section, one in self._judges.items()}
            for path, record in records.items():
                if record != self._stored.get(path):
                    with contextlib.suppress(Unreachable, StoreFailed):
                        await asyncio.to_thread(self.context.store.put, path, record)
                        self._stored[path] = record

    async def finish(self) -> None:
        """Make `run` return, because no more responses will be scored."""
        self._finished.set()

    async def score(self, requests: Sequence[PackedRequest]) -> Verdicts:
        """Start scoring these requests, and return the first scores."""
        scorer = await self._scorer.get()
        self._began = self._began or time.monotonic()
        return await self._calls.score(scorer, requests)

    async def await_more(self, ticket: int) -> Verdicts:
        """Wait a short time, and return further scores of the earlier call of `score` that `ticket` identifies."""
        return await self._calls.await_more(ticket)

    async def status(self) -> RewardStatus:
        """Return the reward actor's status, for the Prefect flow of the reward stage and for the live view."""
        helped = self._helpers.reports.sum() if self._helpers else HelperReport()
        actors = 1 + (self._helpers.fleet.count if self._helpers else 0)
        costs, warned = [*self._cpu.read(), *helped.costs], [*warnings_of(REWARD).read(), *helped.warned]
        waits, scorer = self.context.store.waits, self._scorer.found
        if not self._began or scorer is None:
            return RewardStatus(waits, costs, 1.0, warned, actors=actors, attended=self._attended)
        lasted = max(time.monotonic() - self._began, 1e-9) * self._workers + helped.worker_seconds
        idle = max(0.0, 1.0 - (scorer.usage.busy_seconds + helped.busy_seconds) / lasted)
        status = RewardStatus(
            waits,
            costs,
            idle,
            warned,
            scorer.usage.scored,
            scorer.usage.timeouts,
            kills=sum(anchors.kills for anchors in self._anchors.values()),
            rechecked=sum(anchors.rechecked for anchors in self._anchors.values()),
            false_kills=sum(anchors.false_kills for anchors in self._anchors.values()),
            second_verdicts={name_section(name): one.verdicts for name, one in self._counts.items()},
            flips={name_section(name): one.flips for name, one in self._counts.items()},
            actors=actors,
            attended=self._attended,
            sandboxes=helped.sandboxes,
        )
        return self._gauges.show(status)


def start_reward(context: RunContext) -> Any:
    """Start the run's reward actor, or find the actor if it is already running."""
    options = {"name": REWARD, "lifetime": "detached", "get_if_exists": True, "max_concurrency": 256}
    options |= actor_options(context.config, "reward", float(context.config.scorer_workers), imports="reward")
    return ray.remote(RewardActor).options(**options).remote(context, Lease.of(context))


class RewardClient:
    """Client of the run's reward actor, which scores responses.

    Concurrent requests share a call, but no request waits for the score of another request. If the reward actor dies,
    the new actor computes the missing scores, because scoring has no side effects.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience = patience_seconds
        self._actor: Any = None
        self._moved = 0.0  # monotonic time at which the last score of any request arrived
        self._calls: Coalescer[ScoreRequest, Score] = Coalescer(self._send)

    async def score(self, request: ScoreRequest) -> Score:
        """Score one response; raise `Unreachable` if the reward actor returns no score for `patience_seconds`."""
        return await self._calls.ask(request)

    async def _send(self, requests: Sequence[ScoreRequest]) -> AsyncIterator[list[tuple[int, Score]]]:
        """Yield each score with its request's position until all requests are scored. If the reward actor dies, the new
        reward actor computes the missing scores.
        """
        left, began = dict(enumerate(requests)), time.monotonic()
        while True:
            places = list(left)
            async for found in self._ask_actor(list(left.values())):
                for at, _ in found:
                    del left[places[at]]
                self._check_moving(began, news=len(found), left=len(left))
                yield [(places[at], score) for at, score in found]
            if not left:
                return
            self._check_moving(began, news=0, left=len(left))
            await asyncio.sleep(AGAIN_SECONDS)

    async def _ask_actor(self, requests: list[ScoreRequest]) -> AsyncIterator[list[tuple[int, Score]]]:
        """Yield the scores that the reward actor returns; end early if the actor has died."""
        try:
            self._actor = actor = self._actor or await asyncio.to_thread(ray.get_actor, REWARD)
            async for found in stream_scores(actor, requests, self._patience + POLL_SECONDS):
                yield found
        # `ValueError` means that no actor has this name.
        except (ray.exceptions.RayActorError, ValueError, TimeoutError):
            self._actor = None

    def _check_moving(self, began: float, *, news: int, left: int) -> None:
        """Raise `Unreachable` if the reward actor has returned no score for `patience_seconds`."""
        now = time.monotonic()
        if news:
            self._moved = now
        elif now - max(self._moved, began) > self._patience:
            raise Unreachable(
                f"the reward stage returned no score for {self._patience:g} s (rollout.patience_seconds), while "
                f"{left} responses wait for a score"
            )
