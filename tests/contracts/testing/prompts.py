"""Tests the contract of prompt sources, which `rollflow.tasks.prompts.base` describes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.base import Asked, Question
from rollflow.tasks.prompts.config import ImportPrompts, PromptConfig
from rollflow.tasks.prompts.keys import normalise_text
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.prompts.tables import read_file
from rollflow.testing.bounds import HANG_SECONDS, call_bounded, import_keys, reach_from_workers

LONGEST = 1_000_000  # largest number of bytes of a question in these tests
ASKED = 600
AGAIN = """
import sys
from rollflow.tasks.prompts.config import {name} as Config
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.prompts.run_prompts import RunPrompts
made = RunPrompts([Config.model_validate_json(sys.argv[1])], 0, {held_out}, None, 0, read_file)
print(made.sha256(0))
"""


def encode(asked: Asked, chat: bool, system: str | None) -> list[int]:
    """Encode a text or messages as bytes."""
    return list(str(asked).encode())


def open_prompts(config: PromptConfig, seed: int, held_out: int) -> RunPrompts:
    """Open a source as a run does."""
    return RunPrompts([config], seed, held_out, encode, LONGEST, read_file)


def keys_of(questions: Iterable[Question]) -> set[str]:
    """Return the keys and the normalised texts of questions."""
    return {key for question in questions for key in (question.canonical_key, normalise_text(question.text))}


class SourceContract:
    """Tests of a prompt source. A subclass names the class by `path`; `held_out` questions are kept for evaluation."""

    path: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    held_out: ClassVar[int] = 40
    hang_seconds: ClassVar[float] = HANG_SECONDS

    @pytest.fixture
    def config(self) -> PromptConfig:
        """Return the section of the source under test; a subclass may override this fixture."""
        return ImportPrompts(**import_keys(type(self)))

    @pytest.fixture(autouse=True)
    def reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reach_from_workers(monkeypatch)

    def open(self, config: PromptConfig, seed: int = 0) -> RunPrompts:
        """Open the source as a run does; fail if the run would refuse the source."""
        try:
            return call_bounded(lambda: open_prompts(config, seed, self.held_out), "a source", self.hang_seconds)
        except ConfigError as error:
            pytest.fail(f"a run refuses this source: {error}", pytrace=False)

    def test_same_seed_gives_the_same_prompts_in_any_order(self, config: PromptConfig) -> None:
        first, second = self.open(config), self.open(config)
        held = first.held_out()
        forward = [first.prompt(i) for i in range(50)], [first.demonstration(i) for i in range(50)]
        shown = [second.demonstration(i) for i in reversed(range(50))]
        backward = [second.prompt(i) for i in reversed(range(50))], shown
        sentence = "a source must give the same question at a position, whatever it was asked before"
        assert forward == (backward[0][::-1], backward[1][::-1]), sentence
        assert held == second.held_out() == first.held_out(), sentence

    def test_different_seed_gives_different_prompts(self, config: PromptConfig) -> None:
        first, second = ([self.open(config, seed).prompt(i) for i in range(50)] for seed in (0, 1))
        assert first != second, "a source must draw its questions from `seed`"

    def test_another_process_gives_the_same_prompts(self, config: PromptConfig) -> None:
        """Another process has another seed for string hashes, so a source that uses the order of a set would fail."""
        code = AGAIN.format(name=type(config).__name__, held_out=self.held_out)
        command = [sys.executable, "-c", code, config.model_dump_json()]
        run = subprocess.run(command, capture_output=True, text=True, timeout=self.hang_seconds)
        assert run.returncode == 0, f"another process must be able to open the source, but: {run.stderr[-2000:]}"
        assert run.stdout.strip() == self.open(config).sha256(0), (
            "a source must give the same questions in every process, so draw from `seed` alone"
        )

    def test_held_out_prompts_are_not_trained_or_demonstrated(self, config: PromptConfig) -> None:
        made = self.open(config)
        source = made.sources[0]
        held = source.held_out(self.held_out)
        assert len(held) == len(made.held_out()) == self.held_out, (
            f"the source must hold out {self.held_out} questions, but it gave {len(held)}; or set `held_out`"
        )
        assert len({question.canonical_key for question in held}) == self.held_out, "held-out keys must be distinct"
        for stream in (source.training, source.demonstration):
            try:
                leaked = keys_of(held) & keys_of(stream(i) for i in range(ASKED))
            except ConfigError as error:
                pytest.fail(f"no training question and no demonstration may be held out: {error}", pytrace=False)
            assert not leaked, f"no training question and no demonstration may be held out, but {leaked} are"

    def test_training_and_demonstrations_are_separate_streams(self, config: PromptConfig) -> None:
        made = self.open(config)
        assert [made.prompt(i).text for i in range(50)] != [made.demonstration(i)[0].text for i in range(50)], (
            "demonstrations must come from another stream than training questions"
        )

    def test_smaller_held_out_set_is_a_prefix_of_a_larger(self, config: PromptConfig) -> None:
        source = self.open(config).sources[0]
        count = min(7, self.held_out)
        assert source.held_out(count) == source.held_out(self.held_out)[:count], (
            "`held_out(n)` must give the first n of the held-out questions"
        )
        assert len({question.text for question in source.held_out(10_000)}) == len(source.held_out(10_000)), (
            "held-out questions must be distinct"
        )

    def test_question_has_an_answer_and_a_json_reference(self, config: PromptConfig) -> None:
        source = self.open(config).sources[0]
        for question in [source.training(3), source.demonstration(3), *source.held_out(3)]:
            assert question.text.strip(), "a question must have a text"
            assert question.answer, "a question must have an answer"
            assert json.dumps(dict(question.reference)), "a reference must be JSON"
