"""Tests a whole run whose scorer sometimes hangs, crashes, uses too much memory or is unavailable: the run continues,
and its stored rewards are right.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.objects import open_store
from rollflow.storage.records import Outcome
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from tests.e2e.test_runs import Command
from tests.support.faulty_scorer import FAULTS, OUTCOMES, choose_fault, compute_value
from tests.support.log_runs import read
from tests.support.small_run import SORTING_RECIPE, make_policy

pytestmark = [pytest.mark.slow, pytest.mark.soak]

REWARD = """
[reward]
kind = "import"
path = "tests.support.faulty_scorer:score"
options = {{ folder = "{seen}" }}
workers = 2
deadline_seconds = 1.5
"""


def test_each_scorer_fault_is_stored_with_its_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_policy(tmp_path / "policy")
    (tmp_path / "seen").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    recipe = SORTING_RECIPE.format(policy=tmp_path / "policy", versions=15, groups=6, size=4)
    command = Command(tmp_path / "home", recipe + REWARD.format(seen=tmp_path / "seen"))
    command.run("run", str(command.recipe), "--run-id", "faulty")
    store, tokenizer = open_store(f"{command.home}/store/runs/faulty"), PolicyTokenizer(tmp_path / "policy")
    found = Counter[str]()
    for entry in read(store):
        if not isinstance(entry.body, BatchCommitted):
            continue
        table = TrajectoryBatch.from_bytes(store.get(entry.body.file.path)).table
        for row in table.select(["tokens", "loss_mask", "reward", "outcome"]).to_pylist():
            own = [token for token, chosen in zip(row["tokens"], row["loss_mask"], strict=True) if chosen]
            text = tokenizer.decode_response(own).strip()
            fault = choose_fault(text)
            found[fault] += 1
            if fault in OUTCOMES:
                assert (row["reward"], row["outcome"]) == (0.0, OUTCOMES[fault]), (fault, row)
            else:
                assert (row["reward"], row["outcome"]) == (pytest.approx(compute_value(text)), Outcome.PARTIAL)
    print(found)
    assert set(FAULTS) <= set(found)
    assert sum(found.values()) >= 15 * 6 * 4
    assert audit(store, deep=True).violations == []
