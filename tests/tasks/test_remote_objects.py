"""The tests of a program use its objects through a channel, and these objects behave as in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from textwrap import indent

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.code.pytest_case import find_file_fault, start_testers
from rollflow.tasks.scorers.code.scorer import CodeScorer
from rollflow.tasks.scorers.config import CodeReward

NODE = """
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
def build(count): return Node(count, build(count - 1)) if count else None
def total(node): return node.value + total(node.next) if node else 0
"""
GRID = """
class Grid:
    def __init__(self): self.cells = {}
    def __setitem__(self, key, value): self.cells[key] = value
    def __getitem__(self, key): return self.cells[key]
    def __delitem__(self, key): del self.cells[key]
class Never:
    def __bool__(self): return False
class Empty:
    def __len__(self): return 0
"""
NESTED = "loop = []\nloop.append(loop)\ntree = {}\nfor _ in range(200): tree = {1: tree}\ndef f(x): return 2 * x"
# program and test: the test passes if objects of the program behave as in one process
RIGHT: dict[str, tuple[str, str]] = {
    "objects are true": (
        NODE,
        "node, found = build(3), []\nwhile node:\n    found.append(node.value)\n    node = node.next\n"
        "assert found == [3, 2, 1]",
    ),
    "objects can be false": (GRID, "assert not Never()\nassert not Empty()\nassert Grid()"),
    "attributes can be set": (NODE, "node = Node(1)\nnode.next = Node(2)\nassert total(node) == 3"),
    "items can be set": (
        GRID,
        "grid = Grid()\ngrid[1, 2] = 3\nassert grid[1, 2] == 3\ndel grid[1, 2]\nassert not grid.cells",
    ),
    "iterators become lists": (
        "def count(most):\n    yield from range(most)",
        "assert list(count(3)) == [0, 1, 2]\nassert sum(count(4)) == 6\na, b = count(2)\nassert next(count(1)) == 0",
    ),
    "missing methods are type errors": (
        NODE,
        "for use in (len, iter, next, lambda node: node()):\n    try:\n        use(Node(1))\n"
        "    except TypeError:\n        continue\n    raise AssertionError(use)",
    ),
    "threads call at the same time": (
        "def f(x): return 2 * x",
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as pool:\n"
        "    assert list(pool.map(f, range(200))) == [2 * x for x in range(200)]",
    ),
    "errors of encodings keep their class": (
        "def f(x): return x.decode()",
        "try:\n    f(b'\\xff')\nexcept UnicodeDecodeError as error:\n    assert 'invalid start byte' in str(error)\n"
        "else:\n    raise AssertionError",
    ),
    "groups of errors keep their class": (
        "def f(): raise ExceptionGroup('two', [ValueError(1)])",
        "try:\n    f()\nexcept ExceptionGroup as error:\n    assert 'two' in str(error)\nelse:\n    assert 0",
    ),
    "huge integers are copied": (
        "def double(x): return 2 * x\nhuge = [-(10**5000)]",
        "import solution\nassert double(3**20000) == 2 * 3**20000\nassert solution.huge == [-(10**5000)]",
    ),
    "deep values at the top of a program": (NESTED, "assert f(2) == 4"),
}
# program and test: the test must fail, as it does in one process
WRONG: dict[str, tuple[str, str]] = {
    "no true or false": ("class A:\n    def __bool__(self): return 1\ndef f(): return A()", "assert f()"),
    "negative length": ("class A:\n    def __len__(self): return -1\ndef f(): return A()", "assert f()"),
    "length of another type": ("class A:\n    def __len__(self): return 'x'\ndef f(): return A()", "assert f()"),
    "long length": ("class A:\n    def __len__(self): return 2**62\n    def __iter__(self): return self\n"
                    "    def __next__(self): raise StopIteration\ndef f(): return A()", "assert list(f()) == []"),
    "functions of the tests": ("def f(x): pass", "f(lambda: 1)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """Create an event loop for all tests of this module."""
    with asyncio.Runner() as created:
        yield created


@pytest.fixture(scope="module")
def scorer(runner: asyncio.Runner) -> Iterator[CodeScorer]:
    """Create a scorer with sandboxes of the default kind; skip if this machine has none."""
    created = CodeScorer(CodeReward(fenced=False, case_seconds=20.0))
    try:
        runner.run(created.start())
    except ConfigError as error:
        pytest.skip(str(error))
    yield created
    runner.run(created.close())


def list_cases(program: str, test: str) -> list[dict[str, str]]:
    """Return a test as a case with an assertion and as a pytest file."""
    names = [
        line.split("(")[0].split(":")[0].split()[1] for line in program.split("\n") if line[:4] in ("def ", "clas")
    ]
    imports = f"from solution import {', '.join(names)}\n"
    return [{"assert": test}, {"pytest": f"{imports}def test_it():\n{indent(test, '    ')}\n"}]


@pytest.mark.parametrize("name", RIGHT)
def test_remote_object_behaves_like_a_local_object(runner: asyncio.Runner, scorer: CodeScorer, name: str) -> None:
    score = runner.run(scorer.score(RIGHT[name][0], {"cases": list_cases(*RIGHT[name])}))
    assert (score.value, score.outcome) == (1.0, Outcome.CORRECT), score


@pytest.mark.parametrize("name", WRONG)
def test_invalid_use_of_a_remote_object_fails(runner: asyncio.Runner, scorer: CodeScorer, name: str) -> None:
    score = runner.run(scorer.score(WRONG[name][0], {"cases": list_cases(*WRONG[name])}))
    assert (score.value, score.outcome) == (0.0, Outcome.WRONG), score


@pytest.mark.parametrize(
    ("source", "is_refused"),
    [
        ("class Checks:\n    def test_a(self): pass", True),
        ("def helper():\n    def test_a(): pass", True),
        ("class Checks(Base):\n    def test_a(self): pass", False),
        ("class TestA:\n    class TestB:\n        def test_a(self): pass", False),
        ("if True:\n    def test_a(): pass", False),
    ],
)
def test_pytest_file_without_a_test_is_refused(source: str, is_refused: bool) -> None:
    found = find_file_fault(f"import solution\n{source}")
    assert (found is not None and "defines no function test_..." in found) is is_refused


async def test_cancelled_start_of_pytest_leaves_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollflow.tasks.sandboxes.bubblewrap import BubblewrapSandboxes

    created, close = list[BubblewrapSandboxes](), BubblewrapSandboxes.close
    begun = asyncio.Event()

    async def note_close(self: BubblewrapSandboxes) -> None:
        created.append(self)
        await close(self)

    async def wait_forever(testers: object) -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(BubblewrapSandboxes, "close", note_close)
    monkeypatch.setattr("rollflow.tasks.scorers.code.pytest_case._find_start_fault", wait_forever)
    starting = asyncio.create_task(start_testers(CodeReward().sandbox))
    waiting = asyncio.create_task(begun.wait())
    await asyncio.wait([starting, waiting], return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        waiting.cancel()
        pytest.skip(str(starting.exception()))
    starting.cancel()
    await asyncio.wait([starting])
    assert len(created) == 1
    assert created[0]._has_died()
