"""Tests of the environment `tools` with its Python tool, in real sandboxes."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.environments.config import ToolsEnvironment
from rollflow.tasks.environments.tool_use.offered import shorten_result
from rollflow.tasks.environments.tool_use.places import ToolPlaces
from rollflow.tasks.sandboxes.base import Capability, SandboxFailed, SandboxLost
from rollflow.tasks.scorers.base import Score
from tests.environments.tool_episodes import Tools, python_tool, run_code, speak_tools
from tests.environments.worlds import call
from tests.support.sandbox_processes import list_boxes, list_sandbox_processes
from tests.support.waiting import soon


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    """Start an environment with the Python tool; skip the tests if this machine has no sandboxes."""
    created = Tools(python_tool())
    score, _ = created.play(run_code("1"), "Done.")
    if score is not None and score.outcome is Outcome.UNJUDGED:
        created.close()
        pytest.skip(score.reason)
    yield created
    created.close()


async def wait_for_processes(most: int) -> None:
    """Wait until no more processes of sandboxes than these are left."""
    await soon(lambda: len(list_sandbox_processes()) <= most)


def test_python_keeps_its_variables_and_the_answer_is_judged(tools: Tools) -> None:
    before = len(list_sandbox_processes())
    score, episode = tools.play(run_code("x = 6"), run_code("print('so')\nx * 7"), "It is 42.")
    assert score is not None
    assert score.reason == "judged"
    assert episode.judged == ["It is 42."]
    assert episode.heard == ["\n<tool_response></tool_response>\n", "\n<tool_response>so\n42\n</tool_response>\n"]
    prompt = "".join(map(chr, episode.prompt.input.flat))
    assert prompt.startswith("Count.\nTools:\n")
    assert '"name": "python"' in prompt
    tools.do(wait_for_processes(before))


def test_episodes_share_neither_variables_nor_files(tools: Tools) -> None:
    tools.play(run_code("x = 5; open('left', 'w').write('x')"), "Done.")
    _, episode = tools.play(run_code("import os\n'x' in globals(), os.listdir()"), "Done.")
    assert "(False, [])" in episode.heard[0]


def test_episode_without_a_call_needs_no_sandbox() -> None:
    created = Tools(python_tool())
    before = len(list_boxes())
    score, _ = created.play("It is 42.")
    assert score is not None
    assert score.reason == "judged"
    assert len(list_boxes()) == before
    created.close()


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (run_code("1 / 0"), "ZeroDivisionError: division by zero"),
        (run_code("raise SystemExit(3)"), "<tool_response></tool_response>"),
        (run_code("x = ("), "SyntaxError"),
        (run_code("x = '\ud800'"), "<tool_response>"),
        (run_code("\0"), "null bytes"),
        (call("python", code=1), 'error: the tool python takes exactly one argument, "code", which is text'),
        (call("python", code="1", other=2), 'error: the tool python takes exactly one argument, "code", which is text'),
        (call("python"), 'error: the tool python takes exactly one argument, "code", which is text'),
        (call("search"), "error: there is no tool 'search'; the tools are python"),
        (call("\ud800" * 500), "error: there is no tool"),
        ("<tool_call>{</tool_call>", "error: unparsable action"),
        (run_code("1") + "<tool_call>", "error: unparsable action"),
        (run_code("x = 1") * 20, "error: there are 20 calls, and a turn has at most 16"),
        (run_code("print('y' * 9000)"), "characters are left out ...\n"),
    ],
)
def test_policy_reads_the_outcome_of_its_python_call(tools: Tools, said: str, heard: str) -> None:
    score, episode = tools.play(said, "Done.")
    assert score is not None
    assert score.reason == "judged"
    assert heard in episode.heard[0]
    assert len(episode.heard[0]) < 8100


@pytest.mark.parametrize(
    ("code", "heard"),
    [
        ("import time; time.sleep(600)", "error: the code took more than 1 s, and was stopped"),
        ("while True: print('y' * 1000)", "error: the code printed too much, and was stopped"),
        ("import os, signal; os.kill(os.getpid(), 9)", "error: all variables are lost, because"),
        ("import os; os.kill(-1, 9)", "error: all variables are lost, because"),
        (
            "import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass",
            "was stopped\nerror: all variables are lost, because the session did not stop, and was killed",
        ),
    ],
)
def test_session_runs_code_after_a_stopped_call(code: str, heard: str) -> None:
    created = Tools(python_tool(seconds=1.0))
    try:
        score, episode = created.play(run_code(code), run_code("6 * 7"), "Done.")
        assert score is not None
        assert score.reason == "judged"
        assert heard in episode.heard[0]
        assert "42" in episode.heard[1]
    finally:
        created.close()


def test_cancelled_episode_leaves_no_process(tools: Tools) -> None:
    before = len(list_sandbox_processes())

    async def cancel() -> None:
        code = "import os\nfor _ in range(3): os.fork()\nimport time; time.sleep(600)"
        playing = asyncio.ensure_future(tools.environment.play(speak_tools(tools.config, run_code(code))))
        await soon(lambda: len(list_sandbox_processes()) >= before + 8)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert playing.cancelled()
        await wait_for_processes(before)

    tools.do(cancel())


def test_detached_child_process_ends_with_its_episode(tools: Tools) -> None:
    before = len(list_sandbox_processes())
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)"
    )
    score, _ = tools.play(run_code(code), "Done.")
    assert score is not None
    assert score.reason == "judged"
    tools.do(wait_for_processes(before))


def test_no_more_episodes_than_at_once_use_a_sandbox() -> None:
    config = python_tool(at_once=2)
    created, most = Tools(config), 0

    async def watch(places: ToolPlaces) -> None:
        nonlocal most
        while True:
            most = max(most, config.at_once - places._places._value)
            await asyncio.sleep(0)

    async def run() -> list[Score | None]:
        watching = asyncio.ensure_future(watch(created.environment._find_places()))
        episodes = [speak_tools(config, run_code("1"), "Done.") for _ in range(8)]
        scores = await asyncio.gather(*map(created.environment.play, episodes))
        watching.cancel()
        return scores

    try:
        assert {score.reason for score in created.do(run()) if score} == {"judged"}
        assert most == 2
    finally:
        created.close()


# --- failures that the policy cannot have caused ------------------------------------------------------------


def test_episode_of_a_killed_sandbox_is_unjudged() -> None:
    created = Tools(python_tool(max_failures=2))
    others = {one.pid for one in list_boxes()}

    async def run() -> tuple[Score | None, Score | None]:
        playing = asyncio.ensure_future(
            created.environment.play(speak_tools(created.config, run_code("import time; time.sleep(600)")))
        )
        [box] = await soon(lambda: [one for one in list_boxes() if one.pid not in others])
        await soon(lambda: len(box.children(recursive=True)) > 3)
        os.kill(box.pid, signal.SIGKILL)
        lost = await playing
        return lost, await created.environment.play(speak_tools(created.config, run_code("6 * 7"), "Done."))

    try:
        lost, after = created.do(run())
        assert lost is not None
        assert lost.outcome is Outcome.UNJUDGED
        assert "the sandbox of the tool python failed" in lost.reason
        assert after is not None
        assert after.reason == "judged"
        assert (created.environment.health.failures, created.environment.health.failures_in_a_row) == (1, 0)
    finally:
        created.close()


class FailingSandboxes:
    """Sandboxes that fail with an error, of a kind with or without isolation."""

    def __init__(self, error: Exception, *, isolated: bool) -> None:
        self._error = error
        self.capabilities = frozenset({Capability.ISOLATION} if isolated else ())

    async def open_workspace(self) -> Any:
        raise self._error

    async def close(self) -> None:
        """Do nothing, because nothing is open."""


@pytest.mark.parametrize(
    ("error", "isolated", "outcome"),
    [
        (SandboxFailed("no room"), True, Outcome.UNJUDGED),
        (SandboxLost("gone"), True, Outcome.UNJUDGED),
        (SandboxLost("gone"), False, Outcome.KILLED),
        (OSError(24, "too many open files"), False, Outcome.UNJUDGED),
        (ConfigError("no bwrap"), True, Outcome.UNJUDGED),
    ],
)
def test_episode_is_unjudged_unless_unisolated_sandbox_is_lost(
    error: Exception, isolated: bool, outcome: Outcome
) -> None:
    created = Tools(python_tool())

    async def run() -> Score | None:
        places = created.environment._find_places()

        async def start() -> Any:
            return FailingSandboxes(error, isolated=isolated)

        places._sandboxes._make = start
        return await created.environment.play(speak_tools(created.config, run_code("1"), "Done."))

    score = created.do(run())
    assert score is not None
    assert (score.value, score.outcome) == (0.0, outcome)
    assert str(error) in score.reason
    created.close()


def test_sandboxes_that_never_start_end_the_run() -> None:
    created = Tools(python_tool(max_failures=3))

    async def run() -> None:
        async def start() -> Any:
            raise ConfigError("sandbox.kind: no bwrap")

        created.environment._find_places()._sandboxes._make = start
        for _ in range(4):
            await created.environment.play(speak_tools(created.config, run_code("1")))

    with pytest.raises(ConfigError, match=r'environment.kind = "tools": 3 episodes in a row failed .* no bwrap'):
        created.do(run())
    created.close()


# --- config -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, "environment.kind = 'tools': the policy has no tool; add the section"),
        (
            {"python": {"sandbox": {"kind": "run-code", "url": "http://a/run_code"}}},
            "environment.python.sandbox.kind = 'run-code': a server of this kind has no sessions",
        ),
    ],
)
def test_config_without_a_usable_tool_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        ToolsEnvironment.model_validate({"kind": "tools", **keys})


def test_empty_python_section_takes_all_defaults() -> None:
    config = ToolsEnvironment.model_validate({"kind": "tools", "python": {}})
    assert config.python is not None
    assert (config.python.sandbox.kind, config.python.seconds) == ("bubblewrap", 10.0)


@given(st.text(), st.integers(64, 400))
def test_shortened_result_keeps_both_ends(text: str, most: int) -> None:
    text = text * 40
    found = shorten_result(text, most)
    if len(text) <= most:
        assert found == text
    else:
        assert len(found) <= most
        assert (found[0], found[-1]) == (text[0], text[-1])


CODE = st.sampled_from(
    [
        "x = 1",
        "x",
        "print('a' * 500)",
        "1 / 0",
        "import os; os._exit(3)",
        "raise KeyboardInterrupt",
        "input()",
        "\0",
        "(",
    ]
)
SAID = st.text(max_size=30) | CODE.map(run_code) | st.text(max_size=10).map(run_code) | st.just("<tool_call>")
KEYS = st.fixed_dictionaries(
    {},
    optional={
        "result_characters": st.integers(64, 300),
        "at_once": st.integers(1, 3),
        "max_failures": st.integers(1, 3),
        "seconds": st.floats(20.0, 60.0),
    },
)


def test_any_policy_gets_a_finite_score_and_is_judged() -> None:
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(KEYS, st.lists(SAID, min_size=1, max_size=4), st.integers(100, 2000))
    def play(keys: dict[str, Any], responses: list[str], longest: int) -> None:
        created = Tools(python_tool(**keys))
        episode = speak_tools(created.config, *responses, longest=longest, turns=6)
        try:
            score = created.do(created.environment.play(episode))
        finally:
            created.close()
        assert episode.fault == ""
        if score is None:
            assert episode.asked[-1] == "generate"
            return
        assert math.isfinite(score.value)
        assert score.outcome is not Outcome.UNJUDGED
        shown = "".join(episode.heard)
        assert len(shown) <= (keys.get("result_characters", 8000) + 60) * 17 * 6

    play()


def test_unwanted_episode_ends_without_a_score(tools: Tools) -> None:
    score, episode = tools.play(run_code("1"), turns=1)
    assert score is None
    assert episode.asked[-1] == "generate"
