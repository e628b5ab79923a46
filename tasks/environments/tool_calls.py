"""Reads the tool calls in a response: JSON objects in <tool_call> tags, as Qwen and Hermes models write them.

I look it up. <tool_call>{"name": "search", "arguments": {"query": "snow"}}</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
# A call without an end tag reaches to the end of the text, because the search would otherwise take quadratic time.
CALL = re.compile(f"{BEGIN}(.*?)(?:{END}|\\Z)", re.DOTALL)
MOST_CALLS = 16  # largest number of calls in one turn
RESULT_FRAME = "\n<tool_response>{}</tool_response>\n"  # text around a result, for a policy without chat template
LONGEST_NAME = 100  # largest number of characters of a wrong tool name in an error message
LONGEST_FAULT = 200  # largest number of characters of a fault's description


@dataclass(frozen=True, slots=True)
class ActionCall:
    """A call of one tool, with keyword arguments."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """The policy's action in a turn: its text without thoughts and calls, and its tool calls in order.

    For a malformed call, `fault` is the reason, and `calls` is empty.
    """

    content: str
    calls: tuple[ActionCall, ...] = ()
    fault: str = ""


def parse_action(text: str) -> Action:
    """Read the tool calls in the text of a response. Calls within a thought are ignored, even if the thought has no end
    tag.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    content = CALL.sub("", text).strip()
    try:
        calls = tuple(_parse_call(found[0], found[1]) for found in CALL.finditer(text))
    except (ValueError, RecursionError) as error:
        return Action(content, fault=f"unparsable action: {error}"[:LONGEST_FAULT])
    return Action(content, calls)


def _parse_call(whole: str, inner: str) -> ActionCall:
    if not whole.endswith(END):
        raise ValueError(f"a tool call does not end with {END}")
    call = json.loads(inner)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a tool call must be a JSON object with a name")
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):  # some models write the arguments as a string of JSON
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of the tool call {call['name']} must be a JSON object")
    return ActionCall(call["name"], arguments)


async def perform_calls(action: Action, perform: Callable[[int, ActionCall], Awaitable[str]]) -> list[str]:
    """Execute the tool calls of a turn in order, and return the texts that the policy reads.

    `perform` gets a call and its position in the turn, and returns the result of the call.
    """
    if action.fault:
        return [f"error: {action.fault}"]
    results = [await perform(number, call) for number, call in enumerate(action.calls[:MOST_CALLS])]
    if len(action.calls) > MOST_CALLS:
        results.append(f"error: there are {len(action.calls)} calls, and a turn has at most {MOST_CALLS}")
    return results
