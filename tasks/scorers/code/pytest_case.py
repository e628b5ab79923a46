"""A pytest file as a test case: {"pytest": source}. A pytest file imports the program as the module `solution`.

    CodeScorer --program--> sandbox of the program <--calls--> sandbox of the tests, where `pytest_guest` runs pytest
               <--a random token, and how many tests passed---------+

Sandboxes of tests contain the packages of pytest from rollflow's environment, read-only, and no code of the model runs
in them. Sandboxes of programs do not contain pytest.
"""

from __future__ import annotations

import ast
import asyncio
import json
import secrets
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.tasks.sandboxes import build_sandboxes, place_packages
from rollflow.tasks.sandboxes.base import ExecResult, Program, ProgramEnd, Sandboxes, SandboxFailed
from rollflow.tasks.sandboxes.config import BubblewrapSandbox, RockSandbox, RunCodeSandbox, SandboxConfig
from rollflow.tasks.scorers.code.cases import (
    CaseResult,
    Printed,
    Tested,
    describe_failure,
    list_forms,
    read_case,
    read_guest,
    read_last_line,
    read_text,
    run_beside,
)
from rollflow.tasks.scorers.code.pytest_guest import BEGIN

# pytest, and the packages that it imports
PACKAGES = ("pytest", "_pytest", "iniconfig", "packaging", "pluggy", "py", "pygments")
MODULE = "solution"  # name under which the tests import the program
START_SECONDS = 30.0  # seconds that the first test file may take
PROBE_PROGRAM = "def f(): return 1"
PROBE_TESTS = "from solution import f\n\n\ndef test_f():\n    assert f() == 1\n"


@dataclass(frozen=True, slots=True)
class Testers:
    """Sandboxes in which pytest runs, with the paths of the packages of pytest inside them."""

    __test__ = False  # tells pytest that this class contains no tests

    sandboxes: Sandboxes
    places: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PytestFile:
    """A test case whose tests are the test functions of a pytest file. `testers` must be set before the case is
    judged."""

    tests: str
    testers: Testers | None = field(default=None, compare=False)

    async def judge(self, sandboxes: Sandboxes, code: str, seconds: float) -> CaseResult:
        """Run the program in one sandbox and pytest in another sandbox."""
        assert self.testers is not None
        token = secrets.token_hex(16)
        tests = f"run_pytest({self.tests!r}, {dict(self.testers.places)!r}, {token!r})"

        def read(verdict: ExecResult) -> CaseResult:
            return read_result(verdict, token)

        return await run_beside((sandboxes, self.testers.sandboxes), code, f"{read_both()}\n{tests}", seconds, read)


Case = Printed | Tested | PytestFile


def read_result(verdict: ExecResult, token: str) -> CaseResult:
    """Return the result of a test case from the last output line of pytest's process. If the line does not begin with
    the token, no test has passed.
    """
    line = read_last_line(verdict.stdout)
    if not verdict.succeeded or not line.startswith(f"{token} "):
        reason = describe_failure(verdict) if not verdict.succeeded else "pytest ended without a result"
        return CaseResult(False, f"no test has a result: {reason}", ProgramEnd.EXITED, verdict.seconds, 0.0)
    found = json.loads(line.removeprefix(f"{token} "))
    passed, tests = int(found["passed"]), int(found["tests"])
    if tests and passed == tests:
        return CaseResult(True, "", ProgramEnd.EXITED, verdict.seconds, 1.0)
    share = passed / tests if tests else 0.0
    reason = f"{passed} of {tests} tests; {found['reason']}"
    return CaseResult(False, reason, ProgramEnd.EXITED, verdict.seconds, share)


@cache
def read_both() -> str:
    """Return the source code of `guest.py` and `pytest_guest.py`, which run in the sandbox of the tests."""
    more = (Path(__file__).parent / "pytest_guest.py").read_text().partition(f"\n{BEGIN}\n")[2]
    return f"{read_guest()}\n{more}"


