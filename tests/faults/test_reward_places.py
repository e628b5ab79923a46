"""Tests reward actors on two Ray nodes: if a node or the owner dies, no score is lost and no process is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import RUN_SECONDS

ROOT = Path(__file__).resolve().parents[2]


pytestmark = [pytest.mark.slow, pytest.mark.soak]


def run_script(mode: str, tmp_path: Path) -> dict[str, Any]:
    """Run the script `tests.support.reward_places`, and return the results that the script wrote."""
    path = os.pathsep.join([str(ROOT / ".dev"), str(ROOT)])
    environment = {**os.environ, "ROLLFLOW_HOME": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.support.reward_places", mode, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return dict(json.loads((tmp_path / "found.json").read_text()))


def test_scores_survive_the_death_of_a_reward_node(tmp_path: Path) -> None:
    found = run_script("nodes", tmp_path)
    assert (found["actors"], found["on node"]) == (2, 1)  # the helper is on the node without the reward actor
    assert found["scored by the lost node"] == 0
    assert found["processes of the lost node ended"]
    assert found["actors after the loss"] == 2
    assert found["scored"] == found["asked"] == 92  # none is lost, and none counts twice
    assert found["helper ended with its owner"]
    assert found["scored by the dead owner"] == 0
    assert found["actors after a restart"] == found["new actors"] == 2
    assert found["returned"] == found["asked of the successor"]
    assert found["all ended"]


def test_long_queue_starts_a_helper_that_ends_its_sandboxes(tmp_path: Path) -> None:
    found = run_script("programs", tmp_path)
    if "skip" in found:
        pytest.skip(found["skip"])  # this machine runs no sandboxes
    assert found["actors at first"] == 1
    assert found["all of the helper ended"]
    assert (found["correct"], found["scored"]) == (20, 21)
    assert found["helpers left"] == 0
