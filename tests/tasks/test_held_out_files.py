"""Tests held-out questions from a file or a split of their own, and the training questions that are left out because of
them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.config import load_recipe, parse_config
from rollflow.flows.locations import attach_run
from rollflow.flows.preflight import preflight
from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.prompt_check import read_files
from rollflow.tasks.run.prompt_pins import PINS, TablePin
from tests.support.small_run import prepare_small

SAVED = Path(__file__).parent.parent / "fixtures/saved_dataset"  # 20 rows in the split train; 5 of them also in test
NAMES = {"question": "problem", "answer": "solution"}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))


def write(folder: Path, name: str, questions: Sequence[str]) -> str:
    (folder / name).write_text("".join(json.dumps({"question": text, "answer": "1"}) + "\n" for text in questions))
    return str(folder / name)


TRAINED = [f"What is {n} + 1?" for n in range(30)]
TESTED = ["How much is 9?", "what is 3 + 1", "How much is 8?", "What is 4 + 1?", "How much is 9?"]


def source_of(folder: Path, **keys: Any) -> dict[str, Any]:
    path, other = write(folder, "train.jsonl", TRAINED), write(folder, "test.jsonl", TESTED)
    return {"kind": "file", "path": path, "held_out_path": other, **keys}


def test_held_out_questions_of_a_file_keep_their_order(tmp_path: Path) -> None:
    """No question of the held-out file is trained on, whatever its spelling, even if it is not among the evaluated
    questions.
    """
    prompts = prepare_small(tmp_path, versions=1, prompts=[source_of(tmp_path)]).prompts()
    assert [prompt.text for prompt in prompts.held_out()] == TESTED[:4]
    trained = {prompts.prompt(index).text for index in range(200)}
    assert trained == set(TRAINED) - {"What is 3 + 1?", "What is 4 + 1?"}


def test_check_command_counts_rows_whose_question_is_held_out(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    write(tmp_path, "train.jsonl", [*TRAINED, *TRAINED[10:13]])
    config = parse_config({"prompts": [source], "engine": {"max_new_tokens": 16}, "reward": {"kind": "exact"}})
    [note] = [note for note in preflight(config).notes if "are left out" in note]
    assert note == (
        f"prompts.path = {source['path']!r}: 31 lines are trained on, of which 3 repeat a question; 4 questions are "
        "held out, and 2 lines are left out because their question is held out"
    )


def test_held_out_split_of_a_saved_data_set_is_used(tmp_path: Path) -> None:
    source = {"kind": "file", "path": str(SAVED), "columns": NAMES, "held_out_split": "test"}
    prompts = prepare_small(tmp_path, versions=1, prompts=[source]).prompts()
    assert {prompts.prompt(index).text for index in range(100)} == {f"What is {n} + 1?" for n in range(5, 20)}
    assert [prompt.text for prompt in prompts.held_out()] == [f"What is {n} + 1?" for n in range(4)]


def test_run_stores_a_copy_of_its_held_out_file(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    context = prepare_small(tmp_path, versions=1, prompts=[source], keep_prompts_bytes=0)
    before = [prompt.text for prompt in context.prompts().held_out()]
    Path(source["held_out_path"]).unlink()
    Path(source["path"]).write_text("")
    assert [prompt.text for prompt in attach_run(context.uri).prompts().held_out()] == before
    assert audit(context.store, deep=True).clean
    [pin] = PINS.validate_python(context.created.prompts)
    assert isinstance(pin, TablePin)
    assert pin.held_out is not None
    context.store.put(pin.held_out.kept, context.store.get(pin.held_out.kept).replace(b"9", b"7"))
    with pytest.raises(Corrupt, match=r"the run's copy of .*test\.jsonl, was altered"):
        attach_run(context.uri).prompts()
    assert [(v.kind, v.where) for v in audit(context.store, deep=True).violations] == [("altered", pin.held_out.kept)]


def test_error_names_the_faulty_held_out_file(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    Path(source["held_out_path"]).write_text('{"question": "1", "answer": "1"}\n{"question": "1", "answer": null}\n')
    with pytest.raises(ConfigError) as refused:
        read_files(parse_config({"prompts": [source], "reward": {"kind": "exact"}}), read_file)
    start = f"prompts.held_out_path = {source['held_out_path']!r}: line 2: answer is null"
    assert str(refused.value).startswith(start)


def test_held_out_file_equal_to_the_training_file_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    source["held_out_path"] = source["path"]
    prompts = RunPrompts(parse_config({"prompts": [source]}).prompts, 0, 4, lambda *_: [1], 100, read_file)
    with pytest.raises(ConfigError, match=r"left out because their question is held out; name another file or split"):
        prompts.prompt(0)


@pytest.mark.parametrize("key", ["held_out_path", "held_out_split"])
def test_held_out_share_together_with_a_file_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"prompts\.held_out = 0.2: the held-out questions come from {key}; remove"):
        parse_config({"prompts": [{"kind": "file", "path": "x.csv", "held_out": 0.2, key: "test"}]})


def test_held_out_split_of_a_file_without_splits_is_refused(tmp_path: Path) -> None:
    source = {"kind": "file", "path": write(tmp_path, "train.jsonl", TRAINED), "held_out_split": "test"}
    with pytest.raises(
        ConfigError, match=r"prompts\.held_out_split = 'test': .* is a file, which has no splits; remove"
    ):
        read_files(parse_config({"prompts": [source], "reward": {"kind": "exact"}}), read_file)


def test_held_out_path_is_relative_to_the_recipe(tmp_path: Path) -> None:
    recipe = '[policy.cold_start]\n[[prompts]]\nkind = "file"\npath = "a.csv"\nheld_out_path = "b.csv"\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    [source] = load_recipe(tmp_path / "recipe.toml").prompts
    assert (source.path, source.held_out_path) == (str(tmp_path / "a.csv"), str(tmp_path / "b.csv"))  # type: ignore[union-attr]
    (tmp_path / "recipe.toml").write_text(recipe.replace('"a.csv"', '"me/sums"\nformat = "hub"'))
    [source] = load_recipe(tmp_path / "recipe.toml").prompts
    assert (source.path, source.held_out_path) == ("me/sums", str(tmp_path / "b.csv"))  # type: ignore[union-attr]
