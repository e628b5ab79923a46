"""Sandboxes whose programs are processes of the host, confined by the package sandlock or without any protection.

Memory, processes and folder of a sandbox are measured ten to thirty times a second, so a program may exceed a limit for
a short time.

A program confined by sandlock can use no network, read no content of a host file and signal no other process. A program
confined by sandlock can still find out whether a file of the host exists, and how large it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from rollflow.tasks.sandboxes.base import Capability, SandboxFailed
from rollflow.tasks.sandboxes.bubblewrap import LIMITS, NO_PACKAGES, BoxSandboxes
from rollflow.tasks.sandboxes.config import SandlockSandbox, UnsafeProcessSandbox

HOST = Path(__file__).parent / "host"
END_SECONDS = 10.0  # seconds that the supervising processes may take to kill programs and delete folders


class ProcessSandboxes(BoxSandboxes):
    """Creates sandboxes whose programs are processes of this machine, either confined by sandlock or not confined."""

    def __init__(
        self, config: SandlockSandbox | UnsafeProcessSandbox, packages: Mapping[str, str] = NO_PACKAGES
    ) -> None:
        """Create no sandbox yet; `packages` are the paths of Python packages that programs may read, by name."""
        super().__init__(config)
        self._packages = packages
        self._folder: str | None = None
        own = Capability.ISOLATION if isinstance(config, SandlockSandbox) else Capability.CHILDREN
        self.capabilities = frozenset(
            {Capability.NAMED_LIMITS, Capability.STATE, Capability.CHANNEL, Capability.SESSIONS, own}
        )

    def _build_command(self, descriptor: int) -> list[str]:
        spec = find_spec("sandlock")
        if self._config.kind == "sandlock" and (spec is None or spec.origin is None):
            raise SandboxFailed("the package sandlock is not installed; pip install 'rollflow[sandlock]'")
        self._folder = tempfile.mkdtemp(prefix="rollflow-sandboxes-")
        base = Path(sys.base_prefix).resolve()
        python = base / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        settings = {name: getattr(self._config, name) for name in LIMITS} | {
            "kind": self._config.kind,
            "descriptor": descriptor,
            "root": self._folder,
            "python": str(python),
            "python_folder": str(base),
            "program": str((HOST / "program.py").resolve()),
            "readable": list(self._packages.values()),
            "packages": str(Path(spec.origin).parent.parent) if spec and spec.origin else "",
            "path": f"{base}/bin:/usr/local/bin:/usr/bin:/bin",
        }
        return [str(python), "-I", "-S", "-X", "utf8", str(HOST / "start.py"), json.dumps(settings)]

    async def _end_box(self) -> None:
        """End the processes that create and supervise the sandboxes.

        The processes get time to kill the programs, because the kernel does not kill a program when its supervising
        process dies.
        """
        if self._box and self._process:
            self._box.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_SECONDS)
        await super()._end_box()
        if self._folder and os.path.exists(self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)
