"""The forms that a test case of a program may have in a data row, and how each form runs in sandboxes.

    form                                              the program passes if
    {"stdin": text, "stdout": text}                   it prints that text (blanks at line ends do not count)
    {"call": name, "args": [...], "expected": value}  the function returns that value (also: "named", "tolerance")
    {"assert": code}                                  the code raises no error; it sees the program's functions
    {"stdin": text, "checker": code}                  the checker exits with 0; it reads input.txt and output.txt
    {"pytest": source}                                each test function passes; see the module `pytest_case`

Expected values, assertions and checkers never enter the sandbox of the program.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rollflow.tasks.sandboxes.base import Capability, ExecResult, Program, ProgramEnd, Sandboxes, SandboxFailed
from rollflow.tasks.scorers.code.guest import ASKS, DIFFERS

LONGEST_REASON = 300  # largest number of characters of a failed program's output in a reason
TESTS_SECONDS = 5.0  # seconds that tests may take in addition to the program's own time limit
END_SECONDS = 1.0  # seconds to wait after failed tests for the end of the program, whose own failure is then reported
MOST_CALLS = 200  # largest number of calls that tests may make in sandboxes that cannot communicate
MOST_ANSWERED = 2**24  # largest total length, in characters, of the answers to all calls of the tests
LARGEST_TOLERANCE = 1e300
REPEATS = "tests made another call when they ran again"
PLAIN_ANSWER = re.compile(r'\{"value": (?:[\[\], ]|true|false|null|-?\d[\d.e+-]*+)*+\}')  # truth values and numbers
FORMS = '"stdin" with "stdout" or "checker", "call" with "expected", "assert", or "pytest"'
KEYS = ("assert", "call", "checker", "pytest", "stdin", "stdout")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one test case; `end` says how the program ended. `share` is the share of passed tests of a pytest
    file, or None for any other form of test case.
    """

    passed: bool
    reason: str
    end: ProgramEnd
    seconds: float
    share: float | None = None

    @property
    def value(self) -> float:
        """The value of the case in the reward, from 0 to 1."""
        return float(self.passed) if self.share is None else self.share


@dataclass(frozen=True, slots=True)
class Printed:
    """A test case that compares the program's output with the expected output, or gives the output to a checker
    program.
    """

    stdin: str
    stdout: str | None
    checker: str = ""

    async def judge(self, sandboxes: Sandboxes, code: str, seconds: float) -> CaseResult:
        """Run the program on the input of the test case."""
        found = await sandboxes.run(Program(code=code, stdin=self.stdin.encode(), timeout=seconds))
        if not found.succeeded:
            return CaseResult(False, describe_failure(found), found.end, found.seconds)
        text = found.stdout.decode(errors="replace")
        if self.stdout is None:
            return await self._check(sandboxes, found)
        if _lines(text) == _lines(self.stdout):
            return CaseResult(True, "", found.end, found.seconds)
        return CaseResult(False, f"it printed {_shorten(text)!r}", found.end, found.seconds)

    async def _check(self, sandboxes: Sandboxes, found: ExecResult) -> CaseResult:
        files = {"input.txt": self.stdin.encode(), "output.txt": found.stdout}
        try:
            verdict = await sandboxes.run(Program(code=self.checker, name="checker.py", timeout=TESTS_SECONDS), files)
        except OSError as error:
            return CaseResult(False, f"its output does not fit into a sandbox: {error}", found.end, found.seconds)
        said = verdict.stdout.decode(errors="replace").strip()
        return CaseResult(verdict.succeeded, f"the checker refused it: {_shorten(said)}", found.end, found.seconds)


@dataclass(frozen=True, slots=True)
class Tested:
    """A test case whose test code calls the program's functions from a separate sandbox."""

    tests: str
    entry: str = ""

    async def judge(self, sandboxes: Sandboxes, code: str, seconds: float) -> CaseResult:
        """Run the program in one sandbox and the tests in another sandbox.

        Raises:
            SandboxFailed: a sandbox failed, or the sandboxes cannot communicate and repeated tests made different
                calls.
        """
        if Capability.CHANNEL not in sandboxes.capabilities:
            return await judge_by_turns(sandboxes, self, code, seconds)
        tests = f"{read_guest()}\nrun_tests({self.tests!r}, {self.entry!r})"
        return await run_beside((sandboxes, sandboxes), code, tests, seconds, _read_verdict)


