"""Starts the sandbox server in the test's own process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollflow.tasks.sandboxes.base import Sandboxes
from rollflow.tasks.sandboxes.server.app import ServerBounds, build_app
from rollflow.tasks.sandboxes.server.serve import SandboxServer


@asynccontextmanager
async def serve_in_background(
    sandboxes: Sandboxes, *, token: str | None = None, bounds: ServerBounds | None = None
) -> AsyncIterator[str]:
    """Serve sandboxes on a free port of the loopback interface; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = build_app(sandboxes, token, bounds or ServerBounds())
        server = SandboxServer(app)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield address
        finally:
            server.end()
            await serving
            await app.state.live.close()
