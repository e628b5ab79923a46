"""Builds the form for a Prefect flow's parameters: a JSON schema that the Prefect UI can show in full.

The Prefect UI shows `anyOf` as buttons, one for each choice, and other unions (`oneOf`, a list of unions) as raw JSON.
Prefect's server validates a form's values against the schema, but for a failed `anyOf` it reports only that no choice
fits. A form's schema contains each choice twice: as a loose copy without bounds on values, and as a strict copy with
all bounds. The loose copy is below `anyOf`, where the Prefect UI reads it. The strict copy is below `if` and `then`,
which the Prefect UI ignores. Prefect's error about a strict copy names the wrong value and its position in the form.

* A value that is optional and has no default is shown as an empty field, which means null.
* The form shows each part of the training objective as "as in the preset" until the user chooses another value. Without
  "as in the preset", the form would fill in defaults that differ from the preset's values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollflow.tasks.objectives.config import PartsObjective
from rollflow.tasks.runtime.renamed_keys import RECIPE

if TYPE_CHECKING:
    from prefect import Flow

    from rollflow.tasks.run.config import RunConfig

Schema = dict[str, Any]

AT = "#/definitions/"
LOOSE = " (shown)"  # name suffix of a definition's loose copy, whose values have no bounds
BOUNDS = {
    "additionalProperties",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "maximum",
    "maxItems",
    "maxLength",
    "minimum",
    "minItems",
    "minLength",
    "pattern",
    "patternProperties",
    "required",
}
PRESETS = PartsObjective.__name__  # name of the config section whose parts a preset may set


def build_form(flow: Flow[Any, Any], hidden: Sequence[str] = ()) -> Schema:
    """Return the JSON schema of the form for a Prefect flow's parameters, without the parameters in `hidden`."""
    from prefect.utilities.callables import parameter_schema

    schema: Schema = parameter_schema(flow).model_dump(mode="json", exclude_unset=True)
    properties = {name: one for name, one in schema["properties"].items() if name not in hidden}
    made = _Form(_with_new_names(schema.get("definitions", {})))
    return schema | {
        "properties": {name: made.strict(one) for name, one in properties.items()},
        "definitions": made.all(),
    }


def _with_new_names(definitions: Mapping[str, Schema]) -> dict[str, Schema]:
    """Add a check for each renamed config key. If a user sends the old key, the server's error then contains the new
    key.
    """
    found = dict(definitions)
    for key, today in RECIPE.keys.items():
        place, _, name = key.rpartition(".")
        for section in _sections_at(place, definitions):
            if today in found[section]["properties"]:
                # Prefect's error about the old key says that the text of this `const` "was expected".
                refused = {f"^{name}$": {"const": f"{place}.{today} in place of {key}"}}
                found[section] = found[section] | {
                    "patternProperties": found[section].get("patternProperties", {}) | refused
                }
    return found


def _sections_at(place: str, definitions: Mapping[str, Schema]) -> list[str]:
    """Return the names of the config sections that a recipe may contain at a dotted path such as "train.objective"."""
    found = [name for name in definitions if name == "RunConfig"]
    for part in place.split("."):
        nodes = [definitions[name]["properties"].get(part) for name in found]
        found = re.findall(rf'"{AT}([^"]+)"', json.dumps(nodes))
    return found


def form_values(config: RunConfig) -> Schema:
    """Return the values that fill the form of a recipe (a run's config file), without keys that are null. A part of the
    training objective that the recipe does not set is null, which means "as in the preset".
    """
    tree: Schema = config.model_dump(mode="json", exclude_none=True)
    if isinstance(config.train.objective, PartsObjective):
        objective = tree["train"]["objective"]
        for name in objective.keys() - config.train.objective.model_fields_set - {"kind"}:
            part = objective.pop(name)
            objective |= {name: None} if isinstance(part, dict) else {}
    return tree


