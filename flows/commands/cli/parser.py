"""The parser of a command line whose help lists its commands in groups."""

from __future__ import annotations

import argparse
from typing import Any


class HelpFormat(argparse.HelpFormatter):
    """Wraps descriptions, but keeps indented lines as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = super()._fill_text
        return "\n".join(
            line if line.startswith(" ") or not line else wrap(line, width, indent) for line in text.splitlines()
        )


class _Parser(argparse.ArgumentParser):
    """Parses a command's words. Options may stand between arguments: `inspect one --json 7`."""

    _mixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._mixed:  # the call by `parse_known_intermixed_args`
            return super().parse_known_args(args, namespace)
        self._mixed = True
        return self.parse_known_intermixed_args(args, namespace)


class Commands:
    """The commands of a parser; `lines` lists them in groups, for the help."""

    def __init__(self, top: argparse.ArgumentParser) -> None:
        self._parsers = top.add_subparsers(
            required=True, metavar="COMMAND", help=argparse.SUPPRESS, parser_class=_Parser, prog="rollflow"
        )
        self.lines: list[str] = []

    def begin_group(self, title: str) -> None:
        """List the next commands below this title."""
        self.lines += ["", title]

    def add(self, verb: str, summary: str, more: str, example: str) -> argparse.ArgumentParser:
        """Add a command. The list of commands shows the summary; the command's own help shows all three texts."""
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
    """Prints the version, which is looked up only on request."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"rollflow {version('rollflow')}")
        parser.exit()


class PrintCompletion(argparse.Action):
    """Prints the completion script of a shell."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, option: object = None) -> None:
        from rollflow.flows.commands.cli.completion import completion_script

        print(completion_script(parser, shell), end="")
        parser.exit()
