"""Tests which checks find the alterations that an attacker with write access can make to a finished run.

After each alteration, all hashes that depend on the altered part are recomputed, and the results of earlier audits are
removed. The run is real, with prompts, log and learner; only its responses are artificial.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollflow.flows.commands.replay import replay
from rollflow.storage.audit.anchors import Anchor, check_anchors, first_anchor, newest_anchor
from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.expectations import expected_of
from tests.support.alterations import Alteration
from tests.support.alterations_of_log import all_alterations, table
from tests.support.forger import Forger
from tests.support.log_runs import forget
from tests.support.small_run import prepare_small, train_small

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("alterations")]
PAGE = Path(__file__).parents[3] / "docs" / "audit.md"
ALTERATIONS = all_alterations()
UNSEEN = [  # these are only the alterations that the audit does not find, because a replay takes seconds
    pytest.param(one, marks=[] if one.what in ("a reward", "one weight") else pytest.mark.soak, id=one.what)
    for one in ALTERATIONS
    if "audit" not in one.by
]


@dataclass
class Finished:
    """A finished run, and two anchors of its log (hashes of entries), which the attacker cannot change."""

    context: RunContext
    anchors: tuple[Anchor, Anchor]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    home = tmp_path_factory.mktemp("home")
    file = home / "questions.jsonl"
    line = '{"question":"What is %d plus %d?","answer":"%d"}\n'
    file.write_text("".join(line % (one, one + 1, 2 * one + 1) for one in range(60)))
    sources = [{"kind": "jsonl", "path": str(file)}, {"kind": "reasoning-gym", "family": "basic_arithmetic"}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        context = prepare_small(home, "altered", 12, prompts=sources, keep_last=3, keep_every=2)
        train_small(context)
        forget(context.store)
        yield Finished(context, (first_anchor(context.store), newest_anchor(context.log.state)))


@pytest.fixture
def forger(finished: Finished, tmp_path: Path) -> Forger:
    shutil.copytree(finished.context.store.uri, tmp_path / "altered")
    return Forger(RunContext(str(tmp_path / "altered"), tmp_path / "cache"))


def audited(context: RunContext) -> AuditReport:
    """Return the report of a deep audit that uses no stored results of earlier audits."""
    fresh = RunContext(context.uri, context.cache)
    return audit(fresh.store, deep=True, expected=expected_of(fresh))


def test_unaltered_run_passes_the_audit(finished: Finished) -> None:
    report = audited(finished.context)
    assert (report.violations, report.unchecked, report.overdue) == ([], "", [])
    assert report.fates == {"trained": 24, "discarded: stale": 1, "in flight": 1}
    assert check_anchors(finished.context.store, finished.anchors) == []


@pytest.mark.parametrize("one", ALTERATIONS, ids=[f"{one.part}: {one.what}" for one in ALTERATIONS])
def test_audit_finds_every_documented_alteration(one: Alteration, forger: Forger, finished: Finished) -> None:
    before = {path: forger.store.get(path) for path in forger.store.list()}
    one.forge(forger)
    assert {path: forger.store.get(path) for path in forger.store.list()} != before, "nothing was altered"
    forget(forger.store)
    report = audited(forger.context)
    found = {"audit"} if report.violations else {"says"} if report.unchecked or report.overdue else set[str]()
    found |= {"anchor"} if check_anchors(forger.store, finished.anchors) else set()
    assert found == {*one.by} - {"replay"}, report.violations or report.unchecked


@pytest.mark.parametrize("one", UNSEEN)
def test_replay_finds_alterations_as_documented(one: Alteration, forger: Forger) -> None:
    """Runs whose alteration the audit does not find are replayed. If a replay cannot read the run, the alteration
    counts as found.
    """
    one.forge(forger)
    forget(forger.store)
    context = RunContext(forger.context.uri, forger.context.cache)
    try:
        right = replay(context, None, True, lambda line: None, lambda outcome: None)
    except (Corrupt, ConfigError):
        right = False
    assert right is ("replay" not in one.by)


def test_at_least_73_different_alterations_are_tested() -> None:
    assert len({(one.part, one.what) for one in ALTERATIONS}) == len(ALTERATIONS) >= 73


def test_documentation_has_the_alterations_table() -> None:
    """The documentation contains the table that `python -m tests.support.alterations_of_log` prints."""
    assert table() in PAGE.read_text()