class _Form:
    """Converts the definitions of one JSON schema into a form that the Prefect UI can show."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = {
            name: _make_parts_optional(one) if name == PRESETS else one for name, one in definitions.items()
        }
        self._more: dict[str, Schema] = {}

    def all(self) -> dict[str, Schema]:
        """Return every definition twice: a strict copy for Prefect's server, and a loose copy for the Prefect UI."""
        checked = {name: self.strict(one) for name, one in self._definitions.items()}
        shown = {name + LOOSE: self._loose(one) | {"title": _title(one)} for name, one in self._definitions.items()}
        return checked | shown | self._more

    def strict(self, node: Schema) -> Schema:
        """Return a JSON schema with all bounds on values, and with choices that the Prefect UI can show as buttons."""
        if "oneOf" in node or "anyOf" in node:
            return self._build_choice(node) | self._build_checks(node)
        if "oneOf" in node.get("items", ()):
            return node | {"items": self._merge_item(node["items"]) | self._build_checks(node["items"])}
        return _map_schemas(node, self.strict)

    def _loose(self, node: Schema) -> Schema:
        """Return a JSON schema for the Prefect UI, without any bounds on values."""
        node = {key: value for key, value in node.items() if key not in BOUNDS}
        if "$ref" in node:
            return node | {"$ref": node["$ref"] + LOOSE}
        # The Prefect UI marks a `const` as unchangeable, but not an enum with a single value.
        if "const" in node:
            return {"enum": [node.pop("const")], **node}
        if "oneOf" in node or "anyOf" in node:
            return {key: value for key, value in self._build_choice(node).items() if key not in BOUNDS}
        if "oneOf" in node.get("items", ()):
            return node | {"items": self._merge_item(node["items"])}
        return _map_schemas(node, self._loose)

    def _build_choice(self, node: Schema) -> Schema:
        """Return the buttons for a union's choices; if the union is a plain value or null, return a field that may be
        empty.
        """
        base = {key: value for key, value in node.items() if key not in ("oneOf", "anyOf", "discriminator", "x-null")}
        if "oneOf" in node:
            return base | {"anyOf": self._build_buttons(node)}
        others = [one for one in node["anyOf"] if one.get("type") != "null"]
        if len(others) == 1 and "type" in others[0] and base.get("default", 0) is None:
            del base["default"]
            plain: Schema = others[0] | ({"enum": [*others[0]["enum"], None]} if "enum" in others[0] else {})
            return plain | base
        none = {"type": "null", "title": node.get("x-null", "none")}
        shown = [
            button for one in others for button in (self._build_buttons(one) if "oneOf" in one else [self._loose(one)])
        ]
        return base | {"anyOf": [none, *shown]}

    def _build_buttons(self, node: Schema) -> list[Schema]:
        """Return the choices of a union; choices with the same keys are merged into one choice.

        The Prefect UI preselects the first choice that has the most keys of the current value, so choices with few keys
        come first.
        """
        alike: dict[frozenset[str], list[str]] = {}
        for ref in sorted(_refs(node), key=lambda ref: len(self._definition(ref)["properties"])):
            alike.setdefault(frozenset(self._definition(ref)["properties"]), []).append(ref)
        return [self._merge_choices(node, refs) for refs in alike.values()]

    def _merge_choices(self, node: Schema, refs: Sequence[str]) -> Schema:
        if len(refs) == 1:
            return {"$ref": refs[0] + LOOSE}
        kinds = [kind for ref in refs for kind in _refs(node)[ref]]
        one, key = self._loose(self._definition(refs[0])), node["discriminator"]["propertyName"]
        choice = {
            key: one["properties"][key]
            | {"enum": kinds, "description": "; ".join(self._describe_kind(ref, key) for ref in refs)}
        }
        return self._add_definition(
            " or ".join(kinds), one | {"description": "", "properties": one["properties"] | choice}
        )

    def _add_definition(self, name: str, shown: Schema) -> Schema:
        """Add the schema `shown` as a definition, and return a reference to it, because the server allows null only in
        definitions.
        """
        self._more[name + LOOSE] = shown | {"title": name}
        return {"$ref": AT + name + LOOSE}

    def _build_checks(self, node: Schema) -> Schema:
        """Return the check of a union by Prefect's server: a value must match the config section that its `kind`
        names.
        """
        if "oneOf" in node:
            return self._by_kind(node)
        for one in node["anyOf"]:
            if "oneOf" in one:
                return {"if": {"type": "object"}, "then": self._by_kind(one)}
            if "$ref" in one:
                return {"if": {"type": "object"}, "then": one}
        return {}

    def _by_kind(self, node: Schema) -> Schema:
        key = node["discriminator"]["propertyName"]
        kinds = list(node["discriminator"]["mapping"])
        # A value without `kind` is valid, because the Prefect flow adds the default kind.
        chain: Schema = {"properties": {key: {"enum": kinds}}}
        for ref, tags in _refs(node).items():
            named = {"properties": {key: {"enum": tags}}, "required": [key]}
            chain = {"if": named, "then": {"$ref": ref}, "else": chain}
        return chain

    def _merge_item(self, node: Schema) -> Schema:
        """Return a single schema for the items of a list whose items have different kinds. The Prefect UI shows no
        buttons within a list, so this schema contains the keys of all kinds, without defaults.
        """
        key = node["discriminator"]["propertyName"]
        kinds = _refs(node)
        found: dict[str, Schema] = {}
        for ref in kinds:
            for name, one in self._definition(ref)["properties"].items():
                found.setdefault(name, {key: value for key, value in self._loose(one).items() if key != "default"})
        for name, one in found.items():
            of = [kind for ref, tags in kinds.items() for kind in tags if name in self._definition(ref)["properties"]]
            if name == key:
                one |= {"enum": of, "description": "; ".join(self._describe_kind(ref, key) for ref in kinds)}
            elif len(of) < len(kinds):
                one["description"] = f"{' or '.join(of)}: {one['description']}"
        return self._add_definition("item", {"type": "object", "properties": {key: found.pop(key), **found}})

    def _describe_kind(self, ref: str, key: str) -> str:
        """Return a description of a kind of config section: its name, and the description of its key `key`."""
        one = self._definition(ref)["properties"][key]
        return f"{one['const']}: {one['description']}"

    def _definition(self, ref: str) -> Schema:
        return self._definitions[ref.removeprefix(AT)]


