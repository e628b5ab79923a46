"""Reads a settings file, which sets environment variables and configuration keys for all runs of an installation. A
settings file is written by Terraform (`infra/terraform`) or by a user.

    [variables]                                     # environment variables of a command
    PREFECT_API_URL = "http://127.0.0.1:4200/api"
    [store]                                         # sections of a recipe, checked as a recipe's are
    uri = "s3://bucket/store"

Guarantees:
- A settings file may set only variables that rollflow or one of its libraries reads, and only keys of a recipe.
- A secret in a settings file is rejected, and its value is not shown. Secrets are the values of variables for secrets,
  and passwords in addresses.
- `--settings FILE` sets the variables, and then the keys of the recipe. The options `--set` override the settings file,
  and the settings file overrides the recipe.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollflow.flows.config import parse_config, read_toml
from rollflow.flows.registration.recipe_paths import anchor_paths
from rollflow.flows.services.reachability import redact
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.sections import SECRET_NAME, Section

SECTIONS = ("store", "cluster", "tracking")
FILES = (  # variables that name a file
    "AWS_CA_BUNDLE",
    "MLFLOW_TRACKING_SERVER_CERT_PATH",
    "PREFECT_API_SSL_CERT_FILE",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_TLS_CA_CERT",
    "RAY_TLS_SERVER_CERT",
    "RAY_TLS_SERVER_KEY",
)
VARIABLES = (
    *FILES,
    *("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_REGION"),
    *("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "TMPDIR"),
    *("MLFLOW_TRACKING_INSECURE_TLS", "PREFECT_API_TLS_INSECURE_SKIP_VERIFY"),
    *("PREFECT_API_URL", "PREFECT_PROFILE", "RAY_AUTH_MODE", "RAY_USE_TLS"),
    *("ROLLFLOW_HOME", "ROLLFLOW_LOG_FORMAT", "ROLLFLOW_STORE"),
)
# Environment variables that contain secrets although their names do not show it.
SECRETS = ("AWS_ACCESS_KEY_ID", "PREFECT_CLIENT_CUSTOM_HEADERS")


@dataclass(frozen=True, slots=True)
class Settings:
    """The content of a settings file: environment variables, configuration keys in the form of `--set` (`overrides`),
    and the default configuration with these keys.
    """

    variables: Mapping[str, str]
    overrides: tuple[str, ...]
    config: RunConfig


def load_settings(path: Path) -> Settings:
    """Read and check a settings file of an installation.

    Relative paths in the sections `[store]`, `[cluster]` and `[tracking]` are relative to the folder of the settings
    file; values in `[variables]` stay as they are.

    Raises:
        ConfigError: the settings file is invalid, or contains a secret.
    """
    tree = read_toml(path, "settings file")
    variables = tree.pop("variables", {})
    try:
        _check_sections(tree)
        _check_variables(variables)
        _check_addresses(tree)
        anchor_paths(tree, path.parent.resolve())
        config = parse_config(tree)
    except ConfigError as error:
        raise ConfigError(f"settings file {str(path)!r}: {error}") from None
    return Settings(variables, tuple(_overrides(tree, config)), config)


def _check_sections(tree: Mapping[str, Any]) -> None:
    for name, section in tree.items():
        if name not in SECTIONS:
            raise ConfigError(
                f"{name} is not a section of a settings file, which may contain only [variables], [store], "
                f"[cluster] and [tracking]; remove {name}"
            )
        if not isinstance(section, dict):
            raise ConfigError(
                f"{name} must be a section of the settings file, but it is set to a value; write [{name}], and "
                "its keys below"
            )


def _check_variables(variables: object) -> None:
    if not isinstance(variables, dict):
        raise ConfigError(
            "variables must be a section of the settings file, but it is set to a value; write [variables], and "
            "the names below"
        )
    for name, value in variables.items():
        key = f"variables.{name}"
        if name not in VARIABLES:  # The error message does not show the variable's value, which may be a secret.
            if name in SECRETS or SECRET_NAME.search(name):
                instead = f"name its file in {name}_PATH" if f"{name}_PATH" in FILES else "export it before the command"
                raise ConfigError(
                    f"{key} is a secret, which a settings file must not contain; remove it, and {instead}"
                )
            close = difflib.get_close_matches(name, VARIABLES, n=1)
            cure = f"did you mean {close[0]}?" if close else "remove it"
            raise ConfigError(f"{key}: rollflow reads no environment variable of this name; {cure}")
        if not isinstance(value, str):
            raise ConfigError(f'{key} = {json.dumps(value, default=str)} is not text; write "{value}"')
        _check_address(key, value)


def _check_addresses(tree: Mapping[str, Any], prefix: str = "") -> None:
    for name, value in tree.items():
        if isinstance(value, dict):
            _check_addresses(value, f"{prefix}{name}.")
        elif isinstance(value, str):
            _check_address(f"{prefix}{name}", value)


def _check_address(key: str, value: str) -> None:
    """Reject an address that contains a password."""
    try:
        parts = urlsplit(value)
    except ValueError:
        return
    if parts.password is not None:
        raise ConfigError(
            f"{key} = {redact(value)!r} has a password, which a settings file must not contain; remove the password"
        )


def _overrides(tree: Mapping[str, Any], section: Section, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a configuration tree as `key=value` for `--set`. A table of user-defined names, such as
    `labels`, is yielded as one value.
    """
    for name, value in tree.items():
        below = getattr(section, name)
        if isinstance(below, Section):
            yield from _overrides(value, below, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={_in_toml(value)}"


def _in_toml(value: object) -> str:
    """Return a value as one line of TOML. JSON and TOML write strings and numbers alike, except for the character
    DEL.
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_in_toml(key)} = {_in_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_in_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
