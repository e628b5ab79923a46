"""The form that the Prefect UI shows for a flow's parameters: a JSON schema that the UI can show in full.

The UI shows `anyOf` as buttons, one for each choice. The UI shows other unions (`oneOf`, a list of them) as raw JSON.
Prefect's server checks the form's schema, too, but for a failed `anyOf` the server says only that no choice fits. The
form's schema therefore contains each choice twice. The loose copy stands below `anyOf`, for the UI. The strict copy
stands below `if` and `then`, which the UI ignores; the errors of the strict copy say what is wrong, and where.

- An optional value without a default is an empty field, and null if left empty.
- The parts of an objective say "as in the preset" until the user opens one. The form fills in every default that it
  sees, and the defaults of a part are not the preset's.
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
LOOSE = " (shown)"  # suffix of the loose copy of a definition
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
PRESETS = PartsObjective.__name__  # the section whose parts come from a preset


def build_form(flow: Flow[Any, Any], hidden: Sequence[str] = ()) -> Schema:
    """Return the JSON schema of a flow's parameters, without the `hidden` ones."""
    from prefect.utilities.callables import parameter_schema

    schema: Schema = parameter_schema(flow).model_dump(mode="json", exclude_unset=True)
    properties = {name: one for name, one in schema["properties"].items() if name not in hidden}
    made = _Form(_with_new_names(schema.get("definitions", {})))
    return schema | {
        "properties": {name: made.strict(one) for name, one in properties.items()},
        "definitions": made.all(),
    }


def _with_new_names(definitions: Mapping[str, Schema]) -> dict[str, Schema]:
    """Make the server's error name the new key if a value has the key's earlier name; the UI does not show
    `patternProperties`.
    """
    found = dict(definitions)
    for key, today in RECIPE.keys.items():
        place, _, name = key.rpartition(".")
        for section in _sections_at(place, definitions):
            if today in found[section]["properties"]:
                # the server's error then says that this text "was expected"
                refused = {f"^{name}$": {"const": f"{place}.{today} in place of {key}"}}
                found[section] = found[section] | {
                    "patternProperties": found[section].get("patternProperties", {}) | refused
                }
    return found


def _sections_at(place: str, definitions: Mapping[str, Schema]) -> list[str]:
    """List the definitions of the sections that a recipe may have at a dotted place."""
    found = [name for name in definitions if name == "RunConfig"]
    for part in place.split("."):
        nodes = [definitions[name]["properties"].get(part) for name in found]
        found = re.findall(rf'"{AT}([^"]+)"', json.dumps(nodes))
    return found


def form_values(config: RunConfig) -> Schema:
    """Return the values that fill a recipe's form: every key that is not null, and null for parts from the preset."""
    tree: Schema = config.model_dump(mode="json", exclude_none=True)
    if isinstance(config.train.objective, PartsObjective):
        objective = tree["train"]["objective"]
        for name in objective.keys() - config.train.objective.model_fields_set - {"kind"}:
            part = objective.pop(name)
            objective |= {name: None} if isinstance(part, dict) else {}
    return tree


