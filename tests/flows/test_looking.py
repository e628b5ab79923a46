"""Tests the output of `status`, `check --resolved` and `--version`, and which store they read."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from rollflow.flows.commands import check
from rollflow.flows.commands.cli import main
from rollflow.flows.config import load_recipe, parse_config
from rollflow.flows.locations import find_run, list_runs, store_uri
from rollflow.flows.views.status import RunStatus
from rollflow.storage.objects import open_store
from rollflow.storage.objects.base import ObjectStore
from rollflow.tasks.actors.lease import STATUS
from rollflow.tasks.run.config import RunConfig
from tests.support.described import describe

RECIPE = "flows/recipes/sorting.toml"
DONE = RunStatus("first", "done", 100, 100, reward=0.5, accuracy=((0, 0.25), (100, 0.75)))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Make three runs: `first` is done, `second` is prepared, `third` comes from an unknown version of rollflow."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROLLFLOW_STORE", str(tmp_path / "store"))
    for name in ("first", "second", "third"):
        describe(open_store(f"{tmp_path}/store/runs/{name}"), name)
    store = open_store(str(tmp_path / "store"))
    store.put("runs/first/" + STATUS, DONE.to_json().encode())
    store.put("runs/third/log/0000000000.json", b"{}")
    return store


def test_status_all_lists_each_run(runs: ObjectStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--all", "--json"]) == 0
    third, first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["run"], first["state"], first["version"], first["held-out"]) == ("first", "done", 100, 0.75)
    assert (second["run"], second["state"], second["version"]) == ("second", "not started", None)
    assert (third["run"], third["state"]) == ("third", "unreadable")
    assert main(["status", "--all"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (line,) = [line for line in lines if "first" in line]
    assert line[3:] == ["done", "100", "of", "100", "0.500", "0.750"]
    assert lines[-1][:6] == ["third:", "log/0000000000.json", "is", "not", "an", "entry"]


def test_status_all_reports_that_a_store_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--all", "--store", str(tmp_path / "none")]) == 0
    assert "there are no runs yet" in capsys.readouterr().out


def test_runs_are_found_in_an_object_store_without_folders() -> None:
    store = open_store("memory://test-looking")
    for name in ("b", "a"):
        describe(open_store(f"memory://test-looking/runs/{name}"), name)
        store.put(f"runs/{name}/log/0000000001.json", b"")
    assert [run.run_id for run in list_runs("memory://test-looking")] == ["a", "b"]


def test_variable_rollflow_store_names_the_default_store(runs: ObjectStore) -> None:
    assert find_run("first").store.uri == open_store(f"{runs.uri}/runs/first").uri
    assert find_run(None).run_id == "second"  # the newest run that can be read
    assert store_uri(RunConfig()) == runs.uri
    other = RunConfig.model_validate({"store": {"uri": "/elsewhere"}})
    assert store_uri(other) == open_store("/elsewhere").uri


def test_status_prints_json(runs: ObjectStore, capsys: pytest.CaptureFixture[str]) -> None:
    for name, expected in (("first", DONE), ("second", RunStatus("second", versions=100))):
        assert main(["status", name, "--json"]) == 0
        assert RunStatus.from_json(capsys.readouterr().out) == expected


def test_status_watch_ends_with_the_run(
    runs: ObjectStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.put("runs/first/" + STATUS, replace(DONE, phase="training", version=99).to_json().encode())
    monkeypatch.setattr("time.sleep", lambda _: runs.put("runs/first/" + STATUS, DONE.to_json().encode()))
    assert main(["status", "first", "--watch"]) == 0
    seen = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["training", "version 99/100"] in [[one.split("] ")[-1] for one in line] for line in seen]
    assert seen[-1][-1] == "version 100/100"


def test_check_prints_the_whole_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", RECIPE, "--set", "seed=7", "--resolved"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["store"]["keep_last"] == 5  # the default of a key that the recipe does not set
    assert parse_config(printed) == load_recipe(Path(RECIPE), ["seed=7"])


def test_option_version_prints_the_version_of_rollflow(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("rollflow 0.")


def test_interrupted_command_exits_with_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "command", interrupted)
    assert main(["check", RECIPE]) == 130
    assert capsys.readouterr().err == "rollflow: stopped\n"


def test_check_counts_near_duplicates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, recipe = tmp_path / "mine.jsonl", tmp_path / "recipe.toml"
    lines = [" ".join(f"word{i // 2}-{place}" for place in range(20)) + f" and {i}?" for i in range(60)]
    file.write_text("".join(json.dumps({"question": line, "answer": "1"}) + "\n" for line in lines))
    recipe.write_text(
        f'[[prompts]]\nkind = "jsonl"\npath = "{file}"\nheld_out = 0.2\n[policy.cold_start]\n'
        '[engine]\nkind = "transformers"\n'
    )
    assert main(["check", str(recipe)]) == 0
    said = re.search(r"(\d+) of 12 held-out prompts have a near duplicate among", capsys.readouterr().out)
    assert said is not None
    assert int(said[1]) >= 6