def _map_schemas(node: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Return a copy of a JSON schema in which `change` was applied to each direct subschema."""
    found = dict(node)
    for key in node.keys() & {"properties"}:
        found[key] = {name: change(one) for name, one in node[key].items()}
    for key in node.keys() & {"items", "additionalProperties"}:
        found[key] = change(node[key]) if isinstance(node[key], dict) else node[key]
    for key in node.keys() & {"prefixItems"}:
        found[key] = [change(one) for one in node[key]]
    return found


def _refs(node: Schema) -> dict[str, list[str]]:
    """Map the reference of each choice of a union to the values of `kind` that select this choice."""
    found: dict[str, list[str]] = {}
    for kind, ref in node["discriminator"]["mapping"].items():
        found.setdefault(ref, []).append(kind)
    return found


def _title(section: Schema) -> str:
    """Return the text of the button for a config section: the section's kind, or its title if it has no kind."""
    for one in section["properties"].values() if "properties" in section else ():
        if "const" in one:
            return str(one["const"])
    return "preset" if section["title"] == PRESETS else section["title"].removesuffix("Config").lower()


def _make_parts_optional(section: Schema) -> Schema:
    """Return the schema of the training objective, with null ("as in the preset") as another choice of each part."""
    kind, parts = {}, {}
    for name, one in section["properties"].items():
        if name == "kind":
            kind[name] = one
            continue
        part = {key: value for key, value in one.items() if key in ("$ref", "oneOf", "discriminator", "type", "enum")}
        about = {key: value for key, value in one.items() if key not in (*part, "default")}
        parts[name] = about | {"anyOf": [part, {"type": "null"}], "x-null": "as in the preset", "default": None}
    return section | {"properties": kind | parts}
