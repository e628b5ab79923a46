"""Defines an environment in the form of gymnasium that hangs, crashes or writes garbage, for
`benchmarks.environment_faults`.

Worker processes import this module, so it needs only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

LAST_FD = 64  # garbage is written to all file descriptors below this number, because the protocol uses one of them
EXIT_CODE = 7


def act(text: str) -> int:
    """Return the only action, whatever the policy writes."""
    return 0


def hang() -> None:
    """Start a process in its own session, and never return, even after SIGTERM."""
    if os.fork() == 0:
        os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(3600)


def crash() -> None:
    """End this process by SIGSEGV, as a faulty C library may do."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(3600)


def leave() -> None:
    """End this process without a message."""
    os._exit(EXIT_CODE)


def write_garbage() -> None:
    """Write lines that are not messages of the protocol to all file descriptors."""
    for fd in range(3, LAST_FD):
        with contextlib.suppress(OSError):
            os.write(fd, b"\xff{garbage}\n" * 3)


FAULTS: Mapping[str, Callable[[], None]] = {"hang": hang, "crash": crash, "exit": leave, "garbage": write_garbage}


def draw_fault(draw: random.Random, shares: Mapping[str, float], turns: int) -> tuple[str, int]:
    """Draw the fault of an episode (or "" for none), and the turn in which the fault happens."""
    name = draw.choices(["", *shares], [1.0 - sum(shares.values()), *shares.values()])[0]
    return name, draw.randint(1, turns)


class FaultyWorld:
    """An environment with `turns` steps of `seconds` each, and the reward 1 at the end. A share of the episodes has a
    fault.
    """

    def __init__(
        self,
        turns: int = 8,
        seconds: float = 0.2,
        shares: Mapping[str, float] | None = None,
        by_seed: bool = False,
        broken: bool = False,
    ) -> None:
        """Create the environment.

        Args:
            shares: maps the name of a fault in `FAULTS` to the share of episodes with this fault.
            by_seed: if true, the fault depends only on the seed of the prompt; otherwise each episode draws its own
                fault.
            broken: if true, every creation of the environment ends its process.
        """
        if broken:
            leave()
        self.turns, self.seconds, self.shares, self.by_seed = turns, seconds, shares or {}, by_seed

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        """Begin an episode."""
        draw = random.Random(seed) if self.by_seed else random.SystemRandom()
        self.fault, self.at = draw_fault(draw, self.shares, self.turns)
        self.steps = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Take a step, or execute the fault of the episode."""
        self.steps += 1
        if self.fault and self.steps == self.at:
            FAULTS[self.fault]()
        time.sleep(self.seconds)
        is_over = self.steps == self.turns
        return self.steps, float(is_over), is_over, False, {}

    def close(self) -> None:
        """End the episode."""
