"""Prompts that are lists of chat messages, and system messages of single rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollflow.flows.config import parse_config
from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.base import Question, QuestionSource
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import open_prompts
from rollflow.tasks.run.prompt_check import fit_files, read_files
from rollflow.tasks.run.user_code import check_own_parts

TEMPLATE = "{% for one in messages %}[{{ one.role }}]{{ one.content }}{% endfor %}[assistant]"
NO_SYSTEM = TEMPLATE.replace("%}[", "%}{{ raise_exception('no system') if one.role == 'system' }}[", 1)
LEFT_OUT = "{% for one in messages if one.role != 'system' %}[{{ one.role }}]{{ one.content }}{% endfor %}[assistant]"


def tokenizer_of(folder: Path, template: str = TEMPLATE) -> PolicyTokenizer:
    folder.mkdir(exist_ok=True)
    for name, data in build_cold_folder(ColdStart(context=256), ["What is 1 + 1?"] * 10).items():
        (folder / name).write_bytes(data)
    (folder / "chat_template.jinja").write_text(template)
    return PolicyTokenizer(folder)


def say(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in said]


def config_of(folder: Path, rows: list[dict[str, Any]], **keys: Any) -> RunConfig:
    (path := folder / "mine.jsonl").write_text("".join(json.dumps({"answer": "2"} | row) + "\n" for row in rows))
    source = {"kind": "file", "path": str(path), "held_out": 0.0, "chat": True, **keys}
    tree = {"prompts": [source], "engine": {"max_new_tokens": 16}, "policy": {"cold_start": {"context": 256}}}
    return parse_config(tree | {"reward": {"kind": "exact"}})


def ask(folder: Path, rows: list[dict[str, Any]], template: str = TEMPLATE, **keys: Any) -> tuple[RunPrompts, set[str]]:
    """Return a file's prompts, and what the policy reads of each row."""
    config, tokenizer = config_of(folder, rows, **keys), tokenizer_of(folder / "policy", template)
    read, _ = fit_files(config, read_files(config, read_file), tokenizer, read_file, lambda _: None)
    prompts = open_prompts(config, tokenizer, read)
    return prompts, {tokenizer.decode(prompts.prompt(index).tokens) for index in range(len(rows))}


TALK = say(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "1 + 1?"))


def test_prompt_contains_all_messages_of_a_question(tmp_path: Path) -> None:
    prompts, read = ask(tmp_path, [{"question": TALK}])
    assert read == {"[system]Be brief.[user]Hi[assistant]Hello[user]1 + 1?[assistant]"}
    assert prompts.prompt(0).text == "user: Hi\nassistant: Hello\nuser: 1 + 1?"


def test_prompt_row_may_have_its_own_system_message(tmp_path: Path) -> None:
    """The recipe's system message is put before the rows without a system message."""
    rows = [{"question": "1 + 1?", "sys": "Think."}, {"question": "0 + 2?", "sys": None}, {"question": TALK, "sys": ""}]
    _, read = ask(tmp_path, rows, columns={"system": "sys"}, system="Answer.")
    assert read == {
        "[system]Think.[user]1 + 1?[assistant]",
        "[system]Answer.[user]0 + 2?[assistant]",
        "[system]Be brief.[user]Hi[assistant]Hello[user]1 + 1?[assistant]",
    }


def test_single_message_is_the_same_question_as_its_text(tmp_path: Path) -> None:
    """A question that is held out as text is not trained on as a message, whatever the system message is."""
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)]
    talk = [row | {"question": say(("system", "Think."), ("user", str(row["question"])))} for row in rows]
    text = config_of(tmp_path, rows, held_out=0.5).prompts[0]
    (folder := tmp_path / "talk").mkdir()
    both = config_of(folder, talk).model_copy(update={"prompts": (text, config_of(folder, talk).prompts[0])})
    prompts = open_prompts(both, tokenizer_of(tmp_path / "policy"), read_file)
    held = {prompt.text for prompt in prompts.held_out()}
    assert len(held) == 10
    assert not held & {prompts.prompt(index).text for index in range(200)}


def test_null_keys_of_a_table_are_ignored(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "1 + 1?", "name": None}]
    pq.write_table(pa.Table.from_pylist([{"question": talk, "answer": "2"}]), tmp_path / "mine.parquet")
    source = {"kind": "file", "path": str(tmp_path / "mine.parquet"), "chat": True, "held_out": 0.0}
    [row] = read_files(parse_config({"prompts": [source], "reward": {"kind": "exact"}}), read_file).popitem()[1]
    assert row.question == tuple(say(("user", "1 + 1?")))


