"""Collects the tokens that end an answer.

End tokens are defined in `config.json`, `generation_config.json`, the tokenizer and the chat template of a policy. A
new run collects all end tokens in its own `generation_config.json`, which never changes. Engines, learner, exports and
other tools read the end tokens from the run's `generation_config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.tasks.policies.context import text_config

GENERATION = "generation_config.json"


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """Return the ids of the end tokens in `config.json` and `generation_config.json`."""
    found: list[int] = []
    for name in ("config.json", GENERATION):
        path = folder / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        found += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return tuple(dict.fromkeys(found))


def config_ends(config: Mapping[str, Any]) -> list[int]:
    """Return the ids of end tokens that a config file names.

    Raises:
        ConfigError: the id of an end token is not a whole number of at least 0.
    """
    found = text_config(config).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    for id in ids:
        if type(id) is not int or id < 0:
            raise ConfigError(
                f"policy.path: the policy's eos_token_id = {found!r} is not a token id; write whole numbers"
            )
    return ids


def tokenizer_end(folder: Path) -> list[int]:
    """Return a list with the id of the tokenizer's end token; the list is empty if the tokenizer has no end token or
    the token is not in the vocabulary.
    """
    name = read_token(folder, "eos_token")
    tokens = json.loads((folder / "tokenizer.json").read_text()) if name else {}
    added = {token["content"]: token["id"] for token in tokens.get("added_tokens") or ()}
    vocabulary = tokens.get("model", {}).get("vocab", {})
    found = added.get(name, vocabulary.get(name) if isinstance(vocabulary, Mapping) else None)
    return [] if found is None else [found]


def read_token(folder: Path, key: str) -> str | None:
    """Return the text of the token that the tokenizer's files name under `key`, such as "eos_token", or None."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / file
        found = json.loads(path.read_text()).get(key) if path.exists() else None
        if (name := found.get("content") if isinstance(found, Mapping) else found) is not None:
            return name if isinstance(name, str) else None
    return None


def write_end_tokens(folder: Path, ends: tuple[int, ...]) -> None:
    """Write the ids of end tokens into the policy folder's generation_config.json, unless it already has exactly these
    ids.
    """
    path = folder / GENERATION
    described = json.loads(path.read_text()) if path.exists() else {}
    told = ends[0] if len(ends) == 1 else list(ends)
    if described.get("eos_token_id") != told:
        path.write_text(json.dumps(described | {"eos_token_id": told}, indent=2))
