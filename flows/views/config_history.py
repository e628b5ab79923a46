"""Shows the history of a run's config to users: what changed, who changed it, and from which version on.

Config keys whose names indicate a secret are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tomlkit

from rollflow.flows.views.parameters import flatten, names_secret, without_secrets
from rollflow.storage.log.configs import RecordedConfig
from rollflow.storage.log.entries import Change
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.renamed_keys import RECIPE

UNSET = "unset"
TOML = {"None": UNSET, "True": "true", "False": "false"}


@dataclass(frozen=True, slots=True)
class ShownChange:
    """One changed key of a run's config; the new value applies from `version` on. `before` and `after` are the old and
    new value as a recipe writes them.
    """

    version: int
    key: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.after}"


def shown_changes(recorded: RecordedConfig) -> list[ShownChange]:
    """Return the changed keys of one config change, without secrets."""
    return select_shown(recorded.changes, recorded.version)


def select_shown(changes: Iterable[Change], version: int) -> list[ShownChange]:
    """Return the changes of keys that contain no secret, under the keys' present names; they apply from `version`
    on.
    """
    today = (Change(*_today(one)) for one in changes)
    open_keys = (one for one in today if not any(map(names_secret, one.key.split("."))))
    return [ShownChange(version, one.key, _text(one, one.before), _text(one, one.after)) for one in open_keys]


def _today(change: Change) -> tuple[str, Any, Any]:
    key, before = RECIPE.change(change.key, change.before)
    return key, before, RECIPE.change(change.key, change.after)[1]


def change_sentence(recorded: RecordedConfig) -> str:
    """Return a sentence that describes one config change."""
    changes = ", ".join(map(str, shown_changes(recorded)))
    return f"config changed from version {recorded.version} on: {changes}"


def list_changes(context: RunContext) -> list[RecordedConfig]:
    """Return the config changes of a run in order, including changes under which no version was trained."""
    return context.configs[1:]


def flat_history(context: RunContext) -> dict[str, str]:
    """Return a text for each config key: its value when the run was created, followed by its later values."""
    shown = {key: TOML.get(text, text) for key, text in flatten(_tree(context, 0)).items()}
    for recorded in list_changes(context):
        for one in shown_changes(recorded):
            shown[one.key] = f"{shown.get(one.key, UNSET)}; from version {one.version} {one.after}"
    return shown


def change_table(context: RunContext) -> dict[str, list[Any]]:
    """Return all config changes of a run as a table: column name -> values."""
    rows = [(one, recorded) for recorded in list_changes(context) for one in shown_changes(recorded)]
    return {
        "from version": [one.version for one, _ in rows],
        "key": [one.key for one, _ in rows],
        "before": [one.before for one, _ in rows],
        "after": [one.after for one, _ in rows],
        "who": [recorded.who for _, recorded in rows],
        "entry": [recorded.entry for _, recorded in rows],
    }


def recipe_of(context: RunContext, which: int) -> str:
    """Return the run's config number `which` (0 is the first) as the text of a recipe."""
    return tomlkit.dumps(without_secrets(_tree(context, which, exclude_none=True)))


def _tree(context: RunContext, which: int, **options: bool) -> Mapping[str, Any]:
    return context.all_configs[which].model_dump(mode="json", **options)  # type: ignore[arg-type]


def _text(change: Change, value: Any) -> str:
    """Return a config value as text, without secrets."""
    shown = flatten({change.key: value})
    text = shown[change.key] if set(shown) == {change.key} else str(without_secrets({"": value})[""])
    return TOML.get(text, text)
