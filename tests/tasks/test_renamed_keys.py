"""Renamed keys: a recorded config may have earlier names; a new recipe with an earlier name is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.resume import record_change
from rollflow.flows.config import load_hardware, load_recipe, parse_config
from rollflow.flows.keepalive.supervisor_restart import _parameters, run_uri
from rollflow.flows.views.config_history import change_sentence, flat_history, recipe_of
from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.storage.log.entries import ConfigChanged
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.config_changes import tree_of
from rollflow.tasks.run.context import RunContext, parse_recorded
from rollflow.tasks.run.expectations import expected_of
from rollflow.tasks.runtime.renamed_keys import HARDWARE, RECIPE
from tests.support.log_runs import changed, of_kind, sha256_of
from tests.support.small_run import prepare_small, train_small

Tree = dict[str, Any]

# Earlier key, key of today, values that a recipe may have there.
RENAMED: list[tuple[str, str, Sequence[Any]]] = [
    ("rollout.depth", "rollout.max_inflight_groups", [3, 1, 99]),
    ("rollout.ahead", "rollout.max_batches_ahead", [0.5, 0, 2]),
    ("rollout.extra_groups", "rollout.redundant_groups", [0, 9]),
    ("rollout.extra_responses", "rollout.redundant_responses", [1, 0, 9]),
    ("rollout.tail_after", "rollout.max_preemptions", [2, 9]),
    ("rollout.at_bound", "rollout.on_stale", ["drop"]),
    ("rollout.order", "rollout.batch_order", ["finished"]),
    ("rollout.staleness", "rollout.staleness_from", ["oldest-token", "started"]),
    ("rollout.filter.most", "rollout.filter.max_consecutive", [3, 99]),
    ("engine.slots", "engine.max_concurrent_requests", [32, 1]),
    ("engine.in_flight", "engine.on_weight_update", ["restart", "continue"]),
    ("engine.slowing", "engine.batch_slowdown", [0.5, 0.0]),
    ("engine.reading", "engine.kv_read_cost", [0.01, 0.0]),
    ("engine.grain", "engine.tokens_per_tick", [4, 1]),
    ("reward.format.price", "reward.format.penalty", [0.5, 1]),
    ("train.learner", "train.kind", ["torch"]),
    ("train.spread", "train.multi_node", [False]),
    ("train.share_prompts", "train.share_prefixes", ["prompts", "none", "all"]),
]
# Key, earlier value, value of today.
VALUES = [("train.not_finite", "next", "skip"), ("rollout.routing", "group", "prefix")]
SHARING = {True: "prompts", False: "none"}  # earlier and present values of `train.share_prefixes`
# Keys of a hardware file: earlier, today's, a value.
HARDWARE_RENAMED = [
    ("engines.slots", "engines.max_concurrent_requests", 3),
    ("engines.slowing", "engines.batch_slowdown", 0.5),
    ("engines.reading", "engines.kv_read_cost", 0.5),
    ("responses.grain", "responses.tokens_per_tick", 2),
]


def put(tree: Tree, key: str, value: object) -> None:
    *parents, last = key.split(".")
    reduce(lambda node, name: node.setdefault(name, {}), parents, tree)[last] = value


def of_earlier_run(tree: Mapping[str, Any]) -> Tree:
    """Return a config of today as an earlier rollflow recorded it."""
    earlier: Tree = json.loads(json.dumps(tree))
    for old, new, _ in RENAMED:
        *parents, last = new.split(".")
        section = reduce(lambda node, name: (node or {}).get(name), parents, earlier)
        if section and last in section:
            section[old.rpartition(".")[2]] = section.pop(last)
    for key, old, new in VALUES:
        name, _, last = key.partition(".")
        if earlier.get(name, {}).get(last) == new:
            earlier[name][last] = old
    if "rollout" in earlier:
        earlier["rollout"]["mode"] = "queue"  # a removed key
    return earlier


@st.composite
def recipes(draw: st.DrawFn) -> Tree:
    """Draw the renamed keys of a recipe, each of which may be left out."""
    tree: Tree = {"engine": {"kind": "timed"}}
    for _, key, values in RENAMED:
        if draw(st.booleans()):
            put(tree, key, draw(st.sampled_from(values)))
    for key, _, value in VALUES:
        if draw(st.booleans()):
            put(tree, key, value)
    if "redundant_groups" in tree.get("rollout", {}):
        put(tree, "rollout.on_stale", "drop")
    return tree


@settings(max_examples=30)
@given(recipes())
def test_older_config_is_read_with_current_keys(tree: Tree) -> None:
    for today in (tree, tree_of(parse_config(tree))):  # as a person wrote it, and as a run records it
        earlier = of_earlier_run(today)
        assert RECIPE.apply(earlier) == RECIPE.apply(today) == today
        assert RECIPE.apply(RECIPE.undo(today, earlier)) == today
    assert parse_recorded(of_earlier_run(tree_of(parse_config(tree)))) == parse_config(tree)


def keys_of(config: object, prefix: str = "") -> Iterator[str]:
    for name, value in config.items() if isinstance(config, Mapping) else ():
        yield f"{prefix}{name}"
        yield from keys_of(value, f"{prefix}{name}.")


def test_table_of_renamed_keys_names_existing_keys() -> None:
    everything: Tree = {"engine": {"kind": "timed"}, "rollout": {"filter": {}}, "reward": {"format": {}}}
    today = set(keys_of(tree_of(parse_config(everything))))
    table = {old: f"{old.rpartition('.')[0]}.{new}" for old, new in RECIPE.keys.items()}
    assert table == {old: new for old, new, _ in RENAMED}
    assert set(table.values()) <= today
    assert not table.keys() & today
    assert RECIPE.values == {key: {old: new} for key, old, new in VALUES} | {"train.share_prefixes": SHARING}
    assert RECIPE.removed == {"rollout.mode"}
    assert not RECIPE.removed & today
    assert HARDWARE.keys.keys() == {old for old, _, _ in HARDWARE_RENAMED}


@pytest.mark.parametrize(("old", "new"), SHARING.items())
def test_recorded_share_prompts_keeps_its_effect(old: bool, new: str) -> None:
    """If a replay shared other tokens than the run, its weights would have other bits."""
    assert parse_recorded({"train": {"share_prompts": old}}).train.share_prefixes == new
    assert parse_recorded({"train": {"share_prompts": "all"}}).train.share_prefixes == "all"  # by a config change
    with pytest.raises(ConfigError, match=rf"share_prefixes = {old}: the value was renamed to .{new}.; write that"):
        parse_config({"train": {"share_prefixes": old}})


@pytest.mark.parametrize(("old", "new", "values"), RENAMED)
def test_recipe_with_an_earlier_key_is_refused(
    old: str, new: str, values: Sequence[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier key in the file, in `--set` or in a sweep gives one sentence and exit code 2."""
    plain, file, value = tmp_path / "plain.toml", tmp_path / "recipe.toml", values[0]
    plain.write_text('engine.kind = "timed"\n')
    file.write_text(f'engine.kind = "timed"\n{old} = {json.dumps(value)}\n')
    for command in (["check", str(file)], ["check", str(plain)], ["sweep", str(plain), "--seeds", "2"]):
        assert main([*command, *(["--set", f"{old}={json.dumps(value)}"] if str(plain) in command else [])]) == 2
        said = capsys.readouterr().err
        assert said == f"rollflow: {old} = {value!r}: the key was renamed to {new}; write that name\n"


