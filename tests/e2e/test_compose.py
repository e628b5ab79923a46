"""Tests a run on the services of `infra/compose.yaml`, with the commands of the page `docs/cluster/compose.md`."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator

import pytest

from tests.support.compose import Compose, why_not
from tests.support.machines import REPOSITORY
from tests.support.waiting import RUN_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.soak]

PAGE = REPOSITORY / "docs" / "cluster" / "compose.md"
EXEC = "docker compose exec ray "
SMALL = {
    "versions": 5,
    "groups": 8,
    "policy.cold_start.hidden_size": 64,
    "policy.cold_start.layers": 1,
    "policy.cold_start.heads": 2,
    "policy.cold_start.target_accuracy": 0.01,
    "policy.cold_start.evaluate_every": 5,
    "engine.kind": "transformers",
    "evaluation.prompts": 8,
}


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    if reason := why_not():
        pytest.skip(reason)
    with Compose() as services:
        yield services.up()


def commands() -> list[list[str]]:
    """Return the commands that the page runs in the container of the Ray head: doctor, run, audit."""
    block = re.search(r"^```\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert block
    assert block[1].count(EXEC) == 3
    return [
        shlex.split(line.removeprefix(EXEC), comments=True) for line in block[1].splitlines() if line.startswith(EXEC)
    ]


def small(command: list[str]) -> list[str]:
    """Return a command of the page; the command `run` gets settings for a smaller run."""
    more = [f"--set={key}={value}" for key, value in SMALL.items()] if command[1] == "run" else []
    return [*command, *more]


def test_run_completes_on_the_compose_services(compose: Compose) -> None:
    print({name: f"{compose.memory(name) / 2**20:.0f} MiB" for name in compose.services})
    said = ""
    for command in map(small, commands()):
        began = time.monotonic()
        done = compose.execute("ray", command, seconds=RUN_SECONDS)
        print(f"{' '.join(command[:2])}: {time.monotonic() - began:.0f} s\n{done.stdout[-3000:]}")
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{compose.output('ray')}"
        said += done.stdout
    assert "http://prefect:4200/api answers" in said
    assert "s3://rollflow/store/runs/first" in said
    assert "audit clean" in re.sub(r"[│ ]+", " ", said)


def test_ray_rejects_a_client_without_token(compose: Compose) -> None:
    """A client without the token must not be able to run code on the Ray cluster."""
    ask = "import ray; ray.init('ray:6379'); print(ray.nodes())"
    done = compose.execute("ray", ["env", "--unset=RAY_AUTH_TOKEN", "python", "-c", ask], seconds=RUN_SECONDS)
    assert done.returncode != 0
    assert "token" in (done.stdout + done.stderr).lower()
