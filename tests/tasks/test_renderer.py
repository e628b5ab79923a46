"""The renderer: messages that follow a response get the tokens that the chat template gives them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Prompt
from rollflow.tasks.policies.renderer import PolicyRenderer, describe_tools
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from tests.support.policy_folders import CHAT, END, OVER, make_tokenizer

QUESTION, TOOL = "1+1=", {"role": "tool", "content": "2"}
REFUSES_TOOLS = "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
ASKS = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('give one') }}{% endif %}"


def open_policy(folder: Path, template: str = CHAT) -> PolicyTokenizer:
    folder.mkdir()
    make_tokenizer(folder, template=template)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END, "max_position_embeddings": 64}))
    return PolicyTokenizer(folder, 0.0)


def prompt_in(tokenizer: PolicyTokenizer, domain: str) -> Prompt:
    tokens = tokenizer.encode(QUESTION, chat=domain == "chat")
    return Prompt("p", 0, domain, QUESTION, ModelInput.of(tokens))


@pytest.mark.parametrize("template", [CHAT, ASKS + CHAT])
@pytest.mark.parametrize("ends", [False, True])
def test_later_messages_are_rendered_by_the_chat_template(tmp_path: Path, template: str, *, ends: bool) -> None:
    """The oracle renders the whole conversation; only the end of the turn depends on how the response ended."""
    tokenizer = open_policy(tmp_path / "policy", template)
    renderer, system = PolicyRenderer(tokenizer, {"chat"}), "s" if template != CHAT else None
    prompt = Prompt("p", 0, "chat", QUESTION, ModelInput.of(tokenizer.encode(QUESTION, chat=True, system=system)))
    said = [*tokenizer.encode_response("1"), *([OVER] if ends else [])]
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "1"}, TOOL]
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    whole = tokenizer.template._apply(messages, tokenize=True)
    assert [*prompt.tokens, *said, *renderer.render(prompt, said, [TOOL])] == whole


def test_later_messages_of_plain_prompts_are_plain_text(tmp_path: Path) -> None:
    tokenizer = open_policy(tmp_path / "policy")
    found = PolicyRenderer(tokenizer, {"chat"}).render(prompt_in(tokenizer, "plain"), [5], [TOOL, TOOL])
    assert tokenizer.decode(found) == "22"


def test_response_is_parsed_without_its_stop_token(tmp_path: Path) -> None:
    tokenizer = open_policy(tmp_path / "policy")
    found = PolicyRenderer(tokenizer, ()).parse([*tokenizer.encode_response("12"), END])
    assert found == {"role": "assistant", "content": "12"}


def test_error_names_a_chat_template_that_refuses_a_role(tmp_path: Path) -> None:
    tokenizer = open_policy(tmp_path / "policy", REFUSES_TOOLS + CHAT)
    with pytest.raises(ConfigError, match=r"chat template fails \(no tools\)"):
        PolicyRenderer(tokenizer, {"chat"}).render(prompt_in(tokenizer, "chat"), [5], [TOOL])


TOOLS = [{"type": "function", "function": {"name": "11"}}]
NAMES_TOOLS = "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}"


def test_tools_are_listed_even_if_the_question_names_a_tool(tmp_path: Path) -> None:
    """The chat template ignores tools, and the question contains the name of the tool."""
    tokenizer = open_policy(tmp_path / "policy", CHAT)
    prompt = replace(prompt_in(tokenizer, "chat"), messages=({"role": "user", "content": "11=?"},))
    found = PolicyRenderer(tokenizer, {"chat"}).render_opening(prompt, TOOLS, "")
    listed = f"11=?{describe_tools(TOOLS)}"
    assert list(found) == tokenizer.template._apply([{"role": "user", "content": listed}], tokenize=True)


def test_chat_template_renders_tools_and_text_of_the_opening(tmp_path: Path) -> None:
    """The oracle applies the template to the messages, with the text at the end of the last one."""
    tokenizer = open_policy(tmp_path / "policy", NAMES_TOOLS + CHAT)
    prompt = replace(prompt_in(tokenizer, "chat"), messages=({"role": "user", "content": QUESTION},))
    found = PolicyRenderer(tokenizer, {"chat"}).render_opening(prompt, TOOLS, "=2")
    whole = tokenizer.template._apply([{"role": "user", "content": f"{QUESTION}=2"}], tokenize=True, tools=TOOLS)
    assert list(found) == whole
    assert tokenizer.decode(found).startswith("11")


@pytest.mark.parametrize("domain", ["chat", "plain"])
def test_opening_lists_tools_that_no_template_renders(tmp_path: Path, domain: str) -> None:
    tokenizer = open_policy(tmp_path / "policy")
    prompt = replace(prompt_in(tokenizer, domain), messages=({"role": "user", "content": QUESTION},))
    renderer = PolicyRenderer(tokenizer, {"chat"})
    found, listed = renderer.render_opening(prompt, TOOLS, "=2"), describe_tools(TOOLS) + "=2"
    if domain == "plain":
        assert list(found) == [*prompt.tokens, *tokenizer.encode_response(listed)]
    else:
        assert list(found) == list(tokenizer.encode(QUESTION + listed, chat=True))
