"""Tests second verdicts (a run scores some responses twice): they find scorers that are not deterministic, change no
score, and delay no first verdict.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.storage.objects import open_store
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Outcome
from rollflow.storage.run_records.second_verdicts import (
    SecondVerdictCounts,
    counts_path,
    read_all_counts,
    read_counts,
)
from rollflow.storage.token_arrays import Float32s, Int32s
from rollflow.tasks.actors import reward
from rollflow.tasks.actors.reward import RewardActor
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.prompts.config import ReasoningGymPrompts
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.scorers import build_scorers, second_verdicts
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest, ScorerUsage
from rollflow.tasks.scorers.code.config import AdaptiveDeadline
from rollflow.tasks.scorers.config import (
    CodeReward,
    CompositePart,
    CompositeReward,
    ExactReward,
    RewardConfig,
)
from rollflow.tasks.scorers.pool import RewardPool
from rollflow.tasks.scorers.second_verdicts import SecondVerdictScorer, is_flip
from rollflow.tasks.scorers.version import describe_scorer
from rollflow.tasks.scorers.worker import REWARD
from tests.support.described import describe
from tests.support.waiting import HANG_SECONDS

Judge = Callable[[int, ScoreRequest], Score]  # (number of earlier verdicts on the response, request) -> verdict


class FakeScorer(Scorer):
    """A scorer that judges at once or, if `gate` is closed, when `gate` opens."""

    def __init__(self, judge: Judge) -> None:
        self.judge, self.asked, self.usage = judge, list[ScoreRequest](), ScorerUsage()
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        return [asyncio.ensure_future(self._answer(one)) for one in requests]

    async def _answer(self, request: ScoreRequest) -> Score:
        before = sum(one.tokens == request.tokens for one in self.asked)
        self.asked.append(request)
        await self.gate.wait()
        self.usage.scored += 1
        return self.judge(before, request)


def ask(*tokens: int) -> list[ScoreRequest]:
    return [ScoreRequest([token], {}) for token in tokens]


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


async def judge_twice(judge: Judge, count: int = 10) -> tuple[list[Score], SecondVerdictCounts, FakeScorer]:
    """Score responses, all of them twice; return the first scores, the counts of second verdicts, and the wrapped
    scorer.
    """
    inner, counts = FakeScorer(judge), SecondVerdictCounts()
    scorer = SecondVerdictScorer(inner, 1.0, counts)
    await scorer.start()
    scores = await scorer.score(ask(*range(count)))
    await wait_for(lambda: scorer._second.scored == count)
    assert scorer.usage.scored == count
    await scorer.close()
    return scores, counts, inner


async def test_deterministic_scorer_gives_no_differing_verdicts() -> None:
    scores, counts, _ = await judge_twice(lambda _, request: Score(float(request.tokens[0] % 2), version="a"))
    assert [score.value for score in scores] == [0.0, 1.0] * 5
    assert counts == SecondVerdictCounts("a", 10, 0)


def of_tokens(*values: float) -> Score:
    return Score(1.0, token_values=Float32s.of(values))


async def test_random_scorer_is_detected_and_keeps_its_first_scores() -> None:
    scores, counts, inner = await judge_twice(lambda before, _: Score(float(not before)))
    assert [score.value for score in scores] == [1.0] * 10
    assert counts == SecondVerdictCounts("", 10, 10)
    assert [(one.adapts, one.uses_cache) for one in inner.asked] == [(True, True)] * 10 + [(False, False)] * 10


@pytest.mark.parametrize(
    ("first", "second", "flips"),
    [
        (Score(0.5), Score(0.51), False),
        (Score(0.5), Score(0.6), True),
        (Score(200.0), Score(201.0), False),  # rounding of a large logit
        (Score(0.0, outcome=Outcome.WRONG), Score(0.0, outcome=Outcome.TIMEOUT), False),
        (Score(1.0), Score(1.0, outcome=Outcome.PARTIAL), True),
        (Score(0.99), Score(1.0), True),
        (of_tokens(0.5, math.nan), of_tokens(0.51, math.nan), False),
        (of_tokens(0.5, 0.5), of_tokens(0.5, 0.6), True),
        (of_tokens(0.5, math.nan), of_tokens(0.5, 0.5), True),
        (of_tokens(0.5, 0.5), Score(1.0), True),
    ],
)
def test_verdicts_differ_if_outcome_or_value_changed(first: Score, second: Score, flips: bool) -> None:
    assert is_flip(first, second) is flips
    assert is_flip(second, first) is flips


async def test_unjudged_second_verdict_is_not_counted() -> None:
    def judge(before: int, _: ScoreRequest) -> Score:
        return Score(0.0, outcome=Outcome.UNJUDGED) if before else Score(1.0)

    assert (await judge_twice(judge))[1] == SecondVerdictCounts()


async def test_second_verdict_of_another_version_is_not_counted() -> None:
    _, counts, _ = await judge_twice(lambda before, _: Score(float(before), version=str(before)))
    assert counts == SecondVerdictCounts()
    counts = SecondVerdictCounts("old", 30, 3)
    counts.add("new", is_flip=True)
    assert counts == SecondVerdictCounts("new", 1, 1)


@pytest.mark.parametrize(
    ("first", "name"),
    [
        (Score(0.0, outcome=Outcome.UNJUDGED), None),
        (Score(0.0, parts={"deadline": 2.0}), "deadline"),
        (Score(0.5, parts={"tests": 0.0, "tests.deadline": 2.0}), "tests.deadline"),
    ],
)
async def test_some_responses_are_not_judged_a_second_time(first: Score, name: str | None) -> None:
    """A response without a verdict, and one whose verdict an adaptive deadline decided, are not judged again."""
    inner = FakeScorer(lambda *_: first)
    scorer = SecondVerdictScorer(inner, 1.0, SecondVerdictCounts(), name)
    await scorer.start()
    await scorer.score(ask(1, 2))
    await asyncio.sleep(0.01)
    assert len(inner.asked) == 2
    await scorer.close()


ADAPTIVE = CodeReward(adaptive=AdaptiveDeadline())
TESTS = CompositeReward(parts={"deadline": CompositePart(), "tests": CompositePart(scorer=ADAPTIVE)})


@pytest.mark.parametrize(
    ("config", "name"),
    [(ADAPTIVE, "deadline"), (CodeReward(), None), (TESTS, "tests.deadline"), (ExactReward(), None)],
)
def test_adaptive_deadline_is_found_in_a_composite_scorer(config: RewardConfig, name: str | None) -> None:
    """The part "deadline" of a score marks an adaptive deadline only if the scorer has adaptive deadlines."""
    config = config.model_copy(update={"second_verdict_share": 0.5})
    scorer: Any = build_scorers({"": config}, Path(), counts={"": SecondVerdictCounts()})
    assert scorer._deadline_part == name


async def test_reward_part_named_deadline_is_judged_again() -> None:
    _, counts, _ = await judge_twice(lambda *_: Score(1.0, parts={"deadline": 1.0}))
    assert counts.verdicts == 10


async def test_configured_share_of_responses_is_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_verdicts, "MOST_WAITING", 1000)
    inner, counts = FakeScorer(lambda *_: Score(1.0)), SecondVerdictCounts()
    scorer = SecondVerdictScorer(inner, 0.25, counts)
    await scorer.start()
    await scorer.score(ask(*range(400)))
    await wait_for(lambda: counts.verdicts > 0 and not scorer._waiting)
    await asyncio.sleep(0.01)
    assert 50 < counts.verdicts < 150  # 5.8 standard deviations
    await scorer.close()


@pytest.mark.parametrize("patience", [1000.0, 0.01])
async def test_second_verdict_waits_for_first_verdicts(monkeypatch: pytest.MonkeyPatch, patience: float) -> None:
    """A second verdict waits while first verdicts are missing, but not longer than `PATIENCE_SECONDS`."""
    monkeypatch.setattr(second_verdicts, "PATIENCE_SECONDS", patience)
    inner = FakeScorer(lambda *_: Score(1.0))
    scorer = SecondVerdictScorer(inner, 1.0, SecondVerdictCounts())
    await scorer.start()
    [quick] = scorer.submit(ask(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    inner.gate.clear()
    [slow] = scorer.submit(ask(2))
    await quick
    if patience > 1:
        await asyncio.sleep(0.05)
        assert len(inner.asked) == 2
    else:
        await wait_for(lambda: len(inner.asked) == 3)
    inner.gate.set()
    await slow
    await wait_for(lambda: scorer._second.scored == 2)
    await scorer.close()


async def test_number_of_waiting_second_verdicts_is_bounded() -> None:
    inner = FakeScorer(lambda *_: Score(1.0))
    scorer = SecondVerdictScorer(inner, 1.0, SecondVerdictCounts())
    await scorer.score(ask(*range(200)))  # nobody asks for second verdicts, because the scorer is not started
    await asyncio.sleep(0)
    assert len(scorer._waiting) == second_verdicts.MOST_WAITING
    assert scorer._waiting[-1][0].tokens == [199]
    await scorer.close()


async def test_failed_scorer_gives_no_more_second_verdicts() -> None:
    def judge(before: int, _: ScoreRequest) -> Score:
        if before:
            raise ConfigError("the budget is used up")
        return Score(1.0)

    counts = SecondVerdictCounts()
    scorer = SecondVerdictScorer(FakeScorer(judge), 1.0, counts)
    await scorer.start()
    assert [score.value for score in await scorer.score(ask(1, 2))] == [1.0, 1.0]
    assert scorer._task is not None
    await asyncio.wait_for(scorer._task, HANG_SECONDS)
    assert counts.verdicts == 0
    await scorer.close()


def test_damaged_counts_of_second_verdicts_are_read_as_empty() -> None:
    run = MemoryStore("second-verdicts")
    counts = SecondVerdictCounts("a", 30, 2)
    run.put(counts_path("rewards.one"), counts.encode())
    assert read_counts(run, "rewards.one") == counts
    for damaged in ("", "[]", '{"verdicts": "x"}', '{"verdicts": 1, "flips": 2}'):
        run.put(counts_path("reward"), damaged.encode())
        assert read_counts(run, "reward") == SecondVerdictCounts()
    assert read_all_counts(run) == {"rewards.one": counts}


def test_second_verdict_share_keeps_the_scorer_version() -> None:
    def describe_with(share: float, **keys: Any) -> Any:
        return describe_scorer(REWARD.validate_python({"second_verdict_share": share, **keys}))

    assert describe_with(0.5, kind="exact") == describe_with(0.0, kind="exact")
    parts = {"parts": {"a": {"scorer": {"kind": "exact"}}}}
    assert "second_verdict_share" not in str(describe_with(0.5, kind="composite", **parts))


def test_only_scorers_with_second_verdict_share_judge_twice() -> None:
    configs = {"": ExactReward(), "twice": ExactReward(second_verdict_share=0.5)}
    built: Any = build_scorers(configs, Path(), counts={"twice": SecondVerdictCounts()})
    assert [type(one) for one in built.scorers.values()] == [RewardPool, SecondVerdictScorer]
    assert isinstance(build_scorers({"": configs["twice"]}, Path()), RewardPool), "`rollflow rejudge` judges once"


# a scorer whose value depends on the number of its earlier calls
WORKER = """
import json, sys
print("ready 0123456789ab", flush=True)
for number, line in enumerate(sys.stdin):
    print(json.dumps([float(number == 0), "", "wrong" if number else "correct", {}, 0.0]), flush=True)
