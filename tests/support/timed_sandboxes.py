"""Sandboxes whose programs take planned seconds: a program "3 7" takes 3 seconds and prints 7."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rollflow.tasks.sandboxes.base import Capability, ExecResult, Program, ProgramEnd, SandboxFailed


class PlannedSandboxes:
    """Sandboxes that run programs by waiting, so that a test on the virtual clock takes no time."""

    capabilities = frozenset[Capability]()

    def __init__(self) -> None:
        self.timeouts: list[float] = []  # the deadline of each program, in order
        self.broken = False

    async def run(self, program: Program, files: Mapping[str, bytes] | None = None) -> ExecResult:
        """Wait for the program's seconds, or until its deadline."""
        self.timeouts.append(program.timeout)
        if self.broken:
            raise SandboxFailed("broken by the test")
        seconds, printed = program.code.split()
        if float(seconds) > program.timeout:
            await asyncio.sleep(program.timeout)
            return ExecResult(ProgramEnd.TIMEOUT, -9, b"", b"", program.timeout)
        await asyncio.sleep(float(seconds))
        return ExecResult(ProgramEnd.EXITED, 0, printed.encode(), b"", float(seconds))


def as_sandboxes(planned: PlannedSandboxes) -> Any:
    """Return the sandboxes under the contract's type, of which a scorer of programs uses only `run`."""
    return planned
