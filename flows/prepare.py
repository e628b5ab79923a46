"""Preparing a run: everything a person could have got wrong is found here, before anything heavy starts.

It checks the store, builds or copies the policy folder, checks the prompts against the policy's context, pins them, and
creates the first entry of the run's log. From then on the run id is taken. If two commands prepare one run id at the
same time, neither replaces what the other has written.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from importlib.metadata import version as package_version
from pathlib import Path

from rollflow.flows.config import check_objective
from rollflow.flows.locations import context_of, store_uri
from rollflow.storage.errors import ConfigError, Conflict
from rollflow.storage.log.entries import RunCreated, entry_path
from rollflow.storage.log.log import Log
from rollflow.storage.objects import Data, ObjectStore, open_store
from rollflow.storage.objects.base import digest, pieces
from rollflow.storage.records import StoredObject
from rollflow.tasks.config import RunConfig
from rollflow.tasks.engines.runnable import hindrance_of
from rollflow.tasks.own_parts import check_own_parts, own_code
from rollflow.tasks.policies.folder import build_cold_folder, copy_folder, weight_files, with_dtype
from rollflow.tasks.policies.stop import stop_tokens
from rollflow.tasks.policies.tokenizer import PolicyTokenizer, other_reading
from rollflow.tasks.prompts.base import Reader
from rollflow.tasks.prompts.pins import Pin, keep, pinned, read_once
from rollflow.tasks.run_context import FORMAT, RunContext, open_prompts, probe_tokens

VOCABULARY_TEXTS = 2000


def prepare(config: RunConfig, run_id: str) -> RunContext:
    """Create the run in its store.

    Raises:
        ConfigError: with one sentence for what a person must change.
    """
    check_own_parts(config)
    check_objective(config)
    uri = store_uri(config)
    context = context_of(uri, run_id)
    open_store(uri).check()
    if context.store.exists(entry_path(0)):
        raise ConfigError(f"run id {run_id!r} exists in {uri}; choose another with --run-id")
    read = read_once()
    files = with_dtype(_policy_files(config, read), config.policy.dtype)
    probe, pins = _check_policy(config, files, read)
    policy = {f"policy/{name}": data for name, data in {**files, **_first_weights(config)}.items()}
    _place(context.store, policy, run_id)
    keep(context.store, config, pins, read)
    created = RunCreated(
        run_id=run_id,
        config=config.model_dump(mode="json"),
        config_sha256=config.sha256(),
        sources=len(config.prompts),
        prompts=tuple(pin.model_dump() for pin in pins),
        policy=tuple(_stored(path, data) for path, data in policy.items()),
        probe_tokens=tuple(probe),
        code_version=package_version("rollflow"),
        format=FORMAT,
        own_code=own_code(config),
    )
    try:
        Log(context.store).create(created)
    except Conflict:
        raise ConfigError(f"run id {run_id!r} exists in {uri}; choose another with --run-id") from None
    return context


def _stored(path: str, data: Data) -> StoredObject:
    parts = pieces(data)
    return StoredObject(path, sum(map(len, parts)), digest(parts))


def _place(run: ObjectStore, policy: Mapping[str, Data], run_id: str) -> None:
    """Write the policy's files, unless another command with the same run id has written others.

    That command may still prepare, or have ended half-way: its weights or chat template must not become this run's.
    """

    def refused(path: str) -> ConfigError:
        words = f"another policy was prepared under it ({run.uri}/{path}); choose another with --run-id"
        return ConfigError(f"run id {run_id!r}: {words}")

    for path, data in policy.items():
        try:
            run.create(path, data)
        except Conflict:
            if digest(pieces(data)) != hashlib.sha256(run.get(path)).hexdigest():
                raise refused(path) from None
    if foreign := {*run.list("policy")} - policy.keys():
        raise refused(min(foreign))


def _policy_files(config: RunConfig, read: Reader) -> dict[str, bytes]:
    """The policy folder: a new small one, or that of `policy.path`."""
    if config.policy.cold_start is None:
        assert config.policy.path is not None
        return copy_folder(config.policy.path)
    return build_cold_folder(config.policy.cold_start, open_prompts(config, None, read).texts(VOCABULARY_TEXTS))


def _first_weights(config: RunConfig) -> Mapping[str, Data]:
    """The weights of `policy.path`; a cold start makes its own."""
    return weight_files(config.policy.path) if config.policy.path is not None else {}


def _check_policy(config: RunConfig, files: dict[str, bytes], read: Reader) -> tuple[list[int], tuple[Pin, ...]]:
    """Open the policy as the run will: end-of-sequence, context and prompts; returns the probe's tokens and pins."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        _check_end(config, folder)
        _check_engine(config, folder)
        tokenizer = PolicyTokenizer(folder)
        if tokenizer.context <= config.engine.max_new_tokens:
            raise ConfigError(
                f"engine.max_new_tokens = {config.engine.max_new_tokens}: the policy's context is "
                f"{tokenizer.context} tokens; choose fewer"
            )
        asked = open_prompts(config, tokenizer, read)
        asked.held_out()
        prompts = [asked.prompt(index) for index in range(max(min(config.groups, 64), len(config.prompts)))]
        _check_reading(config, folder, [prompt.text for prompt in prompts])
        return probe_tokens(asked), pinned(config, asked, read)


def _check_end(config: RunConfig, folder: Path) -> None:
    if not stop_tokens(folder):
        raise ConfigError(
            f"policy.path = {config.policy.path!r}: its tokenizer has no end-of-sequence token; "
            "set eos_token_id in its config.json, or choose a policy that has one"
        )


def _check_engine(config: RunConfig, folder: Path) -> None:
    """Refuse a policy that the transformers engine cannot run: its actors would die, one after the other."""
    path = config.policy.path
    if path is None or config.engine.kind != "transformers":
        return
    try:
        why = hindrance_of(folder)
    except ValueError as error:
        raise ConfigError(f"policy.path = {path!r}: {error}; save the policy again") from None
    if why is not None:
        cure = 'set engine.kind = "vllm", or choose another policy'
        raise ConfigError(f"policy.path = {path!r}: the transformers engine cannot run {why}; {cure}")


def _check_reading(config: RunConfig, folder: Path, texts: list[str]) -> None:
    """Refuse a policy whose tokenizer other tools read differently: they could not use what is trained."""
    path = config.policy.path
    if path is not None and (what := other_reading(folder, texts)) is not None:
        raise ConfigError(
            f"policy.path = {path!r}: {what}; keep the tokenizer it is meant to have: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) makes the two one"
        )
