"""Tests that `rollflow audit` prints one sentence and no traceback if the first config in a run's log is damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollflow.flows.commands.cli import main
from rollflow.storage.audit.audit import audit
from rollflow.storage.log.entries import RunCreated
from rollflow.storage.objects.local import LocalStore
from rollflow.tasks.run.context import FORMAT
from tests.support.log_runs import Actors, changed, sha256_of


def audited(folder: Path, **wrong: object) -> int:
    """Return the exit code of an audit of a run. The first config in its log is changed, and the log's hashes are
    recomputed.
    """
    store = LocalStore(folder / "odd")
    Actors.begin(store).train(3)

    def other(body: RunCreated) -> RunCreated:
        config = {**body.config, **wrong}
        return replace(body, config=config, config_sha256=sha256_of(config), format=FORMAT)

    changed(store, 0, other)
    return main(["audit", store.uri])


def test_audit_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = LocalStore(tmp_path / "odd")
    Actors.begin(store).train(3)
    changed(store, 0, lambda body: replace(body, format=FORMAT))
    expected = audit(store)
    assert main(["audit", store.uri, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["clean"], found["versions"], found["violations"]) == (True, 3, [])
    assert found["staleness"] == {str(age): count for age, count in expected.staleness.items()}
    assert found["fates"] == dict(expected.fates)


@pytest.mark.parametrize("wrong", [{"group_size": 0}, {"store": {"keep_every": 0}}, {"store": None}], ids=str)
def test_audit_of_an_unreadable_config_is_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: dict[str, object]
) -> None:
    assert audited(tmp_path, **wrong) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("rollflow: ")
    assert "nothing is known about the run in " in line


@pytest.mark.parametrize("rollout", [None, "[/red]", {"redundant_responses": "[bold]"}], ids=str)
def test_audit_reports_an_incomplete_config_as_a_violation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rollout: object
) -> None:
    assert audited(tmp_path, rollout=rollout) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert "1 violations" in out
    assert f"rollout = {rollout!r}" in " ".join(out.split())
