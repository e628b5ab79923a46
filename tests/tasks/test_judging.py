"""Tests responses that no scorer could judge: they are judged again, and are never trained on without a verdict."""

from __future__ import annotations

import asyncio
import random
import socket
import urllib.error
import urllib.request
import uuid
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import (
    Branch,
    DiscardReason,
    GroupKey,
    Outcome,
    Prompt,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.config import ImportEnvironment
from rollflow.tasks.environments.imported import ImportedEnvironment
from rollflow.tasks.rollout.config import FilterConfig
from rollflow.tasks.rollout.group import GroupRollout
from rollflow.tasks.rollout.judging import Outages, ScoreQueue, judge_repeatedly
from rollflow.tasks.rollout.limits import JudgingLimits
from rollflow.tasks.run.context import parse_recorded
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, ScoreRequest, Unjudged, failure_score
from tests.support.expected import expected_of
from tests.support.log_runs import read
from tests.support.pipeline import Pipeline

AWAY = Score(0.0, "the judge is away", Outcome.UNJUDGED)
RIGHT = Score(1.0, "right")


class FlakyJudge(Pipeline):
    """A pipeline whose judge cannot be reached in a share of its calls, or in all calls about one prompt."""

    share = 0.0
    lost_prompt: int | None = None  # index of a prompt whose responses are never judged
    calls = 0

    async def _score(self, request: ScoreRequest) -> Score:
        self.calls += 1
        if random.Random(f"{self.seed}:{self.calls}").random() < self.share:
            return AWAY
        if request.reference["index"] == self.lost_prompt:
            return AWAY
        return await super()._score(request)

    def _prompt(self, index: int) -> Prompt:
        return replace(super()._prompt(index), reference={"index": index})


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
def test_judging_ends_after_the_configured_tries(tries: int, calls: int) -> None:
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
    choices: dict[str, Any] = {"judging": {"": JudgingLimits(tries, 10**6)}, "redundant_responses": redundant}
    pipeline = FlakyJudge(MemoryStore(uuid.uuid4().hex), versions=4, async_ratio=alpha, seed=seed, choices=choices)
    pipeline.share = share
    run_virtual(pipeline.run())
    assert outcomes(pipeline)[Outcome.UNJUDGED] == 0
    report = audit(pipeline.store, deep=True, expected=expected_of(pipeline))
    assert report.violations == []
    assert pipeline.state.version == 4
    if share == 0.5 and tries == 1:
        assert DiscardReason.UNJUDGED in discards(pipeline)


async def test_score_queue_reports_when_it_has_room() -> None:
    waiting, rooms = list[asyncio.Future[Score]](), list[int]()

    async def judge(request: ScoreRequest) -> Score:
        waiting.append(asyncio.get_running_loop().create_future())
        return await waiting[-1]

    queue = ScoreQueue(2, lambda: rooms.append(queue.waiting))
    scoring = [asyncio.create_task(queue.count(judge)(ScoreRequest((), {}))) for _ in range(3)]
    await asyncio.sleep(0)
    assert queue.waiting == 3
    for place, expected in enumerate([[], [1], [1]]):
        waiting[place].set_result(RIGHT)
        await scoring[place]
        assert rooms == expected


class AwayAtFirst(Pipeline):
    """A pipeline whose judge cannot be reached for the first 20 seconds."""

    began: float | None = None
    most_running = 0  # largest number of groups that ran at the same time during the outage

    async def _score(self, request: ScoreRequest) -> Score:
        now = asyncio.get_running_loop().time()
        self.began = now if self.began is None else self.began
        if now - self.began > 20.0:
            return await super()._score(request)
        self.most_running = max(self.most_running, self.scheduler.running)
        return AWAY


def test_responses_between_judge_tries_count_as_unscored() -> None:
    choices: dict[str, Any] = {"judging": {"": JudgingLimits(20, 100)}, "slots": 4, "max_unscored": 2}
    pipeline = AwayAtFirst(MemoryStore("between"), async_ratio=8.0, choices=choices)
    run_virtual(pipeline.run())
    assert pipeline.state.version == 6
    assert 0 < pipeline.most_running < 2 + 4 - 1 + pipeline.group_size
    assert pipeline.scheduler.scoring.waiting == 0


@pytest.mark.parametrize("redundant", [0, 1])
def test_compared_groups_larger_than_the_queue_are_scored(redundant: int) -> None:
    judging = {"": JudgingLimits(3, 100, compares_group=True)}
    choices: dict[str, Any] = {"judging": judging, "max_unscored": 1, "redundant_responses": redundant}
    pipeline = FlakyJudge(MemoryStore("compared"), group_size=4, async_ratio=2.0, reward_seconds=0.5, choices=choices)
    pipeline.share = 0.2
    run_virtual(pipeline.run())
    assert pipeline.state.version == 6
    assert pipeline.scheduler.scoring.waiting == 0


def test_prompt_of_an_unjudged_group_is_issued_again() -> None:
    pipeline = FlakyJudge(MemoryStore("again"), versions=3, choices={"judging": {"": JudgingLimits(1, 1000)}})
    pipeline.share = 0.4
    run_virtual(pipeline.run())
    bodies = [entry.body for entry in read(pipeline.store) if isinstance(entry.body, BatchCommitted)]
    lost = {discard.key.prompt for body in bodies for discard in body.discards}
    trained = {group.key.prompt for body in bodies for group in body.groups if group.key.attempt > 0}
    assert lost
    assert trained & lost


def test_run_fails_if_no_response_can_be_judged() -> None:
    pipeline = FlakyJudge(MemoryStore("never"), versions=2, choices={"judging": {"": JudgingLimits(2, 7)}})
    pipeline.share = 1.1
    with pytest.raises(ExceptionGroup) as failed:
        run_virtual(pipeline.run())
    error = failed.value.exceptions[0]
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ConfigError)
    assert "max_unjudged = 7" in str(error)
    assert "the judge is away" in str(error)


