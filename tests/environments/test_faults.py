"""Tests of environments that hang, crash or write garbage, in real worker processes. A fault costs only its own
episode.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.environments.foreign.guest_process import list_marked
from rollflow.tasks.environments.foreign.play import ForeignEpisodes
from rollflow.tasks.scorers.base import Score
from tests.environments.worlds import build, call, close, find_mark, gym, play, speak, trl
from tests.support.waiting import soon, until

STEP: dict[str, Any] = {"turn_seconds": 0.5}
OPENING = {"init", "reset"}


@pytest.mark.parametrize(
    ("wrong", "where", "outcome", "reason"),
    [
        ("hang", "init", Outcome.UNJUDGED, "took more than environment.setup_seconds = 0.5 s"),
        ("hang", "reset", Outcome.UNJUDGED, "took more than environment.setup_seconds = 0.5 s"),
        ("hang", "act", Outcome.TIMEOUT, "took more than environment.turn_seconds = 0.5 s"),
        ("hang", "reward", Outcome.TIMEOUT, "took more than environment.turn_seconds = 0.5 s"),
        ("stubborn", "act", Outcome.TIMEOUT, "took more than environment.turn_seconds = 0.5 s"),
        ("error", "init", Outcome.UNJUDGED, "open failed with RuntimeError: broken world"),
        ("error", "reset", Outcome.UNJUDGED, "reset failed with RuntimeError: broken world"),
        ("error", "reward", Outcome.UNPARSABLE, "RuntimeError: broken world"),
        ("exit", "reset", Outcome.UNJUDGED, "reset failed with SystemExit: 3"),
        ("quit", "reset", Outcome.UNJUDGED, "its process exited with code 4 during reset"),
        ("quit", "act", Outcome.KILLED, "its process exited with code 4 during call"),
        ("abort", "act", Outcome.KILLED, "its process was killed by SIGABRT during call"),
        ("killed", "act", Outcome.UNJUDGED, "its process was killed by SIGKILL during call"),
        ("garbage", "act", Outcome.KILLED, "the environment's process wrote no valid answer to call"),
        ("garbage", "reset", Outcome.UNJUDGED, "the environment's process wrote no valid answer to reset"),
        ("nan", "reward", Outcome.UNPARSABLE, "the score's value is nan"),
        ("deep", "act", Outcome.KILLED, "the environment's process wrote no valid answer to call"),
        ("utf8", "act", Outcome.KILLED, "the environment's process wrote no valid answer to call"),
        ("huge", "reward", Outcome.KILLED, "the environment's process wrote a reward that is not a number"),
        ("tools", "init", Outcome.UNJUDGED, "the environment's process described its tools not as a list of schemas"),
        ("names", "init", Outcome.UNJUDGED, "the environment's process described its tools not as a list of schemas"),
    ],
)
def test_broken_environment_ends_its_episode_with_a_reason(
    wrong: str, where: str, outcome: Outcome, reason: str
) -> None:
    keys = (
        ({"setup_seconds": 0.5} if where in OPENING else STEP) if outcome is Outcome.TIMEOUT or wrong == "hang" else {}
    )
    config = trl("Bad", options={"wrong": wrong, "where": where}, **keys)
    score, _, environment = play(config, call("act"), "Done.")
    assert score is not None
    assert (score.value, score.outcome) == (0.0, outcome)
    assert reason in score.reason
    assert environment.health.failures == (outcome is Outcome.UNJUDGED)
    assert environment.health.hangs == ("took more" in reason)


@pytest.mark.parametrize("wrong", ["error", "exit"])
def test_policy_reads_the_error_of_a_tool(wrong: str) -> None:
    score, episode, _ = play(trl("Bad", options={"wrong": wrong}), call("act"), "Done.")
    assert score is not None
    assert score.value == 0.5
    assert "error: " in episode.heard[0]


def test_process_that_an_environment_detached_is_killed() -> None:
    config = trl("Bad", options={"wrong": "orphan"})
    environment = build(config)

    async def run() -> Score | None:
        score = await environment.play(speak(config, call("act"), "Done."))
        mark = find_mark(environment)
        await soon(lambda: len(list_marked(mark)) == 2)  # the keeper and the template
        await close(environment)
        return score

    score = asyncio.run(run())
    assert score is not None
    assert score.value == 0.5


def test_score_includes_the_rewards_before_a_fault() -> None:
    score, _, _ = play(gym(options={"wrong": "error"}), "1")
    assert score is not None
    assert (score.value, score.outcome) == (1.0, Outcome.UNPARSABLE)
    score, _, _ = play(gym(options={"wrong": "hang"}, turn_seconds=2.0), "1")
    assert score is not None
    assert (score.value, score.outcome) == (1.0, Outcome.TIMEOUT)


def test_environment_that_hangs_at_close_keeps_its_score() -> None:
    score, _, environment = play(gym(options={"wrong": "hang at close"}, close_seconds=0.5), "1")
    assert score is not None
    assert score.value == 6.0
    assert (environment.health.hangs, environment.health.failures) == (1, 0)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"name": "Missing"}, "the import of the environment failed with AttributeError"),
        (
            {"name": "Counter", "module": "no_such_module"},
            "the import of the environment failed with ModuleNotFoundError",
        ),
        (
            {"name": "X", "module": "slow_worlds", "start_seconds": 1.0},
            "the import of the environment took more than start_seconds = 1",
        ),
        ({"name": "Counter", "options": {"no": 1}}, "open failed with TypeError"),
        ({"name": "Untyped"}, "the argument where of the tool look has no type; annotate the argument"),
        ({"name": "Undescribed"}, "the tool look has no docstring"),
        ({"name": "Choosy"}, 'the choices up, down are not JSON; write them like ["a", "b"]'),
        (
            {"name": "Counter", "interpreter": "/bin/false"},
            "the import of the environment failed with the first worker process ended",
        ),
        (
            {"name": "Counter", "interpreter": "/no/python"},
            "the worker process of the environment could not be started",
        ),
    ],
)
def test_episode_is_unjudged_if_its_environment_cannot_start(keys: dict[str, Any], reason: str) -> None:
    score, episode, _ = play(trl(**keys), "Done.")
    assert score is not None
    assert score.outcome is Outcome.UNJUDGED
    assert reason in score.reason
    assert "generate" not in episode.asked


def test_tool_that_returns_an_image_leaves_episode_unjudged() -> None:
    score, _, _ = play(trl("Image"), call("look"))
    assert score is not None
    assert score.outcome is Outcome.UNJUDGED
    assert "content of type 'image'" in score.reason


def test_consecutive_failures_end_the_run() -> None:
    config = trl("Bad", options={"wrong": "error", "where": "reset"}, max_failures=3)
    environment = build(config)

    async def run() -> None:
        try:
            for _ in range(3):
                await environment.play(speak(config, "Done."))
            await environment.play(speak(config, "Done."))
        finally:
            await close(environment)

    with pytest.raises(ConfigError, match=r"environment\.path = 'odd_worlds:Bad': 3 episodes in a row failed .*broken"):
        asyncio.run(run())


def test_success_resets_the_count_of_failures() -> None:
    environment = build(trl("Quiet", max_failures=2))
    environment.health.count_failure("once", 0)
    environment.health.count_success()
    environment.health.count_failure("again", 1)
    environment.health.check()


def test_simultaneous_failures_count_as_one_failure() -> None:
    config = trl("Bad", options={"wrong": "error", "where": "reset"}, max_failures=2)
    environment = build(config)

    async def run() -> None:
        await asyncio.gather(*(environment.play(speak(config, "Done.")) for _ in range(8)))
        await close(environment)

    asyncio.run(run())
    assert environment.health.failures == 8


# --- kills --------------------------------------------------------------------------------------------------


def list_episodes(keeper: int) -> tuple[int, list[int]]:
    """Return the process ids of the template and of the episodes of a guest."""
    children = [int(pid) for pid in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()]
    return children[0], children[1:]


@pytest.mark.parametrize("victim", ["keeper", "template", "episode"])
def test_killed_process_ends_only_the_episodes_that_need_it(victim: str) -> None:
    config = trl("Bad", options={"wrong": "hang"}, turn_seconds=60.0)
    environment = build(config)

    async def run() -> list[Score | None]:
        playing = [asyncio.ensure_future(environment.play(speak(config, call("act")))) for _ in range(2)]
        await soon(lambda: environment.health.steps == 2)
        pool = environment._pool
        assert pool is not None
        assert pool._guest is not None
        guest = pool._guest
        template, episodes = list_episodes(guest.keeper)
        assert len(episodes) == 2
        os.kill({"keeper": guest.keeper, "template": template, "episode": episodes[0]}[victim], signal.SIGKILL)
        lost = {"keeper": 2, "template": 0, "episode": 1}[victim]
        if lost:
            await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
            await soon(lambda: sum(one.done() for one in playing) == lost)
        after = await environment.play(speak(config, "Done."))  # a new episode works
        assert sum(one.done() for one in playing) == lost
        mark = guest.mark
        for one in playing:
            one.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        await close(environment)
        await soon(lambda: list_marked(mark) == [])
        return [one.result() for one in playing if not one.cancelled()] + [after]

    *lost, after = asyncio.run(run())
    assert {score.outcome for score in lost if score} <= {Outcome.UNJUDGED}
    assert after is not None
    assert after.value == 0.5


def test_worker_processes_end_if_their_owner_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        "import asyncio\n"
        "from tests.environments.worlds import build, call, find_mark, speak, trl\n"
        "config = trl('Bad', options={'wrong': 'stubborn'})\n"
        "environment = build(config)\n"
        "async def run():\n"
        "    playing = asyncio.ensure_future(environment.play(speak(config, call('act'))))\n"
        "    while not environment.health.steps: await asyncio.sleep(0.01)\n"
        "    print(find_mark(environment), flush=True)\n"
        "    await playing\n"
        "asyncio.run(run())\n"
    )
    import subprocess
    import sys

    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / ".dev"), str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        mark = owner.stdout.readline().strip()
        assert mark
        until(lambda: len(list_marked(mark)) >= 4)  # keeper, template, the episode and its own child
        owner.kill()
    until(lambda: list_marked(mark) == [])


def test_cancelled_episode_makes_room_for_another_episode() -> None:
    config = trl("Bad", options={"wrong": "hang"}, at_once=1, turn_seconds=60.0)
    environment = build(config)

    async def run() -> Score | None:
        first = asyncio.ensure_future(environment.play(speak(config, call("act"))))
        await soon(lambda: environment.health.steps == 1)
        first.cancel()
        try:
            return await environment.play(speak(config, "Done."))
        finally:
            await close(environment)

    score = asyncio.run(run())
    assert score is not None
    assert score.value == 0.5


def count_episodes(environment: ForeignEpisodes) -> int:
    """Return the number of live processes of episodes."""
    pool = environment._pool
    assert pool is not None
    assert pool._guest is not None
    try:
        return len(list_episodes(pool._guest.keeper)[1])
    except (OSError, IndexError):  # the keeper has not started the template
        return 0


def test_episode_processes_never_exceed_at_once() -> None:
    config = trl("Counter", at_once=3)
    environment, most = build(config), 0

    async def watch() -> None:
        nonlocal most
        while True:
            if find_mark(environment):
                most = max(most, count_episodes(environment))
            await asyncio.sleep(0.001)

    async def run() -> list[Score | None]:
        watching = asyncio.ensure_future(watch())
        episodes = [speak(config, call("add", number=3), "Done.") for _ in range(60)]
        scores = await asyncio.gather(*(environment.play(one) for one in episodes))
        watching.cancel()
        await close(environment)
        return scores

    assert {score.value for score in asyncio.run(run()) if score} == {1.0}
    assert 0 < most <= 3
