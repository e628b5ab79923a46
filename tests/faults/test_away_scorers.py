"""Tests a whole run whose scorer cannot judge two of ten responses; these responses are left out of their groups."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path

import pytest

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.entries import BatchCommitted, VersionPublished
from rollflow.storage.objects import open_store
from rollflow.storage.records import DiscardReason, Outcome
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from tests.e2e.test_runs import Command
from tests.support.away_scorer import WHY, compute_value, is_away
from tests.support.log_runs import read
from tests.support.small_run import SORTING_RECIPE, make_policy

pytestmark = [pytest.mark.slow, pytest.mark.soak]

VERSIONS, GROUPS, SIZE = 12, 4, 8
REWARD = """
[reward]
kind = "import"
path = "tests.support.away_scorer:score"
judge_tries = 1
unjudged = "leave_out"
"""


def test_unjudged_responses_of_a_run_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of the responses decide which responses are unjudged. The stored rows, the log entries and the metrics
    of the versions must agree with the texts.
    """
    make_policy(tmp_path / "policy")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    recipe = SORTING_RECIPE.format(policy=tmp_path / "policy", versions=VERSIONS, groups=GROUPS, size=SIZE) + REWARD
    command = Command(tmp_path / "home", recipe)
    command.run("run", str(command.recipe), "--run-id", "away")
    store, tokenizer = open_store(f"{command.home}/store/runs/away"), PolicyTokenizer(tmp_path / "policy")
    entries, found, of_entry = read(store), Counter[bool](), dict[int, int]()
    for entry in entries:
        if not isinstance(body := entry.body, BatchCommitted):
            continue
        groups = TrajectoryBatch.from_bytes(store.get(body.file.path)).groups()
        rows = [one for group in groups for one in group.trajectories]
        lost = []
        for one in rows:
            own = [token for token, chosen in zip(one.tokens, one.loss_mask, strict=True) if chosen]
            text = tokenizer.decode_response(own).strip()
            found[is_away(text)] += 1
            if is_away(text):
                lost.append(one)
                assert (one.left_out, one.outcome, math.isnan(one.reward)) == (True, Outcome.UNJUDGED, True)
                assert WHY in one.reason
            else:
                assert (one.left_out, one.outcome) == (None, Outcome.PARTIAL)
                assert one.reward == pytest.approx(compute_value(text))
        of_entry[entry.n] = len(lost)
        keys = {group.key for group in body.groups}
        assert len([one for one in body.unjudged if one.key in keys]) == len(lost)
        again = {one.key for one in body.discards if one.reason is DiscardReason.UNJUDGED}
        assert {one.key for one in body.unjudged if one.key not in keys} == again
        assert all(WHY in one.why for one in body.unjudged)
    assert found[True] + found[False] >= VERSIONS * GROUPS * SIZE
    assert found[True] > VERSIONS
    versions = [entry.body for entry in entries if isinstance(entry.body, VersionPublished)]
    told = {one.batch_entry: one.metrics.get("left_out_responses", 0.0) for one in versions if one.batch_entry}
    assert told == {n: of_entry[n] for n in told}
    report = json.loads(command.run("audit", "away", "--deep", "--json").splitlines()[-1])
    assert report["violations"] == []
    assert report["left_out"] == sum(told.values())
    command.run("replay", "away", "--all")