WRONG: list[tuple[Any, str]] = [
    ([], "the list of messages is empty"),
    (["Hi"], "message 1 is of the type str; give an object with role and content"),
    ([{"role": "user"}], "message 1 has no text as its content"),
    ([{"role": "user", "content": ["Hi"]}], "message 1 has no text as its content"),
    ([{"role": None, "content": "Hi"}], "message 1 has no text as its role"),
    (say(("human", "Hi")), "message 1 has the role 'human'; give one of system, user, assistant"),
    (say(("user", "Hi"), ("system", "Think."), ("user", "Hi")), "message 2 is a system message; put it first"),
    (say(("user", "Hi"), ("assistant", "2")), "the last message is that of the role 'assistant'"),
    (say(("system", "Think.")), "the last message is that of the role 'system'"),
    (say(("user", " ")), "the messages of the user are empty; ask something"),
    (say(("user", "\ud800")), "message 1 has half of a surrogate pair in its content"),
    ([{"role": "user", "content": "Hi", "image": "a.png"}], "message 1 has the key 'image', which is not used"),
]


@pytest.mark.parametrize(("messages", "words"), WRONG)
def test_malformed_messages_are_refused_with_their_row(messages: Any, words: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"talk": TALK}, {"talk": messages}], columns={"question": "talk"})
    with pytest.raises(ConfigError) as refused:
        read_files(config, read_file)
    start = f"prompts.path = {str(tmp_path / 'mine.jsonl')!r}: line 2: column 'talk': {words}"
    assert str(refused.value).startswith(start)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("row", "keys", "words"),
    [
        ({"question": TALK}, {"chat": False}, "question is a list of messages, which the chat template writes; set"),
        ({"question": "1", "sys": 7}, {"columns": {"system": "sys"}}, "column 'sys' is of the type int; give text"),
        ({"question": TALK, "sys": "Think."}, {"columns": {"system": "sys"}}, "column 'sys' and the first message are"),
    ],
)
def test_malformed_system_messages_are_refused(row: Any, keys: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"line 1: {words}"):
        read_files(config_of(tmp_path, [row], **keys), read_file)


def test_column_of_system_messages_needs_chat_true(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompts\.columns\.system = 'sys': .* without chat = true; set chat = true"):
        config_of(tmp_path, [{"question": "1"}], chat=False, columns={"system": "sys"})


@pytest.mark.parametrize(("template", "words"), [(NO_SYSTEM, "refuses a system"), (LEFT_OUT, "leaves the system")])
def test_template_without_system_messages_is_refused(template: str, words: str, tmp_path: Path) -> None:
    rows = [{"question": "Hello"}, {"question": TALK}]
    with pytest.raises(ConfigError, match=f"line 2: .*the policy's chat template {words}"):
        ask(tmp_path, rows, template)
    assert ask(tmp_path, rows[:1], template)[1] == {"[user]Hello[assistant]"}


class Talks(QuestionSource):
    """A user-defined source of messages, with the roles that the option names."""

    def __init__(self, *, seed: int, held_out: int, role: str) -> None:
        self._role = role

    def training(self, position: int) -> Question:
        return Question(f"t{position}", "1", {}, messages=say((self._role, f"t{position}")))

    def demonstration(self, position: int) -> Question:
        return self.training(position)

    def held_out(self, count: int) -> list[Question]:
        return [Question(f"h{n}", "1", {}, messages=say((self._role, f"h{n}"))) for n in range(count)]


@pytest.mark.parametrize(
    ("role", "chat", "words"),
    [
        ("user", True, None),
        ("user", False, "has messages, which the chat template writes; set prompts.chat = true"),
        ("human", True, "has wrong messages: message 1 has the role 'human'"),
    ],
)
def test_messages_of_a_user_defined_source_are_checked(
    role: str, chat: bool, words: str | None, tmp_path: Path
) -> None:
    source = {"kind": "import", "path": f"{__name__}:Talks", "options": {"role": role}, "chat": chat}
    config = parse_config({"prompts": [source], "evaluation": {"prompts": 5}, "engine": {"max_new_tokens": 16}})
    if words is None:
        check_own_parts(config)
        tokenizer = tokenizer_of(tmp_path)
        assert tokenizer.decode(open_prompts(config, tokenizer, read_file).prompt(3).tokens) == "[user]t3[assistant]"
    else:
        with pytest.raises(ConfigError, match=words):
            check_own_parts(config)
