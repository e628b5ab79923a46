"""Tests the backup and restore that `docs/recovery.md` describes: the Postgres database of real services is lost during
a run.

The restored databases are older than the run, so neither Prefect nor MLflow knows its newest versions. `resume` writes
the run to both again. Therefore, a user's own Prefect variable and MLflow experiment show that the databases were
restored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.support.compose import Compose, why_not
from tests.support.waiting import HANG_SECONDS, RUN_SECONDS, until

pytestmark = [pytest.mark.slow, pytest.mark.soak]

VERSIONS = 16
FOLDER = "/home/postgres/backup"
RECIPE = f"""
name = "drill"
versions = {VERSIONS}
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
max_concurrent_requests = 16
max_new_tokens = 8

[evaluation]
prompts = 8
every = 0

[cluster]
address = "ray:6379"

[tracking]
uri = "http://mlflow:5000"
"""
METRICS = """
import json
from mlflow import MlflowClient
client = MlflowClient("http://mlflow:5000")
(experiment,) = client.search_experiments(filter_string="name = 'drill'")
runs = client.search_runs([experiment.experiment_id])
steps = [[metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")] for run in runs]
print(json.dumps([[run.info.status for run in runs], steps]))
"""
PERSON = """
from mlflow import MlflowClient
print(MlflowClient("http://mlflow:5000").create_experiment("of_a_person"))
"""
OF_A_PERSON = """
from mlflow import MlflowClient
print(MlflowClient("http://mlflow:5000").get_experiment_by_name("of_a_person").experiment_id)
"""
FLOW_RUNS = """
import json
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    print(json.dumps([[run.name, run.state_type.value] for run in client.read_flow_runs()]))
"""


@pytest.fixture
def compose() -> Iterator[Compose]:
    if reason := why_not():
        pytest.skip(reason)
    with Compose() as services:
        services.machines["ray"].path("/home/rollflow/home/drill.toml").write_text(RECIPE)
        yield services.up()


def execute(compose: Compose, name: str, *command: str, **environment: str) -> str:
    """Run a command in the container of a service, and check that the command succeeds."""
    done = compose.execute(name, [*command], seconds=RUN_SECONDS, **environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{compose.output(name)}"
    return done.stdout


def backup(compose: Compose, action: str) -> None:
    entry = {"PGHOST": "127.0.0.1", "PGPASSWORD": compose.values["POSTGRES_PASSWORD"]}
    execute(compose, "postgres", "sh", "infra/backup.sh", action, FOLDER, **entry)


def version(compose: Compose) -> int:
    """Return the newest version in the run's storage, or -1 before the run has begun."""
    done = compose.execute("ray", ["rollflow", "status", "drill", "--json"], seconds=HANG_SECONDS)
    return int(json.loads(done.stdout)["version"]) if done.returncode == 0 else -1


def last_line(compose: Compose, program: str) -> str:
    """Run a Python program in a container of the services, and return the last line that the program prints."""
    return execute(compose, "ray", "python", "-c", program).splitlines()[-1]


def test_run_survives_the_loss_of_the_postgres_database(compose: Compose) -> None:
    execute(compose, "ray", "prefect", "variable", "set", "of_a_person", "kept")
    experiment = last_line(compose, PERSON)
    run = compose.begin("ray", ["rollflow", "run", "/home/rollflow/home/drill.toml", "--run-id", "drill"])

    def reached(wanted: int) -> bool:
        assert run.poll() is None, compose.output("ray")
        time.sleep(2.0)  # each check starts a command
        return version(compose) >= wanted

    until(lambda: reached(2), RUN_SECONDS)
    backup(compose, "save")
    saved = version(compose)
    until(lambda: reached(saved + 2), RUN_SECONDS)

    compose.kill("ray", "prefect", "mlflow", "postgres")
    compose.lose_databases()
    delete = "import s3fs; s3fs.S3FileSystem().rm('rollflow/store/runs/drill', recursive=True)"
    execute(compose, "ray", "python", "-c", delete)
    gone = compose.execute("ray", ["rollflow", "status", "drill"], seconds=HANG_SECONDS)
    assert gone.returncode == 2, gone.stdout

    execute(compose, "ray", "python", "infra/bucket.py", "rollflow", "--undelete", "store/runs/drill/")
    compose.start("postgres")
    compose.wait("postgres", "service_healthy")
    backup(compose, "restore")
    for name in ("prefect", "mlflow", "ray"):
        compose.start(name)
    for name in ("prefect", "mlflow", "ray"):
        compose.wait(name, "service_healthy")

    assert "kept" in execute(compose, "ray", "prefect", "variable", "get", "of_a_person")
    assert last_line(compose, OF_A_PERSON) == experiment

    said = execute(compose, "ray", "rollflow", "resume", "drill")
    assert "clean" in said
    assert "clean" in execute(compose, "ray", "rollflow", "audit", "drill", "--deep")
    statuses, steps = json.loads(last_line(compose, METRICS))
    assert statuses == ["FINISHED"]
    assert steps == [[*range(1, VERSIONS + 1)]], "each version once, those between backup and loss too"
    flow_runs = json.loads(last_line(compose, FLOW_RUNS))
    assert flow_runs
    assert not [one for one in flow_runs if one[1] in ("RUNNING", "PENDING", "CANCELLING")], flow_runs