def _read_verdict(verdict: ExecResult) -> CaseResult:
    reason = "" if verdict.succeeded else _last_line(verdict.stderr)
    return CaseResult(verdict.succeeded, reason, ProgramEnd.EXITED, verdict.seconds)


async def run_beside(
    pair: tuple[Sandboxes, Sandboxes], code: str, tests: str, seconds: float, read: Callable[[ExecResult], CaseResult]
) -> CaseResult:
    """Run a program in a sandbox of the first kind, and its tests in a sandbox of the second kind, with a channel
    between them. `read` converts the result of the tests' process to the result of the case. If the case fails because
    the program has failed, the result describes the program's failure.

    Raises:
        SandboxFailed: a sandbox failed.
    """
    ours, theirs = socket.socketpair()
    program = Program(code=f"{read_guest()}\nserve_candidate({code!r}, 'main.py')", timeout=seconds, channel=ours)
    testing = Program(code=tests, name="tests.py", timeout=seconds + TESTS_SECONDS, channel=theirs)
    with ours, theirs:
        candidate = asyncio.create_task(pair[0].run(program))
        verdict = asyncio.create_task(pair[1].run(testing))
        try:
            result = read(await verdict)
            if result.passed:
                return result
            await asyncio.wait([candidate], timeout=END_SECONDS)
            if candidate.done() and not (found := candidate.result()).succeeded:
                return replace(result, reason=describe_failure(found), end=found.end, seconds=found.seconds)
            return result
        finally:
            for task in (candidate, verdict):
                task.cancel()
            await asyncio.gather(candidate, verdict, return_exceptions=True)


async def judge_by_turns(sandboxes: Sandboxes, case: Tested, code: str, seconds: float) -> CaseResult:
    """Judge a test case in sandboxes that cannot communicate, by running the tests and the program alternately.

    The tests run until they make a call of the program whose result is not recorded yet. To answer the call, the
    program runs from the start, executes all calls so far, and prints the last result. A recorded result never changes,
    so a program cannot make it depend on later calls. Tests with `n` calls take `2 n + 2` runs in sandboxes, and the
    time limit applies to each run.

    The test case fails if the tests make too many calls or get too long answers, for example from an endless iterator.

    Raises:
        SandboxFailed: the tests made a different call when they were repeated, although no answer of the program can be
        the cause.
    """
    guest, longest = read_guest(), 0.0
    calls, answers = list[str](), list[str]()
    while True:
        program = Program(code=f"{guest}\nanswer_calls({code!r}, 'main.py', {calls!r})", timeout=seconds)
        found = await sandboxes.run(program)
        if not found.succeeded:
            return CaseResult(False, describe_failure(found), found.end, found.seconds)
        longest = max(longest, found.seconds)
        answers.append(read_last_line(found.stdout))
        replay = f"run_tests({case.tests!r}, {case.entry!r}, Recording({calls!r}, {answers!r}))"
        tests = Program(code=f"{guest}\n{replay}", name="tests.py", timeout=seconds + TESTS_SECONDS)
        verdict = await sandboxes.run(tests)
        if verdict.return_code == DIFFERS:
            if all(PLAIN_ANSWER.fullmatch(answer) for answer in answers[1:]):
                raise SandboxFailed(f"{REPEATS}; without a channel they must repeat")
            return _fail(REPEATS, verdict)  # the program may have returned a set, whose order may differ between runs
        if verdict.return_code != ASKS:
            return CaseResult(verdict.succeeded, _last_line(verdict.stderr), verdict.end, longest)
        calls.append(read_last_line(verdict.stdout))
        if len(calls) > MOST_CALLS:
            return _fail(f"the tests made more than {MOST_CALLS} calls, and the sandboxes have no channel", verdict)
        if sum(map(len, answers)) > MOST_ANSWERED:
            return _fail(f"the answers have more than {MOST_ANSWERED:,} characters", verdict)


def _fail(reason: str, verdict: ExecResult) -> CaseResult:
    return CaseResult(False, reason, ProgramEnd.EXITED, verdict.seconds)


