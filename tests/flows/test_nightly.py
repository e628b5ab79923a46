"""Tests that nights never overlap, that each continues from the last one, and that only a significantly better version
gets the alias.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from prefect.blocks.abstract import NotificationBlock
from prefect.states import Crashed, Failed, Pending, Running

from rollflow.flows import nightly as nightly_module
from rollflow.flows.commands.cli import main
from rollflow.flows.config import load_recipe
from rollflow.flows.deployments import offer_nightly
from rollflow.flows.locations import context_of, list_runs
from rollflow.flows.nightly import Nightly, _judge, nightly, read_nightly, run_night, train_here
from rollflow.flows.prepare import prepare
from rollflow.flows.registration.prefect_api import SERVED, open_client, start
from rollflow.flows.registration.registering import register
from rollflow.flows.services.process import PrefectServer
from rollflow.flows.tracking.registry import EvaluationScore, RegisteredVersion, z_score
from rollflow.storage.errors import Unreachable
from rollflow.tasks.policies.config import PolicyConfig
from rollflow.tasks.rollout.evaluation import Evaluation, store_evaluation
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from tests.support.prefect_home import use_server
from tests.support.small_run import make_policy, train_small

RECIPE = """
name = "math"
versions = 2
groups = 2
group_size = 4
async_ratio = 1
[policy]
path = "{policy}"
[engine]
kind = "transformers"
max_new_tokens = 8
[evaluation]
prompts = 4
"""
FIRST = datetime(2026, 10, 24, 23, tzinfo=UTC)  # 01:00 in Berlin, in the night in which the clocks there go back
NIGHT = timedelta(days=1)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nightly:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ROLLFLOW_STORE", raising=False)
    make_policy(tmp_path / "policy")
    (tmp_path / "math.toml").write_text(RECIPE.format(policy=tmp_path / "policy"))
    file = tmp_path / "nightly.toml"
    file.write_text('recipes = ["math.toml"]\ntimezone = "Europe/Berlin"\nfrom_last = true\nkeep = 2\n')
    return read_nightly(file)


class Trainer:
    """Trains real runs with made-up batches; the test sets the accuracy of the last version."""

    def __init__(self) -> None:
        self.right: float | None = None  # the accuracy of the next run; None if the training fails
        self.begun_with: list[str | None] = []

    def __call__(self, config: RunConfig, run_id: str, seconds: float) -> RunContext:
        self.begun_with.append(config.policy.path)
        if self.right is None:
            raise Unreachable(f"run {run_id} took longer than {seconds / 3600:g} hours and was stopped")
        context = prepare(config, run_id)
        train_small(context)
        store_evaluation(context.store, Evaluation(config.versions, self.right, self.right, 1000, 4.0, pinned=True))
        return context


def test_four_nights_promote_prune_and_continue(plan: Nightly, tmp_path: Path) -> None:
    train, home = Trainer(), tmp_path / "home"
    registry = MlflowClient(*[f"sqlite:///{home}/mlflow/mlflow.db"] * 2)
    results, best = [], []
    for night, right in enumerate((0.30, 0.31, None, 0.40)):
        train.right = right
        [report] = run_night(plan, FIRST + night * NIGHT, train)
        results.append((report.run_id, report.ok, report.result))
        best.append(registry.get_model_version_by_alias("math", "best").tags["run"])
        if night == 1:
            assert (home / "store/runs" / results[0][0]).exists()
    ids = [f"math-night-{stamp}" for stamp in ("20261024-2300", "20261025-2300", "20261026-2300", "20261027-2300")]
    assert [run_id for run_id, _, _ in results] == ids
    assert best == [ids[0], ids[0], ids[0], ids[3]]
    assert [ok for _, ok, _ in results] == [True, True, False, True]
    assert "not promoted" in results[1][2]
    assert "took longer than 6 hours" in results[2][2]
    assert re.search(r"40.0% of 1000 held-out answers; promoted: .* has 30.0% .* z = 4\.\d\d", results[3][2])
    versions = home / "nightly/math"
    last = [str(tmp_path / "policy"), str(versions / ids[0]), *[str(versions / ids[1])] * 2]
    assert train.begun_with == last
    # the first night is neither new nor the best, so it is pruned
    assert sorted(one.name for one in versions.iterdir()) == [ids[1], ids[3]]
    assert not [one for one in (home / "store/runs" / ids[0]).rglob("*") if one.is_file()]
    [again] = run_night(plan, FIRST + 3 * NIGHT, lambda *_: RunContext(f"{home}/store/runs/{ids[3]}", home / "cache"))
    assert again.ok
    left = [one.tags["run"] for one in registry.search_model_versions("name='math'")]
    assert sorted(left) == [ids[1], ids[3]]  # a pruned night without files is not registered


def test_second_night_starts_from_the_policy_of_the_first_night(plan: Nightly, tmp_path: Path) -> None:
    recipe = (tmp_path / "math.toml").read_text()
    chosen = f'path = "{tmp_path}/policy"'
    assert chosen in recipe
    (tmp_path / "math.toml").write_text(recipe.replace(chosen, 'from_run = {run = "sums"}'))
    make_policy(last := tmp_path / "home/nightly/math/math-night-20261024-2300")
    policies: list[PolicyConfig] = []

    def begin(config: RunConfig, run_id: str, seconds: float) -> RunContext:
        policies.append(config.policy)
        raise Unreachable("it is not trained")

    run_night(plan, FIRST + NIGHT, begin)
    assert policies == [PolicyConfig(path=str(last))]


def test_nightly_report_quotes_the_error_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = Failed(message="Flow run encountered an exception: ConfigError: versions = 0: write a number from 1 on")
    monkeypatch.setattr(nightly_module, "_state_of", lambda _: failed)
    said = nightly_module._read_outcome(UUID(int=1), RunContext(f"{tmp_path}/store/runs/a", tmp_path / "cache"))
    assert said == "ConfigError: versions = 0: write a number from 1 on"


def test_nightly_pruning_keeps_aliased_runs_and_other_recipes(plan: Nightly, tmp_path: Path) -> None:
    """Pruning keeps a version with a user's alias, and the run of a recipe with a longer name."""
    train, home = Trainer(), tmp_path / "home"
    registry = MlflowClient(*[f"sqlite:///{home}/mlflow/mlflow.db"] * 2)
    train.right, plan = 0.3, plan.model_copy(update={"keep": 1, "z": 0.0})
    prepare(load_recipe(tmp_path / "math.toml", []), "math-night-club-night-20261024-2300")
    half = home / "nightly/math/.math-night-20261024-2300.x1y2"  # the unfinished folder of an export that was killed
    half.mkdir(parents=True)
    ids = []
    for night in range(4):
        [report] = run_night(plan, FIRST + night * NIGHT, train)
        assert report.ok, report.result
        ids.append(report.run_id)
        if night == 1:
            registry.set_registered_model_alias("math", "mine", "2")
    kept = ["math-night-club-night-20261024-2300", ids[0], ids[1], ids[3]]
    assert sorted(one.run_id for one in list_runs()) == sorted(kept)
    assert sorted(one.name for one in half.parent.iterdir() if one != half) == sorted(kept[1:])
    assert train.begun_with[0] == str(tmp_path / "policy")


