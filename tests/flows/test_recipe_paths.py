"""Tests that paths in a recipe are relative to the recipe's folder, and that paths in `--set` are relative to the
working folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from rollflow.flows import nightly
from rollflow.flows.commands import sweep
from rollflow.flows.commands.cli import main
from rollflow.flows.commands.cli.exit_codes import OK
from rollflow.flows.config import load_recipe, override_config
from rollflow.flows.prepare import prepare
from rollflow.flows.registration.form import form_values
from rollflow.flows.served_recipes import recipes_of
from rollflow.tasks.run.config import RunConfig
from tests.support.refused import refused
from tests.support.small_run import make_policy

RECIPE = """
name = "lying"
versions = 2
groups = 2
group_size = 4
[policy]
path = "policies/tiny"
[[prompts]]
kind = "jsonl"
path = "questions.jsonl"
[engine]
kind = "transformers"
max_new_tokens = 8
[reward]
kind = "exact"
[evaluation]
prompts = 1
[store]
uri = "runs here"
[tracking]
uri = "sqlite:///track.db"
"""


@pytest.fixture
def lying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a recipe and all its files; the command runs in another folder."""
    folder, elsewhere = tmp_path / "a folder", tmp_path / "elsewhere"
    make_policy(folder / "policies" / "tiny")
    lines = (json.dumps({"question": f"{n} + {n}", "answer": str(2 * n)}) for n in range(40))
    (folder / "questions.jsonl").write_text("\n".join(lines))
    (folder / "lying.toml").write_text(RECIPE)
    elsewhere.mkdir()
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(elsewhere)
    return folder


def places(config: RunConfig) -> list[str | None]:
    return [config.policy.path, config.prompts[0].path, config.store.uri, config.tracking.uri]  # type: ignore[union-attr]


def beside(folder: Path) -> list[str]:
    names = ["policies/tiny", "questions.jsonl", "runs here"]
    return [*(str(folder / name) for name in names), f"sqlite:///{folder}/track.db"]


def test_check_finds_files_beside_the_recipe(lying: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for recipe in (lying / "lying.toml", Path("../a folder/lying.toml")):
        assert main(["check", str(recipe), "--json"]) == OK
        assert places(RunConfig.model_validate_json(capsys.readouterr().out.splitlines()[-1])) == beside(lying)
    assert not list(Path.cwd().iterdir())


def test_run_records_absolute_paths_of_its_recipe(lying: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`rollflow run` makes paths absolute before it starts anything, because another command may resume the run from
    another folder.
    """
    context = prepare(load_recipe(Path("../a folder/lying.toml")), "one")
    assert places(context.config) == beside(lying)
    assert context.store.uri == str(lying / "runs here" / "runs" / "one")
    monkeypatch.chdir(tmp_path)
    assert context.prompts().prompt(0).text


def test_deployments_have_absolute_recipe_paths(lying: Path) -> None:
    """The form has the same paths whatever the runner's working folder is."""
    [recipe] = recipes_of(Path("../a folder"))
    assert places(recipe.config) == beside(lying)
    assert form_values(recipe.config)["prompts"][0]["path"] == str(lying / "questions.jsonl")


def test_sweep_and_nightly_have_absolute_recipe_paths(lying: Path, tmp_path: Path) -> None:
    given = argparse.Namespace(recipe=Path("../a folder/lying.toml"), set=["versions=2,3"], seeds=1, study="s")
    assert [places(point.config) for point in sweep.points_of(given)] == [beside(lying)] * 2
    (tmp_path / "night.toml").write_text('name = "night"\nrecipes = ["a folder/lying.toml"]\n')
    [recipe] = nightly.read_nightly(tmp_path / "night.toml").recipes
    assert places(load_recipe(Path(recipe))) == beside(lying)


def test_path_in_option_set_is_relative_to_the_working_folder(lying: Path) -> None:
    here = Path.cwd()
    make_policy(here / "mine" / "tiny")
    sets = ["policy.path=mine/tiny", "prompts.0.path=q.jsonl", "store.uri=s", "tracking.uri=mlruns"]
    config = load_recipe(lying / "lying.toml", sets)
    assert places(config) == [str(here / one) for one in ("mine/tiny", "q.jsonl", "s", "mlruns")]
    same = load_recipe(lying / "lying.toml", ["store.uri=runs here", 'policy={path="mine/tiny"}'])
    assert places(same)[0] == str(here / "mine/tiny")
    assert places(same)[2] == str(here / "runs here")
    assert places(load_recipe(lying / "lying.toml", ["versions=3"])) == beside(lying)


def test_resumed_run_keeps_the_paths_of_its_recipe(lying: Path) -> None:
    recorded = load_recipe(lying / "lying.toml").model_dump(mode="json")
    changed = override_config(recorded, ["tracking.uri=mlruns", "versions=9"])
    assert places(changed) == [*beside(lying)[:3], str(Path.cwd() / "mlruns")]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("policy", "path", "Qwen/Qwen3-8B-Base"),
        ("policy", "path", "/somewhere/policy"),
        ("store", "uri", "s3://bucket/prefix"),
        ("store", "uri", "memory://x"),
        ("tracking", "uri", "http://hub:5000"),
        ("tracking", "uri", "databricks"),
        ("tracking", "uri", "sqlite:////abs/x.db"),
        ("tracking", "uri", "sqlite:///:memory:"),
        ("tracking", "uri", "postgresql://me@hub/x"),
        ("tracking", "uri", "file:///abs"),
    ],
)
def test_names_and_urls_in_a_recipe_are_not_changed_to_paths(
    tmp_path: Path, section: str, key: str, value: str
) -> None:
    recipe = tmp_path / "one.toml"
    text = f'[{section}]\n{key} = "{value}"\n' + ("" if section == "policy" else "[policy.cold_start]\n")
    recipe.write_text(text)
    assert getattr(getattr(load_recipe(recipe), section), key) == value


