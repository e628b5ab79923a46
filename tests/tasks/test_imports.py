"""What an import path may name, and what is said of one that names something else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollflow.flows.config import parse
from rollflow.storage.errors import ConfigError
from rollflow.tasks.imports import imported_class, imported_function
from rollflow.tasks.verifiers import build_verifier
from rollflow.tasks.verifiers.base import Score
from rollflow.tasks.verifiers.config import ImportReward, RewardBase
from rollflow.tasks.verifiers.pool import RewardPool
from tests.support.own_parts import put_in_reach

MODULE = """
from rollflow.tasks.verifiers.base import Score

def good(response, reference, *, least=0) -> Score:
    return Score(float(len(response) > least), "length")

def bare(response, reference):
    return 1.0

class Thing:
    pass
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("")
    (tmp_path / "own" / "parts.py").write_text(MODULE)
    (tmp_path / "own" / "broken.py").write_text("1 / 0\n")
    (tmp_path / "own" / "needy.py").write_text("import a_library_that_is_not_there\n")
    put_in_reach(monkeypatch, tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def reward(path: str, **options: object) -> ImportReward:
    return ImportReward(path=path, options=options)


def test_a_function_that_says_it_returns_a_score_is_taken_with_its_options() -> None:
    assert build_verifier(reward("own.parts:good", least=2))("abc", {}) == Score(1.0, "length")
    assert build_verifier(reward("own.parts:good", least=3))("abc", {}) == Score(0.0, "length")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere.parts:good", "there is no module nowhere on this machine; install its package, or put the folder"),
        ("own.nowhere:good", "there is no module own.nowhere on this machine"),
        ("own.parts:missing", "the module own.parts has no missing; name something that it has"),
        ("own.broken:good", "importing own.broken failed with ZeroDivisionError: division by zero; correct it"),
        ("own.needy:good", "No module named 'a_library_that_is_not_there'; install that"),
        ("own.parts:bare", "it is no function that is annotated to return rollflow's Score"),
        ("own.parts:Thing", "it is no function that is annotated"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_sentence(path: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_verifier(reward(path))
    assert str(refused.value).startswith(f"reward.path = {path!r}: ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_options_that_it_does_not_take_are_named() -> None:
    with pytest.raises(ConfigError, match=r"reward\.options = \{'most': 1\}: own\.parts:good failed with TypeError"):
        build_verifier(reward("own.parts:good", most=1))


@pytest.mark.parametrize("path", ["os:system", "builtins:exec", "builtins:eval", "subprocess:run", "pickle:loads"])
def test_a_config_that_somebody_wrote_into_a_store_calls_no_function_that_is_not_meant_for_it(path: str) -> None:
    with pytest.raises(ConfigError, match=r"it is no function that is annotated"):
        imported_function("reward", reward(path), Score)
    with pytest.raises(ConfigError, match=r"it is no class that derives from rollflow's RewardBase"):
        imported_class("reward", reward(path), RewardBase)


def test_a_class_derives_from_its_contract_and_is_not_the_contract_itself() -> None:
    found = imported_class("reward", reward("rollflow.tasks.verifiers.config:ExactReward"), RewardBase)
    assert found.__name__ == "ExactReward"
    with pytest.raises(ConfigError, match="derives from"):
        imported_class("reward", reward("rollflow.tasks.verifiers.config:RewardBase"), RewardBase)


@pytest.mark.parametrize("path", ["own.parts", "own/parts:good", ":good", "own.parts:good()", "own.parts:a.b"])
def test_a_path_of_another_form_is_refused_as_a_recipe_is_read(path: str) -> None:
    with pytest.raises(ConfigError, match=r"^reward\.path = "):
        parse({"reward": {"kind": "import", "path": path}})


def test_a_relative_pythonpath_is_another_folder_in_other_processes(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(modules)
    monkeypatch.setenv("PYTHONPATH", ".")
    with pytest.raises(ConfigError, match=rf"PYTHONPATH = '\.'.*; write PYTHONPATH={modules}"):
        build_verifier(reward("own.parts:good"))


async def test_a_pool_without_its_verifier_scores_nothing(modules: Path) -> None:
    with pytest.raises(ConfigError, match="there is no module nowhere"):
        await RewardPool(reward("nowhere:good"), modules).start()
