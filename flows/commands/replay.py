"""`rollflow replay`: train published versions again and compare, from the run's storage alone.

Needs neither Ray nor Prefect nor an engine, and writes nothing. A version is restored to its parent, trained on the
batch its entry names, and compared file by file with what was published.

Each version is trained under the config that it has in the log. As many ranks as that has give the same bits. Another
number adds up in another order: then each version is trained from its published parent, and has to be near what was
published (`replay_diff`). Where not both are in storage any more, a version is passed over.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollflow.flows.commands import FAILED, OK
from rollflow.flows.locations import find_run
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.policies import PolicyStore, PolicyVersion
from rollflow.tasks.learners.base import Learner
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.restore import Replayed, name_of, new_learner, restore, train_again

if TYPE_CHECKING:
    from rollflow.tasks.run.replay_diff import Distance

CAUSE = "a replay is bit for bit the same only on the same kind of machine, with the same torch build"


def command(options: argparse.Namespace) -> int:
    """`rollflow replay RUN [VERSION]`."""
    context = find_run(options.run, options.store)
    if options.ranks is not None and options.ranks < 1:
        raise ConfigError(f"--ranks = {options.ranks}: choose 1 or more")
    say, tell = (_beside, _tell_value) if options.json else (print, _tell)
    return OK if replay(context, options.version, options.all, say, tell, options.ranks) else FAILED


@dataclass(frozen=True, slots=True)
class Outcome:
    """A version that was trained again by `ranks` processes, and in the run by `recorded`."""

    replayed: Replayed
    ranks: int
    recorded: int
    apart: Distance | None  # from what was published; None where it is the same, or cannot be compared

    @property
    def right(self) -> bool:
        """Whether it is what was published: to the bit, if it was trained by as many ranks."""
        near = self.ranks != self.recorded and self.apart is not None and self.apart.near
        return near or not self.replayed.differences


def _beside(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tell(outcome: Outcome) -> None:
    print(sentence(outcome), flush=True)


def _tell_value(outcome: Outcome) -> None:
    print(json.dumps(value_of(outcome)), flush=True)


def replay(
    context: RunContext,
    version: int | None,
    every: bool,
    say: Callable[[str], None],
    tell: Callable[[Outcome], None],
    ranks: int | None = None,
) -> bool:
    """Train `version` (default: the newest) again, or `every` version from 1 on; whether all came out right.

    `tell` is told of each that was trained again, `say` everything else.

    Raises:
        ConfigError: there is no such version to train again.
    """
    policies, batches = context.policies, context.batches
    first, last = _span(context, version, policies.newest(), every)
    numbers: Sequence[int] = range(first, last + 1)
    recorded = {number: context.config_at(number).train.ranks for number in numbers}
    alike = ranks is None or set(recorded.values()) == {ranks}
    if not alike:
        numbers = _comparable(policies, numbers, say)
    learner = new_learner(context, blank=True, count=ranks)
    restored = restore(policies, batches, learner, numbers[0] - 1, note=say)
    if restored.differed and alike:
        say(f"{restored.sentence()}; {CAUSE}")
        return False
    for number in numbers:
        if not alike and number > numbers[0]:
            restore(policies, batches, learner, number - 1, note=say)
        replayed = train_again(policies, batches, learner, number)
        used = recorded[number] if ranks is None else ranks
        outcome = Outcome(replayed, used, recorded[number], _distance(policies, learner, replayed))
        tell(outcome)
        if not outcome.right:
            say(f"version {number} was published by rollflow {replayed.version.code_version}; {CAUSE}")
            if number < last:
                say(f"versions {number + 1} to {last} follow from it and were not trained again")
            return False
    return True


def _comparable(policies: PolicyStore, numbers: Sequence[int], say: Callable[[str], None]) -> Sequence[int]:
    """Those of which all weights are kept, from the newest state before them on; `ConfigError` where there are none."""
    newest, retention = policies.newest(), policies.retention

    def kept(number: int) -> bool:
        base = next(before for before in range(number - 1, -1, -1) if retention.stores_state(before))
        weights = all(retention.needed("weights", version, newest) for version in range(base, number + 1))
        stay = weights and retention.needed("state", base, newest)
        return stay and all(map(policies.has_weights, map(policies.find, range(base, number + 1))))

    found = [number for number in numbers if kept(number)]
    why = "their weights, or some that they are trained from, were pruned, and by other ranks the bits are others"
    if not found:
        raise ConfigError(f"versions {numbers[0]} to {numbers[-1]}: {why}; leave --ranks out")
    if passed := len(numbers) - len(found):
        say(f"{passed} versions are passed over: {why}")
    return found


def _distance(policies: PolicyStore, learner: Learner, replayed: Replayed) -> Distance | None:
    """How far what differs is from what was published, where that is in storage."""
    from rollflow.tasks.run.replay_diff import distance

    if not replayed.differences:
        return None
    try:
        return distance(policies, learner, replayed)
    except Corrupt:
        return None


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


def sentence(outcome: Outcome) -> str:
    """What was trained again, and what came out."""
    number, batch = outcome.replayed.version.number, outcome.replayed.batch
    return f"version {number}: parent {number - 1}, {_batch(batch)}: {_outcome(outcome)}"


def value_of(outcome: Outcome) -> dict[str, Any]:
    """The same for programs."""
    replayed, apart = outcome.replayed, outcome.apart
    version, batch = replayed.version, replayed.batch
    return {
        "version": version.number,
        "batch": batch.number,
        "trajectories": batch.rows,
        "state": bool(version.state),
        "identical": not replayed.differences,
        "differences": list(replayed.differences),
        "ranks": outcome.ranks,
        "largest_difference": apart.most if apart and math.isfinite(apart.most) else None,
        "right": outcome.right,
        "sha256": {name_of(stored): stored.sha256 for stored in version.weights},
    }


def _batch(batch: BatchCommitted) -> str:
    return f"batch {batch.number} ({len(batch.groups)} groups, {batch.rows} trajectories)"


def _outcome(outcome: Outcome) -> str:
    replayed, apart = outcome.replayed, outcome.apart
    what = "weights and learner state" if replayed.version.state else "weights"
    if not replayed.differences:
        return f"{what} identical ({_sha256(replayed.version)})"
    by = f" by up to {apart.most:.1e}" if apart and math.isfinite(apart.most) else ""
    if outcome.right:
        return f"{what} differ{by}, which is rounding: ranks {outcome.ranks} instead of {outcome.recorded}"
    return "DIFFERENT in " + ", ".join(replayed.differences) + by


def _sha256(version: PolicyVersion) -> str:
    """The hash of the weights; of several shards, each one's."""
    if len(version.weights) == 1:
        return f"sha256 {version.weights[0].sha256[:12]}"
    return ", ".join(f"{name_of(o).rpartition('/')[2]} {o.sha256[:12]}" for o in version.weights)
