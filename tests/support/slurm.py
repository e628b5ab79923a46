"""Runs Slurm on simulated machines, with a controller, a daemon on each machine, and a shared disk at /mnt.

    low   a partition whose jobs are preempted, with a grace period
    high  a partition whose jobs preempt those of low

The module needs Debian's slurmctld, slurmd and munge. Processes are tracked by their parents, because there are no
cgroups.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.machines import REPOSITORY, Machine, Machines
from tests.support.machines import why_not as why_no_machines
from tests.support.waiting import HANG_SECONDS, until

FOLDER = Path("/mnt/work")  # jobs are submitted here, on the disk that all nodes share
CONF = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/tmp/munge.sock,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation=/tmp/slurm/state
SlurmdSpoolDir=/tmp/slurm/spool
SlurmctldPidFile=/tmp/slurm/slurmctld.pid
SlurmdPidFile=/tmp/slurm/slurmd.pid
ReturnToService=2
SlurmdTimeout=30
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=1,sched_interval=5
NodeName={nodes} CPUs=2 State=UNKNOWN
PartitionName=low Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=10
"""
GRACE_SECONDS = 180  # a long grace period, because test machines are slow


def why_not() -> str:
    """Return why Slurm cannot run here; "" if it can."""
    for tool in ("slurmctld", "slurmd", "munged"):
        if shutil.which(tool) is None:
            return f"no `{tool}` (Debian's packages slurmctld, slurmd and munge)"
    return why_no_machines()


class Slurm:
    """A cluster of two nodes on `machines`. It ends with the machines."""

    def __init__(self, machines: Machines) -> None:
        machines.share_disk()
        self.nodes = [machines.machine(name) for name in ("n1", "n2")]
        names = ",".join(node.name for node in self.nodes)
        conf = CONF.format(controller=self.nodes[0].name, nodes=names, grace=GRACE_SECONDS)
        self.path().mkdir()
        key = secrets.token_bytes(64)
        for node in self.nodes:
            node.know({other.name: other.address for other in self.nodes})
            for name in ("state", "spool"):
                node.path(f"/tmp/slurm/{name}").mkdir(parents=True)
            node.path("/tmp/slurm.conf").write_text(conf)
            node.path("/tmp/munge.key").write_bytes(key)
            node.path("/tmp/munge.key").chmod(0o400)
            places = [f"--{kind}-file=/tmp/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
            self._start(node, ["munged", "--force", "--foreground", "--socket=/tmp/munge.sock", *places])
        until(lambda: all(node.path("/tmp/munge.sock").exists() for node in self.nodes))
        self._start(self.nodes[0], ["slurmctld", "-D", "-i", "-f", "/tmp/slurm.conf"])
        for node in self.nodes:
            self.start_daemon(node)
        until(lambda: self.run("sinfo", "--noheader", "--format=%T %D", "--partition=low").split() == ["idle", "2"])

    def start_daemon(self, node: Machine) -> None:
        """Start slurmd on a node, for the first time or after the node was lost."""
        self._start(node, ["slurmd", "-D", "-f", "/tmp/slurm.conf", "-N", node.name])

    def path(self, name: str = "") -> Path:
        """Return the path under which a file of the shared folder can be read from here."""
        return self.nodes[0].path(FOLDER / name)

    def run(self, *command: str, **environment: str) -> str:
        """Run a command of Slurm on the first node, in the shared folder. The command must succeed."""
        inside = ["nsenter", "--target", str(self.nodes[0].pid), "--net", "--mount", "--pid", f"--wdns={FOLDER}", "--"]
        done = subprocess.run(
            [*inside, *command],
            env=self._environment() | environment,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *command: str, **environment: str) -> str:
        """Submit a job with `sbatch`, and return its number."""
        return self.run("sbatch", "--parsable", *command, **environment).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`: JobState, Restarts, BatchHost and so on."""
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self) -> str:
        """Return the ends of the output of jobs and daemons."""
        files = sorted(self.path().glob("slurm-*.out"))
        parts = [(file.name, file.read_text(errors="replace").splitlines()[-80:]) for file in files]
        parts += [(node.name, node.output(40).splitlines()) for node in self.nodes]
        return "\n".join(line for name, lines in parts for line in (f"--- {name}", *lines))

    def _start(self, node: Machine, command: Sequence[str]) -> None:
        named = ["unshare", "--uts", "sh", "-c", f'hostname {node.name}; exec "$@"', "sh", *command]
        node.start(named, SLURM_CONF="/tmp/slurm.conf")

    def _environment(self) -> Mapping[str, str]:
        """Prepare the environment of a user on a login node: a virtual environment with rollflow, and credentials."""
        person: dict[str, Any] = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HOME": str(FOLDER),
            "SLURM_CONF": "/tmp/slurm.conf",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY / ".dev"), str(REPOSITORY)]),
            "OMP_NUM_THREADS": "1",
        }
        return person | self.nodes[0].credentials
