"""Tests SIGKILL before and after every store write of a learner that publishes in the background: the resulting weights
are bit-identical.

The next batch always exists while a version is still being published. Therefore, a kill can hit any moment of the next
train step before its optimizer step.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.log.entries import VersionPublished
from rollflow.tasks.run.context import RunContext
from tests.faults.test_failpoints import FORK, KillingStore
from tests.support.counts import ALL
from tests.support.forked import alone
from tests.support.log_runs import of_kind
from tests.support.small_run import StoreFeed, prepare_small
from tests.tasks.test_publishing import train

pytestmark = [pytest.mark.slow, pytest.mark.many]

VERSIONS = 3
STRIDE = 1 if ALL else 4  # `make test` kills at every fourth write


def run_once(context: RunContext, store: KillingStore) -> None:
    """Execute the run on the store `store` or, after a kill, the rest of the run."""
    vars(context)["store"] = store
    train(context, StoreFeed(context, ahead=True))


def killed(run: tuple[Path, str], at: int, *, after: bool) -> bool:
    """Execute the run in a child process; return True if the process was killed at its write `at`, and False if it
    finished.
    """
    uri, cache = run[0], run[1]
    context = RunContext(str(uri), Path(cache))
    child = FORK.Process(target=alone, args=(run_once, context, KillingStore(uri, at=at, after=after)))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def shas(context: RunContext) -> list[list[str]]:
    """Return the hashes of every version's objects."""
    return [[stored.sha256 for stored in context.policies.find(v).objects] for v in range(VERSIONS + 1)]


@pytest.mark.parametrize(("full_every", "deltas"), [(1, 0), (2, 2)], ids=["whole", "deltas"])
def test_learner_continues_after_a_kill_at_any_publishing_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_every: int, deltas: int
) -> None:
    """Every second version is stored whole, the others as deltas, or all versions are stored whole."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))

    def prepared(name: str) -> RunContext:
        keys: Mapping[str, Any] = {"train": {"learning_rate": 1e-6}, "dtype": "bfloat16"} if deltas else {}
        return prepare_small(tmp_path, name, versions=VERSIONS, keep_last=10, full_every=full_every, **keys)

    quiet, at, met = prepared("quiet"), 0, True
    killed((Path(quiet.uri), str(quiet.cache)), 0, after=False)
    wanted = shas(quiet)
    assert sum(bool(quiet.policies.find(version).deltas) for version in range(VERSIONS + 1)) == deltas
    while met:
        at += STRIDE
        for after in (False, True):
            context = prepared(f"{at}-{after}")
            run = Path(context.uri), str(context.cache)
            met = killed(run, at, after=after)
            killed(run, 1 + at * 7 % 11, after=not after)
            killed(run, 0, after=False)
            found = RunContext(context.uri, context.cache)
            assert shas(found) == wanted, (at, after)
            assert audit(found.store, deep=True).violations == []
            published = [entry.body for entry in of_kind(found.store, VersionPublished)]
            assert len(published) == VERSIONS + 1
    assert at > 5 * VERSIONS
