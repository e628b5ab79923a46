"""Starts sandboxes of each kind, for the tests of the sandbox contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.tasks.sandboxes import build_sandboxes
from rollflow.tasks.sandboxes.base import Capability, Program, Sandboxes
from rollflow.tasks.sandboxes.config import (
    MIB,
    BubblewrapSandbox,
    RockSandbox,
    RunCodeSandbox,
    SandboxBase,
    SandlockSandbox,
    UnsafeProcessSandbox,
)
from rollflow.tasks.sandboxes.server.app import ServerBounds
from tests.support.sandbox_server import serve_in_background

SMALL = {"memory_bytes": 128 * MIB, "folder_bytes": 8 * MIB, "folder_files": 200, "output_bytes": 100_000}
LOCAL: dict[str, SandboxBase] = {
    "bubblewrap": BubblewrapSandbox(**SMALL, processes=16, spares=0),
    "sandlock": SandlockSandbox(**SMALL, processes=16, spares=0),
    "unsafe-process": UnsafeProcessSandbox(**SMALL, processes=16, spares=0),
}
KINDS = (*LOCAL, "run-code", "rock")  # the last two kinds use a server of bubblewrap sandboxes, on a free port
LONG = 60.0  # seconds; only a program that hangs takes longer
SERVED = ServerBounds(memory_bytes=SMALL["memory_bytes"])


@asynccontextmanager
async def start_kind(kind: str, needed: Collection[Capability] = ()) -> AsyncIterator[Sandboxes]:
    """Start sandboxes of one kind. Skip the test if this machine cannot run them, or if they lack a required
    capability.
    """
    async with AsyncExitStack() as stack:
        try:
            if (config := LOCAL.get(kind)) is None:
                server = await stack.enter_async_context(start_and_close(build_sandboxes(LOCAL["bubblewrap"])))
                url = await stack.enter_async_context(serve_in_background(server, bounds=SERVED))
                memory = SMALL["memory_bytes"]
                run_code = RunCodeSandbox(url=f"{url}/run_code", memory_bytes=memory)
                config = run_code if kind == "run-code" else RockSandbox(url=url, memory_bytes=memory)
            created = build_sandboxes(config)
            skip_without(needed, created)
            await stack.enter_async_context(start_and_close(created))
        except ConfigError as error:
            pytest.skip(str(error))
        yield created


def skip_without(needed: Collection[Capability], sandboxes: Sandboxes) -> None:
    """Skip a test that needs capabilities that the sandboxes lack."""
    if missing := set(needed) - sandboxes.capabilities:
        pytest.skip(f"{type(sandboxes).__name__} have not the capability {', '.join(sorted(missing))}")


@asynccontextmanager
async def start_and_close(sandboxes: Sandboxes) -> AsyncIterator[Sandboxes]:
    """Start sandboxes, and close them at the end."""
    await sandboxes.start()
    try:
        yield sandboxes
    finally:
        await sandboxes.close()


async def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail after 30 seconds."""
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.02)
    assert condition()


def warm(code: str, **more: object) -> Program:
    """Return a warm Python program with a long deadline."""
    return Program(code=code, **{"timeout": LONG, **more})  # type: ignore[arg-type]
