"""Builds the JSON schema of a tool from a function's annotations and docstring, in the format that chat templates
use.

The docstring must follow Google's style: a summary, then a section `Args:` with one entry per argument. The entry of an
argument may end with its allowed values, such as `(choices: ["a", "b"])`.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable
from typing import Any, Union

from rollflow.tasks.environments.guest.wire import EnvironmentFault, Fields

TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
SECTION = re.compile(r"^(Args|Arguments|Returns?|Raises|Yields|Examples?|Notes?):\s*$")
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.DOTALL | re.IGNORECASE)


def build_schema(name: str, method: Callable[..., Any]) -> Fields:
    """Return the schema of a tool.

    Raises:
        EnvironmentFault: the method has no docstring, or an argument has no type or no description.
    """
    text = inspect.getdoc(method)
    if not text:
        raise EnvironmentFault(f"the tool {name} has no docstring; describe the tool and each argument in one")
    summary, described = split_docstring(text)
    hints = read_hints(name, method)
    properties: Fields = {}
    required: list[str] = []
    for argument, parameter in inspect.signature(method).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise EnvironmentFault(
                f"the tool {name} takes *{argument}, which the policy cannot fill in by name; name each argument "
                "of a tool"
            )
        if argument not in hints:
            raise EnvironmentFault(f"the argument {argument} of the tool {name} has no type; annotate the argument")
        if argument not in described:
            where = f"add `{argument}: ...` below `Args:`"
            raise EnvironmentFault(f"the docstring of the tool {name} does not describe {argument}; {where}")
        properties[argument] = {**convert_type(hints[argument]), **read_description(described[argument])}
        if parameter.default is parameter.empty:
            required.append(argument)
    parameters: Fields = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}


def read_hints(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a method's arguments.

    Raises:
        EnvironmentFault: this version of Python cannot evaluate the annotations.
    """
    try:
        return typing.get_type_hints(method)
    except Exception as error:
        raise EnvironmentFault(f"the annotations of the tool {name} cannot be read ({error})") from error


def split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its summary and the descriptions of the arguments."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section, current, indent = "", "", 0
    for line in text.splitlines():
        heading = SECTION.match(line.strip()) if not line.startswith(" ") else None
        if heading:
            section, current, indent = heading.group(1), "", 0
        elif not section:
            summary.append(line)
        elif section.startswith("Arg") and line.strip():
            depth = len(line) - len(line.lstrip())
            entry = re.match(r"\s*\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:\s*(.*)$", line)
            indent = indent or depth
            if entry and depth <= indent:
                current = entry.group(1)
                described[current] = entry.group(2).strip()
            elif current:
                described[current] = (described[current] + " " + line.strip()).strip()
    return "\n".join(summary).strip(), described


def read_description(text: str) -> Fields:
    """Return the description of an argument, and the choices at its end.

    Raises:
        EnvironmentFault: the choices are not valid JSON.
    """
    found = CHOICES.search(text)
    if not found:
        return {"description": text}
    try:
        return {"description": text[: found.start()].strip(), "enum": json.loads(found.group(1))}
    except ValueError:
        raise EnvironmentFault(f'the choices {found.group(1)} are not JSON; write them like ["a", "b"]') from None


def convert_type(hint: Any) -> Fields:
    """Return the JSON schema of a type."""
    if hint in TYPES:
        return {"type": TYPES[hint]}
    origin, given = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is typing.Literal:
        kinds = sorted({TYPES.get(type(one), "string") for one in given})
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(given)}
    if origin is Union or type(hint).__name__ == "UnionType":
        return convert_union([one for one in given if one is not type(None)], type(None) in given)
    if origin in (list, set, frozenset, tuple) or getattr(origin, "__name__", "") in ("Sequence", "Iterable"):
        inner = [one for one in given if one is not Ellipsis]
        return {"type": "array", "items": convert_type(inner[0])} if inner else {"type": "array"}
    if origin is dict or getattr(origin, "__name__", "") == "Mapping":
        more = {"additionalProperties": convert_type(given[1])} if len(given) == 2 else {}
        return {"type": "object", **more}
    return {}


def convert_union(kinds: list[Any], nullable: bool) -> Fields:
    """Return the JSON schema of a union of types."""
    schemas = [convert_type(one) for one in kinds]
    if len(schemas) == 1:
        found = schemas[0]
    elif all(set(one) == {"type"} for one in schemas):
        found = {"type": sorted(one["type"] for one in schemas)}
    else:
        found = {"anyOf": schemas}
    return {**found, "nullable": True} if nullable else found
