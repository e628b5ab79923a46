"""Writes TOML: a tree as a new document, or an existing document with changed values and all of its comments."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import tomlkit
from tomlkit.container import Container
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Comment, Item, Null, Table, Whitespace


def to_toml(tree: Mapping[str, Any]) -> str:
    """Return the tree as a document; keys without a value (None) are left out."""
    return tomlkit.dumps(_without_none(tree))


def rewrite_toml(text: str, tree: Mapping[str, Any]) -> str:
    """Return the document `text` with the values of `tree`; comments and the layout of unchanged parts are kept.

    Keys that `tree` does not have, or has as None, are removed. If the layout cannot be kept, the document is written
    from scratch without comments. Reading the result always gives `tree`.
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
    # tomlkit fails for values below a dotted key, or in a section that is split in two
    except (TOMLKitError, LookupError, tomllib.TOMLDecodeError):
        return to_toml(wanted)


def _update_table(node: MutableMapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if not (key in node and _edit(node[key], value)):
            node[key] = value
    # Keys are deleted last, because a section that is split in two loses its heading with its last key.
    for key in [key for key in node if key not in wanted]:
        del node[key]


def _edit(found: Any, wanted: Any) -> bool:
    """Edit `found` in place until it equals `wanted`; return whether that was possible."""
    if isinstance(found, MutableMapping) and isinstance(wanted, Mapping):
        _update_table(found, wanted)
        return True
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        return all(_edit(one, other) for one, other in zip(found, wanted, strict=True))
    return bool(found == wanted)


def _detach_comments(document: Container) -> list[tuple[Table, str]]:
    """Take out the comments above each heading: tomlkit assigns such comments to the section before, and adds new keys
    after the comments.
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
    """Yield the items of the document, line by line; of tables, only those with a heading."""
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
