"""Tests that the source files of environments in worker processes are found and hashed without an import."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

import pytest

from rollflow.tasks.environments.config import GymnasiumEnvironment, TrlEnvironment
from rollflow.tasks.environments.foreign.sources import find_module, hash_sources


@pytest.mark.parametrize(
    ("files", "name", "found"),
    [
        (["a/one.py", "b/one.py"], "one", "a/one.py"),
        (["b/one.py"], "one", "b/one.py"),
        (["a/pack/__init__.py", "a/pack/part.py"], "pack.part", "a/pack/part.py"),
        (["a/pack/__init__.py", "a/pack.py"], "pack", "a/pack/__init__.py"),
        (["a/space/other.py", "b/space/part.py"], "space.part", "b/space/part.py"),
        (["a/one.py"], "two", None),
        (["a/one.py"], "one.two", None),
    ],
)
def test_module_is_found_by_the_rules_of_python(files: list[str], name: str, found: str | None, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("raise RuntimeError('imported')\n")
    assert find_module(name, [tmp_path / "a", tmp_path / "b"]) == (tmp_path / found if found else None)


def test_hash_covers_all_files_of_an_environment(tmp_path: Path) -> None:
    for name in ("worlds", "seeing"):
        (tmp_path / f"{name}.py").write_text(f"# {name}\n")
    alone = TrlEnvironment(path="worlds:World", folder=str(tmp_path))
    assert hash_sources(alone) == sha256(b"# worlds\n").hexdigest()
    config = GymnasiumEnvironment(path="worlds:World", observe="worlds:see", folder=str(tmp_path))
    assert hash_sources(config) == hash_sources(alone)
    other = GymnasiumEnvironment(path="worlds:World", observe="seeing:see", folder=str(tmp_path))
    before = hash_sources(other)
    assert before not in ("", hash_sources(alone))
    (tmp_path / "seeing.py").write_text("# changed\n")
    assert hash_sources(other) not in ("", before)
    (tmp_path / "seeing.py").unlink()
    assert hash_sources(other) == ""
    assert hash_sources(GymnasiumEnvironment(id="FrozenLake-v1")) == ""


def test_modules_of_another_interpreter_are_found(tmp_path: Path) -> None:
    (tmp_path / "worlds.py").write_text("# worlds\n")
    config = TrlEnvironment(path="json:World", interpreter=sys.executable)
    assert hash_sources(config) == hash_sources(TrlEnvironment(path="json:World")) != ""
    missing = TrlEnvironment(path="worlds:World", interpreter="/bin/false", folder=str(tmp_path))
    assert hash_sources(missing) == sha256(b"# worlds\n").hexdigest()
