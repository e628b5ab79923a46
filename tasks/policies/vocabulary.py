"""Reads the size of a policy's vocabulary from the policy's `config.json`."""

from __future__ import annotations

import json
from pathlib import Path

from rollflow.storage.token_arrays import ANY_TOKEN


def read_vocabulary(folder: Path) -> int:
    """Return `vocab_size` from the policy folder's `config.json`, or `ANY_TOKEN` if the file has no such key."""
    config = json.loads((folder / "config.json").read_text())
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size or ANY_TOKEN)
