"""Hostile programs reach nothing, end in time, leave nothing, and change no program that runs after them."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Awaitable, Iterator
from typing import Any

import psutil
import pytest

from rollflow.storage.errors import ConfigError
from rollflow.tasks.sandboxes import bubblewrap
from rollflow.tasks.sandboxes.base import ExecResult, Program, Sandbox
from rollflow.tasks.sandboxes.bubblewrap import BubblewrapSandboxes
from rollflow.tasks.sandboxes.config import MIB, BubblewrapSandbox
from tests.sandboxes.programs import PROGRAMS
from tests.sandboxes.programs.base import Hostile

CONFIG = BubblewrapSandbox(
    memory_bytes=64 * MIB,
    folder_bytes=8 * MIB,
    folder_files=200,
    output_bytes=100_000,
    processes=16,
    spares=0,
)
USER = 65534
GRACE = 4.0  # seconds that a program may take beyond its deadline, on a machine that is slow and busy
LONG = 60.0  # seconds; longer only for a hang
SECRET = "SECRET-OF-AN-EARLIER-PROGRAM"
PROBE = (
    "import builtins, json, math, os, random\n"
    "print(sum(name.isdigit() for name in os.listdir('/proc')), json.dumps([int('42'), math.sqrt(4.0)]), "
    "random.random() == 0.8444218515250481, os.environ.get('LEFT'))"
)
PROBED = b"2 [42, 2.0] True None\n"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


class Box:
    """Sandboxes of one kind, and the event loop that they live on."""

    def __init__(self, sandboxes: BubblewrapSandboxes) -> None:
        self.sandboxes, self._runner = sandboxes, asyncio.Runner()

    def do(self, work: Awaitable[Any]) -> Any:
        """Wait for a coroutine."""

        async def wait() -> Any:
            return await work

        return self._runner.run(wait())

    def close(self) -> None:
        """End the sandboxes and the loop."""
        self.do(self.sandboxes.close())
        self._runner.close()


def build_as_user(build: Any) -> Any:
    """Return a builder of commands that start the box as an ordinary user, with the system's Python."""

    def build_command(config: BubblewrapSandbox, descriptor: int) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: USER)
            patch.setattr(sys, "base_prefix", "/usr")
            command = build(config, descriptor)
        return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *command]

    return build_command


@pytest.fixture(scope="module", params=["own user", "ordinary user"])
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    """Start sandboxes as this user, and for root also as an ordinary user; skip what this machine cannot run."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "ordinary user":
            if os.geteuid() != 0 or not shutil.which("setpriv") or not os.path.exists(f"/usr/bin/{PYTHON}"):
                pytest.skip(f"not root, or no setpriv, or no /usr/bin/{PYTHON}")
            patch.setattr(bubblewrap, "build_command", build_as_user(bubblewrap.build_command))
        created = Box(BubblewrapSandboxes(CONFIG))
        try:
            created.do(created.sandboxes.start())
        except ConfigError as error:
            created.close()
            pytest.skip(str(error))
        created.do(created.sandboxes.run(Program(code=f"# {SECRET}", stdin=SECRET.encode(), env={"LEFT": SECRET})))
        yield created
        created.close()


def count_processes() -> int:
    """Count the processes that this process started, directly or not."""
    return len(psutil.Process().children(recursive=True))


async def wait_for_processes(most: int) -> None:
    """Wait until no more processes than these are left."""
    async with asyncio.timeout(LONG):
        while count_processes() > most:
            await asyncio.sleep(0.02)


async def run_hostile(sandbox: Sandbox, hostile: Hostile, cold: bool) -> ExecResult:
    """Run a hostile program as a warm program, or as a command."""
    if not cold:
        return await sandbox.exec(Program(code=hostile.source, timeout=hostile.seconds))
    await sandbox.upload("main.py", hostile.source.encode())
    return await sandbox.exec(Program(command=[PYTHON, "main.py"], timeout=hostile.seconds + 0.3))


async def attack(box: Box, hostile: Hostile, cold: bool) -> None:
    """Run a hostile program, then honest ones in the same sandbox and in a new one, and look for what is left."""
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


def known(hostile: Hostile) -> Any:
    """Return a test's case; skip it if this machine's system calls are others."""
    other = hostile.machine not in ("", os.uname().machine)
    return pytest.param(hostile, id=hostile.name, marks=[pytest.mark.skipif(other, reason="system calls differ")])


@pytest.mark.parametrize("hostile", map(known, PROGRAMS))
def test_hostile_warm_program_does_no_harm(box: Box, hostile: Hostile) -> None:
    box.do(attack(box, hostile, cold=False))


@pytest.mark.parametrize("hostile", [known(one) for one in PROGRAMS if one.cold])
def test_hostile_command_does_no_harm(box: Box, hostile: Hostile) -> None:
    box.do(attack(box, hostile, cold=True))
