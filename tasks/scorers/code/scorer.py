"""Scores programs that a model wrote, by running them on test cases in sandboxes.

The column `cases` of the reference has the test cases (see the module `cases`). The score is the share of passed test
cases. With `reward.all_or_nothing`, the score is 1 if all test cases pass, else 0. A test case fails after a failure
that the program may have caused, such as a timeout. After a failure of a sandbox, the test case runs again, up to
`TRIES` times; then the response is unjudged. If a sandbox without isolation ends at each try, the test case fails,
because the program may have ended the sandbox.
"""

from __future__ import annotations

import asyncio
import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.sandboxes import build_sandboxes
from rollflow.tasks.sandboxes.base import Capability, ProgramEnd, Sandboxes, SandboxFailed, SandboxLost
from rollflow.tasks.scorers.base import Score, Unjudged
from rollflow.tasks.scorers.code.cases import CaseResult, Printed
from rollflow.tasks.scorers.code.config import AdaptiveDeadline
from rollflow.tasks.scorers.code.deadlines import (
    CLOCK,
    CaseClock,
    combine_anchors,
    compute_deadline,
    is_drawn,
    read_reference_seconds,
)
from rollflow.tasks.scorers.code.pytest_case import (
    Case,
    PytestFile,
    Testers,
    find_file_fault,
    find_kind_fault,
    read_case_of_any_form,
    start_testers,
)
from rollflow.tasks.scorers.config import DEADLINE, CodeReward

TRIES = 3  # largest number of tries of a test case if sandboxes fail
FENCE = re.compile(r"(`{3,})[ \t]*([^\n`]*?)[ \t]*\n(.*?)\1`*", re.DOTALL)
# languages of a Markdown code block that mark it as a program
LANGUAGES = ("", "python", "py", "python3")


class CodeScorer:
    """Scores responses by running their programs in sandboxes, several at the same time."""

    def __init__(self, config: CodeReward, sandboxes: Sandboxes | None = None) -> None:
        """Use the started `sandboxes`; if they are None, start sandboxes at the first response."""
        self._config = config
        self._sandboxes = sandboxes
        self._testers: Testers | None = None
        self._starting = asyncio.Lock()
        # the asyncio event loop in which the sandboxes were started
        self._loop: asyncio.AbstractEventLoop | None = None

    async def score(self, response: str, reference: Mapping[str, Any]) -> Score:
        """Score one response.

        Raises:
            Unjudged: the sandboxes did not start, for example because the sandbox server is not reachable.
            ValueError: the response's reference has no valid test cases.
        """
        cases = read_cases(reference)
        if (program := find_program(response, fenced=self._config.fenced)) is None:
            return Score(0.0, "the response has no fenced block of code", Outcome.UNPARSABLE)
        try:
            sandboxes = await self.start()
            cases = [await self._prepare(case) for case in cases]
        except ConfigError as error:
            raise Unjudged(str(error)) from error
        clock = CLOCK.get() if self._config.adaptive else None
        solution = read_reference_seconds(self._config.adaptive, reference) if self._config.adaptive else None
        results, early = list[CaseResult](), list[float]()
        for number, case in enumerate(cases):
            seconds = self._compute_deadline(clock, number, solution)
            try:
                result = await _judge(sandboxes, case, program, seconds)
            except SandboxFailed as error:
                return Score(0.0, f"the sandbox failed {TRIES} times: {error}", Outcome.UNJUDGED)
            if clock and result.end is ProgramEnd.TIMEOUT and seconds < self._config.case_seconds:
                self._note_kill(clock, number, sandboxes, case, program)
                result = replace(result, reason=f"{result.reason}, its adaptive deadline")
                early.append(seconds)
            results.append(result)
            if self._config.all_or_nothing and not result.passed:
                break
        if clock and all(result.passed for result in results):
            clock.report.seconds = {number: result.seconds for number, result in enumerate(results)}
        score = self._sum_up(results, len(cases))
        return replace(score, parts={**score.parts, DEADLINE: min(early)}) if early else score

    def _compute_deadline(self, clock: CaseClock | None, number: int, solution: float | None) -> float:
        """Compute the deadline of a test case; if `clock` is None, return the deadline in the config. `solution` is the
        time of the row's reference solution, in seconds.
        """
        adaptive, longest = self._config.adaptive, self._config.case_seconds
        if not adaptive or not clock:
            return longest
        return compute_deadline(adaptive, longest, combine_anchors(clock.anchors.get(number), solution))

    def _note_kill(self, clock: CaseClock, number: int, sandboxes: Sandboxes, case: Case, program: str) -> None:
        """Count a program that an adaptive deadline killed; a share of such programs runs again with the longest
        deadline.
        """
        clock.report.kills += 1
        if self._config.adaptive and is_drawn(self._config.adaptive.recheck, clock.row, str(number), program):
            rerun = functools.partial(_measure, sandboxes, case, program, self._config.case_seconds)
            clock.doubtful.append((number, rerun))

    async def start(self) -> Sandboxes:
        """Start the sandboxes if necessary, and return them; raise `ConfigError` if this machine cannot run the
        sandboxes.
        """
        if self._loop not in (None, asyncio.get_running_loop()):
            # The old sandboxes ended with their event loop.
            self._sandboxes, self._testers, self._starting = None, None, asyncio.Lock()
        async with self._starting:
            if self._sandboxes is None:
                sandboxes = build_sandboxes(self._config.sandbox)
                await sandboxes.start()
                self._sandboxes, self._loop = sandboxes, asyncio.get_running_loop()
        return self._sandboxes

    async def _prepare(self, case: Case) -> Case:
        """Return a test case that can be judged. The first pytest file starts the sandboxes for pytest, or raises
        `ConfigError` if this machine cannot run pytest.
        """
        if not isinstance(case, PytestFile):
            return case
        async with self._starting:
            if self._testers is None:
                self._testers = await start_testers(self._config.sandbox)
        return replace(case, testers=self._testers)

    async def close(self) -> None:
        """End all sandboxes; the next response starts new ones."""
        found = (self._sandboxes, self._testers and self._testers.sandboxes)
        self._sandboxes = self._testers = None
        for sandboxes in found:
            if sandboxes:
                await sandboxes.close()

    def _sum_up(self, results: Sequence[CaseResult], count: int) -> Score:
        """Return the score of a program with `count` test cases; cases that did not run count as not passed."""
        passed = sum(result.passed for result in results)
        share = sum(result.value for result in results) / count
        value = float(passed == count) if self._config.all_or_nothing else share
        first = next((f"case {n}: {result.reason}" for n, result in enumerate(results, 1) if not result.passed), "")
        rest = f"; {count - len(results)} cases did not run" if len(results) < count else ""
        reason = f"{passed} of {count} cases; {first}{rest}" if first else f"all {passed} cases"
        ends = [result.end for result in results if not result.passed]
        return Score(value, reason, _outcome(passed == count, share, ends), {"passed": share})


