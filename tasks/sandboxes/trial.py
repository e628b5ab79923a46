"""Checks whether this machine can run a kind of sandbox, before a run needs the sandbox."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from rollflow.tasks.sandboxes import build_sandboxes
from rollflow.tasks.sandboxes.config import SandboxConfig


def try_sandboxes(config: SandboxConfig) -> None:
    """Start sandboxes, run one program in a sandbox, and close the sandboxes.

    Raises:
        ConfigError: this machine cannot run these sandboxes; the message gives the reason and the fix.
    """
    with ThreadPoolExecutor(1) as pool:  # a separate thread is used, because the caller may already run an event loop
        pool.submit(lambda: asyncio.run(_try(config))).result()


async def _try(config: SandboxConfig) -> None:
    sandboxes = build_sandboxes(config)
    try:
        await sandboxes.start()
    finally:
        await sandboxes.close()
