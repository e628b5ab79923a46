"""Adaptive deadlines of test cases, after RollPacker (arXiv 2509.21009, section 4.3).

    deadline = min(max(T_min, lambda * T_anchor), T_max)

    T_anchor   longest time that a correct program has taken on the test case; a program that passes
               all cases is correct
               (with `reference_column`, the reference solution of the data row is one of the correct programs)
    T_max      `reward.case_seconds`, which is also the deadline of a case without an anchor

    CaseAnchors    --anchors of the row, with each response-->   CaseClock --deadlines--> CodeScorer
    (reward actor) <--seconds of correct programs, early kills-- (worker)  <--seconds----

Unlike in the paper, a share of the programs that an adaptive deadline killed run again with T_max (`Rechecks`). If such
a program passes, the kill was wrong: it is counted, and the deadline becomes longer, but no score changes. A request
with `adapts = False`, as evaluations send, is scored with T_max.

The scorer of programs reads its `CaseClock` from a context variable, because a composite scorer may call it, too.
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
MOST_WAITING = 64  # largest number of killed test cases that wait to run again; the oldest are dropped
# runs a test case with the deadline T_max; returns the seconds of the program, or None if the program failed
Rerun = Callable[[], Awaitable[float | None]]


def compute_deadline(adaptive: AdaptiveDeadline, longest: float, anchor: float | None) -> float:
    """Compute the deadline of a program on a test case, in seconds. Without a time of a correct program (`anchor` is
    None), the deadline is `longest` (T_max).
    """
    if anchor is None:
        return longest
    return min(max(adaptive.min_seconds, adaptive.factor * anchor), longest)


def combine_anchors(measured: float | None, reference: float | None) -> float | None:
    """Return the longer of the time that the run measured and the time of the reference solution.

    A fast program, or a reference solution on a faster machine, never shortens the deadline.
    """
    return max((seconds for seconds in (measured, reference) if seconds is not None), default=None)


def read_reference_seconds(adaptive: AdaptiveDeadline, reference: Mapping[str, Any]) -> float | None:
    """Return the seconds of a row's reference solution, or None if the row or the config has none.

    Text from a CSV file is parsed; an empty text counts as missing.

    Raises:
        ValueError: the row has no column `reference_column`, or its value is not a positive number.
    """
    if (column := adaptive.reference_column) is None:
        return None
    where = f'reward.adaptive.reference_column = "{column}"'
    if column not in reference:
        raise ValueError(f"{where}: the row has no such column; add it (null if no time is known), or correct the key")
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
    """Return the name of a data row, a hash of its content; raise `TypeError` or `ValueError` if JSON cannot express
    the row.
    """
    return hashlib.blake2b(json.dumps(dict(reference)).encode(), digest_size=12).hexdigest()


def is_drawn(share: float, *names: str) -> bool:
    """Return whether a pseudo-random draw with probability `share` succeeds; the result depends only on the
    arguments.
    """
    drawn = int.from_bytes(hashlib.blake2b("\0".join(names).encode("utf-8", "replace"), digest_size=8).digest())
    return drawn < share * 2**64


@dataclass(slots=True)
class DeadlineReport:
    """A worker process's report about the test cases of a data row: seconds of correct programs, and counts."""

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
    """The known times of correct programs on a data row, and what the scorer measures on the row's test cases."""

    row: str
    anchors: Mapping[int, float]
    report: DeadlineReport = field(init=False)
    # killed test cases that should run again, by number
    doubtful: list[tuple[int, Rerun]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.report = DeadlineReport(self.row)


CLOCK: ContextVar[CaseClock | None] = ContextVar("the clock of the response that this task scores", default=None)


class Rechecks:
    """Repeats programs that an adaptive deadline killed, one at a time, while the worker process is idle."""

    def __init__(self, is_idle: Callable[[], bool], send: Callable[[DeadlineReport], None]) -> None:
        self._is_idle, self._send = is_idle, send
        self._waiting: deque[tuple[str, int, Rerun]] = deque(maxlen=MOST_WAITING)
        self._running: asyncio.Task[None] | None = None

    def add(self, clock: CaseClock) -> None:
        """Queue another run of the test cases that an adaptive deadline ended; `clock` belongs to one response."""
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
