"""Tests that a program passes its test cases only with right answers, and that no program avoids its score."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.sandboxes.config import MIB, BubblewrapSandbox, SandlockSandbox
from rollflow.tasks.scorers.code.scorer import CodeScorer
from rollflow.tasks.scorers.config import CodeReward
from tests.sandboxes.programs import PROGRAMS
from tests.sandboxes.programs.base import Hostile
from tests.sandboxes.programs.forgeries import (
    ASSERT,
    CALL,
    CHECK,
    FORGERIES,
    PRINT,
    PYTEST,
    Forgery,
    write_pytest_case,
)
from tests.support.counts import examples

LIMITS: dict[str, Any] = {"memory_bytes": 64 * MIB, "folder_bytes": 8 * MIB, "folder_files": 200, "processes": 16}
JUDGED = (Outcome.WRONG, Outcome.TIMEOUT, Outcome.KILLED)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """Create an event loop for all tests of this module."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(BubblewrapSandbox(**LIMITS), id="bubblewrap"),
        pytest.param(SandlockSandbox(**LIMITS), id="sandlock", marks=pytest.mark.soak),
    ],
)
def scorer(request: pytest.FixtureRequest, loop: asyncio.Runner) -> Iterator[CodeScorer]:
    """Create a scorer of programs with a short time for each case; skip the test if this machine has no sandboxes."""
    created = CodeScorer(CodeReward(case_seconds=1.0, fenced=False, sandbox=request.param))
    try:
        loop.run(created.start())
    except ConfigError as error:
        pytest.skip(str(error))
    yield created
    loop.run(created.close())


async def judge_wrong(scorer: CodeScorer, code: str, *cases: dict[str, Any]) -> None:
    """Check that a program fails all cases, and that a right program passes afterwards."""
    for score in await asyncio.gather(*(scorer.score(code, {"cases": [case]}) for case in cases)):
        assert score.value == 0.0, score
        assert score.outcome in JUDGED, score
    right = await scorer.score("def f(x): return 'a right answer'", {"cases": [CALL]})
    assert right.outcome is Outcome.CORRECT, right


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda one: one.name)
def test_program_that_forges_its_test_result_scores_zero(
    loop: asyncio.Runner, scorer: CodeScorer, forgery: Forgery
) -> None:
    loop.run(judge_wrong(scorer, forgery.code, forgery.case, write_pytest_case(forgery.case)))


@pytest.mark.many
@pytest.mark.parametrize("hostile", PROGRAMS[:: len(PROGRAMS) // examples(len(PROGRAMS))], ids=lambda one: one.name)
def test_hostile_program_scores_zero_on_every_test_type(
    loop: asyncio.Runner, scorer: CodeScorer, hostile: Hostile
) -> None:
    loop.run(judge_wrong(scorer, hostile.source, PRINT, CHECK, CALL, ASSERT, PYTEST))
