"""The form that the Prefect UI shows for a flow's parameters: its JSON schema, put so that the UI can show all of it.

The UI shows `anyOf` as buttons, one a choice, and anything else that may be several things (`oneOf`, a list of them)
as raw JSON. The server checks the same schema, and of an `anyOf` that fails it says nothing but that none fits. So
here a choice stands twice: loosely, for the eye, below `anyOf`; and strictly, below `if` and `then`, which the UI
does not look at and which say what is wrong, and where.

- What may be left out, and is then null, is an empty field.
- The parts of an objective are "as in the preset", until somebody opens one: the form fills in every default that it
  sees, and those of a part are not the preset's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollflow.tasks.objectives.config import PartsObjective

if TYPE_CHECKING:
    from prefect import Flow

    from rollflow.tasks.run.config import RunConfig

Schema = dict[str, Any]

AT = "#/definitions/"
LOOSE = " (shown)"  # what the loose twin of a definition is called
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
    "required",
}
PRESETS = PartsObjective.__name__  # the section whose parts are a preset's


def form(flow: Flow[Any, Any], hidden: Sequence[str] = ()) -> Schema:
    """The schema of a flow's parameters, without those that are `hidden`."""
    from prefect.utilities.callables import parameter_schema

    schema: Schema = parameter_schema(flow).model_dump(mode="json", exclude_unset=True)
    properties = {name: one for name, one in schema["properties"].items() if name not in hidden}
    made = _Form(schema.get("definitions", {}))
    return schema | {
        "properties": {name: made.strict(one) for name, one in properties.items()},
        "definitions": made.all(),
    }


def values(config: RunConfig) -> Schema:
    """What the form of a recipe is filled with: every key that is not null; null where a part is the preset's."""
    tree: Schema = config.model_dump(mode="json", exclude_none=True)
    if isinstance(config.train.objective, PartsObjective):
        objective = tree["train"]["objective"]
        for name in objective.keys() - config.train.objective.model_fields_set - {"kind"}:
            part = objective.pop(name)
            objective |= {name: None} if isinstance(part, dict) else {}
    return tree


