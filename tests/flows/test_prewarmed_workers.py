"""Tests that spare Ray workers exist before a run, serve any run, are replaced after use, and end with their raylet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollflow.flows.ray_cluster import prewarmed_workers as module
from rollflow.flows.ray_cluster.prewarmed_workers import PrewarmedWorkers
from rollflow.flows.ray_cluster.ray_head import RayHead
from rollflow.tasks.actors import early_imports
from rollflow.tasks.actors.early_imports import KIND, WANTED, Kind, import_early, list_kinds, request_path
from rollflow.tasks.run.config import RunConfig
from tests.support.waiting import until

LOOK = """
import json, os, sys
import ray
from rollflow.flows.ray_cluster import cluster
from rollflow.tasks.actors.early_imports import worker_environment

class Actor:
    def look(self):
        from multiprocessing import forkserver
        names = [name for name in ("vllm", "torch", "pyarrow") if name in sys.modules]
        return os.getpid(), names, forkserver._forkserver._forkserver_pid

with cluster.attached_cluster(sys.argv[1], f"a run of {sys.argv[2]}"):
    actor = ray.remote(Actor).options(
        name="one", lifetime="detached", num_cpus=0, runtime_env=worker_environment(sys.argv[2])).remote()
    print(json.dumps(ray.get(actor.look.remote())))
    if len(sys.argv) > 3:
        cluster.kill_named(["one"])
