"""Tests that a dead service, supervisor or stage is restarted exactly once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.states import Cancelled, Crashed, Failed, Pending, Running, Scheduled

from rollflow.flows.keepalive import supervisor_restart as crashed_module
from rollflow.flows.keepalive.restarts import RestartBudget, RestartsExhausted
from rollflow.flows.keepalive.services import RUNNER, SERVER, ServiceKeeper
from rollflow.flows.keepalive.stages import Stages
from rollflow.flows.keepalive.supervisor_restart import (
    SupervisorRestarter,
    follows_another,
    pause_before,
    restart_supervisor,
    run_uri,
)
from rollflow.flows.locations import attach_run, context_of
from rollflow.flows.ray_cluster.ray_head import RayHead, RayNode
from rollflow.flows.registration.automations import install_automations
from rollflow.flows.registration.prefect_api import (
    call_until_answered,
    cancel_flow_run,
    crash_orphans,
    created_at,
    list_supervisors,
    open_client,
    start,
    states_of,
    unfinished_runs,
)
from rollflow.flows.services.process import PrefectServer, Runner, stop_together
from rollflow.flows.session import Session
from rollflow.flows.views.status import RunStatus, read_status
from rollflow.storage.run_records.recoveries import Recovery, RecoveryLog
from rollflow.tasks.run.config import RecoveryConfig, RunConfig
from rollflow.tasks.run.context import RunContext
from tests.support.described import describe
from tests.support.prefect_home import use_server
from tests.support.waiting import HANG_SECONDS, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("prefect")]

ROOT = Path(__file__).parents[2]
CONFIG = {
    "name": "tiny",
    "policy": {"path": "somewhere"},
    "prompts": [{"kind": "reasoning-gym", "family": "chain_sum"}],
    "recovery": {"restarts": 2, "backoff_seconds": 0.5, "answer_seconds": HANG_SECONDS},
}


@pytest.fixture(scope="module")
def server(prefect_server: PrefectServer) -> Iterator[PrefectServer]:
    """Use the tests' Prefect server; each test has its own deployments and runs."""
    with use_server(prefect_server):
        yield prefect_server


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    """Prepare a run whose log has only the first entry, which describes the run."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    context = context_of(str(tmp_path / "store"), f"run-{uuid.uuid4().hex[:6]}")
    describe(context.store, context.uri.rpartition("/")[2], RunConfig.model_validate(CONFIG))
    return context


@pytest.fixture
def deployment(server: PrefectServer) -> str:
    """Create a deployment of "post-training" without a runner."""
    name = f"d-{uuid.uuid4().hex[:6]}"
    with open_client() as client:
        client.create_deployment(flow_id=client.create_flow_from_name("post-training"), name=name)
    return name


def crashed(deployment: str, parameters: dict[str, Any]) -> UUID:
    with open_client() as client:
        flow_run = start(client, "post-training", deployment, parameters, name="it")
        client.set_flow_run_state(flow_run, Running(), force=True)
        client.set_flow_run_state(flow_run, Crashed(message="killed. By the test"), force=True)
    return flow_run


def of(context: RunContext) -> list[UUID]:
    """Return the run's supervisor flow runs, the newest first."""
    with open_client() as client:
        return [one.id for one in list_supervisors(client) if run_uri(one) == context.uri]


def given(context: RunContext) -> dict[str, Any]:
    return {"config": CONFIG, "storage": context.uri}


def test_concurrent_recoveries_start_only_one_supervisor(deployment: str, run: RunContext) -> None:
    first = crashed(deployment, given(run))
    with ThreadPoolExecutor(4) as pool:  # as if a session, an automation and two users restarted the supervisor at once
        asked = [
            pool.submit(copy_context().run, call_until_answered, lambda: restart_supervisor(first, run))
            for _ in range(4)
        ]
        successors = [found for one in asked if (found := one.result())]
    second = {found.flow_run for found in successors}
    assert len(second) == 1
    assert sum(found.pending is not None for found in successors) == 1  # exactly one caller records the recovery
    assert of(run) == [*second, first]
    assert [follows_another(one) for one in (first, *second)] == [False, True]
    with open_client() as client:
        client.set_flow_run_state(second.copy().pop(), Running(), force=True)
    late = restart_supervisor(first, run)
    assert late is not None
    assert (late.flow_run, late.pending) == (*second, None)
    assert of(run) == [*second, first]
    assert follows_another(*second)
    with open_client() as client:  # a user retries the flow run
        for state in (Failed(), Scheduled(), Pending(), Running()):
            client.set_flow_run_state(late.flow_run, state)
    assert not follows_another(*second)


