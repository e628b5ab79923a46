"""Prompts of several sources and of files. `contracts/test_prompts.py` tests the guarantees of each source."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Prompt
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.config import JsonlPrompts, PromptConfig, ReasoningGymPrompts
from rollflow.tasks.prompts.games.config import SokobanPrompts
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.prompts.tables import read_file

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def encode(text: str, chat: bool, system: str | None) -> list[int]:
    return list(text.encode())


def order(*configs: PromptConfig, seed: int = 0, held_out: int = 20, longest: int = 200) -> RunPrompts:
    return RunPrompts(configs, seed, held_out, encode, longest, read_file)


def sums(**changes: object) -> ReasoningGymPrompts:
    return ReasoningGymPrompts(family="chain_sum", options=SUMS, **changes)  # type: ignore[arg-type]


def test_error_says_that_no_training_question_is_left() -> None:
    made = order(sums(), held_out=200)
    with pytest.raises(ConfigError, match=r"evaluation\.prompts: \d+ prompts are held out, and no other"):
        [made.prompt(i) for i in range(100)]


def test_prompt_index_gives_its_source_and_position(tmp_path: Path) -> None:
    """The prompts of a source are issued as if it were the only source, whatever the positions in the other sources
    are.
    """
    configs = sums(), ReasoningGymPrompts(family="gcd"), lines(tmp_path)
    made = order(*configs)
    for source, config in enumerate(configs):
        alone = order(config, held_out=7)
        for position in (0, 40, 3, 11):
            found, expected = made.prompt(position * 3 + source), alone.prompt(position)
            assert (found.text, found.domain) == (expected.text, expected.domain)
            assert found.id == f"{config.domain}/{position * 3 + source:08d}"


def test_demonstrations_are_drawn_by_the_shares_of_sources() -> None:
    made = order(sums(share=3.0), ReasoningGymPrompts(family="gcd", share=1.0))
    domains = [made.demonstration(i)[0].domain for i in range(80)]
    for start in range(0, 80, 8):
        assert Counter(domains[start : start + 8]) == {"chain_sum": 6, "gcd": 2}
    assert Counter(p.domain for p in made.held_out()) == {"chain_sum": 10, "gcd": 10}


def lines(tmp_path: Path, count: int = 20) -> JsonlPrompts:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": i}) + "\n" for i in range(count)))
    return JsonlPrompts(path=str(path), held_out=0.25)


def test_prompts_of_a_file_are_issued_line_by_line_in_each_pass(tmp_path: Path) -> None:
    made = order(lines(tmp_path))
    held = {p.text for p in made.held_out()}
    first = [made.prompt(i).text for i in range(15)]
    second = [made.prompt(i).text for i in range(15, 30)]
    assert len(held) == 5
    assert set(first) == set(second) == {f"q{i}" for i in range(20)} - held
    assert first != second
    assert made.prompt(0).reference["answer"] == int(made.prompt(0).text[1:])


def test_error_names_a_bad_line_of_a_prompt_file(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": "1", "answer": 1}\n{"question": "2"}\n')
    with pytest.raises(ConfigError, match="line 2 must have a question and an answer"):
        order(JsonlPrompts(path=str(tmp_path / "bad.jsonl")))


def test_too_long_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prompts\.0: a prompt has \d+ tokens, and the context leaves room"):
        order(sums(), longest=10).prompt(0)


class WaitingSource:
    """A question source that finds a question only after the event loop has continued."""

    def __init__(self) -> None:
        self.ran_on, self.asked = threading.Event(), list[int]()

    def training(self, position: int) -> Question:
        assert self.ran_on.wait(10), "the event loop waited for the question"
        self.asked.append(position)
        return Question(f"room {position}", "U", {})


def test_slow_source_does_not_block_the_event_loop() -> None:
    made, source = order(SokobanPrompts(boxes=2, size=7, moves=4), held_out=1), WaitingSource()
    made.sources = [source]  # type: ignore[list-item]

    async def request() -> list[Prompt]:
        asked = [made.request(index) for index in range(3)]
        assert not any(isinstance(one, Prompt) for one in asked)
        source.ran_on.set()
        return [await one for one in asked]  # type: ignore[misc]

    assert [prompt.index for prompt in asyncio.run(request())] == [0, 1, 2]
    assert source.asked == [0, 1, 2]


def test_fast_prompt_source_returns_a_prompt_at_once() -> None:
    for config in (SokobanPrompts(), sums()):
        made = order(config, held_out=2)
        assert made.request(3) == made.prompt(3)
