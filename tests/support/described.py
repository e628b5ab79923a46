"""Creates runs that have done nothing: their log has only the first entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollflow.storage.log.entries import RunCreated
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects.base import ObjectStore
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import FORMAT
from tests.support.log_runs import changed, sha256_of

Config = RunConfig | Mapping[str, Any]


def describe(store: ObjectStore, run_id: str = "test", config: Config | None = None, **more: Any) -> None:
    """Create a run; a `config` that is not a `RunConfig` may omit keys."""
    defaults = RunConfig().model_dump(mode="json")
    tree = config.model_dump(mode="json") if isinstance(config, RunConfig) else {**defaults, **(config or {})}
    sources = more.pop("sources", len(tree["prompts"]))
    Log(store).create(RunCreated(run_id, tree, sha256_of(tree), sources, format=FORMAT, **more))


def change_config(store: ObjectStore, **changes: Any) -> None:
    """Change the config in the log of an existing run. Every entry is rewritten with the hash of the previous entry."""

    def changed_in(created: RunCreated) -> RunCreated:
        tree = {**created.config, **changes}
        return replace(created, config=tree, config_sha256=sha256_of(tree))

    changed(store, 0, changed_in)
