"""Reads and writes the list of the slowest tests, which `make full` runs and `make test` leaves out.

`tests/full_tests.txt` has the id of each of these tests, and the seconds that the test took when the list was made. The
list is made from a run of all tests:

    make full ARGS="--junit-xml=full.xml"
    python -m tests.support.full_tests full.xml 0.8

The last argument is the largest number of seconds of a test that stays in `make test`.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

import pytest

LIST = Path(__file__).parents[1] / "full_tests.txt"
GROUP = re.compile(r"@\w+]?$")  # the name of a group, which `tests/conftest.py` puts at the end of an id
HEADER = "# Tests that only `make full` runs, and their seconds: written by tests/support/full_tests.py\n"


def read_list() -> set[str]:
    """Return the ids of the tests that only `make full` runs."""
    lines = LIST.read_text().splitlines()
    return {line.split(maxsplit=1)[1] for line in lines if line and not line.startswith("#")}


def mark_listed(items: Iterable[pytest.Item], *, complete: bool) -> None:
    """Add the marker `full` to the listed tests.

    Raises:
        pytest.UsageError: `items` has all tests (`complete`), but not every listed test.
    """
    listed = read_list()
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.full)
            listed.discard(item.nodeid)
    if complete and listed:
        raise pytest.UsageError(f"{LIST.name} lists {min(listed)}, but there is no such test; remove the line")


def choose(seconds: dict[str, float], limit: float) -> list[tuple[str, float]]:
    """Return the tests that take more than `limit` seconds, the slowest first."""
    slow = [(test, took) for test, took in seconds.items() if took > limit]
    return sorted(slow, key=lambda one: (-one[1], one[0]))


def read_times(report: Path) -> dict[str, float]:
    """Return the seconds of each test in a JUnit report of pytest, by the test's id."""
    times = dict[str, float]()
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.attrib["classname"].split(".")
        files = [number for number in range(len(module), 0, -1) if Path(*module[:number]).with_suffix(".py").is_file()]
        if not files:
            continue
        file, classes = str(Path(*module[: files[0]]).with_suffix(".py")), module[files[0] :]
        name = GROUP.sub("", case.attrib["name"])
        times["::".join([file, *classes, name])] = float(case.attrib["time"])
    return times


def main() -> None:
    """Write the list from the report and the limit on the command line."""
    chosen = choose(read_times(Path(sys.argv[1])), float(sys.argv[2]))
    LIST.write_text(HEADER + "".join(f"{max(took, 1):.0f} {test}\n" for test, took in chosen))
    print(f"{len(chosen)} tests, {sum(took for _, took in chosen):.0f} s")


if __name__ == "__main__":
    main()
