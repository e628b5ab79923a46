"""Implements `rollflow keys`, which prints every configuration key of a recipe, with its default and meaning."""

from __future__ import annotations

import argparse
import json

from rollflow.flows.commands.cli.exit_codes import OK
from rollflow.flows.config_keys import describe_keys, key_values
from rollflow.flows.keys_page import keys_page
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.hardware import Hardware


def command(options: argparse.Namespace) -> int:
    """Print the configuration keys of a recipe or of a hardware file."""
    if options.markdown:
        print(keys_page(), end="")
        return OK
    section = Hardware if options.hardware else RunConfig
    if options.json:
        print(json.dumps(key_values(section)))
        return OK
    for line in describe_keys(section):
        print(line)
    return OK
