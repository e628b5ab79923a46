"""Removes secrets from a run's configuration before the configuration is shown: user names, passwords and queries in
addresses, and keys whose names indicate a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollflow.flows.services.reachability import redact

LENGTH = 6000  # Largest number of characters of a logged value. MLflow rejects longer values.
SECRET_WORDS = {
    *("secret", "secrets", "token", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "apikey"),
    *("auth", "authorization", "bearer"),
}
SECRET_PAIRS = ("api_key", "access_key", "private_key", "account_key")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a configuration tree as a flat mapping from dotted keys to texts, without secrets."""
    flat: dict[str, str] = {}
    for name, value in without_secrets(tree).items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{key}.")
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            flat |= flatten({str(position): item for position, item in enumerate(value)}, f"{key}.")
        else:
            flat[key] = str(value)[:LENGTH]
    return flat


def without_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the configuration tree without secrets."""
    return {name: _safe(value) for name, value in tree.items() if not names_secret(str(name))}


def _safe(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        return [_safe(item) for item in value]
    return redact(value) if isinstance(value, str) and "://" in value else value


def names_secret(key: str) -> bool:
    """Return whether the name of a configuration key indicates a secret. `api_token` does, and `seconds_per_token` does
    not.
    """
    lower = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_").replace("per_token", "")
    return bool(SECRET_WORDS & set(re.split(r"[^a-z0-9]+", lower))) or any(pair in lower for pair in SECRET_PAIRS)
