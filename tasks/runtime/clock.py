"""Runs asyncio code on a virtual clock, as fast as the processor allows.

`run_virtual(coroutine)` uses an event loop whose time jumps to the next timer whenever no task is ready. Code that
waits by the loop's clock (`asyncio.sleep`, `wait_for`, `timeout`) waits in virtual seconds. The coroutine that
`run_virtual` runs must not use threads or sockets.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Deadlock(RuntimeError):
    """Raised if no task is ready and no timer is set, because the program would wait forever."""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self))
        self._now = 0.0

    def time(self) -> float:
        """Return the number of virtual seconds since the event loop was created."""
        return self._now

    def jump(self, seconds: float) -> None:
        """Advance the virtual time."""
        self._now += seconds


class _JumpingSelector(selectors.SelectSelector):
    """Advances the virtual time to the next timer instead of sleeping."""

    def __init__(self, loop: VirtualClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("the simulation cannot continue: every task waits, and no timer is set that could wake one")
        if timeout > 0:
            self._loop.jump(timeout)
        return []  # no socket is registered, and asking the kernel for events would cost a tenth of the run time


def run_virtual(main: Coroutine[Any, Any, Result]) -> Result:
    """Run the coroutine `main` to its end on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
