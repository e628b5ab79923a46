"""Finds the address of the user's own Prefect server in `PREFECT_API_URL` or in the active Prefect profile. This module
does not import Prefect, because the import takes seconds.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any


def prefect_url() -> str:
    """Return the API address of the user's own Prefect server, or "" if none is set."""
    return prefect_setting("PREFECT_API_URL")


def prefect_setting(name: str) -> str:
    """Return a Prefect setting from the environment or from the active Prefect profile; return "" if neither has the
    setting.
    """
    given = os.environ.get(name)
    return given if given is not None else str(_read_profile().get(name, ""))


def _read_profile() -> dict[str, Any]:
    # If the user has no home, `expanduser` leaves the path unchanged.
    folder = os.path.expanduser(os.environ.get("PREFECT_HOME", "~/.prefect"))
    file = Path(os.path.expanduser(os.environ.get("PREFECT_PROFILES_PATH", f"{folder}/profiles.toml")))
    try:
        kept = tomllib.loads(file.read_text())
        return dict(kept["profiles"][os.environ.get("PREFECT_PROFILE", kept["active"])])
    # The user has no profile, or an invalid profile that Prefect itself will report.
    except (OSError, ValueError, KeyError, TypeError):
        return {}
