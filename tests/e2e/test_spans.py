"""Tests the OpenTelemetry spans of a whole run: the trace of each trained group reaches from its prompt to its version,
over three processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.log.entries import BatchCommitted, VersionPublished
from rollflow.storage.objects import open_store
from tests.support.collector import collector
from tests.support.log_runs import read
from tests.support.waiting import RUN_SECONDS

VERSIONS, GROUPS, SIZE = 4, 4, 4
RECIPE = f"""
name = "spans"
versions = {VERSIONS}
groups = {GROUPS}
group_size = {SIZE}
[policy.cold_start]
hidden_size = 32
layers = 1
heads = 2
target_accuracy = 0.01
evaluate_every = 5
[engine]
kind = "transformers"
max_new_tokens = 8
[evaluation]
prompts = 4
every = 0
[tracking]
"""
SLACK_SECONDS = 0.05  # the end of a span is read from the clock a moment after the measured work has ended


@pytest.mark.soak
@pytest.mark.timeout(2 * RUN_SECONDS)
def test_run_has_a_trace_for_every_prompt_and_version(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    with collector() as kept:
        recipe.write_text(RECIPE + f'spans = "{kept.address}"\n')
        command = [sys.executable, "-m", "rollflow.flows.commands.cli", "run", str(recipe), "--run-id", "traced"]
        environment = {**os.environ, "ROLLFLOW_HOME": str(tmp_path / "home")}
        subprocess.run(command, env=environment, check=True, timeout=RUN_SECONDS)
    store = open_store(f"{tmp_path}/home/store/runs/traced")
    assert audit(store).clean
    bodies = [entry.body for entry in read(store)]
    batches = {body.number: body for body in bodies if isinstance(body, BatchCommitted)}
    published = [body.number for body in bodies if isinstance(body, VersionPublished) and body.number > 0]
    prompts = {
        (trace[0].attributes["rollflow.prompt"], trace[0].attributes["rollflow.attempt"]): trace
        for trace in kept.traces()
        if trace[0].name == "prompt"
    }
    for number in published:
        for group in batches[number - 1].groups:
            root, *spans = prompts[group.prompt, group.attempt]
            names = Counter(span.name for span in spans)
            assert names == {"generate": SIZE, "score": SIZE, "wait": 1, "train": 1}
            assert root.attributes["fate"] == f"trains version {number}"
            (train,) = (span for span in spans if span.name == "train")
            assert train.attributes["rollflow.version"] == number
            assert (root.service, train.service) == ("rollflow-rollout", "rollflow-learner")
            assert min(span.began for span in spans) >= root.began - SLACK_SECONDS
            assert train.began >= root.ended - SLACK_SECONDS - 1  # clocks differ; training begins after the commit
    versions = {trace[0].attributes["rollflow.version"]: trace for trace in kept.traces() if trace[0].name == "version"}
    assert sorted(versions) == published == list(range(1, VERSIONS + 1))
    for root, *spans in versions.values():
        assert {"wait for batch", "train step", "publish"} <= {span.name for span in spans}
        assert all(span.parent == root.id for span in spans)
    assert any(span.name == "load weights" for span in kept.spans)
