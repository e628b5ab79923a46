"""Sandboxes for programs that the model wrote: `base` defines the interface, and each kind of sandbox has one file.
`build_sandboxes` creates sandboxes of the kind that the config section `[sandbox]` names.

bubblewrap       Linux namespaces, set up by bwrap; the programs that run inside its container are in `box`
sandlock         Landlock and seccomp; the programs that start and watch a program are in `host`
unsafe-process   plain processes, which protect from nothing; also in `host`
run-code         a server of SandboxFusion's protocol; our own server is in `server`
rock             a server of ROCK's protocol, or a rocklet; our own server is in `server`

The first three kinds have workspaces with sessions for an agent's tools: the module `workspace` runs in the process of
the caller, and the package `guest` runs in the sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollflow.tasks.sandboxes.base import Sandboxes
from rollflow.tasks.sandboxes.config import (
    BubblewrapSandbox,
    RockSandbox,
    RunCodeSandbox,
    SandboxConfig,
    SandlockSandbox,
    UnsafeProcessSandbox,
)


def build_sandboxes(config: SandboxConfig, packages: Mapping[str, str] | None = None) -> Sandboxes:
    """Return the sandboxes of the kind that the config section `[sandbox]` names, without starting them.

    `packages` maps names of Python packages on this machine to their folders or files. Programs in local sandboxes can
    read the packages at the paths that `place_packages` returns.
    """
    given = packages or {}
    match config:
        case BubblewrapSandbox():
            from rollflow.tasks.sandboxes.bubblewrap import BubblewrapSandboxes

            return BubblewrapSandboxes(config, given)
        case SandlockSandbox() | UnsafeProcessSandbox():
            from rollflow.tasks.sandboxes.processes import ProcessSandboxes

            return ProcessSandboxes(config, given)
        case RunCodeSandbox():
            from rollflow.tasks.sandboxes.run_code import RunCodeSandboxes

            return RunCodeSandboxes(config)
        case RockSandbox():
            from rollflow.tasks.sandboxes.rock import RockSandboxes

            return RockSandboxes(config)


def place_packages(config: SandboxConfig, packages: Mapping[str, str]) -> dict[str, str]:
    """Return the paths at which programs in the sandboxes see the Python packages `packages`, by name."""
    if isinstance(config, BubblewrapSandbox):
        from rollflow.tasks.sandboxes.bubblewrap import PACKAGES

        return {name: f"{PACKAGES}/{Path(path).name}" for name, path in packages.items()}
    return dict(packages)
