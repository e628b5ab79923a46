"""Makes the package of docs/own_parts importable in this process and its child processes, as for a user."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "own_parts"


def put_in_reach(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Let Python find the packages in these folders until the end of the test."""
    before = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    found = list(dict.fromkeys([*map(str, folders), *before, *filter(os.path.isabs, sys.path)]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(found))
    for folder in folders:
        monkeypatch.syspath_prepend(str(folder))
