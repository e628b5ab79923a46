"""Tests of environments of kind `trl`, in real worker processes."""

from __future__ import annotations

import pytest

from rollflow.storage.records import Outcome
from tests.environments.worlds import call, play, trl


def test_tools_and_reward_of_a_class_are_used() -> None:
    score, episode, environment = play(trl("Counter"), call("add", number=3), "Done.")
    assert score is not None
    assert (score.value, score.outcome) == (1.0, Outcome.CORRECT)
    assert episode.heard == ["\n<tool_response>3</tool_response>\n"]
    prompt = "".join(map(chr, episode.prompt.input.flat))
    assert prompt.startswith("Count.\nTools:\n")
    assert prompt.endswith(" Begin at 0.")
    assert '"number": {"type": "integer", "description": "the number to add"}' in prompt
    assert (environment.health.episodes, environment.health.resets, environment.health.steps) == (1, 1, 2)


def test_several_calls_of_a_response_run_in_order() -> None:
    said = call("add", number=1) + call("double") + call("add", number=1)
    score, episode, _ = play(trl("Counter"), said, "Done.")
    assert score is not None
    assert score.value == 1.0
    assert "".join(episode.heard).count("<tool_response>") == 3


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (call("fly"), "error: there is no tool 'fly'; the tools are add, double"),
        (call("get_reward"), "error: there is no tool 'get_reward'; the tools are add, double"),
        (call("_fail"), "error: there is no tool '_fail'; the tools are add, double"),
        (call("add", number=-1), "error: ValueError: the number is negative"),
        (call("add"), "error: TypeError"),
        (call("f" * 300), f"error: there is no tool '{'f' * 100}'; the tools are add, double"),
        ("<tool_call>{</tool_call>", "error: unparsable action: Expecting property name"),
        ("<tool_call>[]</tool_call>", "error: unparsable action: a tool call must be a JSON object with a name"),
        (
            '<tool_call>{"name": "add", "arguments": 1}</tool_call>',
            "error: unparsable action: the arguments of the tool call add",
        ),
        (call("add", number=3)[:-1], "error: unparsable action: a tool call does not end with </tool_call>"),
        (call("add", number=1) + "<tool_call>{</tool_call>", "error: unparsable action"),
    ],
)
def test_policy_reads_why_its_tool_call_failed(said: str, heard: str) -> None:
    score, episode, environment = play(trl("Counter"), said, call("add", number=3), "Done.")
    assert score is not None
    assert score.value == 1.0
    assert heard in episode.heard[0]
    assert environment.health.failures == 0


def test_run_scorer_scores_a_class_without_get_reward() -> None:
    score, episode, _ = play(trl("Judged"), call("look"), "42")
    assert score is not None
    assert score.reason == "judged"
    assert episode.asked[-1] == "judge"
    assert episode.heard == ["\n<tool_response>a room</tool_response>\n"]


def test_episode_ends_after_its_last_turn() -> None:
    score, episode, _ = play(trl("Counter", max_turns=3), call("add", number=1))
    assert score is not None
    assert score.value == 1.0  # the tool calls of the last turn are executed
    assert episode.asked.count("generate") == 3


def test_unwanted_episode_ends_without_a_score() -> None:
    score, episode, _ = play(trl("Counter"), call("add", number=1), turns=1)
    assert score is None
    assert episode.asked[-1] == "generate"


def test_options_and_known_columns_reach_the_class() -> None:
    _, episode, _ = play(trl("Counter", options={"start": 7}), "Done.")
    assert "".join(map(chr, episode.prompt.input.flat)).endswith(" Begin at 7.")


def test_module_that_starts_threads_is_imported_for_each_episode(caplog: pytest.LogCaptureFixture) -> None:
    score, _, _ = play(trl("Counter", module="threaded_worlds"), call("add", number=3), "Done.")
    assert score is not None
    assert score.value == 1.0
    assert "its import starts 1 threads, so each episode imports it again" in caplog.text


def test_policy_reads_an_error_for_deeply_nested_arguments() -> None:
    """At some depth, the arguments can still be parsed, but not be encoded for the request to the process."""
    nested = ["[" * depth + "]" * depth for depth in range(800, 1000)]
    said = [f'<tool_call>{{"name": "add", "arguments": {{"number": {one}}}}}</tool_call>' for one in nested]
    score, episode, environment = play(
        trl("Counter", max_turns=len(said) + 1), *said, "Done.", longest=10**6, turns=1000
    )
    assert score is not None
    assert score.value == 0.0
    assert len(episode.heard) == len(said)
    assert all("error: " in one for one in episode.heard)
    assert environment.health.failures == environment.health.crashes == 0
