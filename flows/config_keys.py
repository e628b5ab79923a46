"""Lists the configuration keys of a recipe, with their defaults, allowed values and meanings. All of them are read from
the configuration's types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from rollflow.flows.allowed_values import default_of, describe_allowed
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.sections import Section


def list_kinds(section: type[Section]) -> tuple[object, ...]:
    """Return the kinds or presets that users can choose for a configuration section, or an empty tuple if there is no
    choice.
    """
    field = section.model_fields.get("kind")
    return get_args(field.annotation) if field else ()


def describe_keys(section: type[Section] = RunConfig) -> list[str]:
    """Return a line of text for each configuration key: its name, default, allowed values and meaning."""
    lines = []
    for one in key_values(section):
        value = "" if one["required"] else f" = {one['default']}"
        lines.append(f"{one['key']}{value}  # {one['allowed']}" + (f": {one['meaning']}" if one["meaning"] else ""))
    return list(dict.fromkeys(lines))


def key_values(section: type[Section] = RunConfig) -> list[dict[str, Any]]:
    """Return each configuration key with its default, allowed values and meaning. Defaults are written as TOML."""
    return [
        {
            "key": name,
            "required": info.is_required(),
            "default": None if info.is_required() else default_of(info),
            "allowed": describe_allowed(info),
            "meaning": info.description or "",
        }
        for name, info in list_fields(section)
        if not list(sections_of(info.annotation))
    ]


def list_keys(section: type[Section]) -> Iterable[str]:
    """Return all dotted keys below a configuration section, including the keys of every kind of section."""
    return (name for name, _ in list_fields(section))


def has_key(section: type[Section], key: str) -> bool:
    """Return whether some kind of a configuration section has this dotted key. Parts of a dotted key may be list
    positions and user-defined names in tables.
    """
    parts = [part for part in key.split(".") if not part.isdecimal()]
    named = {".".join([*parts[:place], "NAME", *parts[place + 1 :]]) for place in range(len(parts))}
    return not {".".join(parts), *named}.isdisjoint(list_keys(section))


def list_fields(section: type[Section], prefix: str = "") -> Iterable[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        yield prefix + name, info
        for kind in sections_of(info.annotation):
            yield from list_fields(kind, f"{prefix}{name}." + ("NAME." if is_table(info) else ""))


def is_table(info: FieldInfo) -> bool:
    """Return whether a configuration field is a table with user-defined names, such as `rewards`."""
    return get_origin(info.annotation) is dict


def sections_of(annotation: Any) -> Iterable[type[Section]]:
    """Yield the section types that a configuration field may have, such as one type for each kind of inference
    engine.
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from sections_of(part)


def is_list(info: FieldInfo) -> bool:
    """Return whether a configuration field is a list, such as `prompts`."""
    return get_origin(info.annotation) in (list, tuple)


def usable_keys(section: type[Section], tree: object, prefix: str = "") -> Iterable[tuple[str, FieldInfo]]:
    """Yield the keys that a configuration tree may have. Where a section has several kinds, only the keys of the chosen
    kind are yielded.
    """
    for name, info in section.model_fields.items():
        yield prefix + name, info
        given = tree.get(name) if isinstance(tree, Mapping) else None
        if is_table(info):
            below = given if isinstance(given, Mapping) else {}
            places = [(f"{prefix}{name}.{key}.", item) for key, item in below.items()]
        elif isinstance(given, list) and is_list(info):
            places = [(f"{prefix}{name}.{position}.", item) for position, item in enumerate(given)]
        else:
            places = [(f"{prefix}{name}.", given)]
        for place, item in places:
            for chosen in _sections_in_use(info, item):
                yield from usable_keys(chosen, item, place)


def _sections_in_use(info: FieldInfo, given: object) -> list[type[Section]]:
    """Return the section types that a field of a configuration tree can have. If the tree or the default chooses a
    kind, only the type of that kind is returned.
    """
    sections = list(sections_of(info.annotation))
    kind = given.get("kind") if isinstance(given, Mapping) else None
    kind = kind if kind is not None else getattr(info.default, "kind", None)
    return [one for one in sections if kind in list_kinds(one)] or sections
