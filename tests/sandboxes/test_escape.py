"""Tests that hostile programs reach nothing outside the sandbox, end in time, leave nothing behind, and change no later
program.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Any

import pytest

from rollflow.tasks.sandboxes.base import ExecResult, Program, Sandbox
from tests.sandboxes.box import CONFIG, KINDS, LONG, PYTHON, Box
from tests.sandboxes.programs import PROGRAMS
from tests.sandboxes.programs.base import Hostile
from tests.support.sandbox_processes import list_sandbox_processes

GRACE = 4.0  # seconds that a program may take beyond its deadline, on a machine that is slow and busy
PROBE = (
    "import builtins, json, math, os, random\n"
    "print(sum(name.isdigit() for name in os.listdir('/proc')), json.dumps([int('42'), math.sqrt(4.0)]), "
    "random.random() == 0.8444218515250481, os.environ.get('LEFT'))"
)
PROBED = b"2 [42, 2.0] True None\n"


def count_processes() -> int:
    """Count the processes that this process started, directly or not."""
    return len(list_sandbox_processes())


async def wait_for_processes(most: int) -> None:
    """Wait until at most `most` processes of sandboxes are left."""
    async with asyncio.timeout(LONG):
        while count_processes() > most:
            await asyncio.sleep(0.02)


async def run_hostile(sandbox: Sandbox, hostile: Hostile, cold: bool) -> ExecResult:
    """Run a hostile program as Python source in a forked interpreter or, if `cold`, as a command."""
    if not cold:
        return await sandbox.exec(Program(code=hostile.source, timeout=hostile.seconds))
    await sandbox.upload("main.py", hostile.source.encode())
    return await sandbox.exec(Program(command=[PYTHON, "main.py"], timeout=hostile.seconds + 0.3))


async def attack(box: Box, hostile: Hostile, cold: bool) -> None:
    """Run a hostile program, then honest programs in the same sandbox and in a new one, and check that nothing is left
    behind.
    """
    before = count_processes()
    sandbox = await box.sandboxes.create()
    found = await run_hostile(sandbox, hostile, cold)
    assert b"ESCAPED" not in found.stdout + found.stderr, found
    assert b"SyntaxError: unterminated" not in found.stderr
    assert found.seconds < hostile.seconds + GRACE
    assert len(found.stdout) <= CONFIG.output_bytes
    assert len(found.stderr) <= CONFIG.output_bytes
    assert (await sandbox.exec(Program(code=PROBE, timeout=LONG))).stdout == PROBED
    await sandbox.close()
    assert (await box.sandboxes.run(Program(code=PROBE, timeout=LONG))).stdout == PROBED
    await wait_for_processes(before)


def list_cases(kinds: Iterable[str], programs: Iterable[Hostile]) -> list[Any]:
    """Return a test's cases; programs whose system calls this machine does not have are skipped."""
    return [
        pytest.param(
            kind,
            hostile,
            id=f"{kind}, {hostile.name}",
            marks=[pytest.mark.skipif(hostile.machine not in ("", os.uname().machine), reason="other system calls")],
        )
        for kind in kinds
        for hostile in programs
    ]


VARYING = [one for one in PROGRAMS if one.varies]


@pytest.mark.parametrize(
    ("box", "hostile"), [*list_cases(KINDS[:1], PROGRAMS), *list_cases(KINDS[1:], VARYING)], indirect=["box"]
)
def test_hostile_program_in_a_reused_sandbox_does_no_harm(box: Box, hostile: Hostile) -> None:
    box.do(attack(box, hostile, cold=False))


@pytest.mark.parametrize(("box", "hostile"), list_cases(KINDS[:1], VARYING), indirect=["box"])
def test_hostile_command_does_no_harm(box: Box, hostile: Hostile) -> None:
    box.do(attack(box, hostile, cold=True))
