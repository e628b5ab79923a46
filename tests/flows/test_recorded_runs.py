"""Tests that this release can read, audit, replay and resume runs of earlier releases.

The archives were recorded before this test was written, and are never recorded again (`tests/support/recorded.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.replay import ReplayOutcome, replay
from rollflow.flows.locations import attach_run, find_run
from rollflow.storage.errors import Corrupt
from rollflow.storage.log.entries import ConfigChanged, entry_path, open_sealed, seal_tree
from rollflow.storage.objects import open_store
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import FORMAT
from tests.support.log_runs import changed, of_kind
from tests.support.recorded import NAMES, VERSIONS, unpack
from tests.support.waiting import RUN_SECONDS

VERBS = ("status", "log", "inspect", "audit", "replay", "resume", "stop", "gc", "audit --repair", "status --watch")
TRAJECTORIES = {"whole": 48, "ranks": 24, "bucket": 24}  # groups x group_size of each version


@pytest.fixture(params=NAMES)
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of each recorded run, in a store of its own."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    return unpack(request.param, tmp_path / "store")


def test_recorded_run_passes_the_audit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run), "--deep", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["clean"], report["versions"]) == (True, VERSIONS)
    assert report["trajectories"] == TRAJECTORIES[run.name]


@pytest.mark.parametrize("verb", ["status", "log", "inspect"])
def test_recorded_run_is_read_by_commands(run: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, run.name, *([str(VERSIONS)] if verb == "inspect" else [])]) == 0
    assert run.name in capsys.readouterr().out


@pytest.mark.long
def test_recorded_run_is_replayed(run: Path) -> None:
    """A replay gives the same bits on the same kind of machine, and differs by rounding on another kind."""
    import transformers.modeling_utils  # noqa: F401 - a learner hides accelerate from it: tests that follow need both

    outcomes: list[ReplayOutcome] = []
    notes: list[str] = []
    replay(find_run(str(run)), VERSIONS, False, notes.append, outcomes.append)
    [outcome] = outcomes
    differences = outcome.replayed.differences
    assert not differences or (outcome.apart is not None and outcome.apart.near), notes


def config_of(name: str, folder: Path) -> RunConfig:
    """Return the config that a recorded run was created with, as this release reads the config."""
    return attach_run(str(unpack(name, folder))).all_configs[0]


def test_old_rollout_config_is_read_with_its_old_behaviour(tmp_path: Path) -> None:
    """The recorded values survive renamed keys; none of the tested values is a default."""
    config = config_of("whole", tmp_path)
    rollout = config.rollout
    assert (rollout.max_inflight_groups, rollout.max_batches_ahead, rollout.on_stale) == (6, 1.0, "drop")
    assert rollout.staleness_from == "oldest-token"
    assert rollout.filter is not None
    assert (rollout.redundant_groups, rollout.redundant_responses, rollout.filter.max_consecutive) == (1, 1, 500)
    assert (config.engine.max_concurrent_requests, config.engine.on_weight_update) == (8, "restart")
    assert config.reward.format is not None
    assert config.reward.format.penalty == 0.25
    assert config.train.not_finite == "skip"


def test_old_config_of_several_ranks_keeps_its_values(tmp_path: Path) -> None:
    config = config_of("ranks", tmp_path)
    assert config.rollout.batch_order == "started"
    assert (config.train.ranks, config.train.critic.learning_rate, config.store.shard_bytes) == (2, 0.01, 16384)


def test_old_config_of_the_timed_engine_keeps_its_values(tmp_path: Path) -> None:
    config = config_of("bucket", tmp_path)
    assert isinstance(config.engine, TimedEngineConfig)
    engine = config.engine
    assert (engine.tokens_per_tick, engine.kv_read_cost, engine.batch_slowdown) == (2, 0.001, 0.01)
    assert (config.rollout.tail_batching, config.rollout.max_preemptions) == (True, 2)


def test_recorded_change_of_config_is_read(run: Path) -> None:
    """Each recorded run had been resumed for one more version."""
    [entry] = of_kind(open_store(str(run)), ConfigChanged)
    assert isinstance(entry.body, ConfigChanged)
    assert [tuple(change) for change in entry.body.changes] == [("versions", VERSIONS - 1, VERSIONS)]
    context = attach_run(str(run))
    assert [context.config_at(version).versions for version in (1, VERSIONS)] == [VERSIONS - 1, VERSIONS]


@pytest.mark.soak
@pytest.mark.slow
def test_recorded_run_is_resumed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Processes of this release train one more version."""
    resume = ["resume", run.name, "--set", f"versions={VERSIONS + 1}"]
    subprocess.run([sys.executable, "-m", "rollflow.flows.commands.cli", *resume], check=True, timeout=RUN_SECONDS)
    assert main(["audit", run.name, "--deep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"] == VERSIONS + 1
    assert main(["replay", run.name]) == 0


def plant_format(run: Path, number: int, release: str) -> None:
    """Give a recorded run another format, as `release` would have recorded it."""
    changed(open_store(str(run)), 0, lambda body: replace(body, format=number, code_version=release))


def make_unknown(run: Path) -> None:
    """Replace log entry 0 by an entry of the next format, of a kind that this release does not know."""
    first = run / entry_path(0)
    tree = open_sealed(first.read_bytes())
    tree["body"] = {"kind": "run-begun", "format": FORMAT + 1, "code_version": "9.9.9"}
    first.write_bytes(seal_tree(tree))


OTHERS = {
    "of the past": (lambda run: plant_format(run, FORMAT - 1, "0.0.3"), FORMAT - 1, "0.0.3"),
    "of the future": (lambda run: plant_format(run, FORMAT + 1, "9.9.9"), FORMAT + 1, "9.9.9"),
    "of the future, and unknown": (make_unknown, FORMAT + 1, "9.9.9"),
}


@pytest.mark.parametrize(("plant", "number", "release"), OTHERS.values(), ids=OTHERS)
def test_error_about_an_unknown_storage_format_names_its_release(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plant: Callable[[Path], None],
    number: int,
    release: str,
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    run = unpack("bucket", tmp_path / "store")
    plant(run)
    sentence = (
        f"run '{run}' has format {number}, and this release of rollflow reads format {FORMAT}; "
        f"use rollflow {release}, which recorded it"
    )
    for verb in VERBS:
        assert main([*verb.split(), run.name]) == 2, verb
        assert capsys.readouterr().err == f"rollflow: {sentence}\n", verb
    assert main(["status", "--all"]) == 0
    assert sentence in capsys.readouterr().out


def test_damaged_first_log_entry_is_not_taken_for_a_new_format(tmp_path: Path) -> None:
    run = unpack("bucket", tmp_path)
    first = run / entry_path(0)
    first.write_bytes(first.read_bytes().replace(b'"format":%d' % FORMAT, b'"format":%d' % (FORMAT + 1)))
    with pytest.raises(Corrupt, match="the object was altered"):
        _ = attach_run(str(run)).config