def test_no_version_is_promoted_if_the_model_registry_fails(
    plan: Nightly, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train, uri = Trainer(), f"sqlite:///{tmp_path}/home/mlflow/mlflow.db"
    train.right = 0.3
    [first] = run_night(plan, FIRST, train)
    assert first.ok, first.result
    store = f"{tmp_path}/home/store"

    def fails(*_: object) -> None:
        raise MlflowException("the database is locked")

    two = plan.model_copy(update={"recipes": plan.recipes * 2})
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "get_model_version_by_alias", fails)
        reports = run_night(two, FIRST, lambda *_: context_of(store, first.run_id))
    assert [report.ok for report in reports] == [False, False]
    assert reports[0].result == f"failed: MLflow's model registry at {uri} cannot be used: the database is locked"
    registry = MlflowClient(uri, uri)
    registry.set_registered_model_alias("math", "best", registry.create_model_version("math", "hers").version)
    [report] = run_night(plan, FIRST, lambda *_: context_of(store, first.run_id))
    assert "alias = 'best': version 2 of MLflow's model 'math' has this alias, but was not made by" in report.result


def test_z_score_of_two_evaluations_matches_a_hand_calculation() -> None:
    """The share of correct answers over both evaluations is p = 0.5, so the standard error is sqrt(0.25 * 2 / 100) =
    0.0707.
    """
    assert z_score(EvaluationScore(0.6, 100), EvaluationScore(0.4, 100)) == pytest.approx(0.2 / 0.070711, rel=1e-4)
    assert z_score(EvaluationScore(1.0, 8), EvaluationScore(1.0, 8)) == 0.0


