"""Tests with unchanged environments and MCP servers of other projects, each in its own Python environment.

The packages come from the package index. rollflow's own Python environment lacks them, or has other versions.
"""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rollflow.storage.records import Outcome
from rollflow.tasks.environments.config import GymnasiumEnvironment
from rollflow.tasks.environments.foreign.check import check_environment
from rollflow.tasks.environments.tool_use.check import check_tools
from tests.environments.test_mcp import SERVERS, play_once, serve
from tests.environments.worlds import GUESTS, call, play
from tests.support.foreign_python import make_python
from tests.support.waiting import HANG_SECONDS

pytestmark = pytest.mark.slow

TEXTWORLD = "textworld==1.7.0"
GAME = ["--world-size", "2", "--nb-objects", "5", "--quest-length", "3", "--seed", "7"]


# --- TextWorld ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def text_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_python(tmp_path_factory, TEXTWORLD)


@pytest.fixture(scope="session")
def game(text_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a game, which TextWorld's own program has generated."""
    file = tmp_path_factory.mktemp("game") / "game.z8"
    program = Path(text_python).with_name("tw-make")
    command = [program, "custom", *GAME, "--output", file]
    subprocess.run(command, check=True, capture_output=True, timeout=HANG_SECONDS * 4)
    return file


def build_game(python: str, game: Path, **keys: Any) -> GymnasiumEnvironment:
    return GymnasiumEnvironment(
        path="text_game:TextGame", act="text_game:read_command", options={"game": str(game)}, interpreter=python,
        folder=str(GUESTS), **keys,
    )  # fmt: skip


def test_generated_text_game_is_played_to_its_end(text_python: str, game: Path) -> None:
    assert find_spec("textworld") is None, "the test needs a package that rollflow's environment does not have"
    config = build_game(text_python, game)
    check_environment(config)
    solution = json.loads(game.with_suffix(".json").read_text())["metadata"]["walkthrough"]
    score, episode, environment = play(config, *[f"I go on.\n{command}" for command in solution])
    assert score is not None
    assert (score.value, score.outcome) == (1.0, Outcome.CORRECT), score.reason
    assert score.reason == "the environment ended the episode"
    assert episode.asked.count("generate") == len(solution)
    assert environment.health.failures == environment.health.crashes == environment.health.hangs == 0


def test_text_game_answers_wrong_and_empty_commands(text_python: str, game: Path) -> None:
    score, episode, _ = play(build_game(text_python, game, max_turns=3), "sing a song", "\n", "look")
    assert score is not None
    assert (score.value, score.outcome) == (0.0, Outcome.WRONG)
    assert episode.heard[0].strip()
    assert episode.heard[1] == "\nerror: write a command, such as: look\n"
    assert len(episode.heard) == 2


# --- the official SDK of MCP --------------------------------------------------------------------------------


@pytest.fixture(scope="session", params=["mcp==2.3.0", "mcp==1.27.0"])
def mcp_python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an interpreter with the SDK; rollflow's own environment cannot have the older version."""
    return make_python(tmp_path_factory, request.param)


def test_policy_uses_the_tools_of_an_official_sdk_server(mcp_python: str) -> None:
    config = serve(command=[mcp_python, str(SERVERS / "sdk_server.py")])
    check_tools(config)
    said = [
        call("store", ware="apples", count=3),
        call("store", ware="apples", count=4),
        call("look_up", ware="apples"),
        call("look_up", ware="pears"),
        call("store", ware="apples", count=0),
        call("store", ware="apples"),
        "There are 7 apples.",
    ]
    score, episode, _ = play_once(config, *said)
    assert score is not None
    assert (score.reason, episode.judged) == ("judged", ["There are 7 apples."])
    heard = [one.removeprefix("\n<tool_response>").removesuffix("</tool_response>\n") for one in episode.heard]
    assert heard[:2] == ["3 pieces of apples", "7 pieces of apples"]
    assert '"count": 7' in heard[2]
    assert heard[3].startswith("error: ")
    assert "look_up" in heard[3]
    assert all(one.startswith("error: ") and "count" in one for one in heard[4:])
    prompt = "".join(map(chr, episode.prompt.input.flat))
    assert '"name": "store", "description": "Put pieces of a ware into the stock."' in prompt
    assert '"description": "number of pieces"' in prompt
