"""Provides an argument parser whose help lists the commands in groups."""

from __future__ import annotations

import argparse
from typing import Any


class HelpFormat(argparse.HelpFormatter):
    """Formats the help text: wraps the lines of a description, except indented lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = super()._fill_text
        return "\n".join(
            line if line.startswith(" ") or not line else wrap(line, width, indent) for line in text.splitlines()
        )


class _Parser(argparse.ArgumentParser):
    """Parses the arguments of one command. Options may stand between positional arguments, as in `rollflow inspect one
    --json 7`.
    """

    _mixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._mixed:  # `parse_known_intermixed_args` makes this call
            return super().parse_known_args(args, namespace)
        self._mixed = True
        return self.parse_known_intermixed_args(args, namespace)


class Commands:
    """The subcommands of a parser. `lines` contains the list of commands that the help shows, in groups."""

    def __init__(self, top: argparse.ArgumentParser) -> None:
        self._parsers = top.add_subparsers(
            required=True, metavar="COMMAND", help=argparse.SUPPRESS, parser_class=_Parser, prog="rollflow"
        )
        self.lines: list[str] = []

    def begin_group(self, title: str) -> None:
        """Begin a new group of commands in the help, under this title."""
        self.lines += ["", title]

    def add(self, verb: str, summary: str, more: str, example: str) -> argparse.ArgumentParser:
        """Add a command. The help of `rollflow` shows the command's `summary`. The help of the command itself shows
        `summary`, `more` and `example`.
        """
        self.lines.append(f"  {verb:<9} {summary}")
        parser: argparse.ArgumentParser = self._parsers.add_parser(
            verb,
            description=f"{summary}. {more}",
            epilog=f"example:\n  {example}",
            formatter_class=HelpFormat,
        )
        parser.set_defaults(verb=verb)
        return parser


class PrintVersion(argparse.Action):
    """Prints rollflow's version. The version is looked up only on request, because the lookup takes time."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"rollflow {version('rollflow')}")
        parser.exit()


class PrintCompletion(argparse.Action):
    """Prints the completion script for a shell."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, option: object = None) -> None:
        from rollflow.flows.commands.cli.completion import completion_script

        print(completion_script(parser, shell), end="")
        parser.exit()
