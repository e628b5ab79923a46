"""Tests the form of the Prefect UI: its schema, the buttons that a config selects, and the server's error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.config import describe_errors, load_recipe
from rollflow.flows.nightly import nightly
from rollflow.flows.post_training import post_training
from rollflow.flows.registration.form import build_form, form_values
from rollflow.tasks.objectives.presets import PRESETS
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.renamed_keys import RECIPE

RECIPES = sorted((Path(__file__).parents[2] / "flows" / "recipes").glob("*.toml"))
FORM: dict[str, Any] = json.loads(json.dumps(build_form(post_training, ("storage",))))
IMPORT = {"kind": "import", "path": "my_package.parts:name"}
SCORERS = [
    *({"kind": kind} for kind in ("code", "maths", "choice", "regex", "instructions")),
    {"kind": "composite", "parts": {"one": {"weight": 0.5, "scorer": {"kind": "maths"}}}},
]
KINDS = {
    "engine": [{"kind": "vllm"}, {"kind": "transformers"}, {"kind": "timed"}],
    "environment": [
        {"kind": "single-turn"},
        IMPORT,
        {"kind": "trl", "path": "my_package.parts:Name"},
        {"kind": "gymnasium", "id": "FrozenLake-v1"},
    ],
    "reward": [
        {"kind": "reasoning-gym"},
        {"kind": "exact"},
        {"kind": "exact", "format": {"penalty": 0.2}},
        IMPORT,
        *SCORERS,
    ],
    "prompts": [
        [{"kind": "reasoning-gym"}],
        [{"kind": "sorting"}],
        [{"kind": "column-sums"}, {"kind": "jsonl", "path": "mine.jsonl", "system": "Think.", "chat": True}, IMPORT],
    ],
    "train": [
        {"kind": "torch"},
        {"kind": "torch", "lora": {}},
        {"kind": "deepspeed"},
        {"objective": IMPORT},
        {"objective": {"kind": "grpo", "advantage": {"negative_weight": 0.3}}},
        {"objective": {"kind": "reinforce", "surrogate": {"kind": "kimi"}}},
        *({"objective": {"kind": kind}} for kind in PRESETS),
    ],
    "rollout": [{"filter": {"min_std": 0.1}}, {"on_stale": "drop", "max_inflight_groups": 7}],
}
CONFIGS = [(section, tree) for section, trees in KINDS.items() for tree in trees]


def wrong(parameters: dict[str, Any]) -> list[str]:
    """Return the errors of the server's form check, each as `position: sentence`."""
    from prefect.utilities.schema_tools.validation import build_error_obj, validate

    found = [build_error_obj(validate(parameters, FORM, preprocess=preprocess)) for preprocess in (True, False)]
    assert found[0] == found[1]
    return list(_flat(found[0]["errors"], ""))


def _flat(errors: list[Any], place: str) -> Any:
    for one in errors:
        if isinstance(one, str):
            yield f"{place}: {one}"
        else:
            yield from _flat(one["errors"], f"{place}.{one.get('property', one.get('index'))}".lstrip("."))


def config_of(section: str, tree: Any) -> RunConfig:
    if tree == {"kind": "reasoning-gym"}:
        return RunConfig.model_validate({"reward": tree, "prompts": [tree]})
    exact = {"reward": {"kind": "exact", "answer": "tag"}} if section == "prompts" and len(tree) > 1 else {}
    turns = {"environment": {"kind": "import", "path": "a:B"}} if section == "train" else {}
    return RunConfig.model_validate({section: tree, **exact, **turns})


@pytest.mark.parametrize(("section", "tree"), CONFIGS, ids=str)
def test_prefect_form_has_the_values_of_the_recipe(section: str, tree: Any) -> None:
    config = config_of(section, tree)
    filled = json.loads(json.dumps(form_values(config)))
    assert RunConfig.model_validate(filled) == config
    assert wrong({"config": filled}) == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_fill_the_prefect_form(recipe: Path) -> None:
    config = load_recipe(recipe)
    assert RunConfig.model_validate(form_values(config)) == config
    assert wrong({"config": json.loads(json.dumps(form_values(config)))}) == []


@pytest.mark.parametrize(("section", "tree"), CONFIGS, ids=str)
def test_prefect_form_selects_the_configured_kind(section: str, tree: Any) -> None:
    shown = FORM["definitions"]["RunConfig"]["properties"][section]
    _look(shown, json.loads(json.dumps(form_values(config_of(section, tree))))[section])


