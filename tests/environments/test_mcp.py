"""Tests of the tools of MCP servers, in real processes. A broken server costs only its own episode."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.environments.config import ToolsEnvironment
from rollflow.tasks.environments.foreign.guest_process import list_marked
from rollflow.tasks.environments.tool_use.check import check_tools
from rollflow.tasks.environments.tool_use.config import PythonTool
from rollflow.tasks.scorers.base import Score
from tests.environments.test_drawn_policies import JSON
from tests.environments.tool_episodes import SANDBOX, Tools, run_code, speak_tools
from tests.environments.worlds import call
from tests.support.waiting import soon, until

SERVERS = Path(__file__).parent / "servers"
LONG = 120.0


def mcp(*arguments: str, module: str = "bare_server", **keys: Any) -> dict[str, Any]:
    """Return the section of an MCP server of the tests."""
    command, env = [sys.executable, "-m", module, *arguments], {"PYTHONPATH": str(SERVERS), **keys.pop("env", {})}
    return {"command": command, "env": env, "start_seconds": LONG, "seconds": LONG, **keys}


def serve(*arguments: str, **keys: Any) -> ToolsEnvironment:
    """Return the config of an environment with one MCP server as its only tool."""
    names = ("at_once", "max_failures", "result_characters")
    own = {name: keys.pop(name) for name in names if name in keys}
    return ToolsEnvironment.model_validate({"kind": "tools", "mcp": {"shop": mcp(*arguments, **keys)}, **own})


def find_marks(tools: Tools) -> list[str]:
    """Return the marks of the worker processes of an environment."""
    places = tools.environment._places
    pools = places._pools.values() if places else ()
    return [pool._guest.mark for pool in pools if pool._guest]


def list_left(tools: Tools) -> int:
    """Return the number of processes of an environment, without the keeper and the template of each server."""
    return sum(len(list_marked(mark)) - 2 for mark in find_marks(tools))


def play_once(config: ToolsEnvironment, *responses: str, **keys: Any) -> tuple[Score | None, Any, Tools]:
    """Play one episode, and check that no process outlives the episode or the environment."""
    tools = Tools(config)
    try:
        score, episode = tools.play(*responses, **keys)
        until(lambda: list_left(tools) <= 0)
    finally:
        marks = find_marks(tools)
        tools.close()
    assert [list_marked(mark) for mark in marks] == [[]] * len(marks)
    return score, episode, tools


@pytest.fixture(scope="module")
def shop() -> Iterator[Tools]:
    created = Tools(serve())
    yield created
    created.close()


# --- servers that work --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (call("echo", text='é\n"</tool_response>'), 'é\n"</tool_response>\n!'),
        (call("draw", text=""), "[image]"),
        (call("fail", text=""), "error: it failed"),
        (call("other"), "error: there is no tool 'other'; the tools are echo, count, draw, fail"),
        (call("echo", text="\ud800"), "error: the arguments of the tool call are not valid JSON"),
        (
            '<tool_call>{"name": "echo", "arguments": {"text": NaN}}</tool_call>',
            "error: the arguments of the tool call are not valid",
        ),
        (call("echo", text="y" * 300_000), "characters are left out"),
    ],
)
def test_policy_reads_the_result_of_its_tool_call(shop: Tools, said: str, heard: str) -> None:
    score, episode = shop.play(said, "Done.", longest=1_000_000)
    assert score is not None
    assert score.reason == "judged"
    assert heard in episode.heard[0]


def test_each_episode_has_a_server_of_its_own(shop: Tools) -> None:
    said = (call("count", text="") + call("count", text=""), "Done.")
    (_, one), (_, other) = shop.play(*said), shop.play(*said)
    for episode in (one, other):
        assert ["call 1," in episode.heard[0], "call 2," in episode.heard[0]] == [True, True]
    assert (shop.environment.health.failures, shop.environment.health.hangs) == (0, 0)


def test_server_gets_only_the_configured_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_SECRET_TOKEN", "secret")
    monkeypatch.setenv("SHOP_TOKEN", "given")
    config = serve(env={"SHOP": "open"}, pass_env=["SHOP_TOKEN"], folder=str(tmp_path))
    _, episode, _ = play_once(config, call("count", text=""), "Done.")
    assert "'SHOP', 'SHOP_TOKEN'" in episode.heard[0]
    assert "SECRET" not in episode.heard[0]
    assert str(tmp_path) in episode.heard[0]


def test_prefix_distinguishes_the_tools_of_two_servers() -> None:
    servers = {"one": mcp(prefix="one_"), "two": mcp(prefix="two_")}
    config = ToolsEnvironment.model_validate({"kind": "tools", "mcp": servers})
    said = call("one_count", text="") + call("two_count", text="") + call("one_count", text="")
    score, episode, _ = play_once(config, said, "Done.")
    assert score is not None
    assert score.reason == "judged"
    assert "".join(episode.heard).count("call 1,") == 2


def test_episode_with_two_tools_of_one_name_is_unjudged() -> None:
    config = ToolsEnvironment.model_validate({"kind": "tools", "mcp": {"one": mcp(), "two": mcp()}})
    score, _, tools = play_once(config, "Done.")
    assert score is not None
    assert score.outcome is Outcome.UNJUDGED
    assert "two tools have the name 'echo'; set environment.mcp.NAME.prefix of one server" in score.reason
    assert tools.environment.health.failures == 1


def test_policy_calls_python_and_mcp_tools_in_one_episode() -> None:
    config = serve().model_copy(update={"python": PythonTool(sandbox=SANDBOX, seconds=60.0)})
    score, episode, _ = play_once(config, run_code("6 * 7") + call("echo", text="said"), "Done.")
    assert score is not None
    if score.outcome is Outcome.UNJUDGED:
        pytest.skip(score.reason)
    assert "42" in episode.heard[0]
    assert "said\n!" in episode.heard[0]


def test_tool_calls_succeed_on_the_event_loop_of_ray_actors() -> None:
    """Ray runs asynchronous actors on uvloop, whose processes and sockets are not those of asyncio."""
    config = serve().model_copy(update={"python": PythonTool(sandbox=SANDBOX, seconds=60.0)})
    tools = Tools(config, pytest.importorskip("uvloop").new_event_loop)
    score, episode = tools.play(run_code("6 * 7") + call("echo", text="said"), "Done.")
    assert score is not None
    try:
        if score.outcome is Outcome.UNJUDGED:
            pytest.skip(score.reason)
        assert "42" in episode.heard[0]
        assert "said\n!" in episode.heard[0]
    finally:
        tools.close()


def test_server_that_runs_on_after_its_input_ends_is_killed() -> None:
    score, _, tools = play_once(serve("stays"), call("echo", text="x"), "Done.")
    assert score is not None
    assert score.reason == "judged"
    assert tools.environment.health.failures == 0


# --- servers that are broken --------------------------------------------------------------------------------

START, CALL = "initialize", "tools/call"


@pytest.mark.parametrize(
    ("wrong", "where", "outcome", "reason"),
    [
        ("hang", START, Outcome.UNJUDGED, "open took more than 4 s"),
        ("hang", "tools/list", Outcome.UNJUDGED, "open took more than 4 s"),
        ("stubborn", CALL, Outcome.TIMEOUT, "call took more than 0.5 s"),
        ("hang", CALL, Outcome.TIMEOUT, "call took more than 0.5 s"),
        ("exit", START, Outcome.UNJUDGED, "the server has ended, and said:"),
        ("exit", CALL, Outcome.KILLED, "the server has ended (its process exited with code 3 during call), and said: "),
        ("abort", CALL, Outcome.KILLED, "(its process was killed by SIGABRT during call)"),
        ("killed", CALL, Outcome.UNJUDGED, "(its process was killed by SIGKILL during call)"),
        ("garbage", START, Outcome.UNJUDGED, "has written a line that is not a JSON-RPC message: 'Welcome!'"),
        ("garbage", CALL, Outcome.KILLED, "has written a line that is not a JSON-RPC message: 'Welcome!'"),
        ("array", CALL, Outcome.KILLED, "has written a line that is not a JSON-RPC message: '[1, 2]'"),
        ("version 1", CALL, Outcome.KILLED, "has written a line that is not a JSON-RPC message"),
        ("endless", CALL, Outcome.KILLED, "has written a line of more than 16777216 bytes"),
        ("closed", CALL, Outcome.KILLED, "the server has closed its output"),
        ("no result", START, Outcome.UNJUDGED, "the server has answered a request without a result"),
        ("no result", CALL, Outcome.KILLED, "the server has answered a request without a result"),
        ("refused", "tools/list", Outcome.UNJUDGED, "not today"),
        ("pages", "none", Outcome.UNJUDGED, "the list of the MCP server's tools has more than 100 pages"),
        ("nameless", "none", Outcome.UNJUDGED, "the MCP server offers a tool without a name"),
    ],
)
def test_broken_server_ends_its_episode_with_a_reason(wrong: str, where: str, outcome: Outcome, reason: str) -> None:
    # `start_seconds` includes the import of the worker process, which takes long on a busy machine
    slow = {"seconds": 0.5} if where == CALL else {"start_seconds": 4.0}
    keys = slow if wrong in ("hang", "stubborn") else {}
    score, episode, tools = play_once(serve(wrong, where, **keys), call("echo", text="x"), "Done.")
    assert score is not None
    assert (score.value, score.outcome) == (0.0, outcome)
    assert "MCP server shop: " in score.reason
    health = tools.environment.health
    assert reason in score.reason or reason in health.last_failure
    assert health.failures == (outcome is Outcome.UNJUDGED)
    assert health.hangs == ("took more" in reason)
    assert episode.judged == []


def test_policy_reads_why_its_tool_call_was_refused() -> None:
    score, episode, _ = play_once(serve("refused", CALL), call("echo", text="x"), "Done.")
    assert score is not None
    assert score.reason == "judged"
    assert "error: not today" in episode.heard[0]


def test_broken_server_affects_no_other_episode() -> None:
    config = serve("exit", CALL)
    tools = Tools(config)

    async def run() -> tuple[list[Score | None], list[Score | None]]:
        bad = [speak_tools(config, call("echo", text="x"), "Done.") for _ in range(4)]
        good = [speak_tools(config, "Done.") for _ in range(4)]
        scores = await asyncio.gather(*(tools.environment.play(one) for one in (*bad, *good)))
        return scores[:4], scores[4:]

    bad, good = tools.do(run())
    assert {score.outcome for score in bad if score} == {Outcome.KILLED}
    assert {score.reason for score in good if score} == {"judged"}
    tools.close()


def test_cancelled_episode_ends_its_server() -> None:
    config = serve("stubborn", CALL)
    tools = Tools(config)

    async def cancel() -> None:
        playing = asyncio.ensure_future(tools.environment.play(speak_tools(config, call("echo", text="x"))))
        await soon(lambda: list_left(tools) >= 3)  # the worker process, the server, and the child that has detached
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert playing.cancelled()
        await soon(lambda: list_left(tools) <= 0)

    tools.do(cancel())
    tools.close()


def test_consecutive_server_failures_end_the_run() -> None:
    config = serve("exit", START, max_failures=2)
    tools = Tools(config)

    async def run() -> None:
        for _ in range(3):
            await tools.environment.play(speak_tools(config, "Done."))

    with pytest.raises(ConfigError, match=r'environment\.kind = "tools": 2 episodes in a row failed .*has ended'):
        tools.do(run())
    tools.close()


# --- check and config ---------------------------------------------------------------------------------------


def test_server_check_accepts_a_working_server() -> None:
    check_tools(serve())


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (serve("exit", START), r"mcp: MCP server shop: the server has ended, and said: .*the disk is full"),
        (serve("hang", START, start_seconds=4.0), r"open took more than 4 s; correct the server's section, or allow"),
        (serve(command=["/no/server"]), r"environment\.mcp\.shop\.command = '/no/server': there is no such program"),
        (serve(command=["no-such-server"]), r"command = 'no-such-server': there is no such program; install it"),
        (serve(folder="/no/folder"), r"environment\.mcp\.shop\.folder = '/no/folder': there is no such folder"),
        (serve(pass_env=["NO_SUCH_NAME"]), r"pass_env = 'NO_SUCH_NAME': there is no such environment variable; set it"),
        (serve(command=["/bin/false"]), r"the server has ended"),
        (serve(command=[os.fspath(SERVERS / "bare_server.py")]), r"there is no such program"),
    ],
)
def test_server_check_explains_a_refusal_in_one_sentence(config: ToolsEnvironment, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        check_tools(config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"command": []}, "at least 1 item"),
        ({"command": ["bin/server"]}, "environment.mcp.shop.command = 'bin/server': must be an absolute path, because"),
        ({"folder": "data"}, "environment.mcp.shop.folder = 'data': must be an absolute path, because"),
        ({"env": {"SHOP_TOKEN": "x"}}, r"environment.mcp.shop.env.SHOP_TOKEN = '\.\.\.': this secret would be stored"),
    ],
)
def test_invalid_server_config_is_refused_in_one_sentence(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        serve(**keys)


KEYS = st.fixed_dictionaries(
    {},
    optional={
        "prefix": st.text(st.characters(categories=["L"]), max_size=4),
        "at_once": st.integers(1, 3),
        "max_failures": st.integers(1, 3),
        "result_characters": st.integers(64, 300),
        "env": st.dictionaries(st.sampled_from(["A", "LANG"]), st.text(st.characters(categories=["L"]), max_size=4)),
        "start_seconds": st.floats(60.0, 90.0),
        "seconds": st.floats(60.0, 90.0),
    },
)
ARGUMENTS = st.dictionaries(st.sampled_from(["text", "more"]), JSON, max_size=2) | st.just({"text": "x"})


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(KEYS, st.lists(st.tuples(st.sampled_from(["echo", "fail", "other"]), ARGUMENTS), max_size=3), st.text())
def test_answer_is_judged_with_any_server_config_and_calls(
    keys: dict[str, Any], calls: list[tuple[str, dict[str, Any]]], answer: str
) -> None:
    said = [call(keys.get("prefix", "") + name, **given) for name, given in calls]
    score, episode, tools = play_once(serve(**keys), *said, answer.replace("<", ""))
    assert score is not None
    assert math.isfinite(score.value)
    assert score.outcome is not Outcome.UNJUDGED
    assert tools.environment.health.failures == tools.environment.health.hangs == 0
    assert episode.fault == ""
