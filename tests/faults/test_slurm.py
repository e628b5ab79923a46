"""`infra/slurm/rollflow.sbatch` on two machines: a preempted job goes on with its run when it starts again."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines import BUCKET, REPOSITORY, Machine, Machines, why_not
from tests.support.prefect_home import give
from tests.support.slurm import Job
from tests.support.waiting import HANG_SECONDS, RUN_SECONDS, until

pytestmark = [pytest.mark.slow, pytest.mark.soak]

SCRIPT = REPOSITORY / "infra" / "slurm" / "rollflow.sbatch"
RUN = "store/runs/rollflow-4711"
GRACE_SECONDS = HANG_SECONDS  # on a quiet machine a third of the 120 s for which `--signal` asks
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
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


def end_in_order(job: Job) -> None:
    """Wait until the script has ended by itself and asked to be queued again; then end its job."""
    try:
        until(lambda: job.process.poll() is not None, GRACE_SECONDS)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{said(job.nodes)}") from None
    assert job.asked_to_requeue(), said(job.nodes)
    job.end()


def test_preempted_job_resumes_its_run(nodes: tuple[Machines, list[Machine]]) -> None:
    """It is warned; then its steps get SIGTERM; then all of it is killed. Each time it starts again elsewhere."""
    machines, found = nodes
    job = Job(SCRIPT, ["recipe.toml"], found, ROLLFLOW_STORE=f"s3://{BUCKET}/store")
    assert {"--requeue", "--open-mode=append", "--signal=B:TERM@120"} <= job.options
    job.start()
    reach(machines, job, 2)
    job.warn()
    end_in_order(job)
    assert re.search(r"stopped at version \d+; audit: clean", said(job.nodes)), said(job.nodes)
    job.start()
    reach(machines, job, 5)
    job.end_steps()
    end_in_order(job)
    job.start()
    reach(machines, job, 8)
    job.end()
    assert not job.asked_to_requeue()
    job.start()
    until(lambda: job.process.poll() is not None, RUN_SECONDS)
    assert job.process.returncode == 0, said(job.nodes)
    audit = job.nodes[0].start(["rollflow", "audit", f"s3://{BUCKET}/{RUN}", "--deep"], PATH=PATH)
    assert audit.wait(RUN_SECONDS) == 0, said(job.nodes)


def test_cancelled_job_is_not_queued_again(nodes: tuple[Machines, list[Machine]]) -> None:
    """`scancel` sends SIGTERM, too; by then the job is not RUNNING any more."""
    machines, found = nodes
    job = Job(SCRIPT, ["recipe.toml"], found, ROLLFLOW_STORE=f"s3://{BUCKET}/store")
    job.start()
    reach(machines, job, 1)
    for node in found:
        node.path(node.home / "state").write_text("COMPLETING")
    job.warn()
    until(lambda: job.process.poll() is not None, GRACE_SECONDS)
    assert not job.asked_to_requeue(), said(found)
