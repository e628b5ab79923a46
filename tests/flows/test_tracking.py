"""Tests tracking with MLflow on an SQLite store: a resumed run logs no metric twice, secrets are removed, and failures
do not end a run.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollflow.flows.post_training import mlflow_page
from rollflow.flows.tracking import mlflow_payload, tracking
from rollflow.flows.tracking.anchors import read_anchors
from rollflow.flows.tracking.mlflow_payload import KeptVersion, PromptSourceFacts, RunFacts, RunOutcome, build_run_facts
from rollflow.flows.tracking.mlflow_run import VERSION, MetricPoint, MlflowRun, TrackingPlace
from rollflow.flows.tracking.tracking import Curves, Tracker, evaluation_point, version_point
from rollflow.flows.views.parameters import flatten, names_secret, without_secrets
from rollflow.storage.audit.anchors import Anchor
from rollflow.storage.errors import ConfigError
from rollflow.storage.objects import open_store
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.config_changes import change_config
from rollflow.tasks.run.context import RunContext
from tests.support.described import describe
from tests.support.waiting import HANG_SECONDS

PARAMETERS = {
    "name": "arithmetic",
    "train": {"learning_rate": 1e-4, "betas": [0.9, 0.95]},
    "engine": {"max_new_tokens": 64, "api_token": "hidden"},
    "store": {"uri": "s3://me:hidden@bucket/prefix?secret=hidden"},
    "prompts": [{"kind": "reasoning-gym", "password": "hidden"}],
    "AWS_SECRET_ACCESS_KEY": "hidden",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> TrackingPlace:
    return TrackingPlace.default(tmp_path_factory.mktemp("home"), "arithmetic")


def stored(place: TrackingPlace, run_id: str) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=place.uri)
    experiment = client.get_experiment_by_name(place.experiment)
    runs = client.search_runs([experiment.experiment_id], f"tags.`rollflow.run_id` = '{run_id}'")
    assert len(runs) == 1
    return client, runs[0]


def steps(client: Any, run: Any, metric: str) -> list[int]:
    return [point.step for point in client.get_metric_history(run.info.run_id, metric)]


@pytest.mark.slow
def test_resumed_run_logs_no_mlflow_metric_twice(
    place: TrackingPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged, opened = threading.Event(), tracking.open_run

    # opens MLflow after everything is logged, so logging does not wait for MLflow
    def once_all_is_logged(*given: Any) -> Any:
        assert logged.wait(HANG_SECONDS)
        return opened(*given)

    monkeypatch.setattr(tracking, "open_run", once_all_is_logged)
    first = Tracker(place, "run-1", PARAMETERS)
    for version in range(1, 401):
        first.log_version(version, {"reward": version / 400, "loss": 0.1}, when=1000.0 + version)
    first.log_evaluation(400, {"accuracy": 0.5}, when=1400.0)
    logged.set()
    assert first.flush(HANG_SECONDS)  # no call of `finish` follows, as if the process were killed

    resumed = Tracker(place, "run-1", {**PARAMETERS, "seed": 1, "name": "another"})
    for version in range(390, 411):  # versions after the last logged one, and some that are already logged
        resumed.log_version(version, {"reward": 2.0}, when=2000.0 + version)
    resumed.log_evaluation(400, {"accuracy": 0.9}, when=2400.0)
    resumed.log_evaluation(410, {"accuracy": 0.6}, when=2410.0)
    curves = Curves([(1, 0.2), (2, 0.4)], [(0, 0.1), (2, 0.5)], [(1, 0.0), (2, 1.5)], "", {2: [(0, 0.2), (2, 0.6)]})
    resumed.log_reward_plot(curves, tmp_path / "reward.png")
    assert resumed.finish("FINISHED", HANG_SECONDS)
    assert (first.failures, resumed.failures) == (0, 0), resumed.warnings

    client, run = stored(place, "run-1")
    assert steps(client, run, "rollout/reward") == list(range(1, 411))
    assert steps(client, run, "eval/accuracy") == [400, 410]
    assert run.info.run_name == "run-1"
    assert run.info.status == "FINISHED"
    assert run.data.params["name"] == "arithmetic"  # a parameter keeps the value of the run's start
    assert run.data.params["seed"] == "1"
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id)] == ["reward.png"]
    assert (tmp_path / "reward.png").read_bytes()[:4] == b"\x89PNG"
    assert place.artifacts is not None
    assert list(place.artifacts.rglob("reward.png"))
    database = Path(place.uri.removeprefix("sqlite:///")).read_bytes()
    assert b"hidden" not in database
    assert b"max_new_tokens" in database


@pytest.mark.slow
def test_metrics_of_several_versions_take_one_mlflow_call(
    place: TrackingPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, log_points = list[int](), MlflowRun.log_points

    def count(run: MlflowRun, points: Any) -> None:
        calls.append(len(points))
        log_points(run, points)

    monkeypatch.setattr(MlflowRun, "log_points", count)
    monkeypatch.setattr(tracking, "GATHER_SECONDS", HANG_SECONDS)
    tracker = Tracker(place, "run-gathered", PARAMETERS)
    assert tracker.flush(HANG_SECONDS)  # MLflow is open from now on
    for version in range(1, 8):
        tracker.log_version(version, {"reward": version / 8}, when=1000.0 + version)
    assert tracker.flush(HANG_SECONDS)
    assert tracker.finish("FINISHED", HANG_SECONDS)
    client, run = stored(place, "run-gathered")
    assert steps(client, run, "rollout/reward") == list(range(1, 8))
    assert calls == [7]


@pytest.mark.slow
def test_log_hashes_in_mlflow_are_never_replaced(place: TrackingPlace) -> None:
    """MLflow keeps the hashes of log entries (anchors). The tracker of a later supervisor does not replace these
    anchors. A run with another key has its own anchors.
    """
    first = Tracker(place, "run-anchored", PARAMETERS, key="anchored-1")
    first.log_anchor(Anchor(0, "a" * 64))
    first.log_anchor(Anchor(7, "b" * 64))
    assert first.finish("KILLED", HANG_SECONDS)
    again = Tracker(place, "run-anchored", PARAMETERS, key="anchored-1")
    again.log_anchor(Anchor(7, "c" * 64))
    again.log_anchor(Anchor(12, "d" * 64))
    assert again.finish("FINISHED", HANG_SECONDS)
    assert (first.failures, again.failures) == (0, 0), again.warnings
    context: Any = SimpleNamespace(key="anchored-1")
    kept = [Anchor(0, "a" * 64), Anchor(7, "b" * 64), Anchor(12, "d" * 64)]
    assert read_anchors(context, place) == kept
    with pytest.raises(ConfigError, match="MLflow has no anchor of this run"):
        read_anchors(SimpleNamespace(key="another"), place)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="MLflow experiment of this run cannot be read"):
        read_anchors(context, replace(place, uri="sqlite:////proc/none/all.db"))


@pytest.mark.slow
def test_versions_missed_by_mlflow_are_logged_later(place: TrackingPlace) -> None:
    first = Tracker(place, "run-left", PARAMETERS)
    for version in (1, 2, 3):
        first.log_version(version, {"reward": version / 10}, when=1000.0 + version)
    assert first.finish("FAILED", HANG_SECONDS)
    first_again = Tracker(place, "run-left", PARAMETERS)
    first_again.log_evaluation(2, {"accuracy": 0.2}, when=1002.0)
    assert first_again.finish("FAILED", HANG_SECONDS)
    asked: list[tuple[str, range]] = []

    def missed(marker: str, versions: range) -> list[MetricPoint]:
        asked.append((marker, versions))
        if marker == VERSION:
            return [version_point(version, {"reward": version / 10}, 1000.0 + version) for version in versions]
        return [
            evaluation_point(version, {"accuracy": 0.5}, 1000.0 + version) for version in versions if version % 2 == 0
        ]

    second = Tracker(place, "run-left", PARAMETERS, missed=missed)
    for version in (8, 9):
        second.log_version(version, {"reward": version / 10}, when=1000.0 + version)
    second.log_evaluation(8, {"accuracy": 0.8}, when=1008.0)
    assert second.finish("FINISHED", HANG_SECONDS)
    assert sorted(asked) == [("evaluation", range(3, 8)), ("version", range(4, 8))]
    client, run = stored(place, "run-left")
    assert steps(client, run, "rollout/reward") == list(range(1, 10))
    assert steps(client, run, "eval/accuracy") == [2, 4, 6, 8]


@pytest.mark.slow
def test_failed_mlflow_write_is_recorded_and_retried(place: TrackingPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.exceptions import MlflowException

    tracker = Tracker(place, "run-2", {"name": "two"})
    assert tracker.flush(HANG_SECONDS)
    real = MlflowRun.log_points

    def half_written(run: Any, points: Any) -> None:  # MLflow gets the write, but the answer is lost
        real(run, points)
        raise MlflowException("connection reset")

    monkeypatch.setattr(MlflowRun, "log_points", half_written)
    tracker.log_version(1, {"reward": 0.1}, when=1.0)
    assert tracker.flush(HANG_SECONDS)
    assert tracker.failures >= 1
    assert tracker.warnings == ["tracking, writing: MlflowException: connection reset"]
    monkeypatch.setattr(MlflowRun, "log_points", real)
    tracker.log_version(2, {"reward": 0.2}, when=2.0)
    assert tracker.finish("FAILED", HANG_SECONDS)
    client, run = stored(place, "run-2")
    assert steps(client, run, "rollout/reward") == [1, 2]
    assert run.info.status == "FAILED"


@pytest.mark.slow
def test_metric_prefix_separates_training_and_evaluation(place: TrackingPlace) -> None:
    """Training accuracy and held-out accuracy are two metrics; the name "accuracy" alone would be ambiguous."""
    tracker = Tracker(place, "run-4", {})
    metrics = {"accuracy": 0.25, "reward": 0.3, "staleness_0": 4.0, "discarded_stale": 1.0, "groups_sums": 2.0}
    tracker.log_version(1, metrics | {"loss": 0.1, "wait_seconds": 2.0}, when=1.0)
    tracker.log_evaluation(1, {"accuracy": 0.5, "pass_at_4": 0.75}, when=1.0)
    tracker.log_recovery(1, {"learner": 2.0}, when=1.0)
    assert tracker.finish("FINISHED", HANG_SECONDS)
    _, run = stored(place, "run-4")
    assert run.data.metrics == {
        **{f"rollout/{name}": value for name, value in metrics.items()},
        "train/loss": 0.1,
        "system/wait_seconds": 2.0,
        "eval/accuracy": 0.5,
        "eval/pass_at_4": 0.75,
        "recovery/learner": 2.0,
    }


@pytest.mark.slow
def test_no_mlflow_metric_equals_its_own_step_number(place: TrackingPlace) -> None:
    """A metric that equals its step number would be a useless straight line on MLflow's page."""
    for first in (1, 3):
        tracker = Tracker(place, "run-5", {})
        for version in range(1, first + 2):
            tracker.log_version(version, {"reward": 0.25}, when=float(version))
            tracker.log_evaluation(version, {"accuracy": 0.5}, when=float(version))
            tracker.log_recovery(version, {"learner": 2.0}, when=float(version))
        assert tracker.finish("FINISHED", HANG_SECONDS)
    client, run = stored(place, "run-5")
    assert sorted(run.data.metrics) == ["eval/accuracy", "recovery/learner", "rollout/reward"]
    for name in run.data.metrics:
        points = client.get_metric_history(run.info.run_id, name)
        assert [point.step for point in points] == [1, 2, 3, 4]
        assert not all(point.value == point.step for point in points)


