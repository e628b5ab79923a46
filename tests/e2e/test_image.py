"""Tests that the steps of `infra/Dockerfile`, executed in a clean Debian, build an image in which rollflow trains."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.dockerfile import Root
from tests.support.machines import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.soak]

RUN = (
    "rollflow run flows/recipes/sorting.toml --run-id image --set engine.kind=transformers --set versions=3 "
    "--set groups=8 --set policy.cold_start.target_accuracy=0.01 --set policy.cold_start.evaluate_every=5 "
    "--set evaluation.prompts=8"
)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Root]:
    """Build the target `cpu` with this machine's pip settings (a mirror, a folder of wheels)."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("a clean root needs root and `debootstrap` (Debian's package)")
    folder = Path(os.environ.get("ROLLFLOW_IMAGE_ROOT", "") or tmp_path_factory.mktemp("image") / "root")
    wheels = Path(os.environ.get("PIP_FIND_LINKS") or tmp_path_factory.mktemp("wheels"))
    told = {name: value for name, value in os.environ.items() if name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")}
    if [*wheels.glob("torch-*cpu*.whl")]:
        told["PIP_EXTRA_INDEX_URL"] = ""  # pip must take the CPU build of torch from the folder of wheels
    root = Root(folder, REPOSITORY, {"wheels": wheels}, told)
    root.build(REPOSITORY / "infra" / "Dockerfile", "cpu")
    yield root
    shutil.rmtree(folder)


def test_run_in_the_container_image_passes_the_audit(image: Root) -> None:
    assert image.user == "rollflow"
    checks = {check["name"]: check for check in json.loads(image.run("rollflow doctor --json"))}
    assert checks["engine"]["found"].startswith("vllm 0.")
    assert all(check["outcome"] != "missing" for check in checks.values()), checks
    said = image.run(f"export OMP_NUM_THREADS=1; {RUN}; rollflow audit image --deep")
    print(said[-2000:])
    assert "clean" in said


def test_container_image_contains_the_service_commands(image: Root) -> None:
    """Compose and Kubernetes start these commands by name."""
    for command in ("prefect version", "mlflow --version", "ray --version", "python infra/bucket.py --help"):
        image.run(command)
    image.run("python -c 'import psycopg2, asyncpg, boto3'")
    assert image.run("stat --format %U /home/rollflow/home").strip() == "rollflow"