async def start_testers(config: SandboxConfig) -> Testers:
    """Start sandboxes in which pytest runs.

    Raises:
        ConfigError: this kind of sandbox, or this machine, cannot run pytest; the message says why and what to change.
    """
    if fault := find_kind_fault(config):
        raise ConfigError(fault)
    packages = {name: place for name in PACKAGES if (place := _find_package(name))}
    if "pytest" not in packages:
        cure = 'install it with `pip install "rollflow[testing]"`'
        raise ConfigError(f'{_name_kind(config)} cannot run test cases with "pytest": pytest is not installed; {cure}')
    if isinstance(config, BubblewrapSandbox):
        from _pytest.config import default_plugins

        warm = (*config.imports, "pytest", *(f"_pytest.{name}" for name in default_plugins))
        config = config.model_copy(update={"imports": warm})
    testers = Testers(build_sandboxes(config, packages), place_packages(config, packages))
    try:
        await testers.sandboxes.start()
        fault = await _find_start_fault(testers)
    except BaseException:  # the caller may stop waiting
        await testers.sandboxes.close()
        raise
    if fault:
        await testers.sandboxes.close()
        cure = 'raise its limits, or install pytest again with `pip install "rollflow[testing]"`'
        raise ConfigError(f'{_name_kind(config)} cannot run test cases with "pytest": {fault}; {cure}')
    return testers


async def _find_start_fault(testers: Testers) -> str:
    """Return why pytest does not run in the sandboxes, or ""."""
    imports = Program(code=f"{read_both()}\nimport_pytest({dict(testers.places)!r})", timeout=START_SECONDS)
    try:
        found = await testers.sandboxes.run(imports)
        if not found.succeeded:
            return describe_failure(found)
        result = await PytestFile(PROBE_TESTS, testers).judge(testers.sandboxes, PROBE_PROGRAM, START_SECONDS)
    except SandboxFailed as error:
        return str(error)
    return result.reason


def try_testers(config: SandboxConfig) -> None:
    """Start sandboxes for pytest and close them; raise `ConfigError` if this machine cannot run pytest in them."""

    async def start_and_close() -> None:
        testers = await start_testers(config)
        await testers.sandboxes.close()

    with ThreadPoolExecutor(1) as pool:  # a separate thread is used, because the caller may already run an event loop
        pool.submit(lambda: asyncio.run(start_and_close())).result()


def find_kind_fault(config: SandboxConfig) -> str | None:
    """Return why sandboxes of this kind cannot run pytest, or None if they can."""
    if not isinstance(config, RunCodeSandbox | RockSandbox):
        return None
    return (
        f'{_name_kind(config)} cannot run test cases with "pytest", because its programs have no channel to their '
        'tests; use sandbox.kind = "bubblewrap", "sandlock" or "unsafe-process"'
    )


def find_file_fault(source: str) -> str | None:
    """Return why no program can pass a pytest file, or why a program could pass without being tested; None if the file
    is valid. The file must be valid Python.
    """
    tree = ast.parse(source)
    tests = list(_list_tests(tree))
    if not tests:
        return "its pytest file defines no function test_...; add one, at the top or in a class Test..."
    if late := next((node.name for node in tests if isinstance(node, ast.AsyncFunctionDef)), None):
        return f"{late} of its pytest file is async, which needs a plugin of pytest; write a plain function"
    for name, star in _list_imports(ast.walk(tree)):
        if name == MODULE and star:
            return f"its pytest file imports * from {MODULE}, so a program could replace names of the tests; name them"
    if MODULE not in (name for name, _ in _list_imports(ast.walk(tree))):
        return f"its pytest file does not import the module {MODULE}, which is the program; import what it tests"
    known = {MODULE, *PACKAGES, *sys.stdlib_module_names}
    if other := next((name for name, _ in _list_imports(iter(tree.body)) if name not in known), None):
        return f"its pytest file imports {other}, which is not in Python's standard library; do without it"
    return None


def read_case_of_any_form(row: Any) -> Case:
    """Read one test case of a data row; raise `ValueError` with an explanation if its form is not valid."""
    return PytestFile(read_text(row, "pytest")) if list_forms(row) == ["pytest"] else read_case(row)


def has_pytest_file(reference: Mapping[str, Any]) -> bool:
    """Return whether a data row has a test case that is a pytest file."""
    rows = reference.get("cases")
    return isinstance(rows, list | tuple) and any(isinstance(row, Mapping) and row.get("pytest") for row in rows)


def _list_tests(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions that pytest treats as tests. A class has tests if its name begins with Test, or if it has a
    base class.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name.startswith("test"):
                yield child
        elif not isinstance(child, ast.ClassDef) or child.bases or child.name.startswith("Test"):
            yield from _list_tests(child)


def _list_imports(nodes: Iterator[ast.AST]) -> Iterator[tuple[str, bool]]:
    """Yield the first names of imported modules, and whether all names of the module are imported."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], any(alias.name == "*" for alias in node.names)


def _find_package(name: str) -> str | None:
    """Return the folder or the file of an installed package."""
    spec = find_spec(name)
    return spec.origin.removesuffix("/__init__.py") if spec and spec.origin else None


def _name_kind(config: SandboxConfig) -> str:
    return f'sandbox.kind = "{config.kind}"'
