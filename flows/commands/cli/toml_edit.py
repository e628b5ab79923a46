"""Writes configuration values as TOML, either into a new document, or into an existing document whose comments are
kept.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import tomlkit
from tomlkit.container import Container
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Comment, Item, Null, Table, Whitespace


def to_toml(tree: Mapping[str, Any]) -> str:
    """Return a configuration tree as a TOML document, without the keys whose value is None."""
    return tomlkit.dumps(_without_none(tree))


def rewrite_toml(text: str, tree: Mapping[str, Any]) -> str:
    """Return the TOML document `text` with the values of `tree`. Comments of the document, and the layout of its
    unchanged parts, are kept.

    Keys of the document are removed if `tree` does not have them, or if their value in `tree` is None. If the layout of
    the document cannot be kept, a new document without comments is returned. The returned document, parsed as TOML,
    always equals `tree` without its None values.
    """
    wanted = _without_none(tree)
    try:
        document = tomlkit.parse(text)
        headings = _detach_comments(document)
        _update_table(document, wanted)
        for table, above in headings:
            table.trivia.indent = above + table.trivia.indent
        found = tomlkit.dumps(document)
        return found if tomllib.loads(found) == wanted else to_toml(wanted)
    # tomlkit cannot edit values below a dotted key, or in a section that is split into two places.
    except (TOMLKitError, LookupError, tomllib.TOMLDecodeError):
        return to_toml(wanted)


def _update_table(node: MutableMapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if not (key in node and _edit(node[key], value)):
            node[key] = value
    # Keys are deleted last, because deleting the last key of a split section deletes its heading.
    for key in [key for key in node if key not in wanted]:
        del node[key]


def _edit(found: Any, wanted: Any) -> bool:
    """Change the TOML value `found` in place until it equals `wanted`; return whether this was possible."""
    if isinstance(found, MutableMapping) and isinstance(wanted, Mapping):
        _update_table(found, wanted)
        return True
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        return all(_edit(one, other) for one, other in zip(found, wanted, strict=True))
    return bool(found == wanted)


def _detach_comments(document: Container) -> list[tuple[Table, str]]:
    """Remove the comments above each heading, and return them with the heading's table. tomlkit would assign such a
    comment to the section above the heading.
    """
    found: list[tuple[Table, str]] = []
    above: list[tuple[Container, int]] = []
    for body, index, item in _iterate_items(document):
        if isinstance(item, Table):
            found.append((item, "".join(other.body[at][1].as_string() for other, at in above)))
            for other, at in above:
                other.body[at] = (None, Null())
        above = [*above, (body, index)] if isinstance(item, (Comment, Whitespace)) else []
    return found


def _iterate_items(body: Container) -> Iterator[tuple[Container, int, Item]]:
    """Yield the items of the TOML document in the order of its lines, without tables that have no heading."""
    for index, (key, item) in enumerate(list(body.body)):
        for part in item.body if isinstance(item, AoT) else [item]:
            shown = not (isinstance(part, Table) and (part.is_super_table() or (key is not None and key.is_dotted())))
            if shown:
                yield body, index, part
            if isinstance(part, Table):
                yield from _iterate_items(part.value)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, (list, tuple)) else value
