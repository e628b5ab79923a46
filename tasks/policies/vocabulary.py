"""How many tokens a policy has, as its folder says."""

from __future__ import annotations

import json
from pathlib import Path

from rollflow.storage.flat import ANY_TOKEN


def vocabulary_of(folder: Path) -> int:
    """Its tokens are those from 0 to one less than this: the `vocab_size` of `config.json`, if that says one."""
    config = json.loads((folder / "config.json").read_text())
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size or ANY_TOKEN)
