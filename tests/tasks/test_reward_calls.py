"""Calls of the reward actor: scores arrive one by one, and after a death the new actor computes the missing scores."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from rollflow.storage.errors import Unreachable
from rollflow.storage.objects import open_store
from rollflow.tasks.actors.reward import REWARD, RewardActor, RewardClient
from rollflow.tasks.prompts.config import ReasoningGymPrompts
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest
from rollflow.tasks.scorers.config import ReasoningGymReward
from rollflow.tasks.scorers.pool import RewardPool
from tests.support.described import describe
from tests.support.waiting import HANG_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_node")]
WORKER = """
import json, os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    while (until := request["reference"].get("until")) and not os.path.exists(until): time.sleep(0.01)
    print(json.dumps([1.0, str(bytes.fromhex(request["tokens"])[0]), "correct", {}, 0.001]), flush=True)
"""


class OddReward(RewardActor):
    """A reward actor whose verifier waits for a file if a request names one."""

    def _build_scorer(self) -> Scorer:
        pool = super()._build_scorer()
        assert isinstance(pool, RewardPool)
        pool._command = [sys.executable, "-c", WORKER]
        return pool


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    config = RunConfig(prompts=(ReasoningGymPrompts(),), reward=ReasoningGymReward(deadline_seconds=250))
    store = open_store(str(tmp_path / "run"))
    describe(store, "rewards", config)
    store.put("policy/config.json", b"{}")
    return RunContext(str(tmp_path / "run"), tmp_path / "cache")


@pytest.fixture
def actor(context: RunContext) -> Iterator[Any]:
    actor = started(context)
    yield actor
    ray.kill(ray.get_actor(REWARD))


def started(context: RunContext) -> Any:
    actor = ray.remote(OddReward).options(name=REWARD, num_cpus=0, max_concurrency=256).remote(context)
    actor.run.remote()
    return actor


def asked(client: RewardClient, numbers: Sequence[int], until: Path | None = None) -> list[asyncio.Future[Score]]:
    """Make one call: all requests are made in one iteration of the event loop."""
    reference = {"until": str(until)} if until else {}
    return [asyncio.ensure_future(client.score(ScoreRequest([number], reference))) for number in numbers]


async def reasons(verdicts: Sequence[asyncio.Future[Score]]) -> list[str]:
    return [score.reason for score in await asyncio.wait_for(asyncio.gather(*verdicts), 120)]


async def test_slow_score_does_not_delay_other_scores_of_the_call(actor: Any, tmp_path: Path) -> None:
    client, now = RewardClient(200.0), tmp_path / "now"
    slow, quick = asked(client, [100], now), asked(client, range(60))
    assert await reasons(quick) == [str(number) for number in range(60)]
    assert not slow[0].done()
    now.touch()
    assert await reasons(slow) == ["100"]
    assert (await actor.status.remote()).scored == 61


async def test_reward_call_does_not_fail_while_scores_arrive(actor: Any, tmp_path: Path) -> None:
    await reasons(asked(RewardClient(HANG_SECONDS), [0]))  # the actor and its worker have started
    client, now = RewardClient(2.0), tmp_path / "now"
    slow, began = asked(client, [100], now), time.monotonic()
    while time.monotonic() < began + 4.5:
        await reasons(asked(client, [1]))
        await asyncio.sleep(0.2)
    assert not slow[0].done()
    now.touch()
    assert await reasons(slow) == ["100"]


async def test_reward_call_fails_if_no_score_arrives(actor: Any, tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"no score for 1 s .*, while 1 responses wait"):
        await reasons(asked(RewardClient(1.0), [100], tmp_path / "never"))
    (tmp_path / "never").touch()


async def test_restarted_reward_actor_scores_each_request_once(actor: Any, context: RunContext, tmp_path: Path) -> None:
    client, now = RewardClient(200.0), tmp_path / "now"
    quick, slow = asked(client, range(60)), asked(client, range(100, 110), now)
    assert await reasons(quick) == [str(number) for number in range(60)]
    ray.kill(actor)
    now.touch()
    await asyncio.sleep(0.5)
    assert not any(verdict.done() for verdict in slow)
    successor = started(context)
    assert await reasons(slow) == [str(number) for number in range(100, 110)]
    assert (await successor.status.remote()).scored == 10  # no response was scored twice