@pytest.mark.slow
def test_mlflow_experiment_has_a_saved_view(place: TrackingPlace) -> None:
    """The saved view has the format of MLflow 3.17; a user's change of the view is kept."""
    from mlflow import MlflowClient

    client, tag = MlflowClient(tracking_uri=place.uri), "mlflow.sharedViewState.rollflow"
    own = client.create_experiment("own view", tags={tag: "mine"})
    for name in ("own view", "fresh view"):
        tracker = Tracker(replace(place, experiment=name), "run", {})
        tracker.log_version(1, {"reward": 0.5, "tokens_per_second": 9.0}, when=1.0)
        tracker.log_evaluation(1, {"accuracy": 0.5}, when=1.0)
        assert tracker.finish("FINISHED", HANG_SECONDS)
    assert client.get_experiment(own).tags[tag] == "mine"
    fresh = client.get_experiment_by_name("fresh view")
    view = json.loads(fresh.tags[tag])
    columns = json.loads(view["state"])["selectedColumns"]
    [run] = client.search_runs([fresh.experiment_id])
    assert columns == [f"metrics.`{name}`" for name in sorted(run.data.metrics)]
    assert view["name"] == "accuracy, reward, tokens a second"


@pytest.mark.slow
def test_mlflow_experiment_is_marked_as_training(place: TrackingPlace) -> None:
    """An older experiment without the tag gets it; a user's choice is kept."""
    from mlflow import MlflowClient

    client, kind = MlflowClient(tracking_uri=place.uri), "mlflow.experimentKind"
    client.create_experiment("older")
    client.create_experiment("chosen", tags={kind: "genai_development"})
    found = {}
    for name in ("fresh", "older", "chosen"):
        assert Tracker(replace(place, experiment=name), "run", {}).finish("FINISHED", HANG_SECONDS)
        found[name] = client.get_experiment_by_name(name).tags[kind]
    training = "custom_model_development"
    assert found == {"fresh": training, "older": training, "chosen": "genai_development"}


