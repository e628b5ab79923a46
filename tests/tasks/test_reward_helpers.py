"""Helpers of the reward actor: they share run times of programs on test cases, and their counts are summed."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.objects import open_store
from rollflow.storage.run_records.case_anchors import CaseAnchors
from rollflow.storage.run_records.sandbox_figures import SandboxFigures, SandboxUse
from rollflow.storage.run_records.second_verdicts import SecondVerdictCounts
from rollflow.storage.run_records.usage import CpuCost
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.actors.gauges import Gauges
from rollflow.tasks.actors.reward_helpers.actor import RewardHelper
from rollflow.tasks.actors.reward_helpers.reports import HelperReport, HelperReports
from rollflow.tasks.actors.statuses import RewardStatus
from rollflow.tasks.prompts.config import ReasoningGymPrompts
from rollflow.tasks.run.cluster_config import ClusterConfig, RewardActorsConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.actor_warnings import ActorWarning
from rollflow.tasks.runtime.cpu import name_own_process
from rollflow.tasks.sandboxes.figures import KindCounter
from rollflow.tasks.scorers import build_scorers
from rollflow.tasks.scorers.base import Score, Scorer
from rollflow.tasks.scorers.code.config import AdaptiveDeadline
from rollflow.tasks.scorers.code.deadlines import name_row
from rollflow.tasks.scorers.concurrent import ConcurrentPool
from rollflow.tasks.scorers.config import CodeReward, ExactReward, RewardConfig
from rollflow.tasks.scorers.judge.config import JudgeReward
from rollflow.tasks.scorers.spread.spread import list_slots
from tests.support.described import describe
from tests.support.waiting import HANG_SECONDS
from tests.tasks.test_deadline_workers import ROW, WORKER

JUDGE = JudgeReward(url="http://127.0.0.1:1/v1", model="none")


class FakeWorkers(RewardHelper):
    """A helper whose workers report the program times (anchors) that they got."""

    def _build_scorer(self) -> Scorer:
        pool = super()._build_scorer()
        assert isinstance(pool, ConcurrentPool)
        pool._command = [sys.executable, "-c", WORKER]
        return pool


def context_of(folder: Path, reward: RewardConfig) -> RunContext:
    store = open_store(str(folder / "run"))
    cluster = ClusterConfig(reward_actors=RewardActorsConfig(max=3))
    describe(store, "helpers", RunConfig(prompts=(ReasoningGymPrompts(),), reward=reward, cluster=cluster))
    store.put("policy/config.json", b"{}")
    return RunContext(str(folder / "run"), folder / "cache")


async def ask(helper: RewardHelper) -> object:
    """Score one response; return the program times (anchors) that its worker got."""
    verdicts = await helper.score([(Int32s.of([1]).data, ROW, "", (), (), True)])
    found = dict(verdicts.scores)
    while verdicts.ticket is not None:
        verdicts = await helper.await_more(verdicts.ticket)
        found |= dict(verdicts.scores)
    return json.loads(Score.of_columns(found[0]).reason)


@pytest.mark.long
async def test_helpers_share_the_longest_times_of_test_cases(tmp_path: Path) -> None:
    context, row = context_of(tmp_path, CodeReward(workers=2, adaptive=AdaptiveDeadline())), name_row(ROW)
    record = CaseAnchors({"old": {0: 1.0}}, kills=5)
    reports, one, other = HelperReports({"": record}, {}), FakeWorkers(context), FakeWorkers(context)
    reports.note("one", await one.exchange({"": {"old": {0: 1.0}}}))
    assert record == CaseAnchors({"old": {0: 1.0}}, kills=5)
    assert await ask(one) == [[row, []]]
    report = await one.exchange({})
    async with asyncio.timeout(HANG_SECONDS):
        while report.anchors[""].rechecked < 1:
            reports.note("one", pickle.loads(pickle.dumps(report)))  # noqa: S301 - our own
            await asyncio.sleep(0.01)
            report = await one.exchange({})
    reports.note("one", report)
    assert record == CaseAnchors({"old": {0: 1.0}, row: {0: 2.5, 1: 4.0}}, 6, 1, 1)
    assert (await one.exchange({})).anchors[""].rows == {}  # each time is reported once
    reports.note("other", await other.exchange({"": record.rows}))
    assert await ask(other) == [[row, [[0, 2.5], [1, 4.0]]]]
    reports.note("other", await other.exchange({}))
    assert record.kills == 7
    assert report.worker_seconds > 0
    await one.close()
    await other.close()


async def test_sandboxes_of_an_actor_are_in_its_status_and_report(tmp_path: Path) -> None:
    KindCounter("rock").count_start()
    helper = FakeWorkers(context_of(tmp_path, CodeReward()))
    report = await helper.exchange({})
    await helper.close()
    helped = RewardStatus(sandboxes=[SandboxUse("helper", "rock", SandboxFigures(1))])
    shown = Gauges("reward", "memory://one").show(helped)
    assert {use.process for use in shown.sandboxes} == {"helper", name_own_process()}
    own = {use.kind: use.figures.started for use in report.sandboxes}
    assert own["rock"] >= 1
    assert [use for use in shown.sandboxes if use.process != "helper"] == report.sandboxes


REPORTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=30)


@given(steps=REPORTS)
def test_reward_counts_are_sums_over_all_helpers(steps: list[tuple[str, int, int, bool]]) -> None:
    anchors, counts = CaseAnchors(kills=7), SecondVerdictCounts("v1", 10, 2)
    reports, now = HelperReports({"": anchors}, {"": counts}), dict[str, HelperReport]()
    for number, (name, more, flips, ends) in enumerate(steps):
        before = now.get(name, HelperReport(anchors={"": CaseAnchors()}, counts={"": SecondVerdictCounts("v1")}))
        old, verdicts = before.anchors[""], before.counts[""]
        now[name] = HelperReport(
            before.busy_seconds + more,
            before.worker_seconds + 2 * more,
            [CpuCost("reward helper", name, number)],
            [ActorWarning("reward helper", name, 1, "odd")],
            {"": CaseAnchors({}, old.kills + more, old.rechecked + more, old.false_kills)},
            {"": SecondVerdictCounts("v1", verdicts.verdicts + more + flips, verdicts.flips + flips)},
            [SandboxUse(name, "rock", SandboxFigures(number))],
        )
        reports.note(name, now[name])
        if ends:
            reports.end(name)
            del now[name]
    total, flipped = (sum(step[place] for step in steps) for place in (1, 2))
    assert (anchors.kills, anchors.rechecked, anchors.false_kills) == (7 + total, total, 0)
    assert counts == SecondVerdictCounts("v1", 10 + total + flipped, 2 + flipped)
    assert (reports.sum().busy_seconds, reports.sum().worker_seconds) == (total, 2 * total)
    assert {cost.process for cost in reports.sum().costs} == now.keys()
    assert len(reports.sum().warned) == len(now)
    assert {use.process for use in reports.sum().sandboxes} == now.keys()


def test_counts_of_a_new_scorer_version_replace_old_counts() -> None:
    record, old = SecondVerdictCounts("v1", 10, 2), SecondVerdictCounts("v1", 4, 1)
    record.merge_news(old, old)
    assert record == SecondVerdictCounts("v1", 10, 2)
    record.merge_news(SecondVerdictCounts("v2", 3, 1), old)
    assert record == SecondVerdictCounts("v2", 3, 1)
    record.merge_news(old, old)  # nothing new of an older version
    assert record == SecondVerdictCounts("v2", 3, 1)


def test_only_scorers_with_worker_processes_use_helpers(tmp_path: Path) -> None:
    code = CodeReward(workers=3, at_once=4)
    configs: dict[str, RewardConfig] = {"": ExactReward(workers=2), "code": code}
    counts = {"code": SecondVerdictCounts()}
    assert list_slots(build_scorers(configs, tmp_path, counts=counts), configs) == {"": 2, "code": 12}
    assert list_slots(build_scorers({"code": code}, tmp_path, counts=counts), ["code"]) == {"code": 12}


def test_reward_actors_without_work_are_refused() -> None:
    prompts, several = (ReasoningGymPrompts(),), ClusterConfig(reward_actors=RewardActorsConfig(max=3))
    RunConfig(prompts=prompts, reward=ExactReward(), cluster=several)
    with pytest.raises(ValueError, match=r"cluster.reward_actors.max = 3: no scorer of this run has worker processes"):
        RunConfig(prompts=prompts, reward=JUDGE, cluster=several)
    with pytest.raises(ValueError, match=r"max = 2: max is smaller than min = 3; raise max or lower min"):
        RewardActorsConfig(min=3, max=2)
    assert (RewardActorsConfig().most, RewardActorsConfig(min=3).most, RewardActorsConfig(max=4).most) == (1, 3, 4)
