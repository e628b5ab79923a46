"""Reads the tool calls in a response of the policy, and writes results for policies without chat template.

A call is a JSON object in tags, as Qwen and Hermes write it:

    <tool_call>{"name": "guess", "arguments": {"word": "crane"}}</tool_call>

A call within a thought (`<think> ... </think>`) does not count.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
# a call without its end reaches to the end of the text, because a search from each beginning would take quadratic time
CALL = re.compile(f"{BEGIN}(.*?)(?:({END})|\\Z)", re.DOTALL)
MOST_CALLS = 16  # largest number of calls in one turn
LONGEST_NAME = 100


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. If the call cannot be read, `fault` says why."""

    name: str
    arguments: Any = None
    fault: str = ""


def parse_calls(text: str) -> list[ToolCall]:
    """Return the tool calls in a response, in order."""
    _before, _, said = text.rpartition("</think>")
    if "<think>" in said:
        return []
    found = [_parse_call(body) for body, end in CALL.findall(said) if end]
    if len(found) > MOST_CALLS:
        fault = f"there are {len(found)} calls, and a turn has at most {MOST_CALLS}"
        return [*found[:MOST_CALLS], ToolCall(found[MOST_CALLS].name, fault=fault)]
    return found


def _parse_call(body: str) -> ToolCall:
    try:
        call = json.loads(body)
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):
            call["arguments"] = json.loads(call["arguments"])
    except (ValueError, RecursionError) as error:
        return ToolCall("", fault=f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", fault='the call is not an object with "name" and "arguments"')
    return ToolCall(call["name"][:LONGEST_NAME], call.get("arguments", {}))


def describe_result(text: str) -> str:
    """Return the text in which a policy without chat template reads the result of a tool."""
    return f"\n<tool_response>{text}</tool_response>\n"
