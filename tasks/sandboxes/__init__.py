"""Sandboxes: one contract (`base`), and one file for each kind. `build_sandboxes` alone decides which kind a run has.

bubblewrap   Linux namespaces, set up by bwrap; the programs in the box are in `box`
"""

from __future__ import annotations

from rollflow.tasks.sandboxes.base import Sandboxes
from rollflow.tasks.sandboxes.config import BubblewrapSandbox, SandboxConfig


def build_sandboxes(config: SandboxConfig) -> Sandboxes:
    """Build the kind of sandboxes that `[sandbox]` names, without starting them."""
    match config:
        case BubblewrapSandbox():
            from rollflow.tasks.sandboxes.bubblewrap import BubblewrapSandboxes

            return BubblewrapSandboxes(config)
