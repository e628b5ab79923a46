"""Finds vLLM's EngineCore processes by the name that vLLM gives them."""

from __future__ import annotations

import contextlib
import time

import psutil

from tests.support.waiting import HANG_SECONDS

# the title as the kernel truncates it, which is all that psutil has for a process that has just ended
TITLE = "VLLM::EngineCor"


def cores(owner: psutil.Process) -> list[psutil.Process]:
    """List the living EngineCore processes below `owner`."""
    found = []
    for child in owner.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name().startswith(TITLE) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def core(owner: psutil.Process) -> psutil.Process:
    """Return the only EngineCore process below `owner`; search again, because a listing may miss a process."""
    limit = time.monotonic() + HANG_SECONDS
    while not (found := cores(owner)):
        assert time.monotonic() < limit, f"no EngineCore below {owner}: {owner.children(recursive=True)}"
        time.sleep(0.1)
    assert len(found) == 1, found
    return found[0]
