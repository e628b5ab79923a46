"""Tests that the sandbox counters of a run whose scorer runs programs match the responses in the run's storage."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rollflow.storage.objects import open_store
from rollflow.storage.run_records.sandbox_figures import read_sandbox_uses
from rollflow.tasks.rollout.evaluation import read_evaluations
from rollflow.tasks.sandboxes import build_sandboxes
from tests.e2e.test_runs import Command
from tests.environments.tool_episodes import SANDBOX
from tests.support.sandbox_kinds import start_and_close
from tests.support.small_run import make_policy
from tests.tasks.test_scheduler import trained

pytestmark = pytest.mark.slow

CASES = [{"stdin": "1", "stdout": "1"}, {"stdin": "2", "stdout": "2"}, {"stdin": "3", "stdout": "4"}]
RECIPE = """
name = "programs"
versions = 2
async_ratio = 0
groups = 4
group_size = 4

[policy]
path = "{policy}"

[[prompts]]
kind = "file"
path = "{rows}"

[engine]
kind = "timed"
max_new_tokens = 16
median_tokens = 8
seconds_per_token = 0.01

[reward]
kind = "code"
fenced = false
workers = 1

[train.objective.advantage]
scale = "none"

[evaluation]
every = 0
prompts = 3
"""


async def test_sandbox_counts_of_a_run_match_its_stored_responses(tmp_path: Path) -> None:
    async with start_and_close(build_sandboxes(SANDBOX)):
        pass  # a machine without sandboxes cannot run the recipe
    make_policy(tmp_path / "policy")
    rows = [{"question": f"Write program {number}.", "cases": CASES} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = RECIPE.format(policy=tmp_path / "policy", rows=tmp_path / "rows.jsonl")
    command = Command(tmp_path / "home", recipe)
    command.run("run", str(command.recipe), "--run-id", "one")
    store = open_store(f"{command.home}/store/runs/one")
    batches = [group for _, batch in trained(store) for group in batch.groups()]
    scored = sum(len(group.trajectories) for group in batches)
    scored += sum(one.responses for one in read_evaluations(store))
    [(kind, figures)] = read_sandbox_uses(store).totals().items()
    assert kind == "bubblewrap"
    assert figures.programs == scored * len(CASES)
    assert figures.failures == 0
    summary = json.loads(store.get("summary.json"))
    assert summary["sandboxes"]["bubblewrap"]["programs"] == figures.programs
    assert json.loads(store.get("status.json"))["sandboxes"]["bubblewrap"]["in_use"] == 0
    assert re.search(rf"programs +│ {figures.programs} ", command.run("inspect", "one"))
