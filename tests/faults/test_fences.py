"""Tests two supervisors of one run: the older supervisor loses its role and stops, and the run loses nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import RECIPE, TIMING, Victim
from benchmarks.victims import kill_everything
from rollflow.storage.audit.audit import audit
from tests.support.waiting import HANG_SECONDS, RUN_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.soak]

VERSIONS = 600  # enough versions for the second supervisor to begin before the first supervisor ends


def test_run_resumed_on_another_machine_stops_on_the_first(tmp_path: Path) -> None:
    """The old supervisor, learner and scheduler are still alive when new ones start, as after a network partition."""
    recipe = RECIPE.format(seed=3, versions=VERSIONS, engine="timed", timing=TIMING["timed"])
    old = Victim(tmp_path / "old", recipe)
    elsewhere = tmp_path / "elsewhere"
    try:
        old.wait_version(5, RUN_SECONDS)
        environment = {**os.environ, "ROLLFLOW_HOME": str(elsewhere), "PREFECT_API_URL": ""}
        command = [sys.executable, "-m", "rollflow.flows.commands.cli", "resume", old.store.uri]
        new = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS)
        assert old.process.wait(HANG_SECONDS) == 1
        assert "Deposed: the run has another supervisor now" in old.tail()
        assert new.returncode == 0, new.stdout[-2000:] + new.stderr[-2000:]
    finally:
        kill_everything(tmp_path / "old")
        kill_everything(elsewhere)
    report = audit(old.store, deep=True)
    assert report.clean, report.violations
    assert report.versions == VERSIONS