BEGUN = RunFacts(
    "sweep of rates",
    {"recipe.toml": 'name = "arithmetic"\n'},
    (PromptSourceFacts("sums", "ab" * 16, "jsonl", "sums.jsonl"),),
)
MODELS = (KeptVersion(4, {"rollflow.weights": "s3://bucket/4"}, 0.75), KeptVersion(0, {"rollflow.version": "0"}, None))
ENDED = RunOutcome(4, 100.0, {"tokens_per_second": 50.0}, {"summary.json": "{}"}, MODELS, {"reward": [1.0, 0.0]})


@pytest.mark.slow
def test_runs_of_a_study_share_a_parent_run_in_mlflow(place: TrackingPlace) -> None:
    """The description of a run is logged only once, even if a supervisor that takes over opens the MLflow run and logs
    the description again.
    """
    for run_id in ("seed-0", "seed-1", "seed-0"):
        tracker = Tracker(place, run_id, {}, beginning=BEGUN)
        tracker.log_ending(ENDED)
        assert tracker.finish("FINISHED", HANG_SECONDS)
        assert tracker.failures == 0, tracker.warnings
    client, run = stored(place, "seed-0")
    _, other = stored(place, "seed-1")
    parents = {one.data.tags["mlflow.parentRunId"] for one in (run, other)}
    (parent,) = map(client.get_run, parents)
    assert parent.info.run_name == "sweep of rates"
    assert run.data.tags["final.tokens_per_second"] == "50"
    assert run.data.metrics == {}  # numbers of the whole run are tags, because a metric would be a plot of one point
    files = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert files == {"recipe.toml", "summary.json", "samples.json"}
    (given,) = run.inputs.dataset_inputs
    assert (given.dataset.name, given.dataset.digest) == ("sums", "ab" * 16)
    models = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
    assert {model.name: model.tags["rollflow.weights"] for model in models if "4" in model.name} == {
        "version-4": "s3://bucket/4"
    }
    assert {model.name: model.params for model in models} == {"version-4": {"accuracy": "0.75"}, "version-0": {}}