def test_ended_run_is_not_restarted(deployment: str, run: RunContext) -> None:
    for state in (Failed(), Cancelled(), Running()):
        flow_run = crashed(deployment, given(run))
        with open_client() as client:
            client.set_flow_run_state(flow_run, state, force=True)
        assert restart_supervisor(flow_run, run) is None
    flow_run = crashed(deployment, given(run))
    run.store.put("summary.json", b"{}")
    assert restart_supervisor(flow_run, run) is None
    assert len(of(run)) == 4


def test_exhausted_restart_budget_fails_the_flow_run(deployment: str, run: RunContext) -> None:
    flow_run = crashed(deployment, given(run))
    for attempt in (1, 2):
        successor = restart_supervisor(flow_run, run)
        assert successor is not None
        assert successor.pending is not None
        assert (successor.pending.attempt, successor.pending.reason) == (attempt, "killed")
        flow_run = successor.flow_run
        with open_client() as client:
            client.set_flow_run_state(flow_run, Crashed(message="killed. By the test"), force=True)
    with pytest.raises(RestartsExhausted, match="restarted 2 times within 600 s"):
        restart_supervisor(flow_run, run)
    with open_client() as client:
        state = client.read_flow_run(flow_run).state
    assert state is not None
    assert state.is_failed()
    assert "2 times" in str(state.message)
    assert restart_supervisor(flow_run, run) is None  # a later call restarts nothing, either


