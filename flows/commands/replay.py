"""Implements `rollflow replay`, which repeats the training of published policy versions and compares the weights.

Each version is trained from the version before it, on the batch and with the configuration that the run's log names.
With the same number of training processes (ranks) as in the run, the weights are exactly equal. With another number of
ranks, gradients are added in a different order, so the weights may differ by rounding (`replay_diff`). The command
reads only the run's storage, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollflow.flows.commands.cli.chosen_run import chosen_run
from rollflow.flows.commands.cli.exit_codes import FAILED, OK
from rollflow.storage.deltas.chain import name_of
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.policies import PolicyStore, PolicyVersion
from rollflow.tasks.learners.base import Learner
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.restore import ReplayedVersion, new_learner, restore, train_again

if TYPE_CHECKING:
    from rollflow.tasks.run.replay_diff import ReplayDistance

CAUSE = "a replay is bit for bit the same only on the same kind of machine, with the same torch build"


def command(options: argparse.Namespace) -> int:
    """Repeat the training of one policy version or of all versions, and compare the results with the published
    weights.
    """
    context = chosen_run(options)
    if options.ranks is not None and options.ranks < 1:
        raise ConfigError(f"--ranks = {options.ranks}: choose 1 or more")
    say, tell = (_print_to_stderr, _print_value) if options.json else (print, _print_sentence)
    version = None if options.version is None else _parse_version(options.version)
    return OK if replay(context, version, options.all, say, tell, options.ranks) else FAILED


def _parse_version(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text):
        raise ConfigError(f"VERSION = {text!r}: give a whole number")
    return int(text)


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The result of the replay of one policy version. `ranks` is the number of training processes in the replay, and
    `recorded` is their number in the run.
    """

    replayed: ReplayedVersion
    ranks: int
    recorded: int
    # Distance between the replayed and the published weights, or None if it is zero or unknown.
    apart: ReplayDistance | None

    @property
    def right(self) -> bool:
        """True if the replayed weights equal the published weights, or if they differ only by rounding because the
        number of training processes (ranks) differs.
        """
        near = self.ranks != self.recorded and self.apart is not None and self.apart.near
        return near or not self.replayed.differences


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_sentence(outcome: ReplayOutcome) -> None:
    print(describe_outcome(outcome), flush=True)


def _print_value(outcome: ReplayOutcome) -> None:
    print(json.dumps(value_of(outcome)), flush=True)


def replay(
    context: RunContext,
    version: int | None,
    every: bool,
    say: Callable[[str], None],
    tell: Callable[[ReplayOutcome], None],
    ranks: int | None = None,
) -> bool:
    """Replay the training of the policy version `version` (by default the newest), or of all versions if `every` is
    true. Return whether all replayed weights agree with the published weights.

    `tell` is called with the outcome of each replayed policy version, and `say` with every other message.

    Raises:
        ConfigError: the run has no such policy version, or the user names version 0, which was not trained.
    """
    policies, batches = context.policies, context.batches
    first, last = _select_range(context, version, policies.newest(), every)
    numbers: Sequence[int] = range(first, last + 1)
    recorded = {number: context.config_at(number).train.ranks for number in numbers}
    alike = ranks is None or set(recorded.values()) == {ranks}
    if not alike:
        numbers = _select_comparable(policies, numbers, say)
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
        outcome = ReplayOutcome(replayed, used, recorded[number], _distance(policies, learner, replayed))
        tell(outcome)
        if not outcome.right:
            say(f"version {number} was published by rollflow {replayed.version.code_version}; {CAUSE}")
            if number < last:
                say(f"versions {number + 1} to {last} follow from it and were not trained again")
            return False
    return True


def _select_comparable(policies: PolicyStore, numbers: Sequence[int], say: Callable[[str], None]) -> Sequence[int]:
    """Return the policy versions that can be replayed with another number of training processes (ranks), because all
    weights that the replay needs are stored.

    Raises:
        ConfigError: no policy version can be replayed.
    """
    newest, retention = policies.newest(), policies.retention

    def kept(number: int) -> bool:
        base = next(before for before in range(number - 1, -1, -1) if retention.stores_state(before))
        weights = all(retention.is_needed("weights", version, newest) for version in range(base, number + 1))
        stay = weights and retention.is_needed("state", base, newest)
        return stay and all(map(policies.has_weights, map(policies.find, range(base, number + 1))))

    found = [number for number in numbers if kept(number)]
    why = "their weights, or those of a version before them, were pruned, and other ranks give other bits"
    if not found:
        raise ConfigError(f"versions {numbers[0]} to {numbers[-1]}: {why}; leave --ranks out")
    if passed := len(numbers) - len(found):
        say(f"{passed} versions are skipped: {why}")
    return found


def _distance(policies: PolicyStore, learner: Learner, replayed: ReplayedVersion) -> ReplayDistance | None:
    """Return the distance between the replayed and the published weights. Return None if both weights are equal, or if
    the published weights are not stored.
    """
    from rollflow.tasks.run.replay_diff import measure_distance

    if not replayed.differences:
        return None
    try:
        return measure_distance(policies, learner, replayed)
    except Corrupt:
        return None


def _select_range(context: RunContext, version: int | None, newest: int, every: bool) -> tuple[int, int]:
    """Return the first and the last policy version to replay."""
    if newest < 1:
        raise ConfigError(f"run {context.run_id!r}: no policy version has been trained yet; there is nothing to replay")
    if every:
        return 1, newest
    chosen = newest if version is None else version
    if chosen == 0:
        raise ConfigError("version 0 was not trained from a batch; replay version 1 or a later one")
    if not 0 < chosen <= newest:
        raise ConfigError(
            f"VERSION = {chosen}: run {context.run_id!r} has only the versions 0 to {newest}; give one of them"
        )
    return chosen, chosen


def describe_outcome(outcome: ReplayOutcome) -> str:
    """Return a sentence about the replay of a policy version."""
    number, batch = outcome.replayed.version.number, outcome.replayed.batch
    return f"version {number}: parent {number - 1}, {_describe_batch(batch)}: {_describe_outcome(outcome)}"


def value_of(outcome: ReplayOutcome) -> dict[str, Any]:
    """Return the outcome of the replay of a policy version as a JSON object."""
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


def _describe_batch(batch: BatchCommitted) -> str:
    return f"batch {batch.number} ({len(batch.groups)} groups, {batch.rows} trajectories)"


def _describe_outcome(outcome: ReplayOutcome) -> str:
    replayed, apart = outcome.replayed, outcome.apart
    what = "weights and learner state" if replayed.version.state else "weights"
    if not replayed.differences:
        return f"{what} identical ({_describe_hash(replayed.version)})"
    by = f" by up to {apart.most:.1e}" if apart and math.isfinite(apart.most) else ""
    if outcome.right:
        return f"{what} differ{by}, which is rounding: ranks {outcome.ranks} instead of {outcome.recorded}"
    return "DIFFERENT in " + ", ".join(replayed.differences) + by


def _describe_hash(version: PolicyVersion) -> str:
    """Return the hash of the policy version's weights as text, or one hash for each shard of the weights."""
    if len(version.weights) == 1:
        return f"sha256 {version.weights[0].sha256[:12]}"
    return ", ".join(f"{name_of(o).rpartition('/')[2]} {o.sha256[:12]}" for o in version.weights)