@pytest.mark.slow
def test_config_changes_are_logged_to_mlflow(place: TrackingPlace, tmp_path: Path) -> None:
    """The table says from which version each value holds; MLflow's parameters keep the first values."""
    describe(open_store(str(tmp_path / "runs" / "changed")), "changed", {"versions": 5})
    changed = ("versions", 7), ("versions", 9)
    for key, value in (("versions", 5), *changed):
        context = RunContext(str(tmp_path / "runs" / "changed"), tmp_path / "cache")
        change_config(context, context.config.model_copy(update={key: value}))
        tracker = Tracker(place, "changed", context.created.config, beginning=build_run_facts(context))
        assert tracker.finish("FINISHED", HANG_SECONDS)
        assert tracker.failures == 0, tracker.warnings
    client, run = stored(place, "changed")
    assert run.data.params["versions"] == "5"
    assert run.data.tags["config.versions"] == "9 from version 0"
    files = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert {"recipe.toml", "recipe-from-version-0.toml", "config_changes.json"} <= files
    assert place.artifacts is not None
    [table] = place.artifacts.rglob("config_changes.json")
    shown = json.loads(table.read_text())
    rows = [dict(zip(shown["columns"], row, strict=True)) for row in shown["data"]]
    assert [(row["key"], row["before"], row["after"]) for row in rows] == [
        ("versions", "5", "7"),
        ("versions", "7", "9"),
    ]


