"""Tests of environments in another Python interpreter, and of the check before a run."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollflow.storage.errors import ConfigError
from rollflow.tasks.environments.config import GymnasiumEnvironment, TrlEnvironment
from rollflow.tasks.environments.foreign.check import check_environment
from rollflow.tasks.environments.guest import boot
from tests.environments.worlds import GUESTS, call, gym, play, trl

GUEST = Path(boot.__file__).parent
OLDEST = (3, 9)


def find_interpreters() -> list[str]:
    """Return interpreters on this machine, from the oldest one that the guest supports."""
    beside = sorted(map(str, Path(sys.base_prefix).parent.glob("*3.*/bin/python3")))  # as pyenv installs them
    named = [shutil.which(f"python3.{minor}") for minor in range(9, 15)]
    asked = "import sys; sys.exit(not (3, 9) <= sys.version_info < (3, 15) or sys.version_info[:2] == (3, 11))"
    return [
        path
        for path in [*beside, *named]
        if path and subprocess.run([path, "-c", asked], capture_output=True, check=False).returncode == 0
    ]


@pytest.mark.parametrize("file", [*GUEST.glob("*.py"), *GUESTS.glob("*.py")], ids=lambda file: file.name)
def test_guest_code_is_valid_in_the_oldest_python(file: Path) -> None:
    tree = ast.parse(file.read_text(), feature_version=OLDEST)
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    from sys import stdlib_module_names

    others = {
        name
        for name in names
        if name.split(".")[0] not in {*stdlib_module_names, "gymnasium", "odd_worlds", "textworld"}
    }
    assert all(name.startswith("rollflow.tasks.environments.guest.") for name in others)


@pytest.mark.parametrize("config", [trl("Counter"), gym()], ids=["trl", "gymnasium"])
def test_environment_runs_in_other_interpreters(config: Any) -> None:
    interpreters = find_interpreters()
    if not interpreters:
        pytest.skip("this machine has no other Python")
    for python in interpreters:
        other = config.model_copy(update={"interpreter": python})
        score, _, _ = play(other, call("add", number=3) if config.kind == "trl" else "1", "1", "1")
        assert score is not None
        assert score.value == (1.0 if config.kind == "trl" else 6.0), score.reason


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"name": "Missing"},
            r"path = 'odd_worlds:Missing': the import of the environment failed with AttributeError.*; correct the env",
        ),
        ({"name": "X", "module": "nowhere"}, r"ModuleNotFoundError: No module named 'nowhere'; install the module for"),
        ({"name": "X", "module": "slow_worlds", "start_seconds": 1.0}, r"more than start_seconds = 1; allow more sec"),
        ({"name": "Untyped"}, r"the argument where of the tool look has no type; annotate the argument"),
        ({"name": "Counter", "options": {"no": 1}}, r"open failed with TypeError.*'no'; correct the environment or"),
        ({"name": "Bad", "options": {"wrong": "hang", "where": "init"}, "setup_seconds": 1.0}, "setup_seconds = 1 s"),
        (
            {"name": "Counter", "interpreter": "/no/python"},
            r"environment.interpreter = '/no/python': there is no such program",
        ),
    ],
)
def test_environment_check_explains_a_refusal_in_one_sentence(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        check_environment(trl(**keys))
    assert "\n" not in str(refused.value)


def test_environment_check_accepts_working_environments() -> None:
    check_environment(trl("Counter"))
    check_environment(gym())


def test_environment_check_names_the_missing_library(tmp_path: Path) -> None:
    interpreters = find_interpreters()
    if not interpreters:
        pytest.skip("this machine has no other Python")
    config = GymnasiumEnvironment(id="FrozenLake-v1", interpreter=interpreters[0])
    with pytest.raises(ConfigError, match=r'install it with pip install "rollflow\[environments\]"'):
        check_environment(config)


@pytest.mark.parametrize(
    ("section", "keys", "words"),
    [
        (TrlEnvironment, {"path": "a:B", "interpreter": "python3"}, "write an absolute path"),
        (TrlEnvironment, {"path": "a:B", "folder": "here"}, "write an absolute path"),
        (GymnasiumEnvironment, {}, "exactly one of id and path"),
        (GymnasiumEnvironment, {"id": "a", "path": "a:B"}, "exactly one of id and path"),
        (GymnasiumEnvironment, {"id": "a", "act": "a:b", "actions": {"go": 1}}, "remove one of the two keys"),
    ],
)
def test_error_about_a_wrong_key_says_how_to_fix_it(section: Any, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        section(**keys)
