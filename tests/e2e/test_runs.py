"""Tests whole runs on the command line, with all real parts: Prefect, Ray, vLLM, torch, Arrow, storage and MLflow."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from mlflow import MlflowClient
from moto.server import ThreadedMotoServer

from rollflow.flows.commands.cli import main
from rollflow.flows.ray_cluster.ray_head import RayHead
from rollflow.flows.services.process import PrefectServer, free_port, start_together, stop_together
from rollflow.storage.audit.audit import audit
from rollflow.storage.log.entries import ConfigChanged
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import ObjectStore, open_store
from rollflow.tasks.learners.torch_learner import load_model
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from tests.support.log_runs import of_kind
from tests.support.prefect_home import give
from tests.support.waiting import HANG_SECONDS, RUN_SECONDS, until

pytestmark = pytest.mark.slow

SMALL = """
name = "small"
versions = {versions}
async_ratio = {alpha}
groups = 16
group_size = 4

[policy.cold_start]
target_accuracy = 0.05
evaluate_every = 5

[[prompts]]
kind = "reasoning-gym"
family = "basic_arithmetic"
options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1, operators = ["+"], allow_negation = false }}

[engine]
kind = "{engine}"
max_new_tokens = 6
max_concurrent_requests = 64

[evaluation]
prompts = 16
every = 3
"""


class Command:
    """The command `rollflow` in a process of its own, with a run home of its own."""

    def __init__(self, home: Path, recipe: str) -> None:
        self.home, self.recipe = home, home / "recipe.toml"
        home.mkdir(parents=True, exist_ok=True)
        self.recipe.write_text(recipe)

    def start(self, *arguments: str, prefect: str = "") -> subprocess.Popen[str]:
        environment = {**os.environ, "ROLLFLOW_HOME": str(self.home), "PREFECT_API_URL": prefect}
        command = [sys.executable, "-m", "rollflow.flows.commands.cli", *arguments]
        pipe = subprocess.PIPE
        # A shell lets background processes ignore Ctrl-C. Without this handler, processes that a test in the background
        # starts would ignore Ctrl-C, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        both = {"stdout": pipe, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=environment, cwd=self.home, **both)  # MLflow may write to this folder

    def run(self, *arguments: str, prefect: str = "", seconds: float = RUN_SECONDS) -> str:
        """Run the command, check that it succeeds within `seconds`, and return its output."""
        process = self.start(*arguments, prefect=prefect)
        output, _ = process.communicate(timeout=seconds)
        assert process.returncode == 0, output[-4000:]
        return output

    def summary(self, run_id: str) -> dict[str, object]:
        return dict(json.loads((self.home / "store/runs" / run_id / "summary.json").read_text()))


def leftovers(home: Path) -> list[str]:
    """Return the command lines of the processes that still run with this run home."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            if process.pid != os.getpid() and process.environ().get("ROLLFLOW_HOME") == str(home):
                found.append(" ".join(process.info["cmdline"] or [])[:120])
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@pytest.mark.xdist_group("vllm")
def test_asynchronous_run_on_vllm_passes_the_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Command(tmp_path, SMALL.format(versions=5, alpha=2, engine="vllm"))
    output = command.run("run", str(command.recipe), "--run-id", "first")
    assert "held-out accuracy" in output
    assert re.search(r"(training|evaluating) \| version \d/5", output)
    summary = command.summary("first")
    assert summary["audit"] == "clean"
    assert summary["versions"] == 5
    assert sum(summary["staleness"].values()) == 5 * 64  # type: ignore[attr-defined]
    assert max(map(int, summary["staleness"])) <= 2  # type: ignore[call-overload]
    assert set(summary["accuracy"]["by_version"]) == {"0", "3", "5"}  # type: ignore[index]
    assert set(summary["idle"]) == {"rollout", "reward", "train"}  # type: ignore[call-overload]
    assert (tmp_path / "store/runs/first/reward.png").stat().st_size > 5000
    until(lambda: not leftovers(tmp_path))

    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    assert main(["audit", "first"]) == 0
    assert main(["status"]) == 0
    assert main(["run", str(command.recipe), "--run-id", "first"]) == 2
    weights = sorted((tmp_path / "store/runs/first/policies/00000005").glob("*/weights/*.safetensors"))
    weights[0].write_bytes(weights[0].read_bytes()[:-1] + b"x")
    assert main(["audit", "first"]) == 0  # only a deep audit reads the weights again
    assert main(["audit", "first", "--deep"]) == 1
    assert "altered" in capsys.readouterr().out
    check_mlflow(tmp_path, "first")


