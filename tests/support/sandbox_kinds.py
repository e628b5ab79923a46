"""Starts sandboxes of each kind, for the contract's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.tasks.sandboxes import build_sandboxes
from rollflow.tasks.sandboxes.base import Capability, Sandboxes
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
KINDS = (*LOCAL, "run-code", "rock")  # the last two are on a server of bubblewrap sandboxes, on a free port
SERVED = ServerBounds(memory_bytes=SMALL["memory_bytes"])


@asynccontextmanager
async def start_kind(kind: str, needed: Collection[Capability] = ()) -> AsyncIterator[Sandboxes]:
    """Start sandboxes of one kind; skip the test if this machine cannot run them, or if they lack a capability."""
    async with AsyncExitStack() as stack:
        try:
            if (config := LOCAL.get(kind)) is None:
                server = await stack.enter_async_context(start_and_close(build_sandboxes(LOCAL["bubblewrap"])))
                url = await stack.enter_async_context(serve_in_background(server, bounds=SERVED))
                memory = SMALL["memory_bytes"]
                run_code = RunCodeSandbox(url=f"{url}/run_code", memory_bytes=memory)
                config = run_code if kind == "run-code" else RockSandbox(url=url, memory_bytes=memory)
            created = build_sandboxes(config)
            if missing := set(needed) - created.capabilities:
                pytest.skip(f"{kind} has not the capability {', '.join(sorted(missing))}")
            await stack.enter_async_context(start_and_close(created))
        except ConfigError as error:
            pytest.skip(str(error))
        yield created


@asynccontextmanager
async def start_and_close(sandboxes: Sandboxes) -> AsyncIterator[Sandboxes]:
    """Start sandboxes, and close them at the end."""
    await sandboxes.start()
    try:
        yield sandboxes
    finally:
        await sandboxes.close()