def _look(schema: dict[str, Any], value: Any) -> None:
    """Read a form as Prefect's page does: select a button by the value's keys, then do the same for its children."""
    if "$ref" in schema:
        schema = FORM["definitions"][schema["$ref"].removeprefix("#/definitions/")]
    if "anyOf" in schema and isinstance(value, dict):
        options = [
            FORM["definitions"][one["$ref"].removeprefix("#/definitions/")] for one in schema["anyOf"] if "$ref" in one
        ]
        matches = [len(value.keys() & one["properties"].keys()) for one in options]
        taken = options[matches.index(max(matches))]
        assert value.keys() <= taken["properties"].keys()
        if "kind" in value:
            assert value["kind"] in taken["properties"]["kind"]["enum"]
        schema = taken
    if isinstance(value, list):
        for one in value:
            _look(schema.get("items", {}), one)
    for name, one in schema.get("properties", {}).items():
        if isinstance(value, dict) and name in value:
            _look(one, value[name])


WRONG: list[tuple[str, Any, str]] = [
    ("async_ratio", -1, "-1 is less than the minimum of 0"),
    ("groups", 0, "0 is less than or equal to the minimum of 0"),
    ("async_ratio", "two", "'two' is not of type 'number'"),
    ("engine.max_concurrent_requests", 0, "0 is less than or equal to the minimum of 0"),
    ("rollout.max_inflight_groups", 0, "0 is less than or equal to the minimum of 0"),
    ("rollout.routing", "all", "'all' is not one of ['least-work', 'prefix']"),
    ("evaluation.every", -1, "-1 is less than the minimum of 0"),
    ("train.learning_rate", -1, "-1 is less than or equal to the minimum of 0"),
    ("train.objective.surrogate.low", 2, "2 is greater than the maximum of 1"),
    ("prompts.0.share", -1, "-1 is less than or equal to the minimum of 0"),
]


@pytest.mark.parametrize(("key", "value", "said"), WRONG)
def test_bad_form_value_gives_the_same_error_as_in_a_recipe(key: str, value: Any, said: str) -> None:
    config = RunConfig.model_validate({"train": {"objective": {"kind": "grpo", "surrogate": {"kind": "clip"}}}})
    tree: Any = json.loads(json.dumps(form_values(config)))
    *above, last = key.split(".")
    place = tree
    for name in above:
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[last] = value
    assert wrong({"config": tree}) == [f"config.{key}: {said}"]
    assert refusal(tree) == f"{key} = {said}"


@pytest.mark.parametrize("key", sorted(RECIPE.keys))
def test_error_for_an_old_key_in_a_form_gives_the_new_name(key: str) -> None:
    place, _, name = key.rpartition(".")
    new = f"{place}.{RECIPE.keys[key]}"
    tree: Any = form_values(RunConfig.model_validate({"engine": {"kind": "timed"}, "rollout": {"filter": {}}}))
    tree["reward"]["format"] = {}
    section = tree
    for part in place.split("."):
        section = section[part]
    section[name] = 3
    assert wrong({"config": tree}) == [f"config.{key}: '{new} in place of {key}' was expected"]
    assert f"{key} = 3: the key was renamed to {new}; write that name" in refusal(tree)


def refusal(tree: Any) -> str:
    from pydantic import ValidationError

    with pytest.raises(ValidationError) as error:
        RunConfig.model_validate(tree)
    return describe_errors(error.value)


def test_prefect_form_shows_raw_json_only_for_tables() -> None:
    raw = set()
    for name, section in FORM["definitions"].items():
        for key, one in section.get("properties", {}).items():
            assert "oneOf" not in json.dumps(one)
            if not one.keys() & {"type", "enum", "anyOf", "$ref"} or (
                one.get("type") == "object" and "properties" not in one
            ):
                raw.add(key)
            assert one.get("description") or one.keys() & {"$ref", "anyOf"} or one.get("type") == "array", (name, key)
    # the keys of these sections are the user's own
    own = {
        "actions",
        "columns",
        "options",
        "env",
        "evaluation_sets",
        "extra_body",
        "labels",
        "mcp",
        "runtime_env",
        "tools",
        "vllm",
    }
    assert raw == own | {"endpoints", "kinds", "parts", "rewards", "row", "rubric"}


def test_prefect_form_accepts_a_section_without_kind() -> None:
    tree = {"train": {"learning_rate": 0.1}, "engine": {"max_concurrent_requests": 5}}
    assert RunConfig.model_validate(tree).engine.max_concurrent_requests == 5
    assert wrong({"config": tree}) == []


def test_every_flow_has_a_valid_prefect_form() -> None:
    from prefect.utilities.schema_tools.validation import is_valid_schema

    for flow in (post_training, nightly):
        is_valid_schema(json.loads(json.dumps(build_form(flow))))
    assert "storage" not in FORM["properties"]
