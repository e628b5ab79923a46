"""Checks prompts that are lists of chat messages, and describes such a prompt as text.

A prompt of chat messages needs `prompts.chat = true`, because only a chat template can render messages. Only the first
message may have the role "system", and the last message has the role "user".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollflow.tasks.prompts.base import Asked, Message
from rollflow.tasks.prompts.config import FilePrompts
from rollflow.tasks.prompts.section import PLACE, PromptBase

ROLES = ("system", "user", "assistant")


def find_messages_fault(messages: Sequence[Any]) -> str | None:
    """Return what is wrong with a list of chat messages, or None."""
    if not messages:
        return "the list of messages is empty; give at least one message of the user"
    for number, message in enumerate(messages, 1):
        if wrong := _find_message_fault(message, number == 1):
            return f"message {number} {wrong}"
    if (last := messages[-1]["role"]) != "user":
        return f"the last message is that of the role {last!r}; let the list end with a message of the user"
    if all(message["role"] == "system" or not message["content"].strip() for message in messages):
        return "the messages of the user are empty; ask something"
    return None


def _find_message_fault(message: object, first: bool) -> str | None:
    if not isinstance(message, Mapping):
        return f"is of the type {type(message).__name__}; give an object with role and content"
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            return f"has no text as its {key}; give an object with role and content"
        if not _is_utf8(message[key]):
            return f"has half of a surrogate pair in its {key}, which is not text; remove it"
    if message["role"] not in ROLES:
        return f"has the role {message['role']!r}; give one of {', '.join(ROLES)}"
    if message["role"] == "system" and not first:
        return "is a system message; put it first"
    # In a table, every message has all keys, with null for a missing value.
    if more := [
        key for key, value in message.items() if key not in ("role", "content") and value not in (None, "", [])
    ]:
        return f"has the key {more[0]!r}, which is not used; remove it"
    return None


def find_question_fault(config: FilePrompts, row: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the chat messages or the system message of a row, or None."""
    asked, system = row["question"], _get_system(config, row)
    if not isinstance(system, str | None):
        return f"{config.label('system')} is of the type {type(system).__name__}; give text or null"
    if system and not _is_utf8(system):
        return f"{config.label('system')} holds half of a surrogate pair, which is not text; remove it"
    if not isinstance(asked, list):
        return None
    if not config.chat:
        return (
            f"{config.label('question')} is a list of messages, which the chat template writes; set prompts.chat = true"
        )
    if wrong := find_messages_fault(asked):
        return f"{config.label('question')}: {wrong}"
    if system and asked[0]["role"] == "system":
        return f"{config.label('system')} and the first message are both system messages; give one of them"
    return None


def apply_template(config: PromptBase, asked: Asked) -> Asked:
    """Put a question into the prompt template of its source; for chat messages, use the last message."""
    if config.template is None:
        return asked
    if isinstance(asked, str):
        return config.template.replace(PLACE, asked)
    last = {**asked[-1], "content": config.template.replace(PLACE, asked[-1]["content"])}
    return [*asked[:-1], last]


def read_asked(config: FilePrompts, row: Mapping[str, Any]) -> Asked:
    """Return the question of a row: a text, or a list of chat messages if the row has messages or a system message."""
    asked, system = row["question"], _get_system(config, row)
    if isinstance(asked, str) and not system:
        return asked
    messages = asked if isinstance(asked, list) else [{"role": "user", "content": str(asked)}]
    before: list[Message] = [{"role": "system", "content": system}] if system else []
    return (*before, *({"role": str(one["role"]), "content": str(one["content"])} for one in messages))


def list_messages(asked: Asked, system: str | None) -> list[Message]:
    """Return the chat messages of a question, after the source's system message unless the question has its own."""
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    before = [{"role": "system", "content": system}] if system and messages[0]["role"] != "system" else []
    return [*before, *messages]


def describe_asked(asked: Asked) -> str:
    """Return a question as text, for its key and for people to read. A single user message is returned as its
    content.

    System messages are left out, so questions that differ only in them count as the same question.
    """
    if isinstance(asked, str):
        return asked
    said = [message for message in asked if message["role"] != "system"]
    return said[0]["content"] if len(said) == 1 else "\n".join(f"{one['role']}: {one['content']}" for one in said)


def _get_system(config: FilePrompts, row: Mapping[str, Any]) -> Any:
    return row.get("system") if "system" in config.columns else None


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)
