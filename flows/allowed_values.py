"""Describes the allowed values of a configuration key in words, for documentation and error messages. Values are
written as TOML.
"""

from __future__ import annotations

import json
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

UNSET = "unset"
TYPES = {bool: "true or false", int: "whole number", float: "number", str: "text"}
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def describe_allowed(info: FieldInfo) -> str:
    """Return a description of a configuration key's allowed values, such as `"adamw" or "sgd"` or
    `whole number above 0`.
    """
    bounds = (
        f"{words} {getattr(rule, name):g}"
        for rule in info.metadata
        for name, words in BOUNDS.items()
        if getattr(rule, name, None) is not None
    )
    return f"{_describe_type(info.annotation)} {', '.join(bounds)}".rstrip()


def default_of(info: FieldInfo) -> str:
    """Return a configuration key's default as TOML, or "unset" if the key has no default."""
    value = info.get_default(call_default_factory=True)
    return UNSET if value is None else json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _describe_type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(map(json.dumps, get_args(annotation)))
    if annotation in TYPES:
        return TYPES[annotation]
    if get_origin(annotation) is tuple:
        return "list"
    if get_origin(annotation) is dict:
        return "table"
    parts = [part for part in get_args(annotation) if part is not NoneType]
    return " or ".join(dict.fromkeys(map(_describe_type, parts))) or "text"
