"""Changes the config of an existing run: decides which keys may change, and records the change in the run's log.

    rollflow resume RUN --set key=value --> config before, config after --> rejected, by key
                                                                        --> claim, ConfigChanged

A key may not change in three cases:

- The section of the key gives a reason why the key is fixed (`Section.fixed`).
- The key determines what the learner stores beside the policy weights (`_list_stored_parts`).
- The log does not allow the change yet, for example because an unused batch was formed under the old value.

The process that records the change takes over the supervisor's role from a running supervisor.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.storage.log.configs import diff_trees
from rollflow.storage.log.entries import Body, Change, ConfigChanged
from rollflow.storage.log.rules import FIXED, FORMED
from rollflow.storage.log.state import Deposed, EntryRefused, RunState
from rollflow.tasks.objectives.config import ImportObjective, PartsObjective
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext, claim, parse_recorded
from rollflow.tasks.runtime.renamed_keys import RECIPE
from rollflow.tasks.runtime.sections import Section
from rollflow.tasks.scorers.config import name_section

ANEW = "or start another run from the policy that `rollflow export` writes"
WHO = "rollflow resume --set"
LONGEST = 60  # largest number of characters of a config value in an error message


def tree_of(config: RunConfig) -> dict[str, Any]:
    """Return a config as nested dictionaries, which is how the run's log records the config."""
    return config.model_dump(mode="json")


def check_change(context: RunContext, after: RunConfig) -> None:
    """Raise `ConfigError` with one sentence for each changed config key that may not change."""
    first, before, state = context.all_configs[0], context.config, context.log.state
    changes = diff_trees(tree_of(before), tree_of(after))
    refused = [text for change in changes if (text := _refuse_fixed(before, after, change))]
    refused += _refuse_stored_parts(before, after)
    refused += _refuse_longer_responses(first, after)
    refused += _refuse_missing_scorers(before, after)
    refused += _refuse_waiting(before, after, state)
    if len(refused) == 1:
        raise ConfigError(refused[0])
    if refused:
        raise ConfigError("\n  ".join([f"{len(refused)} keys cannot change:", *refused]))


def change_config(context: RunContext, after: RunConfig) -> bool:
    """Record a new config of the run; return False if the run already has this config.

    Raises:
        ConfigError: the run's log has grown meanwhile and no longer allows the change.
        Deposed: another supervisor process has taken over the run meanwhile.
    """
    context.log.follow()
    if tree_of(context.config) == tree_of(after):
        return False
    writer = claim(context, "supervisor", "", WHO)

    def body(state: RunState, _: object) -> Body:
        return _build_change(context, after, state)

    try:
        writer.append(body)
    except Deposed:
        raise
    except EntryRefused as error:
        if tree_of(context.config) == tree_of(after):
            return False  # another process has recorded the same config change
        raise ConfigError(
            f"the config cannot change, because the run continued meanwhile ({error}); stop the run first: "
            f"rollflow stop {context.uri}"
        ) from None
    return True


def _build_change(context: RunContext, after: RunConfig, state: RunState) -> ConfigChanged:
    recorded = context.configs[-1].config
    config = _merge_recorded(recorded, context.config, after)
    sha256 = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return ConfigChanged(state.version + 1, config, sha256, diff_trees(recorded, config), _name_person())


def _name_person() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # the operating system has no name for the user
        name = f"user {os.getuid()}"
    return f"{name} on {socket.gethostname()}"


def _merge_recorded(recorded: Mapping[str, Any], before: RunConfig, after: RunConfig) -> dict[str, Any]:
    """Merge the differences between two configs into the recorded config, and keep all other values. If the merged
    config does not parse to `after`, return all of `after` instead.
    """
    old, new = (RECIPE.undo(tree_of(config), recorded) for config in (before, after))
    tree = _merge_trees(recorded, old, new)
    same = parse_recorded(tree) == after
    return tree if same else {**tree_of(after), **{name: recorded[name] for name in FIXED if name in recorded}}


def _merge_trees(recorded: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in recorded.items() if name not in before or name in after}
    for name, value in after.items():
        old = before.get(name)
        if name in before and old == value:
            continue
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            inner = recorded.get(name)
            value = _merge_trees(inner if isinstance(inner, Mapping) else {}, old, value)
        found[name] = value
    return found


# --- which keys may not change ----------------------------------------------------------------------------------------


def _refuse_fixed(before: RunConfig, after: RunConfig, change: Change) -> str:
    """Return an error message if a config key can never change, or "" if the key may change."""
    for config in (before, after):
        if why := explain_fixed(config, change.key):
            cure = _suggest_fix(before, change.key)
            return f"{_format_assignment(after, change.key)}: the key cannot change, because {why}; {cure}"
    return ""


