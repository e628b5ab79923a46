"""Names that come from outside and become parts of paths, addresses and queries: what one may look like.

A run id is plain ASCII, begins with a letter or a digit and has no separator. So it cannot lead out of a folder, and it
is one word in a log line. It is checked wherever it enters: by `run_id`, and by the types in the form of a deployment.
Imports pydantic only.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import StringConstraints, WithJsonSchema

from rollflow.storage.errors import ConfigError

LONGEST = 100
LONGEST_RECIPE = LONGEST - 20  # a run id is made of a recipe's name and the time, or the end of a flow run's id
_RUN_ID = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST - 1}}}"
_RECIPE = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_RECIPE - 1}}}"
_PLACE = rf"(.*/)?{_RUN_ID}/*"


def _form(pattern: str) -> Any:
    # A form is checked with Python's `$`, which would let a line end pass at the end.
    return WithJsonSchema({"type": "string", "pattern": f"^{pattern}$(?!\\n)"})


RunId = Annotated[str, StringConstraints(pattern=f"^{_RUN_ID}$"), _form(_RUN_ID)]
RecipeName = Annotated[str, StringConstraints(pattern=f"^{_RECIPE}$"), _form(_RECIPE)]
RunPlace = Annotated[str, StringConstraints(pattern=f"^{_PLACE}$"), _form(_PLACE)]  # path or URI of a run's own storage


def run_id(text: str, key: str) -> str:
    """Check that `text` is a run id, and return it.

    Raises:
        ConfigError: it is not a run id; `key` is where it came from.
    """
    if re.fullmatch(_RUN_ID, text) is None:
        shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        raise ConfigError(
            f"{key} = {shown!r}: no run is called that; write at most {LONGEST} letters, digits, '.', '_' and '-', "
            "a letter or a digit first"
        )
    return text