def test_run_fails_if_one_prompt_can_never_be_judged() -> None:
    choices = {"judging": {"": JudgingLimits(1, 5)}}
    pipeline = FlakyJudge(MemoryStore(uuid.uuid4().hex), versions=4, async_ratio=1.0, choices=choices)
    pipeline.lost_prompt = 2
    with pytest.raises(ExceptionGroup) as failed:
        run_virtual(pipeline.run())
    error = failed.value.exceptions[0]
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ConfigError)
    assert "prompt 2 was issued " in str(error)


def test_audit_reports_an_unjudged_trajectory() -> None:
    pipeline = FlakyJudge(MemoryStore("old"), versions=2, choices={"judging": {"": JudgingLimits(0)}})
    pipeline.share = 0.3
    run_virtual(pipeline.run())
    assert outcomes(pipeline)[Outcome.UNJUDGED] > 0
    assert audit(pipeline.store, expected=expected_of(pipeline)).violations == []
    pipeline.scheduler.limits = pipeline.scheduler.limits.__class__(
        **{name: getattr(pipeline.scheduler.limits, name) for name in pipeline.scheduler.limits.__slots__}
        | {"judging": {"": JudgingLimits(3)}}
    )
    found = audit(pipeline.store, deep=True, expected=expected_of(pipeline)).violations
    assert {violation.kind for violation in found} == {"unjudged"}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("no number in the answer"), Outcome.UNPARSABLE),
        (Unjudged("no verdict"), Outcome.UNJUDGED),
        (ConnectionRefusedError("judge"), Outcome.UNJUDGED),
        (BrokenPipeError("the program has ended"), Outcome.UNPARSABLE),
        (FileNotFoundError("answer"), Outcome.UNPARSABLE),
    ],
)
def test_only_external_failures_leave_a_response_unjudged(error: Exception, outcome: Outcome) -> None:
    score = failure_score("verifier", error)
    assert (score.value, score.outcome) == (0.0, outcome)


def test_recorded_run_without_the_key_judge_tries_gets_0_tries() -> None:
    recorded = {"policy": {"path": "p"}, "prompts": [{"kind": "sorting"}], "reward": {"kind": "exact"}}
    assert parse_recorded(recorded).reward.judge_tries == 0


class Away(Pipeline):
    """A pipeline whose judge cannot be reached before the time `until`; calls before that time are counted."""

    until = 0.0
    calls = 0

    async def _score(self, request: ScoreRequest) -> Score:
        if asyncio.get_running_loop().time() < self.until:
            self.calls += 1
            return AWAY
        return await super()._score(request)


def test_short_outage_of_a_judge_does_not_end_the_run() -> None:
    """Many groups run at the same time, so a single short outage affects more than `max_unjudged` groups."""
    pipeline = Away(MemoryStore("outage"), versions=2, groups=30, choices={"judging": {"": JudgingLimits(1, 5)}})
    pipeline.until = 0.2
    run_virtual(pipeline.run())
    assert discards(pipeline).count(DiscardReason.UNJUDGED) > 5
    assert pipeline.state.version == 2