def test_recipe_with_a_removed_key_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[rollout]\nmode = "batch"\n')
    with pytest.raises(ConfigError, match=r"^rollout.mode = 'batch': the key was removed; leave it out$"):
        load_recipe(recipe)


KINDS: list[tuple[dict[str, Any], str, str, Any]] = [
    ({"kind": "trl", "path": "a:b"}, "turn_tokens", "max_turn_tokens", 7),
    ({"kind": "gymnasium", "id": "a"}, "step_seconds", "turn_seconds", 7),
    ({"kind": "trl", "path": "a:b"}, "reset_seconds", "setup_seconds", 7),
    ({"kind": "gymnasium", "id": "a"}, "processes", "at_once", 7),
    ({"kind": "trl", "path": "a:b"}, "python", "interpreter", "/usr/bin/python3"),
]


@pytest.mark.parametrize(("section", "old", "new", "value"), KINDS)
def test_renamed_key_is_accepted_only_in_recorded_runs(section: dict[str, Any], old: str, new: str, value: Any) -> None:
    today, earlier = {"environment": {**section, new: value}}, {"environment": {**section, old: value}}
    assert RECIPE.apply(earlier) == RECIPE.apply(today) == today
    assert RECIPE.undo(today, earlier) == earlier
    assert parse_recorded(earlier) == parse_config(today)
    sentence = f"environment.{old} = {value!r}: the key was renamed to environment.{new}; write that name"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_config(earlier)
    timed = {"environment": {"kind": "timed", "turn_tokens": 7}}
    assert RECIPE.apply(timed) == timed


