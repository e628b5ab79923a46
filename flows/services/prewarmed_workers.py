"""Spare Ray workers: processes that have made the imports of an actor before there is a run that needs one.

    asked for --> imports --> waits, as `ray::IDLE` --> becomes an actor of a run --> another is asked for, later

Guarantees: one for each kind that is asked for, as long as the machine has memory to spare, and none on a machine with
GPUs. A stack makes up for one that was taken; a command's own cluster has them once, for its run. They are the raylet's
processes like any other worker, and end with it. Where one is missing, its actor begins as it would without spares.
"""

from __future__ import annotations

import contextlib
import glob
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from rollflow.tasks.actors.early_imports import KIND, Kind, environment, wanted

AGAIN_SECONDS = 45.0  # after one was taken: its run is to begin first
LOOK_SECONDS = 5.0
CALL_SECONDS = 5.0
KEEP_SECONDS = 10 * 365 * 86400  # else Ray ends idle workers as it likes
LEAST_MEMORY = 4 << 30  # that must be available


class Spares:
    """Keeps them, for one raylet. See the module's docstring."""

    def __init__(self, address: str, raylet: int, folder: Path, kinds: Sequence[Kind], *, kept: bool) -> None:
        """`address` is where the raylet with process id `raylet` listens; `folder` is for what is asked for.

        `kept`: one that was taken is made up for; else there is one of each of these `kinds`, once.
        """
        self._address, self._raylet, self._folder = address, psutil.Process(raylet), folder
        self._pause = AGAIN_SECONDS if kept else math.inf
        self._due: dict[Kind, float] = dict.fromkeys(kinds, 0.0)
        self._looked = -math.inf
        folder.mkdir(parents=True, exist_ok=True)

    def look(self) -> None:
        """Ask for those that are missing; to be called again and again, and mostly does nothing."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS or glob.glob("/dev/nvidia[0-9]*"):
            return
        self._looked = now
        there = self._there()
        for kind, due in self._due.items():
            if kind in there:
                self._due[kind] = now + self._pause
            elif now > due and psutil.virtual_memory().available > LEAST_MEMORY:
                self._due[kind] = now + self._pause
                self._ask(kind)

    def _there(self) -> set[str]:
        """Kinds of which a worker waits or is on its way."""
        found = set()
        with contextlib.suppress(psutil.Error):
            for process in self._raylet.children():
                with contextlib.suppress(psutil.Error):
                    line = process.cmdline()
                    if line and (line[0] == "ray::IDLE" or not line[0].startswith("ray::")):
                        found.add(process.environ().get(KIND, ""))
        return found

    def _ask(self, kind: Kind) -> None:
        """Have the raylet start one for whatever job comes."""
        from ray._private.grpc_utils import grpc, init_grpc_channel
        from ray._private.utils import get_runtime_env_info, parse_runtime_env_for_task_or_actor
        from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
        from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub

        request: Any = PrestartWorkersRequest(num_workers=1, keep_alive_duration_secs=KEEP_SECONDS)
        parsed = parse_runtime_env_for_task_or_actor(environment(kind))
        request.runtime_env_info.CopyFrom(get_runtime_env_info(parsed, is_job_runtime_env=False))
        wanted(kind, self._folder).touch()
        try:
            with init_grpc_channel(self._address) as channel:
                NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:  # it is asked again, later
            wanted(kind, self._folder).unlink(missing_ok=True)
            print(f"no spare worker for {kind}: {error}", flush=True)
