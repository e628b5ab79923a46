"""TOML, written: a tree as a document, or a person's document with other values and all of its comments."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import tomlkit
from tomlkit.container import Container
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Comment, Item, Null, Table, Whitespace


def to_toml(tree: Mapping[str, Any]) -> str:
    """A document; keys without a value (None) are left out."""
    return tomlkit.dumps(_without_none(tree))


def rewritten(text: str, tree: Mapping[str, Any]) -> str:
    """The document `text` with the values of `tree`: comments, and the layout of what stays equal, are kept.

    Keys that `tree` does not have, or has as None, are removed. A document whose layout cannot be kept is written anew,
    without its comments: what is read back is always `tree`.
    """
    wanted = _without_none(tree)
    try:
        document = tomlkit.parse(text)
        headings = _take_from_above(document)
        _become(document, wanted)
        for table, above in headings:
            table.trivia.indent = above + table.trivia.indent
        found = tomlkit.dumps(document)
        return found if tomllib.loads(found) == wanted else to_toml(wanted)
    except (TOMLKitError, LookupError, tomllib.TOMLDecodeError):  # below a dotted key, in a section in two places
        return to_toml(wanted)


def _become(node: MutableMapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if not (key in node and _edited(node[key], value)):
            node[key] = value
    # Last: a section in two places loses its heading with its last key.
    for key in [key for key in node if key not in wanted]:
        del node[key]


def _edited(found: Any, wanted: Any) -> bool:
    """Whether `found` is, or could be brought to, `wanted` where it stands."""
    if isinstance(found, MutableMapping) and isinstance(wanted, Mapping):
        _become(found, wanted)
        return True
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        return all(_edited(one, other) for one, other in zip(found, wanted, strict=True))
    return bool(found == wanted)


def _take_from_above(document: Container) -> list[tuple[Table, str]]:
    """Take out what stands above each heading: to tomlkit it ends the section before, and new keys come after it."""
    found: list[tuple[Table, str]] = []
    above: list[tuple[Container, int]] = []
    for body, index, item in _in_order(document):
        if isinstance(item, Table):
            found.append((item, "".join(other.body[at][1].as_string() for other, at in above)))
            for other, at in above:
                other.body[at] = (None, Null())
        above = [*above, (body, index)] if isinstance(item, (Comment, Whitespace)) else []
    return found


def _in_order(body: Container) -> Iterator[tuple[Container, int, Item]]:
    """What stands in the document, line by line; of tables, those with a heading."""
    for index, (key, item) in enumerate(list(body.body)):
        for part in item.body if isinstance(item, AoT) else [item]:
            shown = not (isinstance(part, Table) and (part.is_super_table() or (key is not None and key.is_dotted())))
            if shown:
                yield body, index, part
            if isinstance(part, Table):
                yield from _in_order(part.value)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, (list, tuple)) else value