def test_recorded_admit_by_kv_of_single_turns_is_read_as_slots() -> None:
    """The value "kv" had no effect on episodes of one turn, and a new recipe may not have it."""
    tree = {"rollout": {"admit_by": "kv", "attempts": 4}, "engine": {"kind": "timed", "kv_tokens": 1000}}
    config = parse_recorded(tree)
    assert (config.rollout.admit_by, config.rollout.attempts) == ("slots", 4)
    with pytest.raises(ConfigError, match='set "slots"'):
        parse_config(tree)
    several = {**tree, "environment": {"kind": "timed"}}
    assert parse_recorded(several).rollout.admit_by == "kv"
    # a supervisor of such a run that has crashed is still found
    crashed: Any = SimpleNamespace(id="id", parameters={"config": {**tree, "name": "n"}, "run_id": "r"})
    assert run_uri(crashed).endswith("/r")


@pytest.mark.parametrize(("key", "old", "new"), VALUES)
def test_recipe_with_an_earlier_value_is_refused(key: str, old: str, new: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.touch()
    with pytest.raises(ConfigError) as refused:
        load_recipe(recipe, [f"{key}={old}"])
    assert str(refused.value) == f"{key} = '{old}': the value was renamed to \"{new}\"; write that value"


@pytest.mark.parametrize(("old", "new", "value"), HARDWARE_RENAMED)
def test_hardware_file_with_an_earlier_key_is_refused(old: str, new: str, value: float, tmp_path: Path) -> None:
    section, _, name = old.rpartition(".")
    file = tmp_path / "hardware.toml"
    file.write_text(f"[{section}]\n{name} = {value}\n")
    with pytest.raises(ConfigError, match=f"{old} = {value}: the key was renamed to {new}; write that name"):
        load_hardware(file)


def test_error_names_all_renamed_keys_of_a_recipe(tmp_path: Path) -> None:
    """The error about a renamed key also names the other faults of the recipe."""
    with pytest.raises(ConfigError) as refused:
        parse_config({"rollout": {"depth": 0, "tail_after": 3, "attempts": 0}, "verions": 3})
    text = str(refused.value)
    assert text.startswith("5 keys must change:")
    for part in (
        "rollout.depth = 0: the key was renamed",
        "rollout.max_inflight_groups = 0 is",
        "rollout.tail_after = 3: the",
    ):
        assert part in text
    assert "did you mean versions?" in text
    assert "rollout.attempts = 0 is less" in text


def test_flow_parameters_with_an_earlier_key_are_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"rollout\.depth = 3: the key was renamed to rollout\.max_inflight_groups"
    ):
        RunConfig.model_validate({"rollout": {"depth": 3}})


def test_crashed_flow_run_with_old_keys_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that crashed under an earlier rollflow is restarted by this one."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    config = of_earlier_run(tree_of(parse_config({"name": "one", "rollout": {"max_inflight_groups": 3}})))
    crashed: Any = SimpleNamespace(parameters={"config": config, "run_id": "one-1"}, id=uuid4())
    assert run_uri(crashed).endswith("/runs/one-1")
    assert RunConfig.model_validate(_parameters(crashed)["config"]).rollout.max_inflight_groups == 3


