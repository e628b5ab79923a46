"""Who supervises a run: claims in the run's storage, each one an atomic create of `claims/<epoch>.json`.

The newest claim holds. A supervisor that finds a newer one than its own is a partitioned or forgotten old one: it
stops with `Conflict` and touches nothing more. No clock decides, and no claim has to be given back.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from rollflow.storage.errors import Conflict
from rollflow.storage.objects.base import ObjectStore, first_missing


def claim_path(epoch: int) -> str:
    """Where claim `epoch` lies."""
    return f"claims/{epoch:08d}.json"


class Claim:
    """One supervisor's claim on a run."""

    def __init__(self, run: ObjectStore, epoch: int) -> None:
        self.run, self.epoch = run, epoch

    @classmethod
    def take(cls, run: ObjectStore, who: str, cluster: str) -> Claim:
        """Claim the run from whoever had it. `cluster` is where its actors live."""
        body = {"who": who, "cluster": cluster, "host": socket.gethostname(), "process": os.getpid(), "at": time.time()}
        data = json.dumps(body).encode()
        epoch = first_missing(run, claim_path)
        while True:
            try:
                run.create(claim_path(epoch), data)
                return cls(run, epoch)
            except Conflict:
                epoch += 1

    def newer(self) -> dict[str, Any] | None:
        """The claim that came after this one, if there is one."""
        path = claim_path(self.epoch + 1)
        return dict(json.loads(self.run.get(path))) if self.run.exists(path) else None

    def check(self) -> None:
        """Raise `Conflict` if somebody has claimed the run since."""
        newer = self.newer()
        if newer is not None:
            raise Conflict(
                f"this run has another supervisor now ({newer['who']}, process {newer['process']} on {newer['host']}); "
                "this one stops"
            )
