"""Finds the processes of the sandboxes that this process owns; other tests of this process have children too."""

from __future__ import annotations

import contextlib

import psutil


def list_boxes() -> list[psutil.Process]:
    """List the children of this process from which sandboxes descend."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any("tasks/sandboxes" in part for part in child.cmdline()):
                found.append(child)
    return found


def list_sandbox_processes() -> list[psutil.Process]:
    """List the boxes of this process and everything that descends from them."""
    found = list_boxes()
    for box in list(found):
        with contextlib.suppress(psutil.Error):
            found += box.children(recursive=True)
    return found