@pytest.mark.parametrize(
    ("new", "old", "promoted"), [(100, 100, True), (99, 100, False), (100, 99, False), (5, 5, False)]
)
def test_version_with_too_few_evaluation_answers_is_not_promoted(
    plan: Nightly, new: int, old: int, promoted: bool
) -> None:
    better, said = _judge(RegisteredVersion("1", "monday", EvaluationScore(0.0, old)), EvaluationScore(0.6, new), plan)
    assert better == promoted
    assert promoted or "fewer than answers = 100 held-out answers cannot be compared; raise evaluation.prompts" in said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('timezone = "Nowhere/Land"', "timezone = 'Nowhere/Land': there is no such time zone"),
        ('cron = "every night"', "cron = 'every night': "),
        ("keep = 0", "keep = 0 is less"),
        ("hour = 3", "did you mean hours?"),
    ],
)
def test_bad_nightly_file_gets_a_one_sentence_error(
    plan: Nightly, tmp_path: Path, line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(f'recipes = ["math.toml"]\n{line}\n')
    assert main(["nightly", str(file)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


@pytest.fixture(scope="module")
def server(prefect_server: PrefectServer) -> Iterator[PrefectServer]:
    with use_server(prefect_server):
        yield prefect_server


with_server = [pytest.mark.slow, pytest.mark.xdist_group("prefect")]


class Told(NotificationBlock):
    """A notification block that writes to a file."""

    _block_type_slug = "told"
    file: str

    def notify(self, body: str, subject: str | None = None) -> None:
        Path(self.file).write_text(f"{subject}\n{body}")


@pytest.mark.usefixtures("server")
class TestOnAServer:
    pytestmark = with_server

    def test_nightly_runs_do_not_overlap(self, plan: Nightly) -> None:
        offer = offer_nightly(plan)
        register(offer)
        with open_client() as client:
            there = client.read_deployment_by_name("nightly/nightly")
            assert [one.schedule.model_dump()["timezone"] for one in there.schedules] == ["Europe/Berlin"]
            first, second = (start(client, "nightly", "nightly", {}) for _ in range(2))
            for state in (Pending(), Running()):
                client.set_flow_run_state(first, state)
            client.set_flow_run_state(second, Pending())
            states = [client.read_flow_run(one).state_type for one in (first, second)]
        assert states == ["RUNNING", "CANCELLED"]

    def test_nightly_run_survives_a_server_restart(self, plan: Nightly, server: PrefectServer) -> None:
        """A night's flow run holds a lease on the deployment's concurrency limit. Prefect ends a flow run whose lease a
        restarted server has forgotten.
        """
        register(offer_nightly(plan.model_copy(update={"name": "leased"})))
        with open_client() as client:
            night = start(client, "nightly", "leased", {})
            client.set_flow_run_state(night, Pending())
            details = client.read_flow_run_states(night)[-1].state_details
        lease = details.deployment_concurrency_lease_id
        assert lease
        server.restart()
        with open_client() as client:
            client.renew_concurrency_lease(lease, lease_duration=60)

    def test_failed_nightly_run_is_reported(
        self, plan: Nightly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = tmp_path / "told"
        saved: Any = Told(file=str(told)).save("night")
        assert saved
        monkeypatch.setattr(nightly_module, "train_here", Trainer())
        for block in ("told/night", "told/nobody"):
            state: Any = nightly(plan.model_copy(update={"notify": block}), return_state=True)
            assert state.is_failed()
            assert state.message.startswith("math: failed: run math-night-")
        assert "| math | `math-night-" in told.read_text()
        with open_client() as client:
            assert "nightly-nightly" in {one.key for one in client.read_artifacts()}

    def test_crashed_nightly_run_is_reported(self, plan: Nightly, tmp_path: Path) -> None:
        """The runner reports the crash, because it saw the process die; the test calls the hook as a runner does."""
        told = tmp_path / "crash"
        saved: Any = Told(file=str(told)).save("crash")
        assert saved
        offer = offer_nightly(plan.model_copy(update={"name": "crashing", "notify": "told/crash"}))
        register(offer)
        with open_client() as client:
            night = client.read_flow_run(start(client, "nightly", "crashing", {}))
        [hook] = nightly.on_crashed_hooks
        hook(flow=nightly, flow_run=night, state=Crashed(message="Process exited with status code: -9."))
        assert told.read_text().startswith("crashing: a night crashed\n")
        assert f"{night.name}: Process exited with status code: -9." in told.read_text()

    def test_nightly_run_over_its_time_limit_is_stopped(self, plan: Nightly, monkeypatch: pytest.MonkeyPatch) -> None:
        with open_client() as client:
            client.create_deployment(flow_id=client.create_flow_from_name("post-training"), name=SERVED)
        monkeypatch.setattr(nightly_module, "POLL_SECONDS", 0.1)
        name = f"math-night-{time.strftime('%Y%m%d-%H%M', time.gmtime())}"
        with pytest.raises(
            Unreachable, match=r"took longer than .* hours, the limit in the file of nightly runs, and was stopped"
        ):
            train_here(RunConfig(name="math"), name, 0.3)
        with open_client() as client:
            [run] = [one for one in client.read_flow_runs() if one.name == name]
        assert run.state_type == "CANCELLED"
