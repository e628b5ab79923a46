"""Tests that an audit verifies the epochs of a prompt source that skips solved questions, and finds planted faults.

The prompts, the log and the scheduler's epochs are real; responses and versions are artificial.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.expected import Expected
from rollflow.storage.log.entries import BatchCommitted, Entry, EpochStarted
from rollflow.storage.records import TrajectoryGroup
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.expectations import expected_of
from tests.support.epoch_run import BATCHES, make_epoch_run
from tests.support.forger import Forger
from tests.support.log_runs import forget, of_kind
from tests.support.small_run import GROUPS

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("alterations")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        context = make_epoch_run(home)
        forget(context.store)
        yield context


@pytest.fixture
def forger(finished: RunContext, tmp_path: Path) -> Forger:
    shutil.copytree(finished.store.uri, tmp_path / "altered")
    return Forger(RunContext(str(tmp_path / "altered"), tmp_path / "cache"))


def violations(context: RunContext) -> list[str]:
    """Return the violations that a deep audit finds. Batches are not compared with the config's limits, because the
    versions are artificial.
    """
    fresh = RunContext(context.uri, context.cache)
    expected = expected_of(fresh)
    return [one.what for one in audit(fresh.store, deep=True, expected=Expected(prompts=expected.prompts)).violations]


def test_run_asks_each_question_once_per_epoch(finished: RunContext) -> None:
    assert violations(finished) == []
    epochs = [entry.body for entry in of_kind(finished.store, EpochStarted)]
    assert len(epochs) >= 5
    asked = defaultdict[int, list[str]](list)
    for index in range(GROUPS * BATCHES):
        number = next(e.number for e in epochs if isinstance(e, EpochStarted) and e.start <= index < e.end)
        asked[number].append(finished.prompts().prompt(index).text)
    for epoch in epochs[:-1]:
        assert isinstance(epoch, EpochStarted)
        assert len(asked[epoch.number]) == len(set(asked[epoch.number])) == 9 - len(epoch.skipped)
        assert {one % 2 for one in epoch.skipped} <= {0}
        assert bool(epoch.skipped) == (epoch.number > 0)


def altered_epoch(change: Callable[[EpochStarted], EpochStarted]) -> Callable[[Forger], None]:
    """Change the log entry of the newest epoch, which no other epoch follows."""

    def alter(forger: Forger) -> None:
        newest = of_kind(forger.store, EpochStarted)[-1].n

        def changed(entry: Entry) -> Entry:
            if entry.n != newest:
                return entry
            assert isinstance(entry.body, EpochStarted)
            return replace(entry, body=change(entry.body))

        forger.log(lambda entries: [changed(entry) for entry in entries])

    return alter


def skip_other(body: EpochStarted) -> EpochStarted:
    """Let the epoch skip an unsolved question instead of a solved one."""
    unsolved = next(one for one in range(1, 9, 2) if one not in body.skipped)
    return replace(body, skipped=tuple(sorted([*body.skipped[1:], unsolved])))


def leave_out_epoch(forger: Forger) -> None:
    forger.log(lambda entries: [e for e in entries if not (isinstance(e.body, EpochStarted) and e.body.number == 2)])


def change_rates(change: Callable[[BatchCommitted], BatchCommitted]) -> Callable[[Forger], None]:
    return lambda forger: forger.batch(3, change)


def use_skipped_question(forger: Forger) -> None:
    """Let a group of epoch 1 answer a question that the epoch skips."""
    context = forger.context
    epoch = next(
        e.body for e in of_kind(context.store, EpochStarted) if isinstance(e.body, EpochStarted) and e.body.number
    )
    assert isinstance(epoch, EpochStarted)
    prompts = context.prompts()
    order = prompts.sources[0].order(1)  # type: ignore[attr-defined]
    skipped = next(place for place, question in enumerate(order) if question in epoch.skipped)
    prompts.epochs = None
    other = prompts.prompt(9 + skipped)
    number = epoch.start // GROUPS + 1

    def changed(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        [first, *rest] = groups
        length = len(context.prompts().prompt(first.key.prompt).tokens)
        quiet = len(other.tokens)
        rows = (
            replace(
                one,
                tokens=(*other.tokens, *one.tokens[length:]),
                loss_mask=(*[False] * quiet, *one.loss_mask[length:]),
                logprobs=(*[0.0] * quiet, *one.logprobs[length:]),
                versions=(*[-1] * quiet, *one.versions[length:]),
            )
            for one in first.trajectories
        )
        return [replace(first, trajectories=tuple(rows)), *rest]

    forger.rows(number, changed)


@pytest.mark.parametrize(
    ("alter", "why"),
    [
        (altered_epoch(skip_other), "without reason, and does not skip question"),
        (altered_epoch(lambda body: replace(body, skipped=(), asked=9)), "does not skip questions"),
        (altered_epoch(lambda body: replace(body, skipped=body.skipped[1:])), "questions and skips"),
        (leave_out_epoch, "beyond the newest epoch of source 0"),
        (change_rates(lambda body: replace(body, rates=())), "no known pass rate"),
        (
            change_rates(lambda body: replace(body, rates=tuple(rate._replace(correct=2) for rate in body.rates))),
            "the entry of its batch says 2 of 4 responses correct",
        ),
        (use_skipped_question, "prompt"),
    ],
    ids=[
        "unsolved skipped",
        "solved asked",
        "fewer asked",
        "entry missing",
        "rates missing",
        "other rates",
        "skipped used",
    ],
)
def test_audit_finds_an_altered_epoch(forger: Forger, alter: Callable[[Forger], None], why: str) -> None:
    alter(forger)
    found = violations(forger.context)
    assert any(why in what for what in found), found
