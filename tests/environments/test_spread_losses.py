"""Tests of the loss of a host: the policy is not at fault, no action is done twice, no loss is counted twice, and no
process is left.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from rollflow.storage.records import Outcome
from rollflow.tasks.environments import build_environment
from rollflow.tasks.environments.spread.fleet import HostFleet
from rollflow.tasks.environments.spread.host import WorldHost
from rollflow.tasks.environments.spread.pool import SpreadPool
from rollflow.tasks.environments.tool_use.play import ToolEpisodes
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score
from rollflow.tasks.scorers.spread.follower import QueueFollower
from rollflow.tasks.scorers.spread.members import PlaceLost
from tests.environments.test_mcp import serve
from tests.environments.test_spread_episodes import NearLink, open_fleet, stop_before
from tests.environments.worlds import call, gym, trl


async def test_episode_is_unjudged_if_a_repeated_restore_fails() -> None:
    config = gym("Saving", options={"wrong": "quit at restore"})
    async with open_fleet(config) as near:

        async def kill(turn: int) -> None:
            if turn == 1:
                await near.find_busy()[0].kill()

        score = await near.environment.play(stop_before(config, kill, "1", keeps_snapshots=True))
        assert isinstance(score, Score)
        assert (score.outcome, score.failed) == (Outcome.UNJUDGED, False)
        assert "exited with code 4 during restore" in score.reason
        assert near.environment.health.failures == 1


@pytest.mark.parametrize("id", ["0.0.0", ""])
async def test_action_without_key_is_not_repeated(id: str, tmp_path: Path) -> None:
    """An episode of an evaluation has no id, so its environment cannot know which actions were already done."""
    config = trl("Paying", options={"file": str(tmp_path / "done")})
    async with open_fleet(config) as near:

        async def die(turn: int) -> None:
            near.find_busy()[0].dies_at = "call"

        score = await near.environment.play(stop_before(config, die, call("add", number=3), "Done.", id=id))
        assert isinstance(score, Score)
        assert score.outcome is (Outcome.CORRECT if id else Outcome.UNJUDGED)


async def test_loss_of_an_mcp_server_is_counted_once() -> None:
    config, links = serve(), list[NearLink]()

    def build() -> NearLink:
        links.append(link := NearLink())
        return link

    fleet = HostFleet(build, QueueFollower(2, 2, 0.0, 3600.0), 2, 60.0)
    environment = build_environment(config, partial(SpreadPool, fleet))
    assert isinstance(environment, ToolEpisodes)

    async def kill(turn: int) -> None:
        if turn == 1:
            async with asyncio.timeout(60):
                while len(fleet.places) < 2:
                    await asyncio.sleep(0)
            [busy] = [link for link in links if link.host._episodes]
            await busy.kill()

    try:
        score = await environment.play(stop_before(config, kill, call("echo", text="a")))
        assert isinstance(score, Score)
        assert score.outcome is Outcome.UNJUDGED
        assert "its environment actor is lost" in score.reason
        assert (environment.health.failures, environment.health.failures_in_a_row) == (1, 0)
    finally:
        await environment.close()
        await fleet.close()


async def test_process_of_a_closed_episode_never_starts() -> None:
    """Ray may exchange the order of two calls of an actor."""
    host, config = WorldHost(), gym()
    try:
        await host.open_episode(1, 0, config, "x")
        await host.close_episode(2)
        answer = await host.open_episode(2, 0, config, "x")
        assert answer.outcome is Outcome.UNJUDGED
        [place] = host._pools.values()
        assert place.pool._places._value == config.at_once - 1
    finally:
        await host.close()


async def test_closed_fleet_starts_no_host() -> None:
    links = list[NearLink]()

    def build() -> NearLink:
        links.append(link := NearLink())
        return link

    fleet = HostFleet(build, QueueFollower(1, 1, 0.0, 0.0), 1, 5.0)
    number = fleet.add_pool(1)
    await fleet.claim_place(number)
    waiting = asyncio.create_task(fleet.claim_place(number))
    await asyncio.sleep(0)
    await fleet.close()
    for claim in (waiting, fleet.claim_place(number)):
        with pytest.raises(PlaceLost, match="the environment actors were ended"):
            await claim
    assert [link.ended for link in links] == [True]


def test_episode_does_not_wait_for_hosts_that_fail_in_turn() -> None:
    """The starts of two hosts overlap, so one of them is always starting. The episode waits only for their first
    starts.
    """

    class SlowLink(NearLink):
        async def start(self) -> None:
            await asyncio.sleep(600.0)
            raise PlaceLost("the actor did not start")

    async def main() -> None:
        fleet = HostFleet(SlowLink, QueueFollower(1, 2, 10.0, 60.0), 2, 5.0)
        number, began = fleet.add_pool(2), asyncio.get_running_loop().time()
        async with asyncio.timeout(10_000.0):
            claims = [fleet.claim_place(number) for _ in range(2)]
            found = await asyncio.gather(*claims, return_exceptions=True)
        assert all(isinstance(one, PlaceLost) for one in found)
        assert 605.0 < asyncio.get_running_loop().time() - began < 620.0
        await fleet.close()

    run_virtual(main())
