"""Owns the helpers of the reward actor: chooses their nodes, calls them and ends them.

- A helper starts on the allowed node with the fewest reward actors.
- The reward actor and its helpers exchange program times of test cases every `EXCHANGE_SECONDS`; if a helper dies, only
  its newest times are lost.
- A helper that does not answer for `recovery.answer_seconds` is killed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

import ray

from rollflow.storage.run_records.case_anchors import CaseAnchors
from rollflow.storage.run_records.second_verdicts import SecondVerdictCounts
from rollflow.tasks.actors.reward_helpers.actor import start_helper
from rollflow.tasks.actors.reward_helpers.calls import POLL_SECONDS, stream_scores
from rollflow.tasks.actors.reward_helpers.reports import HelperReport, HelperReports
from rollflow.tasks.actors.spread.member import FleetActor, NodeChoice, report_lost_actors
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.coalesce import Coalescer
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.spread.fleet import Helper, HelperFleet
from rollflow.tasks.scorers.spread.follower import QueueFollower
from rollflow.tasks.scorers.spread.spread import SpreadScorer


class HelperOwner:
    """Owns the helpers of the reward actor."""

    def __init__(
        self,
        context: RunContext,
        anchors: Mapping[str, CaseAnchors],
        counts: Mapping[str, SecondVerdictCounts],
        spread: SpreadScorer,
    ) -> None:
        """Create the owner without helpers. `anchors` and `counts` are the reward actor's program times and counts of
        second verdicts, by scorer.
        """
        self.context, self.anchors = context, anchors
        home = str(ray.get_runtime_context().get_node_id())
        threads = float(context.config.scorer_workers)
        self.nodes = NodeChoice(context.config, "reward", threads, {home: 1})
        self.reports = HelperReports(anchors, counts)
        bounds = context.config.cluster.reward_actors
        follower = QueueFollower(bounds.min, bounds.most, bounds.grow_seconds, bounds.idle_seconds)
        warn = logging.getLogger(__name__).warning
        self.fleet = HelperFleet(spread, follower, lambda: RayHelper(self), warn)
        self._running = asyncio.create_task(self.fleet.run())

    async def close(self) -> None:
        """End all helpers."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


class RayHelper(FleetActor, Helper):
    """A helper in a Ray actor."""

    close_seconds = 5.0  # longest time, in seconds, in which a helper may end its worker processes

    def __init__(self, owner: HelperOwner) -> None:
        super().__init__(owner.nodes)
        self._owner = owner
        # A call may wait `POLL_SECONDS` for a score.
        self._answer_seconds = owner.context.config.recovery.answer_seconds + POLL_SECONDS
        self._known = {name: CaseAnchors() for name in owner.anchors}  # program times that the helper knows
        self._calls: Coalescer[ScoreRequest, Score] = Coalescer(self._send)
        self._asking = set[asyncio.Task[Score]]()

    async def start(self) -> None:
        """Start the Ray actor with its scorers; raise `PlaceLost` if it cannot start."""
        start = partial(start_helper, self._owner.context)
        await self._start_actor(start, lambda actor: actor.begin.remote(self._select_news()))

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Begin to score responses; requests in the same iteration of the event loop share a call."""
        return [self._ask(request) for request in requests]

    def _ask(self, request: ScoreRequest) -> asyncio.Future[Score]:
        task = asyncio.create_task(self._calls.ask(request))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    async def _send(self, requests: Sequence[ScoreRequest]) -> AsyncIterator[list[tuple[int, Score]]]:
        with report_lost_actors():
            async for found in stream_scores(self._actor, requests, self._answer_seconds):
                yield found

    async def exchange(self) -> None:
        """Send new program times to the helper, and merge the helper's report."""
        report: HelperReport = await self._call(self._actor.exchange.remote(self._select_news()), self._answer_seconds)
        for name, news in report.anchors.items():
            self._known[name].merge_rows(news.rows)
        self._owner.reports.note(self, report)

    async def end(self) -> None:
        """End the Ray actor, its worker processes and their sandboxes."""
        for task in self._asking:
            task.cancel()
        self._owner.reports.end(self)
        await super().end()

    def _select_news(self) -> dict[str, dict[str, dict[int, float]]]:
        """Return the program times that the helper does not know yet, and note that it knows them now."""
        news = {name: anchors.select_news(self._known[name]) for name, anchors in self._owner.anchors.items()}
        for name, rows in news.items():
            self._known[name].merge_rows(rows)
        return news
