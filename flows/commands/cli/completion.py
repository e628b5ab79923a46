"""Implements `rollflow --completion SHELL`: prints a script with which the shell completes commands, options and
files.
"""

from __future__ import annotations

import argparse

SCRIPT = """_rollflow() {{
  local words
  case "$COMP_CWORD:${{COMP_WORDS[1]}}" in
    1:*) words="{commands} {options}" ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _rollflow rollflow
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script for bash or zsh. The zsh script uses zsh's support for bash completion."""
    (commands,) = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    words = {verb: _options(command) for verb, command in commands.items()} | {"--completion": "bash zsh"}
    cases = [f'    *:{verb}) words="{completed}" ;;' for verb, completed in words.items()]
    script = SCRIPT.format(commands=" ".join(commands), options=_options(parser), cases="\n".join(cases))
    return (ZSH if shell == "zsh" else "") + script


def _options(parser: argparse.ArgumentParser) -> str:
    return " ".join(name for name in parser._option_string_actions if name.startswith("--"))
