"""A pytest file as a test case: correct programs pass, wrong and cheating programs do not, in real sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.sandboxes.base import ExecResult, ProgramEnd
from rollflow.tasks.sandboxes.config import (
    BubblewrapSandbox,
    RockSandbox,
    RunCodeSandbox,
    SandboxConfig,
    SandlockSandbox,
    UnsafeProcessSandbox,
)
from rollflow.tasks.scorers import build_scorer
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.code import pytest_case
from rollflow.tasks.scorers.code.config import AdaptiveDeadline
from rollflow.tasks.scorers.code.deadlines import CLOCK, CaseClock
from rollflow.tasks.scorers.code.pytest_case import find_file_fault, read_result, start_testers
from rollflow.tasks.scorers.code.scorer import CodeScorer
from rollflow.tasks.scorers.config import CodeReward
from tests.support.waiting import HANG_SECONDS

FOUR = """
import pytest
from solution import add

def test_numbers():
    assert add(1, 2) == 3

@pytest.mark.parametrize("text", ["a", "b"])
def test_texts(text):
    assert add(text, text) == text * 2

class TestErrors:
    def test_error(self):
        with pytest.raises(TypeError):
            add(1, None)
"""
ADD = "def add(a, b): return a + b"


class Desk:
    """A scorer of programs with an event loop of its own."""

    def __init__(self, runner: asyncio.Runner, **keys: Any) -> None:
        self.runner, self.scorer = runner, CodeScorer(CodeReward(fenced=False, **keys))
        self.runner.run(self.scorer.start())

    def judge(self, program: str, *tests: str) -> Score:
        """Score a program on pytest files."""
        return self.runner.run(self.scorer.score(program, {"cases": [{"pytest": source} for source in tests]}))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """Create an event loop for all tests of this module."""
    with asyncio.Runner() as created:
        yield created


KINDS = [
    pytest.param(BubblewrapSandbox(), id="bubblewrap"),
    pytest.param(UnsafeProcessSandbox(), id="unsafe-process"),
    pytest.param(SandlockSandbox(), id="sandlock", marks=pytest.mark.soak),
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, runner: asyncio.Runner) -> Iterator[Desk]:
    """Create a scorer for each kind of sandbox that can run pytest; skip what this machine cannot run."""
    try:
        desk = Desk(runner, case_seconds=60.0, sandbox=request.param)
    except ConfigError as error:
        pytest.skip(str(error))
    yield desk
    runner.run(desk.scorer.close())


@pytest.fixture(scope="module")
def desk(runner: asyncio.Runner) -> Iterator[Desk]:
    """Create a scorer with sandboxes of the default kind; skip if this machine has none."""
    try:
        created = Desk(runner, case_seconds=60.0)
    except ConfigError as error:
        pytest.skip(str(error))
    created.judge(ADD, FOUR)  # starts the sandboxes of the tests, which some tests share
    yield created
    runner.run(created.scorer.close())


def test_right_program_passes_each_test_of_the_file(kind: Desk) -> None:
    score = kind.judge(ADD, FOUR)
    assert (score.value, score.outcome, score.reason) == (1.0, Outcome.CORRECT, "all 1 cases")


def test_score_is_the_share_of_tests_that_pass(kind: Desk) -> None:
    score = kind.judge("def add(a, b): return a * 2 if isinstance(a, str) else 3", FOUR)
    assert (score.value, score.outcome, score.parts) == (0.75, Outcome.PARTIAL, {"passed": 0.75})
    assert score.reason == "0 of 1 cases; case 1: 3 of 4 tests; test_error: Failed: DID NOT RAISE TypeError"


def test_all_or_nothing_requires_every_test_of_the_file(runner: asyncio.Runner, desk: Desk) -> None:
    config = CodeReward(fenced=False, all_or_nothing=True)
    strict = CodeScorer(config, runner.run(desk.scorer.start()))
    row = {"cases": [{"pytest": FOUR}, {"call": "add", "args": [1, 2], "expected": 3}]}
    score = runner.run(strict.score("def add(a, b): return 3", row))
    assert (score.value, score.outcome, score.parts) == (0.0, Outcome.PARTIAL, {"passed": 0.125})
    assert score.reason.endswith("; 1 cases did not run")
    assert runner.run(strict.score(ADD, row)).value == 1.0
    runner.run(strict.close())
    desk.scorer._sandboxes = None  # `close` has ended them


STATE = "class Stack:\n    def __init__(self): self.x = []\n    def push(self, x): self.x.append(x); return len(self.x)"
USES_FIXTURES = """
import pytest
import solution

