"""Tests of episodes on several hosts (environment actors). If a host is lost or hangs, at most its own episodes get no
reward.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, RayTaskError

from rollflow.storage.records import Outcome
from rollflow.tasks.actors.environment_hosts.owner import SCHEDULER_WEIGHT
from rollflow.tasks.actors.spread.member import NodeChoice, report_lost_actors
from rollflow.tasks.environments import build_environment
from rollflow.tasks.environments.foreign.guest_process import list_marked
from rollflow.tasks.environments.foreign.health import EnvironmentBroken
from rollflow.tasks.environments.foreign.play import ForeignEpisodes
from rollflow.tasks.environments.spread.fleet import HostFleet, HostLink, HostPlace
from rollflow.tasks.environments.spread.host import WorldHost
from rollflow.tasks.environments.spread.pool import SpreadPool
from rollflow.tasks.run.cluster_config import ClusterConfig, EnvironmentActorsConfig, PlacementConfig, RolePlacement
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score
from rollflow.tasks.scorers.spread.follower import QueueFollower
from rollflow.tasks.scorers.spread.members import PlaceLost
from tests.environments.worlds import SpokenEpisode, call, gym, play, speak, trl


class NearLink(HostLink):
    """A host in this process, which a test may kill or freeze."""

    def __init__(self) -> None:
        self.host, self.marks = WorldHost(), set[str]()
        self.dead = self.frozen = self.ended = self.refuses = self.is_stuck = False
        self.dies_at = ""  # the host dies before this request to an environment
        self.calls = Counter[str]()

    async def start(self) -> None:
        if self.refuses:
            raise PlaceLost("no node has room")
        if self.is_stuck:
            await asyncio.Event().wait()

    async def call(self, method: str, *given: Any) -> Any:
        self.calls[method] += 1
        if self.frozen:
            await asyncio.Event().wait()
        if self.dies_at and self.dies_at in given:
            await self.kill()
        if self.dead:
            raise PlaceLost("its node died")
        answer = await getattr(self.host, method)(*given)
        self.marks |= {place.pool._guest.mark for place in self.host._pools.values() if place.pool._guest}
        if self.dead:
            raise PlaceLost("its node died")
        return answer

    async def end(self) -> None:
        self.ended = True
        await self.host.close()

    async def kill(self) -> None:
        """End the host as the loss of its node would."""
        self.dead = True
        await self.host.close()


class NearFleet:
    """A fleet of hosts in this process."""

    def __init__(self, config: Any, least: int = 2, most: int = 2, answer_seconds: float = 20.0) -> None:
        self.links, self.warned = list[NearLink](), list[str]()
        self.refuses = self.is_stuck = False
        follower = QueueFollower(least, most, 0.0, 3600.0)
        self.fleet = HostFleet(self._build, follower, most, answer_seconds, self.warned.append)
        environment = build_environment(config, partial(SpreadPool, self.fleet))
        assert isinstance(environment, ForeignEpisodes)
        self.environment = environment

    def _build(self) -> HostLink:
        self.links.append(link := NearLink())
        link.refuses, link.is_stuck = self.refuses, self.is_stuck
        return link

    async def start(self) -> None:
        """Wait until two hosts have started."""
        number = self.fleet.add_pool(1)
        self.fleet.free_place(await self.fleet.claim_place(number), number)
        async with asyncio.timeout(60):
            while len(self.fleet.places) < 2:
                await asyncio.sleep(0)

    def find_busy(self) -> list[NearLink]:
        """Return the living hosts that have an episode."""
        return [link for link in self.links if link.host._episodes and not link.dead]


@asynccontextmanager
async def open_fleet(config: Any, *, refuses: bool = False, **keys: Any) -> AsyncIterator[NearFleet]:
    """Open a fleet with two started hosts; check at the end that no host and no process is left."""
    near = NearFleet(config, **keys)
    near.refuses = refuses
    try:
        if not refuses:
            await near.start()
        yield near
    finally:
        await near.environment.close()
        await near.fleet.close()
    assert all(link.ended for link in near.links)
    assert [pid for link in near.links for mark in link.marks for pid in list_marked(mark)] == []


class StoppedEpisode(SpokenEpisode):
    """An episode that calls a function before each turn."""

    before: Callable[[int], Any]

    async def generate(self, *given: Any, **keys: Any) -> Any:
        await self.before(self.asked.count("generate"))
        return await super().generate(*given, **keys)


def stop_before(config: Any, before: Callable[[int], Any], *responses: str, **keys: Any) -> StoppedEpisode:
    """Return an episode with fixed responses that calls `before` with the number of each turn."""
    plain = speak(config, *responses, **keys)
    episode = StoppedEpisode(**{name: getattr(plain, name) for name in plain.__dataclass_fields__})
    episode.before = before
    return episode


@pytest.mark.parametrize("config", [gym(), trl("Counter")], ids=["gymnasium", "trl"])
async def test_episode_on_a_host_has_the_score_of_a_local_episode(config: Any) -> None:
    said = ("1",) if config.kind == "gymnasium" else (call("add", number=2), "Done.")
    local, heard, other = await asyncio.to_thread(play, config, *said)
    async with open_fleet(config) as near:
        episodes = [speak(config, *said) for _ in range(4)]
        scores = await asyncio.gather(*(near.environment.play(one) for one in episodes))
        assert scores == [local] * 4
        assert all(one.heard == heard.heard for one in episodes)
        assert [link.calls["open_episode"] for link in near.links] == [2, 2]
        counts = near.environment.health.counts
        assert {name: value for name, value in counts.items() if name != "seconds"} == {
            name: 4 * value for name, value in other.health.counts.items() if name != "seconds"
        }
        assert counts["seconds"] > 0


async def test_episode_of_a_lost_host_is_unjudged() -> None:
    config = gym()
    async with open_fleet(config) as near:

        async def kill(turn: int) -> None:
            if turn == 1:
                await near.find_busy()[0].kill()

        score = await near.environment.play(stop_before(config, kill, "1"))
        assert isinstance(score, Score)
        assert (score.outcome, score.failed) == (Outcome.UNJUDGED, False)
        assert "its environment actor is lost: its node died" in score.reason
        assert near.environment.health.failures == 1
        assert near.environment.health.failures_in_a_row == 0


async def test_episode_continues_from_its_snapshot_on_another_host() -> None:
    config = gym("Saving")
    whole, _, _ = await asyncio.to_thread(play, config, "1")
    async with open_fleet(config) as near:

        async def kill(turn: int) -> None:
            if turn == 1:
                await near.find_busy()[0].kill()

        episode = stop_before(config, kill, "1", keeps_snapshots=True)
        assert await near.environment.play(episode) == whole
        assert [link.calls["open_episode"] for link in near.links][:2] == [1, 1]
        assert near.environment.health.failures == 0


async def test_action_with_a_key_is_done_once_despite_a_lost_host(tmp_path: Path) -> None:
    config = trl("Keeping", options={"file": str(tmp_path / "done")})
    async with open_fleet(config) as near:

        async def kill(turn: int) -> None:
            if turn == 1:
                await near.find_busy()[0].kill()

        said = (call("add", number=1), call("add", number=2), "Done.")
        score = await near.environment.play(stop_before(config, kill, *said, keeps_snapshots=True))
        assert isinstance(score, Score)
        assert score.outcome is Outcome.CORRECT
        assert (tmp_path / "done").read_text() == "0.0.0.0.0 1\n0.0.0.1.0 3\n"


async def test_episode_of_a_frozen_host_ends_after_answer_seconds() -> None:
    config = gym(turn_seconds=0.5, setup_seconds=60.0)
    async with open_fleet(config, answer_seconds=1.0) as near:

        async def freeze(turn: int) -> None:
            if turn == 1:
                near.find_busy()[0].frozen = True

        async with asyncio.timeout(60):
            score = await near.environment.play(stop_before(config, freeze, "1"))
        assert isinstance(score, Score)
        assert score.outcome is Outcome.UNJUDGED
        assert "did not answer" in score.reason
        for link in near.links:
            link.frozen = False


def test_environment_actors_that_never_start_end_the_run() -> None:
    config = gym(max_failures=1)

    async def main() -> None:
        async with open_fleet(config, least=1, most=1, refuses=True) as near:
            first = await near.environment.play(speak(config, "1"))
            assert isinstance(first, Score)
            assert first.outcome is Outcome.UNJUDGED
            assert "no node has room" in first.reason
            with pytest.raises(EnvironmentBroken, match="no node has room"):
                await near.environment.play(speak(config, "1"))

    run_virtual(main())


async def test_turn_limit_holds_after_a_move_to_another_host() -> None:
    config = gym("Saving", options={"wrong": "hang"}, turn_seconds=0.5, setup_seconds=3600.0)
    async with open_fleet(config) as near:

        async def kill(turn: int) -> None:
            if turn == 1:
                await near.find_busy()[0].kill()

        async with asyncio.timeout(60):
            score = await near.environment.play(stop_before(config, kill, "1", keeps_snapshots=True))
        assert isinstance(score, Score)
        assert score.outcome is Outcome.TIMEOUT
        assert "environment.turn_seconds = 0.5" in score.reason
        assert near.environment.health.hangs == 1
        assert len(near.fleet.places) >= 1  # the other host is not given up


async def test_host_lost_after_the_last_action_changes_no_score() -> None:
    config = gym()
    whole, _, _ = await asyncio.to_thread(play, config, "1")
    async with open_fleet(config) as near:
        for link in near.links:
            link.dies_at = "close"
        assert await near.environment.play(speak(config, "1")) == whole
        assert sum(link.calls["open_episode"] for link in near.links) == 1
        assert near.environment.health.failures == 0


@pytest.mark.parametrize("observe", [None, "odd_worlds:observe_process"])
async def test_episode_continues_only_with_the_same_observation(observe: str | None) -> None:
    config = gym(observe=observe)
    async with open_fleet(config) as near:

        async def kill(turn: int) -> None:
            if turn == 0:
                await near.find_busy()[0].kill()

        score = await near.environment.play(stop_before(config, kill, "1"))
        assert isinstance(score, Score)
        if observe is None:
            assert (score.outcome, score.value) == (Outcome.CORRECT, 6.0)
        else:  # the new process has another id, and so another observation
            assert score.outcome is Outcome.UNJUDGED
            assert "reset was repeated on another node, and gave another observation there" in score.reason


async def test_episode_whose_process_was_closed_is_unjudged() -> None:
    config = gym()
    async with open_fleet(config) as near:

        async def close(turn: int) -> None:
            if turn == 1:
                await near.find_busy()[0].host.close()

        score = await near.environment.play(stop_before(config, close, "1"))
        assert isinstance(score, Score)
        assert score.outcome is Outcome.UNJUDGED
        assert "the environment's process had ended before step" in score.reason


async def test_episode_waits_a_bounded_time_for_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.tasks.environments.spread.world.MOVE_SECONDS", 0.1)
    config = gym("Saving")
    async with open_fleet(config) as near:

        async def kill(turn: int) -> None:
            if turn == 1:
                near.is_stuck = True  # no further host ever starts
                await asyncio.gather(*(link.kill() for link in near.links))

        async with asyncio.timeout(60):
            score = await near.environment.play(stop_before(config, kill, "1", keeps_snapshots=True))
        assert isinstance(score, Score)
        assert score.outcome is Outcome.UNJUDGED


async def test_error_of_the_fleet_ends_the_wait_for_a_place() -> None:
    class Broken(QueueFollower):
        def decide(self, now: float, wanted: int) -> int:
            raise RuntimeError("a fault")

    fleet = HostFleet(NearLink, Broken(1, 1, 0.0, 0.0), 1, 5.0)
    for _ in range(2):
        with pytest.raises(PlaceLost):
            await fleet.claim_place(fleet.add_pool(1))


async def test_unwanted_episode_frees_its_host() -> None:
    config = gym()
    async with open_fleet(config) as near:
        started, forever = asyncio.Event(), asyncio.Event()

        async def wait(turn: int) -> None:
            started.set()
            await forever.wait()

        task = asyncio.create_task(near.environment.play(stop_before(config, wait, "1")))
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(60):
            while near.find_busy() or not all(place.is_idle for place in near.fleet.places):
                await asyncio.sleep(0.01)


FAULTS = [("hang", "act"), ("error", "reset"), ("quit", "act"), ("killed", "act"), ("garbage", "act"), ("deep", "act")]


@pytest.mark.parametrize(("wrong", "where"), [*FAULTS, ("huge", "reward"), ("tools", "init")])
async def test_fault_on_a_host_has_the_score_of_a_local_fault(wrong: str, where: str) -> None:
    config = trl("Bad", options={"wrong": wrong, "where": where}, **({"turn_seconds": 0.5} if wrong == "hang" else {}))
    local, _, other = await asyncio.to_thread(play, config, call("act"), "Done.")
    async with open_fleet(config) as near:
        assert await near.environment.play(speak(config, call("act"), "Done.")) == local
        assert len(near.fleet.places) == 2  # no host is given up because of a broken environment
        counts = near.environment.health.counts
        assert {**counts, "seconds": 0} == {**other.health.counts, "seconds": 0}


def test_environment_actor_starts_on_the_least_loaded_node() -> None:
    node = {"Alive": True, "Labels": {}, "Resources": {"CPU": 2.0}}
    nodes = [
        {**node, "NodeID": "a"},
        {**node, "NodeID": "b"},
        {**node, "NodeID": "dead", "Alive": False},
        {**node, "NodeID": "without CPUs", "Resources": {}},
        {**node, "NodeID": "fast", "Labels": {"kind": "fast"}},
    ]
    choice = NodeChoice(RunConfig(), "environment", 0.001, {"a": SCHEDULER_WEIGHT})
    for expected in ("b", "fast", "a", "b"):  # the scheduler is on "a"
        assert choice.choose(nodes) == expected
        choice.note_move("", expected)
    placed = ClusterConfig(placement=PlacementConfig(environment=RolePlacement(labels={"kind": "fast"})))
    assert NodeChoice(RunConfig(cluster=placed), "environment", 0.001, {"fast": 5}).choose(nodes) == "fast"
    packed = ClusterConfig(placement=PlacementConfig(strategy="pack"))
    assert NodeChoice(RunConfig(cluster=packed), "environment", 0.001, {}).choose(nodes) is None


def test_error_of_a_failed_start_names_its_cause() -> None:
    said = "ray::EnvironmentActor.__init__() (pid=1)\n  File x\nRuntimeError: no such library"
    cause = RayTaskError("__init__", said, RuntimeError("no such library"), actor_id="1")
    with (
        pytest.raises(PlaceLost, match="the start of the actor failed with RuntimeError: no such"),
        report_lost_actors(),
    ):
        raise ActorDiedError(cause)
    with pytest.raises(PlaceLost, match="a call of the actor failed with RuntimeError"), report_lost_actors():
        raise cause


def test_unusable_numbers_of_environment_actors_are_refused() -> None:
    several = ClusterConfig(environment_actors=EnvironmentActorsConfig(min=2))
    RunConfig(environment=gym(), cluster=several)
    with pytest.raises(ValueError, match=r"cluster.environment_actors.min = 2: the environment of this run has no"):
        RunConfig(cluster=several)
    for wrong in ({"min": 3, "max": 2}, {"max": 2}):
        with pytest.raises(ValueError, match=r"min must be at least 1 and at most max = 2; change min"):
            EnvironmentActorsConfig(**wrong)
    assert [EnvironmentActorsConfig(**one).most for one in ({}, {"min": 3}, {"min": 1, "max": 4})] == [0, 3, 4]


@given(answers=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), min_size=4, max_size=4)), max_size=20))
def test_counters_are_sums_over_hosts_in_any_answer_order(answers: list[tuple[bool, list[int]]]) -> None:
    async def run() -> None:
        near = NearFleet(gym())
        pool = near.environment._find_pool()
        assert isinstance(pool, SpreadPool)
        places = {which: HostPlace(NearLink()) for which in (False, True)}
        greatest = {which: [0] * 4 for which in (False, True)}
        for which, counts in answers:
            pool.note_counts(places[which], [float(one) for one in counts])
            greatest[which] = [max(pair) for pair in zip(greatest[which], counts, strict=True)]
        health = near.environment.health
        total = [a + b for a, b in zip(*greatest.values(), strict=True)]
        assert [health.hangs, health.kills, health.crashes, health.seconds] == total

    asyncio.run(run())


@given(asked=st.lists(st.integers(0, 1), min_size=1, max_size=12), most=st.integers(1, 3), at_once=st.integers(1, 5))
def test_least_loaded_host_gets_the_next_episode(asked: list[int], most: int, at_once: int) -> None:
    async def run() -> None:
        fleet = HostFleet(NearLink, QueueFollower(most, most, 0.0, 0.0), most, 5.0)
        pools, claims = [fleet.add_pool(at_once), fleet.add_pool(at_once)], list[asyncio.Task[HostPlace]]()
        for which in asked:
            claims.append(asyncio.create_task(fleet.claim_place(pools[which])))
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            while len(fleet.places) < most:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        share = -(-at_once // most)
        for which, pool in enumerate(pools):
            running = [place.running[pool] for place in fleet.places]
            assert max(running) <= share
            assert sum(running) == min(asked.count(which), share * most)
        await fleet.close()
        await asyncio.gather(*claims, return_exceptions=True)

    asyncio.run(run())
