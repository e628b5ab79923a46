"""Tests the examples of docs/own_parts.md as a user runs them: with pytest, in a separate folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rollflow.flows.config import parse_config
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.user_code import check_own_parts
from tests.support.user_code import FOLDER, put_in_reach
from tests.support.waiting import HANG_SECONDS

pytest_plugins = ["pytester"]

QUIET = ("-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/own_parts.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
EXAMPLES = {match[1]: block for block in BLOCKS if (match := re.search(r"from rollflow\.testing\.(\w+) import", block))}
SLOW = ("engines", "learners")
KINDS = [pytest.param(kind, marks=[pytest.mark.soak] if kind in SLOW else []) for kind in EXAMPLES]


def test_every_contract_suite_has_an_example() -> None:
    suites = {file.stem for file in (ROOT / "tests/contracts/testing").glob("*.py")} - {"__init__", "bounds"}
    assert EXAMPLES.keys() == suites


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_example_part_passes_its_contract_test_suite(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    put_in_reach(monkeypatch, FOLDER)
    pytester.makepyfile(test_mine=EXAMPLES[kind])
    counts = pytester.inline_run(*QUIET).countoutcomes()
    assert counts[0] >= 7, counts
    assert counts[2] == 0, counts


def test_source_and_environment_of_the_page_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block for block in BLOCKS if "(QuestionSource)" in block or "(Environment)" in block]
    assert len(blocks) == 2
    (tmp_path / "guessing_numbers.py").write_text("\n\n".join(blocks))
    put_in_reach(monkeypatch, tmp_path)
    source = {"kind": "import", "path": "guessing_numbers:Secrets", "name": "secrets"}
    environment = {"kind": "import", "path": "guessing_numbers:Hints"}
    config = parse_config({"prompts": [source], "environment": environment})
    check_own_parts(config)
    questions = RunPrompts(config.prompts, config.seed, config.evaluation.prompts, None, 0, read_file)
    [secrets] = questions.sources
    asked = [*map(secrets.training, range(3)), *secrets.held_out(1)]
    assert len({question.text for question in asked}) == 4
    assert all(question.answer == question.reference["answer"] for question in asked)


@pytest.mark.soak
def test_contract_test_examples_pass_with_the_wheel(tmp_path: Path) -> None:
    """The contract suites come from the wheel. Of the source tree, only the user-defined parts can be imported."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheel")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=HANG_SECONDS)
    [wheel] = (tmp_path / "wheel").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    mine = tmp_path / "mine"
    mine.mkdir()
    for kind, example in EXAMPLES.items():
        (mine / f"test_{kind}.py").write_text(example)
    (mine / "test_wheel.py").write_text(
        "import rollflow.testing\n\n"
        f"def test_suites_are_of_the_wheel():\n    assert rollflow.testing.__file__.startswith({str(tmp_path)!r})\n"
    )
    path = os.pathsep.join(map(str, (tmp_path / "site", FOLDER)))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(mine)],
        cwd=mine,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=4 * HANG_SECONDS,
    )
    assert run.returncode == 0, run.stdout + run.stderr