@pytest.fixture
def stack():
    return solution.Stack()

def test_push(stack):
    assert stack.push(1) == 1
    assert stack.push(2) == 2

def test_fresh(stack, tmp_path, monkeypatch):
    assert stack.push(1) == 1
"""


def test_pytest_cases_can_use_fixtures_and_program_objects(desk: Desk) -> None:
    assert desk.judge(STATE, USES_FIXTURES).outcome is Outcome.CORRECT


EXPECTS_EXIT = """
import pytest
from solution import f
def test_f():
    with pytest.raises(SystemExit):
        f(2)
"""
PRINTS = """
from solution import f
def test_f(capsys):
    with capsys.disabled():
        print(f(1), flush=True)
    assert f(2) == 4
"""
ONE = "from solution import f\ndef test_f():\n    assert f(2) == 4\n"
GUARDED = """
import pytest
from solution import f
def test_a():
    with pytest.raises(BaseException):
        f(-1)
def test_b():
    try:
        f(2)
    except:
        pass
"""
OUTCOMES = """
import pytest
from solution import f
@pytest.mark.skipif(f(1) == 9, reason="program")
def test_skip():
    pass
@pytest.mark.xfail
def test_xfail():
    assert f(2) == 4
def test_calls_skip():
    if f(1) == 9:
        pytest.skip("program")
def test_teardown(request):
    request.addfinalizer(lambda: f(2) == 4 or pytest.fail("late"))
