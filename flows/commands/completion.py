"""`rollflow completion SHELL`: prints the script with which a shell completes verbs, options and files."""

from __future__ import annotations

import argparse

from rollflow.flows.commands import OK
from rollflow.flows.commands.options import build_parser

SCRIPT = """_rollflow() {{
  local words
  case "$COMP_CWORD:${{COMP_WORDS[1]}}" in
    1:*) words="{verbs}" ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _rollflow rollflow
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def command(options: argparse.Namespace) -> int:
    """Print the completion script."""
    print((ZSH if options.shell == "zsh" else "") + completion_script(), end="")
    return OK


def completion_script() -> str:
    """Return the script for bash, and for zsh with bash completion. The shell completes files if nothing else fits."""
    (verbs,) = (action.choices for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    cases = [f'    *:{verb}) words="{_options(one)}" ;;' for verb, one in verbs.items()]
    return SCRIPT.format(verbs=" ".join(verbs), cases="\n".join(cases))


def _options(verb: argparse.ArgumentParser) -> str:
    choices = (str(choice) for action in verb._actions for choice in action.choices or ())
    return " ".join([*(name for name in verb._option_string_actions if name.startswith("--")), *choices])
