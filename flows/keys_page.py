"""Writes `docs/configuration.md`, a Markdown page of all configuration keys of a recipe and of a hardware file. A test
checks that the page agrees with the configuration classes.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from rollflow.flows.allowed_values import UNSET, default_of, describe_allowed
from rollflow.flows.config_keys import is_table, sections_of
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.sections import Section
from rollflow.tasks.simulation.hardware import Hardware

HEAD = """# Configuration

Every key of a recipe, and below them every key of a hardware file. `rollflow keys --markdown` made this page from the
config models; `tests/test_docs.py` fails when it is out of date. `rollflow keys` prints the same on a terminal.

- A recipe is one TOML file. Every key may be left out, unless its default is *required*.
- `rollflow run RECIPE --set train.learning_rate=1e-4` changes one key; of a list, name the position:
  `--set prompts.0.share=2`.
- `rollflow check RECIPE` reports every error, with one sentence for each key: the key, the value, the fix.
- Where a section has a `kind`, it decides which other keys it has.
- A recipe with the earlier name of a key is refused with the name of today. Recorded runs keep the names they have.
"""


def keys_page() -> str:
    """Return the page of all configuration keys as Markdown."""
    lines = [HEAD, "## Recipes", "", *_section_lines(RunConfig, "", RunConfig())]
    lines += ["## Hardware files", "", *_section_lines(Hardware, "", Hardware())]
    return "\n".join(lines).rstrip() + "\n"


def _section_lines(section: type[Section], path: str, default: Any) -> Iterator[str]:
    """Yield the Markdown lines of a configuration section: a table of the section's own keys, then its subsections."""
    plain: list[tuple[str, FieldInfo]] = []
    nested: list[tuple[str, FieldInfo]] = []
    for name, info in section.model_fields.items():
        if not (name == "kind" and _fixed_kind(section)):  # The heading of the section names its kind already.
            (nested if list(sections_of(info.annotation)) else plain).append((name, info))
    yield from ("| key | value | default | meaning |", "|---|---|---|---|")
    yield from (_row(name, info) for name, info in plain)
    yield ""
    written: dict[tuple[type[Section], ...], str] = {}
    for name, info in nested:
        kinds = tuple(sections_of(info.annotation))
        extra = info.json_schema_extra
        same = extra.get("keys_of") if isinstance(extra, dict) else None
        if is_table(info) and (same or kinds in written):
            names = " or ".join(f'"{_fixed_kind(kind)}"' for kind in kinds if same and _fixed_kind(kind))
            which = f"`[{same}]` with `kind` {names}" if same else f"`[{written[kinds]}]`"
            what = f"{info.description}. The keys are those of {which}."
            yield from (
                f"### `[{path}.{name}.NAME]`" if path else f"### `[{name}.NAME]`",
                "",
                f"{what[0].upper()}{what[1:]}",
                "",
            )
            continue
        written[kinds] = name
        for kind in kinds:
            given = default if isinstance(default, section) else section.model_construct()
            yield from _headed_lines(kind, info, f"{path}.{name}" if path else name, getattr(given, name, ...))


def _headed_lines(section: type[Section], info: FieldInfo, path: str, default: Any) -> Iterator[str]:
    """Yield the Markdown lines of a configuration section with its heading. If a configuration section has several
    kinds, the heading names the kind.
    """
    if is_table(info):
        path = f"{path}.NAME"
    heading = f"`[[{path}]]`" if get_origin(info.annotation) is tuple else f"`[{path}]`"
    kind = _fixed_kind(section)
    yield from (f"### {heading} with `kind = {json.dumps(kind)}`" if kind else f"### {heading}", "")
    if section.__doc__:
        yield from (inspect.cleandoc(section.__doc__), "")
    if default is None:
        yield from ("Left out by default.", "")
    elif kind and isinstance(default, section):
        yield from ("This kind is the default.", "")
    yield from _section_lines(section, path, default)


def _fixed_kind(section: type[Section]) -> str | None:
    """Return the kind of a configuration section that has only one kind. Return None if the user chooses the kind of
    the section.
    """
    field = section.model_fields.get("kind")
    choices = get_args(field.annotation) if field else ()
    return choices[0] if len(choices) == 1 else None


def _row(name: str, info: FieldInfo) -> str:
    preset = "*required*" if info.is_required() else default_of(info)
    shown = preset if preset in (UNSET, "*required*") else f"`{preset}`"
    cells = (f"`{name}`", describe_allowed(info), shown, info.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
