"""Tests the import paths of user-defined parts: which objects they may name, and the error for any other object."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

import pytest

from rollflow.flows.config import parse_config
from rollflow.storage.errors import ConfigError
from rollflow.tasks.runtime.imports import imported_class, imported_function, imported_object
from rollflow.tasks.scorers import build_scorer, build_verifier
from rollflow.tasks.scorers.base import Score
from rollflow.tasks.scorers.base_config import RewardBase
from rollflow.tasks.scorers.concurrent import ConcurrentPool
from rollflow.tasks.scorers.config import ImportReward
from rollflow.tasks.scorers.pool import RewardPool
from tests.support.user_code import put_in_reach

MODULE = """
from rollflow.tasks.scorers.base import Score

def good(response, reference, *, least=0) -> Score:
    return Score(float(len(response) > least), "length")

def wide(response, reference, *, words) -> Score:
    return Score(float(response in words), "")

def bare(response, reference):
    return 1.0

async def later(response, reference) -> Score:
    return Score(1.0, "a moment later")

async def some(responses, references) -> "list[Score | float]":
    return [1.0, Score(0.5, "half")][: len(responses)]

def share(response, reference) -> float:
    return 0.25

def other(size, reference) -> float:
    return 0.25

def several(response, reference) -> Score:
    yield Score(1.0, "the first")

def unreadable(response, reference) -> "Score +":
    return Score(1.0, "")

class Thing:
    pass