def list_forms(row: Any) -> list[str]:
    """Return the keys of a test case that decide its form; raise `ValueError` if the test case is not an object.

    A key with the value null counts as missing, because in a table every test case has the keys of all forms.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"a test case is {row!r}, but must be an object with {FORMS}")
    return sorted(key for key in KEYS if row.get(key) is not None)


def read_case(row: Any) -> Printed | Tested:
    """Read one test case of a data row, except a pytest file; raise `ValueError` with an explanation if the test case
    has no valid form.
    """
    match list_forms(row):
        case ["stdin", "stdout"]:
            return Printed(read_text(row, "stdin"), read_text(row, "stdout"))
        case ["stdout"]:
            return Printed("", read_text(row, "stdout"))
        case ["checker", "stdin"]:
            return Printed(read_text(row, "stdin"), None, read_text(row, "checker"))
        case ["assert"]:
            return Tested(read_text(row, "assert"), "" if row.get("entry") is None else _read_name(row, "entry"))
        case ["call"] if "expected" in row:
            args, named = _value(row, "args", list | tuple, []), _value(row, "named", Mapping, {})
            tolerance, expected = _value(row, "tolerance", int | float, 0.0), row["expected"]
            _check_literals(args, dict(named), expected, tolerance)
            if not 0 <= tolerance < LARGEST_TOLERANCE:
                raise ValueError(
                    f"the 'tolerance' of a test case is {tolerance}, but must be 0 or more, and less than "
                    f"{LARGEST_TOLERANCE:g}"
                )
            call = f"candidate(*{args!r}, **{named!r})"
            test = f"got = {call}\nassert equal(got, {expected!r}, {float(tolerance)!r}), repr(got)"
            return Tested(test, _read_name(row, "call"))
    raise ValueError(f"a test case has the keys {', '.join(map(str, row)) or 'of no form'}, but must have {FORMS}")


def describe_failure(found: ExecResult) -> str:
    """Return the reason why a program failed, as text."""
    match found.end:
        case ProgramEnd.TIMEOUT:
            return f"it ran longer than {found.seconds:.1f} s"
        case ProgramEnd.MEMORY | ProgramEnd.PROCESSES | ProgramEnd.OUTPUT | ProgramEnd.FOLDER:
            return f"it was stopped, as it used too much: {found.end}"
        case _:
            return _last_line(found.stderr) or f"it ended with code {found.return_code}"


def read_text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row[key], str):
        raise ValueError(f"{key!r} of a test case is {row[key]!r}, but must be text")
    try:
        row[key].encode()
    except UnicodeEncodeError:
        raise ValueError(f"{key!r} of a test case contains half of a surrogate pair, which is not valid text") from None
    return str(row[key])


def _read_name(row: Mapping[str, Any], key: str) -> str:
    """Return the name of the function to test; raise `ValueError` if a program cannot define this name for its
    tests.
    """
    name = read_text(row, key)
    if not name.isidentifier() or name.startswith("_"):
        raise ValueError(
            f"{key!r} of a test case is {name!r}, but must be the name of a function that does not begin with _"
        )
    return name


def _value(row: Mapping[str, Any], key: str, kind: Any, default: Any) -> Any:
    """Return the value of an optional key of a test case; raise `ValueError` if the value has the wrong type."""
    value = default if row.get(key) is None else row[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = {"args": "a list", "named": "an object"}.get(key, "a number")
        raise ValueError(f"{key!r} of a test case is {value!r}, but must be {wanted}")
    return value


def _check_literals(*values: Any) -> None:
    """Raise `ValueError` if a value contains NaN or infinity, which have no literal in JSON or Python."""
    try:
        json.dumps(values, allow_nan=False)
    except ValueError:
        raise ValueError("a test case contains NaN or infinity, which JSON cannot represent; remove the case") from None


def _lines(text: str) -> list[str]:
    """Return the lines of a text without trailing spaces, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _last_line(output: bytes) -> str:
    return _shorten(output.decode(errors="replace").strip().rpartition("\n")[2])


def read_last_line(output: bytes) -> str:
    return output.decode(errors="replace").rstrip("\n").rpartition("\n")[2]


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


@cache
def read_guest() -> str:
    """Return the source code of `guest.py`, which runs in the sandboxes."""
    return (Path(__file__).parent / "guest.py").read_text()
