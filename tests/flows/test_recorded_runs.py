"""Runs of earlier releases are read, audited, replayed and resumed by this one.

The archives were recorded before this test was written, and are never recorded again (`tests/support/recorded.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.replay import ReplayOutcome, replay
from rollflow.flows.locations import attach_run, find_run
from rollflow.storage.log.entries import ConfigChanged
from rollflow.storage.objects import open_store
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.run.config import RunConfig
from tests.support.log_runs import of_kind
from tests.support.recorded import NAMES, VERSIONS, unpack

TRAJECTORIES = {"whole": 48, "ranks": 24, "bucket": 24}  # groups x group_size of each version


@pytest.fixture(params=NAMES)
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of each recorded run, in a store of its own."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    return unpack(request.param, tmp_path / "store")


def test_recorded_run_audits_clean(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run), "--deep", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["clean"], report["versions"]) == (True, VERSIONS)
    assert report["trajectories"] == TRAJECTORIES[run.name]


@pytest.mark.parametrize("verb", ["status", "log", "list", "inspect"])
def test_recorded_run_is_read_by_commands(run: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"list": [], "inspect": [run.name, str(VERSIONS)]}.get(verb, [run.name])
    assert main([verb, *arguments]) == 0
    assert run.name in capsys.readouterr().out


@pytest.mark.long
def test_recorded_run_is_replayed(run: Path) -> None:
    """The same bits on the same kind of machine; on another one, what differs is rounding."""
    outcomes: list[ReplayOutcome] = []
    notes: list[str] = []
    replay(find_run(str(run)), VERSIONS, False, notes.append, outcomes.append)
    [outcome] = outcomes
    differences = outcome.replayed.differences
    assert not differences or (outcome.apart is not None and outcome.apart.near), notes


def config_of(name: str, folder: Path) -> RunConfig:
    """The config that a recorded run was created with, as this release reads it."""
    return attach_run(str(unpack(name, folder))).all_configs[0]


def test_recorded_config_of_rollout_keeps_its_values(tmp_path: Path) -> None:
    """Whatever the keys are called today: none of these values is the default."""
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


def test_recorded_config_of_timed_engine_keeps_its_values(tmp_path: Path) -> None:
    config = config_of("bucket", tmp_path)
    assert isinstance(config.engine, TimedEngineConfig)
    engine = config.engine
    assert (engine.tokens_per_tick, engine.kv_read_cost, engine.batch_slowdown) == (2, 0.001, 0.01)
    assert (config.rollout.tail_batching, config.rollout.max_preemptions) == (True, 2)


def test_recorded_change_of_config_is_read(run: Path) -> None:
    """Each run was resumed for one version more."""
    [entry] = of_kind(open_store(str(run)), ConfigChanged)
    assert isinstance(entry.body, ConfigChanged)
    assert [tuple(change) for change in entry.body.changes] == [("versions", VERSIONS - 1, VERSIONS)]
    context = attach_run(str(run))
    assert [context.config_at(version).versions for version in (1, VERSIONS)] == [VERSIONS - 1, VERSIONS]