@pytest.mark.soak
@pytest.mark.xdist_group("vllm")
def test_vllm_run_with_redundant_prompts_passes_the_audit(tmp_path: Path) -> None:
    """The run has extra groups and responses, a filter, tail batching, weight updates that restart running requests,
    and drafts from past responses.
    """
    command = Command(tmp_path, SMALL.format(versions=10, alpha=1, engine="vllm"))
    changes = ["rollout.redundant_groups=8", "rollout.redundant_responses=2", "rollout.tail_batching=true"]
    changes += ["rollout.filter.min_std=0", "engine.on_weight_update=restart", "async_ratio=0", "groups=8"]
    changes += ["engine.speculation=suffix"]
    command.run("run", str(command.recipe), "--run-id", "choices", *(o for c in changes for o in ("--set", c)))
    report = audit(open_store(str(tmp_path / "store/runs/choices")), deep=True)
    assert report.violations == []
    assert (report.versions, report.trajectories, set(report.staleness)) == (10, 10 * 8 * 4, {0})
    assert report.fates["discarded: filtered"] > 0
    assert report.fates["discarded: redundant"] > 0
    assert report.surplus_tokens > 0
    drafts = command.summary("choices")["speculation"]
    assert isinstance(drafts, dict)
    assert 0 < drafts["accepted"] <= drafts["drafted"]


def check_mlflow(home: Path, run_id: str) -> None:
    """Check that MLflow has the parameters, one point per version, and the plot."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    [experiment] = [e for e in client.search_experiments() if e.name == "small"]
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == run_id
    assert found.info.status == "FINISHED"
    assert found.data.params["async_ratio"] == "2.0"
    assert [m.step for m in client.get_metric_history(found.info.run_id, "rollout/reward")] == list(range(1, 6))
    assert "reward.png" in [a.path for a in client.list_artifacts(found.info.run_id)]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a bucket on a moto server."""
    server = ThreadedMotoServer("127.0.0.1", free_port())
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("s3").create_bucket(Bucket="rollflow")
    yield "s3://rollflow/some/prefix"
    server.stop()


