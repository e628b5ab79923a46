"""Checks rules of the command line that argparse cannot express, for example that one option excludes another."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from rollflow.storage.errors import ConfigError

EARLIER: Mapping[str, str] = {
    "cancel": "stop --now",
    "completion": "--completion bash",
    "down": "serve --end",
    "list": "status --all",
    "logs": "log --processes",
    "repair": "audit --repair",
    "simulate": "plan RECIPE --hardware FILE",
    "top": "status --watch",
    "up": "serve --background",
}
# Maps a command and one of its options to the options that this option excludes.
EXCLUDED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "status": {"watch": ("all", "json"), "all": ("run",)},
    "audit": {"repair": ("deep", "anchor", "json")},
    "replay": {"all": ("version",)},
    "rejudge": {"all": ("version", "last"), "last": ("version",)},
    "serve": {
        "end": ("background", "prefect_port", "mlflow_port", "ray_port", "database"),
        "sandboxes": ("background", "end", "prefect_port", "mlflow_port", "ray_port", "database"),
    },
    "plan": {"gpus": ("from_run", "versions", "plot", "save_hardware", "store")},
}
# Maps a command and an option to the options that have no effect without that option.
NEEDED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "audit": {"repair": ("yes",)},
    "doctor": {"cluster": ("set",)},
    "play": {"endpoint": ("model", "token_env"), "run": ("version", "store")},
    "serve": {"sandboxes": ("set", "host", "port", "token_file", "no_token", "at_once", "queue", "live")},
    "plan": {
        "gpus": ("alpha", "quick", "best", "max_bias", "max_waste", "write", "cost"),
        "from_run": ("save_hardware", "store"),
    },
}
SECOND = {
    "inspect": "what",
    "replay": "version",
    "rejudge": "version",
}  # Maps a command to its argument after RUN. A user may give this argument and leave out RUN.


def check_earlier_name(arguments: Sequence[str]) -> None:
    """Reject an old name of a renamed command, with an error that gives the new name."""
    if arguments and (new := EARLIER.get(arguments[0])):
        raise ConfigError(f"`rollflow {arguments[0]}` was renamed; write `rollflow {new}`")


def move_version(options: argparse.Namespace) -> None:
    """Move a number that the user gave in place of a run to the argument for a policy version or trajectory. The
    command then uses the newest run.
    """
    second = SECOND.get(options.verb)
    if second is None or not options.run or getattr(options, second) is not None:
        return
    # The module is imported late, because importing pydantic takes time.
    from rollflow.tasks.runtime.names import is_number

    if is_number(options.run):
        setattr(options, second, options.run)
        options.run = None


def check_combination(options: argparse.Namespace) -> None:
    """Reject two options that exclude each other, and reject an option that is given without another option that it
    needs.
    """
    for option, excluded in EXCLUDED.get(options.verb, {}).items():
        for other in excluded:
            if _is_given(options, option) and _is_given(options, other):
                raise ConfigError(f"{_name(option)} and {_name(other)} exclude each other; leave one of them out")
    for option, others in NEEDED.get(options.verb, {}).items():
        for other in others:
            if _is_given(options, other) and not _is_given(options, option):
                raise ConfigError(f"{_name(other)} has an effect only with {_name(option)}; add {_name(option)}")


def _is_given(options: argparse.Namespace, name: str) -> bool:
    value = getattr(options, name)
    return value is not None and value is not False and value != []


def _name(option: str) -> str:
    return option.upper() if option in ("run", "version") else f"--{option.replace('_', '-')}"
