"""Owns the helpers of the reward actor: chooses their nodes, calls them and ends them.

- A helper starts on the allowed node with the fewest reward actors.
- The reward actor and its helpers exchange program times of test cases every `EXCHANGE_SECONDS`; a dead helper loses
  only the newest ones.
- A helper that does not answer for `recovery.answer_seconds` is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import ray

from rollflow.storage.run_records.case_anchors import CaseAnchors
from rollflow.storage.run_records.second_verdicts import SecondVerdictCounts
from rollflow.tasks.actors.placement import actor_options, is_fitting
from rollflow.tasks.actors.reward_helpers.actor import start_helper
from rollflow.tasks.actors.reward_helpers.calls import POLL_SECONDS, stream_scores
from rollflow.tasks.actors.reward_helpers.reports import HelperReport, HelperReports
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.coalesce import Coalescer
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.spread.fleet import Helper, HelperFleet
from rollflow.tasks.scorers.spread.follower import QueueFollower
from rollflow.tasks.scorers.spread.spread import PlaceLost, SpreadScorer

START_SECONDS = 600.0  # longest time, in seconds, until a helper has started, including the wait for a node
CLOSE_SECONDS = 5.0  # longest time, in seconds, in which a helper may end its worker processes


def choose_node(nodes: Sequence[Mapping[str, Any]], config: RunConfig, used: Mapping[str, int]) -> str | None:
    """Return the id of the living node with the fewest reward actors, of those that may run the next helper. The result
    is None if Ray should choose the node.

    Args:
        nodes: the nodes of the cluster, as `ray.nodes` describes them.
        used: number of reward actors, and of helpers that were lost, on each node.
    """
    if config.cluster.placement.strategy != "spread":
        return None
    cpus = actor_options(config, "reward", float(config.scorer_workers))["num_cpus"]
    fitting = [
        str(node["NodeID"])
        for node in nodes
        if node["Alive"] and node["Resources"].get("CPU", 0.0) >= cpus and is_fitting(node, config, "reward")
    ]
    return min(fitting, key=lambda node: (used.get(node, 0), node), default=None)


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
        # node -> number of reward actors and lost helpers
        self.used = Counter[str]([str(ray.get_runtime_context().get_node_id())])
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


class RayHelper(Helper):
    """A helper in a Ray actor."""

    def __init__(self, owner: HelperOwner) -> None:
        self._owner = owner
        # A call may wait `POLL_SECONDS` for a score.
        self._answer_seconds = owner.context.config.recovery.answer_seconds + POLL_SECONDS
        self._actor: Any = None
        self._node = ""
        self._known = {name: CaseAnchors() for name in owner.anchors}  # program times that the helper knows
        self._calls: Coalescer[ScoreRequest, Score] = Coalescer(self._send)
        self._asking = set[asyncio.Task[Score]]()

    async def start(self) -> None:
        """Start the Ray actor with its scorers; raise `PlaceLost` if it cannot start."""
        owner = self._owner
        with _lost_helpers():
            nodes = await asyncio.to_thread(ray.nodes)
            chosen = choose_node(nodes, owner.context.config, owner.used)
            self._use_node(chosen or "")
            self._actor = await asyncio.to_thread(start_helper, owner.context, chosen)
        self._use_node(await self._call(self._actor.begin.remote(self._select_news()), START_SECONDS))

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        """Begin to score responses; requests in the same iteration of the event loop share a call."""
        return [self._ask(request) for request in requests]

    def _ask(self, request: ScoreRequest) -> asyncio.Future[Score]:
        task = asyncio.create_task(self._calls.ask(request))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    async def _send(self, requests: Sequence[ScoreRequest]) -> AsyncIterator[list[tuple[int, Score]]]:
        with _lost_helpers():
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
        if self._actor is None:
            return
        try:
            with contextlib.suppress(PlaceLost):
                await self._call(self._actor.close.remote(), CLOSE_SECONDS)
                self._use_node("")
        finally:
            ray.kill(self._actor)

    async def _call(self, call: Any, seconds: float) -> Any:
        with _lost_helpers():
            async with asyncio.timeout(seconds):
                return await call

    def _use_node(self, node: str) -> None:
        """Count the helper on the node where it runs, instead of the node that was chosen. The node of a lost helper
        still counts, so that the next helper starts elsewhere if possible.
        """
        self._owner.used[self._node] -= 1
        self._owner.used[node] += 1
        self._node = node

    def _select_news(self) -> dict[str, dict[str, dict[int, float]]]:
        """Return the program times since the last call that the helper does not know yet."""
        news = {name: anchors.select_news(self._known[name]) for name, anchors in self._owner.anchors.items()}
        for name, rows in news.items():
            self._known[name].merge_rows(rows)
        return news


@contextlib.contextmanager
def _lost_helpers() -> Iterator[None]:
    """Raise `PlaceLost` in place of the errors of a helper that has died, failed or does not answer."""
    try:
        yield
    except TimeoutError:
        raise PlaceLost("it does not answer") from None
    except ray.exceptions.RayError as error:
        raise PlaceLost((str(error).strip() or type(error).__name__).splitlines()[0]) from None
