"""Prepares a run: checks the recipe, stores the policy and the prompts, and writes the first entry of the run's log.
The first entry reserves the run id, so that two commands with the same run id cannot overwrite each other's files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version as package_version

from rollflow.flows.locations import context_of, store_uri
from rollflow.flows.preflight import preflight
from rollflow.storage.errors import ConfigError, Conflict
from rollflow.storage.log.entries import RunCreated, entry_path
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import Data, ObjectStore
from rollflow.storage.objects.base import hash_pieces, split_buffers
from rollflow.storage.records import StoredObject
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import FORMAT, RunContext
from rollflow.tasks.run.prompt_check import Tell
from rollflow.tasks.run.prompt_pins import store_prompts
from rollflow.tasks.run.reward_models import FOLDER as MODELS
from rollflow.tasks.run.reward_models import read_models
from rollflow.tasks.run.user_code import own_code
from rollflow.tasks.runtime.names import is_number


def prepare(config: RunConfig, run_id: str, tell: Tell = lambda _: None) -> RunContext:
    """Create the run in its store. `tell` is called with progress messages and notes for the user.

    Raises:
        ConfigError: the run would fail; the message says what the user must change in the recipe.
    """
    if is_number(run_id):
        raise ConfigError(
            f"run id = {run_id!r} is a number, which commands would read as a policy version of the newest run; "
            "add a letter to the id"
        )
    found = preflight(config, tell=tell)
    uri = store_uri(config)
    context = context_of(uri, run_id)
    if context.store.exists(entry_path(0)):
        raise ConfigError(f"run id {run_id!r} already exists in {uri}; choose another id with --run-id")
    for note in found.notes:
        tell(note)
    policy = {f"policy/{name}": data for name, data in {**found.files, **found.weights}.items()}
    models = read_models(config)
    _store_files(context.store, "policy", policy, run_id)
    _store_files(context.store, MODELS, models, run_id)
    store_prompts(context.store, config, found.pins, found.read)
    created = RunCreated(
        run_id=run_id,
        config=config.model_dump(mode="json"),
        config_sha256=config.sha256(),
        sources=len(config.prompts),
        prompts=tuple(pin.model_dump() for pin in found.pins),
        policy=tuple(_describe_stored(path, data) for path, data in policy.items()),
        models=tuple(_describe_stored(path, data) for path, data in models.items()),
        source_version=found.source_version,
        probe_tokens=found.probe,
        code_version=package_version("rollflow"),
        format=FORMAT,
        own_code=own_code(config),
        single_start=True,
    )
    try:
        Log(context.store).create(created)
    except Conflict:
        raise ConfigError(f"run id {run_id!r} already exists in {uri}; choose another id with --run-id") from None
    return context


def _describe_stored(path: str, data: Data) -> StoredObject:
    parts = split_buffers(data)
    return StoredObject(path, sum(map(len, parts)), hash_pieces(parts))


def _store_files(run: ObjectStore, prefix: str, files: Mapping[str, Data], run_id: str) -> None:
    """Write the files of the policy or of the reward models to the run's storage, below `prefix`. Raise `ConfigError`
    if another command has written different files for the same run id.

    Without this check, a run could use the weights of another command that prepared the same run id.
    """

    def refusal_of(path: str) -> ConfigError:
        what = "policy" if prefix == "policy" else "reward model"
        words = f"another {what} was prepared under this id ({run.uri}/{path}); choose another id with --run-id"
        return ConfigError(f"run id {run_id!r}: {words}")

    for path, data in files.items():
        try:
            run.create(path, data)
        except Conflict:
            if hash_pieces(split_buffers(data)) != hashlib.sha256(run.get(path)).hexdigest():
                raise refusal_of(path) from None
    if foreign := {*run.list(prefix)} - files.keys():
        raise refusal_of(min(foreign))
