"""Implements `rollflow init FILE`, which writes a new recipe. Comments in the recipe give the default and the meaning
of every key.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from rollflow.flows.commands.cli.exit_codes import OK
from rollflow.flows.commands.cli.toml_edit import to_toml
from rollflow.flows.config_keys import sections_of
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.sections import Section

HEAD = """# A recipe. A line that begins with "#:" is a key with its default: remove these two characters to set it.
# `rollflow check` says what is wrong with the recipe, `rollflow keys` lists the keys of all other kinds.
"""


def command(options: argparse.Namespace) -> int:
    """Write a new recipe to a file; never overwrite an existing file."""
    try:
        with options.file.open("x", encoding="utf-8") as file:
            file.write(build_recipe(options.file.stem))
    except FileExistsError:
        raise ConfigError(f"{str(options.file)!r} exists already; give another name") from None
    except OSError as error:
        raise ConfigError(f"{str(options.file)!r} cannot be written: {error.strerror}; give another file") from None
    print(f"{options.file} is written; change its keys, then start a run: `rollflow run {options.file}`")
    return OK


def build_recipe(name: str) -> str:
    """Return the text of a new recipe. The recipe sets only the name and the default prompts, and lists all other keys
    as comments.
    """
    config = RunConfig()
    prompts = to_toml({"prompts": [source.model_dump(mode="json") for source in config.prompts]})
    return "\n".join([HEAD, f"name = {json.dumps(name)}", *_section_lines(config, ""), "", prompts])


def _section_lines(section: Section, path: str) -> Iterator[str]:
    """Yield the recipe lines of a configuration section: first the section's own keys, then its subsections, each with
    a heading.
    """
    below: list[tuple[str, Section]] = []
    for name, info in type(section).model_fields.items():
        value, meaning = getattr(section, name), info.description or ""
        if isinstance(value, Section):
            below.append((f"{path}{name}", value))
        elif value is None:
            what = f"[{path}{name}]" if list(sections_of(info.annotation)) else name
            yield f"# {what} is not set" + (f": {meaning}" if meaning else "")
        elif f"{path}{name}" not in ("name", "prompts"):
            yield f"#: {name} = {_to_toml(value)}  # {meaning}"
    for place, subsection in below:
        yield from ("", f"[{place}]", *_section_lines(subsection, f"{place}."))


def _to_toml(value: Any) -> str:
    """Return a value in TOML. JSON text is valid TOML here, because no default is a non-empty table."""
    return json.dumps(value, ensure_ascii=False)
