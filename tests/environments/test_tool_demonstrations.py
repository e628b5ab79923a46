"""Tests that demonstrations of tasks with tools have the same tokens as episodes, in the same turns and contexts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.flows.config import load_recipe, parse_config
from rollflow.flows.preflight import read_policy_files
from rollflow.storage.errors import ConfigError
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Prompt
from rollflow.tasks.environments.ports import EnvironmentPorts
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.demonstrations import Demonstration
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.policies.renderer import PolicyRenderer
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.base import DemonstratedTurn, Question
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.cold_start.demonstrated_episodes import DemonstratedEpisodes
from rollflow.tasks.run.context import open_prompts
from rollflow.tasks.run.episode_ports import build_ports
from tests.environments.tool_episodes import Tools, open_tools, play_real, python_tool, run_code
from tests.support import policy_folders

RECIPE = Path(__file__).parents[2] / "flows" / "recipes" / "python_tool.toml"
QUESTION, DOMAIN, END = "What is 6*7?", "sorting", "<|end|>"
CHAT = policy_folders.CHAT.replace("<|over|>", END)
WRITES_TOOLS = "{% if tools %}<|turn|>system\n{{ tools | tojson }}<|end|>\n{% endif %}" + CHAT
TEMPLATES: Mapping[str, str | None] = {
    "plain text": None,
    "ignores tools": CHAT,
    "writes tools": WRITES_TOOLS,
    # thoughts of earlier answers are removed, so each turn begins a branch
    "removes thoughts": WRITES_TOOLS.replace(
        "{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
    ),
}
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=120)
THOUGHT = st.sampled_from(["", "<think>\nHm.\n</think>\n\n"])
TURNS = st.lists(st.tuples(THOUGHT, st.lists(TEXT, min_size=1, max_size=2)), max_size=3)


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    created = open_tools(result_characters=80)
    yield created
    created.close()


def open_policy(folder: Path, template: str | None, context: int = 100_000) -> PolicyTokenizer:
    folder.mkdir()
    cold = ColdStart(context=context, chat_template=template)
    for name, data in build_cold_folder(cold, [QUESTION, run_code("print()")]).items():
        (folder / name).write_bytes(data)
    return PolicyTokenizer(folder, 0.0)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, PolicyTokenizer]:
    folder = tmp_path_factory.mktemp("policies")
    return {name: open_policy(folder / name.replace(" ", "-"), template) for name, template in TEMPLATES.items()}


def encoder_of(config: Any, tokenizer: PolicyTokenizer) -> DemonstratedEpisodes:
    sources = [{"kind": DOMAIN, "chat": tokenizer.has_template}]
    tree = {"prompts": sources, "environment": config.model_dump(mode="json"), "engine": {"kind": "timed"}}
    return DemonstratedEpisodes(parse_config(tree), tokenizer)


def build_prompt(tokenizer: PolicyTokenizer) -> Prompt:
    messages = ({"role": "user", "content": QUESTION},)
    asked: Any = list(messages) if tokenizer.has_template else QUESTION
    tokens = tokenizer.encode(asked, chat=tokenizer.has_template)
    return Prompt("p", 0, DOMAIN, QUESTION, ModelInput.of(tokens), {}, messages=messages)


def print_text(text: str) -> str:
    return run_code(f"print({text!r}, end='')")


def list_tokens(shown: Sequence[Demonstration]) -> list[tuple[list[int], list[bool]]]:
    return [([*one.prompt, *one.response], [*[False] * len(one.prompt), *one.sampled]) for one in shown]


@settings(max_examples=40)
@given(turns=TURNS, name=st.sampled_from([*TEMPLATES]), answer=TEXT)
def test_demonstration_has_the_tokens_of_its_episode(
    tools: Tools, tokenizers: Mapping[str, PolicyTokenizer], turns: list[Any], name: str, answer: str
) -> None:
    """The episode runs the code of the demonstration in a sandbox."""
    tokenizer = tokenizers[name]
    prompt = build_prompt(tokenizer)
    if not tokenizer.has_template:  # the first call ends the turn
        turns = [(thought, texts[:1]) for thought, texts in turns]
    said = [thought + "".join(map(print_text, texts)) for thought, texts in turns]
    results = [tuple({"role": "tool", "content": text} for text in texts) for _, texts in turns]
    shown = [DemonstratedTurn(*one, ends=True) for one in zip(said, results, strict=True)]
    question = Question(QUESTION, answer, {}, turns=(*shown, DemonstratedTurn(answer, ends=True)))
    ports = EnvironmentPorts(tokenizer, PolicyRenderer(tokenizer, {DOMAIN} if tokenizer.has_template else set()))
    responses = [f"{one}{END}" if tokenizer.has_template else one for one in said]
    _, played, _ = play_real(tools, ports, *responses, f"{answer}{END}", prompt=prompt)
    found = list_tokens(encoder_of(tools.config, tokenizer)(prompt, question))
    assert found == [([*one.tokens], [*one.loss_mask]) for one in played]
    sampled = [token for tokens, mask in found for token, mine in zip(tokens, mask, strict=True) if mine]
    assert tokenizer.decode(sampled) == "".join([*responses, f"{answer}{END}"])
    assert len(found) == (1 if name != "removes thoughts" else 1 + sum(bool(thought) for thought, _ in turns))


def test_most_episodes_is_the_at_once_of_the_config() -> None:
    assert python_tool(at_once=3).most_episodes == 3


def test_answer_without_turns_is_demonstrated_with_the_tools(tokenizers: Mapping[str, PolicyTokenizer]) -> None:
    tokenizer = tokenizers["writes tools"]
    [one] = encoder_of(python_tool(), tokenizer)(build_prompt(tokenizer), Question(QUESTION, "42", {}))
    assert tokenizer.decode(one.prompt).count('"name": "python"') == 1
    assert tokenizer.decode(one.response) == f"42{END}"
    assert all(one.sampled)


def test_demonstration_with_turns_after_the_answer_is_refused(tokenizers: Mapping[str, PolicyTokenizer]) -> None:
    tokenizer = tokenizers["writes tools"]
    turns = (DemonstratedTurn("It is 42.", ends=True), DemonstratedTurn("42", ends=True))
    question = Question(QUESTION, "42", {}, turns=turns)
    with pytest.raises(ConfigError, match=r"'What is 6\*7\?' ends after 1 of 2 turns; let only the last turn answer"):
        encoder_of(python_tool(), tokenizer)(build_prompt(tokenizer), question)


@pytest.mark.parametrize("context", [60, 500])
def test_demonstration_longer_than_the_context_is_refused(tmp_path: Path, context: int) -> None:
    """With 60 tokens, there is no room for the tools; with 500, there is none for the answer."""
    tokenizer = open_policy(tmp_path / "policy", WRITES_TOOLS, context)
    with pytest.raises(ConfigError, match=r"ends after 0 of 1 turns.*raise policy\.cold_start\.context"):
        encoder_of(python_tool(), tokenizer)(build_prompt(tokenizer), Question(QUESTION, "4" * 400, {}))


def test_recipe_demonstrates_the_episodes_of_its_policy(tools: Tools, tmp_path: Path) -> None:
    """A demonstrated call has few tokens, because the tokenizer has tokens for its constant parts."""
    config = load_recipe(RECIPE)
    for name, data in read_policy_files(config, read_file).items():
        (tmp_path / name).write_bytes(data)
    tokenizer = PolicyTokenizer(tmp_path, 0.0)
    prompts, encode = open_prompts(config, tokenizer, read_file), DemonstratedEpisodes(config, tokenizer)
    ports = build_ports(config, tokenizer)
    for position in range(3):
        prompt, question = prompts.find_demonstration(0, position)
        responses = [f"{turn.said}{END}" for turn in question.turns]
        _, [one], _ = play_real(tools, ports, *responses, prompt=prompt, longest=config.engine.max_new_tokens)
        assert list_tokens(encode(prompt, question)) == [([*one.tokens], [*one.loss_mask])]
        assert tokenizer.decode(one.tokens).startswith(f"python(code):{question.text}=<tool_call>")
        assert config.environment.replaces_prompts  # so the audit does not look for the prompt without the tools
        assert len(tokenizer.encode_response(question.turns[0].said)) == 2 + len(question.text)
