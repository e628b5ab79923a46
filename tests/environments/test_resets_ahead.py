"""Tests of environments that are reset ahead, i.e. before their episodes start. Resets ahead change no episode, take no
additional places, and leave no process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Outcome, Prompt
from rollflow.tasks.environments import build_environment, close_environment
from rollflow.tasks.environments.config import MixedEnvironment
from rollflow.tasks.environments.foreign.guest_process import list_marked
from rollflow.tasks.environments.foreign.health import EnvironmentBroken
from rollflow.tasks.environments.foreign.play import ForeignEpisodes
from rollflow.tasks.environments.foreign.resets_ahead import ResetsAhead
from rollflow.tasks.environments.mixed import MixedEpisodes
from rollflow.tasks.scorers.base import Score
from rollflow.testing.environments import build_ports
from tests.environments.test_spread_episodes import open_fleet
from tests.environments.worlds import PROMPT, build, close, find_mark, gym, speak, trl
from tests.support.counts import examples
from tests.support.pipeline import Pipeline

DRAWN = {"actions": {"1": 1}, "observe": "odd_worlds:observe_drawn"}


def prompt(name: str) -> Prompt:
    return replace(PROMPT, id=name)


def ahead_of(environment: ForeignEpisodes) -> ResetsAhead:
    assert environment._ahead is not None
    return environment._ahead


async def settle(environment: ForeignEpisodes) -> None:
    """Wait until all planned resets have ended."""
    await asyncio.wait([one.work for one in ahead_of(environment)._waiting])


def run(environment: ForeignEpisodes, work: Callable[[], Awaitable[Any]]) -> Any:
    """Run `work`, then close the environment and check that no process is left."""

    async def main() -> Any:
        try:
            async with asyncio.timeout(120):
                return await work()
        finally:
            await close(environment)

    return asyncio.run(main())


async def play(environment: ForeignEpisodes, config: Any, name: str) -> tuple[Score | None, list[object]]:
    """Play an episode; return its score, and all that the policy has read."""
    episode = speak(config, "1", prompt=prompt(name))
    score = await environment.play(episode)
    return score, [list(episode.prompt.tokens), *episode.heard]


@pytest.mark.parametrize("config", [gym(resets_ahead=2, **DRAWN), trl("Counter", resets_ahead=2)])
def test_episode_after_a_reset_ahead_is_the_same(config: Any) -> None:
    """The seed depends only on the prompt, and so does the first observation."""
    environment = build(config)

    async def work() -> None:
        plain = await play(environment, config, "a")
        environment.reset_ahead([prompt("a"), prompt("b")])
        await settle(environment)
        assert await play(environment, config, "a") == plain
        assert environment.health.resets == 3  # the episode did not reset again
        assert environment.health.episodes == 2

    run(environment, work)


def test_unplayed_resets_are_ended_with_the_environment() -> None:
    """`close` is called at a pause, at the end of a run, and after a failure."""
    environment = build(gym(resets_ahead=3, **DRAWN))

    async def work() -> None:
        environment.reset_ahead([prompt(name) for name in "abc"])
        await settle(environment)
        assert len(ahead_of(environment)._waiting) == 3
        assert list_marked(find_mark(environment))

    run(environment, work)
    assert ahead_of(environment)._waiting == []


def test_new_plan_ends_the_resets_of_other_prompts() -> None:
    environment = build(gym(resets_ahead=2, **DRAWN))

    async def work() -> None:
        environment.reset_ahead([prompt("a"), prompt("b")])
        await settle(environment)
        kept = ahead_of(environment)._waiting[1]
        environment.reset_ahead([prompt("b"), prompt("c")])
        await settle(environment)
        waiting = ahead_of(environment)._waiting
        assert [one.prompt.id for one in waiting] == ["b", "c"]
        assert waiting[0] is kept
        environment.reset_ahead([], issued=[prompt("b")])
        assert ahead_of(environment)._waiting == [kept]  # its episode has not started yet
        environment.reset_ahead([])
        assert ahead_of(environment)._waiting == []

    run(environment, work)


def test_resets_ahead_never_exceed_resets_ahead_or_at_once() -> None:
    for most, places in ((2, 8), (8, 2)):
        environment = build(gym(resets_ahead=most, at_once=places, **DRAWN))

        async def work(environment: ForeignEpisodes = environment) -> None:
            environment.reset_ahead([prompt(str(number)) for number in range(6)])
            await settle(environment)
            assert [one.has_place for one in ahead_of(environment)._waiting] == [True, True]
            assert environment.health.resets == 2

        run(environment, work)


def test_episode_takes_the_place_of_a_reset_if_no_place_is_free() -> None:
    """Resets for other prompts hold all places; the episodes run nevertheless."""
    config = gym(resets_ahead=4, at_once=2, **DRAWN)
    environment = build(config)

    async def work() -> None:
        environment.reset_ahead([prompt("a"), prompt("b"), prompt("c"), prompt("d")])
        await settle(environment)
        found = await asyncio.gather(*(play(environment, config, name) for name in "wxyz"))
        assert all(score is not None and score.outcome is Outcome.CORRECT for score, _ in found)
        assert environment.health.resets == 2 + 4

    run(environment, work)


@pytest.mark.parametrize(("wrong", "where"), [("error", "reset"), ("hang", "reset"), ("quit", "init")])
def test_episode_fails_if_its_reset_ahead_has_failed(wrong: str, where: str) -> None:
    config = trl("Bad", resets_ahead=1, setup_seconds=1.0, options={"wrong": wrong, "where": where})
    environment = build(config)

    async def work() -> None:
        environment.reset_ahead([prompt("a")])
        await settle(environment)
        score, _ = await play(environment, config, "a")
        assert score is not None
        assert score.outcome is Outcome.UNJUDGED
        assert environment.health.failures == 1

    run(environment, work)


def test_failed_resets_ahead_can_end_the_run() -> None:
    """A failed reset ahead counts as a failure of the environment, even if no episode uses the reset."""
    config = trl("Bad", resets_ahead=1, max_failures=2, options={"wrong": "error", "where": "reset"})
    environment = build(config)

    async def work() -> None:
        for name in "ab":
            environment.reset_ahead([prompt(name)])
            await settle(environment)
        with pytest.raises(EnvironmentBroken, match="2 episodes in a row"):
            await play(environment, config, "c")
        environment.reset_ahead([prompt("d")])
        await settle(environment)
        with pytest.raises(EnvironmentBroken, match="2 episodes in a row"):
            await play(environment, config, "d")

    run(environment, work)


def test_aborted_episode_ends_the_reset_that_it_waits_for() -> None:
    config = gym(resets_ahead=1, at_once=1, **DRAWN)
    environment = build(config)

    async def work() -> None:
        environment.reset_ahead([prompt("a")])
        episode = asyncio.create_task(play(environment, config, "a"))
        await asyncio.sleep(0)
        episode.cancel()
        await asyncio.wait([episode])
        score, _ = await play(environment, config, "b")  # the only place is free again
        assert score is not None

    run(environment, work)


def test_mixed_environments_reset_ahead_for_their_own_prompts() -> None:
    """A removed environment is not reset any more."""
    kinds = {"walk": gym(resets_ahead=2, **DRAWN), "count": trl("Counter"), "other": gym(resets_ahead=1, **DRAWN)}
    mixed = build_environment(MixedEnvironment(column="world", kinds=kinds))
    assert isinstance(mixed, MixedEpisodes)
    assert mixed.resets_ahead == 3
    prompts = [replace(prompt(f"{name}{n}"), reference={"world": name}) for n in range(3) for name in (*kinds, "none")]

    def planned() -> dict[str, list[str]]:
        found = {name: one for name, one in mixed.own.items() if isinstance(one, ForeignEpisodes)}
        return {name: [one.prompt.id for one in ahead_of(member)._waiting] for name, member in found.items()}

    async def work() -> None:
        try:
            mixed.reset_ahead(prompts)
            assert planned() == {"walk": ["walk0", "walk1"], "count": [], "other": ["other0"]}
            mixed.removals["walk"] = "it is broken"
            mixed.reset_ahead(prompts)
            assert planned() == {"walk": [], "count": [], "other": ["other0"]}
        finally:
            await close_environment(mixed)
        assert planned() == {"walk": [], "count": [], "other": []}

    asyncio.run(work())


@pytest.mark.many
@settings(max_examples=examples(100), deadline=None)
@given(
    at_once=st.integers(1, 3),
    resets_ahead=st.integers(0, 4),
    moves=st.lists(
        st.lists(st.sampled_from("abc"), max_size=4).map(lambda names: ("plan", names))
        | st.lists(st.sampled_from("abcd"), min_size=1, max_size=4).map(lambda names: ("play", names))
        | st.lists(st.sampled_from("abcd"), min_size=1, max_size=2).map(lambda names: ("abort", names)),
        min_size=1,
        max_size=6,
    ),
)
def test_plans_of_resets_change_no_episode_and_leave_no_process(
    at_once: int, resets_ahead: int, moves: list[tuple[str, list[str]]]
) -> None:
    config = gym(at_once=at_once, resets_ahead=resets_ahead, **DRAWN)
    environment = build(config)

    async def work() -> None:
        plain = {name: await play(environment, config, name) for name in "abcd"}
        for what, names in moves:
            if what == "plan":
                environment.reset_ahead([prompt(name) for name in names])
                continue
            episodes = [asyncio.create_task(play(environment, config, name)) for name in names]
            if what == "abort":
                await asyncio.sleep(0)
                for episode in episodes:
                    episode.cancel()
                await asyncio.wait(episodes)
            else:
                assert await asyncio.gather(*episodes) == [plain[name] for name in names]

    run(environment, work)
    assert environment._pool is not None
    assert environment._pool._places._value == at_once


def test_each_reset_ahead_of_a_run_is_used(tmp_path: Path) -> None:
    """With async_ratio = 0, no prompt is discarded, so an episode uses each reset."""
    config = trl("Counter", resets_ahead=5)
    environment = build(config)
    pipeline = Pipeline(
        MemoryStore(str(tmp_path)),
        versions=4,
        async_ratio=0,
        longest=4096,
        environment=environment,
        environment_ports=build_ports(config),
    )
    run(environment, pipeline.run)
    assert environment.health.resets == environment.health.episodes == 4 * pipeline.groups * pipeline.group_size


async def test_reset_ahead_of_a_lost_host_is_repeated_on_another_one() -> None:
    config = gym(resets_ahead=4, at_once=4, **DRAWN)
    async with open_fleet(config) as near:
        near.environment.reset_ahead([prompt("a")] * 4)
        await settle(near.environment)
        assert [len(link.host._episodes) for link in near.links] == [2, 2]
        await near.links[0].kill()
        async with asyncio.timeout(120):
            found = await asyncio.gather(*(play(near.environment, config, "a") for _ in range(4)))
        assert found == [await play(near.environment, config, "a")] * 4
        assert near.environment.health.failures == 0


async def test_reset_ahead_never_waits_for_room_on_a_host() -> None:
    """One of two hosts is lost, so the hosts have room for fewer episodes than `at_once`."""
    config = gym(resets_ahead=4, at_once=4, **DRAWN)
    async with open_fleet(config) as near:
        near.refuses = True
        near.fleet.places[0].lose("a test needs one host")
        near.environment.reset_ahead([prompt(name) for name in "abcd"])
        await settle(near.environment)
        assert [one.prompt.id for one in ahead_of(near.environment)._waiting] == ["a", "b"]
        async with asyncio.timeout(120):
            found = await asyncio.gather(*(play(near.environment, config, name) for name in "vwxyz"))
        assert all(score is not None and score.outcome is Outcome.CORRECT for score, _ in found)
