"""Finds the processes of the sandboxes that this process owns. Other tests in this process also have child processes,
which are not counted.
"""

from __future__ import annotations

import contextlib

import psutil


def list_boxes() -> list[psutil.Process]:
    """List the boxes: the child processes of this process from which the processes of sandboxes descend."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any("tasks/sandboxes" in part for part in child.cmdline()):
                found.append(child)
    return found


def list_sandbox_processes() -> list[psutil.Process]:
    """List the boxes of this process and all processes that descend from them."""
    found = list_boxes()
    for box in list(found):
        with contextlib.suppress(psutil.Error):
            found += box.children(recursive=True)
    return found
