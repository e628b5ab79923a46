"""Runs that are there and have done nothing: the first entry of their log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollflow.storage.log.entries import RunCreated, decode, encode, entry_path
from rollflow.storage.log.log import Log
from rollflow.storage.objects.base import ObjectStore
from rollflow.tasks.run import FORMAT
from rollflow.tasks.settings import RunConfig

Config = RunConfig | Mapping[str, Any]


def describe(store: ObjectStore, run_id: str = "test", config: Config | None = None, **more: Any) -> None:
    """Create a run; a `config` that is no `RunConfig` may leave keys out."""
    defaults = RunConfig().model_dump(mode="json")
    tree = config.model_dump(mode="json") if isinstance(config, RunConfig) else {**defaults, **(config or {})}
    sources = more.pop("sources", len(tree["prompts"]))
    Log(store).create(RunCreated(run_id, tree, "0" * 64, sources, format=FORMAT, **more))


def change_config(store: ObjectStore, **changes: Any) -> None:
    """Another config for a run that exists: every entry is written anew, each with the hash of the one before."""
    for folder in ("log_snapshots", "log_segments"):
        for path in store.list(folder):
            store.delete(path)
    before = ""
    for n, path in enumerate(list(store.list("log"))):
        entry = replace(decode(store.get(path), n, store.get).entry, prev=before)
        if isinstance(entry.body, RunCreated):
            tree = {**json.loads(json.dumps(entry.body.config)), **changes}
            entry = replace(entry, body=replace(entry.body, config=tree))
        encoded = encode(entry)
        store.put(entry_path(n), encoded.data)
        before = encoded.sha256
