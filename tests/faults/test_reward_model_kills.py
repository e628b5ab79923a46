"""Tests SIGKILL of a reward model's actor in a whole run: the run finishes, and its rewards are those of the model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.chaos import Victim
from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.records import Outcome
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.reward_models import load_model
from tests.support.reward_models import make_reward_model
from tests.support.small_run import make_policy
from tests.support.waiting import RUN_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.soak]

KILLS = 3
RECIPE = """
name = "graded"
versions = 200
async_ratio = 1
groups = 4
group_size = 4

[policy]
path = "policy"

[engine]
kind = "timed"
max_concurrent_requests = 16
max_new_tokens = 12
median_tokens = 8
seconds_per_token = 0.05

[reward]
kind = "model"
path = "./taste"
label = "good"
correct_from = 0.5
workers = 2
deadline_seconds = 300

[train]
warmup_versions = 0

[evaluation]
prompts = 4
every = 0

[recovery]
restarts = 100
backoff_seconds = 0.1
"""


def test_run_survives_kills_of_its_reward_model(tmp_path: Path) -> None:
    make_policy(tmp_path / "home" / "policy")
    make_reward_model(tmp_path / "home" / "taste", labels=("bad", "good"))
    victim, draw = Victim(tmp_path / "home", RECIPE), random.Random()
    victim.wait_version(1, RUN_SECONDS)
    for _ in range(KILLS):
        victim.strike("reward model", draw, record=False)
    assert victim.process.wait(RUN_SECONDS) == 0, victim.tail()
    recovered = [recovery for recovery in victim.recoveries.read() if recovery.role.startswith("reward-model-")]
    # If a copy is killed again before it has scored a response, one record contains both restarts.
    assert sum(len(recovery.restarts) for recovery in recovered) == KILLS
    assert audit(victim.store, deep=True).clean
    check_rewards(RunContext(victim.store.uri, tmp_path / "cache"))


def check_rewards(context: RunContext) -> None:
    """Check that the reward of every trained response is the probability from the run's reward model, and that rewards
    differ.
    """
    classifier, prompts, tokenizer = load_model(context), context.prompts(), context.tokenizer
    rewards = set[float]()
    for version in range(1, context.config.versions + 1):
        entry = context.policies.find(version).batch_entry
        assert entry is not None
        table = TrajectoryBatch.from_bytes(context.batches.read(context.batches.read_commit(entry).file)).table
        for row in table.to_pylist():
            assert row["outcome"] in (Outcome.CORRECT, Outcome.PARTIAL)
            prompt = prompts.prompt(row["index"])
            response = tokenizer.decode_response(row["tokens"][prompt.input.length :]).strip()
            [grade] = classifier.grade([(prompt.messages, response)])
            assert row["reward"] == pytest.approx(grade.raw, abs=1e-5)
            rewards.add(row["reward"])
    assert len(rewards) > context.config.versions
