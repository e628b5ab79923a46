"""Tests that an episode that is no longer needed ends immediately, even while its environment computes, and delays no
group.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from dataclasses import replace
from typing import Literal

import pytest

from benchmarks.baselines import BatchScheduler
from rollflow.storage.audit.audit import audit
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import GroupKey
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.rollout.group import GroupRollout
from rollflow.tasks.rollout.scheduler import RolloutScheduler
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score
from tests.support.log_runs import read
from tests.support.pipeline import Pipeline, prompt_at

Place = Literal["before its first turn", "between two turns", "behind its last turn"]
PLACES: tuple[Place, ...] = ("before its first turn", "between two turns", "behind its last turn")
LONG = 1e6  # in virtual seconds; each run in these tests takes less than a thousandth of this time


class Thinking(Environment):
    """An environment that computes for a long time at the point `place`, in one of every `one_of` episodes."""

    def __init__(self, place: Place, one_of: int = 2) -> None:
        self.place, self.one_of, self.played, self.thought = place, one_of, 0, 0

    async def play(self, episode: Episode) -> Score | None:
        thinks, self.played = self.played % self.one_of == self.one_of - 1, self.played + 1
        for place in PLACES:
            if thinks and place == self.place:
                self.thought += 1
                await self.think()
            if place != PLACES[2] and await episode.generate() is None:
                return None
        return Score(1.0, "said")

    async def think(self) -> None:
        await asyncio.sleep(LONG)


class Stubborn(Thinking):
    """An environment that ignores its cancellation and asks for another turn."""

    async def think(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(LONG)


async def timed(pipeline: Pipeline) -> float:
    await pipeline.run()
    return asyncio.get_running_loop().time()


def pipeline(environment: Environment, **changes: object) -> Pipeline:
    choices = changes.pop("choices", {"redundant_responses": 1, "on_stale": "drop"})
    common: dict[str, object] = {"versions": 3, "group_size": 1, "sigma": 0.0, "environment": environment}
    return Pipeline(MemoryStore(uuid.uuid4().hex), choices=choices, **{**common, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Thinking, Stubborn])
@pytest.mark.parametrize("place", PLACES)
def test_complete_group_does_not_wait_for_a_slow_environment(place: Place, kind: type[Thinking]) -> None:
    """The tokens of the interrupted episode are counted as surplus tokens, which are not trained on."""
    # With equal lengths, the group would be complete before its environment computes after the last turn.
    spread = 1.0 if place == PLACES[2] else 0.0
    run = pipeline(environment := kind(place), sigma=spread)
    assert run_virtual(timed(run)) < LONG / 1000
    assert environment.thought > 0
    assert audit(run.store).clean
    surplus = [entry.body.surplus_tokens for entry in read(run.store) if isinstance(entry.body, BatchCommitted)]
    assert sum(surplus) > 0 or place == PLACES[0]
    if not spread:
        assert surplus == [run.groups * 16 * PLACES.index(place)] * 3  # each turn has 16 tokens


@pytest.mark.parametrize("place", PLACES[1:])
def test_preempted_responses_end_immediately(place: Place) -> None:
    """A group becomes too old while one of its episodes computes; its prompt is reissued, and no batch waits for it."""
    environment = Thinking(place, one_of=20)
    run = pipeline(environment, versions=8, choices={"on_stale": "drop"})
    assert run_virtual(timed(run)) < LONG / 1000
    report = audit(run.store)
    assert report.clean
    assert report.fates["discarded: stale"] > 0, report.fates
    assert environment.thought > 0


class LateFirst(Environment):
    """An environment that computes for a second before the first turn of some episodes."""

    def __init__(self, seed: int) -> None:
        self.draw, self.interrupted = random.Random(seed), 0

    async def play(self, episode: Episode) -> Score | None:
        if self.draw.random() < 0.5:
            try:
                await asyncio.sleep(1.0)
            except asyncio.CancelledError:
                self.interrupted += 1
                raise
        return None if await episode.generate() is None else Score(1.0, "said")


@pytest.mark.parametrize("scheduler", [RolloutScheduler, BatchScheduler])
def test_episode_without_a_turn_does_not_delay_a_batch(scheduler: type[RolloutScheduler]) -> None:
    """In batch mode, scoring waits for the last response. It must not wait for a preempted episode that has not begun
    its first turn.
    """
    choices = {"redundant_groups": 1, "redundant_responses": 1, "on_stale": "drop"}
    interrupted = 0
    for seed in range(4):
        alone = {"groups": 1, "slots": 1, "max_inflight_groups": 1, "async_ratio": 0.0, "scheduler_type": scheduler}
        run = pipeline(LateFirst(seed), **alone, choices=choices)
        run_virtual(run.run())
        interrupted += run.environment.interrupted  # type: ignore[attr-defined]
        assert audit(run.store).clean
    assert interrupted > 0


@pytest.mark.parametrize("let_go", [False, True])
def test_end_of_the_run_cancels_waiting_environments(let_go: bool) -> None:
    """Waiting environments are cancelled at the end of the run, even if their episode was given up just before."""

    async def main() -> None:
        environment = Thinking("between two turns", one_of=1)
        run = pipeline(environment, versions=1)
        running = asyncio.create_task(run.run())
        await asyncio.sleep(5.0)
        ports = replace(run.scheduler._group_ports)
        rollout = GroupRollout(GroupKey(99, 0), ports, 2, 99, awaited=False)
        task = asyncio.create_task(rollout.run(prompt_at(99)))
        await asyncio.sleep(5.0)
        if let_go:
            for episode in rollout._playing:
                episode.let_go()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert asyncio.get_running_loop().time() < LONG / 1000

    run_virtual(main())
