"""TOML, written: what `tomllib` reads back as the same tree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def to_toml(tree: Mapping[str, Any]) -> str:
    """A document; keys without a value (None) are left out."""
    return "\n".join(_section(tree, "")).strip() + "\n"


def _section(tree: Mapping[str, Any], name: str) -> Iterator[str]:
    """Its values, then its sections and lists of sections."""
    nested = {key: value for key, value in tree.items() if isinstance(value, Mapping) or _sections(value)}
    yield from (f"{key} = {_value(one)}" for key, one in tree.items() if key not in nested and one is not None)
    for key, value in nested.items():
        path = f"{name}.{key}" if name else key
        heading = f"[{path}]" if isinstance(value, Mapping) else f"[[{path}]]"
        for one in [value] if isinstance(value, Mapping) else value:
            yield from ("", heading, *_section(one, path))


def _sections(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _value(value: Any) -> str:
    if isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)  # JSON's strings are TOML's, too
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_value(one) for one in value)}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_value(one)}' for key, one in value.items() if one is not None)} }}"
    return repr(value)
