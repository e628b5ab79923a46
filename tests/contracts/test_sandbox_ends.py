"""Tests how sandboxes end, on every kind of sandbox: closed or killed sandboxes leave no process, and dead sandboxes
are replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rollflow.tasks.sandboxes.base import Capability, Sandboxes, SandboxFailed
from rollflow.tasks.sandboxes.rock import RockSandboxes
from tests.support.sandbox_kinds import KINDS, start_kind, wait_until, warm
from tests.support.sandbox_processes import list_boxes, list_sandbox_processes


@pytest.fixture(params=[kind for kind in KINDS if kind != "run-code"])
async def sandboxes(request: pytest.FixtureRequest) -> AsyncIterator[Sandboxes]:
    """Start sandboxes of one kind that keep their state; skip a kind that this machine cannot run."""
    async with start_kind(request.param, {Capability.STATE}) as started:
        yield started


@pytest.mark.parametrize("ended", ["sandbox", "all"])
async def test_close_kills_a_program_in_another_session(sandboxes: Sandboxes, ended: str) -> None:
    before = len(list_sandbox_processes())
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(6789)\n"
        "    os._exit(0)\ntime.sleep(6789)"
    )
    sandbox = await sandboxes.create()
    running = asyncio.create_task(sandbox.exec(warm(code)))
    await wait_until(lambda: len(list_sandbox_processes()) >= before + 2)
    await asyncio.sleep(0.5)
    started = list_sandbox_processes()
    await (sandbox if ended == "sandbox" else sandboxes).close()
    with pytest.raises(SandboxFailed):
        await running
    # a sandbox server keeps the container
    left = before if ended == "sandbox" or isinstance(sandboxes, RockSandboxes) else 0
    await wait_until(lambda: sum(process.is_running() for process in started) <= left)


async def test_dead_sandbox_is_replaced(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.create()
    first, below = list_boxes(), list_sandbox_processes()
    for child in first:
        child.kill()
    await wait_until(lambda: not any(process.is_running() for process in below if process not in first))
    with pytest.raises(SandboxFailed):
        await sandbox.exec(warm("pass"))
    for _ in range(1500):
        try:
            assert (await sandboxes.run(warm("print(1)"))).stdout == b"1\n"
            break
        except SandboxFailed:
            await asyncio.sleep(0.02)
    else:
        pytest.fail("the box was not replaced within 30 s")
