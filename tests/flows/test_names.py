"""Tests that a run id from outside never leads to a file outside of the store or the run home."""

from __future__ import annotations

import inspect
from pathlib import Path

import jsonschema
import pytest
from pydantic import TypeAdapter, ValidationError

from rollflow.flows.commands.cli import main
from rollflow.flows.locations import attach_run, context_of, find_run
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import entry_path
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.names import LONGEST, RecipeName, RunId, RunPlace
from tests.support.described import describe

RECIPE = "flows/recipes/sorting.toml"
BAD = [
    "../../x",
    "..",
    ".",
    "...",
    ".hidden",
    "",
    "a/b",
    "a\\b",
    "/etc",
    "a b",
    "a\n",
    "a\x00b",
    "a\x1b[2J",
    "a'; drop",
    "ａ",  # a full-width letter
    "a\u202eb",
    "-rf",
    "x" * (LONGEST + 1),
]
GOOD = ["a", "7", "arithmetic-20260101-000000", "A.b_c-1", "a..b", "x" * LONGEST]


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a run home three folders deep; return the outer folder, which must contain nothing else."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "a/b/home"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(
        "rollflow.flows.commands.run.drive", lambda context: pytest.fail(f"{context} would have been run")
    )
    return tmp_path


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", [name for name in BAD if "\x00" not in name])
def test_run_refuses_a_bad_run_id(name: str, outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", RECIPE, f"--run-id={name}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("rollflow: run id = ")
    assert "letters, digits" in line
    assert files(outside) == []


@pytest.mark.parametrize("command", ["resume", "status", "inspect", "replay", "gc", "audit", "plan"])
@pytest.mark.parametrize("name", ["..", ".", "", "../..", "../../x/..", "a\n", "s3://bucket/runs/..", "memory://x/.."])
def test_every_command_refuses_a_bad_run_id(
    command: str, name: str, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", RECIPE, "--from-run", name] if command == "plan" else [command, name]
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "run id = " in line
    assert files(outside) == []


@pytest.mark.parametrize("name", BAD)
def test_run_context_refuses_a_bad_run_id(name: str) -> None:
    with pytest.raises(ConfigError, match="run id = "):
        context_of("store", name)
    last = name.rpartition("/")[2]
    if last in BAD:
        with pytest.raises(ConfigError, match="run id = "):
            attach_run(f"store/runs/{last}" if last else "/")


@pytest.mark.parametrize("name", GOOD)
def test_paths_of_a_run_stay_inside_run_home_and_store(name: str, outside: Path) -> None:
    context = context_of(str(outside / "store"), name)
    assert context.uri == f"{outside}/store/runs/{name}"
    assert context.cache.resolve().is_relative_to(outside / "a/b/home")
    assert attach_run(context.uri + "/") == context


def described(context: RunContext, run_id: str = "same") -> RunContext:
    describe(context.store, run_id)
    return context


def test_run_id_that_is_read_from_storage_is_checked(outside: Path) -> None:
    context = described(context_of(str(outside / "store"), "run"), run_id="../../x")
    with pytest.raises(ConfigError, match=r"run id = '\.\./\.\./x'"):
        _ = context.run_id


def test_runs_with_equal_ids_have_different_run_keys(outside: Path) -> None:
    """The two runs are in two stores, in one store that was emptied between them, or in buckets of the same name at two
    services.
    """
    first, second = (described(context_of(str(outside / store), "same")) for store in ("one", "two"))
    third = described(context_of(str(outside / "one"), "other"))
    keys = {context.key for context in (first, second, third)}
    assert attach_run(f"{first.uri}/").key in keys
    first.store.delete(entry_path(0))
    keys.add(described(context_of(str(outside / "one"), "same")).key)
    assert len(keys) == 4
    assert all(key.startswith("same-") for key in keys)


def test_run_key_does_not_depend_on_the_spelling_of_its_uri(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key identifies the run's actors, deployments and MLflow run."""
    run = described(context_of(str(outside / "store"), "same"))
    (outside / "link").symlink_to(outside / "store")
    monkeypatch.chdir(outside)
    places = ("store/runs/same", "./link/runs/same/", f"{outside}/link/../store/runs/same", f"file://{run.uri}")
    assert {find_run(place).key for place in places} == {run.key}
    # The URI that other processes get is valid in their folders, too.
    assert {find_run("store/runs/same").uri, find_run("same", "store").uri} == {run.uri}


@pytest.mark.parametrize("name", BAD)
def test_prefect_forms_refuse_a_bad_run_id(name: str) -> None:
    """The Prefect server rejects a bad run id by the form's schema (HTTP 409), and the flow rejects it, too."""
    for kind in (RunId, RecipeName):
        adapter = TypeAdapter(kind)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(name, adapter.json_schema())
        with pytest.raises(ValidationError):
            adapter.validate_python(name)


@pytest.mark.parametrize("name", GOOD)
def test_prefect_forms_accept_a_valid_run_id(name: str) -> None:
    for kind, value in ((RunId, name), (RunPlace, name), (RunPlace, f"s3://bucket/a b/runs/{name}")):
        jsonschema.validate(value, TypeAdapter(kind).json_schema())
        assert TypeAdapter(kind).validate_python(value) == value


@pytest.mark.parametrize("place", ["..", "a/..", "s3://bucket/runs/.", "", "/", "a/b\n"])
def test_prefect_forms_refuse_a_uri_without_run_id(place: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(place, TypeAdapter(RunPlace).json_schema())
    with pytest.raises(ValidationError):
        TypeAdapter(RunPlace).validate_python(place)


@pytest.mark.slow
def test_every_flow_uses_checked_parameter_types() -> None:
    """The form of every flow rejects any bad run name or URI."""
    from rollflow.flows.deployments import FLOWS

    seen = []
    for flow in FLOWS:
        for name in set(inspect.signature(flow.fn).parameters) & {"run_id", "run", "storage"}:
            schema = flow.parameters.model_dump()["properties"][name]
            seen.append(f"{flow.name}.{name}")
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate("../../..", schema)
    assert len(seen) == 6, seen
