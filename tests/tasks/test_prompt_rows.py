"""Every row of a prompt file is read before a run: either an error names its line, or it can be asked and scored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.config import parse_config
from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import open_prompts
from rollflow.tasks.run.prompt_check import fit_files, probe_sources, read_files

LONG = "x" * 500


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    """Make a tokenizer of bytes and few merges, with a context of 128 tokens."""
    folder = tmp_path_factory.mktemp("policy")
    for name, data in build_cold_folder(ColdStart(context=128), ["What is 1 + 1?"] * 10).items():
        (folder / name).write_bytes(data)
    return PolicyTokenizer(folder)


def config_of(path: Path, reward: dict[str, Any] | None = None, **source: Any) -> RunConfig:
    prompts = {"kind": "jsonl", "path": str(path), **source}
    return parse_config(
        {"prompts": [prompts], "reward": reward or {"kind": "exact"}, "engine": {"max_new_tokens": 16}, "policy": COLD}
    )


COLD = {"cold_start": {"context": 128}}
GOOD = b'{"question": "1 + 1", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (b'{"question": "1", "answer": ["2", "3"]}', 'answer is a list (["2", "3"]); give text, or an integer'),
        (b'{"question": "1", "answer": {"a": 1}}', 'answer is an object ({"a": 1}); give text'),
        (b'{"question": "1", "answer": null}', "answer is null (null); give text"),
        (b'{"question": "1", "answer": true}', "answer is true or false (true); give text"),
        (b'{"question": "1", "answer": 72.0}', "answer is a number with a fraction (72.0); give text"),
        (b'{"question": "1", "answer": NaN}', "answer is a number with a fraction (NaN); give text"),
        (b'{"question": "1"}', "it has no answer; give it one"),
        (b'{"answer": "1"}', "it has no question; give it one"),
        (b'{"question": 7, "answer": "1"}', "question is a number (7); give text"),
        (b'{"question": " \\n", "answer": "1"}', "question is empty; ask something"),
        (b'{"question": "1", "answer": " "}', "the answer is empty, and reward.kind"),
        (b'{"question": "1", "answer": "\\ud800"}', "answer holds half of a surrogate pair"),
        (b'{"question": "\\udc00", "answer": "1"}', "question holds half of a surrogate pair"),
        (b'{"question": "1", "answer": "2", "answer": "3"}', "a key is repeated (answer); keep one"),
        (b'{"question": "1", "answer": "2", "m": {"a": 1, "a": 2}}', "a key is repeated (a); keep one"),
        (b'["1", "2"]', "it is no JSON object"),
        (b'{"question": "1", "answer": "2"', "it is no JSON (Expecting"),
        (b'{"question": "a\x00b", "answer": "2"}', "it is no JSON (Invalid control character"),
        (
            b'{"question": "1", "answer": "2", "m": ' + b"[" * 101 + b"]" * 101 + b"}",
            "it is nested more than 100 levels",
        ),
        (b"[" * 100_000, "it is nested more than 100 levels"),
        (b'{"question": "1", "answer": ' + b"9" * 5000 + b"}", "it is no JSON (Exceeds the limit"),
    ],
)
def test_malformed_prompt_row_is_refused_with_its_line(row: bytes, sentence: str, tmp_path: Path) -> None:
    (file := tmp_path / "rows.jsonl").write_bytes(GOOD + b"\n" + row + b"\n" + GOOD)
    with pytest.raises(ConfigError) as refused:
        read_files(config_of(file), read_file)
    assert str(refused.value).startswith(f"prompts.path = {str(file)!r}: line 3: {sentence}")
    assert "\n" not in str(refused.value)


def test_malformed_prompt_rows_are_counted(tmp_path: Path) -> None:
    rows = [b'{"question": "1", "answer": [%d]}\n' % n for n in range(3)]
    (file := tmp_path / "rows.jsonl").write_bytes(GOOD + b"".join(rows) + b'{"question": "1", "answer": null}\n{}\n')
    with pytest.raises(ConfigError, match=r"line 2: answer is a list \(\[0\]\); .* \(3 such lines, 2 with other"):
        read_files(config_of(file), read_file)


@pytest.mark.parametrize(
    ("content", "answers"),
    [
        (b'{"question": "1", "answer": 7}\n{"question": "1", "answer": -12}', ["7", "-12"]),
        (b'\xef\xbb\xbf{"question": "1", "answer": "a\\u0000b"}\r\n\r\n' + GOOD, ["a\0b", "2"]),
        ('{"question": "1", "answer": "caf\u00e9\u2028\U0001f642"}'.encode(), ["caf\u00e9\u2028\U0001f642"]),
        (b'{"question": "1", "answer": "\\ud83d\\ude42"}', ["\U0001f642"]),
        (GOOD * 2, ["2", "2"]),  # a question that is asked twice
        (b'{"question": "[[[[", "answer": "' + b"[" * 500 + b'"}', ["[" * 500]),
    ],
)
def test_prompt_rows_that_can_be_scored_are_read(content: bytes, answers: list[str], tmp_path: Path) -> None:
    (file := tmp_path / "rows.jsonl").write_bytes(content)
    [rows] = read_files(config_of(file), read_file).values()
    assert [row.reference["answer"] for row in rows] == answers


def test_reference_answer_with_an_answer_tag_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "rows.jsonl").write_text('{"question": "1", "answer": "a</answer>b"}\n')
    read_files(config_of(file), read_file)
    with pytest.raises(ConfigError, match="line 1: the answer contains a tag"):
        read_files(config_of(file, {"kind": "exact", "answer": "tag"}), read_file)


def test_prompt_rows_without_a_data_set_name_are_refused(tmp_path: Path) -> None:
    """Without the name of a task family, the scorer would fail on every response, and every response would score 0."""
    (file := tmp_path / "rows.jsonl").write_bytes(GOOD)
    with pytest.raises(
        ConfigError, match=r"line 1: the question's family .* has no scorer .* set reward.kind = \"exact\""
    ):
        read_files(config_of(file, {"kind": "reasoning-gym"}), read_file)
    file.write_text('{"question": "1 + 1", "answer": "2", "family": "chain_sum", "metadata": {}}\n')
    read_files(config_of(file, {"kind": "reasoning-gym"}), read_file)


WORKED = [{"question": f"{n} + 1?", "answer": f"{n} and 1.\n#### {n + 1}"} for n in range(30)]


def test_answer_of_a_worked_solution_is_read_after_the_mark(tmp_path: Path) -> None:
    file = written(tmp_path, WORKED)
    with pytest.raises(ConfigError, match=r"every answer contains '####'.* set prompts\.answer_after"):
        read_files(config_of(file), read_file)
    config = config_of(file, answer_after="####")
    [rows] = read_files(config, read_file).values()
    assert [row.reference["answer"] for row in rows] == [str(n + 1) for n in range(30)]
    question = open_prompts(config, None, read_file).sources[0].training(0)
    assert question.reference["answer"] == question.answer == str(int(question.text.split()[0]) + 1)
    with pytest.raises(ConfigError, match=r"line 1: the answer does not contain '@@', .*30 such"):
        read_files(config_of(file, answer_after="@@"), read_file)


def written(folder: Path, rows: Sequence[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def sums(*long: int, count: int = 60) -> list[dict[str, Any]]:
    return [{"question": LONG + str(n) if n in long else f"What is {n} + 1?", "answer": n + 1} for n in range(count)]


def fitted(config: RunConfig, tokenizer: PolicyTokenizer) -> tuple[RunPrompts, list[str]]:
    read, notes = fit_files(config, read_files(config, read_file), tokenizer, read_file, lambda _: None)
    return open_prompts(config, tokenizer, read), notes


def test_too_long_prompts_are_refused_and_counted(tmp_path: Path, tokenizer: PolicyTokenizer) -> None:
    config = config_of(written(tmp_path, sums(40, 50)))
    with pytest.raises(ConfigError) as refused:
        fitted(config, tokenizer)
    assert "line 41: the prompt is too long (502 tokens, and the context leaves room for 112)" in str(refused.value)
    assert str(refused.value).endswith('or set prompts.too_long = "drop" (2 such lines)')


def test_too_long_prompts_are_dropped_on_request(tmp_path: Path, tokenizer: PolicyTokenizer) -> None:
    config = config_of(written(tmp_path, sums(40, 50)), too_long="drop")
    prompts, notes = fitted(config, tokenizer)
    assert notes == [f"prompts.path = {str(tmp_path / 'rows.jsonl')!r}: 2 of 60 lines are too long, and are dropped"]
    asked = {prompts.prompt(index).text for index in range(200)} | {prompt.text for prompt in prompts.held_out()}
    assert asked == {row["question"] for row in sums(40, 50) if len(row["question"]) < 100}


def test_prompt_length_includes_the_chat_template(tmp_path: Path) -> None:
    for name, data in build_cold_folder(ColdStart(context=128), ["What is 1 + 1?"] * 10).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "chat_template.jinja").write_text("z" * 110 + "{{ messages[-1]['content'] }}")
    (recipe := tmp_path / "data").mkdir()
    file = written(recipe, sums())
    fitted(config_of(file), PolicyTokenizer(tmp_path))
    with pytest.raises(ConfigError, match=r"line 1: the prompt is too long \(1\d\d tokens, .* \(60 such lines\)"):
        fitted(config_of(file, chat=True), PolicyTokenizer(tmp_path))


def test_file_of_only_too_long_prompts_is_refused(tmp_path: Path, tokenizer: PolicyTokenizer) -> None:
    config = config_of(written(tmp_path, sums(*range(30), count=30)), too_long="drop")
    with pytest.raises(ConfigError, match=r"line 1: the prompt is too long .* \(30 such lines\)"):
        fitted(config, tokenizer)


def test_error_names_reference_answers_that_nothing_matches(tmp_path: Path, tokenizer: PolicyTokenizer) -> None:
    """A response has at most 16 tokens."""
    rows = [*sums(), {"question": "Count.", "answer": "1 2 3 4 5 6 7 8 9 10"}]
    _, [note] = fitted(config_of(written(tmp_path, rows)), tokenizer)
    assert 'tokens can equal 1 of 61 answers (line 61: "1 2 3' in note
    with pytest.raises(ConfigError, match=r"can equal 2 of 2 answers \(line 1: .* raise engine.max_new_tokens"):
        fitted(config_of(written(tmp_path, rows[-1:] * 2)), tokenizer)


def test_too_long_prompt_during_a_run_is_replaced(tmp_path: Path, tokenizer: PolicyTokenizer) -> None:
    """An older run, whose file was not checked, continues: every process replaces the prompt by the same one."""
    config = config_of(written(tmp_path, sums(40)), held_out=0.0)
    opened = [open_prompts(config, tokenizer, read_file) for _ in range(2)]
    texts = [prompts.sources[0].training(index).text for prompts in opened[:1] for index in range(120)]
    [first, second] = [[prompts.prompt(index).text for index in range(120)] for prompts in opened]
    assert first == second
    places = [index for index, text in enumerate(texts) if len(text) > 100]
    assert len(places) == 2
    assert [index for index in range(120) if first[index] != texts[index]] == places
    assert all(len(text) < 100 for text in first)


@pytest.mark.parametrize("too_long", ["refuse", "drop"])
def test_too_long_generated_prompts_are_counted(too_long: str, tokenizer: PolicyTokenizer) -> None:
    options = {"min_terms": 2, "max_terms": 30, "min_digits": 1, "max_digits": 1}
    source = {"kind": "reasoning-gym", "family": "chain_sum", "options": options, "too_long": too_long}
    tree = {"prompts": [source], "engine": {"max_new_tokens": 48}, "policy": COLD, "evaluation": {"prompts": 64}}
    prompts = open_prompts(config := parse_config(tree), tokenizer, read_file)
    if too_long == "refuse":
        with pytest.raises(ConfigError, match=r"prompts\.0: \d+ of the first 320 prompts are too long"):
            probe_sources(config, prompts, tokenizer)
        return
    [note] = probe_sources(config, prompts, tokenizer)
    assert note.endswith("other prompts replace them")
    found = [prompts.prompt(index) for index in range(300)]
    assert max(len(prompt.tokens) for prompt in found) <= 80
    assert 0 < len(prompts.held_out()) < 64
    again = open_prompts(config, tokenizer, read_file)
    assert [again.prompt(index) for index in (299, 7, 30)] == [found[index] for index in (299, 7, 30)]


LAKE = {"kind": "gymnasium", "id": "FrozenLake-v1"}
TOOLS = {"kind": "tools", "python": {}}


@pytest.mark.parametrize(
    ("environment", "row", "is_right"),
    [
        (LAKE, {}, True),
        (TOOLS, {}, False),
        ({"kind": "mixed", "kinds": {"lake": LAKE, "tools": TOOLS}}, {"environment": "lake"}, True),
        ({"kind": "mixed", "kinds": {"lake": LAKE, "tools": TOOLS}}, {"environment": "tools"}, False),
    ],
)
def test_environment_with_own_reward_needs_no_answer(
    environment: dict[str, Any], row: dict[str, Any], is_right: bool, tokenizer: PolicyTokenizer
) -> None:
    source = {"kind": "seeds", "question": "{seed}:", "row": row}
    engine, policy = {"max_new_tokens": 16}, {"path": "somewhere"}
    tree = {"prompts": [source], "environment": environment, "engine": engine, "policy": policy}
    prompts = open_prompts(config := parse_config(tree), tokenizer, read_file)
    if is_right:
        assert probe_sources(config, prompts, tokenizer) == []
        return
    with pytest.raises(ConfigError, match="it has no answer"):
        probe_sources(config, prompts, tokenizer)
