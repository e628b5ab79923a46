"""Reads a recipe, the TOML file that describes one run, into the typed configuration tree of `tasks/run/config.py`.

Imports pydantic only. Every error message is one sentence with the key, its value and the fix.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from rollflow.flows.config_keys import has_key, is_list, is_table, list_kinds, sections_of, usable_keys
from rollflow.flows.registration.recipe_paths import anchor_paths, path_values, recipe_folder
from rollflow.storage.errors import ConfigError
from rollflow.tasks.engines.config import VllmEngineConfig, check_temperature
from rollflow.tasks.objectives.config import check_new
from rollflow.tasks.run.cluster_config import has_password
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.sections import Section

if TYPE_CHECKING:
    from rollflow.tasks.simulation.hardware import Hardware

# Maps types of pydantic errors to text in the style of JSON schema, which the form of the Prefect UI uses.
WORDS = {
    "greater_than": "less than or equal to the minimum of {gt}",
    "greater_than_equal": "less than the minimum of {ge}",
    "less_than": "greater than or equal to the maximum of {lt}",
    "less_than_equal": "greater than the maximum of {le}",
    "literal_error": "not one of [{expected}]",
    "int_type": "not of type 'integer'",
    "int_parsing": "not of type 'integer'",
    "int_from_float": "not of type 'integer'",
    "float_type": "not of type 'number'",
    "float_parsing": "not of type 'number'",
    "bool_type": "not of type 'boolean'",
    "bool_parsing": "not of type 'boolean'",
    "string_type": "not of type 'string'",
}
SHIPPED_HARDWARE = Path(__file__).parent / "hardware"


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe (a TOML file that describes one run), apply the overrides (`key.path=value`), and check the
    resulting configuration.

    Raises:
        ConfigError: the recipe is invalid; the message names each key that must change.
    """
    tree = read_toml(path, "recipe")
    replaced = {override.partition("=")[0].strip() for override in overrides}
    given = {key: value for key, value in path_values(tree).items() if _is_within(key, replaced)}
    anchor_paths(tree, recipe_folder(path), given)
    own = {key: value for key, value in path_values(tree).items() if key not in given}
    for override in overrides:
        _apply_override(tree, override)
    anchor_paths(tree, Path.cwd(), own)
    config = parse_config(tree)
    check_new_run(config)
    return config


def _is_within(key: str, sections: Iterable[str]) -> bool:
    """Return whether a dotted configuration key is one of the given sections, or lies within one of them."""
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def override_config(tree: Mapping[str, Any], overrides: Iterable[str]) -> RunConfig:
    """Apply the overrides (`key.path=value`) to a run's recorded configuration, and check the result. Raise
    `ConfigError` if the changed configuration is invalid.
    """
    given = _without_nulls(tree)
    recorded = path_values(given)
    for override in overrides:
        _apply_override(given, override)
    anchor_paths(given, Path.cwd(), recorded)
    return parse_config(given)


def _without_nulls(tree: Any) -> Any:
    """Return a configuration tree without null values, so that each key of an unset section can be set by itself."""
    if isinstance(tree, Mapping):
        return {name: _without_nulls(value) for name, value in tree.items() if value is not None}
    return [_without_nulls(item) for item in tree] if isinstance(tree, list) else tree


def check_new_run(config: RunConfig, recorded: RunConfig | None = None) -> None:
    """Reject configuration values that are no longer allowed in new runs.

    Args:
        recorded: the recorded configuration of an existing run. Values that an existing run already has are accepted.

    Raises:
        ConfigError: a configuration value is not allowed in a new run.
    """
    known = list(_faults(recorded)) if recorded else []
    for fault in _faults(config):
        if fault not in known:
            raise ConfigError(fault)


