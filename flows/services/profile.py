"""The Prefect server that a person uses: `PREFECT_API_URL`, or what the active Prefect profile says of it.

Imports no Prefect, which takes seconds.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any


def prefect_url() -> str:
    """The address of that server's API; "" where there is none, or `PREFECT_API_URL` is set to nothing."""
    return prefect_setting("PREFECT_API_URL")


def prefect_setting(name: str) -> str:
    """A setting of Prefect's: from the environment, else from the active profile; "" where neither has it."""
    given = os.environ.get(name)
    return given if given is not None else str(_active().get(name, ""))


def _active() -> dict[str, Any]:
    folder = os.path.expanduser(os.environ.get("PREFECT_HOME", "~/.prefect"))  # unexpanded for a user without a home
    file = Path(os.path.expanduser(os.environ.get("PREFECT_PROFILES_PATH", f"{folder}/profiles.toml")))
    try:
        kept = tomllib.loads(file.read_text())
        return dict(kept["profiles"][os.environ.get("PREFECT_PROFILE", kept["active"])])
    except (OSError, ValueError, KeyError, TypeError):  # none, or one that Prefect itself would complain of
        return {}
