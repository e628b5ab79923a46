"""Keeps spare Ray workers, which are processes that import the modules of a Ray actor before a run needs them.

    requested --> imports --> waits, as `ray::IDLE` --> becomes an actor of a run --> a new spare is requested, later

Guarantees: a machine without GPUs has one spare worker for each requested kind of actor, as long as enough memory is
free; a machine with GPUs has none. The cluster of `rollflow serve` replaces a spare that a run took. The cluster of a
single command starts each spare only once, for the command's run. Spares are children of the raylet like any other
worker, and end with it. Without a spare, an actor starts in a new worker, as in any Ray cluster.
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

from rollflow.tasks.actors.early_imports import KIND, Kind, request_path, worker_environment

# seconds between a run's use of a spare Ray worker and the start of a new spare, so that the run can start first
AGAIN_SECONDS = 45.0
LOOK_SECONDS = 5.0
CALL_SECONDS = 5.0
KEEP_SECONDS = 10 * 365 * 86400  # seconds for which Ray keeps an idle worker; by default Ray may end it at any time
LEAST_MEMORY = 4 << 30  # available memory in bytes that is needed to start a spare Ray worker


class PrewarmedWorkers:
    """Keeps spare Ray workers for one raylet, the process that starts Ray's workers on a node."""

    def __init__(self, address: str, raylet: int, folder: Path, kinds: Sequence[Kind], *, kept: bool) -> None:
        """Prepare spare Ray workers for the raylet with process id `raylet` at `address`; `folder` stores the requests
        for workers.
        """
        self._address, self._raylet, self._folder = address, psutil.Process(raylet), folder
        self._pause = AGAIN_SECONDS if kept else math.inf
        self._due: dict[Kind, float] = dict.fromkeys(kinds, 0.0)
        self._looked = -math.inf
        folder.mkdir(parents=True, exist_ok=True)

    def look(self) -> None:
        """Request missing spare workers. The method may be called often, because most calls do nothing."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS or glob.glob("/dev/nvidia[0-9]*"):
            return
        self._looked = now
        there = self._find_kinds()
        for kind, due in self._due.items():
            if kind in there:
                self._due[kind] = now + self._pause
            elif now > due and psutil.virtual_memory().available > LEAST_MEMORY:
                self._due[kind] = now + self._pause
                self._request(kind)

    def _find_kinds(self) -> set[str]:
        """Return the kinds of actor for which an idle or a starting spare Ray worker exists."""
        found = set()
        with contextlib.suppress(psutil.Error):
            for process in self._raylet.children():
                with contextlib.suppress(psutil.Error):
                    line = process.cmdline()
                    if line and (line[0] == "ray::IDLE" or not line[0].startswith("ray::")):
                        found.add(process.environ().get(KIND, ""))
        return found

    def _request(self, kind: Kind) -> None:
        """Ask the raylet to start a spare Ray worker for this kind of actor, which any Ray job may use."""
        from ray._private.grpc_utils import grpc, init_grpc_channel
        from ray._private.utils import get_runtime_env_info, parse_runtime_env_for_task_or_actor
        from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
        from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub

        request: Any = PrestartWorkersRequest(num_workers=1, keep_alive_duration_secs=KEEP_SECONDS)
        parsed = parse_runtime_env_for_task_or_actor(worker_environment(kind))
        request.runtime_env_info.CopyFrom(get_runtime_env_info(parsed, is_job_runtime_env=False))
        request_path(kind, self._folder).touch()
        try:
            with init_grpc_channel(self._address) as channel:
                NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:  # a later call of `look` requests the spare Ray worker again
            request_path(kind, self._folder).unlink(missing_ok=True)
            print(f"no spare worker could be started for {kind}: {error}", flush=True)