@pytest.mark.parametrize(
    ("run", "found"),
    [
        ("sums-20260101-120000", "sums-20260101-120000"),
        ("s3://bucket/runs/sums", "s3://bucket/runs/sums"),
        ("/abs/runs/sums", "/abs/runs/sums"),
        ("./sums", "FOLDER/sums"),
        ("store/runs/sums", "FOLDER/store/runs/sums"),
    ],
)
def test_path_of_an_earlier_run_is_relative_to_the_recipe(tmp_path: Path, run: str, found: str) -> None:
    (tmp_path / "one.toml").write_text(f'[policy.from_run]\nrun = "{run}"\n')
    from_run = load_recipe(tmp_path / "one.toml").policy.from_run
    assert from_run is not None
    assert from_run.run == found.replace("FOLDER", str(tmp_path))


def test_tilde_in_a_recipe_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    recipe = tmp_path / "one.toml"
    recipe.write_text('[policy]\npath = "~/policy"\n[tracking]\nuri = "file:~/runs"\n')
    config = load_recipe(recipe)
    assert (config.policy.path, config.tracking.uri) == ("/home/me/policy", "file:///home/me/runs")


def test_policy_in_the_working_folder_is_refused(lying: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A local folder with the name of a hub policy is ambiguous: in another folder, the command would train another
    policy.
    """
    make_policy(Path("my/policy"))
    capsys.readouterr()
    recipe = lying / "lying.toml"
    recipe.write_text(RECIPE.replace("policies/tiny", "my/policy"))
    said = refused(capsys, "check", str(recipe))
    assert said.startswith("policy.path = 'my/policy': the folder is not beside the recipe, in ")
    assert "--set policy.path=my/policy" in said
    assert main(["check", str(recipe), "--set", "policy.path=my/policy", "--json"]) == OK


@pytest.mark.parametrize("tree", ["policy = 3", "prompts = 3", "prompts = [3]", "store = [1]", "[tracking]\nuri = 3"])
def test_malformed_recipe_gets_a_one_sentence_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tree: str
) -> None:
    (tmp_path / "one.toml").write_text(tree)
    assert main(["check", str(tmp_path / "one.toml")]) == 2
    assert "Traceback" not in capsys.readouterr().err
