"""Tests of adaptive deadlines across processes: workers get the anchors (times of correct programs) and report new
times, and the anchors survive a restart.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rollflow.storage.objects import open_store
from rollflow.storage.records import Outcome
from rollflow.storage.run_records.case_anchors import CaseAnchors, anchors_path, read_anchors
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.actors import reward
from rollflow.tasks.actors.reward import RewardActor, RewardClient
from rollflow.tasks.actors.rollout import RolloutActor
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.prompts.config import ReasoningGymPrompts
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.scorers import build_scorer, build_scorers
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.code.config import AdaptiveDeadline
from rollflow.tasks.scorers.code.deadlines import name_row
from rollflow.tasks.scorers.concurrent import ConcurrentPool
from rollflow.tasks.scorers.config import CodeReward
from tests.support.described import describe
from tests.support.waiting import HANG_SECONDS

# A worker that returns the anchors that it got, and reports a time of 2.5 s, an early kill, and a recheck.
WORKER = """
import json, sys
print("ready", flush=True)
for line in sys.stdin:
    for number, asked, *row in json.loads(line):
        report = [[row[0][0], [[0, 2.5]], 1, 0, 0]] if row else []
        print(json.dumps([number, [1.0, json.dumps(row), "correct", {}, 0.0], *report]), flush=True)
        if row: print(json.dumps([-1, None, [row[0][0], [[1, 4.0]], 0, 1, 1]]), flush=True)
"""
ROW = {"cases": [{"stdin": "", "stdout": "7"}]}
ADAPTIVE = CodeReward(case_seconds=30.0, adaptive=AdaptiveDeadline())


def pool_of(config: CodeReward, anchors: CaseAnchors | None) -> ConcurrentPool:
    pool = build_scorer(config, Path(), anchors=anchors)
    assert isinstance(pool, ConcurrentPool)
    pool._command = [sys.executable, "-c", WORKER]
    return pool


async def reasons(pool: ConcurrentPool, requests: Sequence[ScoreRequest]) -> list[Any]:
    """Score one request after another, and return the anchors that the worker got, from the reasons of its scores."""
    await pool.start()
    try:
        return [json.loads((await asyncio.wait_for(pool.score([one]), HANG_SECONDS))[0].reason) for one in requests]
    finally:
        await pool.close()


@pytest.mark.long
async def test_worker_gets_the_deadline_times_of_its_prompt() -> None:
    anchors, name = CaseAnchors(), name_row(ROW)
    other = ScoreRequest([], {"cases": []})
    found = await reasons(
        pool_of(ADAPTIVE, anchors), [ScoreRequest([], ROW), other, ScoreRequest([], ROW, adapts=False)]
    )
    assert found == [[[name, []]], [[name_row(other.reference), []]], []]
    assert anchors.list_row(name) == {0: 2.5, 1: 4.0}
    assert (anchors.kills, anchors.rechecked, anchors.false_kills) == (2, 2, 2)
    assert await reasons(pool_of(ADAPTIVE, anchors), [ScoreRequest([], ROW)]) == [[[name, [[0, 2.5], [1, 4.0]]]]]


# A worker that measures 3 s on the row's test case, and then dies while it scores the first response.
MORTAL = """
import json, sys
print("ready", flush=True)
for line in sys.stdin:
    for number, asked, row in json.loads(line):
        if not row[1]:
            print(json.dumps([-1, None, [row[0], [[0, 3.0]], 0, 1, 1]]), flush=True)
            sys.exit(1)
        print(json.dumps([number, [1.0, json.dumps(row), "correct", {}, 0.0]]), flush=True)
