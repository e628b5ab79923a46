"""Tests whole runs whose environments run in environment actors on a local Ray cluster, and that lose an actor during
the run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.objects import open_store
from tests.e2e.test_runs import Command, leftovers
from tests.environments.worlds import GUESTS
from tests.support.small_run import make_policy
from tests.support.waiting import until

pytestmark = pytest.mark.slow

VERSIONS, EPISODES = 4, 16
RECIPE = """
name = "placed"
versions = 4
groups = 4
group_size = 4

[policy]
path = "{policy}"

[[prompts]]
kind = "jsonl"
path = "{rows}"

[reward]
kind = "exact"

[engine]
kind = "transformers"
max_new_tokens = 100

[environment]
kind = "mixed"
default = "near"

[environment.kinds.near]
kind = "gymnasium"
path = "odd_worlds:Placed"
folder = "{guests}"
options = {{ file = "{resets}", victim = "{victim}", goal = 2 }}
act = "odd_worlds:act_by_length"
max_turns = 3
max_turn_tokens = 4

[environment.kinds.far]
kind = "gymnasium"
path = "odd_worlds:Placed"
folder = "{guests}"
options = {{ file = "{resets}" }}
act = "odd_worlds:act_by_length"
max_turns = 3
max_turn_tokens = 4

[cluster.environment_actors]
min = 2

[evaluation]
every = 0
prompts = 2
"""


@pytest.mark.parametrize("victim", ["EnvironmentActor", "RolloutActor"])
def test_run_with_environment_actors_survives_a_kill(victim: str, tmp_path: Path) -> None:
    policy, rows, resets = tmp_path / "policy", tmp_path / "rows.jsonl", tmp_path / "resets"
    make_policy(policy)
    kinds = ("near", "far")
    questions = [{"question": f"Walk {n}.", "answer": "3", "environment": kinds[n % 2]} for n in range(40)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in questions))
    places = {"policy": policy, "rows": rows, "resets": resets, "guests": GUESTS, "victim": victim}
    command = Command(tmp_path / "home", RECIPE.format(**places))
    command.run("run", str(command.recipe), "--run-id", "placed")
    report = audit(open_store(f"{command.home}/store/runs/placed"), deep=True)
    assert report.clean, report.violations
    assert report.trajectories == VERSIONS * EPISODES
    hosts = resets.read_text().split()
    assert len(hosts) >= VERSIONS * EPISODES  # each episode ran in an environment actor
    assert len(set(hosts)) >= 2
    killed = Path(f"{resets}.killed").read_text()
    assert victim == "EnvironmentActor" or killed not in hosts  # an actor may be killed before its first reset
    counts = command.summary("placed")["environments"]
    assert isinstance(counts, dict)
    assert sum(one["episodes"] for one in counts.values()) >= VERSIONS * EPISODES
    until(lambda: not leftovers(command.home))