def test_sigterm_during_start_leaves_no_process(tmp_path: Path) -> None:
    """SIGTERM acts like Ctrl-C, even before the first flow run."""
    command = Command(tmp_path, SMALL.format(versions=4, alpha=1, engine="transformers"))
    process = command.start("run", str(command.recipe), "--run-id", "early")
    assert process.stdout is not None
    assert any(line.startswith("run early in ") for line in process.stdout)
    until(lambda: len(leftovers(tmp_path)) > 1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130, output
    assert "stopped at version 0; audit: clean; continue the run with: rollflow resume" in output
    until(lambda: not leftovers(tmp_path))


@pytest.mark.soak
def test_prefect_deployment_starts_a_run(
    tmp_path: Path, s3: str, prefect_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start a flow run as the Prefect UI does, with typed parameters, a local model, local data and an S3 store."""
    policy, questions = tmp_path / "policy", tmp_path / "sums.jsonl"
    whole_policy(policy)
    questions.write_text("".join(json.dumps({"question": f"{i}+{i}", "answer": str(2 * i)}) + "\n" for i in range(90)))
    config = {
        "versions": 4,
        "async_ratio": 1,
        "groups": 4,
        "group_size": 2,
        "policy": {"path": str(policy)},
        "prompts": [{"kind": "jsonl", "path": str(questions)}],
        "engine": {"kind": "transformers", "max_new_tokens": 4, "on_weight_update": "restart"},
        "train": {"objective": {"kind": "decoupled-ppo"}},
        "store": {"uri": s3},
        "reward": {"kind": "exact"},
        "evaluation": {"prompts": 4},
    }
    command = Command(tmp_path / "home", "")
    give(prefect_database, command.home)
    process = command.start("serve")
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        url, mlflow = lines[0].split()[1].removesuffix("/deployments"), lines[1].split()[1]
        assert fetch(f"{url}/api/deployments/name/post-training/zz-rollflow").status == 401
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", Path(lines[0].split()[-1].rstrip(")")).read_text())
        for bad in (({**config, "async_ratio": -1}, "fourth"), (config, "../../x"), (config, "fourth\n"), (config, "")):
            assert post(f"{url}/api", *bad).status == 409
        good = post(f"{url}/api", config, "fourth")
        assert good.status == 201
        assert state_at_the_end(f"{url}/api", good.body["id"]) == "COMPLETED"
        assert urllib.request.urlopen(f"{mlflow}/health", timeout=HANG_SECONDS).status == 200
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0
    until(lambda: not leftovers(tmp_path / "home"))
    report = audit(open_store(f"{s3}/runs/fourth"), deep=True)
    assert report.clean
    assert report.versions == 4
    summary = json.loads(open_store(f"{s3}/runs/fourth").get("summary.json"))
    assert summary["audit"] == "clean"
    assert summary["storage"] == f"{s3}/runs/fourth"
    assert command.run("audit", f"{s3}/runs/fourth").strip().endswith("no invariant is broken")


def whole_policy(folder: Path) -> None:
    """Create a policy with random weights in a Hugging Face folder, as a user would have it."""
    folder.mkdir()
    for name, data in build_cold_folder(ColdStart(hidden_size=32, heads=2), ["1+1", "2"]).items():
        (folder / name).write_bytes(data)
    load_model(folder, "float32", trained=False).save_pretrained(folder)


@dataclass(frozen=True)
class Answer:
    status: int
    body: dict[str, Any]


BUSY = 503


def post(api: str, config: dict[str, Any], run_id: str) -> Answer:
    """Create a run of the post-training deployment."""
    found = fetch(f"{api}/deployments/name/post-training/zz-rollflow").body
    parameters = {"parameters": {"config": config, "run_id": run_id}, "state": {"type": "SCHEDULED"}}
    while (answer := fetch(f"{api}/deployments/{found['id']}/create_flow_run", parameters)).status == BUSY:
        time.sleep(1)  # SQLite was locked for longer than the server waits; Prefect's own client also retries
    return answer


def fetch(url: str, body: dict[str, Any] | None = None) -> Answer:
    data = json.dumps(body).encode() if body else None
    auth = base64.b64encode(os.environ.get("PREFECT_API_AUTH_STRING", "").encode()).decode()
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {auth}"}
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=HANG_SECONDS) as response:
            return Answer(response.status, json.loads(response.read()))
    except urllib.error.HTTPError as error:
        return Answer(error.code, {})


def state_at_the_end(api: str, flow_run: str) -> str:
    limit = time.monotonic() + RUN_SECONDS
    while time.monotonic() < limit:
        state = str(fetch(f"{api}/flow_runs/{flow_run}").body["state_type"])
        if state in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            return state
        time.sleep(1.0)
    raise AssertionError("the run did not end")


@pytest.fixture
def services(tmp_path: Path, prefect_database: Path) -> Iterator[tuple[PrefectServer, RayHead]]:
    """Yield a Prefect server and a Ray cluster that the run does not own, without starting them."""
    place = tmp_path / "elsewhere"
    give(prefect_database, place)
    prefect, ray = PrefectServer(place), RayHead(place)
    yield prefect, ray
    stop_together(prefect, ray)


@pytest.mark.soak
def test_stopped_run_resumes_on_existing_services(
    tmp_path: Path,
    prefect_database: Path,
    services: tuple[PrefectServer, RayHead],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the run is stopped before its end, all its processes end, and its audit is clean. The command `resume`
    finishes the run on other services.
    """
    recipe = SMALL.format(versions=400, alpha=0, engine="transformers")
    command = Command(tmp_path / "home", f'{recipe}[tracking]\nuri = "sqlite:///{tmp_path}/mine.db"\n')
    give(prefect_database, command.home)
    store = open_store(str(command.home / "store/runs/third"))
    versions = stopped(command, store) + 3  # three versions more, so that the resumed run has to train
    for private in ("prefect", "ray"):
        shutil.rmtree(command.home / private)
    prefect, ray = services
    for name, value in (prefect.env | ray.env).items():
        monkeypatch.setenv(name, value)
    start_together(prefect, ray)
    left = command.home / "store/runs/third/.tmp/by-a-killed-writer"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    values = f"versions={versions}", f"cluster.address={ray.address}", "train.schedule=linear"
    changed = [part for value in values for part in ("--set", value)]
    command.run("resume", "third", *changed, prefect=prefect.api_url)
    assert not left.exists()
    # This actor is left behind, as by a supervisor that dies after the last version. The command `resume` must end the
    # actor.
    subprocess.run([sys.executable, "-c", LEFT, ray.address, store.uri], check=True, timeout=RUN_SECONDS)
    command.run("resume", "third", prefect=prefect.api_url)
    report = audit(store, deep=True)
    assert report.clean
    assert report.versions == versions
    assert set(report.staleness) == {0}
    [entry] = of_kind(store, ConfigChanged)
    assert isinstance(entry.body, ConfigChanged)
    command.run("replay", "third", "--all")
    check_given(command, tmp_path, ray)
    check_tracked(tmp_path, entry.body)


def stopped(command: Command, store: ObjectStore) -> int:
    """Start a run, stop it by Ctrl-C before its end, and return its newest version."""
    process = command.start("run", str(command.recipe), "--run-id", "third")
    until(lambda: Log(store).state.version >= 3 or process.poll() is not None, RUN_SECONDS)
    assert process.poll() is None, process.communicate()[0]
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130, output
    assert "audit: clean" in output
    assert f"rollflow resume {store.uri}" in output
    until(lambda: not leftovers(command.home))
    report = audit(store)
    assert report.clean
    assert report.versions < 400
    return report.versions


def check_given(command: Command, place: Path, ray: RayHead) -> None:
    """Check that the given services were used, no others were started, and nothing of the run is left in them."""
    assert command.summary("third")["audit"] == "clean"
    assert (place / "mine.db").stat().st_size > 0
    assert [name for name in ("prefect", "ray", "mlflow") if (command.home / name).exists()] == []
    runs: Any = fetch(f"{os.environ['PREFECT_API_URL']}/flow_runs/filter", {"limit": 50}).body
    states = {tag: run["state_type"] for run in runs for tag in run["tags"] if "run:third" in run["tags"]}
    for role in ("supervisor", "rollout", "reward", "train"):
        assert states[f"role:{role}"] == "COMPLETED", states
    storage = str(command.home / "store/runs/third")
    subprocess.run([sys.executable, "-c", USED, ray.address, storage], check=True, timeout=RUN_SECONDS)


def check_tracked(place: Path, told: ConfigChanged) -> None:
    """Check that MLflow contains the changed config keys, and the version from which on each change applies."""
    client = MlflowClient(tracking_uri=f"sqlite:///{place}/mine.db")
    [run] = client.search_runs([one.experiment_id for one in client.search_experiments()])
    for key, _, after in told.changes:
        assert run.data.tags[f"config.{key}"] == f"{after} from version {told.version}"
        assert run.data.params[key] != str(after)
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"config_changes.json", f"recipe-from-version-{told.version}.toml"} <= files


LEFT = """
import sys
from rollflow.flows.ray_cluster import cluster
from rollflow.flows.locations import attach_run

class Left:
    def here(self):
        return True

context = attach_run(sys.argv[2])
with cluster.attached_cluster(sys.argv[1], context.key):
    import ray
    actor = ray.remote(Left).options(name="engine-0", lifetime="detached", num_cpus=0).remote()
    assert ray.get(actor.here.remote())
"""
USED = """
import asyncio, json, sys
from pathlib import Path
from rollflow.flows.ray_cluster import cluster
from rollflow.flows.evaluate import evaluate_now
from rollflow.flows.locations import attach_run
from rollflow.tasks.rollout.evaluation import read_evaluations

with cluster.attached_cluster(sys.argv[1], "third"):
    import ray
    assert ray.util.list_named_actors(all_namespaces=True) == []
context = attach_run(sys.argv[2])
[*_, last] = read_evaluations(context.store)
assert asyncio.run(evaluate_now(context, last.version)) == last  # the same answers on an engine of its own
"""