@pytest.fixture
def quick_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_failures")
def test_unreachable_tracking_server_does_not_end_a_run() -> None:
    tracker = Tracker(TrackingPlace("http://127.0.0.1:9", "arithmetic"), "run-3", {})
    tracker.log_version(1, {"reward": 0.1}, when=1.0)
    assert tracker.finish("FINISHED", HANG_SECONDS)
    assert tracker.failures >= 2
    assert "127.0.0.1" in tracker.warnings[0]
    assert tracker.page == "http://127.0.0.1:9/#/experiments?workflowType=machine_learning"


def test_mlflow_of_serve_shows_runs_of_the_default_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker(TrackingPlace.default(tmp_path, "arithmetic"), "run-3", {})
    assert tracker.finish("FINISHED", HANG_SECONDS)
    monkeypatch.delenv("ROLLFLOW_MLFLOW_PAGE", raising=False)
    assert mlflow_page(tracker, RunConfig(), "rollflow serve") == "rollflow serve"
    monkeypatch.setenv("ROLLFLOW_MLFLOW_PAGE", "http://127.0.0.1:9")
    page = mlflow_page(tracker, RunConfig(), "rollflow serve")
    assert re.fullmatch(r"http://127.0.0.1:9/#/experiments/\d+/runs/\w{32}\?workflowType=machine_learning", page)


def test_flattened_config_has_every_key_without_secrets() -> None:
    assert flatten(PARAMETERS) == {
        "name": "arithmetic",
        "train.learning_rate": "0.0001",
        "train.betas": "[0.9, 0.95]",
        "engine.max_new_tokens": "64",
        "store.uri": "s3://bucket/prefix",
        "prompts.0.kind": "reasoning-gym",
    }


def test_config_without_secrets_keeps_its_types() -> None:
    safe = without_secrets(PARAMETERS)
    assert safe["train"] == {"learning_rate": 1e-4, "betas": [0.9, 0.95]}
    assert "hidden" not in str(safe)


@pytest.mark.parametrize(
    "key",
    [
        "api_token",
        "apiKey",
        "password",
        "client-secret",
        "AWS_SECRET_ACCESS_KEY",
        "hf_token",
        "Authorization",
        "DB_PWD",
    ],
)
def test_config_keys_of_secrets_are_recognized(key: str) -> None:
    assert names_secret(key)


@pytest.mark.parametrize("key", ["max_new_tokens", "micro_tokens", "seconds_per_token", "tokens_per_second", "author"])
def test_config_keys_without_secret_names_are_not_redacted(key: str) -> None:
    assert not names_secret(key)


def test_logged_addresses_have_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test covers the addresses of prompts, weights and the summary."""
    uri, version = (
        "s3://me:hidden@bucket/x",
        SimpleNamespace(number=1, at=1.0, weights=[SimpleNamespace(path="w")], sha256=""),
    )
    retention = SimpleNamespace(keeps=lambda *_: True)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(prompts=[SimpleNamespace(domain="math", kind="file")]),
        created=SimpleNamespace(prompts=[{"path": uri, "sha256": "ab"}]),
        store=SimpleNamespace(uri=uri),
        policies=SimpleNamespace(retention=retention, newest=lambda: 1, find=lambda _: version, has_weights=bool),
    )
    for name in ("list_figures", "_sample_responses"):
        monkeypatch.setattr(mlflow_payload, name, lambda *_: {})
    monkeypatch.setattr(mlflow_payload, "read_evaluation", lambda *_: None)
    told = [*mlflow_payload._list_prompts(run), mlflow_payload.build_outcome(run, {"storage": uri, "tokens": 3})]
    assert "hidden" not in str(told)
    assert "bucket/x" in str(told)
