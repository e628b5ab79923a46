"""Tests of the check that plays demonstrations in the environment before a run, and notes the first difference."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.config import parse_config
from rollflow.flows.prepare import prepare
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.prompts.base import DemonstratedTurn, Question, QuestionSource
from rollflow.tasks.run.cold_start import demonstration_check
from rollflow.tasks.run.cold_start.demonstration_check import compare_demonstrations
from rollflow.tasks.scorers.base import Score

FIRST = {"role": "user", "content": " 2:"}


class Countdown(Environment):
    """Asks for the letters a and b, one letter a turn, and adds ` 2:` between them."""

    async def play(self, episode: Episode) -> Score | None:
        for number, letter in enumerate("ab"):
            if (made := await episode.generate(max_tokens=1)) is None:
                return None
            said = episode.ports.tokenizer.decode_response(made.tokens)
            if said == "!":
                raise ValueError("no letter")
            if said == "?":
                await asyncio.sleep(60)
            if said == "~":
                time.sleep(2.0)  # noqa: ASYNC251  (an environment that blocks its thread)
            if said in "tr":  # rewards of turns and of roles
                episode.reward(float(said == "t"))
                return Score(0.0, roles={"": -1.0, "other": float(said == "r")})
            if said != letter:
                return Score(0.0, f"{said!r} is wrong")
            if number == 0 and not episode.extend([FIRST]):
                break
        return Score(1.0)


class Countdowns(QuestionSource):
    """A source whose demonstrations have the turns that the test sets."""

    turns: tuple[DemonstratedTurn, ...] = ()

    def __init__(self, *, seed: int, held_out: int) -> None:
        self._seed = seed

    def training(self, position: int) -> Question:
        return Question(f"t{position}", "b", {"answer": "b"}, turns=self.turns)

    def demonstration(self, position: int) -> Question:
        return self.training(position)

    def held_out(self, count: int) -> list[Question]:
        return [Question(f"h{position}", "b", {"answer": "b"}) for position in range(count)]


OWN: dict[str, Any] = {
    "prompts": [{"kind": "import", "path": f"{__name__}:Countdowns"}],
    "environment": {"kind": "import", "path": f"{__name__}:Countdown"},
    "engine": {"kind": "timed", "max_new_tokens": 12},
    "evaluation": {"prompts": 4},
    "policy": {"cold_start": {"vocabulary": 258, "hidden_size": 32, "heads": 2, "layers": 1}},
}


def find_notes(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    """Prepare a run, and compare its demonstrations with its environment."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(folder / "home"))
    context = prepare(parse_config({**OWN, **changes}), "game")
    return compare_demonstrations(context.config, context.prompts(), context.tokenizer)


A, B = DemonstratedTurn("a", (FIRST,)), DemonstratedTurn("b")
OTHER = DemonstratedTurn("a", ({"role": "user", "content": "=2:"},))


@pytest.mark.parametrize(
    ("turns", "fault"),
    [
        ((A, B), ""),
        ((DemonstratedTurn("t"),), ""),
        ((DemonstratedTurn("r"),), ""),
        ((A,), ""),  # a demonstration of the first turn alone
        ((OTHER, B), "its tokens from number 3 on are '=2:b', but those of the episode ' 2:b'"),
        ((A, DemonstratedTurn("c")), "its episode gets the reward 0 ('c' is wrong)"),
        ((DemonstratedTurn("c", (FIRST,)), B), "its episode ends after 1 of 2 turns ('c' is wrong)"),
        ((A, DemonstratedTurn("bb")), "its turn 2 is longer than the environment allows"),
        ((A, B, B), "its episode ends after 2 of 3 turns"),
        (
            (DemonstratedTurn("!", (FIRST,)), B),
            f"its episode ends after 1 of 2 turns (environment {__name__}:Countdown failed: ValueError: no letter)",
        ),
        ((DemonstratedTurn("?", (FIRST,)), B), "its episode did not end within 0.5 s"),
    ],
)
def test_note_names_the_first_difference_of_a_demonstration(
    turns: tuple[DemonstratedTurn, ...], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Countdowns, "turns", turns)
    monkeypatch.setattr(demonstration_check, "SECONDS", 0.5)
    notes = find_notes(tmp_path, monkeypatch)
    start = "prompts.0: the demonstration of the question 't0' does not fit the environment: "
    told = [f"{start}{fault}; "] if fault else []
    assert [note.removesuffix(demonstration_check.ADVICE) for note in notes] == told


def test_note_reports_an_environment_that_blocks_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Countdowns, "turns", (DemonstratedTurn("~", (FIRST,)), B))
    monkeypatch.setattr(demonstration_check, "SECONDS", 0.1)
    monkeypatch.setattr(demonstration_check, "MARGIN", 0.1)
    (note,) = find_notes(tmp_path, monkeypatch)
    assert "its episode did not end within 0.1 s" in note
    assert [one for one in threading.enumerate() if one.name == "environment"], "the environment has ended by itself"


def test_demonstration_check_calls_no_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Countdowns, "turns", (OTHER, B))
    endpoints = {"user": {"url": "http://127.0.0.1:9/v1", "model": "m"}}
    assert find_notes(tmp_path, monkeypatch, environment={**OWN["environment"], "endpoints": endpoints}) == []


def test_note_names_a_limit_below_the_demonstrated_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Countdowns, "turns", (A, B))
    (note,) = find_notes(tmp_path, monkeypatch, environment={**OWN["environment"], "max_turns": 1})
    assert "its episode ends after 1 of 2 turns (" in note
    assert "max_turns" in note


@pytest.mark.parametrize("kind", ["frozen-lake", "sokoban"])
def test_demonstrations_of_games_fit_their_environments(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    games = {"prompts": [{"kind": kind, "moves": 6}], "environment": {"kind": kind, "max_turns": 10}}
    assert find_notes(tmp_path, monkeypatch, **games, engine={"kind": "timed", "max_new_tokens": 28}) == []
