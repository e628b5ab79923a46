"""A response that nobody can judge is judged again, and is never trained on."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import DiscardReason, Outcome
from rollflow.tasks.rollout.judging import judge_repeatedly
from rollflow.tasks.run.context import parse_recorded
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, ScoreRequest, Unjudged, failure_score
from tests.support.expected import expected_of
from tests.support.log_runs import read
from tests.support.pipeline import Pipeline

AWAY = Score(0.0, "the judge is away", Outcome.UNJUDGED)
RIGHT = Score(1.0, "right")


class FlakyJudge(Pipeline):
    """A pipeline whose judge is away for a share of its calls, or for all calls about one prompt."""

    share = 0.0
    lost_token: int | None = None  # a prompt whose last token is this one is never judged
    calls = 0

    async def _score(self, request: ScoreRequest) -> Score:
        self.calls += 1
        if random.Random(f"{self.seed}:{self.calls}").random() < self.share:
            return AWAY
        if request.reference.get("answer") == self.lost_token:
            return AWAY
        return await super()._score(request)


def outcomes(pipeline: Pipeline) -> Counter[str]:
    """Count the outcomes of all committed trajectories."""
    bodies = [entry.body for entry in read(pipeline.store) if isinstance(entry.body, BatchCommitted)]
    found: Counter[str] = Counter()
    for body in bodies:
        column = TrajectoryBatch.from_bytes(pipeline.store.get(body.file.path)).optional("outcome")
        found.update(column.to_pylist() if column is not None else [])
    return found


def discards(pipeline: Pipeline) -> list[DiscardReason]:
    """List the reasons of all discards."""
    bodies = [entry.body for entry in read(pipeline.store) if isinstance(entry.body, BatchCommitted)]
    return [discard.reason for body in bodies for discard in body.discards]


async def test_judging_ends_with_the_first_verdict() -> None:
    answers = [AWAY, AWAY, RIGHT, AWAY]

    async def judge(request: ScoreRequest) -> Score:
        return answers.pop(0)

    request = ScoreRequest((), {})
    assert await judge_repeatedly(judge, 5)(request) == RIGHT
    assert answers == [AWAY]


@pytest.mark.parametrize(("tries", "calls"), [(0, 1), (1, 1), (3, 3)])
def test_judging_ends_after_its_tries(tries: int, calls: int) -> None:
    asked = []

    async def judge(request: ScoreRequest) -> Score:
        asked.append(request)
        return AWAY

    assert run_virtual(judge_repeatedly(judge, tries)(ScoreRequest((), {}))) == AWAY
    assert len(asked) == calls


@settings(max_examples=30, deadline=None)
@given(
    share=st.sampled_from([0.1, 0.3, 0.5]),
    tries=st.integers(1, 3),
    alpha=st.sampled_from([0.0, 1.0, 2.5]),
    seed=st.integers(0, 1000),
    redundant=st.integers(0, 2),
)
def test_unjudged_responses_are_never_trained_on(
    share: float, tries: int, alpha: float, seed: int, redundant: int
) -> None:
    choices: dict[str, Any] = {"judge_tries": tries, "max_unjudged": 10**6, "redundant_responses": redundant}
    pipeline = FlakyJudge(MemoryStore(uuid.uuid4().hex), versions=4, async_ratio=alpha, seed=seed, choices=choices)
    pipeline.share = share
    run_virtual(pipeline.run())
    assert outcomes(pipeline)[Outcome.UNJUDGED] == 0
    report = audit(pipeline.store, deep=True, expected=expected_of(pipeline))
    assert report.violations == []
    assert pipeline.state.version == 4
    if share == 0.5 and tries == 1:
        assert DiscardReason.UNJUDGED in discards(pipeline)


def test_prompt_of_an_unjudged_group_is_issued_again() -> None:
    pipeline = FlakyJudge(MemoryStore("again"), versions=3, choices={"judge_tries": 1, "max_unjudged": 1000})
    pipeline.share = 0.4
    run_virtual(pipeline.run())
    bodies = [entry.body for entry in read(pipeline.store) if isinstance(entry.body, BatchCommitted)]
    lost = {discard.key.prompt for body in bodies for discard in body.discards}
    trained = {group.key.prompt for body in bodies for group in body.groups if group.key.attempt > 0}
    assert lost
    assert trained & lost


def test_run_ends_if_nobody_judges_any_group() -> None:
    pipeline = FlakyJudge(MemoryStore("never"), versions=2, choices={"judge_tries": 2, "max_unjudged": 7})
    pipeline.share = 1.1
    with pytest.raises(ExceptionGroup) as failed:
        run_virtual(pipeline.run())
    error = failed.value.exceptions[0]
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ConfigError)
    assert "max_unjudged = 7" in str(error)
    assert "the judge is away" in str(error)


def test_audit_reports_an_unjudged_trajectory() -> None:
    pipeline = FlakyJudge(MemoryStore("old"), versions=2, choices={"judge_tries": 0})
    pipeline.share = 0.3
    run_virtual(pipeline.run())
    assert outcomes(pipeline)[Outcome.UNJUDGED] > 0
    assert audit(pipeline.store, expected=expected_of(pipeline)).violations == []
    pipeline.scheduler.limits = pipeline.scheduler.limits.__class__(
        **{name: getattr(pipeline.scheduler.limits, name) for name in pipeline.scheduler.limits.__slots__}
        | {"judge_tries": 3}
    )
    found = audit(pipeline.store, deep=True, expected=expected_of(pipeline)).violations
    assert {violation.kind for violation in found} == {"unjudged"}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("no number in the answer"), Outcome.UNPARSABLE),
        (Unjudged("no verdict"), Outcome.UNJUDGED),
        (ConnectionRefusedError("judge"), Outcome.UNJUDGED),
        (FileNotFoundError("answer"), Outcome.UNPARSABLE),
    ],
)
def test_only_a_failure_with_another_cause_is_unjudged(error: Exception, outcome: Outcome) -> None:
    score = failure_score("verifier", error)
    assert (score.value, score.outcome) == (0.0, outcome)


def test_recorded_run_scores_unjudged_responses_as_before() -> None:
    recorded = {"policy": {"path": "p"}, "prompts": [{"kind": "sorting"}], "reward": {"kind": "exact"}}
    assert parse_recorded(recorded).reward.judge_tries == 0
