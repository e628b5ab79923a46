"""Tests random SIGKILL of the processes of whole runs: the runs recover by themselves, and nothing is lost."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import chaos
from benchmarks.chaos import EVERYTHING, Victim, one_run
from benchmarks.victims import ROLES, kill_everything
from rollflow.flows.commands.cli import main
from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import open_store
from rollflow.storage.policies import PolicyStore
from rollflow.storage.run_records.recoveries import RecoveryLog
from rollflow.storage.trajectories import TrajectoryStore
from tests.support.described import change_config
from tests.support.waiting import RUN_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.soak]

SYNCHRONOUS = """
name = "small"
versions = 100
async_ratio = 0
groups = 8
group_size = 4

[policy.cold_start]
hidden_size = 32
layers = 2
heads = 2
target_accuracy = 0.05
evaluate_every = 5

[[prompts]]
kind = "reasoning-gym"
family = "basic_arithmetic"
options = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1, operators = ["+"], allow_negation = false }

[engine]
kind = "transformers"
replicas = 2
max_new_tokens = 6
max_concurrent_requests = 16

[evaluation]
prompts = 8
every = 0

[recovery]
restarts = 100
backoff_seconds = 0.1
"""
# The recipe `SYNCHRONOUS`, with every optional part of the learner's state.
WITH_ROLES = f"""{SYNCHRONOUS}
[train]
minibatches = 2
objective = {{ kind = "ppo", penalties = {{ kl_to = "reference", kl_weight = 0.01, kl_target = 0.01 }} }}
reference = {{ every = 7 }}
"""
VERSIONS = 100_000  # so many versions that the run does not end before the kills, even on a slow machine
STAGES = {"rollout stage", "train stage", "reward stage"}
WITNESSED = STAGES | {"learner", "rollout", "reward", "channel", "engine", "supervisor", "runner", "prefect server"}
KILLED = ("scheduler", "learner", "engine", "channel", "reward worker", "reward actor", EVERYTHING)


class Shortened(Victim):
    """A run that ends soon after it is resumed."""

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        if arguments[0] == "resume":
            self.versions = self.version() + 20
            change_config(self.store, versions=self.versions)
            self.log = Log(self.store)  # the log is opened again, because `change_config` wrote all entries again
        return super()._start(*arguments)


def test_run_survives_kills_of_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "Victim", Shortened)
    home = tmp_path / "home"
    order = random.Random().sample(ROLES, len(ROLES))
    seed = random.randrange(10**6)
    outcome = one_run(home, "timed", [*order, EVERYTHING], seed, VERSIONS, settled=True)
    assert outcome.violations == []
    assert [kill.role for kill in outcome.kills] == [*order, EVERYTHING]
    assert outcome.right
    assert (outcome.lost, outcome.doubled) == (0, 0)
    store = open_store(str(home / "store/runs/chaos"))
    recovered = Counter(recovery.role for recovery in RecoveryLog(store).read())
    # Two deaths within a second may share one recovery record.
    kinds = {role.split("-")[0] for role in recovered}
    assert kinds <= WITNESSED, kinds
    assert len(kinds) >= len(WITNESSED) - 2, kinds
    summary = json.loads(store.get("summary.json"))
    assert summary["recoveries"] == dict(recovered)
    assert_in_mlflow(home, sum(recovered.values()), summary["versions"])


def assert_in_mlflow(home: Path, recoveries: int, versions: int) -> None:
    """Check that each recovery is counted, and each version is logged once."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    [experiment] = [e for e in client.search_experiments() if e.name != "Default"]
    [found] = client.search_runs([experiment.experiment_id])
    names = [name for name in found.data.metrics if name.startswith("recovery/")]
    points = [point.step for name in names for point in client.get_metric_history(found.info.run_id, name)]
    assert sorted(points) == list(range(1, recoveries + 1))
    logged = client.get_metric_history(found.info.run_id, "rollout/reward")
    assert [m.step for m in logged] == list(range(1, versions + 1))


def sampled(run: Path, versions: int) -> tuple[list[list[str]], list[object]]:
    """Return the hashes of all weights of a run, and all trajectories without their times."""
    store = open_store(str(run))
    assert audit(store, deep=True).clean
    log = Log(store)
    policies, batches = PolicyStore(log), TrajectoryStore(log)
    found = [policies.find(version) for version in range(versions + 1)]
    weights = [[stored.sha256 for stored in version.weights] for version in found]
    assert len({tuple(hashes) for hashes in weights}) > versions / 2, "most versions learned nothing"
    files = [batches.read_commit(version.batch_entry).file for version in found if version.batch_entry is not None]
    tables = [TrajectoryBatch.from_bytes(batches.read(file)).table for file in files]
    return weights, [table.drop(["generation_seconds", "reward_seconds"]).to_pylist() for table in tables]


@pytest.mark.parametrize("recipe", [SYNCHRONOUS, WITH_ROLES], ids=["plain", "roles"])
def test_killed_synchronous_run_is_bit_identical(tmp_path: Path, recipe: str) -> None:
    quiet = Victim(tmp_path / "quiet", recipe)
    assert quiet.finish([], RUN_SECONDS).right
    draw = random.Random()
    killed = Victim(tmp_path / "killed", recipe)
    try:
        killed.wait_version(1, RUN_SECONDS)  # before the first version there may be no run to resume
        for role in draw.choices(KILLED, k=10):
            time.sleep(draw.uniform(0.0, 0.5))
            kill = killed.strike_everything() if role == EVERYTHING else killed.strike(role, draw, record=False)
            print(f"at version {killed.newest}: {kill}")
        outcome = killed.finish([], RUN_SECONDS)
    finally:
        kill_everything(killed.home)
    assert outcome.right, outcome
    runs = "store/runs/chaos"
    assert sampled(tmp_path / "killed" / runs, 100) == sampled(tmp_path / "quiet" / runs, 100)
    assert main(["replay", str(tmp_path / "killed" / runs), "--all"]) == 0  # every version, from its recorded batch
