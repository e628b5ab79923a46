"""A stand-in for Slurm: jobs of one batch script, on machines of namespaces.

What Slurm does for `infra/slurm/rollflow.sbatch` is here: it starts the script on the first node with `SLURM_*` in its
environment, has `srun` start steps on other nodes, sends signals to the script or to its steps, and starts the job
again, on the nodes in another order. Whether the options mean to Slurm what they should is not tested.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.support.machines import REPOSITORY, Machine
from tests.support.waiting import until

TOOLS = Path(__file__).with_name("slurm_tools")


class Job:
    """A job of a batch script."""

    def __init__(self, script: Path, arguments: Sequence[str], nodes: Sequence[Machine], **environment: str) -> None:
        self.script, self.arguments, self.nodes, self.environment = script, arguments, [*nodes], environment
        self.options = set(re.findall(r"^#SBATCH (\S+)$", script.read_text(), re.MULTILINE))
        self.restarts = 0

    def start(self) -> subprocess.Popen[bytes]:
        """Start the script on the first of the nodes."""
        first = self.nodes[0]
        for node in self.nodes:
            node.path(node.home / "requeued").unlink(missing_ok=True)
        self.process = first.start(["bash", str(self.script), *self.arguments], **self._variables())
        return self.process

    def warn(self) -> None:
        """Send SIGTERM to the script alone, as `--signal=B:TERM` asks; its steps go on."""
        (script,) = (process for process in self._processes() if process.cmdline()[:2] == ["bash", str(self.script)])
        script.send_signal(signal.SIGTERM)

    def end_steps(self) -> None:
        """Send SIGTERM to all steps and leave the script alone, as at a preemption with grace."""
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                if "SLURM_STEP_ID" in process.environ():
                    process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """End what is left of the job, as when it is queued again; its next start is on the nodes in another order."""
        until(lambda: self._signal(signal.SIGKILL) == 0)
        self.process.wait()
        self.restarts += 1
        self.nodes.reverse()

    def asked_to_requeue(self) -> bool:
        """Whether the script said `scontrol requeue`."""
        return any(node.path(node.home / "requeued").exists() for node in self.nodes)

    def _processes(self) -> list[psutil.Process]:
        return [process for node in self.nodes for process in node.processes()]

    def _signal(self, number: signal.Signals) -> int:
        found = self._processes()
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        return len(found)

    def _variables(self) -> Mapping[str, str]:
        names = ",".join(node.name for node in self.nodes)
        pids = {f"NODE_{node.name}": str(_inner_pid(node.pid)) for node in self.nodes}
        slurm = {
            "PATH": os.pathsep.join([str(TOOLS), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NAME": "rollflow",
            "SLURM_JOB_NODELIST": names,
            "SLURM_CPUS_ON_NODE": "2",
            **({"SLURM_RESTART_COUNT": str(self.restarts)} if self.restarts else {}),
        }
        return {**slurm, **pids, **self.environment, "SLURM_SUBMIT_DIR": str(REPOSITORY)}


def _inner_pid(pid: int) -> int:
    """A process's id in the innermost process namespace, where the machines live."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^NSpid:.*?(\d+)$", status, re.MULTILINE)
    assert found
    return int(found[1])
