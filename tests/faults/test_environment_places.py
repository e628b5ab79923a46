"""Tests environment actors on two Ray nodes: the loss of a node and the kill of an actor lower no reward and leave no
process behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import RUN_SECONDS

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.soak]


def test_episodes_survive_the_death_of_a_node(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / ".dev"), str(ROOT)])
    environment = {**os.environ, "ROLLFLOW_HOME": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.support.environment_places", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["nodes"], found["busy hosts"]) == (2, 2)
    assert found["workers of the lost node"]
    assert found["processes of the lost node ended"]
    # each episode continues from its snapshot, on the other node
    assert found["with snapshots"] == {"judged": 8, "unjudged": 0, "full reward": 8, "reasons": 0}
    assert found["workers of the killed actor"]
    assert found["processes of the killed actor ended"]
    assert found["without snapshots"] == {"judged": 4, "unjudged": 4, "full reward": 4, "reasons": 4}
    assert found["counts"] == {"episodes": 17, "failures": 4, "hangs": 0, "kills": 0}
    assert found["all ended"]
