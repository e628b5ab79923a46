"""The config section `[reward.adaptive]` of the scorer of programs."""

from __future__ import annotations

from pydantic import Field

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Section


class AdaptiveDeadline(Section):
    """Deadlines of test cases that follow the seconds of correct programs, after RollPacker (arXiv 2509.21009)."""

    factor: float = Field(
        1.5,
        ge=1,
        description="deadline of a test case, as a multiple of the longest time that a correct program has taken on "
        "the case",
    )
    min_seconds: float = Field(
        2.0,
        gt=0,
        le=LONGEST_SECONDS,
        description="smallest deadline of a test case, in seconds; the largest is case_seconds",
    )
    recheck: float = Field(
        0.05,
        ge=0,
        le=1,
        description="share of the killed test cases that run again with case_seconds, to count those that would have "
        "passed",
    )
    reference_column: str | None = Field(
        None,
        min_length=1,
        description="column of a prompt row with the seconds that the reference solution takes on a test case; these "
        "seconds count like those of a correct program. Default: only programs of the run count",
    )
