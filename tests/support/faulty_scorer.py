"""A user-defined scorer with faults. The response alone decides which fault happens, so that a test can predict the
fault.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score

FAULTS = ("hangs", "hangs natively", "segfaults", "eats memory", "raises", "returns nan", "away")
SHARE = 50  # of 1,000 responses, the number with each fault
OUTCOMES = {
    "hangs": Outcome.TIMEOUT,
    "hangs natively": Outcome.TIMEOUT,
    "segfaults": Outcome.KILLED,
    "eats memory": Outcome.UNPARSABLE,
    "raises": Outcome.UNPARSABLE,
    "returns nan": Outcome.UNPARSABLE,
}


def choose_fault(response: str) -> str:
    """Return the fault of a response, or "" for none."""
    place = zlib.crc32(response.encode()) % 1000 // SHARE
    return FAULTS[place] if place < len(FAULTS) else ""


def compute_value(response: str) -> float:
    """Return the reward of a response without a fault, or with a fault that a second try does not have."""
    return (zlib.crc32(response.encode()) // 1000 % 9 + 1) / 10


def score(response: str, reference: Mapping[str, Any], *, folder: str) -> Score:
    """Fail with the fault of the response. A response whose fault is "away" is scored on a later try."""
    match choose_fault(response):
        case "hangs":
            while True:
                time.sleep(1)
        case "hangs natively":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
            sum(1 for _ in iter(int, 1))
        case "segfaults":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "eats memory":
            kept = bytearray(1 << 45)
            return Score(float(len(kept)))
        case "raises":
            raise ValueError("no such answer")
        case "returns nan":
            return Score(float("nan"))
        case "away" if create_once(Path(folder) / f"{zlib.crc32(response.encode())}"):
            raise ConnectionError("the judge is away")
    return Score(compute_value(response), parts={"share": compute_value(response)})


def create_once(path: Path) -> bool:
    """Return whether this call was the first one for the path."""
    with contextlib.suppress(FileExistsError):
        path.touch(exist_ok=False)
        return True
    return False
