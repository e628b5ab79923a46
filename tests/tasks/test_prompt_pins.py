"""The prompt at an index stays the same during a run; if it has changed, an error of one sentence refuses the run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rollflow.flows.commands.cli import main
from rollflow.flows.locations import attach_run
from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.config import JsonlPrompts
from rollflow.tasks.prompts.jsonl import read_questions
from rollflow.tasks.prompts.reasoning_gym import ReasoningGymSource
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run import prompt_pins
from rollflow.tasks.run.context import RunContext, open_prompts
from tests.support.small_run import prepare_small, train_small

LINES = 90


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("rollflow.flows.commands.run.drive", lambda context: 0)


def content(count: int = LINES) -> bytes:
    return b"".join(json.dumps({"question": f"{i}+1", "answer": i + 1}).encode() + b"\n" for i in range(count))


def prepared(tmp_path: Path, *, keep: int = 2**28, versions: int = 1, run_id: str = "small") -> tuple[RunContext, Path]:
    """Prepare a run over a file of questions, which is copied if it has at most `keep` bytes."""
    file = tmp_path / "mine.jsonl"
    file.write_bytes(content())
    source = {"kind": "jsonl", "path": str(file), "held_out": 0.1}
    return prepare_small(tmp_path, run_id, versions=versions, prompts=[source], keep_prompts_bytes=keep), file


def asked(context: RunContext) -> list[str]:
    prompts = attach_run(context.uri).prompts()
    return [prompts.prompt(index).text for index in range(LINES)] + [prompt.text for prompt in prompts.held_out()]


def appended(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b'{"question": "1+1", "answer": 2}\n')


def replaced(file: Path) -> None:
    other = file.with_suffix(".new")
    other.write_bytes(content().replace(b"7", b"8"))
    os.replace(other, file)


def in_other_order(file: Path) -> None:
    file.write_bytes(b"".join(reversed(file.read_bytes().splitlines(keepends=True))))


CHANGES: list[Callable[[Path], None]] = [
    appended,
    replaced,
    in_other_order,
    Path.unlink,
    lambda file: file.write_bytes(b""),
]


@pytest.mark.parametrize("change", CHANGES, ids=["appended", "replaced", "other order", "gone", "empty"])
def test_run_uses_its_stored_copy_of_a_changed_prompt_file(
    tmp_path: Path, change: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompt file changes before the resume. One added line would already change 89 of 90 questions."""
    context, file = prepared(tmp_path)
    before = asked(context)
    change(file)
    assert asked(context) == before
    assert main(["resume", "small"]) == 0
    assert "rollflow:" not in capsys.readouterr().err