def test_long_outage_of_a_judge_does_not_end_the_run() -> None:
    """Without pauses between the dispatches of a prompt, 20 dispatches would fail within a few seconds, and the run
    would end.
    """
    pipeline = Away(MemoryStore("long outage"), versions=2, choices={"judging": {"": JudgingLimits(1, 20)}})
    pipeline.until = 300.0
    run_virtual(pipeline.run())
    assert pipeline.state.version == 2
    assert pipeline.calls < 1000


class OneAway(Pipeline):
    """A pipeline with a second scorer that can never be reached. The run ends without the groups of this scorer."""

    ended = 0.0

    def _prompt(self, index: int) -> Prompt:
        return replace(super()._prompt(index), scorer="away" if index % 4 == 0 else "")

    async def _score(self, request: ScoreRequest) -> Score:
        return AWAY if request.scorer == "away" else await super()._score(request)

    async def _schedule(self) -> None:
        await self.scheduler.run()
        self.ended = asyncio.get_running_loop().time()

    async def _learn(self) -> None:
        await super()._learn()
        while not self.ended:
            await asyncio.sleep(0.1)


def test_unjudged_groups_do_not_delay_the_end_of_the_run() -> None:
    judging = {"": JudgingLimits(1), "away": JudgingLimits(1, 10**6)}
    pipeline = OneAway(MemoryStore("end"), versions=2, choices={"judging": judging, "redundant_groups": 3})
    pauses = list[float]()
    pause = Outages.pause

    async def note_pause(self: Outages, scorer: str, over: asyncio.Event) -> None:
        pauses.append(asyncio.get_running_loop().time())
        await pause(self, scorer, over)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Outages, "pause", note_pause)
        run_virtual(pipeline.run())
    assert pipeline.state.version == 2
    assert pipeline.ended < max(pauses) + 0.5


def test_paused_groups_continue_once_the_scorer_judges_again() -> None:
    async def pause(scorer: str) -> float:
        outages, over = Outages(), asyncio.Event()
        for number in range(1, 11):
            outages.count("away", number, number)
        asyncio.get_running_loop().call_later(1.0, outages.end, scorer)
        await outages.pause("away", over)
        await outages.pause("other", asyncio.Event())
        assert over.is_set() is (scorer == "away")
        return asyncio.get_running_loop().time()

    assert run_virtual(pause("away")) == 1.0
    assert run_virtual(pause("other")) == 30.0


def test_cancelled_group_is_not_judged_again() -> None:
    """The 100 tries of a cancelled group would delay the next group and the end of the run."""
    asked: list[ScoreRequest] = []

    async def judge(request: ScoreRequest) -> Score:
        asked.append(request)
        return AWAY

    async def give_up() -> float:
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, over.set)
        await judge_repeatedly(judge, 100, over)(ScoreRequest((), {}))
        return asyncio.get_running_loop().time()

    assert run_virtual(give_up()) < 1
    assert len(asked) == 1


class Averaging(Environment):
    """An environment that computes the reward from two scores of the run's scorer."""

    async def play(self, episode: Episode) -> Score | float | None:
        generation = await episode.generate()
        if generation is None:
            return None
        first, second = await episode.score(generation.tokens), await episode.score(generation.tokens)
        return (first.value + second.value) / 2


def test_reward_computed_from_an_unjudged_score_is_unjudged() -> None:
    choices: dict[str, Any] = {"judging": {"": JudgingLimits(1, 10**6)}}
    pipeline = FlakyJudge(MemoryStore("mean"), versions=3, environment=Averaging(), choices=choices)
    pipeline.share = 0.2
    run_virtual(pipeline.run())
    assert DiscardReason.UNJUDGED in discards(pipeline)


