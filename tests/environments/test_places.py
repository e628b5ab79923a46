"""Tests of worker processes that cannot be started or do not end: as many episodes as before can run afterwards."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollflow.storage.records import Outcome
from rollflow.tasks.environments.foreign import pool as pool_module
from rollflow.tasks.environments.guest.keeper import list_children
from rollflow.tasks.scorers.base import Score
from tests.environments.worlds import build, call, close, play, speak, trl
from tests.support.waiting import HANG_SECONDS, soon


def test_cancelled_start_makes_room_for_another_episode() -> None:
    """The keeper is stopped for a while, so some episodes wait for room in its socket when they are cancelled."""
    config = trl("Quiet", at_once=400)
    environment = build(config)

    async def run() -> None:
        await environment.play(speak(config, "Done."))
        pool = environment._pool
        assert pool is not None
        assert pool._guest is not None
        guest = pool._guest
        os.kill(guest.keeper, signal.SIGSTOP)
        episodes = [asyncio.create_task(environment.play(speak(config, "Done."))) for _ in range(400)]
        await soon(lambda: len(guest._ended) == 400)
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        os.kill(guest.keeper, signal.SIGCONT)
        await soon(lambda: pool._places._value == config.at_once)
        await close(environment)

    asyncio.run(run())


def test_later_episodes_run_after_a_cancelled_process_start() -> None:
    config = trl("Quiet", start_seconds=20.0)
    environment = build(config)

    async def run() -> Score | None:
        gate = threading.Event()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        blocked = asyncio.get_running_loop().run_in_executor(None, gate.wait)
        first = asyncio.create_task(environment.play(speak(config, "Done.")))
        await soon(lambda: environment._pool is not None and environment._pool._guest is not None)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        gate.set()
        await blocked
        score = await environment.play(speak(config, "Done."))
        await close(environment)
        return score

    score = asyncio.run(run())
    assert score is not None
    assert score.reason == "judged"
    assert environment.health.failures == 0


def test_environment_starts_in_a_process_with_many_open_files() -> None:
    """The keeper gets a file descriptor above 1023, which `select` cannot use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        score, _, _ = play(trl("Counter"), call("add", number=3), "Done.")
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert score is not None
    assert score.value == 1.0


def test_environment_process_that_is_stuck_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped template starts no process, so the keeper never reports the end of the episode's process."""
    monkeypatch.setattr(pool_module, "STUCK_SECONDS", 1.0)
    config = trl("Quiet", at_once=1, setup_seconds=3.0)
    environment = build(config)

    async def run() -> tuple[Score | None, Score | None]:
        await environment.play(speak(config, "Done."))
        assert environment._pool is not None
        assert environment._pool._guest is not None
        keeper = environment._pool._guest.keeper
        await soon(lambda: len(list_children(keeper)) == 1)  # the episode's process has ended
        [template] = list_children(keeper)
        os.kill(template, signal.SIGSTOP)
        stuck = await environment.play(speak(config, "Done."))
        async with asyncio.timeout(HANG_SECONDS):
            after = await environment.play(speak(config, "Done."))
        await close(environment)
        return stuck, after

    stuck, after = asyncio.run(run())
    assert stuck is not None
    assert stuck.outcome is Outcome.UNJUDGED
    assert after is not None
    assert after.reason == "judged"
