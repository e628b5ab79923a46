"""Tests that `make audit-pins` reports the result of pip-audit, that it fails if PyPI does not answer, and that `make
sbom` lists the pins.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.machines import REPOSITORY

INFRA = REPOSITORY / "infra"
CLEAN = {"name": "attrs", "version": "26.1.0", "vulns": []}
HOLED = {
    "name": "flask",
    "version": "0.5",
    "vulns": [{"id": "PYSEC-2019-179", "fix_versions": ["1.0"], "aliases": [], "description": "memory"}],
}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.13.0)"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit_pins", INFRA / "audit_pins.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("packages", "code", "lines"),
    [
        ([CLEAN], 0, ["1 pins audited, 0 advisories"]),
        ([CLEAN, HOLED], 1, ["flask 0.5: PYSEC-2019-179; fixed in 1.0", "2 pins audited, 1 advisories"]),
        ([CLEAN, SKIPPED], 0, ["1 pins audited, 0 advisories", "not known to PyPI, so not audited: torch"]),
        (
            [SKIPPED],
            2,
            [
                "PyPI answered for none of 1 pins, as a mirror does that has no advisories; "
                "run `make audit-pins` where PyPI itself answers"
            ],
        ),
    ],
    ids=["clean", "vulnerable", "partly unknown", "nothing known"],
)
def test_pip_audit_result_is_reported(
    script: ModuleType, packages: list[dict[str, object]], code: int, lines: list[str]
) -> None:
    answer = json.dumps({"dependencies": packages, "fixes": []})
    assert script.judge(answer, "") == (code, lines)


def test_unreachable_registry_gets_a_one_sentence_error(script: ModuleType) -> None:
    errors = "Traceback (most recent call last):\nConnectionError: Failed to resolve 'pypi.org'\n"
    code, [line] = script.judge("", errors)
    assert code == 2
    assert line.startswith("no advisories could be read (ConnectionError: Failed to resolve 'pypi.org'); run ")


def test_every_file_of_pinned_versions_is_audited(script: ModuleType) -> None:
    assert set(script.PINS) == set(INFRA.glob("constraints-*.txt"))


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the repository in which no make target was called yet, with only the files that the tested targets
    need.
    """
    shutil.copytree(INFRA, tmp_path / "infra")
    for name in ("Makefile", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    return tmp_path


def make(clone: Path, target: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call a make target in the clone."""
    command = ["make", target, f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=clone, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.long
def test_make_targets_report_an_unreachable_registry(clone: Path) -> None:
    alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(clone)}
    done = make(clone, "audit-pins", **alone)
    assert done.returncode == 2
    assert "nothing was audited or listed: no package registry gave the tools of infra/constraints-audit.txt" in (
        done.stderr
    )
    assert not (clone / ".venv-audit" / ".installed").exists(), "the next call must try again"


@pytest.mark.soak
def test_make_targets_list_and_audit_the_pinned_versions(clone: Path) -> None:
    """A local registry serves the tools. They validate the SBOMs against CycloneDX's schema, and report that PyPI does
    not answer.
    """
    listed = make(clone, "sbom")
    assert listed.returncode == 0, listed.stderr
    for name in ("cpu", "gpu"):
        bom = json.loads((clone / f"dist/sbom-{name}.json").read_text())
        assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
        assert bom["metadata"]["component"]["name"] == "rollflow"
        known = {component["purl"].removeprefix("pkg:pypi/").partition("?")[0] for component in bom["components"]}
        assert known == pins(INFRA / f"constraints-{name}.txt")
    audited = make(clone, "audit-pins", HTTPS_PROXY="http://127.0.0.1:1", https_proxy="http://127.0.0.1:1")
    assert audited.returncode == 2
    assert audited.stdout.startswith("constraints-cpu.txt: no advisories could be read (")
    assert audited.stdout.rstrip().endswith("run `make audit-pins` where PyPI answers")
    assert "Error 2" in audited.stderr


def pins(file: Path) -> set[str]:
    """The pins of a file, as package URLs write them."""
    lines = [line.partition("#")[0].partition(";")[0].strip() for line in file.read_text().splitlines()]
    pairs = [line.partition("==") for line in lines if "==" in line]
    return {f"{name.partition('[')[0].replace('_', '-').lower()}@{version}" for name, _, version in pairs}
