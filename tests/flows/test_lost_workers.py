"""Tests that a Ray worker's death before its registration is reported to every process that waits for the worker's
actor.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollflow.flows.ray_cluster import lost_workers
from rollflow.flows.ray_cluster.lost_workers import FOLDER, WORKER, WorkerWatch, explain_lost_worker, note_death
from rollflow.flows.ray_cluster.ray_head import RayHead
from rollflow.tasks.actors.early_imports import KIND
from tests.support.waiting import HANG_SECONDS, until

# In place of Ray's own start of a worker: one kind ends without a message, and the other cannot import Ray.
SITE = """
import os, signal, sys

class Refusing:
    def find_spec(self, name, *_):
        if name == "ray":
            raise ImportError("no Ray today")

if any(one.endswith("ray_worker.py") for one in sys.orig_argv):
    if os.environ.get("ROLLFLOW_IMPORTS") == "engine":
        import time
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("ROLLFLOW_IMPORTS") == "learner":
        sys.meta_path.insert(0, Refusing())
"""
ASK = """
import sys
import ray
from rollflow.flows.ray_cluster import cluster
from rollflow.storage.errors import EngineFailed
from rollflow.tasks.actors.early_imports import worker_environment

class EngineActor:
    def here(self):
        return "here"

class LearnerActor(EngineActor):
    pass

class Other(EngineActor):
    pass

with cluster.attached_cluster(sys.argv[1], "test"):
    for kind, made in (("engine", EngineActor), ("learner", LearnerActor), (None, Other)):
        options = {"runtime_env": worker_environment(kind)} if kind else {}
        actor = ray.remote(made).options(num_cpus=0, **options).remote()
        try:
            print(cluster.call_within(actor.here.remote(), 500, f"the {kind}", died=EngineFailed), flush=True)
        except EngineFailed as error:
            print(error, flush=True)
"""


@pytest.mark.slow
def test_error_names_the_ray_worker_that_died_before_its_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with RayHead(tmp_path, cpus=1) as head:
        env = os.environ | head.env | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        command = [sys.executable, "-c", ASK, head.address]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    engine, learner, other = done.stdout.splitlines()
    assert engine.startswith("cannot wait any longer for the engine: a Ray worker (process ")
    assert f"died before Ray registered it: its process ended; see {head.folder}" in engine
    assert "died before Ray registered it: ImportError: no Ray today" in learner
    assert other == "here"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "lost"))
    return tmp_path / "lost"


def test_ray_worker_death_is_reported_once_for_its_actor_kind(folder: Path) -> None:
    assert explain_lost_worker("engine") == ""
    note_death(folder, 12, "engine", "no memory")
    assert explain_lost_worker("learner") == ""
    assert "process 12) died before Ray registered it: no memory" in explain_lost_worker("engine")
    assert explain_lost_worker("engine") == ""
    # the watch notices the death after the worker itself has recorded it
    note_death(folder, 12, "engine", "its process ended")
    assert explain_lost_worker("engine") == ""


def test_death_of_an_earlier_ray_worker_is_not_reported(folder: Path) -> None:
    note_death(folder, 12, "", "no memory")
    os.utime(folder / "12", (0, 0))
    assert explain_lost_worker("") == ""


def begin(folder: Path, text: str) -> subprocess.Popen[bytes]:
    """Start a process that looks like a starting worker of kind "reward"."""
    env = {**os.environ, KIND: "reward", FOLDER: str(folder)}
    return subprocess.Popen([sys.executable, "-c", text, str(WORKER)], env=env)


def test_replaced_ray_worker_is_not_reported_as_lost(folder: Path) -> None:
    note_death(folder, 12, "reward", "no memory")
    with begin(folder, "import time; time.sleep(600)") as other:
        until(lambda: explain_lost_worker("reward") == "")
        other.kill()
    assert "no memory" in explain_lost_worker("reward")


def test_registered_ray_worker_is_not_reported_as_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_workers, "LOOK_SECONDS", 0.0)
    watch = WorkerWatch(os.getpid(), folder)
    registers = "import setproctitle, time; setproctitle.setproctitle('ray::IDLE'); time.sleep(600)"
    with begin(folder, registers) as registered, begin(folder, "import time; time.sleep(600)") as lost:
        until(lambda: (watch.look(), lost.pid in watch._starting)[1])
        until(lambda: (watch.look(), registered.pid in watch._known)[1])
        registered.kill()
        lost.kill()
        registered.wait()
        # the file exists before any process has waited for the worker
        until(lambda: (watch.look(), (folder / str(lost.pid)).exists())[1])
        lost.wait()
    time.sleep(0.01)
    watch.look()
    assert [file.name for file in folder.iterdir()] == [str(lost.pid)]
