"""Finds the policy version of an earlier run from which a new run begins (`[policy.from_run]`).

The files are read once, at the start of the new run. The policy store of the earlier run rebuilds weights that are
stored as deltas, and checks every sha256. The new run copies the files, so it never reads the earlier run again.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollflow.flows.locations import check_kept, find_published, locate_run, run_home, store_uri
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.storage.log.entries import SourceVersion, entry_path
from rollflow.storage.policies import PolicyVersion
from rollflow.tasks.policies.config import PolicyConfig
from rollflow.tasks.policies.folder import weight_paths
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.node import cache_in


@dataclass(frozen=True, slots=True)
class EarlierVersion:
    """A published policy version of an earlier run, whose weights exist. `key` names the config key and its value."""

    key: str
    context: RunContext
    version: PolicyVersion

    @property
    def source_version(self) -> SourceVersion:
        """The record for the first log entry of the new run."""
        version = self.version
        return SourceVersion(self.context.uri, self.context.run_id, version.number, version.entry, version.weights)

    @contextlib.contextmanager
    def copy_weights(self) -> Iterator[Sequence[Path]]:
        """Yield the paths of copies of the weight files, whose hashes were checked. The copies are deleted after the
        `with` block.

        Raises:
            ConfigError: the earlier run has deleted the weights meanwhile.
            Corrupt: the hash of a file differs from that in the log of the earlier run.
        """
        cache = cache_in(run_home())
        cache.mkdir(parents=True, exist_ok=True)
        # On NFS, a folder cannot be deleted while a file of it is mapped.
        with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as temporary:
            try:
                self.context.policies.copy_weights(self.version, Path(temporary))
            except Corrupt:
                self.check_kept()  # the earlier run may have deleted the weights since they were found
                raise
            yield sorted(Path(temporary).iterdir())

    def describe(self, *, copied: bool) -> str:
        """Return a note that says from which policy version the new run begins."""
        note = f"policy.from_run: version {self.version.number} of run {self.context.run_id!r}"
        return note if copied else f"{note}; `rollflow run` copies and checks its weights first"

    def check_kept(self) -> None:
        """Raise `ConfigError` if the earlier run has deleted the weights."""
        try:
            check_kept(self.context, self.version)
        except ConfigError as error:
            raise ConfigError(f"{self.key}: {error}; choose one of these versions") from None


def find_earlier(config: RunConfig) -> EarlierVersion | None:
    """Return the policy version of `[policy.from_run]`, or None if the recipe has no such section. Without a version in
    the recipe, return the newest version of the earlier run.

    Raises:
        ConfigError: there is no such run or version, or the weights of the version were deleted.
    """
    given, store = config.policy.from_run, store_uri(config)
    if given is None:
        return None
    key = f"policy.from_run.run = {given.run!r}"
    try:
        context = locate_run(given.run, store)
        context.check_format()
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    if not context.store.exists(entry_path(0)):
        cure = "name a run of this store by its id (see `rollflow status --all`), or any run by its path or URI"
        folder = context.uri.rpartition("/")[0].removesuffix("/runs")
        raise ConfigError(f"{key}: there is no such run in {folder}; {cure}")
    newest = context.policies.newest()
    if newest < 0:
        raise ConfigError(f"{key}: run {context.run_id!r} has no version yet; wait until it has published version 0")
    number = newest if given.version is None else given.version
    if given.version is not None:
        key = f"policy.from_run.version = {number}"
    try:
        version = find_published(context, number)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}; choose one of these versions") from None
    found = EarlierVersion(key, context, version)
    found.check_kept()
    return found


def name_policy(policy: PolicyConfig) -> str:
    """Return the config key that chooses the policy, with its value, for an error message."""
    if policy.from_run is not None:
        return f"policy.from_run.run = {policy.from_run.run!r}"
    if policy.cold_start is not None:
        return f"policy.cold_start.heads = {policy.cold_start.heads}"
    return f"policy.path = {policy.path!r}"


@contextlib.contextmanager
def open_weights(config: RunConfig, earlier: EarlierVersion | None, *, copy: bool) -> Iterator[Sequence[Path]]:
    """Yield the paths of the weight files with which a run begins; a cold start has none. If `copy` is false, the
    weights of an earlier run are not read, and no path is yielded for them.

    Raises:
        ConfigError: the policy has no weights, or an earlier run has deleted them meanwhile.
    """
    if earlier is None:
        yield weight_paths(config.policy.path) if config.policy.path is not None else ()
    elif copy:
        with earlier.copy_weights() as paths:
            yield paths
    else:
        yield ()