def _outcome(is_correct: bool, share: float, ends: Sequence[ProgramEnd]) -> Outcome:
    """Return the outcome of a program. If no test passed, the outcome says how the program ended."""
    if is_correct:
        return Outcome.CORRECT
    if share:
        return Outcome.PARTIAL
    if ProgramEnd.TIMEOUT in ends:
        return Outcome.TIMEOUT
    return Outcome.WRONG if set(ends) == {ProgramEnd.EXITED} else Outcome.KILLED


async def _judge(sandboxes: Sandboxes, case: Case, program: str, seconds: float) -> CaseResult:
    for attempt in range(TRIES):
        try:
            return await case.judge(sandboxes, program, seconds)
        # An OSError comes from this process, for example because of too many open files.
        except (SandboxFailed, OSError) as error:
            if attempt < TRIES - 1:
                continue
            if isinstance(error, SandboxLost) and Capability.ISOLATION not in sandboxes.capabilities:
                return CaseResult(False, f"its sandbox ended {TRIES} times: {error}", ProgramEnd.EXITED, 0.0)
            raise SandboxFailed(str(error)) from error
    raise AssertionError("the last try of a case returns or raises")


async def _measure(sandboxes: Sandboxes, case: Case, program: str, seconds: float) -> float | None:
    """Return the seconds of a program that passes the test case, or None if the program fails."""
    result = await _judge(sandboxes, case, program, seconds)
    return result.seconds if result.passed else None


def read_cases(reference: Mapping[str, Any]) -> list[Case]:
    """Read the test cases of a data row; raise `ValueError` with an explanation if the row has none."""
    rows = reference.get("cases")
    if isinstance(rows, str):
        raise ValueError('the column "cases" is text, not a list; if it is JSON, name it in prompts.json_columns')
    if not isinstance(rows, Sequence) or not rows:
        raise ValueError('the row has no list of test cases in its column "cases"')
    cases = list[Case]()
    for number, row in enumerate(rows, 1):
        try:
            cases.append(read_case_of_any_form(row))
        except ValueError as error:
            raise ValueError(f"case {number} of {len(rows)}: {error}") from None
    return cases


def find_cases_fault(config: CodeReward, reference: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the test cases or the reference seconds of a data row, or None. The code in test cases
    must compile.
    """
    try:
        cases = read_cases(reference)
    except ValueError as error:
        return f'{error}; reward.kind = "code" runs the cases, so correct the row'
    try:
        read_reference_seconds(config.adaptive or AdaptiveDeadline(), reference)
    except ValueError as error:
        return str(error)
    for number, case in enumerate(cases, 1):
        if wrong := _find_syntax_fault(case.checker if isinstance(case, Printed) else case.tests):
            return f"case {number}: its code is no Python ({wrong}); correct the code"
        if not isinstance(case, PytestFile):
            continue
        if fault := find_kind_fault(config.sandbox):
            return f"case {number}: reward.{fault}"
        if fault := find_file_fault(case.tests):
            return f"case {number}: {fault}"
    return None


def _find_syntax_fault(code: str) -> str | None:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(code, "case", "exec")
    except SyntaxError as error:
        return f"{error.msg} in line {error.lineno}"
    except (ValueError, RecursionError, MemoryError) as error:
        return str(error) or type(error).__name__
    return None


def find_program(response: str, *, fenced: bool) -> str | None:
    """Return the last Markdown code block of a response that is Python or has no language; None if there is none.

    With `fenced = False`, the whole response is the program.
    """
    if not fenced:
        return response
    blocks = [code for _, language, code in FENCE.findall(response) if language.lower() in LANGUAGES]
    return blocks[-1] if blocks else None
