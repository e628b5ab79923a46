"""Defines a tool that an episode offers to the policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollflow.tasks.scorers.base import make_storable

LEFT_OUT = "\n... {} characters are left out ...\n"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of one episode: its schema in the format that chat templates use, and a function that calls the tool.

    The function returns the text that the policy reads. The function raises `CallFailed` if the call failed and the
    policy reads the reason, and `WorldEnded` if the episode cannot continue.
    """

    schema: Mapping[str, Any]
    call: Callable[[Mapping[str, Any]], Awaitable[str]]

    @property
    def name(self) -> str:
        """The name by which the policy calls the tool."""
        return str(self.schema["function"]["name"])


def make_readable(text: str, most: int) -> str:
    """Return a tool's result as text that UTF-8 can encode, shortened to at most `most` characters."""
    return shorten_result(make_storable(text, len(text)), most)


def shorten_result(text: str, most: int) -> str:
    """Shorten a text to at most `most` characters: keep its beginning and its end."""
    if len(text) <= most:
        return text
    kept = most - len(LEFT_OUT.format(len(text)))
    return text[: kept - kept // 2] + LEFT_OUT.format(len(text) - kept) + text[len(text) - kept // 2 :]
