"""Defines the Ray actor of a helper, which scores responses for the reward actor.

Ray ends a helper when the reward actor ends or dies. A helper runs only scorers that use worker processes, with as many
processes as the reward actor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from rollflow.storage.run_records.case_anchors import CaseAnchors
from rollflow.storage.run_records.second_verdicts import SecondVerdictCounts
from rollflow.tasks.actors.gauges import read_own_sandboxes
from rollflow.tasks.actors.lease import Lease
from rollflow.tasks.actors.placement import actor_options
from rollflow.tasks.actors.reward_helpers.calls import PackedRequest, ScoreCalls, Verdicts
from rollflow.tasks.actors.reward_helpers.reports import HelperReport
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.actor_warnings import warnings_of
from rollflow.tasks.runtime.async_once import AsyncOnce
from rollflow.tasks.runtime.cpu import CpuClock
from rollflow.tasks.runtime.gc_tuning import spare_collector
from rollflow.tasks.scorers import build_scorers
from rollflow.tasks.scorers.base import Scorer
from rollflow.tasks.scorers.config import has_adaptive_deadlines

HELPER = "reward helper"
AnchorRows = dict[str, dict[int, float]]  # row of the data -> test case -> longest run time of a correct program


class RewardHelper:
    """Ray actor of a helper, which runs the scorers that use worker processes."""

    def __init__(self, context: RunContext, lease: Lease | None = None) -> None:
        """Create the actor without reading storage."""
        if lease:
            lease.hold(HELPER)
        self.context = context
        self._scorer = AsyncOnce(self._start)
        self._calls = ScoreCalls()
        self._anchors: dict[str, CaseAnchors] = {}
        self._known: dict[str, CaseAnchors] = {}  # by scorer: program times that the reward actor knows
        self._counts: dict[str, SecondVerdictCounts] = {}
        self._cpu = CpuClock(HELPER, "reward workers")
        self._began = time.monotonic()

    async def begin(self, rows: Mapping[str, AnchorRows]) -> str:
        """Start the scorers with the program times that the run knows; return the id of this helper's Ray node."""
        await self._scorer.get()
        self._learn(rows)
        return str(ray.get_runtime_context().get_node_id())

    async def score(self, requests: Sequence[PackedRequest]) -> Verdicts:
        """Start scoring these requests, and return the first scores."""
        return await self._calls.score(await self._scorer.get(), requests)

    async def await_more(self, ticket: int) -> Verdicts:
        """Wait a short time, and return further scores of the earlier call of `score` that `ticket` identifies."""
        return await self._calls.await_more(ticket)

    async def exchange(self, rows: Mapping[str, AnchorRows]) -> HelperReport:
        """Add the run's new program times on test cases to those of the helper; return a report with the helper's own
        new times.
        """
        scorer = await self._scorer.get()
        self._learn(rows)
        workers = sum(self.context.config.scorers[name].workers for name in self._pools)
        return HelperReport(
            scorer.usage.busy_seconds,
            (time.monotonic() - self._began) * workers,
            self._cpu.read(),
            warnings_of(HELPER).read(),
            {name: self._report_anchors(name) for name in self._anchors},
            {name: replace(counts) for name, counts in self._counts.items()},
            read_own_sandboxes(),
        )

    async def close(self) -> None:
        """End the worker processes, which end their sandboxes."""
        if scorer := self._scorer.found:
            await scorer.close()

    @property
    def _pools(self) -> list[str]:
        """Names of the scorers that a helper runs: those that use worker processes."""
        return [name for name, config in self.context.config.scorers.items() if config.has_helpers]

    async def _start(self) -> Scorer:
        scorer = await asyncio.to_thread(self._build_scorer)
        await scorer.start()
        spare_collector()
        return scorer

    def _build_scorer(self) -> Scorer:
        configs = {name: self.context.config.scorers[name] for name in self._pools}
        self._anchors = {name: CaseAnchors() for name, config in configs.items() if has_adaptive_deadlines(config)}
        self._known = {name: CaseAnchors() for name in self._anchors}
        self._counts = {name: SecondVerdictCounts() for name, config in configs.items() if config.second_verdict_share}
        return build_scorers(configs, self.context.policy_folder, anchors=self._anchors, counts=self._counts)

    def _learn(self, rows: Mapping[str, AnchorRows]) -> None:
        for name, learned in rows.items():
            self._anchors[name].merge_rows(learned)
            self._known[name].merge_rows(learned)

    def _report_anchors(self, name: str) -> CaseAnchors:
        own, known = self._anchors[name], self._known[name]
        news = own.select_news(known)
        known.merge_rows(news)
        return CaseAnchors(news, own.kills, own.rechecked, own.false_kills)


def start_helper(context: RunContext, node: str | None) -> Any:
    """Start a helper on a node, or elsewhere if the node has no room; return the handle of its Ray actor.

    With `node = None`, Ray chooses the node.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = actor_options(context.config, "reward", float(context.config.scorer_workers), imports="reward")
    if node is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
    remote = ray.remote(RewardHelper).options(max_concurrency=1024, max_restarts=0, **options)
    return remote.remote(context, Lease.of(context))