class _Form:
    """The definitions of one schema, their loose copies, and the definitions that merge several of them."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = {
            name: _make_parts_optional(one) if name == PRESETS else one for name, one in definitions.items()
        }
        self._more: dict[str, Schema] = {}

    def all(self) -> dict[str, Schema]:
        """Return every definition in two copies: as the server checks the definition, and as the UI shows it below a
        choice.
        """
        checked = {name: self.strict(one) for name, one in self._definitions.items()}
        shown = {name + LOOSE: self._loose(one) | {"title": _title(one)} for name, one in self._definitions.items()}
        return checked | shown | self._more

    def strict(self, node: Schema) -> Schema:
        """Return a schema as the server checks it, with its choices in a form that the UI can show."""
        if "oneOf" in node or "anyOf" in node:
            return self._build_choice(node) | self._build_checks(node)
        if "oneOf" in node.get("items", ()):
            return node | {"items": self._merge_item(node["items"]) | self._build_checks(node["items"])}
        return _map_schemas(node, self.strict)

    def _loose(self, node: Schema) -> Schema:
        """Return a schema as the UI shows it, without the bounds that a value could violate."""
        node = {key: value for key, value in node.items() if key not in BOUNDS}
        if "$ref" in node:
            return node | {"$ref": node["$ref"] + LOOSE}
        # for a constant, the UI says that the value cannot be changed; for an enum of one value, it shows no such text
        if "const" in node:
            return {"enum": [node.pop("const")], **node}
        if "oneOf" in node or "anyOf" in node:
            return {key: value for key, value in self._build_choice(node).items() if key not in BOUNDS}
        if "oneOf" in node.get("items", ()):
            return node | {"items": self._merge_item(node["items"])}
        return _map_schemas(node, self._loose)

    def _build_choice(self, node: Schema) -> Schema:
        """Return buttons for the choices, or an empty field for a plain value that may be null."""
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

        The UI preselects the first choice that has most of a value's keys, so the choice with the fewest keys comes
        first.
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
        """Return a reference to `shown` as a separate definition, because only there does the server allow null."""
        self._more[name + LOOSE] = shown | {"title": name}
        return {"$ref": AT + name + LOOSE}

    def _build_checks(self, node: Schema) -> Schema:
        """Return the server's check of a choice, which applies the section that the value's kind names."""
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
        # a value without a kind has the default kind, which the flow adds
        chain: Schema = {"properties": {key: {"enum": kinds}}}
        for ref, tags in _refs(node).items():
            named = {"properties": {key: {"enum": tags}}, "required": [key]}
            chain = {"if": named, "then": {"$ref": ref}, "else": chain}
        return chain

    def _merge_item(self, node: Schema) -> Schema:
        """Return the schema of a list item. The UI has no buttons within a list, so the item has the keys of all
        choices, all of them empty.
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
        """Describe a kind by the description of its key."""
        one = self._definition(ref)["properties"][key]
        return f"{one['const']}: {one['description']}"

    def _definition(self, ref: str) -> Schema:
        return self._definitions[ref.removeprefix(AT)]


def _map_schemas(node: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Return a schema with `change` applied to each schema below it."""
    found = dict(node)
    for key in node.keys() & {"properties"}:
        found[key] = {name: change(one) for name, one in node[key].items()}
    for key in node.keys() & {"items", "additionalProperties"}:
        found[key] = change(node[key]) if isinstance(node[key], dict) else node[key]
    for key in node.keys() & {"prefixItems"}:
        found[key] = [change(one) for one in node[key]]
    return found


def _refs(node: Schema) -> dict[str, list[str]]:
    """Return the definitions of a union's choices, each with the kinds that select the choice."""
    found: dict[str, list[str]] = {}
    for kind, ref in node["discriminator"]["mapping"].items():
        found.setdefault(ref, []).append(kind)
    return found


def _title(section: Schema) -> str:
    """Return the text of a button: the section's kind, or else its title."""
    for one in section["properties"].values() if "properties" in section else ():
        if "const" in one:
            return str(one["const"])
    return "preset" if section["title"] == PRESETS else section["title"].removesuffix("Config").lower()


def _make_parts_optional(section: Schema) -> Schema:
    """Return the objective's section with each part either "as in the preset" or user-defined."""
    kind, parts = {}, {}
    for name, one in section["properties"].items():
        if name == "kind":
            kind[name] = one
            continue
        part = {key: value for key, value in one.items() if key in ("$ref", "oneOf", "discriminator", "type", "enum")}
        about = {key: value for key, value in one.items() if key not in (*part, "default")}
        parts[name] = about | {"anyOf": [part, {"type": "null"}], "x-null": "as in the preset", "default": None}
    return section | {"properties": kind | parts}
