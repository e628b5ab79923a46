"""The number of tokens that a policy has, according to its folder."""

from __future__ import annotations

import json
from pathlib import Path

from rollflow.storage.token_arrays import ANY_TOKEN


def read_vocabulary(folder: Path) -> int:
    """Return `vocab_size` of `config.json`, if it has one: the tokens are 0 to one less than this."""
    config = json.loads((folder / "config.json").read_text())
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size or ANY_TOKEN)
