"""Compares each trajectory of a batch file with the log entry that committed the batch.

Suffixes of array names give the shapes: `_R` for trajectories, `_N` for groups, `_T` for the tokens of all
trajectories, and `_C` for the tokens that the policy sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow.compute as pc

from rollflow.storage.audit.answers import NOT_ASKED, ExpectedRows, check_rows
from rollflow.storage.audit.left_out import check_left_out
from rollflow.storage.audit.optional_rows import check_optional
from rollflow.storage.audit.report import RowCounts, ViolationKind
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.records import GroupKey, Outcome, PassRate

Found = tuple[ViolationKind, str]
Array = np.ndarray[Any, Any]
# largest valid log-prob (nats); by rounding, a token of probability 1 may have a log-prob above 0
HIGHEST_LOGPROB = 1e-4


@dataclass(frozen=True, slots=True)
class Rules:
    """The values of a run's config with which the run's batches are compared."""

    alpha: float
    group_size: int  # number of trajectories per group
    responses: int  # number of responses that are started for a prompt, of which `group_size` are kept
    asked: ExpectedRows = NOT_ASKED
    rated: bool = False  # true: a batch's log entry must have the groups' pass rates


def count_rows(batch: TrajectoryBatch, number: int) -> RowCounts:
    """Count the episodes in batch `number` for the audit's report."""
    started = zip(batch.table["started_version"].to_pylist(), batch.branches, strict=True)
    staleness = Counter(number - version for version, branch in started if not branch)
    left_out = int(batch.left_out[batch.episode_rows].sum())
    return RowCounts(staleness, batch.domains, _count_scorers(batch), left_out)


def _count_scorers(batch: TrajectoryBatch) -> dict[str, Counter[str]]:
    """Count the episodes of each domain by the version of the scorer that scored them."""
    found: dict[str, Counter[str]] = {}
    column = batch.optional("scorer_version")
    versions = [] if column is None else column.to_pylist()
    for domain, version, branch in zip(batch.table["domain"].to_pylist(), versions, batch.branches, strict=False):
        if version is not None and not branch:
            found.setdefault(domain, Counter())[version] += 1
    return found


def compare(batch: TrajectoryBatch, body: BatchCommitted, version: int, rules: Rules) -> Iterator[Found]:
    """Report the faults of a batch that was committed when policy version `version` was the newest."""
    yield from _staleness(batch, body.number, rules.alpha)
    if tuple(batch.keys) == tuple(group.key for group in body.groups):
        samples = list(_samples(batch, rules))
        yield from samples
    else:
        yield "altered", "the batch file holds other groups than the entry of the batch"
        return
    if any(_lengths(batch, name) != _lengths(batch, "tokens") for name in ("loss_mask", "logprobs", "versions")):
        yield "altered", "a trajectory has columns of different lengths"
        return
    tokens = _Tokens.of(batch)
    if not samples and body.groups:
        yield from _sums(batch, body, tokens)
        yield from _check_rates(batch, body, rated=rules.rated)
    yield from _values(batch, tokens, version)
    yield from check_left_out(batch, body, rules.asked, rules.group_size)
    judges_all = rules.asked.limits is not None and rules.asked.limits.judges_all
    yield from check_optional(batch, rules.asked.vocabulary, judges_all=judges_all)
    if not samples:
        yield from check_rows(batch, rules.asked)


def _staleness(batch: TrajectoryBatch, number: int, alpha: float) -> Iterator[Found]:
    oldest = min(batch.table["started_version"].to_pylist(), default=number)
    if number - oldest > alpha:
        yield (
            "stale",
            f"batch {number} has a trajectory of staleness {number - oldest}, more than async_ratio = {alpha:g}",
        )


