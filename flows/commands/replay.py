"""`rollflow replay`: train published versions again and compare, from the run's storage alone.

Needs neither Ray nor Prefect nor an engine, and writes nothing. A version is restored to its parent, trained on the
batch its entry names, and compared file by file with what was published.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from rollflow.flows.commands import FAILED, OK
from rollflow.flows.locations import find_run
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.policies import PolicyVersion
from rollflow.tasks.learners.restore import Replayed, name_of, new_learner, restore, train_again
from rollflow.tasks.run_context import RunContext

CAUSE = "a replay is bit for bit the same only on the same kind of machine, with the same torch build"


def command(options: argparse.Namespace) -> int:
    """`rollflow replay RUN [VERSION]`."""
    context = find_run(options.run, options.store)
    say, tell = (_beside, _tell_value) if options.json else (print, _tell)
    return OK if replay(context, options.version, options.all, say, tell) else FAILED


def _beside(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tell(replayed: Replayed) -> None:
    print(sentence(replayed), flush=True)


def _tell_value(replayed: Replayed) -> None:
    print(json.dumps(value_of(replayed)), flush=True)


def replay(
    context: RunContext,
    version: int | None,
    every: bool,
    say: Callable[[str], None],
    tell: Callable[[Replayed], None],
) -> bool:
    """Train `version` (default: the newest) again, or `every` version from 1 on; whether all came out the same.

    `tell` is told of each that was trained again, `say` everything else.

    Raises:
        ConfigError: there is no such version to train again.
    """
    policies, batches = context.policies, context.batches
    first, last = _span(context, version, policies.newest(), every)
    learner = new_learner(context, blank=True)
    restored = restore(policies, batches, learner, first - 1, note=say)
    if restored.differed:
        say(f"{restored.sentence()}; {CAUSE}")
        return False
    for number in range(first, last + 1):
        replayed = train_again(policies, batches, learner, number)
        tell(replayed)
        if replayed.differences:
            say(f"version {number} was published by rollflow {replayed.version.code_version}; {CAUSE}")
            if number < last:
                say(f"versions {number + 1} to {last} follow from it and were not trained again")
            return False
    return True


def _span(context: RunContext, version: int | None, newest: int, every: bool) -> tuple[int, int]:
    """The first and the last version to train again."""
    if newest < 1:
        raise ConfigError(f"run {context.run_id!r}: no version has been trained yet; there is nothing to replay")
    if every:
        return 1, newest
    chosen = newest if version is None else version
    if chosen == 0:
        raise ConfigError("version 0 was not trained from a batch; replay version 1 or a later one")
    if not 0 < chosen <= newest:
        raise ConfigError(f"version {chosen} is not published; run {context.run_id!r} has versions 0 to {newest}")
    return chosen, chosen


def sentence(replayed: Replayed) -> str:
    """What was trained again, and what came out."""
    number = replayed.version.number
    return f"version {number}: parent {number - 1}, {_batch(replayed.batch)}: {_outcome(replayed)}"


def value_of(replayed: Replayed) -> dict[str, Any]:
    """The same for programs."""
    version, batch = replayed.version, replayed.batch
    return {
        "version": version.number,
        "batch": batch.number,
        "trajectories": batch.rows,
        "state": bool(version.state),
        "identical": not replayed.differences,
        "differences": list(replayed.differences),
        "sha256": {name_of(stored): stored.sha256 for stored in version.weights},
    }


def _batch(batch: BatchCommitted) -> str:
    return f"batch {batch.number} ({len(batch.groups)} groups, {batch.rows} trajectories)"


def _outcome(replayed: Replayed) -> str:
    if replayed.differences:
        return "DIFFERENT in " + ", ".join(replayed.differences)
    what = "weights and learner state" if replayed.version.state else "weights"
    return f"{what} identical ({_sha256(replayed.version)})"


def _sha256(version: PolicyVersion) -> str:
    """The hash of the weights; of several shards, each one's."""
    if len(version.weights) == 1:
        return f"sha256 {version.weights[0].sha256[:12]}"
    return ", ".join(f"{name_of(o).rpartition('/')[2]} {o.sha256[:12]}" for o in version.weights)
