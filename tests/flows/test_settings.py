"""Tests that an invalid settings file is refused with key, value and fix, that it must not contain a secret, and that
commands apply it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.cli.settings import VARIABLES, load_settings
from rollflow.storage.errors import ConfigError
from tests.support.s3_server import s3_server, use

RECIPE = str(Path(__file__).parents[2] / "flows" / "recipes" / "sorting.toml")
PLANTED = "planted-4711"


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a run home for the test. Remove the variables that a settings file has set after the test."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))


def written(folder: Path, text: str) -> Path:
    """Write a settings file with this text."""
    file = folder / "settings.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[train]\nlearner = 'torch'", "train is not a section of a settings file, which may contain only"),
        ("store = 's3://b/p'", "store must be a section of the settings file, but it is set to a value; write"),
        ("variables = 1", "variables must be a section of the settings file, but it is set to a value"),
        ("[store]\nurl = 's3://b/p'", "store.url = 's3://b/p': there is no such key; did you mean store.uri?"),
        ("[store]\nkeep_last = 1", "store.keep_last = 1 is less than the minimum of 2"),
        ("[variables]\nRAY_ADDRESS = 'x:1'", "variables.RAY_ADDRESS: rollflow reads no environment variable of"),
        ("[variables]\nPREFECT_URL = 'x'", "no environment variable of this name; did you mean PREFECT_API_URL?"),
        ("[variables]\nRAY_USE_TLS = 1", 'variables.RAY_USE_TLS = 1 is not text; write "1"'),
        ("[tracking]\nuri = 'http://a:planted-4711@h/'", "tracking.uri = 'http://h/' has a password"),
        ("[variables]\nPREFECT_API_URL = 'http://a:planted-4711@h/api'", "_URL = 'http://h/api' has a password"),
        ("[store", "is not valid TOML"),
    ],
)  # fmt: skip
def test_invalid_settings_file_gets_a_one_sentence_error(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, text)
    for verb in (["doctor"], ["check", RECIPE]):
        assert main([*verb, "--settings", str(file)]) == 2
        said = capsys.readouterr().err
        assert sentence in said
        assert str(file) in said
        assert PLANTED not in said


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("RAY_AUTH_TOKEN", "name its file in RAY_AUTH_TOKEN_PATH"),
        *(
            (name, "export it before the command")
            for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "HF_TOKEN")
        ),
        *((name, "export it before the command") for name in ("PREFECT_API_AUTH_STRING", "PREFECT_API_KEY")),
        *((name, "export it before the command") for name in ("PGPASSWORD", "MLFLOW_TRACKING_TOKEN", "TEAM_SECRET")),
    ],
)
def test_settings_file_with_a_secret_is_refused(name: str, instead: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"variables.{name} is a secret.*{instead}") as refused:
        load_settings(written(tmp_path, f"[variables]\n{name} = '{PLANTED}'"))
    assert PLANTED not in str(refused.value)


def test_missing_settings_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--settings", str(tmp_path / "none.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_option_set_wins_over_settings_file_and_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[store]\nuri = "s3://mine/store"\nkeep_last = 7\n[tracking]\nexperiment = "mine"\n')
    home = tmp_path / "other home"
    file = written(
        tmp_path,
        f'[variables]\nROLLFLOW_HOME = "{home}"\n[store]\nuri = "s3://team/store"\n'
        '[cluster]\naddress = "10.0.0.1:6379"\nplacement.engine = { labels = { "ray.io/market-type" = "spot" } }\n'
        '[tracking]\nuri = "http://127.0.0.1:5000"\nexperiment = "a \\"b\\""\n',
    )
    given = ["check", str(recipe), "--offline", "--json", "--settings", str(file), "--set", "tracking.experiment=c"]
    assert main(given) == 0
    config = json.loads(capsys.readouterr().out)
    assert (config["store"]["uri"], config["store"]["keep_last"]) == ("s3://team/store", 7)
    assert config["cluster"]["address"] == "10.0.0.1:6379"
    assert config["cluster"]["placement"]["engine"]["labels"] == {"ray.io/market-type": "spot"}
    assert (config["tracking"]["uri"], config["tracking"]["experiment"]) == ("http://127.0.0.1:5000", "c")
    assert os.environ["ROLLFLOW_HOME"] == str(home)
    assert main(given[:-2]) == 0
    assert json.loads(capsys.readouterr().out)["tracking"]["experiment"] == 'a "b"'


def test_sweep_ignores_settings_for_keys_given_with_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, '[tracking]\nexperiment = "team"\n')
    assert main(["sweep", RECIPE, "--settings", str(file), "--set", "tracking.experiment=mine"]) == 2
    assert "a sweep needs several values or seeds" in capsys.readouterr().err


def test_paths_in_a_settings_file_are_relative_to_the_file(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, "[store]\nuri = 'runs'\n[tracking]\nuri = 'sqlite:///t.db'"))
    assert settings.config.store.uri == str(tmp_path / "runs")
    assert settings.config.tracking.uri == f"sqlite:///{tmp_path}/t.db"


def checked(file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return doctor's report of a settings file, by the name of the check."""
    main(["doctor", "--json", "--settings", str(file)])
    return {check["name"]: check for check in json.loads(capsys.readouterr().out)}


def test_doctor_contacts_every_service_of_the_settings_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(
        tmp_path,
        f'[variables]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\nRAY_AUTH_TOKEN_PATH = "{tmp_path}/token"\n'
        '[store]\nuri = "/proc/none"\n[cluster]\naddress = "127.0.0.1:9"\n[tracking]\nuri = "http://127.0.0.1:9"\n',
    )
    found = checked(file, capsys)
    for name in ("Prefect server", "Ray server", "MLflow server", "store", "RAY_AUTH_TOKEN_PATH"):
        assert found[name]["outcome"] == "missing", name
    (tmp_path / "token").write_text(PLANTED)
    found = checked(file, capsys)
    assert found["RAY_AUTH_TOKEN_PATH"]["outcome"] == "ok"
    assert PLANTED not in json.dumps(found)


def test_doctor_accepts_settings_whose_services_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with s3_server("team") as endpoint:
        use(endpoint, monkeypatch)
        found = checked(written(tmp_path, '[store]\nuri = "s3://team/store"\n'), capsys)
    assert found["store"] == {"name": "store", "outcome": "ok", "found": "s3://team/store"}
    assert found["Ray server"] == {"name": "Ray server", "outcome": "ok", "found": "a private cluster"}
    assert found["MLflow server"]["outcome"] == "ok"
    assert not [name for name, check in found.items() if check["outcome"] == "missing"]
