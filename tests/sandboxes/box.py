"""Starts bubblewrap sandboxes for tests, as the user who runs the tests or as an ordinary user."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable
from typing import Any

import pytest

from rollflow.tasks.sandboxes.bubblewrap import BubblewrapSandboxes
from rollflow.tasks.sandboxes.config import MIB, BubblewrapSandbox

CONFIG = BubblewrapSandbox(
    memory_bytes=64 * MIB,
    folder_bytes=8 * MIB,
    folder_files=200,
    output_bytes=100_000,
    processes=16,
    spares=0,
)
USER = 65534
LONG = 60.0  # seconds; only a test that hangs takes longer
SECRET = "SECRET-OF-AN-EARLIER-PROGRAM"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
KINDS = ("own user", "ordinary user")


class Box:
    """Sandboxes of one kind, and the event loop in which they run."""

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
    """Return a function that builds the command that starts the box as an ordinary user, with the system's Python."""

    def build_command(config: BubblewrapSandbox, descriptor: int, *more: Any) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: USER)
            patch.setattr(sys, "base_prefix", "/usr")
            command = build(config, descriptor, *more)
        return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *command]

    return build_command
