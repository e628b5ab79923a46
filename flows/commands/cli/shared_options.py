"""Defines the command-line arguments that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_recipe_arguments(command: argparse.ArgumentParser) -> None:
    """Add two arguments to the parser: the path of a recipe, and `--set`."""
    command.add_argument("recipe", type=Path, metavar="RECIPE", help="path of the recipe (TOML)")
    add_set_argument(command, "set a key of the recipe to another value, e.g. train.learning_rate=1e-4")


def add_set_argument(command: argparse._ActionsContainer, meaning: str, value: str = "KEY=VALUE") -> None:
    """Add the option `--set` to the parser, with the help text `meaning`."""
    command.add_argument("--set", action="append", default=[], metavar=value, help=meaning)


def add_settings_argument(command: argparse.ArgumentParser) -> None:
    """Add the option `--settings`, which names the settings file of an installation."""
    given = "settings file with the variables, store, cluster and tracking of an installation; see docs/cluster.md"
    command.add_argument("--settings", type=Path, metavar="FILE", help=given)


def add_run_argument(command: argparse.ArgumentParser) -> None:
    """Add two optional arguments to the parser: a run, and the store that contains the run."""
    command.add_argument("run", nargs="?", metavar="RUN", help="id, path or URI of a run; default: the newest run")
    add_store_argument(command, "the run")


def add_store_argument(command: Any, held: str) -> None:
    """Add the option `--store` to the parser. `held` says in the help what the store contains."""
    command.add_argument(
        "--store", help=f"object store that contains {held}; default: ROLLFLOW_STORE, or a folder in the run home"
    )


def parse_positive(text: str) -> int:
    """Parse a whole number above 0, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number above 0")
    return number
