"""Tests whole runs in which some batches give a NaN: each such batch is quarantined, even if the learner is killed
afterwards.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.chaos import Victim
from benchmarks.victims import find, kill, kill_everything
from rollflow.flows.commands.cli import main
from rollflow.storage.audit.audit import audit
from rollflow.storage.log.entries import BatchVoided
from rollflow.storage.objects import open_store
from tests.faults.test_kills import sampled
from tests.support.log_runs import of_kind
from tests.support.waiting import RUN_SECONDS, until

pytestmark = [pytest.mark.slow, pytest.mark.soak]

VERSIONS = 12
RECIPE = """
name = "poisoned"
versions = 12
async_ratio = {alpha}
groups = 8
group_size = 4

[policy.cold_start]
hidden_size = 32
layers = 2
heads = 2
target_accuracy = 0.02
evaluate_every = 5

[engine]
kind = "transformers"
replicas = 2
max_new_tokens = 6
max_concurrent_requests = 16

[evaluation]
prompts = 8
every = 0

[train]
minibatches = 2
not_finite = "skip"
objective = {{ kind = "import", path = "poison.objectives:Poisoned" }}
"""
OBJECTIVE = '''
from rollflow.tasks.objectives.base import MaskedTokens, Objective, TokenLoss


class Poisoned(Objective):
    """REINFORCE; of every fifth draw of what was sampled, a NaN: the same batch gives it each time."""

    every_row = True

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        loss_M = -tokens.advantage_M * tokens.logp_M
        drawn = int(-1e5 * tokens.behaviour_M.double().sum())
        return TokenLoss(loss_M * float("nan") if drawn % 5 == 0 else loss_M, tokens.advantage_M.isnan())
'''


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create a user-defined objective, which every process of a run can import."""
    folder = tmp_path / "own" / "poison"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "objectives.py").write_text(OBJECTIVE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(folder.parent))


def quarantined(run: Path) -> list[tuple[int, str, str]]:
    """Check a run with an audit and a replay; return the number, reason and cause of each voided batch."""
    store = open_store(str(run))
    report = audit(store, deep=True)
    assert report.violations == []
    assert report.versions == VERSIONS
    bodies = [entry.body for entry in of_kind(store, BatchVoided)]
    found = [(body.number, body.why, body.cause) for body in bodies if isinstance(body, BatchVoided)]
    assert len(report.quarantined) == len(found) > 0
    for number, why, cause in found:
        assert why == f"version {number + 1} is not trained, because loss of batch {number} is nan"
        assert cause == "not-finite"
    assert main(["replay", str(run), "--all"]) == 0
    return found


def killed_behind_voids(home: Path, recipe: str, kills: int) -> Path:
    """Execute a run whose learner is killed several times, each time after a new batch was voided in the log."""
    victim = Victim(home, recipe)
    try:
        for _ in range(kills):
            victim.wait_version(0, RUN_SECONDS)
            [learner] = until(lambda: find(home, "learner"))
            victim.log.follow()
            seen = victim.log.state.voids
            until(lambda: victim.version() == VERSIONS or victim.log.state.voids > seen, RUN_SECONDS)  # noqa: B023
            if victim.newest == VERSIONS:
                break
            assert kill(learner)
        assert victim.finish([], RUN_SECONDS).right, victim.tail()
    finally:
        kill_everything(home)
    return home / "store/runs/chaos"


def test_killed_synchronous_run_quarantines_the_same_batches(tmp_path: Path) -> None:
    """The quarantined batches, the trained batches and the versions are bit-identical with and without kills."""
    recipe = RECIPE.format(alpha=0)
    whole, broken = (killed_behind_voids(tmp_path / name, recipe, n) for name, n in (("whole", 0), ("broken", 2)))
    assert quarantined(broken) == quarantined(whole)
    assert sampled(broken, VERSIONS) == sampled(whole, VERSIONS)


def test_asynchronous_run_continues_after_batches_with_nan(tmp_path: Path) -> None:
    quarantined(killed_behind_voids(tmp_path / "run", RECIPE.format(alpha=2), 1))
