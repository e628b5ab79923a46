"""`rollflow init FILE`: a recipe to begin with, which says of every key what it is by default and what it means."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from rollflow.flows.commands import OK
from rollflow.flows.commands._toml_edit import to_toml
from rollflow.flows.config import sections_of
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.sections import Section

HEAD = """# A recipe. What begins with "#:" is a key as it is by default: take these two characters away to set it.
# `rollflow check` says what is wrong with it, `rollflow keys` lists the keys of all other kinds.
"""


def command(options: argparse.Namespace) -> int:
    """Write it; a file that is there stays."""
    try:
        with options.file.open("x", encoding="utf-8") as file:
            file.write(commented(options.file.stem))
    except FileExistsError:
        raise ConfigError(f"{str(options.file)!r} is there already; give another name") from None
    except OSError as error:
        raise ConfigError(f"{str(options.file)!r} cannot be written: {error.strerror}; give another file") from None
    print(f"{options.file}: change what you like; then `rollflow run {options.file}`")
    return OK


def commented(name: str) -> str:
    """The recipe that says nothing but a name and the default's prompts; all else is in comments."""
    config = RunConfig()
    prompts = to_toml({"prompts": [source.model_dump(mode="json") for source in config.prompts]})
    return "\n".join([HEAD, f"name = {json.dumps(name)}", *_section(config, ""), "", prompts])


def _section(section: Section, path: str) -> Iterator[str]:
    """Its own keys, then the sections below it, each under its heading."""
    below: list[tuple[str, Section]] = []
    for name, info in type(section).model_fields.items():
        value, meaning = getattr(section, name), info.description or ""
        if isinstance(value, Section):
            below.append((f"{path}{name}", value))
        elif value is None:
            what = f"[{path}{name}]" if list(sections_of(info.annotation)) else name
            yield f"# {what} is not set" + (f": {meaning}" if meaning else "")
        elif f"{path}{name}" not in ("name", "prompts"):
            yield f"#: {name} = {_toml(value)}  # {meaning}"
    for place, one in below:
        yield from ("", f"[{place}]", *_section(one, f"{place}."))


def _toml(value: Any) -> str:
    """As a recipe has it: JSON, but for tables that hold something, of which there are none among the defaults."""
    return json.dumps(value, ensure_ascii=False)
