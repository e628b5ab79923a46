"""Reward actors on two Ray nodes: a lost node and a lost owner cost no score and leave no process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import RUN_SECONDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.soak
def test_lost_node_costs_no_score(tmp_path: Path) -> None:
    """In a separate process, because Ray reads a cluster's token when it is first imported."""
    path = os.pathsep.join([str(ROOT / ".dev"), str(ROOT)])
    environment = {**os.environ, "ROLLFLOW_HOME": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.support.reward_places", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
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
