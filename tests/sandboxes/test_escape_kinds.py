"""Tests that hostile programs do no harm in the other kinds of sandbox: on both servers with their clients, and in
sandlock.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from rollflow.tasks.sandboxes.base import Program, ProgramEnd, Sandboxes
from tests.sandboxes.box import LONG
from tests.sandboxes.programs import PROGRAMS
from tests.sandboxes.programs.memory import MEMORY
from tests.sandboxes.test_escape import GRACE, wait_for_processes
from tests.support.counts import examples
from tests.support.sandbox_kinds import SMALL, start_kind
from tests.support.sandbox_processes import list_sandbox_processes

NOTE = 200  # largest number of bytes that a server adds to the output to say why it killed a program
KNOWN = [one for one in PROGRAMS if one.machine in ("", os.uname().machine)]
# Attacks that succeed in a kind of sandbox (docs/sandboxes.md). In a rock sandbox, a program sees the guest, which is
# the process that runs commands. sandlock has files of its own instead of the host's lists of users, lets a process
# call itself root without any right, measures memory at intervals, and does not count deleted files that are open,
# unmapped memory of a device, or timers.
ALLOWED = {
    "run-code": (),
    "rock": ("other processes", "writing to stdin"),
    "sandlock": (
        "passwords",
        "user ids",
        "many timers",
        "unmapped memory of a device",
        "deleted files",
    ),
}


def list_cases() -> Iterator[Any]:
    """List each kind of sandbox with its hostile programs; `make test` runs a twentieth of the programs."""
    for kind, allowed in ALLOWED.items():
        hostile = [one for one in KNOWN if one.name not in allowed]
        yield pytest.param(kind, hostile[:: len(hostile) // examples(len(hostile))], id=kind)


@pytest.fixture
async def sandboxes(request: pytest.FixtureRequest) -> AsyncIterator[Sandboxes]:
    async with start_kind(request.param) as started:
        yield started


@pytest.mark.many
@pytest.mark.parametrize(("sandboxes", "programs"), list_cases(), indirect=["sandboxes"])
async def test_hostile_programs_do_no_harm_in_any_kind_of_sandbox(sandboxes: Sandboxes, programs: list[Any]) -> None:
    """Several hostile programs run at the same time. After each of them, an honest program runs in the same kind of
    sandbox.
    """
    await sandboxes.run(Program(code="print(1)", timeout=LONG))
    before, turns = len(list_sandbox_processes()), asyncio.Semaphore(3)

    async def attack(hostile: Any) -> str:
        async with turns:
            found = await sandboxes.run(Program(code=hostile.source, timeout=hostile.seconds))
            honest = await sandboxes.run(Program(code="print(6 * 7)", timeout=LONG))
        # Memory is measured at intervals, so a program may exceed its memory limit for a short time before it is
        # killed.
        late_kill = hostile in MEMORY and found.return_code == -9 and found.end is not ProgramEnd.TIMEOUT
        harm = {
            "it escaped": b"ESCAPED" in found.stdout + found.stderr and not late_kill,
            "it was late": found.seconds > hostile.seconds + GRACE,
            "it printed too much": max(len(found.stdout), len(found.stderr)) > SMALL["output_bytes"] + NOTE,
            "it changed an honest program": honest.stdout != b"42\n",
        }
        return f"{hostile.name}: {[what for what, done in harm.items() if done]}, {found}" if any(harm.values()) else ""

    harms = await asyncio.gather(*(attack(hostile) for hostile in programs))
    assert [harm for harm in harms if harm] == []
    await wait_for_processes(before)


def test_lists_of_tolerated_attacks_name_existing_programs() -> None:
    names = {one.name for one in PROGRAMS}
    assert {name for allowed in ALLOWED.values() for name in allowed} <= names
    assert all(len(KNOWN) - len(allowed) >= 80 for allowed in ALLOWED.values())
