"""Finds the run home, which is the folder of all local files of rollflow on this machine, and finds runs and their
versions in a store.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from rollflow.flows.services.times import utc_stamp
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.storage.log.entries import entry_path
from rollflow.storage.objects import open_store
from rollflow.storage.policies import PolicyVersion
from rollflow.tasks.policies.folder import COPIED
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.names import run_id as checked
from rollflow.tasks.runtime.node import cache_in
from rollflow.tasks.runtime.store_config import StoreConfig


def run_home() -> Path:
    """Return the run home, the folder of rollflow's local files: `ROLLFLOW_HOME`, or `.rollflow` in the working
    directory.

    Raises:
        ConfigError: the working directory was removed, or `~user` in the path names no user.
    """
    given = os.environ.get("ROLLFLOW_HOME") or ".rollflow"
    try:
        return Path(given).expanduser().absolute()
    except (RuntimeError, FileNotFoundError) as error:
        raise ConfigError(
            f"ROLLFLOW_HOME = {given!r} is not the path of a folder ({error}); set ROLLFLOW_HOME to an absolute path"
        ) from None


def default_store() -> str:
    """Return the address of the default store of runs: `ROLLFLOW_STORE`, or a folder in the run home."""
    return os.environ.get("ROLLFLOW_STORE") or str(run_home() / "store")


def store_uri(config: RunConfig) -> str:
    """Return the URI of the store that the configuration names, or of the default store. The URI of a folder is its
    absolute path.
    """
    return open_store(config.store.uri or default_store()).uri


def context_of(uri: str, run_id: str) -> RunContext:
    """Return the context (the access to a run's storage) of the run `run_id` in the store at `uri`.

    Raises:
        ConfigError: `run_id` is not a run id.
    """
    return attach_run(f"{uri.rstrip('/')}/runs/{checked(run_id, 'run id')}")


def attach_run(uri: str) -> RunContext:
    """Return the context (the access to a run's storage) of the run whose files are stored at `uri`.

    Raises:
        ConfigError: the last part of `uri` is not a run id.
    """
    uri = uri.rstrip("/")
    checked(uri.rpartition("/")[2], "run id")
    return RunContext(uri, cache_in(run_home()))


def await_run(uri: str) -> RunContext:
    """Return the context (the access to a run's storage) of the run at `uri`. Reads and writes of the returned context
    wait while the storage does not answer.
    """
    unread = replace(attach_run(uri), patience=StoreConfig().patience_seconds)
    return replace(unread, patience=unread.config.store.patience_seconds)


def new_run_id(name: str) -> str:
    """Return a new run id, made of a recipe's name and the present time in UTC."""
    return f"{name}-{utc_stamp()}"


def run_id_of(name: str, flow_run: str) -> str:
    """Return the run id for a supervising Prefect flow run that was started without a run id.

    The returned run id depends only on the arguments, so a restarted flow run gets the same run id.
    """
    # Use the last characters of the flow run's id, because the first ones may encode the time.
    return f"{name}-{flow_run.replace('-', '')[-10:]}"


def find_run(name: str | None, store: str | None = None) -> RunContext:
    """Return the run that a user names by its path or URI, or by its run id in `store` (by default the default store).
    If `name` is None, return the newest run of the store.

    Raises:
        ConfigError: the run does not exist, has the format of another release, or its name is not a run id.
    """
    base = store or default_store()
    found = newest_runs(base, 1)[0] if name is None else locate_run(name, base)
    found.check_format()
    return found


def newest_runs(store: str | None, count: int) -> list[RunContext]:
    """Return the newest `count` runs of `store` (by default the default store), from older to newer.

    Raises:
        ConfigError: the store contains no run.
    """
    runs = list_runs(store)
    if not runs:
        raise ConfigError(
            f"there is no run in {store or default_store()} yet; start a run with `rollflow run RECIPE`, "
            "or name a run of another store by its path or URI"
        )
    return sorted(runs, key=_created_at)[-count:]


def locate_run(name: str, store: str) -> RunContext:
    """Return the run with this run id in `store`, or the run at this path or URI. The run's storage is not read."""
    found = attach_run(name) if "/" in name else context_of(store, name)
    # Use the store's absolute URI, because other processes have other working directories.
    return replace(found, uri=found.store.uri)


def list_runs(store: str | None = None) -> list[RunContext]:
    """Return all runs of `store` or of the default store."""
    base = open_store(store or default_store())
    names = [name for name in base.folders("runs") if base.exists(f"runs/{name}/{entry_path(0)}")]
    return [context_of(base.uri, name) for name in names]


def find_published(context: RunContext, version: int) -> PolicyVersion:
    """Return a published policy version; raise `ConfigError` if the policy version is not published."""
    newest = context.policies.newest()
    if not 0 <= version <= newest:
        there = f"has versions 0 to {newest}" if newest >= 0 else "has none yet"
        raise ConfigError(f"version {version} is not published; run {context.run_id!r} {there}")
    return context.policies.find(version)


def check_kept(context: RunContext, version: PolicyVersion) -> None:
    """Raise `ConfigError` if the weights of this policy version were deleted. The error lists the policy versions whose
    weights exist.
    """
    stored = set(context.store.list("policies"))
    policies = context.policies
    if policies.has_weights(version, stored.__contains__):
        return
    numbers = sorted({int(path.split("/")[1]) for path in stored if "/weights/" in path})
    newest = policies.newest()
    whole = [v for v in numbers if v <= newest and policies.has_weights(policies.find(v), stored.__contains__)]
    raise ConfigError(
        f"version {version.number}: the weights of this version were deleted; run {context.run_id!r} "
        f"still has the weights of versions {', '.join(map(str, whole)) or 'none'} (see store.keep_every "
        "and store.keep_last)"
    )


def read_policy_folder(context: RunContext) -> dict[str, bytes]:
    """Return the files of the run's policy folder (such as its tokenizer) by name, without the weights."""
    names = [path for path in context.store.list("policy") if Path(path).name in COPIED]
    return {Path(path).name: context.store.get(path) for path in names}


def _created_at(context: RunContext) -> float:
    """Return the time at which the run was created. If the run cannot be read, return 0, so that it counts as the
    oldest run.
    """
    try:
        return context.created_at
    except (ConfigError, Corrupt):
        return 0.0
