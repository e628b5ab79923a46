"""Tests random SIGKILL of all parts of the reward stage, in a run with three scorers: no score is lost or invented."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import Victim
from benchmarks.chaos_table import RESTARTS
from benchmarks.victims import kill_everything
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import ObjectStore
from rollflow.storage.policies import PolicyStore
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.verifier import close_in_thread, score_response
from tests.support.waiting import RUN_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.soak]

KILLED = ("reward worker", "reward actor", "sandboxes", "reward flow")
RECIPE = (Path(__file__).parents[2] / "flows/recipes/domains.toml").read_text()
VERSIONS = {"timed": 200, "vllm": 100}
SIZES = {"timed": (6, 4), "vllm": (48, 8)}  # groups of a batch, and responses of a group
SETTINGS = {
    "timed": (
        *("groups=6", "group_size=4", "train.minibatches=1", "evaluation.every=0", "evaluation.prompts=6"),
        *("policy.cold_start.target_accuracy=0.01", "policy.cold_start.max_steps=5000", "engine.kind=timed"),
        *("engine.median_tokens=8", "engine.seconds_per_token=0.01"),
    ),
    "vllm": ("evaluation.every=30",),
}


def trained_rows(store: ObjectStore) -> list[dict[str, Any]]:
    """Return all rows on which a version was trained."""
    log = Log(store)
    policies, batches = PolicyStore(log), TrajectoryStore(log)
    entries = [version.batch_entry for version in policies.since(1) if version.batch_entry is not None]
    files = [batches.read_commit(entry).file for entry in entries]
    return [row for file in files for row in TrajectoryBatch.from_bytes(batches.read(file)).table.to_pylist()]


@pytest.mark.parametrize("engine", ["timed", "vllm"])
def test_killed_reward_stage_neither_loses_nor_adds_scores(tmp_path: Path, engine: str) -> None:
    home, draw, versions = tmp_path / "home", random.Random(), VERSIONS[engine]
    settings = (f"versions={versions}", f"recovery.restarts={RESTARTS}", *SETTINGS[engine])
    victim = Victim(home, RECIPE, *(part for key in settings for part in ("--set", key)))
    victim.versions, (victim.groups, victim.group_size) = versions, SIZES[engine]
    try:
        victim.wait_version(2, RUN_SECONDS)
        kills = []
        for role in KILLED * 5:
            time.sleep(draw.uniform(0.0, 1.0))
            kills.append(victim.strike(role, draw))
            print(f"at version {victim.newest}: {kills[-1]}")
        outcome = victim.finish(kills, 3 * RUN_SECONDS)
    finally:
        kill_everything(home)
    print(outcome)
    assert outcome.violations == []
    assert outcome.right
    assert (outcome.lost, outcome.doubled) == (0, 0)
    rows = trained_rows(victim.store)
    assert len(rows) == versions * victim.groups * victim.group_size
    assert {row["outcome"] for row in rows}.isdisjoint({"killed", "timeout", "unjudged"})
    assert_scores_are_right(RunContext(victim.store.uri, home / "cache"), rows)


def assert_scores_are_right(context: RunContext, rows: list[dict[str, Any]]) -> None:
    """Score every trained response again in this process, and check that the score equals the stored reward."""
    verifiers = {name: build_verifier(config) for name, config in context.config.scorers.items()}
    prompts, decode = context.prompts(), context.tokenizer.decode_response
    try:
        for row in rows:
            prompt = prompts.prompt(row["index"])
            made = [token for token, chosen in zip(row["tokens"], row["loss_mask"], strict=True) if chosen]
            again = score_response(verifiers[prompt.scorer], "all", decode(made), prompt.reference)
            assert (again.value, str(again.outcome)) == (pytest.approx(row["reward"]), row["outcome"]), row
    finally:
        close_in_thread(verifiers.values())
