"""The tokens that end an answer, as the policy folder names them."""

from __future__ import annotations

import json
from pathlib import Path


def stop_token_ids(policy_folder: Path) -> list[int]:
    """End-of-sequence ids of `config.json` and `generation_config.json`; chat models name more in the second."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = policy_folder / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        found.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return sorted(found)
