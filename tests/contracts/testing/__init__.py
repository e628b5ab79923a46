"""Provides contract suites for user-defined parts, such as scorers: one class of tests for each contract.

A user's test derives from the class and names the part; pytest then runs the whole contract on the part. rollflow's own
tests derive from the same classes.

    scorers        ScorerContract
    environments   EnvironmentContract
    prompts        SourceContract
    objectives     ObjectiveContract
    engines        EngineContract, which needs pytest-asyncio
    learners       LearnerContract
    objects        ObjectStoreContract

Only this package imports pytest. See docs/own_parts.md for an example of each class.
"""

from __future__ import annotations

import pytest

SUITES = ("bounds", "engines", "environments", "learners", "objectives", "objects", "prompts", "scorers")

pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in SUITES))