# --- a run that an earlier rollflow recorded --------------------------------------------------------------------------


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    """Create a trained run whose log has the earlier names."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    context = prepare_small(tmp_path, versions=2)
    tree = tree_of(context.config)
    tree["rollout"] |= {"max_inflight_groups": 7, "filter": {"max_consecutive": 50}}
    record(context, of_earlier_run(tree))
    context = again(context)
    train_small(context)
    return again(context)


def record(context: RunContext, tree: Tree) -> None:
    """Make this config the first config of the run."""
    changed(context.store, 0, lambda created: replace(created, config=tree, config_sha256=sha256_of(tree)))


def again(context: RunContext) -> RunContext:
    return RunContext(context.uri, context.cache)


def stored(context: RunContext) -> Tree:
    return dict(context.configs[-1].config)


def test_run_with_earlier_key_names_passes_the_audit(earlier: RunContext) -> None:
    assert "depth" in stored(earlier)["rollout"]
    assert earlier.config.rollout.max_inflight_groups == 7
    assert earlier.created.config_sha256 == sha256_of(stored(earlier))
    report = audit(earlier.store, deep=True, expected=expected_of(earlier))
    assert report.clean, report.violations


def test_changed_older_run_keeps_its_key_names(earlier: RunContext) -> None:
    """`resume --set` takes the current names; the log keeps the earlier names."""
    before = stored(earlier)
    record_change(earlier, ["versions=3", "rollout.max_inflight_groups=9", "rollout.filter.max_consecutive=60"])
    context = again(earlier)
    [entry] = of_kind(context.store, ConfigChanged)
    assert entry.body.changes == (
        ("rollout.depth", 7, 9),
        ("rollout.filter.most", 50, 60),
        ("versions", 2, 3),
    )
    rollout = {**before["rollout"], "depth": 9, "filter": {**before["rollout"]["filter"], "most": 60}}
    assert stored(context) == {**before, "versions": 3, "rollout": rollout}
    assert entry.body.config_sha256 == sha256_of(stored(context))
    assert (context.config.versions, context.config.rollout.max_inflight_groups) == (3, 9)
    train_small(context)
    assert audit(context.store, deep=True, expected=expected_of(context)).clean


def test_changes_of_an_old_run_are_shown_with_current_keys(earlier: RunContext) -> None:
    record_change(earlier, ["rollout.max_inflight_groups=9"])
    context = again(earlier)
    sentence = change_sentence(context.configs[-1])
    assert sentence == "config changed from version 3 on: rollout.max_inflight_groups 7 -> 9"
    history = flat_history(context)
    assert history["rollout.max_inflight_groups"] == "7; from version 3 9"
    assert "rollout.depth" not in history
    assert "depth" not in recipe_of(context, 0)


@pytest.mark.parametrize(("key", "value", "shown"), [
    ("rollout.depth", 3, ("rollout.max_inflight_groups", 3)),
    ("rollout.filter.most", None, ("rollout.filter.max_consecutive", None)),
    ("rollout.filter", {"most": 3}, ("rollout.filter", {"max_consecutive": 3})),
    ("rollout.max_inflight_groups", 3, ("rollout.max_inflight_groups", 3)),
    ("cluster.env.depth", "1", ("cluster.env.depth", "1")),
])  # fmt: skip
def test_config_change_entry_is_read_with_current_key_names(key: str, value: object, shown: tuple[str, object]) -> None:
    assert RECIPE.change(key, value) == shown


def test_old_key_name_is_refused_in_a_config_change(earlier: RunContext) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.depth = 9: the key was renamed to rollout\.max_inflight_groups"):
        record_change(earlier, ["rollout.depth=9"])


def test_recorded_config_with_old_and_new_key_is_corrupt(earlier: RunContext) -> None:
    record(earlier, stored(earlier) | {"rollout": {"depth": 7, "max_inflight_groups": 8}})
    with pytest.raises(Corrupt, match=r"invalid config: .*rollout\.depth = 7"):
        again(earlier).config  # noqa: B018 - it is read here