class Raising(Environment):
    """An environment that raises `error` in one of its first episodes."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.played = error, 0

    async def play(self, episode: Episode) -> Score | float | None:
        self.played += 1
        number = self.played
        if await episode.generate() is None:
            return None
        if number < 4:
            raise self.error
        return 1.0


@pytest.mark.parametrize(
    ("error", "reason"), [(Unjudged, DiscardReason.UNJUDGED), (asyncio.CancelledError, None), (SystemExit, None)]
)
def test_error_of_an_environment_does_not_end_the_run(error: type[BaseException], reason: DiscardReason | None) -> None:
    environment = ImportedEnvironment(ImportEnvironment(path=f"{__name__}:Raising", options={"error": None}))
    environment._own = Raising(error)
    pipeline = Pipeline(
        MemoryStore(error.__name__),
        versions=2,
        environment=environment,
        choices={"judging": {"": JudgingLimits(2)}},
        async_ratio=0.0,
    )
    run_virtual(asyncio.wait_for(pipeline.run(), 1e3))
    assert pipeline.state.version == 2
    assert ({*discards(pipeline)} == {reason}) if reason else outcomes(pipeline)[Outcome.UNPARSABLE] == 3


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize(
    "choices",
    [
        {"tail_batching": True},
        {"on_stale": "wait"},
        {"on_stale": "drop", "redundant_responses": 2},
        {"batch_order": "started"},
    ],
)
def test_run_with_unjudged_prompts_passes_the_audit(alpha: float, choices: dict[str, Any]) -> None:
    """In a run whose judge sometimes fails, two engines die. The run completes, and the audit finds no violation."""
    pipeline = FlakyJudge(
        MemoryStore(uuid.uuid4().hex),
        versions=3,
        async_ratio=alpha,
        max_inflight_groups=1,
        engine_deaths=((0.5, 0), (1.5, 1)),
        engines=2,
        choices={"judging": {"": JudgingLimits(2, 10**6)}, **choices},
    )
    pipeline.share = 0.4
    run_virtual(asyncio.wait_for(pipeline.run(), 1e4))
    assert audit(pipeline.store, deep=True, expected=expected_of(pipeline)).violations == []


def test_unjudged_prompts_change_no_batch_at_alpha_zero() -> None:
    """At `async_ratio = 0` a run with an unreliable judge trains on the same trajectories as a run without one."""
    found = []
    for share in (0.0, 0.4):
        pipeline = FlakyJudge(
            MemoryStore(f"same {share}"),
            versions=3,
            async_ratio=0.0,
            choices={"judging": {"": JudgingLimits(1, 10**6)}},
        )
        pipeline.share = share
        run_virtual(pipeline.run())
        bodies = [entry.body for entry in read(pipeline.store) if isinstance(entry.body, BatchCommitted)]
        batches = [TrajectoryBatch.from_bytes(pipeline.store.get(body.file.path)).table for body in bodies]
        found.append([table.select(["index", "sample", "tokens", "reward"]).to_pylist() for table in batches])
    assert found[0] == found[1]


def test_unjudged_responses_are_discarded_only_with_judge_tries() -> None:
    pipeline = FlakyJudge(MemoryStore("none"), versions=2, choices={"judging": {"": JudgingLimits(1, 10**6)}})
    pipeline.share = 0.4
    run_virtual(pipeline.run())
    pipeline.scheduler.limits = replace(pipeline.scheduler.limits, judging={})
    assert audit(pipeline.store, deep=True, expected=expected_of(pipeline)).violations


def test_lost_connection_is_found_as_cause_of_a_library_error() -> None:
    """`urllib` wraps the refused connection in a `URLError`, which is not a `ConnectionError`."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(urllib.error.URLError) as failed:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30)
    assert failure_score("verifier", failed.value).outcome is Outcome.UNJUDGED
    assert failure_score("verifier", ValueError("no number")).outcome is Outcome.UNPARSABLE


def test_branches_of_a_response_count_once_in_the_prompt_filter() -> None:
    """The scheduler's filter uses one reward for each episode, as the audit does."""
    pipeline = Pipeline(MemoryStore("branches"), versions=0, choices={"filter": FilterConfig(max_mean=0.7)})
    run_virtual(pipeline.run())
    scheduler = pipeline.scheduler
    right, wrong = (
        Trajectory(sample, 0, (1, 2), (False, True), (0.0, -1.0), (-1, 0), reward, "", StopReason.STOP, 1.0, 1.0)
        for sample, reward in ((0, 1.0), (1, 0.0))
    )
    branches = [replace(right, sample=2 + number, branch=Branch(0, 1)) for number in range(4)]
    group = TrajectoryGroup(GroupKey(0, 0), "p0", "test", (right, wrong, *branches))
    rollout = GroupRollout(group.key, scheduler._group_ports, 2, 1, awaited=False)
    scheduler._add_scored(group, rollout)
    assert not scheduler.counts.filtered
    assert len(scheduler.buffer) == 1
