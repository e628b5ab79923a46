"""Tests of hostile programs in calls of the Python tool: none escapes, decides its own score, or outlives its episode.

Each program also runs directly in a sandbox of the same kind, and does not escape there either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.tasks.sandboxes.base import Program
from tests.environments.tool_episodes import SANDBOX, Tools, python_tool, run_code
from tests.sandboxes.programs import PROGRAMS
from tests.sandboxes.programs.base import Hostile
from tests.support.counts import examples
from tests.support.sandbox_processes import list_sandbox_processes
from tests.support.waiting import until

SECONDS = 2.0  # deadline of a call
HONEST = "import json, math, os\n(json.loads('[42]'), math.sqrt(4.0), sorted(os.environ.get('LEFT', '')))"


# Names of programs that print what a session allows its code. The code sees the processes and environment variables of
# the session, reads /dev/null, and has the two pipes of the session open. The code can write to the pipe with which the
# session reports the end of a call.
ALLOWED = (
    *("other processes", "writing to stdin", "environment of the box", "answers for the owner"),
    "open files of the box",
)
HOSTILE = [hostile for hostile in PROGRAMS if hostile.name not in ALLOWED]


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    created = Tools(python_tool(seconds=SECONDS))
    try:
        created.do(created.get_sandboxes())
    except ConfigError as error:
        created.close()
        pytest.skip(str(error))
    yield created
    created.close()


@pytest.mark.many
@pytest.mark.parametrize("hostile", HOSTILE[:: len(HOSTILE) // examples(len(HOSTILE))], ids=lambda one: one.name)
def test_hostile_tool_call_neither_escapes_nor_avoids_a_score(tools: Tools, hostile: Hostile) -> None:
    if hostile.machine not in ("", os.uname().machine):
        pytest.skip("other system calls")
    before = len(list_sandbox_processes())
    said = [run_code(hostile.source), run_code("1"), "I give up."]  # the second call may find its session broken
    score, episode = tools.play(*said)
    assert score is not None
    assert (score.reason, episode.judged) == ("judged", ["I give up."])  # no program avoids its score
    heard = "".join(episode.heard)
    assert "ESCAPED" not in heard, heard
    assert "SyntaxError: unterminated" not in heard
    _, honest = tools.play(run_code(HONEST), "Done.")
    assert "([42], 2.0, [])" in honest.heard[0], honest.heard
    until(lambda: len(list_sandbox_processes()) <= before)
    directly = tools.do(run_directly(tools, hostile))
    assert b"ESCAPED" not in directly


OPEN_FILES = """
import os, stat, sys
opened = []
for fd in range(3, 256):
    try: opened.append((str(fd), stat.S_ISFIFO(os.fstat(fd).st_mode)))
    except OSError: pass
sorted(opened) == sorted((fd, True) for fd in sys.orig_argv[-2:])
"""


def test_session_has_only_its_own_two_pipes_open(tools: Tools) -> None:
    """The arguments of the session's process are the descriptors of its two pipes: for orders and for exit codes."""
    _, episode = tools.play(run_code(OPEN_FILES), "I give up.")
    assert "True" in episode.heard[0], episode.heard


FORGE = """
import os
for number in range(9):
    for fd in range(3, 40):
        try: os.write(fd, f"{number} 0\\n".encode() * 9)
        except OSError: pass
print("late"); import time; time.sleep(1); print("later")
"""


def test_forged_end_of_a_program_changes_no_score(tools: Tools) -> None:
    score, episode = tools.play(run_code(FORGE), run_code("6 * 7"), run_code("6 * 7"), "I give up.")
    assert score is not None
    assert (score.reason, episode.judged) == ("judged", ["I give up."])
    _, honest = tools.play(run_code(HONEST), "Done.")
    assert "([42], 2.0, [])" in honest.heard[0]


async def run_directly(tools: Tools, hostile: Hostile) -> bytes:
    """Run a program in a sandbox without the environment, and return what it wrote."""
    sandboxes = await tools.get_sandboxes()
    found = await sandboxes.run(Program(code=hostile.source, timeout=SECONDS))
    assert len(found.stdout) <= SANDBOX.output_bytes
    return found.stdout + found.stderr
