"""Shows the history of a run's configuration to users: what changed, who changed it, and from which policy version on.

Configuration keys whose names indicate a secret are left out of the history.
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
    """One changed key of a run's configuration. The new value applies from the policy version `version` on. `before`
    and `after` are the old and the new value in the notation of a recipe (TOML).
    """

    version: int
    key: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.after}"


def shown_changes(recorded: RecordedConfig) -> list[ShownChange]:
    """Return the keys that one change of a run's configuration has changed; keys with secret values are left out."""
    return select_shown(recorded.changes, recorded.version)


def select_shown(changes: Iterable[Change], version: int) -> list[ShownChange]:
    """Return the changes of configuration keys that contain no secret, under the keys' present names. The changes apply
    from the policy version `version` on.
    """
    today = (Change(*_today(one)) for one in changes)
    open_keys = (one for one in today if not any(map(names_secret, one.key.split("."))))
    return [ShownChange(version, one.key, _text(one, one.before), _text(one, one.after)) for one in open_keys]


def _today(change: Change) -> tuple[str, Any, Any]:
    key, before = RECIPE.change(change.key, change.before)
    return key, before, RECIPE.change(change.key, change.after)[1]


def change_sentence(recorded: RecordedConfig) -> str:
    """Return a sentence that describes one change of a run's configuration."""
    changes = ", ".join(map(str, shown_changes(recorded)))
    return f"config changed from version {recorded.version} on: {changes}"


def list_changes(context: RunContext) -> list[RecordedConfig]:
    """Return the changes of a run's configuration in order. Changes that were replaced before a policy version was
    trained are included.
    """
    return context.configs[1:]


def flat_history(context: RunContext) -> dict[str, str]:
    """Return text for each configuration key: the value when the run was created, followed by its later values."""
    shown = {key: TOML.get(text, text) for key, text in flatten(_tree(context, 0)).items()}
    for recorded in list_changes(context):
        for one in shown_changes(recorded):
            shown[one.key] = f"{shown.get(one.key, UNSET)}; from version {one.version} {one.after}"
    return shown


def change_table(context: RunContext) -> dict[str, list[Any]]:
    """Return all changes of a run's configuration as a table, which maps column names to values."""
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
    """Return one of a run's recorded configurations as the text of a recipe. `which` is its number; 0 is the first
    configuration.
    """
    return tomlkit.dumps(without_secrets(_tree(context, which, exclude_none=True)))


def _tree(context: RunContext, which: int, **options: bool) -> Mapping[str, Any]:
    return context.all_configs[which].model_dump(mode="json", **options)  # type: ignore[arg-type]


def _text(change: Change, value: Any) -> str:
    """Return a configuration value as text, without secrets."""
    shown = flatten({change.key: value})
    text = shown[change.key] if set(shown) == {change.key} else str(without_secrets({"": value})[""])
    return TOML.get(text, text)
