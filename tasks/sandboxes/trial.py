"""Checks whether this machine can run a kind of sandbox, before a run needs it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from rollflow.tasks.sandboxes import build_sandboxes
from rollflow.tasks.sandboxes.config import SandboxConfig


def try_sandboxes(config: SandboxConfig) -> None:
    """Start sandboxes, run one program, and close them.

    Raises:
        ConfigError: the sandboxes cannot run; the message says why and what to change.
    """
    with ThreadPoolExecutor(1) as pool:  # the caller may be in an event loop
        pool.submit(lambda: asyncio.run(_try(config))).result()


async def _try(config: SandboxConfig) -> None:
    sandboxes = build_sandboxes(config)
    try:
        await sandboxes.start()
    finally:
        await sandboxes.close()
