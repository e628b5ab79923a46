"""Finds and kills the processes of one run home by role, for `benchmarks.chaos`, on Linux only."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from rollflow.flows.services.process_title import flow_run_of

ACTORS = {"engine": "EngineActor", "scheduler": "RolloutActor", "learner": "LearnerActor", "channel": "ChannelActor"}
REWARD_ACTORS = {"reward actor": "RewardActor", "reward model": "ModelActor"}
MODULES = {"reward worker": "rollflow.tasks.scorers.worker", "runner": "rollflow.flows.deployments"}
# name of a stage's process -> the role in the tag of the stage's flow runs
STAGES = {"rollout flow": "role:rollout", "reward flow": "role:reward", "train flow": "role:train"}
SUPERVISOR = "role:supervisor"
FLOWS = (*STAGES, "supervisor")
ROLES = (*ACTORS, "reward actor", *MODULES, *STAGES, "supervisor", "prefect server")
VLLM_ROLES = ("engine", "vllm core", "scheduler", "learner")
GONE_SECONDS = 30.0  # the longest wait for the end of a killed process
RECORDED_AS = {  # role -> its name in recovery records; dead reward workers are replaced without a recovery record
    "engine": "engine-",
    "vllm core": "engine-",
    "scheduler": "rollout",
    "learner": "learner",
    "rank": "learner",
    "channel": "channel",
    "reward actor": "reward",
    "reward model": "reward-model-",
    "runner": "runner",
    "rollout flow": "rollout stage",
    "reward flow": "reward stage",
    "train flow": "train stage",
    "supervisor": "supervisor",
    "prefect server": "prefect server",
}


def is_record_of(role: str, recorded: str) -> bool:
    """Return whether a recovery belongs to this role."""
    name = RECORDED_AS.get(role)
    return name is not None and (recorded.startswith(name) if name.endswith("-") else recorded == name)


def mine(home: Path) -> Iterator[psutil.Process]:
    """List the living processes that were started with this run home."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("ROLLFLOW_HOME") == str(home):
                yield process


def find(home: Path, role: str) -> list[psutil.Process]:
    """List the processes of a role."""
    if role == "sandboxes":  # the first process of a sandbox has an empty environment
        workers = find(home, "reward worker")
        return [child for worker in workers for child in _list_children(worker) if child.name() == "bwrap"]
    return [process for process in mine(home) if _quietly(lambda one: _is(one, role), process)]


def _list_children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children())
    except psutil.Error:
        return []


def works(home: Path, role: str, process: psutil.Process) -> bool:
    """Return whether a process already does its role's work (its imports take seconds)."""
    if role == "prefect server":
        return any(_get(f"{api}/health") for api in _apis(home))
    if role == "runner":
        return any(home.glob("cache/*/runner-ready"))
    if role == "supervisor" or role in STAGES:
        return (_flow_run(process) or {}).get("state_type") == "RUNNING"
    return True


def _apis(home: Path) -> set[str]:
    """Return the addresses of the Prefect API in the environment of the home's processes."""
    found = set()
    for process in mine(home):
        with contextlib.suppress(psutil.Error):
            found.add(process.environ().get("PREFECT_API_URL", ""))
    return found - {""}


def _flow_run(process: psutil.Process) -> Any:
    """Return the flow run that a process executes, from its Prefect server."""
    environment = process.environ()
    url = f"{environment['PREFECT_API_URL']}/flow_runs/{flow_run_of(process)}"
    return _get(url, environment.get("PREFECT_API_AUTH_STRING", ""))


def _get(url: str, auth: str = "") -> Any:
    """Return the JSON answer of a URL; None if there is none."""
    header = {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"} if auth else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=header), timeout=5) as answer:
            return json.loads(answer.read())
    except (OSError, ValueError):  # urllib's errors are OSErrors
        return None


def kill(process: psutil.Process) -> bool:
    """Send SIGKILL; return whether there was a process to kill.

    Raises:
        RuntimeError: the process lives on.
    """
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False
    limit = time.monotonic() + GONE_SECONDS
    while not _gone(process):
        if time.monotonic() > limit:
            raise RuntimeError(f"process {process.pid} lives {GONE_SECONDS:g} s after SIGKILL")
        time.sleep(0.01)
    return True


def _gone(process: psutil.Process) -> bool:
    """Return whether a process has ended; it may still be a zombie."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_everything(home: Path) -> None:
    """Send SIGKILL to all processes of the home, to the guards first, so that no process shuts down in order.

    Raises:
        RuntimeError: a process lives on.
    """
    limit = time.monotonic() + 2 * GONE_SECONDS
    while found := list(mine(home)):  # repeated, because a process may have started another one
        if time.monotonic() > limit:
            raise RuntimeError(f"{len(found)} processes live {2 * GONE_SECONDS:g} s after SIGKILL: {found}")
        for process in sorted(found, key=lambda one: "guard.py" not in _quiet_line(one)):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(found, timeout=1)


def _is(process: psutil.Process, role: str) -> bool:
    line = _line(process)
    if "guard.py" in line or process.status() == psutil.STATUS_ZOMBIE:
        return False
    if role in ACTORS or role in REWARD_ACTORS:
        return line.startswith(f"ray::{(ACTORS | REWARD_ACTORS)[role]}")
    if role in MODULES:
        return f"-m {MODULES[role]}" in line
    match role:
        case "rank":  # a rank of a sharded learner; the first rank is the learner's own process, and is not included
            return str(process.name()).startswith("rank ")
        case "vllm core":
            return line.startswith("VLLM::EngineCore")
        case "prefect server":
            return "prefect_server server start" in line or "-m prefect server start" in line
        case "supervisor":
            return _flow_role(process) == SUPERVISOR
        case _:
            return _flow_role(process) == STAGES[role]


def _flow_role(process: psutil.Process) -> str | None:
    """Return the role tag of the flow run that this process executes, if any; a supervisor adds its tag later."""
    flow_run = flow_run_of(process)
    if not flow_run or not process.environ().get("PREFECT_API_URL"):
        return None
    if flow_run not in _roles:
        found = _flow_run(process)
        if found is None:
            return None
        _roles[flow_run] = next((tag for tag in found["tags"] if tag.startswith("role:")), SUPERVISOR)
    return _roles[flow_run]


_roles: dict[str, str] = {}


def _line(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def _quiet_line(process: psutil.Process) -> str:
    """Return the command line of a process; empty if it has just ended."""
    try:
        return _line(process)
    except psutil.Error:
        return ""


def _quietly(test: Callable[[psutil.Process], bool], process: psutil.Process) -> bool:
    try:
        return test(process)
    except psutil.Error:
        return False