"""


class FakeWorkers(RewardActor):
    """A reward actor whose worker process is not deterministic."""

    def _build_scorer(self) -> Scorer:
        scorer: Any = super()._build_scorer()
        scorer._scorer._command = [sys.executable, "-c", WORKER]
        return scorer  # type: ignore[no-any-return]


@pytest.mark.long
async def test_reward_actor_stores_differing_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward, "SAVE_SECONDS", 0.01)
    store = open_store(str(tmp_path / "run"))
    config = RunConfig(prompts=(ReasoningGymPrompts(),), reward=ExactReward(second_verdict_share=1.0))
    describe(store, "twice", config)
    for name, data in build_cold_folder(ColdStart(), ["1"]).items():
        store.put(f"policy/{name}", data)
    context = RunContext(str(tmp_path / "run"), tmp_path / "cache")
    actor = FakeWorkers(context)
    serving = asyncio.create_task(actor.run())
    assert (await actor.status()).idle == 1.0  # the actor has not scored any response yet
    verdicts = await actor.score([(Int32s.of([1]).data, {"answer": "1"}, "", (), (), True)])
    found = dict(verdicts.scores)
    while verdicts.ticket is not None:
        verdicts = await actor.await_more(verdicts.ticket)
        found |= dict(verdicts.scores)
    assert Score.of_columns(found[0]).value == 1.0
    await wait_for(lambda: read_all_counts(store) == {"reward": SecondVerdictCounts("0123456789ab", 1, 1)})
    status = await actor.status()
    assert (status.scored, status.second_verdicts, status.flips) == (1, {"reward": 1}, {"reward": 1})
    await actor.finish()
    assert await serving == 1
    again = FakeWorkers(context)
    again._build_scorer()
    assert again._counts == {"": SecondVerdictCounts("0123456789ab", 1, 1)}, "counts continue after a restart"
