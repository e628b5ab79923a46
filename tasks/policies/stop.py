"""The tokens that end an answer, as the policy folder names them."""

from __future__ import annotations

import json
from pathlib import Path


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """The end-of-sequence ids of `config.json`, then others from `generation_config.json`. (Chat models have both.)"""
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        found += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return tuple(dict.fromkeys(found))