"""
CHANNEL = 'import socket\nc = socket.socket(fileno=3)\nc.sendall(b\'{"f": {"remote": 0}}\\n\')\n'
FORGED = '{"passed": 1, "tests": 1, "reason": ""}'
PATCH = "import sys\nimport pytest, _pytest.runner\n_pytest.runner.pytest_runtest_makereport = None\ndef f(x): return 9"
CONFTEST = (
    "hook = '''import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport(item, call):\\n"
    "    out = yield\\n    out.get_result().outcome = \"passed\"\\n'''\n"
    "import os\n"
    "for place in ('.', '/tmp', '/work', '/dev/shm', os.path.expanduser('~')):\n"
    "    for name in ('conftest.py', 'pytest.py', 'sitecustomize.py', 'test_solution.py', 'pytest.ini'):\n"
    "        try: open(os.path.join(place, name), 'w').write(hook)\n"
    "        except OSError: pass\n"
    "def f(x): return 9"
)
CHEATS: dict[str, tuple[str, str]] = {
    "exits at import": ("import os\nos._exit(0)", ONE),
    "exits politely at import": ("raise SystemExit(0)", ONE),
    "exits in a test": ("import os\ndef f(x): os._exit(0)", ONE),
    "exits in a guarded test": ("import os\ndef f(x): os._exit(0)", GUARDED),
    "exits politely in a test that expects it": ("import sys\ndef f(x): sys.exit(0)", EXPECTS_EXIT),
    "patches pytest": (PATCH, ONE),
    "installs a conftest": (CONFTEST, ONE),
    "exits in an exit function": ("import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 9", ONE),
    "prints a summary": (f"print('=== 1 passed in 0.01s ===')\nprint('{FORGED}')\ndef f(x): return 9", ONE),
    "prints by the tests": (f"def f(x): return '\\n{FORGED}\\n'", PRINTS),
    "writes a report": ("open('report.xml', 'w').write('<testsuite failures=\"0\"/>')\ndef f(x): return 9", ONE),
    "kills its parent": ("import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGKILL)", ONE),
    "raises an outcome of pytest": ("class Skipped(Exception): pass\ndef f(x): raise Skipped()", ONE),
    "answers with an error of pytest": (f'{CHANNEL}while c.recv(999): c.sendall(b\'{{"error": "Exit"}}\\n\')', ONE),
    "answers with the end of the process": (
        f'{CHANNEL}while c.recv(999): c.sendall(b\'{{"error": "SystemExit", "text": "0"}}\\n\')',
        ONE,
    ),
    "redefines built-ins": (
        "def all(x): return True\ndef f(x): return 9",
        ONE.replace("f(2) == 4", "all([f(2) == 4])"),
    ),
    "equals everything": ("class A:\n    def __eq__(self, o): return True\ndef f(x): return A()", ONE),
    "is skipped": ("def f(x): return 9", OUTCOMES),
    "has the names of the tests": ("pytest = test_f = add = lambda *a: True\ndef f(x): return 9", ONE),
    "looks for the token": (
        "import gc\ndef f(x):\n    return [o for o in gc.get_objects() if type(o) is str and len(o) == 32]",
        ONE,
    ),
    "replaces dunder names": ("__all__ = ['f']\n__builtins__ = {}\n__name__ = 'x'\ndef f(x): return 9", ONE),
}


@pytest.mark.parametrize("name", CHEATS)
def test_program_that_cheats_passes_no_test(desk: Desk, name: str) -> None:
    program, tests = CHEATS[name]
    score = desk.judge(program, tests)
    assert (score.value, score.outcome) == (0.0, Outcome.WRONG), score
    assert desk.judge("def f(x): return 2 * x", ONE).outcome is Outcome.CORRECT


def test_program_that_ends_between_calls_passes_no_test(desk: Desk) -> None:
    """A test that expects an error must not pass because the program cannot be called any more."""
    tests = "import time\nimport pytest\nfrom solution import f\ndef test_a():\n    assert f(1) == 1\n"
    tests += "    time.sleep(0.5)\n    with pytest.raises(OSError):\n        f(2)\n"
    score = desk.judge("import os, threading\ndef f(x): threading.Timer(0.1, os._exit, [0]).start(); return x", tests)
    assert (score.value, score.outcome) == (0.0, Outcome.WRONG), score


def test_program_that_ends_keeps_the_tests_passed_before(desk: Desk) -> None:
    tests = f"{ONE}def test_g():\n    f(0)\ndef test_h():\n    pass\n"
    score = desk.judge("import os\ndef f(x): return 2 * x if x else os._exit(0)", tests)
    assert (round(score.value, 3), score.outcome) == (0.333, Outcome.PARTIAL)
    assert score.reason == "0 of 1 cases; case 1: 1 of 3 tests; the program has ended"


LOOP = "def f(x):\n    while True: pass"
GROWS = "import time\ndef f(x):\n    if x < 0:\n        held = 'x' * 2**29\n        time.sleep(600)\n    return 2 * x"


@pytest.mark.parametrize(
    ("program", "tests", "outcome", "value", "reason"),
    [
        (LOOP, ONE, Outcome.TIMEOUT, 0.0, "it ran longer than 0."),
        (
            GROWS,
            f"{ONE}def test_g():\n    f(-1)\n",
            Outcome.PARTIAL,
            0.5,
            "it was stopped, as it used too much: memory",
        ),
        (GROWS.replace("x < 0", "x > 0"), ONE, Outcome.KILLED, 0.0, "it was stopped, as it used too much: memory"),
        ("def f(x): return 'x' * 2**40", ONE, Outcome.WRONG, 0.0, "0 of 1 tests; test_f: MemoryError"),
        ("def f(:", ONE, Outcome.WRONG, 0.0, "SyntaxError: invalid syntax"),
        ("def g(x): pass", ONE, Outcome.WRONG, 0.0, "0 of 0 tests; test_solution.py: CollectError: ImportError"),
    ],
    ids=["timeout", "late", "memory", "huge", "syntax", "missing"],
)
def test_each_end_of_a_program_has_its_outcome(
    runner: asyncio.Runner, desk: Desk, program: str, tests: str, outcome: Outcome, value: float, reason: str
) -> None:
    seconds = 0.8 if outcome is Outcome.TIMEOUT else 60.0
    scorer = CodeScorer(CodeReward(fenced=False, case_seconds=seconds), runner.run(desk.scorer.start()))
    scorer._testers = desk.scorer._testers
    score = runner.run(scorer.score(program, {"cases": [{"pytest": tests}]}))
    assert (score.value, score.outcome) == (value, outcome), score
    assert reason in score.reason


def test_adaptive_deadline_ends_a_slow_program(runner: asyncio.Runner, desk: Desk) -> None:
    adaptive = AdaptiveDeadline(min_seconds=0.6, recheck=1.0)
    quick = CodeScorer(CodeReward(fenced=False, case_seconds=60.0, adaptive=adaptive), runner.run(desk.scorer.start()))
    quick._testers = desk.scorer._testers
    clock = CaseClock("row", {0: 0.1})

    async def score() -> tuple[Score, float | None]:
        CLOCK.set(clock)
        slow = "import time\ndef f(x):\n    time.sleep(1.5)\n    return 2 * x"
        found = await quick.score(slow, {"cases": [{"pytest": ONE}]})
        return found, await clock.doubtful[0][1]()

    found, again = runner.run(score())
    assert (found.outcome, found.parts["deadline"]) == (Outcome.TIMEOUT, 0.6)
    assert found.reason.endswith("its adaptive deadline")
    assert again is not None
    assert again > 1.5


def test_times_of_a_right_program_are_measured(runner: asyncio.Runner, desk: Desk) -> None:
    adaptive = CodeScorer(
        CodeReward(fenced=False, case_seconds=60.0, adaptive=AdaptiveDeadline()), runner.run(desk.scorer.start())
    )
    adaptive._testers, clock = desk.scorer._testers, CaseClock("row", {})

    async def score() -> Score:
        CLOCK.set(clock)
        return await adaptive.score("def f(x): return 4", {"cases": [{"pytest": ONE}]})

    assert runner.run(score()).value == 1.0
    assert clock.report.seconds.keys() == {0}


TOKEN = "5f" * 16
GOOD = b'\n%s {"passed": 1, "tests": 1, "reason": ""}\n' % TOKEN.encode()


@pytest.mark.parametrize(
    ("end", "code", "stdout", "passed"),
    [
        (ProgramEnd.EXITED, 0, GOOD, True),
        (ProgramEnd.EXITED, 1, GOOD, False),
        (ProgramEnd.OUTPUT, -9, GOOD, False),
        (ProgramEnd.TIMEOUT, -9, GOOD, False),
        (ProgramEnd.EXITED, 0, GOOD + b"later", False),
        (ProgramEnd.EXITED, 0, GOOD.replace(b"5f", b"00"), False),
        (ProgramEnd.EXITED, 0, GOOD.replace(b'"tests": 1', b'"tests": 2'), False),
        (ProgramEnd.EXITED, 0, GOOD.replace(b"1", b"0"), False),
        (ProgramEnd.EXITED, 0, b"", False),
    ],
)
def test_passed_result_needs_a_token_in_the_last_line(end: ProgramEnd, code: int, stdout: bytes, passed: bool) -> None:
    assert read_result(ExecResult(end, code, stdout, b"", 0.1), TOKEN).passed is passed


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (FOUR, None),
        (USES_FIXTURES, None),
        ("import solution\nclass TestA:\n    def test_a(self): pass", None),
        ("def helper(): pass\nimport solution", "defines no function test_"),
        ("def test_a(): pass", "does not import the module solution"),
        ("from solution import *\ndef test_a(): pass", "imports * from solution"),
        ("import solution\nasync def test_a(): pass", "test_a of its pytest file is async"),
        ("import solution, numpy as np\ndef test_a(): pass", "imports numpy, which is not in"),
        ("import solution\ntry:\n    import numpy\nexcept ImportError: pass\ndef test_a(): pass", None),
    ],
)
def test_pytest_file_that_cannot_test_a_program_is_refused(source: str, fault: str | None) -> None:
    found = find_file_fault(source)
    assert found is None if fault is None else found and fault in found


@pytest.mark.parametrize(
    "config",
    [RunCodeSandbox(url="http://127.0.0.1:9/run_code"), RockSandbox(url="http://127.0.0.1:9")],
    ids=["run-code", "rock"],
)
async def test_sandbox_without_a_channel_is_refused(config: SandboxConfig) -> None:
    with pytest.raises(ConfigError, match=f'{config.kind}" cannot run test cases with "pytest", because'):
        await start_testers(config)


async def test_missing_pytest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest_case, "_find_package", lambda name: None)
    with pytest.raises(ConfigError, match='pytest is not installed; install it with `pip install "rollflow'):
        await start_testers(UnsafeProcessSandbox())


async def test_pytest_that_does_not_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = pytest_case._find_package
    monkeypatch.setattr(pytest_case, "_find_package", lambda name: None if name == "pluggy" else found(name))
    with pytest.raises(ConfigError, match=r'unsafe-process" cannot run test cases with .*ModuleNotFoundError'):
        await start_testers(UnsafeProcessSandbox())


@pytest.mark.long
async def test_worker_process_scores_a_pytest_file(tmp_path: Path) -> None:
    right, wrong = "def f(x): return 2 * x", "def f(x): return 5"
    for name, data in build_cold_folder(ColdStart(), [right, wrong]).items():
        (tmp_path / name).write_bytes(data)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    pool = build_scorer(CodeReward(fenced=False, sandbox=UnsafeProcessSandbox()), tmp_path)
    await pool.start()
    try:
        asked = [ScoreRequest(tokenizer.encode(text).ids, {"cases": [{"pytest": ONE}]}) for text in (right, wrong)]
        scores = await asyncio.wait_for(pool.score(asked), HANG_SECONDS)
    finally:
        await pool.close()
    assert [score.outcome for score in scores] == [Outcome.CORRECT, Outcome.WRONG]
    assert scores[1].reason == "0 of 1 cases; case 1: 0 of 1 tests; test_f: AssertionError"