"""


def idle(head: RayHead, kind: Kind) -> list[int]:
    """Return the spare workers that wait for an actor of this kind."""
    found = []
    for pid in head.processes:
        try:
            process = psutil.Process(pid)
            if process.cmdline()[:1] == ["ray::IDLE"] and process.environ().get(KIND) == kind:
                found.append(pid)
        except psutil.Error:
            continue
    return found


def ask(head: RayHead, *arguments: str) -> tuple[int, list[str], int | None]:
    """Start an actor of some kind in a new run. Return its process id, the modules that were already imported, and the
    process id of its fork server, if any.
    """
    env = os.environ | head.env | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LOOK, head.address, *arguments]
    pid, names, server = json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout)
    return pid, names, server


@pytest.fixture
def head(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RayHead]:
    with RayHead(tmp_path, cpus=1, spares=[request.param]) as head:
        yield head


@pytest.mark.slow
@pytest.mark.parametrize("head", ["reward"], indirect=True)
def test_actor_starts_in_a_prewarmed_worker_of_its_kind(head: RayHead) -> None:
    until(lambda: idle(head, "reward"))
    [spare] = idle(head, "reward")
    assert ask(head, "rollout")[0] != spare
    pid, names, server = ask(head, "reward")
    assert (pid, names, server) == (spare, ["pyarrow"], None)
    assert idle(head, "reward") == []
    head.stop()
    until(lambda: not psutil.pid_exists(spare))


@pytest.mark.soak
@pytest.mark.parametrize("head", ["engine"], indirect=True)
def test_engine_worker_has_a_fork_server(head: RayHead) -> None:
    """A worker that is not a spare has a fork server, too. The fork server ends with its worker."""
    until(lambda: idle(head, "engine"))
    [spare] = idle(head, "engine")
    for expected in (spare, None):
        pid, names, server = ask(head, "engine", "and kill it")
        assert {"vllm", "torch"} <= set(names)
        assert (pid == spare) == (expected == spare)
        assert server is not None
        until(lambda server=server: not psutil.pid_exists(server))  # type: ignore[misc]


class Asked(PrewarmedWorkers):
    """Spare workers whose requests are recorded and not sent."""

    def __init__(self, folder: Path, **how: Any) -> None:
        super().__init__("nowhere", os.getpid(), folder, ("engine", "reward"), **how)
        self.there: set[str] = set()
        self.asked: list[Kind] = []

    def _find_kinds(self) -> set[str]:
        return self.there

    def _request(self, kind: Kind) -> None:
        self.asked.append(kind)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.glob, "glob", lambda _: [])
    return now


def look(spares: Asked, clock: list[float], seconds: float) -> list[Kind]:
    """Return the requests for spare workers within so many seconds."""
    spares.asked.clear()
    for _ in range(round(seconds)):
        clock[0] += 1.0
        spares.look()
    return spares.asked


def test_used_prewarmed_worker_is_replaced_later(tmp_path: Path, clock: list[float]) -> None:
    spares = Asked(tmp_path, kept=True)
    assert look(spares, clock, 3) == ["engine", "reward"]
    spares.there = {"engine", "reward"}
    assert look(spares, clock, 200) == []
    spares.there = {"reward"}
    assert look(spares, clock, module.AGAIN_SECONDS - 5) == []
    assert look(spares, clock, 10) == ["engine"]


def test_command_starts_each_prewarmed_worker_once(tmp_path: Path, clock: list[float]) -> None:
    spares = Asked(tmp_path, kept=False)
    assert look(spares, clock, 300) == ["engine", "reward"]


def test_no_prewarmed_worker_starts_if_memory_is_low(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory:
        available = module.LEAST_MEMORY - 1

    monkeypatch.setattr(module.psutil, "virtual_memory", Memory)
    assert look(Asked(tmp_path, kept=True), clock, 300) == []


def test_only_engine_workers_and_spares_import_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[Kind] = []
    monkeypatch.setattr(early_imports, "import_all", imported.append)
    monkeypatch.setattr(early_imports.glob, "glob", lambda _: [])
    monkeypatch.setenv(WANTED, str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for kind in early_imports.MODULES:
        monkeypatch.setenv(KIND, kind)
        import_early()
    assert imported == ["engine"]
    monkeypatch.setenv(KIND, "learner")
    request_path("learner", tmp_path).touch()
    import_early()
    import_early()  # one file requests one spare
    assert imported == ["engine", "learner"]


def test_failed_early_import_does_not_end_the_ray_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker survives a missing folder of spares, a folder that cannot be created, and a failing import."""
    imported: list[Kind] = []
    monkeypatch.setattr(early_imports.glob, "glob", lambda _: [])
    monkeypatch.setattr(early_imports, "import_all", imported.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(KIND, "engine")
    monkeypatch.setenv(WANTED, str(tmp_path / "nobody" / "made" / "it"))
    import_early()
    assert imported == ["engine"]
    (tmp_path / "file").touch()
    monkeypatch.setenv(WANTED, str(tmp_path / "file" / "spares"))
    import_early()

    def fail(kind: Kind) -> None:
        imported.append(kind)
        raise ImportError("no such module")

    monkeypatch.setattr(early_imports, "import_all", fail)
    monkeypatch.setenv(WANTED, str(tmp_path / "spares"))
    import_early()
    assert imported == ["engine", "engine"]


def test_ray_worker_hands_its_actor_to_a_prewarmed_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[Kind] = []
    monkeypatch.setattr(early_imports.glob, "glob", lambda _: [])
    monkeypatch.setattr(early_imports, "REGISTER_SECONDS", 0.0)
    monkeypatch.setenv(WANTED, str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(KIND, "engine")
    others: list[threading.Thread] = []

    def slowly(kind: Kind) -> None:
        """Start a worker for an actor while the spare imports."""
        imported.append(kind)
        others.append(threading.Thread(target=import_early))
        others[0].start()
        time.sleep(0.5)
        assert others[0].is_alive()

    monkeypatch.setattr(early_imports, "import_all", slowly)
    request_path("engine", tmp_path).touch()
    import_early()
    others[0].join(30)
    assert not others[0].is_alive()
    assert imported == ["engine"]


def test_prewarmed_workers_match_the_actors_of_the_run() -> None:
    own = RunConfig.model_validate({"name": "a", "prompts": [{"kind": "jsonl", "path": "q"}], "policy": {"path": "p"}})
    two = own.model_copy(update={"engine": own.engine.model_copy(update={"threads": 2})})
    assert "engine" in list_kinds(own)
    assert "engine" not in list_kinds(two)
    other = own.model_copy(update={"cluster": own.cluster.model_copy(update={"env": {"NCCL_DEBUG": "WARN"}})})
    assert list_kinds(other) == ()  # the other cluster's workers have another environment
