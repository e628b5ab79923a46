"""Tests that commands that read a run print JSON with `--json`, and that the JSON has the same facts as the text
output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.commands.cli import main
from rollflow.storage.records import StoredObject
from rollflow.tasks.run.context import RunContext
from tests.support.refused import refused
from tests.support.small_run import prepare_small, train_small

RECIPE = "flows/recipes/sorting.toml"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """Train three versions."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        context = prepare_small(home, versions=3)
        train_small(context, 3)
        yield context


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return a command's JSON output, and check that it prints nothing else."""
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_check_and_keys_print_json(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    assert told(capsys, "check", RECIPE, "--set", "groups=48")["groups"] == 48
    keys = {one["key"]: one for one in told(capsys, "keys")}
    assert keys["seed"]["default"] == "0"
    assert keys["train.learning_rate"]["allowed"] == "number above 0"
    assert keys.keys() > {"train.objective.kind", "store.uri"}
    assert "engines.count" in str(told(capsys, "keys", "--hardware"))


def test_doctor_prints_json(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    main(["doctor", "--json"])
    found = {check["name"]: check["outcome"] for check in json.loads(capsys.readouterr().out)}
    assert found["torch"] == "ok"


def test_inspect_prints_json(trained: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    run = told(capsys, "inspect", "small")
    assert (run["version"], run["versions"], run["waiting"]) == (3, 3, [])
    assert run["trajectories"] == 3 * 2 * 4
    version = told(capsys, "inspect", "small", "2")
    published = trained.policies.find(2)
    assert [StoredObject(**one) for one in version["weights"]] == list(published.weights)
    assert (version["batch"], version["metrics"]) == (1, published.metrics)
    entry = published.batch_entry
    assert entry is not None
    prompt, attempt = trained.batches.read_commit(entry).groups[0].key.prompt, 0
    group = told(capsys, "inspect", "small", f"{prompt}.{attempt}")
    assert [one["sample"] for one in group["trajectories"]] == [0, 1, 2, 3]
    one = told(capsys, "inspect", "small", f"{prompt}.{attempt}.3")["trajectories"]
    assert one == group["trajectories"][3:]
    assert len(one[0]["tokens"]) == len(one[0]["logprobs"]) == len(one[0]["versions"])


@pytest.mark.parametrize("what", ["9", "1.7", "0.0.9", "x"])
def test_json_option_refuses_missing_runs_and_versions(
    trained: RunContext, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "inspect", "small", what)
    assert refused(capsys, "inspect", "small", what, "--json") == said


def test_gc_prints_json(trained: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    claim = trained.log.state.newest_claim("learner")
    trained.store.put(f"policies/00000002/{claim}/left", b"left")
    # a new learner has taken the role: objects of the earlier learner that the log never named are garbage
    trained.log.claim("learner")
    found = told(capsys, "gc", "small", "--older-than", "0s", "--dry-run")
    assert (found["bytes"], len(found["objects"]), found["deleted"]) == (4, 1, False)
    again = told(capsys, "gc", "small", "--older-than", "0s")
    assert [one["path"] for one in again["objects"]] == [one["path"] for one in found["objects"]]
    assert told(capsys, "gc", "small", "--older-than", "0s")["objects"] == []


def test_replay_prints_json(trained: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of `replay --json` has one line for each version and no notes."""
    assert main(["replay", "small", "--all", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["version"], line["identical"]) for line in lines] == [(1, True), (2, True), (3, True)]
    weights = {one.sha256 for one in trained.policies.find(3).weights}
    assert set(lines[-1]["sha256"].values()) == weights
