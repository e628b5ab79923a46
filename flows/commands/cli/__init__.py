"""Runs the `rollflow` command line: parses the options, runs the command, and prints any error as one sentence to
standard error. Each command's module imports the libraries that the command needs, so that `rollflow --help` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import select
import sys
from collections.abc import Sequence
from typing import TextIO

from rollflow.flows.commands.cli.exit_codes import BAD_INPUT, FAILED, INTERRUPTED
from rollflow.flows.commands.cli.options import parse_options
from rollflow.storage.errors import ConfigError, RollflowError

WITH_SERVICES = ("run", "resume", "sweep", "serve")  # commands that start services
STDERR = 2  # file descriptor of standard error, the highest of the standard streams


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, call the function `command(options)` of the command's module, and return the exit code.

    If the process that reads the output has ended, as in `rollflow keys | head`, the command ends without an error
    message.
    """
    _open_streams()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # Flush here, because an error while the interpreter exits could not be caught.
    except BrokenPipeError:
        gone = [stream for stream in (sys.stdout, sys.stderr) if _is_reader_gone(stream)]
        if not gone:  # The broken pipe does not belong to a standard stream.
            raise
        for stream in gone:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return FAILED


def _run(arguments: Sequence[str] | None) -> int:
    _escape_unprintable()
    try:
        options = parse_options(sys.argv[1:] if arguments is None else arguments)
        _prepare_environment(options)
        return int(importlib.import_module(f"rollflow.flows.commands.{options.verb}").command(options))
    except ConfigError as error:
        print(f"rollflow: {error}", file=sys.stderr)
        return BAD_INPUT
    except RollflowError as error:
        print(f"rollflow: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("rollflow: stopped", file=sys.stderr)
        return INTERRUPTED


def _prepare_environment(options: argparse.Namespace) -> None:
    """Apply the installation's settings file, if the user gave one. Commands that start services also check the
    environment variables.
    """
    from rollflow.flows.locations import run_home
    from rollflow.flows.services.variables import bypass_proxies, check_variables, create_home, give_home

    bypass_proxies(os.environ)
    if getattr(options, "settings", None):
        _apply_settings(options)
    if options.verb in WITH_SERVICES and not getattr(options, "end", False):
        check_variables()
        create_home(run_home())
        give_home(os.environ, run_home())


def _apply_settings(options: argparse.Namespace) -> None:
    """Set the environment variables of the settings file, and add the file's configuration keys to the overrides unless
    `--set` gives the same key.
    """
    from rollflow.flows.commands.cli.settings import load_settings

    options.settings = load_settings(options.settings)
    os.environ.update(options.settings.variables)
    given = {override.partition("=")[0].strip() for override in options.set}
    own = [override for override in options.settings.overrides if override.partition("=")[0] not in given]
    options.set = [*own, *options.set]


def _open_streams() -> None:
    """Open the null device for each standard stream that is closed, so that no file that is opened later becomes a
    standard stream.
    """
    while (null := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(null)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _escape_unprintable() -> None:
    """Make the standard streams escape characters that the terminal's encoding cannot represent. Services that this
    process starts write to files, so they are not affected.
    """
    os.environ.pop("PYTHONIOENCODING", None)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _is_reader_gone(stream: TextIO) -> bool:
    """Return whether the process that reads the stream's pipe has ended."""
    try:
        polled = select.poll()
        polled.register(stream, 0)
    except (OSError, ValueError):  # The standard stream has no file descriptor, or is closed.
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in polled.poll(0))
