"""Determines and records which version of each scorer the run uses on this machine."""

from __future__ import annotations

from rollflow.storage.run_records.scorers import ScorerRecord, find_change, read_scorers, store_scorer
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.scorers.config import name_section
from rollflow.tasks.scorers.version import describe_scorer, hash_description


def list_versions(config: RunConfig) -> list[ScorerRecord]:
    """Return the version and the description of each scorer that the run uses.

    Raises:
        ConfigError: a user-defined function cannot be imported.
    """
    described = {(one := name_section(name)): describe_scorer(reward, one) for name, reward in config.scorers.items()}
    return [ScorerRecord(section, hash_description(tree), tree) for section, tree in described.items()]


def list_changed_scorers(context: RunContext) -> list[str]:
    """Return a sentence for each scorer that has changed since the run last used it."""
    used = read_scorers(context.store)
    return [change for now in list_versions(context.config) if (change := find_change(used, now))]


def record_scorers(context: RunContext) -> list[str]:
    """Record the scorers' versions; return a sentence for each scorer that has changed since the run last used it."""
    changes = list_changed_scorers(context)
    for record in list_versions(context.config):
        store_scorer(context.store, record)
    return changes
