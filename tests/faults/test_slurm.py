"""`infra/slurm/rollflow.sbatch` on two machines: a preempted job goes on with its run when it starts again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines import BUCKET, REPOSITORY, Machine, Machines, why_not
from tests.support.prefect_home import give
from tests.support.slurm import Job
from tests.support.waiting import RUN_SECONDS, until

pytestmark = [pytest.mark.slow, pytest.mark.soak]

SCRIPT = REPOSITORY / "infra" / "slurm" / "rollflow.sbatch"
RUN = "store/runs/rollflow-4711"
GRACE_SECONDS = 90.0  # `--signal=B:TERM@120`
RECIPE = """
name = "preempted"
versions = 12
async_ratio = 2
groups = 8
group_size = 4

[policy.cold_start]
hidden_size = 64
layers = 1
heads = 2
target_accuracy = 0.01
evaluate_every = 5

[engine]
kind = "transformers"
replicas = 2
slots = 16
max_new_tokens = 8

[evaluation]
prompts = 8
every = 0
"""


@pytest.fixture
def nodes(prefect_database: Path) -> Iterator[tuple[Machines, list[Machine]]]:
    if reason := why_not():
        pytest.skip(reason)
    with Machines() as made:
        found = [made.machine(name) for name in ("n1", "n2")]
        for node in found:
            node.know({node.name: node.address for node in found})
            node.path(node.home / "recipe.toml").write_text(RECIPE)
            give(prefect_database, node.path(node.home / ".rollflow"))
        yield made, found


def said(nodes: list[Machine]) -> str:
    """What the jobs and the flows wrote."""
    logs = [path for node in nodes for path in sorted(node.path(node.home / ".rollflow/logs").rglob("*.log"))]
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()[-60:]]
    return "\n".join([*(node.output(80) for node in nodes), *lines])


def reach(machines: Machines, job: Job, version: int) -> None:
    """Wait until the job's run has published a version."""

    def reached() -> bool:
        assert job.process.poll() is None, f"the job ended ({job.process.returncode}):\n{said(job.nodes)}"
        staged = {int(key.split("/policies/")[1].split("/")[0]) for key in machines.objects(f"{RUN}/policies")}
        return max(staged, default=0) > version  # a version is staged once the one before it is published

    try:
        until(reached, RUN_SECONDS)
    except AssertionError as error:
        raise AssertionError(f"version {version}: {error}\n{said(job.nodes)}") from None


def test_preempted_job_resumes_its_run(nodes: tuple[Machines, list[Machine]]) -> None:
    """First with a grace, in which the run ends in order; then at once, as when a node is lost; each time elsewhere."""
    machines, found = nodes
    job = Job(SCRIPT, ["recipe.toml"], found, ROLLFLOW_STORE=f"s3://{BUCKET}/store")
    assert {"--requeue", "--open-mode=append", "--signal=B:TERM@120"} <= job.options
    job.start()
    reach(machines, job, 2)
    job.preempt(GRACE_SECONDS)
    assert job.asked_to_requeue(), said(job.nodes)
    stopped = said(job.nodes)
    assert re.search(r"stopped at version \d+; audit: clean", stopped), stopped
    job.start()
    reach(machines, job, 6)
    job.kill()
    assert not job.asked_to_requeue()
    job.start()
    until(lambda: job.process.poll() is not None, RUN_SECONDS)
    assert job.process.returncode == 0, said(job.nodes)
    audit = job.nodes[0].start(["rollflow", "audit", f"s3://{BUCKET}/{RUN}", "--deep"], PATH=_path())
    assert audit.wait(RUN_SECONDS) == 0, said(job.nodes)
    assert "at alpha" not in said(job.nodes)


def _path() -> str:
    import os
    import sys

    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