"""


@pytest.mark.long
async def test_retried_response_gets_the_updated_deadline_times() -> None:
    anchors, name = CaseAnchors(), name_row(ROW)
    pool = pool_of(ADAPTIVE, anchors)
    pool._command = [sys.executable, "-c", MORTAL]
    assert await reasons(pool, [ScoreRequest([], ROW)]) == [[name, [[0, 3.0]]]]
    assert (anchors.rechecked, anchors.false_kills) == (1, 1)


@pytest.mark.long
async def test_worker_gets_no_times_without_adaptive_deadlines() -> None:
    assert await reasons(pool_of(CodeReward(), None), [ScoreRequest([], ROW)]) == [[]]


def context_of(folder: Path, config: CodeReward, texts: Sequence[str] = ("1",)) -> RunContext:
    store = open_store(str(folder / "run"))
    describe(store, "deadlines", RunConfig(prompts=(ReasoningGymPrompts(),), reward=config))
    for name, data in build_cold_folder(ColdStart(), list(texts)).items():
        store.put(f"policy/{name}", data)
    return RunContext(str(folder / "run"), folder / "cache")


class FakeWorkers(RewardActor):
    """A reward actor whose workers run `WORKER`."""

    def _build_scorer(self) -> ConcurrentPool:
        pool = super()._build_scorer()
        assert isinstance(pool, ConcurrentPool)
        pool._command = [sys.executable, "-c", WORKER]
        return pool


async def ask(actor: RewardActor, *programs: Sequence[int], adapts: bool = True) -> list[Score]:
    verdicts = await actor.score([(Int32s.of(tokens).data, ROW, "", (), (), adapts) for tokens in programs])
    found = dict(verdicts.scores)
    while verdicts.ticket is not None:
        verdicts = await actor.await_more(verdicts.ticket)
        found |= dict(verdicts.scores)
    return [Score.of_columns(found[place]) for place in range(len(programs))]


@pytest.mark.long
async def test_reward_actor_continues_with_stored_deadline_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward, "SAVE_SECONDS", 0.01)
    context = context_of(tmp_path, ADAPTIVE)
    actor = FakeWorkers(context)
    serving = asyncio.create_task(actor.run())
    await ask(actor, [1])
    async with asyncio.timeout(HANG_SECONDS):
        while (stored := read_anchors(context.store, "reward")).rechecked < 1:
            await asyncio.sleep(0.01)
    assert stored.rows == {name_row(ROW): {0: 2.5, 1: 4.0}}
    status = await actor.status()
    assert (status.kills, status.rechecked, status.false_kills) == (1, 1, 1)
    await actor.finish()
    assert await serving == 1
    again = FakeWorkers(context)
    [score] = await ask(again, [1])
    assert json.loads(score.reason) == [[name_row(ROW), [[0, 2.5], [1, 4.0]]]]
    assert (await again.status()).kills == 2  # the counters continue, too
    await (await again._scorer.get()).close()


async def test_evaluation_asks_for_fixed_deadlines(tmp_path: Path) -> None:
    context, asked = context_of(tmp_path, ADAPTIVE), list[ScoreRequest]()
    rollout = RolloutActor(context, "")
    rollout.config = context.config

    async def judge(request: ScoreRequest) -> Score:
        asked.append(request)
        return Score(1.0)

    rollout.reward = RewardClient(1.0)
    rollout.reward.score = judge  # type: ignore[method-assign]
    await rollout._score(ScoreRequest([], ROW))
    assert [one.adapts for one in asked] == [False]


async def test_damaged_deadline_times_restart_at_the_maximum(tmp_path: Path) -> None:
    context = context_of(tmp_path, ADAPTIVE)
    context.store.put(anchors_path("reward"), b"{")
    actor = RewardActor(context)
    actor._build_scorer()
    assert actor._anchors == {"": CaseAnchors()}


async def test_only_adaptive_scorers_store_deadline_times(tmp_path: Path) -> None:
    actor = RewardActor(context_of(tmp_path, CodeReward()))
    actor._build_scorer()
    assert actor._anchors == {}
    assert isinstance(build_scorers({"": CodeReward()}, Path()), ConcurrentPool)


FAST, SLOW = "print(7)", "import time\ntime.sleep(4)\nprint(7)"


@pytest.mark.soak
async def test_slow_correct_program_is_killed_only_once(tmp_path: Path) -> None:
    """A slow but correct program is killed once, which counts as a false kill. Later it is not killed, not even after a
    restart. An evaluation never kills it.
    """
    config = CodeReward(
        case_seconds=60.0, fenced=False, adaptive=AdaptiveDeadline(min_seconds=1.0, factor=2.0, recheck=1.0)
    )
    context = context_of(tmp_path, config, [FAST, SLOW])
    tokenizer = Tokenizer.from_file(str(context.policy_folder / "tokenizer.json"))
    fast, slow = (tokenizer.encode(text).ids for text in (FAST, SLOW))
    actor = RewardActor(context)
    [first] = await ask(actor, fast)
    if first.outcome is Outcome.UNPARSABLE:
        pytest.skip(first.reason)  # this machine runs no sandboxes
    assert first.outcome is Outcome.CORRECT
    [killed] = await ask(actor, slow)
    assert killed.outcome is Outcome.TIMEOUT
    assert killed.parts["deadline"] < 4
    assert "its adaptive deadline" in killed.reason
    [exact] = await ask(actor, slow, adapts=False)
    assert exact.outcome is Outcome.CORRECT
    async with asyncio.timeout(4 * HANG_SECONDS):
        while (await actor.status()).rechecked < 1:
            await asyncio.sleep(0.1)
    assert (await actor.status()).false_kills == 1
    [passed] = await ask(actor, slow)
    assert passed.outcome is Outcome.CORRECT
    await actor._store_records()
    await (await actor._scorer.get()).close()
    again = RewardActor(context)
    [restored] = await ask(again, slow)
    assert restored.outcome is Outcome.CORRECT
    await (await again._scorer.get()).close()
