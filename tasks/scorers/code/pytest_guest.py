"""The code that runs a test file with pytest, in the sandbox of the tests.

    pytest --the test functions call the program's functions--> `ask` of `guest`--> program, in a sandbox of its own
       |
       v
    the last line of the output: a random token, and how many tests passed

No code of the model runs in the process of pytest, so a program can change neither pytest nor the result. The program
does not know the random token, so it cannot forge the result. When the program ends, this process writes its result and
exits, because a test could catch any error and pass.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from rollflow.tasks.scorers.code.guest import is_public, open_channel, read_module

BEGIN = "# --- the code in the sandbox"
# --- the code in the sandbox
FILE = "test_solution.py"  # name of the test file
# pytest does not rewrite `assert`: a rewritten statement compares two values again to explain their difference.
OPTIONS = [
    *("--assert=plain", "--disable-plugin-autoload", "-p", "no:terminal", "-p", "no:cacheprovider"),
    *("-p", "no:faulthandler", "-p", "no:doctest", "-p", "no:pastebin", FILE),
]
LONGEST_REASON = 200  # largest number of characters of a failed test's error


class Packages:
    """Finds the packages of pytest in `places`, because they are not in Python's standard library."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the location of a package of pytest; return None for any other module."""
        from importlib.util import spec_from_file_location

        if (place := self._places.get(name)) is None:
            return None
        if place.endswith(".py"):
            return spec_from_file_location(name, place)
        file = os.path.join(place, "__init__.py")
        return spec_from_file_location(name, file, submodule_search_locations=[place])


class PytestResults:
    """A plugin of pytest that counts the passed tests, and writes the result of the run.

    A test passes if its setup, its call and its teardown pass. A test that is skipped or fails as expected (`xfail`)
    does not count as passed, because the program could be the reason.
    """

    def __init__(self, token: str) -> None:
        self._token, self._output = token, os.dup(1)  # pytest replaces descriptor 1 while tests run
        self._names: list[str] = []
        self._passed: set[str] = set()
        self._failed: dict[str, str] = {}  # the outcome of each test that did not pass
        self._errors: dict[str, str] = {}  # the first error of a test, or of the whole file

    def pytest_collection_finish(self, session: Any) -> None:
        """Store the names of the tests in the file."""
        self._names = [item.nodeid for item in session.items]

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        """Record the error of a test, or of the whole file."""
        self._errors.setdefault(report.nodeid, f"{node.name}: {describe_error(call.excinfo.value)}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the outcome of a test's setup, call or teardown."""
        if report.outcome != "passed":
            self._failed.setdefault(report.nodeid, f"{report.nodeid.rpartition('::')[2]}: {report.outcome}")
        elif report.when == "teardown":
            self._passed.add(report.nodeid)

    def finish(self, reason: str = "") -> NoReturn:
        """Write the result as the last line of the output, and exit this process."""
        passed = sum(name in self._passed and name not in self._failed for name in self._names)
        first = next(iter([*self._errors.values(), *self._failed.values()]), reason)
        found = {"passed": passed, "tests": len(self._names), "reason": first}
        os.write(self._output, f"\n{self._token} {json.dumps(found)}\n".encode())
        os._exit(0)


class EndingChannel:
    """A channel to the program that ends the tests when the program ends."""

    def __init__(self, channel: Any, results: PytestResults) -> None:
        self._channel, self._results = channel, results

    def write(self, data: bytes) -> None:
        """Write a call; a program that has ended is reported by `readline`."""
        try:
            self._channel.write(data)
        except OSError:
            self._results.finish("the program has ended")

    def flush(self) -> None:
        """Send the call."""
        try:
            self._channel.flush()
        except OSError:
            self._results.finish("the program has ended")

    def readline(self) -> bytes:
        """Return an answer of the program."""
        line: bytes = self._channel.readline()
        if not line:
            self._results.finish("the program has ended")
        return line


def describe_error(error: BaseException) -> str:
    """Return an error as one line; its text may come from the program."""
    try:
        text = " ".join(str(error).split())
    except BaseException:  # noqa: BLE001 - the text may be that of an object in the program's sandbox
        text = ""
    return f"{type(error).__name__}{': ' if text else ''}{text}"[:LONGEST_REASON]


def import_pytest(places: dict[str, str]) -> Any:
    """Import pytest from the folders and files of its packages, by name, and return the module."""
    sys.meta_path.append(Packages(places))
    import pytest

    return pytest


def run_pytest(tests: str, places: dict[str, str], token: str) -> NoReturn:
    """Run a test file on the functions of the model's program, which the file imports from the module `solution`."""
    results = PytestResults(token)
    channel = EndingChannel(open_channel(), results)
    pytest = import_pytest(places)
    read_module(channel, is_public)
    # A pytest.ini without keys keeps pytest from looking for settings elsewhere.
    for name, text in ((FILE, tests), ("pytest.ini", "[pytest]\n")):
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
    sys.dont_write_bytecode = True
    code = pytest.main(OPTIONS, plugins=[results])
    results.finish(f"pytest ended with code {int(code)}")
