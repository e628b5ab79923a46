"""How many cases the largest property tests draw: a tenth in `make test`, all of them in `make soak`.

Those tests have the marker `many`. What was found once by drawing stands beside them as an example, and is always run.
"""

from __future__ import annotations

import os

ALL = os.environ.get("ROLLFLOW_DRAW") == "all"


def examples(whole: int) -> int:
    """Of so many cases, how many are drawn now."""
    return whole if ALL else whole // 10
