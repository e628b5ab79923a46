"""Tool calls in a response: JSON in tags is read, and a malformed call gives a fault message, never an exception."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.tasks.environments.tool_calls import (
    LONGEST_FAULT,
    MOST_CALLS,
    Action,
    ActionCall,
    parse_action,
    perform_calls,
)
from tests.support.waiting import HANG_SECONDS

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def test_tool_calls_after_the_thought_are_read_in_order() -> None:
    text = (
        '<think>\n<tool_call>{"name": "no"}</tool_call>\n</think>\n\nI look. <tool_call>\n{"name": "a", "arguments": '
        '{"x": 1}}\n</tool_call>\n<tool_call>{"name": "b"}</tool_call> Now.'
    )
    assert parse_action(text) == Action("I look. \n Now.", (ActionCall("a", {"x": 1}), ActionCall("b", {})))


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ('<tool_call>{"name": "a"}', "a tool call does not end with </tool_call>"),
        ("<tool_call>{</tool_call>", "Expecting property name"),
        ("<tool_call></tool_call>", "Expecting value"),
        ("<tool_call>[1]</tool_call>", "a tool call must be a JSON object with a name"),
        ('<tool_call>{"name": 1}</tool_call>', "a tool call must be a JSON object with a name"),
        (
            '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
            "the arguments of the tool call a must be a JSON object",
        ),
        (
            '<tool_call>{"name": "a", "arguments": "[1]"}</tool_call>',
            "the arguments of the tool call a must be a JSON object",
        ),
        ('<tool_call>{"name": "a", "arguments": "{"}</tool_call>', "Expecting property name"),
        ("<tool_call>NaN</tool_call>", "a tool call must be a JSON object with a name"),
        ("<tool_call>\ud800</tool_call>", "Expecting value"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "recursion"),
        ('<tool_call>{"name": "a", "arguments": {"x": ' + "1" * 5000 + "}}</tool_call>", "Exceeds the limit"),
    ],
)
def test_malformed_tool_call_gives_a_fault_and_no_calls(call: str, fault: str) -> None:
    action = parse_action(f'said <tool_call>{{"name": "good"}}</tool_call>{call}')
    assert (action.content, action.calls) == ("said", ())
    assert action.fault.startswith("unparsable action: ")
    assert fault in action.fault
    assert len(action.fault) <= LONGEST_FAULT


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=10), st.dictionaries(st.text(max_size=5), JSON, max_size=3))
def test_any_tool_call_in_json_is_read_back(name: str, arguments: dict[str, object]) -> None:
    call = json.dumps({"name": name, "arguments": arguments})
    assert parse_action(f"<tool_call>{call}</tool_call>").calls == (ActionCall(name, arguments),)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", '"a"', "</think>", "x"])))
def test_tool_calls_of_any_text_are_read_without_an_error(pieces: list[str]) -> None:
    action = parse_action("".join(pieces))
    assert not (action.calls and action.fault)


GOOD = '<tool_call>{"name": "a"}</tool_call>'


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        (f"<think>{GOOD}</think>{GOOD}", ["a"]),
        (f"<think>{GOOD}", []),
        (f"{GOOD}<think>{GOOD}", ["a"]),
        (f"<think>{GOOD}</think>{GOOD}<think>{GOOD}", ["a"]),
        ('<tool_call>{"name": "a", "arguments": "{}"}</tool_call>', ["a"]),
        (f"{GOOD} and {GOOD}", ["a", "a"]),
    ],
)
def test_only_tool_calls_outside_of_thoughts_count(text: str, names: list[str]) -> None:
    action = parse_action(text)
    assert ([one.name for one in action.calls], action.fault) == (names, "")
    assert all(one.arguments == {} for one in action.calls)


def test_tool_calls_without_end_are_read_in_linear_time() -> None:
    """A search from each of the beginnings would take hours, and block the event loop of all episodes."""
    code = "from rollflow.tasks.environments.tool_calls import parse_action; parse_action('<tool_call>' * 400_000)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS)


def test_tool_calls_beyond_the_limit_give_one_error() -> None:
    done = list[int]()

    async def perform(number: int, _: ActionCall) -> str:
        done.append(number)
        return f"did {number}"

    found = asyncio.run(perform_calls(parse_action(GOOD * (MOST_CALLS + 5)), perform))
    assert done == list(range(MOST_CALLS))
    assert found[:MOST_CALLS] == [f"did {number}" for number in done]
    assert found[MOST_CALLS:] == [f"error: there are {MOST_CALLS + 5} calls, and a turn has at most {MOST_CALLS}"]
