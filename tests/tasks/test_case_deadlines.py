"""Tests of adaptive deadlines of test cases: the formula, anchors (times of correct programs), and false kills."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.storage.run_records.case_anchors import RECORD, CaseAnchors
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.sandboxes.base import Capability, ExecResult, Program, ProgramEnd
from rollflow.tasks.scorers.base import Score
from rollflow.tasks.scorers.code.cases import read_case
from rollflow.tasks.scorers.code.config import AdaptiveDeadline
from rollflow.tasks.scorers.code.deadlines import (
    CLOCK,
    MOST_WAITING,
    CaseClock,
    DeadlineReport,
    Rechecks,
    combine_anchors,
    compute_deadline,
    is_drawn,
    name_row,
    read_reference_seconds,
)
from rollflow.tasks.scorers.code.guest import ASKS
from rollflow.tasks.scorers.code.scorer import CodeScorer
from rollflow.tasks.scorers.composite import CompositeVerifier
from rollflow.tasks.scorers.config import (
    CodeReward,
    CompositePart,
    CompositeReward,
    ExactReward,
    has_adaptive_deadlines,
)
from rollflow.tasks.scorers.verifier import Verifier
from tests.support.timed_sandboxes import PlannedSandboxes, as_sandboxes

ROW = {"cases": [{"stdin": "", "stdout": "7"}]}
TWO = {"cases": [{"stdin": "", "stdout": "7"}, {"stdin": "1", "stdout": "7"}]}
ADAPTIVE = AdaptiveDeadline(recheck=1.0)
SECONDS = st.floats(0.01, 100)


@pytest.mark.parametrize(
    ("anchor", "deadline"),
    [
        (None, 30.0),  # no program was correct yet
        (0.1, 2.0),  # 1.5 x 0.1 is below T_min
        (4 / 3, 2.0),
        (4.0, 6.0),
        (20.0, 30.0),
        (29.0, 30.0),  # 1.5 x 29 is above T_max
    ],
)
def test_test_case_deadline_matches_a_hand_calculation(anchor: float | None, deadline: float) -> None:
    assert compute_deadline(AdaptiveDeadline(), 30.0, anchor) == deadline


@given(anchor=st.none() | SECONDS, more=SECONDS, factor=st.floats(1, 5), least=SECONDS, longest=SECONDS)
def test_deadline_is_at_least_the_longest_correct_time(
    anchor: float | None, more: float, factor: float, least: float, longest: float
) -> None:
    adaptive = AdaptiveDeadline(factor=factor, min_seconds=least)
    deadline = compute_deadline(adaptive, longest, anchor)
    assert deadline <= longest
    assert deadline >= min(anchor or longest, longest)
    assert deadline <= compute_deadline(adaptive, longest, None if anchor is None else anchor + more)


@given(row=st.dictionaries(st.text(max_size=5), st.lists(st.integers() | st.text(max_size=5), max_size=4), max_size=4))
def test_key_of_a_row_is_the_same_after_a_json_round_trip(row: dict[str, Any]) -> None:
    assert name_row(json.loads(json.dumps(row))) == name_row(row)
    assert name_row({**row, "another": 1}) != name_row({**row, "another": 2})


@given(
    seconds=st.dictionaries(st.integers(0, 20), SECONDS),
    counts=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
)
def test_deadline_report_survives_a_json_round_trip(seconds: dict[int, float], counts: tuple[int, int, int]) -> None:
    report = DeadlineReport("row", seconds, *counts)
    assert DeadlineReport.of_columns(json.loads(json.dumps(report.to_columns()))) == report
    anchors = CaseAnchors()
    report.add_to(anchors)
    report.add_to(anchors)
    assert (anchors.kills, anchors.rechecked, anchors.false_kills) == tuple(2 * count for count in counts)
    assert anchors.list_row("row").keys() == seconds.keys()


def test_killed_programs_are_rechecked_at_the_configured_rate() -> None:
    drawn = sum(is_drawn(0.05, "row", str(number)) for number in range(20_000))
    assert 850 < drawn < 1150
    assert not any(is_drawn(0.0, str(number)) for number in range(100))
    assert all(is_drawn(1.0, str(number)) for number in range(100))


class Desk:
    """Scores programs in turn, like a worker, and keeps the anchors (longest correct times), like the reward actor."""

    def __init__(self, adaptive: AdaptiveDeadline | None = ADAPTIVE, anchors: CaseAnchors | None = None) -> None:
        self.sandboxes, self.anchors = PlannedSandboxes(), anchors or CaseAnchors()
        self.scorer = CodeScorer(
            CodeReward(case_seconds=30.0, fenced=False, adaptive=adaptive), as_sandboxes(self.sandboxes)
        )
        self.idle = True
        self.rechecks = Rechecks(lambda: self.idle, lambda report: report.add_to(self.anchors))

    async def score(self, program: str, row: dict[str, Any] = ROW, *, adapts: bool = True) -> Score:
        clock = CaseClock(name_row(row), dict(self.anchors.list_row(name_row(row))))
        CLOCK.set(clock if adapts else None)
        score = await self.scorer.score(program, row)
        if adapts:
            clock.report.add_to(self.anchors)
            self.rechecks.add(clock)
        return score

    async def score_all(self, *programs: str) -> list[Score]:
        return [await self.score(program) for program in programs]

    async def recheck(self) -> None:
        self.rechecks.begin()
        await asyncio.sleep(100)


def outcomes(scores: Sequence[Score]) -> list[str]:
    return [str(score.outcome) for score in scores]


def test_only_correct_programs_change_the_deadline() -> None:
    desk = Desk()
    # a wrong program, a correct one, a wrong one again, a correct one that is slower
    scores = run_virtual(desk.score_all("9 8", "4 7", "5 8", "5 7", "1 7"))
    assert outcomes(scores) == ["wrong", "correct", "wrong", "correct", "correct"]
    assert desk.sandboxes.timeouts == [30.0, 30.0, 6.0, 6.0, 7.5]


def test_score_of_a_killed_program_names_its_deadline() -> None:
    _, slow = run_virtual(Desk().score_all("4 7", "8 7"))
    assert (slow.value, slow.outcome) == (0.0, Outcome.TIMEOUT)
    assert slow.reason == "0 of 1 cases; case 1: it ran longer than 6.0 s, its adaptive deadline"
    assert slow.parts == {"passed": 0.0, "deadline": 6.0}


def test_kill_at_the_largest_deadline_is_not_an_early_kill() -> None:
    desk = Desk()
    first, _, last = run_virtual(desk.score_all("40 7", "25 7", "40 7"))
    assert "adaptive" not in first.reason + last.reason
    assert first.parts == last.parts == {"passed": 0.0}
    assert desk.anchors.kills == 0


async def partly_correct(desk: Desk) -> None:
    await desk.score("1 7", {"cases": [{"stdin": "", "stdout": "7"}, {"stdin": "", "stdout": "8"}]})


def test_partly_correct_program_does_not_change_the_deadline() -> None:
    desk = Desk()
    run_virtual(partly_correct(desk))
    assert desk.anchors.rows == {}


async def kill_and_recheck(desk: Desk, *programs: str) -> list[Score]:
    found = await desk.score_all(*programs)
    await desk.recheck()
    return found


class RunsByTurns:
    """Sandboxes that cannot communicate. The program runs for 4 and then 3 seconds, and its tests for 0.1 seconds."""

    capabilities: frozenset[Capability] = frozenset()

    def __init__(self) -> None:
        tests = [(ASKS, b"call", 0.1), (0, b"", 0.1)]
        programs = [(0, b"[]", 4.0), (0, b"[7]", 3.0)]
        self.runs = [run for turn in zip(programs, tests, strict=True) for run in turn]

    async def run(self, program: Program) -> ExecResult:
        code, output, seconds = self.runs.pop(0)
        return ExecResult(ProgramEnd.EXITED, code, output, b"", seconds)


def test_measured_time_excludes_the_tests_own_time() -> None:
    sandboxes: Any = RunsByTurns()
    case = read_case({"assert": "assert f(1) == 7", "entry": "f"})
    found = asyncio.run(case.judge(sandboxes, "def f(n): ...", 30.0))
    assert (found.passed, found.seconds) == (True, 4.0)


def test_slow_correct_program_counts_as_a_false_kill() -> None:
    desk = Desk()
    scores = run_virtual(kill_and_recheck(desk, "1 7", "5 7", "50 7", "5 8"))
    assert [score.value for score in scores] == [1.0, 0.0, 0.0, 0.0]
    assert (desk.anchors.kills, desk.anchors.rechecked, desk.anchors.false_kills) == (3, 3, 1)


async def kill_twice(desk: Desk) -> list[Score]:
    before = await kill_and_recheck(desk, "1 7", "5 7")
    return [*before, await desk.score("6 7")]


def test_wrongly_killed_program_raises_the_deadline() -> None:
    """Otherwise, a slow but correct program would always be killed, because a killed program gives no anchor."""
    desk = Desk()
    first, killed, again = run_virtual(kill_twice(desk))
    assert (first.value, killed.value, again.value) == (1.0, 0.0, 1.0)
    assert desk.sandboxes.timeouts == [30.0, 2.0, 30.0, 7.5]


def test_no_killed_case_is_rechecked_if_recheck_is_zero() -> None:
    desk = Desk(AdaptiveDeadline(recheck=0.0))
    run_virtual(kill_and_recheck(desk, "1 7", "5 7"))
    assert (desk.anchors.kills, desk.anchors.rechecked) == (1, 0)
    assert desk.sandboxes.timeouts == [30.0, 2.0]


async def stay_busy(desk: Desk) -> tuple[int, int]:
    desk.idle = False
    await kill_and_recheck(desk, "1 7", "5 7", "6 7")
    busy = desk.anchors.rechecked
    desk.idle = True
    await desk.recheck()
    return busy, desk.anchors.rechecked


def test_recheck_of_a_killed_case_waits_for_an_idle_worker() -> None:
    assert run_virtual(stay_busy(Desk())) == (0, 2)


async def break_sandboxes(desk: Desk) -> None:
    await desk.score_all("1 7", "5 7", "6 7")
    desk.sandboxes.broken = True
    await desk.recheck()


def test_recheck_in_a_broken_sandbox_is_not_counted() -> None:
    desk = Desk()
    run_virtual(break_sandboxes(desk))
    assert (desk.anchors.kills, desk.anchors.rechecked, desk.anchors.false_kills) == (2, 0, 0)


async def overflow(desk: Desk) -> int:
    await desk.score("1 7")
    await desk.score_all(*(f"{3 + number} 7" for number in range(MOST_WAITING + 9)))
    return len(desk.rechecks._waiting)


def test_number_of_waiting_rechecks_is_bounded() -> None:
    assert run_virtual(overflow(Desk())) == MOST_WAITING


async def evaluate(desk: Desk) -> Score:
    await desk.score("1 7")
    return await desk.score("20 7", adapts=False)


def test_evaluation_is_scored_with_fixed_deadlines() -> None:
    desk = Desk()
    assert run_virtual(evaluate(desk)).value == 1.0
    assert desk.anchors.list_row(name_row(ROW)) == {0: 1.0}


def test_deadlines_are_fixed_without_an_adaptive_section() -> None:
    desk = Desk(adaptive=None)
    run_virtual(desk.score_all("1 7", "20 7"))
    assert desk.sandboxes.timeouts == [30.0, 30.0]
    assert desk.anchors.rows == {}


async def continue_with(anchors: CaseAnchors) -> list[float]:
    desk = Desk(anchors=anchors)
    await desk.score("1 7", TWO)
    return desk.sandboxes.timeouts


def test_restart_continues_with_the_stored_deadline_times() -> None:
    desk = Desk()
    run_virtual(desk.score("4 7", TWO))
    assert run_virtual(continue_with(desk.anchors)) == [6.0, 6.0]
    assert run_virtual(continue_with(CaseAnchors())) == [30.0, 30.0]


NAMED = AdaptiveDeadline(recheck=1.0, reference_column="seconds")


async def score_rows(desk: Desk, row: dict[str, Any], *programs: str) -> list[Score]:
    return [await desk.score(program, row) for program in programs]


def test_first_deadline_is_computed_from_the_reference_seconds() -> None:
    desk = Desk(NAMED)
    scores = run_virtual(score_rows(desk, {**ROW, "seconds": 4.0}, "7 7", "1 7", "1 8", "5 7", "1 7"))
    assert outcomes(scores) == ["timeout", "correct", "wrong", "correct", "correct"]
    # the correct program of 1 s lowers no deadline, and the one of 5 s raises it
    assert desk.sandboxes.timeouts == [6.0, 6.0, 6.0, 6.0, 7.5]
    assert (scores[0].parts["deadline"], desk.anchors.kills) == (6.0, 1)


def test_case_deadlines_are_computed_from_the_reference_seconds() -> None:
    desk = Desk(NAMED)
    run_virtual(score_rows(desk, {**TWO, "seconds": "4"}, "1 7"))
    assert desk.sandboxes.timeouts == [6.0, 6.0]


@pytest.mark.parametrize("value", [None, ""])
def test_deadline_without_reference_seconds_begins_at_maximum(value: str | None) -> None:
    desk = Desk(NAMED)
    run_virtual(score_rows(desk, {**ROW, "seconds": value}, "1 7", "1 7"))
    assert desk.sandboxes.timeouts == [30.0, 2.0]


async def evaluate_reference(desk: Desk) -> Score:
    return await desk.score("20 7", {**ROW, "seconds": 1.0}, adapts=False)


def test_evaluation_ignores_the_reference_seconds() -> None:
    assert run_virtual(evaluate_reference(Desk(NAMED))).value == 1.0


def test_restart_gives_the_same_deadlines_with_reference_seconds() -> None:
    row, programs = {**ROW, "seconds": 4.0}, ("3 7", "5 7", "1 7")
    whole, before = Desk(NAMED), Desk(NAMED)
    run_virtual(score_rows(whole, row, *programs))
    run_virtual(score_rows(before, row, *programs[:2]))
    after = Desk(NAMED, RECORD.validate_json(before.anchors.encode()))
    run_virtual(score_rows(after, row, programs[2]))
    assert before.sandboxes.timeouts + after.sandboxes.timeouts == whole.sandboxes.timeouts == [6.0, 6.0, 7.5]


@given(measured=st.none() | SECONDS, reference=st.none() | SECONDS)
def test_deadline_is_at_least_the_reference_time(measured: float | None, reference: float | None) -> None:
    deadline = compute_deadline(AdaptiveDeadline(), 30.0, combine_anchors(measured, reference))
    assert deadline >= min(max(measured or 0.0, reference or 0.0), 30.0)
    assert (deadline == 30.0) or measured or reference


@given(column=st.text(min_size=1, max_size=4), value=st.floats() | st.text(max_size=4) | st.integers() | st.booleans())
def test_reference_seconds_are_positive_or_refused(column: str, value: Any) -> None:
    adaptive, row = AdaptiveDeadline(reference_column=column), json.loads(json.dumps({column: value}))
    try:
        seconds = read_reference_seconds(adaptive, row)
    except ValueError:
        assert isinstance(value, str | bool) or not 0 < value < float("inf")
    else:
        assert value == "" if seconds is None else 0 < seconds == float(value) < float("inf")


async def score_composite(desk: Desk) -> Score:
    parts = {"code": CompositePart(scorer=CodeReward(case_seconds=30.0, adaptive=ADAPTIVE)), "text": CompositePart()}
    verifiers = {"code": Verifier(desk.scorer.score, is_async=True), "text": Verifier(lambda *_: 1.0)}
    composite = CompositeVerifier(CompositeReward(parts=parts), verifiers)
    CLOCK.set(CaseClock(name_row(ROW), {0: 2.0}))
    return await composite.score_later("4 7", ROW)


def test_composite_scorer_passes_deadline_times_to_its_part() -> None:
    score = run_virtual(score_composite(Desk()))
    assert (score.value, score.parts["code.deadline"]) == (1.0, 3.0)


def test_adaptive_deadlines_are_recognized_in_the_config() -> None:
    plain, adaptive = CodeReward(case_seconds=30.0), CodeReward(case_seconds=30.0, adaptive=ADAPTIVE)
    assert not has_adaptive_deadlines(ExactReward())
    assert not has_adaptive_deadlines(plain)
    assert has_adaptive_deadlines(adaptive)
    assert has_adaptive_deadlines(CompositeReward(parts={"a": CompositePart(scorer=adaptive)}))
    assert not has_adaptive_deadlines(CompositeReward(parts={"a": CompositePart(scorer=plain)}))


def test_invalid_adaptive_deadline_is_refused() -> None:
    from rollflow.flows.config import parse_config

    tree = {"reward": {"kind": "code", "adaptive": {"min_seconds": 4.0}}}
    with pytest.raises(ConfigError, match=r"reward.adaptive.min_seconds = 4.*below reward.case_seconds = 4"):
        parse_config(tree)


def test_adaptive_deadlines_are_off_by_default() -> None:
    assert RunConfig(reward=CodeReward()).reward.adaptive is None  # type: ignore[union-attr]
