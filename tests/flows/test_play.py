"""Tests `rollflow play`: a person in a real terminal and the other players play episodes of a recipe."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.cli.exit_codes import INTERRUPTED
from rollflow.flows.commands.play.players import cut_at_stop, generate_text
from rollflow.flows.commands.play.transcript import NotedRenderer, Transcript
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Prompt, StopReason
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.renderer import PolicyRenderer
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.rollout.episode import Turn
from tests.support.judge_server import Body, JudgeServer, Reply, chat, judge_server
from tests.support.refused import refused
from tests.support.small_run import prepare_small, train_small
from tests.support.terminal import CTRL_D, terminal
from tests.support.user_code import FOLDER, put_in_reach

TOOL = """
name = "letters"
groups = 2
group_size = 2
[policy.cold_start]
hidden_size = 32
[[prompts]]
kind = "import"
path = "letters.prompts:LetterCounts"
name = "letters"
options = { alphabet = "abc", length = 6 }
[reward]
kind = "import"
path = "letters.rewards:near"
options = { width = 2 }
[environment]
kind = "import"
path = "letters.environments:AskTool"
tools.count = { path = "letters.tools:count" }
[engine]
kind = "transformers"
max_new_tokens = 48
[evaluation]
prompts = 4
"""
SORTING = Path("flows/recipes/sorting.toml").absolute()


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a recipe with a tool, whose parts can be imported."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(".dev").absolute()), str(Path.cwd())]))
    put_in_reach(monkeypatch, FOLDER)
    (tmp_path / "letters.toml").write_text(TOOL)
    return tmp_path / "letters.toml"


def test_person_plays_two_turns_and_is_scored(recipe: Path) -> None:
    with terminal("play", str(recipe), "--episodes", "1") as person:
        shown = person.await_text("  > ")
        found = re.search(r"prompt\n  How many (\w) in (\w+)\?", shown)
        assert found, shown
        assert "you · turn 1 · up to 16 tokens · ends at '>'" in shown
        person.type(f"<{found[1]}:{found[2]}>\n")
        shown = person.await_text("  > ")
        number = str(found[2].count(found[1]))
        assert f"tool\n  ={number}, so" in shown, shown
        assert "you · turn 2" in shown
        person.type(f"{number}\n")
        assert person.end() == 0
        rest = person.shown[person.read :]
        assert "score 1 · correct\n  right\n" in rest
        assert "1 episode · mean score 1 · 1 correct" in rest


def test_ctrl_d_ends_play_and_prints_the_mean_score(recipe: Path) -> None:
    with terminal("play", str(recipe)) as person:
        person.await_text("  > ")
        person.type("x\n")
        person.await_text("not a number")
        person.await_text("episode 2")
        person.await_text("  > ")
        person.type(CTRL_D)
        assert person.end() == 0
        assert "1 episode · mean score 0 · 1 wrong" in person.shown[person.read :]
        assert "Traceback" not in person.shown


def test_ctrl_c_ends_play_without_a_traceback(recipe: Path) -> None:
    with terminal("play", str(recipe)) as person:
        person.await_text("  > ")
        person.type("x\n")
        person.await_text("episode 2")
        person.await_text("  > ")
        person.type("half an answer")
        person.await_text("half an answer")  # the line editor works now, and a signal interrupts it
        person.interrupt()
        assert person.end() == INTERRUPTED
        rest = person.shown[person.read :]
        assert "1 episode · mean score 0 · 1 wrong" in rest
        assert "rollflow: stopped" in rest
        assert "Traceback" not in person.shown


def test_person_answers_the_question_of_a_single_turn(tmp_path: Path) -> None:
    with terminal("play", str(SORTING), "--held-out", env={"ROLLFLOW_HOME": str(tmp_path)}) as person:
        shown = person.await_text("  > ")
        digits = re.findall(r"\d", shown.partition("prompt\n")[2].partition("you ·")[0])
        assert len(digits) == 5, shown
        person.type(f"{''.join(sorted(digits))}\n")
        person.await_text("score 1 · correct")
        person.await_text("  > ")
        person.type("12345678\n")
        person.await_text("(the answer was cut after 6 tokens)")
        person.await_text("  > ")
        person.type(CTRL_D)
        assert person.end() == 0


def test_random_policy_with_equal_seed_plays_equal_episodes(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for seed in ("1", "1", "2"):
        assert main(["play", str(recipe), "--random", "--episodes", "2", "--seed", seed]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]
    assert shown[0].count("random policy · turn 1") == 2
    assert "2 episodes · mean score" in shown[0]


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    """Serve a model that first calls the tool, and then answers with the number that the tool has said."""

    def behave(number: int, body: Body) -> Reply:
        last = body["messages"][-1]["content"]
        if found := re.search(r"How many (\w) in (\w+)\?", last):
            return chat(f"<{found[1]}:{found[2]}> and more")
        return chat("".join(re.findall(r"\d", last)))

    with judge_server(behave) as running:
        yield running


def test_endpoint_receives_the_conversation_of_all_turns(
    recipe: Path, server: JudgeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "very-secret")
    arguments = ["play", str(recipe), "--endpoint", server.url, "--model", "tiny", "--token-env", "MY_KEY"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "score 1 · correct" in out
    assert "tiny · turn 2" in out
    assert "very-secret" not in out
    first, second = server.bodies
    assert (first["model"], first["max_completion_tokens"]) == ("tiny", 16)
    assert [one["role"] for one in second["messages"]] == ["user", "assistant", "user"]
    assert re.fullmatch(r"<\w:\w+>", second["messages"][1]["content"]), "the answer ends at its stop string"
    assert {one["authorization"] for one in server.headers} == {"Bearer very-secret"}


def test_invalid_endpoint_options_get_a_one_sentence_error(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play = ("play", str(recipe), "--endpoint")
    assert "add --model" in refused(capsys, *play, "http://127.0.0.1:1/v1")
    assert "not the address" in refused(capsys, *play, "nowhere", "--model", "m")
    assert "MISSING" in refused(capsys, *play, "http://127.0.0.1:1/v1", "--model", "m", "--token-env", "MISSING")
    assert "--model has an effect only with --endpoint" in refused(capsys, "play", str(recipe), "--model", "m")
    capsys.readouterr()
    assert main([*play, "http://127.0.0.1:1/v1", "--model", "m"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_error_or_empty_answer_of_an_endpoint_is_reported(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with judge_server(lambda number, body: Reply("no such model", 404)) as server:
        assert "status 404 (no such model)" in refused(
            capsys, "play", str(recipe), "--endpoint", server.url, "--model", "m"
        )
    with judge_server(lambda number, body: Reply("{}")) as server:
        assert main(["play", str(recipe), "--endpoint", server.url, "--model", "m"]) == 1
        assert "answered without a message" in capsys.readouterr().err


def test_play_command_uses_the_newest_or_a_chosen_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    train_small(prepare_small(tmp_path, versions=2))
    recipe = tmp_path / "sorting.toml"
    recipe.write_text(SORTING.read_text().replace('"vllm"', '"transformers"'))
    for options, name in (((), "version 2 of run small"), (("--version", "1"), "version 1 of run small")):
        assert main(["play", str(recipe), "--run", "small", *options]) == 0
        assert f"{name} · turn 1 · " in capsys.readouterr().out
    assert "version 9 is not published" in refused(capsys, "play", str(recipe), "--run", "small", "--version", "9")


# --- what is said, and what is answered ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    folder = tmp_path_factory.mktemp("policy")
    for name, data in build_cold_folder(ColdStart(hidden_size=32), ["How many a in abc? 1"] * 10).items():
        (folder / name).write_bytes(data)
    return PolicyTokenizer(folder)


def start(tokenizer: PolicyTokenizer, text: str = "How many?") -> tuple[Prompt, Transcript]:
    prompt = Prompt("one", 0, "letters", text, ModelInput.of(tokenizer.encode_response(text)))
    return prompt, Transcript(prompt, tokenizer, NotedRenderer(PolicyRenderer(tokenizer, ())))


@given(text=st.text(max_size=30), stop=st.lists(st.text(min_size=1, max_size=3), max_size=2), most=st.integers(1, 12))
def test_typed_answer_obeys_the_limits_of_its_turn(
    tokenizer: PolicyTokenizer, text: str, stop: list[str], most: int
) -> None:
    text = text.encode("utf-8", "replace").decode()
    stop = [one.encode("utf-8", "replace").decode() for one in stop]
    found = generate_text(text, Turn(0, ModelInput.of(()), most, tuple(stop)), tokenizer).generation
    cut, stopped = cut_at_stop(text, stop)
    assert 0 < len(found.tokens) <= most or (stopped and len(found.tokens) <= most)
    said = tokenizer.decode_response(found.tokens)
    assert cut.startswith(said.rstrip("\ufffd")) or "<|" in text
    assert stopped is any(one in text for one in stop)
    if found.ending is StopReason.STOP and "<|" not in text:
        assert said == cut


@given(parts=st.lists(st.tuples(st.booleans(), st.text("abc ?", min_size=1, max_size=6)), max_size=6))
def test_conversation_contains_the_whole_text_of_an_episode(
    tokenizer: PolicyTokenizer, parts: list[tuple[bool, str]]
) -> None:
    prompt, conversation = start(tokenizer)
    context = prompt.input.flat
    for own, text in parts:
        tokens = Int32s.of(tokenizer.encode_response(text))
        if own:
            conversation.read_context(context)
            conversation.note_answer(tokens)
        context = context + tokens
        conversation.read_context(context)
        assert not conversation.is_rewritten
    said = "".join(message["content"] for message in conversation.messages[1:])
    assert said == "".join(text for _, text in parts)


def test_changed_part_of_a_rewritten_context_is_shown(tokenizer: PolicyTokenizer) -> None:
    prompt, conversation = start(tokenizer)
    conversation.read_context(prompt.input.flat)
    conversation.note_answer(Int32s.of(tokenizer.encode_response("a long thought")))
    [said] = conversation.read_context(prompt.input.flat + Int32s.of(tokenizer.encode_response("a summary")))
    assert (conversation.is_rewritten, said["content"]) == (True, "a summary")
    assert [one["content"] for one in conversation.messages] == ["How many?", "a summary"]


def test_context_with_a_replaced_prompt_is_shown_whole(tokenizer: PolicyTokenizer) -> None:
    _, conversation = start(tokenizer)
    [said] = conversation.read_context(Int32s.of(tokenizer.encode_response("my card")))
    assert (conversation.is_rewritten, said["content"]) == (True, "my card")
    assert [one["content"] for one in conversation.messages] == ["my card"]


def test_rendered_messages_keep_their_roles(tokenizer: PolicyTokenizer) -> None:
    prompt, conversation = start(tokenizer)
    messages = [{"role": "tool", "content": "3"}, {"role": "user", "content": "so?"}]
    tokens = conversation.renderer.render(prompt, (), messages)
    assert list(conversation.read_context(prompt.input.flat + Int32s.of(tokens))) == messages


def test_person_input_raises_the_error_of_the_game() -> None:
    from rollflow.flows.commands.play.person_input import PersonInput

    person = PersonInput(lambda marks: f"{marks}hello")

    async def fail() -> None:
        assert await person.read_line("> ") == "> hello"
        await asyncio.sleep(0)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        person.run(fail)
