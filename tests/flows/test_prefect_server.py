"""Tests that the process of Prefect's server runs the garbage collector outside of the event loop's thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import HANG_SECONDS

# This script reproduces a deadlock of Prefect's server: the event loop's thread creates objects while it holds the
# database's lock, and a connection that waits for the lock has left a cursor in a reference cycle.
WAITING = """
import gc, sqlite3, sys, threading, time
from rollflow.flows.services.prefect_server import start_collector_thread

holds, waits = (sqlite3.connect(sys.argv[1], check_same_thread=False, isolation_level=None) for _ in range(2))
holds.execute("create table some (number)")
waits.execute("pragma busy_timeout = 600000")
if sys.argv[2] == "beside":
    start_collector_thread()

left = waits.execute("values (1), (2)")
assert left.fetchone() == (1,)
cycle = [left]
cycle.append(cycle)
holds.execute("begin immediate")
waiting = threading.Thread(target=waits.execute, args=("insert into some values (3)",), daemon=True)
waiting.start()
time.sleep(1.0)
del left, cycle
made = [[] for _ in range(100_000)]  # a collection
time.sleep(2.0)  # one beside, too
print("collected", flush=True)
holds.execute("commit")
waiting.join()
print("written", flush=True)
"""


def run(folder: Path, how: str, seconds: float) -> str:
    command = [sys.executable, "-c", WAITING, str(folder / "one.db"), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            return process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[0]


def test_garbage_collector_thread_avoids_prefects_deadlock(tmp_path: Path) -> None:
    assert run(tmp_path, "beside", HANG_SECONDS).split() == ["collected", "written"]


@pytest.mark.soak
def test_garbage_collection_in_prefects_event_loop_deadlocks(tmp_path: Path) -> None:
    """If this test fails, `prefect_server` is no longer needed."""
    assert run(tmp_path, "itself", 8.0).split() == []
