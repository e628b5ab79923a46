"""Runs the HTTP server for sandboxes, and stores its token in a file that only the owner can read."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from rollflow.storage.errors import ConfigError
from rollflow.tasks.sandboxes import build_sandboxes
from rollflow.tasks.sandboxes.config import SandboxBase
from rollflow.tasks.sandboxes.server.app import BODY_FACTOR, ServerBounds, build_app

TOKEN_BYTES = 32
BACKLOG = 1024
KEEP_ALIVE_SECONDS = 75
END_SECONDS = 2  # seconds that running requests get to finish when the server stops


def read_token(path: Path) -> str:
    """Return the token in a file; if the file is missing, create it with a new token and mode 0600.

    Raises:
        ConfigError: the token's file is empty, cannot be written, or can be read by other users.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path} can be read by other users; run chmod 600 {path}") from None
        if not (token := path.read_text().strip()):
            raise ConfigError(f"{path} is empty; remove it, and a new token is written") from None
        return token
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another file with --token-file") from None
    token = secrets.token_urlsafe(TOKEN_BYTES)
    with os.fdopen(fd, "w") as file:
        file.write(f"{token}\n")
    return token


def is_loopback(host: str) -> bool:
    """Return whether an address is a loopback address, which only this machine can reach."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class SandboxServer(uvicorn.Server):
    """A uvicorn server that installs no signal handlers, because its caller handles signals."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",  # h11 limits the size of HTTP headers
                log_level="warning",
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=END_SECONDS,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    def end(self) -> None:
        """Ask the server to stop, without waiting for its end."""
        self.should_exit = True


async def serve_sandboxes(
    config: SandboxBase, host: str, port: int, token: str | None, bounds: ServerBounds, tell: Callable[[str], None]
) -> None:
    """Serve sandboxes over HTTP until SIGINT or SIGTERM; the limits of memory and body size in `bounds` are replaced by
    those of `config`.

    `tell` is called with the server's address once the server accepts requests.

    Raises:
        ConfigError: the port cannot be opened, or this machine cannot run this kind of sandbox.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"port {port} of {host} cannot be opened: {error.strerror}; give another --port") from None
    with listener:
        sandboxes = build_sandboxes(config)  # type: ignore[arg-type]
        await sandboxes.start()
        limits = replace(bounds, memory_bytes=config.memory_bytes, body_bytes=BODY_FACTOR * config.folder_bytes)
        app = build_app(sandboxes, token, limits)
        server = SandboxServer(app)
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signal_number, server.end)
        try:
            name, number = listener.getsockname()[:2]
            tell(f"http://{f'[{name}]' if ':' in name else name}:{number}/run_code")
            await server.serve([listener])
        finally:
            await app.state.live.close()
            await sandboxes.close()
