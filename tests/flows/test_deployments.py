"""Tests that registering deployments keeps a user's changes in the UI, and that a command's deployments are deleted at
its end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect.states import Cancelled, Pending, Running, Scheduled, Suspended

from rollflow.flows.config import load_recipe
from rollflow.flows.deployments import list_deployments
from rollflow.flows.evaluate import evaluate
from rollflow.flows.registration import prefect_api, registering
from rollflow.flows.registration.prefect_api import (
    OF_SESSION,
    SERVED,
    crash_orphans,
    open_client,
    start,
    unfinished_runs,
)
from rollflow.flows.registration.registering import DeploymentOffer, list_superseded, register, sweep, withdraw
from rollflow.flows.services.process import PrefectServer, Runner
from rollflow.tasks.run.config import RunConfig
from tests.support.prefect_home import served
from tests.support.waiting import RUN_SECONDS, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("prefect")]

BUSY = 503
CRON = {"cron": "0 2 * * *", "timezone": "Europe/Berlin"}
RECIPE = '# A small one.\nname = "{name}"\nversions = {versions}\n[policy]\npath = "p"\n'


class Page:
    """The Prefect UI's actions, through the HTTP API that it uses."""

    def __init__(self, server: PrefectServer) -> None:
        user, _, secret = server.env["PREFECT_API_AUTH_STRING"].partition(":")
        self._client = httpx.Client(base_url=server.api_url, auth=(user, secret), timeout=60)

    def ask(self, how: str, where: str, what: Any = None) -> Any:
        while (answer := self._client.request(how, where, json=what)).status_code == BUSY:
            time.sleep(1)  # SQLite was locked for longer than the server waits
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def read(self, name: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/deployments/name/{name}"))

    def all(self) -> set[str]:
        return {one["name"] for one in self.ask("POST", "/deployments/filter", {})}

    def change(self, name: str, **what: Any) -> None:
        self.ask("PATCH", f"/deployments/{self.read(name)['id']}", what)

    def schedule(self, name: str) -> None:
        self.ask("POST", f"/deployments/{self.read(name)['id']}/schedules", [{"active": True, "schedule": CRON}])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[PrefectServer]:
    with served(tmp_path_factory.mktemp("deployments"), prefect_database) as server:
        yield server


@pytest.fixture
def offer(server: PrefectServer) -> DeploymentOffer:
    return DeploymentOffer(evaluate, f"o-{uuid.uuid4().hex[:6]}", {"version": 3}, "as we say", ("ours",))


def test_registering_deployments_keeps_user_changes(server: PrefectServer, offer: DeploymentOffer) -> None:
    page, name = Page(server), f"evaluate/{offer.name}"
    made = register(offer)
    assert page.read(name)["parameters"] == {"version": 3}
    page.schedule(name)
    page.change(name, paused=True)
    page.change(name, description="mine")
    newer = replace(offer, parameters={"version": 4}, description="as we say now", tags=("ours", "new"))
    for _ in range(2):
        assert register(newer) == made
        there = page.read(name)
        assert (there["description"], there["parameters"], there["tags"]) == ("mine", {"version": 4}, ["new", "ours"])
        assert there["paused"]
        assert [one["schedule"]["cron"] for one in there["schedules"]] == [CRON["cron"]]
    page.change(name, parameters={"version": 9}, tags=["hers"])
    register(replace(newer, parameters={"version": 5}, tags=()))
    assert (page.read(name)["parameters"], page.read(name)["tags"]) == ({"version": 9}, ["hers"])
    # the user restored the registered value, so the next registration may change it
    page.change(name, parameters={"version": 4})
    register(replace(newer, parameters={"version": 5}))
    assert page.read(name)["parameters"] == {"version": 5}


def test_prefect_schedule_creates_flow_runs(server: PrefectServer, offer: DeploymentOffer) -> None:
    """The Prefect server's own scheduler plans flow runs; the scheduler fails with an SQLAlchemy version that Prefect
    does not support.
    """
    register(replace(offer, cron=("0 2 * * *", "Europe/Berlin"), tags=("nightly",)))
    with open_client() as client:
        until(lambda: {run.deployment_id for run in unfinished_runs(client, SERVED) if run.auto_scheduled})


def test_recipe_deployments_are_listed_before_internal_ones(server: PrefectServer, offer: DeploymentOffer) -> None:
    """Prefect's page and server sort deployments by name. The recipes come first among the deployments of `rollflow
    serve` and of other commands.
    """
    recipe = replace(offer, name=f"yellow-{offer.name}", tags=("recipe",))
    ours = [*list_deployments(SERVED), *list_deployments("arithmetic-20260101-120000-0a1b2c3d")]
    made = [register(one) for one in (recipe, min(ours, key=lambda one: one.name))]  # the first of all others
    # the page of deployments sorts them like this
    there = Page(server).ask("POST", "/deployments/filter", {"sort": "NAME_ASC"})
    assert next(one["name"] for one in there if one["id"] in map(str, made)) == recipe.name
    with open_client() as client:
        for one in made:
            client.delete_deployment(one)


def test_flow_runs_with_older_deployment_names_are_started(server: PrefectServer) -> None:
    """A flow run that was suspended under an older version of rollflow is resumed by this version."""
    page, offers = (
        Page(server),
        [one for one in list_deployments(SERVED) if one.flow_name in ("evaluate", "post-training")],
    )
    for one in offers:
        register(replace(one, name=SERVED))
    with open_client() as client:
        waits = start(client, "post-training", SERVED, {"config": RunConfig().model_dump(mode="json")})
        old = [one for one in offers if one.flow_name == "post-training"]
        assert [(one.flow_name, one.name) for one in list_superseded(offers, SERVED)] == [("post-training", SERVED)]
        assert page.all() & {SERVED} == {SERVED}
        for one in offers:
            register(one)
        newer = start(client, "post-training", SERVED, {"config": RunConfig().model_dump(mode="json")})
        served_by = {run: client.read_flow_run(run).deployment_id for run in (waits, newer)}
        assert served_by[newer] == UUID(page.read(f"post-training/{old[0].name}")["id"]) != served_by[waits]
        for run in (waits, newer):
            client.set_flow_run_state(run, Cancelled(), force=True)
    assert list_superseded(offers, SERVED) == []
    assert SERVED not in page.all()


def test_repeated_request_creates_no_second_flow_run(
    server: PrefectServer, offer: DeploymentOffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's client repeats a request whose answer did not come in time, although a busy server had already executed
    the request.
    """
    send, lost = httpx.Client.send, list[httpx.Request]()

    def send_slowly(client: httpx.Client, request: httpx.Request, *args: Any, **keys: Any) -> httpx.Response:
        answer = send(client, request, *args, **keys)
        if request.url.path.endswith("/create_flow_run") and not lost:
            lost.append(request)
            raise httpx.ReadTimeout("the server is busy")
        return answer

    register(offer)
    monkeypatch.setattr(httpx.Client, "send", send_slowly)
    with open_client() as client:
        made = start(client, "evaluate", offer.name, {"run": "/somewhere/a"})
        assert lost
        assert [run.id for run in unfinished_runs(client, offer.name)] == [made]
        client.set_flow_run_state(made, Cancelled(), force=True)


def test_unchanged_deployment_is_not_updated(server: PrefectServer, offer: DeploymentOffer) -> None:
    """An update of a deployment would drop the flow runs that its schedule has planned."""
    page, name = Page(server), f"evaluate/{offer.name}"
    register(offer)
    before = page.read(name)["updated"]
    register(offer)
    assert page.read(name)["updated"] == before


def test_deployments_of_ended_sessions_are_deleted(
    server: PrefectServer, offer: DeploymentOffer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page, living, dead = Page(server), *(replace(offer, name=f"{w}-{offer.name}", tags=(OF_SESSION,)) for w in "ld")
    for one in (offer, living, dead):
        register(one)
    assert sweep() == []
    monkeypatch.setattr(registering, "_is_silent", lambda one: one.name == dead.name)
    assert sweep() == [dead.name]
    assert {offer.name, living.name} <= page.all()
    withdraw(living.name, tmp_path)
    withdraw(offer.name, tmp_path)  # no command may delete a deployment of a user or of `rollflow serve`
    assert living.name not in page.all()
    assert offer.name in page.all()


def serving(server: PrefectServer, home: Path) -> Runner:
    env = server.env | {"ROLLFLOW_HOME": str(home), "ROLLFLOW_DEPLOYMENT": SERVED}
    ready = home / "ready"
    arguments = ["--ready", str(ready), "--no-automations"]
    return Runner(home / "runner.log", env, arguments=arguments, ready=ready, start_seconds=180)


@pytest.mark.soak
def test_user_changes_of_deployments_survive_runner_restarts(server: PrefectServer, tmp_path: Path) -> None:
    """The runner of `rollflow serve` is ended, restarted, killed and restarted again while a folder is deployed."""
    page, recipes = Page(server), tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "a.toml").write_text(RECIPE.format(name="mine", versions=7))
    (tmp_path / "deployed.json").write_text(json.dumps([str(recipes)]))
    name = "post-training/mine"
    with serving(server, tmp_path) as runner:
        there = page.read(name)
        assert there["parameters"]["config"]["versions"] == 7
        assert there["tags"] == ["recipe"]
        assert there["description"].startswith("A small one.")
        assert "storage" not in there["parameter_openapi_schema"]["properties"]
        assert page.read("rollout/zz-rollflow")["tags"] == ["internal"]
        assert "sorting" in page.all()
        page.schedule(name)
        page.change(name, paused=True)
        mine = there["parameters"] | {"config": there["parameters"]["config"] | {"versions": 11}}
        page.change(name, parameters=mine)
        (recipes / "b.toml").write_text(RECIPE.format(name="another", versions=3))
        (tmp_path / "deployed.json").write_text(json.dumps([str(recipes), str(recipes)]))
        until(lambda: "another" in page.all())
        runner.restart()
        os.kill(runner.processes[0], signal.SIGKILL)
        until(lambda: not runner.running)
        runner.restart()
        there = page.read(name)
    assert there["paused"]
    assert [one["schedule"]["timezone"] for one in there["schedules"]] == [CRON["timezone"]]
    assert there["parameters"]["config"]["versions"] == 11


def test_each_runner_lists_only_flow_runs_of_its_deployments(server: PrefectServer, offer: DeploymentOffer) -> None:
    other = replace(offer, tags=("recipe",))
    register(other)
    with open_client() as client:
        run = start(client, "evaluate", other.name, {"run": "/somewhere/a"})
        assert run in {one.id for one in unfinished_runs(client, SERVED)}
        assert run not in {one.id for one in unfinished_runs(client, "rollflow-else")}


def test_restarted_servers_keep_planned_and_paused_runs(
    server: PrefectServer, offer: DeploymentOffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect plans the flow run of a night only once. If the planned flow run were marked as crashed, it would never
    run.
    """
    monkeypatch.setattr(prefect_api, "PAGE", 2)
    served = register(replace(offer, tags=("nightly",)))
    tomorrow = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(days=1))
    states: dict[str, list[Any]] = {
        "planned": [tomorrow],
        "due": [Scheduled(scheduled_time=datetime.now(UTC) - timedelta(hours=1))],
        "running": [Pending(), Running()],
        "paused": [Pending(), Running(), Suspended()],
    }
    with open_client() as client:
        made = {
            name: client.create_flow_run_from_deployment(served, parameters={"run": "/a"}, state=first, name=name).id
            for name, (first, *_) in states.items()
        }
        for name, (_, *others) in states.items():
            for state in others:
                client.set_flow_run_state(made[name], state)
        assert set(made.values()) <= {run.id for run in unfinished_runs(client, SERVED)}
        for scheduled, crashed in ((False, {"running"}), (True, {"due", "running"})):
            crash_orphans(SERVED, "its session died", scheduled=scheduled)
            ended = {name for name, one in made.items() if client.read_flow_run(one).state_type == "CRASHED"}
            assert ended == crashed


def test_work_pool_file_deploys_recipes_and_stages_to_the_pool(server: PrefectServer, tmp_path: Path) -> None:
    """Prefect itself reads the file that `deploy --work-pool` prints."""
    recipes, file = tmp_path / "recipes", tmp_path / "prefect.yaml"
    recipes.mkdir()
    (recipes / "a.toml").write_text(RECIPE.format(name="pooled", versions=7))
    environment = {**os.environ, **server.env, "PREFECT_API_URL": server.api_url}
    rollflow = [sys.executable, "-m", "rollflow.flows.commands.cli", "deploy", str(recipes), "--work-pool", "gpus"]
    file.write_text(subprocess.run(rollflow, env=environment, check=True, capture_output=True, text=True).stdout)
    page = Page(server)
    page.ask("POST", "/work_pools/", {"name": "gpus", "type": "process"})
    prefect = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
    subprocess.run(prefect, env=environment, check=True, cwd=tmp_path, timeout=RUN_SECONDS)
    for name in ("post-training/pooled@gpus", "rollout/zz-rollflow@gpus", "train/zz-rollflow@gpus"):
        there = page.read(name)
        assert there["work_pool_name"] == "gpus"
        assert there["entrypoint"].startswith("rollflow.flows.")
        # the run's stages start on the pool, too
        assert there["job_variables"] == {"env": {"ROLLFLOW_DEPLOYMENT": "rollflow@gpus"}}
        assert OF_SESSION not in there["tags"]  # the next command would delete a deployment with this tag
    config = RunConfig.model_validate(page.read("post-training/pooled@gpus")["parameters"]["config"])
    assert config == load_recipe(recipes / "a.toml")
    with open_client() as client:
        theirs = start(client, "post-training", "pooled@gpus", {"config": config.model_dump(mode="json")})
        for state in (Pending(), Running()):
            client.set_flow_run_state(theirs, state)
        # a starting `rollflow serve` does not change the flow runs of workers of a pool
        crash_orphans(SERVED, "its session died", scheduled=True)
        assert client.read_flow_run(theirs).state_type == "RUNNING"