def _faults(config: RunConfig) -> Iterator[str]:
    evaluation = config.evaluation
    for check in (
        partial(check_new, config.train.objective),
        partial(_check_temperature, config, "engine.temperature", config.engine.temperature),
        partial(_check_temperature, config, "evaluation.temperature", evaluation.temperature, evaluation.engine),
    ):
        try:
            check()
        except PydanticCustomError as error:
            yield error.message()
    for name, value in config.cluster.env.items():
        if has_password(value):
            yield (
                f"cluster.env.{name} = '...': an address in the variable contains a password, and a run stores "
                "its config; set the variable on the nodes themselves"
            )
    for which, source in enumerate(config.prompts):
        if source.system is not None and not source.chat:
            unused = "the system message is not used without chat = true; set chat = true, or remove the system message"
            yield f"prompts.{which}.system = {source.system!r}: {unused}"


def _check_temperature(config: RunConfig, key: str, temperature: float, engine: str = "") -> None:
    if isinstance(config.engine, VllmEngineConfig) and engine != "transformers":
        check_temperature(key, temperature)


def load_hardware(path: Path) -> Hardware:
    """Read and check a hardware file, which describes GPUs for simulations. `path` may be the name of a hardware file
    that rollflow ships.

    Raises:
        ConfigError: the hardware file is invalid; the message names each key that must change.
    """
    from rollflow.tasks.simulation.hardware import Hardware

    path = hardware_file(path)
    tree = read_toml(path, "hardware file")
    try:
        return Hardware.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"hardware file {str(path)!r}: {describe_errors(error, Hardware, tree)}") from None


