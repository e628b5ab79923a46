"""Plays episodes in environment actors on a Ray cluster of two nodes, loses one node, and writes what happened.

`python -m tests.support.environment_places FOLDER` writes `FOLDER/found.json`. The script runs in a separate process,
because Ray reads the token of a cluster when Ray is first imported.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from rollflow.flows.ray_cluster.ray_head import RayHead, RayNode
from rollflow.storage.records import Outcome
from rollflow.tasks.run.cluster_config import ClusterConfig, EnvironmentActorsConfig
from rollflow.tasks.scorers.base import Score
from tests.support.reward_places import await_end

WAIT_SECONDS = 180.0
EPISODES = 8


async def list_hosts() -> dict[int, str]:
    """Return the processes of the living environment actors, with the ids of their nodes."""
    import ray

    states = (await asyncio.to_thread(ray._private.state.actors)).values()
    alive = [one for one in states if one["ActorClassName"] == "EnvironmentActor" and one["State"] == "ALIVE"]
    return {int(one["Pid"]): str(one["Address"]["NodeID"]) for one in alive}


async def await_hosts(count: int, without: frozenset[int] = frozenset()) -> dict[int, str]:
    """Wait until this number of environment actors runs; the given processes are not counted."""
    async with asyncio.timeout(WAIT_SECONDS):
        while len(found := {p: n for p, n in (await list_hosts()).items() if p not in without}) != count:
            await asyncio.sleep(0.1)
    return found


def list_workers(host: int) -> list[psutil.Process]:
    """Return the processes below an environment actor."""
    return psutil.Process(host).children(recursive=True)


class Playing:
    """The environments of a rollout actor, and episodes that wait before their second turn."""

    def __init__(self, folder: Path) -> None:
        from rollflow.tasks.actors.environment_hosts.owner import open_environments
        from rollflow.tasks.run.context import RunContext

        context = RunContext(str(folder / "run"), folder / "cache")
        self.config = context.config.environment
        self.environments = open_environments(context, context.config)
        self.environment = self.environments.build(self.config)
        self.arrived, self.go_on = 0, asyncio.Event()

    def play(self, *, keeps_snapshots: bool = False) -> asyncio.Future[Any]:
        """Play an episode of the game. Before its second turn, the episode waits for `go_on`."""
        from tests.environments.test_spread_episodes import stop_before

        async def wait(turn: int) -> None:
            if turn == 1:
                self.arrived += 1
                await self.go_on.wait()

        episode = stop_before(self.config, wait, "1", keeps_snapshots=keeps_snapshots)
        return asyncio.ensure_future(self.environment.play(episode))

    async def play_some(self, count: int, **keys: Any) -> list[asyncio.Future[Any]]:
        """Begin episodes, and wait until each of them has done its first action."""
        self.arrived, self.go_on = 0, asyncio.Event()
        fleet = self.environments._fleet
        assert fleet is not None
        async with asyncio.timeout(WAIT_SECONDS):
            while len(fleet.places) < 2:  # an actor that Ray shows as alive may not have answered yet
                await asyncio.sleep(0.05)
        playing = [self.play(**keys) for _ in range(count)]
        async with asyncio.timeout(WAIT_SECONDS):
            while self.arrived < count:
                await asyncio.sleep(0.05)
        return playing

    async def end(self, playing: list[asyncio.Future[Any]]) -> list[Score]:
        """Let the episodes end, and return their scores."""
        self.go_on.set()
        async with asyncio.timeout(WAIT_SECONDS):
            return list(await asyncio.gather(*playing))


def count_outcomes(scores: list[Score]) -> Mapping[str, int]:
    """Return the numbers of unjudged episodes, of rewards of judged episodes, and of lowered rewards."""
    judged = [one for one in scores if one.outcome is not Outcome.UNJUDGED]
    return {
        "judged": len(judged),
        "unjudged": len(scores) - len(judged),
        "full reward": sum(one.value == 6.0 for one in judged),
        "reasons": sum("environment actor is lost" in one.reason for one in scores),
    }


async def play_on_two_nodes(folder: Path, node: RayNode) -> dict[str, Any]:
    """Run all phases, and return the results that the test compares."""
    playing = Playing(folder)
    try:
        return await lose_hosts(playing, node)
    finally:
        await playing.environments.close_all()


async def lose_hosts(playing: Playing, node: RayNode) -> dict[str, Any]:
    """Lose a node, and then an environment actor. Return the results that the test compares."""
    from tests.environments.worlds import speak

    found = dict[str, Any]()
    first = await playing.environment.play(speak(playing.config, "1"))
    assert isinstance(first, Score), first
    hosts = await await_hosts(2)
    found["nodes"] = len(set(hosts.values()))

    some = await playing.play_some(EPISODES, keeps_snapshots=True)
    found["busy hosts"] = sum(bool(list_workers(pid)) for pid in hosts)
    on_node = next(pid for pid in hosts if pid in set(node.processes))
    lost = [psutil.Process(on_node), *list_workers(on_node)]
    found["workers of the lost node"] = len(lost) > 1
    [raylet] = [pid for pid in node.processes if psutil.Process(pid).name() == "raylet"]
    os.kill(raylet, signal.SIGKILL)
    found["processes of the lost node ended"] = await await_end(lost)
    found["with snapshots"] = count_outcomes(await playing.end(some))

    hosts = await await_hosts(2, frozenset({on_node}))
    some = await playing.play_some(EPISODES)
    killed = min(hosts)
    lost = [psutil.Process(killed), *list_workers(killed)]
    found["workers of the killed actor"] = len(lost) > 1
    os.kill(killed, signal.SIGKILL)
    found["processes of the killed actor ended"] = await await_end(lost)
    found["without snapshots"] = count_outcomes(await playing.end(some))

    [use] = playing.environments.read()
    found["counts"] = {name: use.figures[name] for name in ("episodes", "failures", "hangs", "kills")}
    hosts = await await_hosts(2, frozenset({on_node, killed}))
    some = await playing.play_some(2)
    left = [process for pid in hosts for process in (psutil.Process(pid), *list_workers(pid))]
    await playing.end(some)
    await playing.environments.close_all()
    found["all ended"] = await await_end(left)
    return found


def prepare(folder: Path) -> None:
    """Write a run with this environment and two environment actors."""
    from rollflow.storage.objects import open_store
    from rollflow.tasks.run.config import RunConfig
    from tests.environments.worlds import gym
    from tests.support.described import describe

    cluster = ClusterConfig(environment_actors=EnvironmentActorsConfig(min=2), lease_seconds=0)
    describe(open_store(str(folder / "run")), "places", RunConfig(environment=gym("Saving"), cluster=cluster))


def main() -> None:
    folder = Path(sys.argv[1])
    head = RayHead(folder / "ray", cpus=2)
    os.environ.update(head.env)
    with head, RayNode(head, cpus=2) as node:
        from rollflow.flows.ray_cluster import cluster

        prepare(folder)
        cluster.attach(head.address, "places", deadline_seconds=60)
        found = asyncio.run(play_on_two_nodes(folder, node))
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