def _samples(batch: TrajectoryBatch, rules: Rules) -> Iterator[Found]:
    """Check that each group has `group_size` different samples; trajectories that branch off another one do not
    count."""
    columns = [batch.table[name].to_pylist() for name in ("index", "attempt", "sample")]
    for (prompt, attempt), group in groupby(zip(*columns, batch.branches, strict=True), key=lambda row: row[:2]):
        rows = list(group)
        samples = Counter(sample for _, _, sample, branch in rows if not branch)
        where = f"group {prompt}.{attempt}"
        twice = {sample: times for sample, times in Counter(row[2] for row in rows).items() if times > 1}
        if twice:
            yield "duplicate", f"{where} has the same sample more than once; number of copies by sample: {twice}"
        elif samples.total() < rules.group_size:
            yield (
                "missing",
                f"{where} has {samples.total()} of {rules.group_size} samples; sample numbers: {sorted(samples)}",
            )
        elif samples.total() > rules.group_size or min(samples) < 0 or max(samples) >= rules.responses:
            yield "altered", f"{where} has samples that were not requested; sample numbers: {sorted(samples)}"


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens that the policy sampled in a batch."""

    row_C: Array  # the trajectory of each token
    version_C: Array
    logprob_C: Array  # nats

    @classmethod
    def of(cls, batch: TrajectoryBatch) -> _Tokens:
        mask_T = _flat(batch, "loss_mask")
        row_T = np.repeat(np.arange(len(batch)), _lengths(batch, "tokens"))
        return cls(row_T[mask_T], _flat(batch, "versions")[mask_T], _flat(batch, "logprobs")[mask_T])


def _sums(batch: TrajectoryBatch, body: BatchCommitted, tokens: _Tokens) -> Iterator[Found]:
    """Compare the policy versions and the token count that the log records for each group with the group's
    trajectories."""
    group_R, starts_R = _number_groups(batch), batch.table["started_version"].to_numpy()
    group_C = group_R[tokens.row_C]
    counts = np.bincount(group_C, minlength=len(body.groups)).tolist()
    oldest_N = np.full(len(body.groups), starts_R.max())
    np.minimum.at(oldest_N, group_R, starts_R)
    # if no token of a group was sampled, the start version counts as the newest policy version
    newest_N = oldest_N.copy()
    np.maximum.at(newest_N, group_C, tokens.version_C)
    for group, *found in zip(body.groups, oldest_N.tolist(), newest_N.tolist(), counts, strict=True):
        recorded = (group.started, group.newest, group.tokens)
        if tuple(found) != recorded:
            of = "oldest start version, newest version and number of tokens"
            yield "lineage", f"group {_name(group.key)} has {of} {tuple(found)}; the entry of its batch says {recorded}"


def _check_rates(batch: TrajectoryBatch, body: BatchCommitted, *, rated: bool) -> Iterator[Found]:
    """Compare the pass rates in the log entry of a batch with the outcomes of the batch's trajectories; older runs have
    no pass rates."""
    column = batch.optional("outcome")
    outcomes = [None] * len(batch) if column is None else column.to_pylist()
    of_group: dict[int, list[str | None]] = {}
    hidden_R = batch.left_out | np.array(batch.branches, bool)
    for prompt, outcome, hidden in zip(batch.table["index"].to_pylist(), outcomes, hidden_R.tolist(), strict=True):
        if not hidden:
            of_group.setdefault(prompt, []).append(outcome)
    known = {
        prompt: PassRate(prompt, found.count(Outcome.CORRECT), len(found))
        for prompt, found in of_group.items()
        if None not in found
    }
    recorded = {rate.prompt: rate for rate in body.rates if rate.prompt in of_group}
    if recorded != known and (recorded or rated):
        wrong = min(prompt for prompt in of_group if recorded.get(prompt) != known.get(prompt))
        what = f"prompt {wrong} has {_describe_rate(known.get(wrong))}; the entry of its batch says"
        yield "lineage", f"the group of {what} {_describe_rate(recorded.get(wrong))}"


def _describe_rate(rate: PassRate | None) -> str:
    return f"{rate.correct} of {rate.responses} responses correct" if rate else "no known pass rate"


def _number_groups(batch: TrajectoryBatch) -> Array:
    """Return the number of each row's group within the batch, counted from 0."""
    changes = [np.diff(batch.table[name].to_numpy()) != 0 for name in ("index", "attempt")]
    return np.concatenate([[0], np.cumsum(changes[0] | changes[1])])


def _values(batch: TrajectoryBatch, tokens: _Tokens, version: int) -> Iterator[Found]:
    """Check that values are finite, and that no token's version is before the trajectory's start version or after
    `version`.
    """
    started_R = batch.table["started_version"].to_numpy()
    if (tokens.version_C < started_R[tokens.row_C]).any() or (tokens.version_C > version).any():
        yield (
            "stale",
            (
                "a token's version is older than its trajectory's start version, or newer than version "
                f"{version}, the newest when the batch was committed"
            ),
        )
    if started_R.size and started_R.max() > version:
        yield (
            "stale",
            (
                f"a trajectory was started under version {started_R.max()}, but version {version} was the newest "
                "when its batch was committed"
            ),
        )
    if not (np.isfinite(tokens.logprob_C) & (tokens.logprob_C <= HIGHEST_LOGPROB)).all():
        yield "lineage", "a token has a behaviour log-probability that is positive or not finite"
    if not np.isfinite(batch.table["reward"].to_numpy()[~batch.left_out]).all():
        yield "lineage", "a trajectory has a reward that is not finite"


def _lengths(batch: TrajectoryBatch, name: str) -> list[int]:
    found: list[int] = pc.list_value_length(batch.table[name]).to_pylist()
    return found


def _flat(batch: TrajectoryBatch, name: str) -> Array:
    values: Array = pc.list_flatten(batch.table[name]).to_numpy()
    return values


def _name(key: GroupKey) -> str:
    return f"{key.prompt}.{key.attempt}"