class _Form:
    """The definitions of one schema, their loose twins, and what is shown for several of them."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = {name: _of_preset(one) if name == PRESETS else one for name, one in definitions.items()}
        self._more: dict[str, Schema] = {}

    def all(self) -> dict[str, Schema]:
        """Every definition as the server checks it, and as the UI shows it below a choice."""
        checked = {name: self.strict(one) for name, one in self._definitions.items()}
        shown = {name + LOOSE: self._loose(one) | {"title": _title(one)} for name, one in self._definitions.items()}
        return checked | shown | self._more

    def strict(self, node: Schema) -> Schema:
        """A schema as the server checks it; its choices can be shown, too."""
        if "oneOf" in node or "anyOf" in node:
            return self._choice(node) | self._checks(node)
        if "oneOf" in node.get("items", ()):
            return node | {"items": self._any_of(node["items"]) | self._checks(node["items"])}
        return _each(node, self.strict)

    def _loose(self, node: Schema) -> Schema:
        """A schema as the UI shows it: without what a value could break."""
        node = {key: value for key, value in node.items() if key not in BOUNDS}
        if "$ref" in node:
            return node | {"$ref": node["$ref"] + LOOSE}
        if "const" in node:  # the UI says of a constant that it cannot be changed; a choice of one needs no words
            return {"enum": [node.pop("const")], **node}
        if "oneOf" in node or "anyOf" in node:
            return {key: value for key, value in self._choice(node).items() if key not in BOUNDS}
        if "oneOf" in node.get("items", ()):
            return node | {"items": self._any_of(node["items"])}
        return _each(node, self._loose)

    def _choice(self, node: Schema) -> Schema:
        """Buttons; of a plain value that may be null, an empty field."""
        base = {key: value for key, value in node.items() if key not in ("oneOf", "anyOf", "discriminator", "x-null")}
        if "oneOf" in node:
            return base | {"anyOf": self._buttons(node)}
        others = [one for one in node["anyOf"] if one.get("type") != "null"]
        if len(others) == 1 and "type" in others[0] and base.get("default", 0) is None:
            del base["default"]
            plain: Schema = others[0] | ({"enum": [*others[0]["enum"], None]} if "enum" in others[0] else {})
            return plain | base
        none = {"type": "null", "title": node.get("x-null", "none")}
        shown = [button for one in others for button in (self._buttons(one) if "oneOf" in one else [self._loose(one)])]
        return base | {"anyOf": [none, *shown]}

    def _buttons(self, node: Schema) -> list[Schema]:
        """The choices of a union, those with the same keys as one.

        The UI shows the first that has most of a value's keys, so the one with fewest leads.
        """
        alike: dict[frozenset[str], list[str]] = {}
        for ref in sorted(_refs(node), key=lambda ref: len(self._definition(ref)["properties"])):
            alike.setdefault(frozenset(self._definition(ref)["properties"]), []).append(ref)
        return [self._together(node, refs) for refs in alike.values()]

    def _together(self, node: Schema, refs: Sequence[str]) -> Schema:
        if len(refs) == 1:
            return {"$ref": refs[0] + LOOSE}
        kinds = [kind for ref in refs for kind in _refs(node)[ref]]
        one, key = self._loose(self._definition(refs[0])), node["discriminator"]["propertyName"]
        choice = {
            key: one["properties"][key]
            | {"enum": kinds, "description": "; ".join(self._about(ref, key) for ref in refs)}
        }
        return self._named(" or ".join(kinds), one | {"description": "", "properties": one["properties"] | choice})

    def _named(self, name: str, shown: Schema) -> Schema:
        """What is shown, as a definition of its own: the server lets null be only there."""
        self._more[name + LOOSE] = shown | {"title": name}
        return {"$ref": AT + name + LOOSE}

    def _checks(self, node: Schema) -> Schema:
        """What the server checks of a choice: the section that the value's kind names."""
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
        chain: Schema = {"properties": {key: {"enum": kinds}}}  # without one it is the default's, which the flow knows
        for ref, tags in _refs(node).items():
            named = {"properties": {key: {"enum": tags}}, "required": [key]}
            chain = {"if": named, "then": {"$ref": ref}, "else": chain}
        return chain

    def _any_of(self, node: Schema) -> Schema:
        """An item of a list. The UI has no buttons there, so it has the keys of all choices, all of them empty."""
        key = node["discriminator"]["propertyName"]
        kinds = _refs(node)
        found: dict[str, Schema] = {}
        for ref in kinds:
            for name, one in self._definition(ref)["properties"].items():
                found.setdefault(name, {key: value for key, value in self._loose(one).items() if key != "default"})
        for name, one in found.items():
            of = [kind for ref, tags in kinds.items() for kind in tags if name in self._definition(ref)["properties"]]
            if name == key:
                one |= {"enum": of, "description": "; ".join(self._about(ref, key) for ref in kinds)}
            elif len(of) < len(kinds):
                one["description"] = f"{' or '.join(of)}: {one['description']}"
        return self._named("item", {"type": "object", "properties": {key: found.pop(key), **found}})

    def _about(self, ref: str, key: str) -> str:
        """What a kind is, in the words of its key."""
        one = self._definition(ref)["properties"][key]
        return f"{one['const']}: {one['description']}"

    def _definition(self, ref: str) -> Schema:
        return self._definitions[ref.removeprefix(AT)]


def _each(node: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """A schema with `change` made in the schemas below it."""
    found = dict(node)
    for key in node.keys() & {"properties"}:
        found[key] = {name: change(one) for name, one in node[key].items()}
    for key in node.keys() & {"items", "additionalProperties"}:
        found[key] = change(node[key]) if isinstance(node[key], dict) else node[key]
    for key in node.keys() & {"prefixItems"}:
        found[key] = [change(one) for one in node[key]]
    return found


def _refs(node: Schema) -> dict[str, list[str]]:
    """The definitions that a union is made of, each with the kinds that name it."""
    found: dict[str, list[str]] = {}
    for kind, ref in node["discriminator"]["mapping"].items():
        found.setdefault(ref, []).append(kind)
    return found


def _title(section: Schema) -> str:
    """What a button says: the section's kind, or what it is."""
    for one in section["properties"].values() if "properties" in section else ():
        if "const" in one:
            return str(one["const"])
    return "preset" if section["title"] == PRESETS else section["title"].removesuffix("Config").lower()


def _of_preset(section: Schema) -> Schema:
    """The parts of an objective: as in the preset, or one's own."""
    kind, parts = {}, {}
    for name, one in section["properties"].items():
        if name == "kind":
            kind[name] = one
            continue
        part = {key: value for key, value in one.items() if key in ("$ref", "oneOf", "discriminator", "type", "enum")}
        about = {key: value for key, value in one.items() if key not in (*part, "default")}
        parts[name] = about | {"anyOf": [part, {"type": "null"}], "x-null": "as in the preset", "default": None}
    return section | {"properties": kind | parts}
