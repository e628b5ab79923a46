"""Tests the script `infra/slurm/rollflow.sbatch` on two nodes of a real Slurm: however a job ends, its run can
continue.

The nodes are simulated machines in namespaces with a shared folder, and the run's store is S3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.machines import BUCKET, REPOSITORY, Machines
from tests.support.prefect_home import give
from tests.support.slurm import Slurm, why_not
from tests.support.waiting import HANG_SECONDS, RUN_SECONDS, until

pytestmark = [pytest.mark.slow, pytest.mark.soak]

SCRIPT = str(REPOSITORY / "infra" / "slurm" / "rollflow.sbatch")
STORE = {"ROLLFLOW_STORE": f"s3://{BUCKET}/store"}
RECIPE = """
name = "preempted"
versions = 16
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
max_concurrent_requests = 16
max_new_tokens = 8

[evaluation]
prompts = 8
every = 0
"""


class Job:
    """A Slurm job of the script, and the run of the job."""

    def __init__(self, machines: Machines, slurm: Slurm, number: str, run: str = "") -> None:
        self.machines, self.slurm, self.number, self.run = machines, slurm, number, run or f"rollflow-{number}"

    def version(self) -> int:
        """Return the newest version in the run's storage, or -1 before the run has begun."""
        keys = self.machines.objects(f"store/runs/{self.run}/policies")
        staged = {int(key.split("/policies/")[1].split("/")[0]) for key in keys}
        return max(staged, default=0) - 1  # a version is staged after the previous version is published

    def reach(self, version: int) -> None:
        """Wait until the run has reached this version."""

        def reached() -> bool:
            assert self.slurm.job(self.number)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
            return self.version() >= version

        self._wait(reached, f"version {version}")

    def restarted(self, times: int) -> None:
        """Wait until Slurm has restarted the job `times` times."""

        def running() -> bool:
            now = self.slurm.job(self.number)
            assert now["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED"), now["JobState"]
            return now["JobState"] == "RUNNING" and int(now["Restarts"]) == times

        self._wait(running, f"restart {times}")

    def ended(self, state: str) -> None:
        """Wait until the job has ended in this state."""
        self._wait(lambda: self.slurm.job(self.number)["JobState"] == state, state)

    def _wait(self, reached: object, what: str) -> None:
        try:
            until(reached, RUN_SECONDS)  # type: ignore[arg-type]
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}; {self.slurm.job(self.number)}\n{self.slurm.output()}") from None


@pytest.fixture
def cluster(prefect_database: Path) -> Iterator[tuple[Machines, Slurm]]:
    if reason := why_not():
        pytest.skip(reason)
    with Machines() as machines:
        slurm = Slurm(machines)
        slurm.path("recipe.toml").write_text(RECIPE)
        give(prefect_database, slurm.path(".rollflow"))
        yield machines, slurm


def test_requeued_slurm_job_continues_its_run(cluster: tuple[Machines, Slurm]) -> None:
    """The job is preempted, requeued by an operator, and cancelled; then another job continues the run."""
    machines, slurm = cluster
    job = Job(machines, slurm, slurm.submit(SCRIPT, "recipe.toml", **STORE))
    job.reach(2)
    urgent = slurm.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 5")
    job.restarted(1)
    assert slurm.job(urgent)["JobState"] == "COMPLETED"
    job.reach(5)
    slurm.run("scontrol", "requeue", job.number)
    job.restarted(2)
    job.reach(8)
    slurm.run("scancel", job.number)
    job.ended("CANCELLED")
    until(lambda: slurm.run("squeue", "--noheader") == "", HANG_SECONDS)  # Slurm did not requeue the job
    last = Job(machines, slurm, slurm.submit(SCRIPT, "recipe.toml", ROLLFLOW_RUN=job.run, **STORE), job.run)
    last.ended("COMPLETED")
    assert last.version() + 1 >= 16
    slurm.run("rollflow", "audit", job.run, "--deep", **STORE)
    print(slurm.path(f"slurm-{job.number}.out").read_text()[-6000:])


def test_slurm_job_continues_after_the_loss_of_a_node(cluster: tuple[Machines, Slurm]) -> None:
    machines, slurm = cluster
    job = Job(machines, slurm, slurm.submit(SCRIPT, "recipe.toml", **STORE))
    job.reach(2)
    lost = next(node for node in slurm.nodes if node.name != slurm.job(job.number)["BatchHost"])
    for process in lost.processes():
        if "munged" not in process.name() and "slurmctld" not in process.name():
            with contextlib.suppress(psutil.Error):
                process.kill()
    until(lambda: slurm.job(job.number)["JobState"] != "RUNNING", HANG_SECONDS)
    slurm.start_daemon(lost)
    job.restarted(1)
    job.ended("COMPLETED")
    slurm.run("rollflow", "audit", job.run, "--deep", **STORE)
