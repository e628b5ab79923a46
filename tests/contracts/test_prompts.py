"""Tests the guarantees of a prompt source on each kind of source. To test a new source, add a line to CASES."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollflow.flows.config import parse_config
from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.base import Question, QuestionSource
from rollflow.tasks.prompts.config import (
    ColumnSumsPrompts,
    FilePrompts,
    ImportPrompts,
    JsonlPrompts,
    PromptConfig,
    ReasoningGymPrompts,
    SortingPrompts,
)
from rollflow.tasks.prompts.games.config import FrozenLakePrompts, KuhnPokerPrompts, SeedPrompts, SokobanPrompts
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.run.user_code import check_own_parts
from rollflow.testing.prompts import SourceContract, open_prompts
from tests.support.user_code import FOLDER, put_in_reach

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def questions(folder: Path) -> JsonlPrompts:
    """Write a file in which some lines ask the same question."""
    path = folder / "mine.jsonl"
    lines = [{"question": f"q{i % 250}", "answer": i % 250} for i in range(300)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return JsonlPrompts(path=str(path), held_out=0.2)


def table(folder: Path) -> FilePrompts:
    """Write the same questions as a CSV file."""
    content = "".join(f"{i % 250},q{i % 250}\n" for i in range(300))
    (folder / "mine.csv").write_text(f"solution,problem\n{content}")
    columns = {"question": "problem", "answer": "solution"}
    return FilePrompts(path=str(folder / "mine.csv"), held_out=0.2, columns=columns)


CASES: dict[str, Callable[[Path], PromptConfig]] = {
    "reasoning-gym": lambda _: ReasoningGymPrompts(family="chain_sum", options=SUMS),
    "jsonl": questions,
    "file": table,
    "column-sums": lambda _: ColumnSumsPrompts(min_digits=1, max_digits=1),
    "sorting": lambda _: SortingPrompts(digits=3),  # there are 220 multisets of three digits
    # boards are small, so that a held-out question that leaks into training would be found
    "frozen-lake": lambda _: FrozenLakePrompts(size=3, holes=0.1),
    "sokoban": lambda _: SokobanPrompts(size=5, walls=0.0),
    "kuhn-poker": lambda _: KuhnPokerPrompts(),
    "seeds": lambda _: SeedPrompts(row={"environment": "lake"}),
    "import": lambda _: ImportPrompts(path="letters.prompts:LetterCounts", options={"alphabet": "abc", "length": 4}),
    "programs": lambda _: ImportPrompts(path="rollflow.tasks.prompts.domains:LinePrograms", options={"most": 2}),
    "products": lambda _: ImportPrompts(path="rollflow.tasks.prompts.domains:LongProducts", options={"digits": 2}),
    "words": lambda _: ImportPrompts(path="rollflow.tasks.prompts.domains:WordLists", options={"most": 2}),
}


def opened(config: PromptConfig, seed: int = 0, held_out: int = 40) -> RunPrompts:
    return open_prompts(config, seed, held_out)


def test_every_prompt_source_kind_has_a_test_case(tmp_path: Path) -> None:
    kinds = PromptConfig.__origin__.__args__  # type: ignore[attr-defined]
    assert {type(make(tmp_path)) for make in CASES.values()} == set(kinds)


class TestSources(SourceContract):
    """The prompt source contract, tested on each kind of source. A source has only 200 to 300 questions, so that a
    held-out question that leaks into training would be found.
    """

    @pytest.fixture(params=CASES.values(), ids=CASES)
    def config(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PromptConfig:
        put_in_reach(monkeypatch, FOLDER)
        found: PromptConfig = request.param(tmp_path)
        return found


# --- user-defined prompt sources ---------------------------------------------------------------------------


class Own(QuestionSource):
    """A user-defined source that fails in the way that its option `wrong` names."""

    opened = 0

    def __init__(self, *, seed: int, held_out: int, wrong: str = "") -> None:
        self._wrong, self._held = wrong, held_out
        Own.opened += 1

    def training(self, position: int) -> Question:
        if self._wrong == "error":
            raise LookupError("no more words")
        if self._wrong == "string":
            return "How many?"  # type: ignore[return-value]
        if self._wrong == "drawn":
            return self._question(f"{Own.opened}.{position}")
        if self._wrong == "empty":
            return self._question(" ")
        if self._wrong == "half":
            return self._question("\ud83d")
        if self._wrong == "late" and position == 5:
            return self._question(" H1!")
        return self._question({"leak": "h1", "spelled": " H1!", "keyed": "t"}.get(self._wrong, f"t{position}"))

    def demonstration(self, position: int) -> Question:
        return self._question("h0" if self._wrong == "shown" else f"d{position}")

    def held_out(self, count: int) -> list[Question]:
        if self._wrong == "nothing":
            return None  # type: ignore[return-value]
        if self._wrong == "endless":
            return (self._question(f"h{i}") for i in itertools.count())  # type: ignore[return-value]
        return [self._question("h0" if self._wrong == "twice" else f"h{i}") for i in range(count)]

    def _question(self, text: str) -> Question:
        if self._wrong == "number":
            return Question(text, 1, {})  # type: ignore[arg-type]
        key = {"keyed": "one for all", "no key": 1}.get(self._wrong, "")
        return Question(text, "1", {"answer": {1} if self._wrong == "set" else 1}, key)  # type: ignore[arg-type]


def own(wrong: str) -> ImportPrompts:
    return ImportPrompts(path=f"{__name__}:Own", options={"wrong": wrong})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("error", "failed with LookupError: no more words"),
        ("string", "training(0) gave a str; return rollflow's Question"),
        ("leak", "training(0) asks the text of a held-out question, "),
        ("spelled", "training(0) asks what is held out"),
        ("no key", "gave a question whose key is 1; give a str that can be"),
        ("twice", "asks a question twice; hold out distinct ones"),
        ("set", "gave a question whose reference is not JSON"),
        ("nothing", "failed with TypeError: 'NoneType' object is not iterable"),
        ("empty", "training(0) gave a question without text; give a text"),
        ("half", "gave a question whose text is '\\ud83d'; give a str"),
        ("number", "gave a question whose answer is 1; give a str that can be"),
        ("drawn", "the source asks other questions each time it is opened; draw from its seed alone"),
    ],
)
def test_faulty_prompt_source_is_refused_before_a_run(wrong: str, words: str) -> None:
    config = parse_config({"prompts": [own(wrong).model_dump()], "evaluation": {"prompts": 5}})
    with pytest.raises(ConfigError) as refused:
        check_own_parts(config)
    assert words in str(refused.value)
    assert str(refused.value).startswith("prompts.")


def test_held_out_question_in_other_spelling_is_not_trained_on() -> None:
    """The held-out question occurs in the middle of a run, so the first positions of the source do not show it."""
    source = opened(own("late")).sources[0]
    assert [source.training(position).text for position in (4, 5)] == ["t4", "t1000008"]


def test_held_out_demonstration_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"demonstration\(0\) asks the text of a held-out question, "):
        opened(own("shown")).demonstration(0)


def test_endless_held_out_set_is_cut_to_the_configured_size() -> None:
    assert [prompt.text for prompt in opened(own("endless"), held_out=3).held_out()] == ["h0", "h1", "h2"]


def test_class_that_is_not_a_prompt_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="the path does not name a class that derives from rollflow's QuestionSource"):
        opened(ImportPrompts(path=f"{__name__}:CASES"))


def test_prompt_domain_is_the_class_name_or_the_configured_name() -> None:
    assert opened(own("")).prompt(0).id == "Own/00000000"
    assert opened(own("").model_copy(update={"name": "letters"})).prompt(0).domain == "letters"
