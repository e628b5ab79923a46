"""Checks the names of runs and recipes (config files), because they become parts of paths.

A run id is plain ASCII, begins with a letter or a digit, and contains neither "/" nor a space.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import StringConstraints, WithJsonSchema

from rollflow.storage.errors import ConfigError

LONGEST = 100
# A run id is the name of a recipe, followed by the time or by the end of a Prefect flow run's id.
LONGEST_RECIPE = LONGEST - 20
_RUN_ID = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST - 1}}}"
_RECIPE = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_RECIPE - 1}}}"
_PLACE = rf"(.*/)?{_RUN_ID}/*"


def _build_schema(pattern: str) -> Any:
    # Prefect's parameter form checks the pattern with Python's `$`, which alone would allow a newline at the end.
    return WithJsonSchema({"type": "string", "pattern": f"^{pattern}$(?!\\n)"})


RunId = Annotated[str, StringConstraints(pattern=f"^{_RUN_ID}$"), _build_schema(_RUN_ID)]
RecipeName = Annotated[str, StringConstraints(pattern=f"^{_RECIPE}$"), _build_schema(_RECIPE)]
RunPlace = Annotated[
    str, StringConstraints(pattern=f"^{_PLACE}$"), _build_schema(_PLACE)
]  # path or URI of a run's storage


def is_number(text: str) -> bool:
    """Return whether a text has the form of a policy version (`7`) or a trajectory (`12.0.3`).

    No new run gets an id of this form, because a command could not distinguish the id from a policy version.
    """
    return re.fullmatch(r"[0-9]+(\.[0-9]+){0,2}", text) is not None


def run_id(text: str, key: str) -> str:
    """Check that `text` is a valid run id, and return it.

    Raises:
        ConfigError: `text` is not a run id. The error's message names `key` as the source of the text.
    """
    if re.fullmatch(_RUN_ID, text) is None:
        shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        raise ConfigError(
            f"{key} = {shown!r} is not a valid run id; write at most {LONGEST} letters, digits, '.', '_' and "
            "'-', beginning with a letter or a digit"
        )
    return text