def __getattr__(name):
    if name == "made":
        raise RuntimeError("not\\ntoday")
    raise AttributeError(name)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("")
    (tmp_path / "own" / "parts.py").write_text(MODULE)
    (tmp_path / "own" / "broken.py").write_text("1 / 0\n")
    (tmp_path / "own" / "script.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "own" / "needy.py").write_text("import a_library_that_is_not_there\n")
    put_in_reach(monkeypatch, tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def reward(path: str, **options: object) -> ImportReward:
    return ImportReward(path=path, options=options)


def test_annotated_function_is_imported_with_its_options() -> None:
    assert build_verifier(reward("own.parts:good", least=2))("abc", {}) == Score(1.0, "length")
    assert build_verifier(reward("own.parts:good", least=3))("abc", {}) == Score(0.0, "length")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere.parts:good", "there is no module nowhere on this machine; install its package, or put the folder"),
        ("own.nowhere:good", "there is no module own.nowhere on this machine"),
        ("own.parts:missing", "the module own.parts has no missing; name something that the module has"),
        ("own.broken:good", "importing own.broken failed with ZeroDivisionError: division by zero; correct the module"),
        ("own.needy:good", "No module named 'a_library_that_is_not_there'; install the missing module"),
        (
            "own.parts:bare",
            "the path does not name a function that is annotated to return rollflow's Score; write `-> Score`, with "
            "`from rollflow.tasks.scorers.base import Score`",
        ),
        ("own.parts:Thing", "the path does not name a function that is annotated"),
        ("own.parts:unreadable", "the path does not name a function that is annotated"),
        ("own.parts:several", "the function uses yield; write a function that returns its Score"),
        ("own.parts:other", "the path does not name a function that is annotated to return rollflow's Score"),
        ("own.parts:made", "the module failed with RuntimeError: not today; correct the module"),
        ("own.script:good", "importing own.script failed with SystemExit: 0; correct the module"),
    ],
)
def test_missing_import_path_gets_a_one_sentence_error(path: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_verifier(reward(path))
    assert str(refused.value).startswith(f"reward.path = {path!r}: ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_error_names_unknown_options_of_an_imported_function() -> None:
    with pytest.raises(ConfigError, match=r"reward\.options = \{'most': 1\}: own\.parts:good failed with TypeError"):
        build_verifier(reward("own.parts:good", most=1))


def test_options_too_long_for_a_worker_are_refused() -> None:
    """Without this check, the pool of workers would take the operating system's error for a full process table, and
    retry forever.
    """
    assert build_verifier(reward("own.parts:wide", words="x" * 90_000))
    with pytest.raises(
        ConfigError,
        match=r"reward\.options = \{'words': 'xä+\.\.\.: the options have 1\d{5} bytes, more than the 100000",
    ):
        build_verifier(reward("own.parts:wide", words="x" + "ä" * 70_000))


@pytest.mark.parametrize("path", ["os:system", "builtins:exec", "builtins:eval", "subprocess:run", "pickle:loads"])
def test_forged_config_cannot_call_other_functions(path: str) -> None:
    with pytest.raises(ConfigError, match=r"the path does not name a function that is annotated"):
        imported_function("reward", reward(path), Score)
    with pytest.raises(ConfigError, match=r"the path does not name a class that derives from rollflow's RewardBase"):
        imported_class("reward", reward(path), RewardBase)


def test_import_path_of_an_abstract_base_class_is_refused() -> None:
    found = imported_class("reward", reward("rollflow.tasks.scorers.config:ExactReward"), RewardBase)
    assert found.__name__ == "ExactReward"
    with pytest.raises(ConfigError, match="derives from"):
        imported_class("reward", reward("rollflow.tasks.scorers.base_config:RewardBase"), RewardBase)


@pytest.mark.parametrize("path", ["own.parts", "own/parts:good", ":good", "own.parts:good()", "own.parts:a.b"])
def test_malformed_import_path_is_refused_by_the_recipe(path: str) -> None:
    with pytest.raises(ConfigError, match=r"^reward\.path = "):
        parse_config({"reward": {"kind": "import", "path": path}})


def test_relative_pythonpath_is_refused(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(modules)
    monkeypatch.setenv("PYTHONPATH", ".")
    with pytest.raises(ConfigError, match=rf"PYTHONPATH = '\.'.*; write PYTHONPATH={modules}"):
        build_verifier(reward("own.parts:good"))


def test_scorer_whose_function_is_missing_is_not_built(modules: Path) -> None:
    with pytest.raises(ConfigError, match="there is no module nowhere"):
        build_scorer(reward("nowhere:good"), modules)


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("good", RewardPool, Score(1.0, "length")),
        ("share", RewardPool, 0.25),
        ("later", ConcurrentPool, Score(1.0, "a moment later")),
        ("some", ConcurrentPool, 1.0),
    ],
)
def test_signature_of_the_verifier_decides_how_it_is_called(
    modules: Path, name: str, kind: type, found: object
) -> None:
    config = reward(f"own.parts:{name}")
    assert type(build_scorer(config, modules)) is kind
    assert build_verifier(config)("abc", {}) == found


class Contract(Protocol):
    """The contract that the classes below implement or violate."""

    def answer(self, question: str) -> str:
        """Something."""

    async def wait(self) -> None:
        """A while."""


class Good(Contract):
    @staticmethod
    def answer(question: str, *, aloud: bool = False) -> str:
        return question

    async def wait(self) -> None:
        return None


class Mute(Contract):
    async def wait(self) -> None:
        return None


class Deaf(Good):
    def answer(self) -> str:  # type: ignore[override]
        return ""


class Hasty(Good):
    def wait(self) -> None:  # type: ignore[override]
        return None


class Another(Good):
    def __new__(cls) -> Good:  # type: ignore[misc]
        return Good()


class Ending(Good):
    def __init__(self) -> None:
        raise SystemExit(0)


def test_imported_class_with_all_methods_is_created() -> None:
    assert isinstance(imported_object("reward", reward(f"{__name__}:Good"), Contract), Good)  # type: ignore[type-abstract]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Mute", r"the class lacks the method answer\(self, question\); write it"),
        ("Deaf", r"the method answer does not take the arguments \(question\): too many positional arguments"),
        ("Hasty", "the method wait cannot be awaited; write `async def wait`"),
        ("Another", "creating an object of the class gives a Good instead; change the class"),
        ("Ending", "Ending failed with SystemExit: 0; give options that the part accepts"),
    ],
)
def test_imported_class_with_wrong_methods_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        imported_object("reward", reward(f"{__name__}:{name}"), Contract)  # type: ignore[type-abstract]
