"""Computes how many random cases the largest property tests draw: a twentieth in `make test`, all of them in `make
soak`.

These tests have the marker `many`. A case that once failed is an explicit example, and always runs.
"""

from __future__ import annotations

import os

ALL = os.environ.get("ROLLFLOW_DRAW") == "all"


def examples(whole: int) -> int:
    """Return how many of `whole` cases to draw in this test run."""
    return whole if ALL else whole // 20
