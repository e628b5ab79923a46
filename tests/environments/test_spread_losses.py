"""What is lost with a host is never blamed on the policy, done twice, counted twice, or left running."""

from __future__ import annotations

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score
from tests.environments.test_spread_episodes import open_fleet, stop_before
from tests.environments.worlds import gym


async def test_fault_of_a_repeated_restore_is_unjudged() -> None:
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
