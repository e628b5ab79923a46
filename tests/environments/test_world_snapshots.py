"""Tests of snapshots of environments in worker processes: an episode continues from them, and repeats no action."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.records import Outcome
from rollflow.tasks.environments.base import SnapshotRejected
from rollflow.tasks.environments.foreign.snapshots import NO_REPLAY, pack_snapshot, unpack_snapshot
from rollflow.tasks.scorers.base import Score
from tests.environments.worlds import SpokenEpisode, build, call, close, gym, play, speak, trl


def resume(config: Any, before: SpokenEpisode, *responses: str) -> tuple[Score | None, SpokenEpisode]:
    """Continue an episode from its newest snapshot, in a new process."""
    environment = build(config)
    after = speak(config, *responses, keeps_snapshots=True, snapshot=before.snapshots[-1])
    after.prompt, after.response, after.lived = before.prompt, before.response, before.lived

    async def run() -> Score | None:
        try:
            return await environment.play(after)
        finally:
            await close(environment)

    return asyncio.run(run()), after


@pytest.mark.parametrize("turns", [1, 2])
def test_environment_continues_from_its_snapshot(turns: int) -> None:
    whole, _, _ = play(gym("Saving"), "1")
    score, before, _ = play(gym("Saving"), "1", turns=turns, keeps_snapshots=True)
    assert score is None
    assert len(before.snapshots) == turns
    score, after = resume(gym("Saving"), before, "1")
    assert (score, after.asked.count("replace_prompt")) == (whole, 0)
    assert after.asked.count("generate") == 3 - turns


def test_steps_that_a_wrapper_counts_are_restored() -> None:
    _, before, _ = play(gym("Wrapped"), "1", turns=1, keeps_snapshots=True)
    score, after = resume(gym("Wrapped"), before, "1")
    assert score is not None
    assert (score.value, after.asked.count("generate")) == (3.0, 1)


def test_evaluation_takes_no_snapshot() -> None:
    _, episode, environment = play(gym("Saving"), "1")
    assert episode.snapshots == []
    assert environment.health.failures == 0


def test_error_says_why_a_snapshot_is_rejected() -> None:
    _, before, _ = play(gym("Saving"), "1", turns=1, keeps_snapshots=True)
    with pytest.raises(SnapshotRejected, match="RuntimeError: another world"):
        resume(gym("Saving", options={"wrong": "no restore"}), before, "1")


def test_snapshot_that_is_not_bytes_is_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        score, episode, _ = play(gym("Saving", options={"wrong": "no bytes"}), "1", keeps_snapshots=True)
    assert score is not None
    assert (score.value, episode.snapshots) == (6.0, [])
    assert "no snapshot was stored: snapshot returned a str, not bytes" in caplog.text


def test_trl_environment_continues_from_its_snapshot(tmp_path: Path) -> None:
    config = trl("Keeping", options={"file": str(tmp_path / "done")})
    _, before, _ = play(config, call("add", number=1), turns=1, keeps_snapshots=True)
    score, _ = resume(config, before, call("add", number=2), "Done.")
    assert score is not None
    assert (score.value, score.outcome) == (1.0, Outcome.CORRECT)
    assert (tmp_path / "done").read_text() == "0.0.0.0.0 1\n0.0.0.1.0 3\n"


def test_action_before_a_crash_is_not_repeated(tmp_path: Path) -> None:
    """The newest turn is recalled after a crash, and its action was done before the crash."""
    config, file = trl("Keeping", options={"file": str(tmp_path / "done")}), tmp_path / "done"
    _, before, _ = play(config, call("add", number=1), turns=1, keeps_snapshots=True)
    file.write_text(file.read_text() + "0.0.0.1.0 3\n")
    score, after = resume(config, before, call("add", number=2), "Done.")
    assert after.heard == ["\n<tool_response>3</tool_response>\n"]
    assert score is not None
    assert file.read_text() == "0.0.0.0.0 1\n0.0.0.1.0 3\n"


def test_episode_forgets_its_turns_if_replay_is_impossible(tmp_path: Path) -> None:
    options = {"file": str(tmp_path / "done")}
    _, episode, _ = play(trl("Paying", options=options), "Done.")
    assert episode.forgotten == NO_REPLAY
    _, episode, _ = play(trl("Counter"), "Done.")
    assert episode.forgotten == ""


def test_optional_methods_are_not_offered_as_tools(tmp_path: Path) -> None:
    _, episode, _ = play(trl("Keeping", options={"file": str(tmp_path / "done")}), call("snapshot"), "Done.")
    assert "the tools are add, double" in episode.heard[0]
    _, episode, _ = play(trl("Tooled"), call("snapshot") + call("restore", place="home"), "Done.", keeps_snapshots=True)
    assert "a photo" in "".join(episode.heard)
    assert "home" in "".join(episode.heard)
    assert episode.snapshots == []


@given(st.binary(), st.floats(allow_nan=False))
def test_snapshot_keeps_the_bytes_of_the_environment(data: bytes, total: float) -> None:
    import base64

    fields = {"data": base64.b64encode(data).decode(), "total": total}
    packed = pack_snapshot(fields)
    assert packed.endswith(data)
    assert unpack_snapshot(packed) == fields
    assert json.loads(packed.partition(b"\n")[0]) == {"total": total}