def hardware_file(path: Path) -> Path:
    """Return the path of a hardware file. `path` may be the name of a hardware file that rollflow ships."""
    shipped = SHIPPED_HARDWARE / f"{path.name}.toml"
    return shipped if len(path.parts) == 1 and not path.suffix and shipped.exists() else path


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Read a TOML file that a user wrote. `what` is the kind of file, for error messages."""
    try:
        # "utf-8-sig", because some editors write a byte-order mark
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        fix = "give the path of a TOML file"
        raise ConfigError(f"{what} {str(path)!r} cannot be read ({error.strerror}); {fix}") from None
    # The file is not UTF-8 or not TOML, or has a number that is too long or nesting that is too deep.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} {str(path)!r} is not valid TOML: {error}; correct that line") from None


def parse_config(tree: Mapping[str, Any]) -> RunConfig:
    """Check a configuration tree and return it as a `RunConfig`; raise `ConfigError` if the tree is invalid."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(describe_errors(error, tree=tree)) from None


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Apply one override (`key.path=value`) to a configuration tree. A value that is not TOML is a string."""
    key, sep, text = override.partition("=")
    if not sep or not key:
        raise ConfigError(f"--set {override!r} is not of the form key=value, e.g. --set train.learning_rate=1e-4")
    *parents, last = key.strip().split(".")
    node: Any = tree
    for position, name in enumerate(parents):
        node = node.setdefault(name, {}) if isinstance(node, dict) else _list_item(node, name, key)
        if not isinstance(node, (dict, list)):
            raise ConfigError(
                f"--set {key}: {'.'.join(parents[: position + 1])} has no keys, because it is a single value and "
                "not a section; give the key of a section"
            )
    value = _toml_value(text.strip())
    if isinstance(node, list):
        raise ConfigError(
            f"--set {key}: {'.'.join(parents)} is a list; give a position and a key, e.g. --set "
            f"{'.'.join(parents)}.0.{last}={text}"
        )
    if node.get(last) != value:
        _change_kind(node, parents, last, value)
    node[last] = value


def _change_kind(node: dict[str, Any], parents: list[str], key: str, kind: object) -> None:
    """Remove the keys that do not fit the new kind of a configuration section. If the new kind is a preset, remove all
    keys of the section.
    """
    choices = _choices(parents)
    for chosen in (choice for choice in choices if key == "kind" and kind in list_kinds(choice)):
        if len(list_kinds(chosen)) > 1:
            node.clear()
        for name in {name for choice in choices for name in choice.model_fields} - chosen.model_fields.keys():
            node.pop(name, None)


def _choices(path: Iterable[str]) -> list[type[Section]]:
    """Return the types of configuration sections that a recipe may have at this path of keys."""
    found: list[type[Section]] = [RunConfig]
    named = False  # True if the next name in the path is a user-defined name in a table of sections.
    for name in path:
        if named or name.isdecimal():
            named = False
            continue
        fields = [section.model_fields[name] for section in found if name in section.model_fields]
        found = [choice for info in fields for choice in sections_of(info.annotation)]
        named = any(map(is_table, fields))
    return found


def _list_item(node: list[Any], name: str, key: str) -> Any:
    if not name.isdecimal() or int(name) >= len(node):
        raise ConfigError(
            f"--set {key}: the list has {len(node)} items, and {name!r} is not a position in it; positions begin at 0"
        )
    return node[int(name)]


def _toml_value(text: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # A text of several lines may define several keys, and is then read as a string.
    return read["value"] if len(read) == 1 else text


def describe_errors(
    error: ValidationError, section: type[Section] = RunConfig, tree: Mapping[str, Any] | None = None
) -> str:
    """Describe the errors of a configuration tree as text, with one sentence for each key. Errors that concern several
    configuration keys come last.
    """
    by_key: dict[str, str] = {}
    for details in (*error.errors(), *_errors_behind(section, tree or {})):
        text = describe_error(details, section, tree)
        # If a value may have several types, pydantic reports an error for each type; keep the first error of a key.
        by_key.setdefault(text.partition(" = ")[0], text)
    if len(by_key) == 1:
        return next(iter(by_key.values()))
    return "\n  ".join([f"{len(by_key)} keys must change:", *by_key.values()])


def _errors_behind(section: type[Section], tree: Mapping[str, Any]) -> list[ErrorDetails]:
    """Return the errors of a configuration tree that remain after its renamed keys get their present names."""
    renamed = section.renames.apply(tree)
    if renamed == tree:
        return []
    try:
        section.model_validate(renamed)
    except ValidationError as error:
        return error.errors()
    return []


def describe_error(
    error: ErrorDetails, section: type[Section] = RunConfig, tree: Mapping[str, Any] | None = None
) -> str:
    """Return a sentence that describes one pydantic error: the key, the value and the fix."""
    key = _key(error["loc"], section)
    if error["type"] == "rollflow":
        return _place_refusal(key, error)
    if error["type"] == "union_tag_invalid":
        tags = error["ctx"]
        key += "." + tags["discriminator"].strip("'")
        return f"{key} = {tags['tag']!r} is not one of [{tags['expected_tags']}]"
    if error["type"] == "truth":
        key = ".".join(filter(None, (key, error["ctx"]["key"])))
        return f"{key} = {json.dumps(error['ctx']['value'])}: {error['msg']}"
    if error["type"] == "union_tag_not_found":
        return f"{key} = {error['input']!r} has no kind; `rollflow keys` lists the kinds"
    if error["type"] == "extra_forbidden":
        if has_key(section, key):
            return f"{key} = {error['input']!r}: there is no such key here, but another kind has this key"
        suggestion = _suggest_key(key, error["input"], section, tree or {})
        return f"{key} = {error['input']!r}: there is no such key{suggestion}"
    if error["type"] == "missing":
        return f"{key} is missing; add the key"
    if error["type"] in WORDS:
        words = {name: _in_words(one) for name, one in error.get("ctx", {}).items()}
        return f"{key} = {error['input']!r} is {WORDS[error['type']].format(**words)}"
    message = error["msg"]
    return f"{key} = {error['input']!r}: {message[0].lower()}{message[1:]}"


def _place_refusal(place: str, error: ErrorDetails) -> str:
    """Return the error message for a rejected configuration value, with the complete dotted name of its key.

    A scorer's error message names a key as `reward.KEY` or `KEY`, although the scorer's section may be elsewhere, such
    as `rewards.<name>`.
    """
    if place.partition(".")[0] not in ("reward", "rewards"):
        return error["msg"]
    said = error["ctx"]
    key = said["key"].removeprefix("reward.")
    section = place.removesuffix(f".{key}")  # pydantic adds the key if a field's validator raised the error.
    return f"{section}.{key} = {said['value']}: {said['cure'].replace('reward.', f'{section}.')}"


def _key(place: Iterable[int | str], section: type[Section]) -> str:
    """Return the dotted configuration key of a pydantic error. pydantic inserts the kinds of sections into the path of
    a key; the returned key has no kinds.
    """
    parts, here, entered, named = list[str](), [section], False, False
    for part in place:
        if named:  # The name of a section in a table may equal the name of a section kind.
            parts, named = [*parts, str(part)], False
            continue
        if entered and (chosen := [one for one in here if part in list_kinds(one)]):
            here, entered = chosen, False
            continue
        parts.append(str(part))
        if isinstance(part, str):
            fields = [one.model_fields[part] for one in here if part in one.model_fields]
            if not fields:  # a user-defined name in a table of sections
                continue
            here, entered = [one for info in fields for one in sections_of(info.annotation)], True
            named = bool(here) and any(map(is_table, fields))
    return ".".join(parts)


def _in_words(limit: object) -> str:
    """Return a bound, or a list of allowed values, in the notation of JSON schema."""
    whole = int(limit) if isinstance(limit, float) and limit.is_integer() else limit
    return str(whole).replace(" or ", ", ")


def _suggest_key(key: str, given: object, section: type[Section], tree: Mapping[str, Any]) -> str:
    """Return a hint for an unknown configuration key: the known key that the user probably meant. Only keys that can
    have a value of the given shape are suggested.
    """
    known = [name for name, info in usable_keys(section, tree) if _accepts(info, given)]
    close = _find_by_initials(key, known) or _find_similar(key, known)
    return f"; did you mean {close[0]}?" if close else f"; remove the key; {section.keys_page} lists all keys"


def _find_similar(key: str, known: Iterable[str]) -> list[str]:
    """Return the known configuration keys that resemble a given key. Known keys of the same configuration section come
    first.
    """
    import difflib

    def likeness(one: str, other: str) -> float:
        return difflib.SequenceMatcher(None, one, other).ratio()

    place, _, word = key.rpartition(".")
    close = []
    for one in known:
        where, _, name = one.rpartition(".")
        whole, last = likeness(key, one), likeness(word, name)
        beside = where == place
        # For example, the unknown key `train.lora_r` resembles `train.lora.rank`.
        elsewhere = last >= 0.75 or (whole >= 0.8 and key.startswith(where))
        if whole >= 0.6 and (last >= 0.6 if beside else elsewhere):
            close.append((beside, whole, one))
    return [one for *_, one in sorted(close, reverse=True)]


def _accepts(info: FieldInfo, given: object) -> bool:
    """Return whether a given value has the shape that a configuration field needs, such as a table or a list of
    tables.
    """
    sections = any(True for _ in sections_of(info.annotation))
    if isinstance(given, Mapping):
        return (sections and not is_list(info)) or get_origin(info.annotation) is dict
    if isinstance(given, list) and given and all(isinstance(one, Mapping) for one in given):
        return sections and is_list(info)
    return not sections


def _find_by_initials(key: str, known: Iterable[str]) -> list[str]:
    """Return the configuration keys whose words have the given initials, as `lr` stands for `learning_rate`."""
    place, _, name = key.rpartition(".")
    below = ((one, one.rpartition(".")) for one in known)
    return [
        one for one, (where, _, words) in below if where == place and name == "".join(w[:1] for w in words.split("_"))
    ]