@pytest.mark.parametrize("change", CHANGES, ids=["appended", "replaced", "other order", "gone", "empty"])
def test_changed_prompt_file_without_a_copy_is_refused(
    tmp_path: Path, change: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    context, file = prepared(tmp_path, keep=len(content()) - 1)
    before = asked(context)
    change(file)
    with pytest.raises(ConfigError, match=r"prompts\.path = '.*mine.jsonl'"):
        asked(context)
    assert main(["resume", "small"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("rollflow: ")
    assert "prompts.path" in line
    assert str(file) in line
    file.write_bytes(content())  # as the error advises
    assert asked(context) == before
    assert main(["resume", "small"]) == 0


def test_prompt_file_is_copied_up_to_the_size_limit(tmp_path: Path) -> None:
    kept, _ = prepared(tmp_path, keep=len(content()), run_id="kept")
    [path] = kept.store.list("prompts")
    assert kept.store.get(path) == content()
    left, _ = prepared(tmp_path, keep=len(content()) - 1, run_id="left")
    assert list(left.store.list("prompts")) == []


def test_run_with_a_prompt_copy_needs_no_original_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with a copy needs neither the file, nor the home, nor the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_bytes(content())
    source = {"kind": "jsonl", "path": "mine.jsonl"}
    context = prepare_small(tmp_path, versions=1, prompts=[source])
    before = asked(context)
    shutil.move(context.uri, tmp_path / "elsewhere/runs/small")
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "mine.jsonl").unlink()
    monkeypatch.chdir("/")
    assert asked(attach_run(str(tmp_path / "elsewhere/runs/small"))) == before


def test_prompt_file_without_a_copy_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_bytes(content())
    source = {"kind": "jsonl", "path": "mine.jsonl"}
    context = prepare_small(tmp_path, versions=1, prompts=[source], keep_prompts_bytes=0)
    before = asked(context)
    monkeypatch.chdir("/")  # as in an actor
    assert asked(context) == before


def test_prompt_file_is_read_once_while_a_run_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes are checked, hashed and copied."""
    reads: list[str] = []

    def read(config: object) -> bytes:
        reads.append("read")
        return content(LINES + len(reads))

    monkeypatch.setattr(prompt_pins, "read_file", read)
    context, _ = prepared(tmp_path)
    assert reads == ["read"]
    assert context.store.get(*context.store.list("prompts")) == content(LINES + 1)


def test_replay_needs_no_prompt_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches contain the tokens, so a version can be replayed even if the prompt file is gone or was not copied."""
    context, file = prepared(tmp_path, keep=0, versions=3)
    train_small(context)
    file.unlink()
    assert main(["replay", "small", "--all"]) == 0
    assert capsys.readouterr().out.count("identical") == 3
    assert main(["inspect", "small", "0.0.0"]) == 0
    capsys.readouterr()
    assert main(["inspect", "small", "4.0"]) == 0  # the group was discarded, so no batch has its question
    shown = capsys.readouterr().out
    assert "discarded" in shown
    assert "prompts.path" in shown


def test_damaged_copy_of_a_prompt_file_is_detected(tmp_path: Path) -> None:
    context, _ = prepared(tmp_path)
    train_small(context)
    assert audit(context.store).clean
    [path] = context.store.list("prompts")
    context.store.put(path, content().replace(b"7", b"8"))
    with pytest.raises(Corrupt, match="was altered"):
        asked(context)
    assert [(v.kind, v.where) for v in audit(context.store, deep=True).violations] == [("altered", path)]
    context.store.delete(path)
    with pytest.raises(Corrupt, match="is missing"):
        asked(context)
    assert [(v.kind, v.where) for v in audit(context.store, deep=True).violations] == [("missing", path)]


def test_first_log_entry_records_the_hashes_of_the_policy(tmp_path: Path) -> None:
    context, _ = prepared(tmp_path)
    kept = {path: hashlib.sha256(context.store.get(path)).hexdigest() for path in context.store.list("policy")}
    assert "policy/config.json" in kept
    assert {stored.path: stored.sha256 for stored in context.created.policy} == kept
    context.store.put("policy/config.json", context.store.get("policy/config.json") + b" ")
    found = audit(context.store, deep=True).violations
    assert [(v.kind, v.where) for v in found] == [("altered", "policy/config.json")]


def test_other_version_of_reasoning_gym_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    context = prepare_small(tmp_path, versions=1)
    assert asked(context)
    monkeypatch.setattr(prompt_pins, "package_version", lambda name: "0.0.1")
    assert main(["resume", "small"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("rollflow: ")
    assert "prompts.family = 'basic_arithmetic'" in line
    assert "but 0.0.1 is installed; install reasoning-gym==" in line


def test_reasoning_gym_with_changed_questions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package has the same version: it was edited, or runs on another version of Python."""
    context, made = prepare_small(tmp_path, versions=1), ReasoningGymSource._build_question

    def otherwise(self: ReasoningGymSource, entry: dict[str, object]) -> Question:
        question = made(self, entry)
        return Question(question.text.replace("Calculate", "Compute"), question.answer, question.reference)

    monkeypatch.setattr(ReasoningGymSource, "_build_question", otherwise)
    with pytest.raises(ConfigError, match="asks other questions than when the run began"):
        asked(context)


def test_sum_source_with_changed_questions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reward = {"kind": "column-sums"}, {"kind": "exact", "answer": "tag"}
    context = prepare_small(tmp_path, versions=1, prompts=[source], reward=reward)
    assert asked(context)
    monkeypatch.setattr("rollflow.tasks.prompts.column_sums.PLACES", ("units", "tens", "hundreds", "thousands"))
    with pytest.raises(
        ConfigError, match=r"prompts\.kind = 'column-sums': this version of rollflow asks other questions"
    ):
        asked(context)


@pytest.mark.parametrize(
    "file",
    [
        content().replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + content(),
        content().replace(b"\n", b"\n\n  \n\r\n"),
        content().rstrip(b"\n"),
    ],
    ids=["CRLF", "byte order mark", "blank lines", "no last line end"],
)
def test_prompt_files_with_bom_and_crlf_are_read(tmp_path: Path, file: bytes) -> None:
    source = JsonlPrompts(path="mine.jsonl")
    assert read_questions(source, file) == read_questions(source, content())


def test_unicode_line_separator_does_not_end_a_line() -> None:
    text = json.dumps({"question": "one\u2028two\x85three", "answer": "\x0c"}, ensure_ascii=False)
    [found] = read_questions(JsonlPrompts(path="x"), text.encode())
    assert found.text == "one\u2028two\x85three"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (b"", "the file has no lines"),
        (b"\n \n", "the file has no lines"),
        (b"\xef\xbb\xbf", "the file has no lines"),
        (b'{"question": "\xff"}', "byte 14 is not UTF-8"),
        (b'\n{"question": "1"}', "line 2 must have a question and an answer"),
        (b'{"question": "1", "answer": null}', "line 1 must have a question"),
        (b'{"question": " ", "answer": 1}', "line 1 must have a question"),
        (b'{"question": "\\ud800", "answer": 1}', "line 1 must have a question"),
        (b"[1]", "line 1 must have a question"),
        (b"[" * 100_000, "line 1 must have a question"),
    ],
)  # fmt: skip
def test_error_names_an_invalid_prompt_file(file: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_questions(JsonlPrompts(path="mine.jsonl"), file)


def test_repeated_questions_are_held_out_once(tmp_path: Path) -> None:
    """Repeated questions are held out once, and no copy of a held-out question is trained on."""
    (tmp_path / "mine.jsonl").write_bytes(content(20) * 5)
    source = {"kind": "jsonl", "path": str(tmp_path / "mine.jsonl"), "held_out": 0.1}
    prompts = prepare_small(tmp_path, versions=1, prompts=[source]).prompts()
    held = [prompt.text for prompt in prompts.held_out()]
    assert len(held) == len(set(held))
    assert not set(held) & {prompts.prompt(index).text for index in range(200)}


def test_run_stores_the_lines_that_remain_after_dropping_prompts(tmp_path: Path) -> None:
    """The remaining lines are copied whatever their size, so no process has to find the long lines again."""
    long = b'{"question": "' + b"x" * 500 + b'", "answer": 1}\n'
    (file := tmp_path / "mine.jsonl").write_bytes(long + content(30) + long)
    source = {"kind": "jsonl", "path": str(file), "too_long": "drop"}
    context = prepare_small(tmp_path, versions=1, prompts=[source], keep_prompts_bytes=0)
    before = asked(context)
    file.unlink()
    assert asked(context) == before
    assert set(before) == {f"{i}+1" for i in range(30)}
    assert context.store.get(context.created.prompts[0]["kept"]) == content(30)


def test_missing_held_out_prompts_are_refused_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_bytes(content(3))
    source = {"kind": "jsonl", "path": str(tmp_path / "mine.jsonl"), "held_out": 0.1}
    with pytest.raises(ConfigError, match=r"evaluation\.prompts = 4: no prompt is held out, .*prompts\.held_out"):
        prepare_small(tmp_path, versions=1, prompts=[source])


SUMS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    """Create a run as it was recorded before questions had keys: questions are held out by text, and pins have no
    `split`.
    """

    def by_text(*opened: Any) -> RunPrompts:
        return open_prompts(*opened, "text")

    def without_split(pin: Any) -> dict[str, Any]:
        return {key: value for key, value in BaseModel.model_dump(pin).items() if key != "split"}

    with monkeypatch.context() as patch:
        patch.setattr("rollflow.flows.preflight.open_prompts", by_text)
        patch.setattr(prompt_pins.PinBase, "model_dump", without_split)
        file = tmp_path / "mine.jsonl"
        file.write_bytes(content() + content().replace(b'"question": "', b'"question": " '))
        family = {"kind": "reasoning-gym", "family": "chain_sum", "options": SUMS}
        context = prepare_small(
            tmp_path, versions=3, prompts=[family, {"kind": "jsonl", "path": str(file), "held_out": 0.2}]
        )
    assert all("split" not in pin for pin in context.created.prompts)
    return context


def test_recorded_run_keeps_its_held_out_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = recorded(tmp_path, monkeypatch)
    prompts, config = attach_run(context.uri).prompts(), context.config
    by_text = open_prompts(config, context.tokenizer, read_file, "text")
    by_key = open_prompts(config, context.tokenizer, read_file)
    assert prompts.split == "text"
    assert [p.text for p in prompts.held_out()] == [p.text for p in by_text.held_out()]
    asked = [prompts.prompt(index).text for index in range(2000)]
    assert asked == [by_text.prompt(index).text for index in range(2000)]
    assert asked != [by_key.prompt(index).text for index in range(2000)]
    train_small(context)
    assert audit(context.store, deep=True).clean


def test_held_out_split_of_a_new_run_is_by_question_keys(tmp_path: Path) -> None:
    context, _ = prepared(tmp_path)
    assert [pin["split"] for pin in context.created.prompts] == ["key"]
    assert context.prompts().split == "key"
