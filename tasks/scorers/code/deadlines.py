"""Adaptive deadlines of test cases, after RollPacker (arXiv 2509.21009, section 4.3).

    deadline = min(max(T_min, lambda * T_anchor), T_max)

    T_anchor   longest time that a correct program has taken on the test case; a program that passes
               all cases is correct
               (with `reference_column`, the reference solution of the data row is one of the correct programs)
    T_max      `reward.case_seconds`, which is also the deadline of a case without an anchor

    CaseAnchors    --anchors of the row, with each response-->   CaseClock --deadlines--> CodeScorer
    (reward actor) <--seconds of correct programs, early kills-- (worker)  <--seconds----

Two features of this module are not in the paper. First, a share of the programs that an adaptive deadline killed run
again with T_max, while the worker process is idle (`Rechecks`). A program that passes its test case when it runs again
was killed falsely. A false kill is counted and raises the anchor, so that the deadline of the test case recovers. A
false kill never changes a score. Second, a request with `adapts = False`, as evaluations send, is scored with T_max.

A `CaseClock` is passed to the scorer of programs as a context variable, because a composite scorer may call that
scorer, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rollflow.storage.run_records.case_anchors import CaseAnchors
from rollflow.tasks.sandboxes.base import SandboxFailed
from rollflow.tasks.scorers.code.config import AdaptiveDeadline

LONGEST_SHOWN = 40  # largest number of characters of a wrong value in an error message
MOST_WAITING = 64  # largest number of killed test cases that wait to run again; older ones are dropped
# runs a test case with the deadline T_max; returns the program's time in seconds, or None if the program failed
Rerun = Callable[[], Awaitable[float | None]]


def compute_deadline(adaptive: AdaptiveDeadline, longest: float, anchor: float | None) -> float:
    """Compute the deadline of a program on a test case, in seconds. If no time of a correct program is known (`anchor`
    is None), the deadline is `longest` (T_max).
    """
    if anchor is None:
        return longest
    return min(max(adaptive.min_seconds, adaptive.factor * anchor), longest)


def combine_anchors(measured: float | None, reference: float | None) -> float | None:
    """Return the anchor of a test case: the longer of the time that the run measured and the time of the reference
    solution.

    The longer time is safe. A fast program of the run never shortens a deadline that the reference solution needs. A
    reference solution that ran on a faster machine never shortens a deadline that the run has learned.
    """
    return max((seconds for seconds in (measured, reference) if seconds is not None), default=None)


def read_reference_seconds(adaptive: AdaptiveDeadline, reference: Mapping[str, Any]) -> float | None:
    """Return the time of a data row's reference solution, in seconds, or None if the row has no time or the config no
    column.

    In a CSV file the seconds are text, which the function parses; an empty text means that the row has no seconds.

    Raises:
        ValueError: the row has no column `reference_column`, or its value is no positive number.
    """
    if (column := adaptive.reference_column) is None:
        return None
    where = f'reward.adaptive.reference_column = "{column}"'
    if column not in reference:
        raise ValueError(f"{where}: the row has no such column; add it (null: no time is known), or correct the key")
    if (value := reference[column]) in (None, ""):
        return None
    try:
        seconds = math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        shown = f"{json.dumps(value)[:LONGEST_SHOWN]}, which is no positive number of seconds"
        raise ValueError(f"{where}: the row has {shown}; correct the value, or use null")
    return seconds


def name_row(reference: Mapping[str, Any]) -> str:
    """Return the name of a data row, which is a hash of its content; raise `TypeError` or `ValueError` if JSON cannot
    express the row.
    """
    return hashlib.blake2b(json.dumps(dict(reference)).encode(), digest_size=12).hexdigest()


def is_drawn(share: float, *names: str) -> bool:
    """Return whether a pseudo-random draw with probability `share` succeeds. The result depends only on `share` and
    `names`.
    """
    drawn = int.from_bytes(hashlib.blake2b("\0".join(names).encode("utf-8", "replace"), digest_size=8).digest())
    return drawn < share * 2**64


@dataclass(slots=True)
class DeadlineReport:
    """A worker process's report about the test cases of a data row: times of correct programs in seconds, and the
    counts of `CaseAnchors`.
    """

    row: str
    seconds: dict[int, float] = field(default_factory=dict)
    kills: int = 0
    rechecked: int = 0
    false_kills: int = 0

    def to_columns(self) -> tuple[Any, ...]:
        """Return the report as values that can be written as JSON."""
        return self.row, list(self.seconds.items()), self.kills, self.rechecked, self.false_kills

    @classmethod
    def of_columns(cls, columns: Sequence[Any]) -> DeadlineReport:
        """Build a report from the result of `to_columns`; raise `ValueError` or `TypeError` for any other input."""
        row, seconds, *counts = columns
        return cls(str(row), {int(case): float(measured) for case, measured in seconds}, *map(int, counts))

    def add_to(self, anchors: CaseAnchors) -> None:
        """Add the times and counts of the report to the scorer's `CaseAnchors`."""
        anchors.raise_row(self.row, self.seconds)
        anchors.kills += self.kills
        anchors.rechecked += self.rechecked
        anchors.false_kills += self.false_kills


@dataclass(slots=True)
class CaseClock:
    """The anchors of a response's data row, and what the scorer measures on the row's test cases."""

    row: str
    anchors: Mapping[int, float]
    report: DeadlineReport = field(init=False)
    # killed test cases that should run again, by the number of the test case
    doubtful: list[tuple[int, Rerun]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.report = DeadlineReport(self.row)


CLOCK: ContextVar[CaseClock | None] = ContextVar("the clock of the response that this task scores", default=None)


class Rechecks:
    """Runs again the programs that an adaptive deadline killed, one at a time, while the worker process has no response
    to score.
    """

    def __init__(self, is_idle: Callable[[], bool], send: Callable[[DeadlineReport], None]) -> None:
        self._is_idle, self._send = is_idle, send
        self._waiting: deque[tuple[str, int, Rerun]] = deque(maxlen=MOST_WAITING)
        self._running: asyncio.Task[None] | None = None

    def add(self, clock: CaseClock) -> None:
        """Queue those test cases of a response that an adaptive deadline ended, so that they run again."""
        self._waiting.extend((clock.row, case, rerun) for case, rerun in clock.doubtful)

    def begin(self) -> None:
        """Run the next queued test case again, unless the worker process is busy or another test case runs."""
        if self._waiting and self._running is None and self._is_idle():
            self._running = asyncio.create_task(self._run(*self._waiting.popleft()))

    async def _run(self, row: str, case: int, rerun: Rerun) -> None:
        try:
            seconds = await rerun()
        except (SandboxFailed, OSError):
            pass  # a failed sandbox says nothing about the program
        else:
            passed = {} if seconds is None else {case: seconds}
            self._send(DeadlineReport(row, passed, rechecked=1, false_kills=len(passed)))
        self._running = None
        self.begin()