def test_daily_supervisor_deaths_are_survived(
    deployment: str, run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, days = time.time(), 31
    died: dict[UUID, float] = {}  # the times at which flow runs died; the server stores real times
    monkeypatch.setattr(crashed_module, "ended_at", lambda one: died[one.id])
    flow_run = crashed(deployment, given(run))
    for day in range(days):
        with open_client() as client:
            client.set_flow_run_state(flow_run, Crashed(message="killed"), force=True)
        died[flow_run] = now - (days - 1 - day) * 24 * 3600.0
        successor = restart_supervisor(flow_run, run)
        assert successor is not None
        assert successor.pending is not None
        assert successor.pending.attempt == day + 1
        flow_run = successor.flow_run
    assert len(of(run)) == 1 + days


def test_each_death_of_a_stage_starts_a_new_flow_run(
    server: PrefectServer, run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real server returns the crashed flow run if it is asked with the same key."""
    name, now = f"d-{uuid.uuid4().hex[:6]}", [0.0]
    monkeypatch.setenv("ROLLFLOW_DEPLOYMENT", name)
    stages = Stages(run, "127.0.0.1:1", print)
    stages.restarts.budget = RestartBudget(run.config.recovery, lambda: now[0])
    stage, seen = stages.all["train"], []
    with open_client() as client:
        client.create_deployment(flow_id=client.create_flow_from_name("train"), name=name)
        for _ in range(8):
            stages._update_stage(stage, client, {})
            assert stage.run is not None
            seen.append(stage.run)
            stages._update_stage(stage, client, states_of(client, [stage.run]))
            assert stage.state == "Scheduled"
            client.set_flow_run_state(stage.run, Running(), force=True)
            client.set_flow_run_state(stage.run, Crashed(message="killed"), force=True)
            stages._update_stage(stage, client, states_of(client, [stage.run]))
            now[0] += 24 * 3600.0
    assert len(set(seen)) == 8


def test_stage_that_is_being_cancelled_is_replaced(
    server: PrefectServer, run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed immediately starts before its runner has noticed the end of the cancelled stages."""
    monkeypatch.setenv("ROLLFLOW_DEPLOYMENT", name := f"d-{uuid.uuid4().hex[:6]}")
    before, after = Stages(run, "127.0.0.1:1", print), Stages(run, "127.0.0.1:1", print)
    with open_client() as client:
        for role in before.all:
            client.create_deployment(flow_id=client.create_flow_from_name(role), name=name)
        before._adopt(client)
        for stage in before.all.values():
            assert stage.run is not None
            client.set_flow_run_state(stage.run, Running(), force=True)
        assert before.all["train"].run is not None
        cancel_flow_run(client, before.all["train"].run)
        after._adopt(client)
    same = {role for role, stage in after.all.items() if stage.run == before.all[role].run}
    assert same == {"rollout", "reward"}
    assert after.all["train"].run is not None


def test_restart_pause_doubles_with_recent_crashes() -> None:
    limits = RecoveryConfig(restarts=4, window_seconds=100, backoff_seconds=1)
    now = 1000.0
    assert [pause_before([now] * n, now, limits) for n in (1, 2, 3, 4)] == [0.0, 1.0, 2.0, 4.0]
    assert pause_before([now - 100] * 9 + [now], now, limits) == 0.0
    assert pause_before([now + 3600] * 9 + [now], now, limits) == 0.0  # the clock stepped back
    with pytest.raises(RestartsExhausted):
        pause_before([now] * 5, now, limits)


def test_restarted_supervisor_is_newer_despite_a_wrong_clock(
    deployment: str, run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Prefect server's clock steps back by an hour between a supervisor and its successor."""
    first = crashed(deployment, given(run))
    second = restart_supervisor(first, run)
    assert second is not None
    monkeypatch.setattr(
        crashed_module, "list_supervisors", lambda client, most: sorted(list_supervisors(client, most), key=created_at)
    )
    late = restart_supervisor(first, run)
    assert late is not None
    assert (late.flow_run, late.pending) == (second.flow_run, None)
    with open_client() as client:
        client.set_flow_run_state(second.flow_run, Crashed(message="killed. By the test"), force=True)
    third = restart_supervisor(second.flow_run, run)
    assert third is not None
    assert third.pending is not None
    assert third.flow_run not in (first, second.flow_run)


def test_run_without_id_is_found_by_its_prefect_flow_run(deployment: str, run: RunContext) -> None:
    flow_run = crashed(deployment, {"config": CONFIG})
    with open_client() as client:
        unnamed = attach_run(run_uri(client.read_flow_run(flow_run)))
    assert unnamed.uri.rpartition("/")[2].startswith("tiny-")
    successor = restart_supervisor(flow_run, unnamed)
    assert successor is not None
    assert of(unnamed) == [successor.flow_run, flow_run]


def test_serve_resumes_a_crashed_run_once(deployment: str, run: RunContext) -> None:
    flow_run = crashed(deployment, given(run))
    told: list[str] = []
    pick_up = SupervisorRestarter(deployment)
    for _ in range(2):
        pick_up.look(told.append)
    assert told == [f"run {run.run_id} is restarted: killed"]
    newest, *older = of(run)
    assert older == [flow_run]
    with open_client() as client:
        client.set_flow_run_state(newest, Running(), force=True)
    pick_up.look(told.append)
    until(lambda: RecoveryLog(run.store).read())
    assert [one.role for one in RecoveryLog(run.store).read()] == ["supervisor"]


def test_orphaned_flow_runs_are_marked_crashed(deployment: str, run: RunContext) -> None:
    with open_client() as client:
        waiting, running = (start(client, "post-training", deployment, given(run), name=n) for n in ("w", "r"))
        client.set_flow_run_state(running, Running(), force=True)
    assert crash_orphans(deployment, "the runner died") == ["r"]
    with open_client() as client:
        assert [one.id for one in unfinished_runs(client, deployment)] == [waiting]
    assert crash_orphans(deployment, "its session died", scheduled=True) == ["w"]


def test_prefect_automations_are_installed_once(deployment: str) -> None:
    with open_client() as client:
        supervisor = client.read_deployment_by_name(f"post-training/{deployment}").id
        recover = client.create_deployment(flow_id=client.create_flow_from_name("recover"), name=deployment)
    seen = []
    for first in (supervisor, supervisor, recover):
        install_automations(deployment, {f"post-training/{deployment}": first, f"recover/{deployment}": recover})
        with open_client() as client:
            seen.append(
                {one.name: (one.id, one.description) for one in client.read_automations() if deployment in one.name}
            )
    assert len(seen[0]) == 2
    assert seen[0] == seen[1]
    assert {name: id for name, (id, _) in seen[0].items()} == {name: id for name, (id, _) in seen[2].items()}
    assert seen[0] != seen[2]


def test_dying_server_ends_the_run_command_with_the_reason(tmp_path: Path) -> None:
    service = Runner(tmp_path / "log", {}, module="http.server", arguments=["0", "--bind", "127.0.0.1"])
    limits = RecoveryConfig(restarts=2, backoff_seconds=0.01)
    services, recovered = ServiceKeeper("none", {"files": service}, limits), list[Recovery]()
    with service:
        for attempt in (1, 2):
            service.kill()
            until(lambda attempt=attempt: services.look(recovered.append) or len(recovered) == attempt)  # type: ignore[misc]
            assert service.running
        service.kill()
        with pytest.raises(RestartsExhausted, match="files was restarted 2 times"):
            services.look(recovered.append)
    assert [(one.role, one.reason, one.attempt) for one in recovered] == [
        ("files", "its process ended", n) for n in (1, 2)
    ]


@pytest.fixture(scope="module")
def runner(server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Serve a trivial supervisor for all runs of the module."""
    home = tmp_path_factory.mktemp("runner")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = server.env | {"ROLLFLOW_HOME": str(home), "ROLLFLOW_DEPLOYMENT": "trivial", "PYTHONPATH": path}
    ready, module = home / "ready", "tests.support.trivial_supervisor"
    arguments = ["--ready", str(ready), "--automations"]
    with Runner(home / "runner.log", env, module=module, arguments=arguments, ready=ready) as runner:
        yield runner


@pytest.mark.soak
def test_run_command_survives_death_of_supervisor_and_servers(
    server: PrefectServer, runner: Runner, run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that steps back by an hour at the start changes nothing."""
    session = Session("trivial", server.ui_url, {SERVER: server, RUNNER: runner})
    following, real = session.follow(run, session.submit(run, time.time())), time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + 3600.0)
        next(following)

    def kill(pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    todo: list[tuple[str, Callable[[RunStatus], None]]] = [
        ("supervisor", lambda status: kill([int(status.messages[-1])])),
        ("prefect server", lambda status: kill([server._process.pid])),  # kills the guard process of the server
        ("runner", lambda status: kill(runner.processes[:1])),
    ]
    log = RecoveryLog(run.store)
    expected, phases = 0, []
    for status in following:
        phases.append(status.phase)
        if status.phase != "training" or len(log.read()) < expected:
            continue
        if todo:
            role, act = todo.pop(0)
            act(status)
            expected += 2 if role == "runner" else 1  # the supervisor's flow run ends with the runner
        else:
            run.store.put("go", b"")
    assert phases[-1] == "done"
    assert "failed" not in phases
    assert sorted(one.role for one in log.read()) == ["prefect server", "runner", "supervisor", "supervisor"]
    assert len(of(run)) == 3


@pytest.mark.soak
def test_run_ends_if_its_supervisor_keeps_failing(server: PrefectServer, runner: Runner, run: RunContext) -> None:
    session = Session("trivial", server.ui_url, {SERVER: server, RUNNER: runner})
    run.store.put("fail", b"")
    *_, last = session.follow(run, session.submit(run, time.time()))
    assert last.phase == "failed"
    assert last.messages[-1] == "ValueError: told to fail"
    assert len(of(run)) == 1


def test_prefect_automation_restarts_the_supervisor(server: PrefectServer, runner: Runner, run: RunContext) -> None:
    Session("trivial", server.ui_url, {}).submit(run, time.time())
    until(lambda: read_status(run))
    status = read_status(run)
    assert status is not None
    os.kill(int(status.messages[-1]), signal.SIGKILL)
    until(lambda: RecoveryLog(run.store).read())
    run.store.put("go", b"")
    until(lambda: run.store.exists("summary.json"))
    assert [one.role for one in RecoveryLog(run.store).read()] == ["supervisor"]
    assert len(of(run)) == 2


NODE_CLIENT = """
import sys, time
import ray
from rollflow.flows.ray_cluster import cluster
from rollflow.storage.errors import EngineFailed
cluster.attach(sys.argv[1], "test")

@ray.remote(num_cpus=0, resources={"second": 1}, lifetime="detached", name="far")
class Far:
    def hang(self):
        time.sleep(600)

far = Far.remote()
waiting = far.hang.remote()
cluster.has_ended(waiting, 1.0)
print("up", flush=True)
sys.stdin.readline()
try:
    cluster.call_within(waiting, 150, "an answer from afar", died=EngineFailed)
except EngineFailed:
    limit = time.monotonic() + 150
    while len([node for node in ray.nodes() if node["Alive"]]) > 1 and time.monotonic() < limit:
        time.sleep(0.1)
    print("dead", len([node for node in ray.nodes() if node["Alive"]]))
"""


@pytest.mark.parametrize("deaths", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_death_of_a_ray_node_is_noticed(tmp_path: Path, deaths: int) -> None:
    head = RayHead(tmp_path, cpus=1)
    node = RayNode(head, resources={"second": 1})
    head.start()
    try:
        for _ in range(deaths):
            node.restart()
            command = [sys.executable, "-c", NODE_CLIENT, head.address]
            pipe = subprocess.PIPE
            client = subprocess.Popen(command, env=os.environ | head.env, stdin=pipe, stdout=pipe, text=True)
            assert client.stdout is not None
            assert client.stdout.readline() == "up\n"
            names = {pid: Path("/proc", str(pid), "cmdline").read_bytes() for pid in node.processes}
            os.kill(next(pid for pid, name in names.items() if b"/raylet/raylet" in name), signal.SIGKILL)
            output, _ = client.communicate("go\n", timeout=2 * HANG_SECONDS)
            assert "dead 1" in output.splitlines(), output[-2000:]  # Ray prints further lines
            assert head.running
            until(lambda: not node.running)  # the node's other processes end with its raylet
        os.kill(next(pid for pid in head.processes if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes()), 9)
        until(lambda: not head.running)
        head.restart()
    finally:
        stop_together(head, node)
