"""What is lost with a host is never blamed on the policy, done twice, counted twice, or left running."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score
from tests.environments.test_spread_episodes import open_fleet, stop_before
from tests.environments.worlds import call, gym, trl


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


@pytest.mark.parametrize("id", ["0.0.0", ""])
async def test_action_without_key_is_not_repeated(id: str, tmp_path: Path) -> None:
    """An episode of an evaluation has no id, so its environment cannot tell which actions are done."""
    config = trl("Paying", options={"file": str(tmp_path / "done")})
    async with open_fleet(config) as near:

        async def die(turn: int) -> None:
            near.find_busy()[0].dies_at = "call"

        score = await near.environment.play(stop_before(config, die, call("add", number=3), "Done.", id=id))
        assert isinstance(score, Score)
        assert score.outcome is (Outcome.CORRECT if id else Outcome.UNJUDGED)