def explain_fixed(config: RunConfig, key: str) -> str:
    """Return why a config key, or a section that contains the key, can never change; "" if the key may change."""
    place: Any = config
    names = key.split(".")
    for depth, name in enumerate(names):
        if isinstance(place, Mapping):  # a section with names that the user chose, such as `rewards`
            place = place.get(name)
            continue
        if not isinstance(place, Section):
            break
        if why := _find_reason(type(place), name):
            return "" if place.permits_change(".".join(names[depth:])) else why
        place = getattr(place, name, None)
    return ""


def _find_reason(section: type[Section], name: str) -> str:
    found = (vars(base).get("fixed", {}) for base in section.__mro__)
    return next((table[name] for table in found if name in table), "")


def _refuse_stored_parts(before: RunConfig, after: RunConfig) -> Iterator[str]:
    old, new = _list_stored_parts(before), _list_stored_parts(after)
    for key in old.keys() & new.keys():
        if old[key] != new[key]:
            why = f"the learner's stored state has {old[key] or 'none'}, but this value needs {new[key] or 'none'}"
            yield f"{_format_assignment(after, key)}: {why}; {_suggest_fix(before, key)}"


def _list_stored_parts(config: RunConfig) -> dict[str, str]:
    """Map config keys to the parts that these keys add to the learner's stored state, such as a critic."""
    objective = config.train.objective
    found = {"train.objective.advantage.baseline": "a critic" if objective.advantage.baseline == "critic" else ""}
    found["train.objective.kind"] = objective.path if isinstance(objective, ImportObjective) else ""
    if isinstance(objective, PartsObjective):
        penalties = objective.penalties
        found["train.objective.penalties.kl_weight"] = "a reference" if penalties.uses_reference else ""
        adapted = "an adapted KL weight" if penalties.kl_target is not None else ""
        found["train.objective.penalties.kl_target"] = adapted
    return found


def _refuse_longer_responses(first: RunConfig, after: RunConfig) -> Iterator[str]:
    """Reject a larger `max_new_tokens`, because prompts were chosen to leave room only for the original length."""
    room, asked = first.engine.max_new_tokens, after.engine.max_new_tokens
    if asked > room:
        why = f"the run's prompts were chosen to leave room for {room} tokens in the policy's context"
        yield f"engine.max_new_tokens = {asked}: {why}; choose {room} or less, {ANEW}"


def _refuse_missing_scorers(before: RunConfig, after: RunConfig) -> Iterator[str]:
    """Reject a config without a scorer that the prompts of the run may name."""
    for name in before.scorers.keys() - after.scorers.keys():
        yield f"{name_section(name)}: prompts of the run name this scorer; keep the section, {ANEW}"


def _refuse_waiting(before: RunConfig, after: RunConfig, state: RunState) -> Iterator[str]:
    """Yield an error for each config change that the run's log does not allow yet."""
    if after.versions < state.version:
        yield (
            f"versions = {after.versions}: version {state.version} is already published; choose {state.version} or more"
        )
    waiting = ", ".join(map(str, sorted(state.waiting)))
    for key in FORMED if state.waiting else ():
        if (was := _format_value(before, key)) != _format_value(after, key):
            wait = f"the batches that wait for the learner ({waiting}) were formed with {was}"
            cure = (
                f"train on these batches first (with only --set versions={max(state.waiting) + 1}), then change the key"
            )
            yield f"{_format_assignment(after, key)}: {wait}; {cure}"
    ages = [number - group.started for number, batch in state.waiting.items() for group in batch.groups]
    if max(ages, default=0) > after.async_ratio:
        what = f"the batches that wait for the learner ({waiting}) have groups that are {max(ages)} versions old"
        yield f"async_ratio = {after.async_ratio:g}: {what}; choose {max(ages)} or more"


def _format_assignment(config: RunConfig, key: str) -> str:
    return f"{key} = {_format_value(config, key)}"


def _suggest_fix(before: RunConfig, key: str) -> str:
    return f"leave it at {_format_value(before, key)}, {ANEW}"


def _format_value(config: RunConfig, key: str) -> str:
    """Format the value of a config key for an error message; a key without a value is shown as "unset"."""
    place: Any = tree_of(config)
    for name in key.split("."):
        place = place.get(name) if isinstance(place, Mapping) else None
    if isinstance(place, Mapping | list) and len(repr(place)) > LONGEST:
        return "[...]"
    return "unset" if place is None else repr(place)
