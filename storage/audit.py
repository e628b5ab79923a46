"""The audit: proves from storage alone that a run kept its invariants, or names what broke them.

It reads `run.json`, the batch commits and the manifests, and every object they name. It trusts no process,
no cache and no metric. Kinds of violation:

- `stale`: a trajectory older than alpha allows, or with tokens from a version that did not exist yet.
- `duplicate`: a dispatch with two fates, or a prompt trained on twice.
- `missing`: a dispatched prompt without a fate, or a named object that is not there.
- `gap`: a version or batch number that was skipped.
- `altered`: bytes that are not what was committed.
- `lineage`: a manifest that does not follow from its parent and its batch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pyarrow.compute as pc

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.policies import Manifest, PolicyStore, Retention, StoredObject, manifest_path
from rollflow.storage.records import DiscardReason, GroupKey
from rollflow.storage.trajectories import BatchCommit, TrajectoryStore, commit_path, verified

REQUEUED = {DiscardReason.STALE, DiscardReason.FAILED, DiscardReason.REDUNDANT}


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant: its kind, where, and what was found."""

    kind: str
    where: str
    what: str


@dataclass(slots=True)
class AuditReport:
    """What the audit counted and what it found broken."""

    run: str
    async_ratio: float
    versions: int = 0
    trajectories: int = 0
    staleness: Counter[int] = field(default_factory=Counter)  # staleness -> trajectories
    staleness_by_version: dict[int, Counter[int]] = field(default_factory=dict)
    fates: Counter[str] = field(default_factory=Counter)  # fate -> dispatched groups
    discarded_tokens: int = 0
    trained_tokens: int = 0
    objects: int = 0
    violations: list[Violation] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether no invariant was broken."""
        return not self.violations

    def add(self, kind: str, where: str, what: str) -> None:
        """Note a violation."""
        self.violations.append(Violation(kind, where, what))


def audit(run: ObjectStore) -> AuditReport:
    """Audit one run's storage.

    Raises:
        Missing: there is no run at this place.
        Corrupt: `run.json` cannot be read.
    """
    config = _run_config(run)
    report = AuditReport(config["run_id"], float(config["async_ratio"]))
    retention = Retention(config["store"]["keep_last"], config["store"]["keep_every"])
    manifests = _chain(run, report)
    commits = _commits(run, report)
    report.versions = max(len(manifests) - 1, 0)
    _check_objects(run, manifests, retention, report)
    for commit in commits.values():
        _check_batch(run, commit, report, trained=commit.number + 1 in manifests)
    _check_lineage(run, manifests, commits, report)
    _check_fates(manifests, commits, report)
    return report


def _run_config(run: ObjectStore) -> dict[str, Any]:
    data = run.get("run.json")
    try:
        body = json.loads(data)
        return {
            "run_id": body["run_id"],
            "async_ratio": body["config"]["async_ratio"],
            "store": body["config"]["store"],
        }
    except (ValueError, KeyError) as error:
        raise Corrupt(f"{run.uri}/run.json is not a run's description: {error}") from error


def _numbers(run: ObjectStore, folder: str, pattern: str) -> list[int]:
    """The numbers of all objects in `folder` whose path matches `pattern`, sorted."""
    found = (re.fullmatch(pattern, path) for path in run.list(folder))
    return sorted(int(match[1]) for match in found if match)


def _report_gaps(numbers: list[int], what: str, report: AuditReport) -> None:
    for expected in sorted(set(range(numbers[-1] + 1 if numbers else 0)) - set(numbers)):
        report.add("gap", f"{what} {expected}", f"{what} {expected} is not there, {what} {numbers[-1]} is")


def _chain(run: ObjectStore, report: AuditReport) -> dict[int, Manifest]:
    """All manifests by version; notes gaps and unreadable ones."""
    numbers = _numbers(run, "policies", r"policies/(\d{8})/manifest\.json")
    _report_gaps(numbers, "version", report)
    manifests = {}
    for version in numbers:
        try:
            manifests[version] = PolicyStore(run).manifest(version)
        except Corrupt as error:
            report.add("altered", manifest_path(version), str(error))
    return manifests


def _commits(run: ObjectStore, report: AuditReport) -> dict[int, BatchCommit]:
    """All batch commits by number; notes gaps and unreadable ones."""
    numbers = _numbers(run, "trajectories", r"trajectories/(\d{8})\.json")
    _report_gaps(numbers, "batch", report)
    commits = {}
    for number in numbers:
        try:
            commits[number] = TrajectoryStore(run).record(number)
        except Corrupt as error:
            report.add("altered", commit_path(number), str(error))
    return commits


def _check_objects(run: ObjectStore, manifests: dict[int, Manifest], retention: Retention, report: AuditReport) -> None:
    latest = max(manifests, default=-1)
    policies = PolicyStore(run)
    for version, manifest in manifests.items():
        for stored in (*manifest.weights, *manifest.learner):
            kept = retention.keeps(version, latest)
            if kept or run.exists(stored.path):
                _check_object(policies, stored, report)


def _check_object(policies: PolicyStore, stored: StoredObject, report: AuditReport) -> None:
    report.objects += 1
    try:
        policies.read(stored)
    except Corrupt as error:
        report.add("missing" if str(error).endswith("is missing") else "altered", stored.path, str(error))


def _check_batch(run: ObjectStore, commit: BatchCommit, report: AuditReport, *, trained: bool) -> None:
    """The file is what was committed, says what the commit says, and every trajectory in it is fresh enough."""
    report.objects += 1
    try:
        batch = TrajectoryBatch.from_bytes(verified(run, commit))
    except Corrupt as error:
        kind = "missing" if str(error).endswith("is missing") else "altered"
        report.add(kind, commit.file, str(error))
        return
    where = f"batch {commit.number}"
    if tuple(batch.keys) != commit.groups or len(batch) != commit.rows:
        report.add("altered", where, "the file holds other groups than the commit names")
    staleness = Counter(commit.number - v for v in batch.table["started_version"].to_pylist())
    if max(staleness, default=0) > report.async_ratio:
        report.add("stale", where, f"trained at staleness {max(staleness)}, async_ratio is {report.async_ratio}")
    _check_tokens(batch, commit.number, report)
    if trained:
        report.trajectories += len(batch)
        report.staleness.update(staleness)
        report.staleness_by_version[commit.number + 1] = staleness
        report.trained_tokens += sum(commit.response_tokens)


def _check_tokens(batch: TrajectoryBatch, number: int, report: AuditReport) -> None:
    """Per token: versions lie between the start and the batch's version, log-probs are finite and not positive."""
    where = f"batch {number}"
    mask = pc.list_flatten(batch.table["loss_mask"])
    if any(
        not pc.list_value_length(batch.table[c]).equals(pc.list_value_length(batch.table["tokens"]))
        for c in ("loss_mask", "logprobs", "versions")
    ):
        report.add("altered", where, "columns of different lengths in one trajectory")
        return
    versions = pc.filter(pc.list_flatten(batch.table["versions"]), mask)
    parents = pc.list_parent_indices(batch.table["tokens"].combine_chunks())
    started = pc.filter(pc.take(batch.table["started_version"], parents), mask)
    if pc.any(pc.less(versions, started)).as_py() or pc.any(pc.greater(versions, number)).as_py():
        report.add("stale", where, "a token's policy version lies outside [started version, batch version]")
    logprobs = pc.filter(pc.list_flatten(batch.table["logprobs"]), mask)
    if not pc.all(pc.and_(pc.is_finite(logprobs), pc.less_equal(logprobs, 1e-4))).as_py():
        report.add("lineage", where, "a behaviour log-probability is positive or not finite")


def _check_lineage(
    run: ObjectStore, manifests: dict[int, Manifest], commits: dict[int, BatchCommit], report: AuditReport
) -> None:
    """Each manifest names its parent's hash, and consumed exactly the batch that was committed for it."""
    for version, manifest in manifests.items():
        where = f"version {version}"
        if manifest.version != version:
            report.add("lineage", where, f"its manifest calls itself version {manifest.version}")
        if version == 0:
            continue
        if version - 1 in manifests and manifest.parent != PolicyStore(run).manifest_sha256(version - 1):
            report.add("lineage", where, "its parent is not the version before it as it stands in storage")
        commit = commits.get(version - 1)
        if commit is None:
            report.add("missing", where, f"batch {version - 1}, which it was trained on, is not in storage")
            continue
        if manifest.batch != _sha256(run, commit_path(version - 1)):
            report.add("altered", where, f"batch {version - 1} is not the one this version was trained on")
        if manifest.consumed != commit.groups or manifest.discarded != commit.discards:
            report.add("lineage", where, f"its consumed or discarded groups are not those of batch {version - 1}")


def _sha256(run: ObjectStore, path: str) -> str:
    try:
        return hashlib.sha256(run.get(path)).hexdigest()
    except Missing:
        return "missing"


def _check_fates(manifests: dict[int, Manifest], commits: dict[int, BatchCommit], report: AuditReport) -> None:
    """Every dispatch has exactly one fate, and every prompt below the cursor is accounted for."""
    fates: dict[GroupKey, list[str]] = defaultdict(list)
    for number, commit in sorted(commits.items()):
        fate = "trained" if number + 1 in manifests else "committed, waiting"
        for key in commit.groups:
            fates[key].append(fate)
        for discard in commit.discards:
            fates[discard.key].append(f"discarded: {discard.reason}")
            report.discarded_tokens += discard.response_tokens
    if commits:
        last = commits[max(commits)]
        for key in last.in_flight:
            fates[key].append("in flight")
    _check_once(fates, report)
    if commits:
        _check_all_there(fates, commits[max(commits)].cursor, report)
    for found in fates.values():
        report.fates.update(found)


def _check_once(fates: dict[GroupKey, list[str]], report: AuditReport) -> None:
    used: Counter[int] = Counter()
    for key, found in fates.items():
        if len(found) > 1:
            report.add("duplicate", f"prompt {key.prompt} attempt {key.attempt}", f"has {len(found)} fates: {found}")
        used[key.prompt] += any(fate in ("trained", "committed, waiting") for fate in found)
    for index, times in used.items():
        if times > 1:
            report.add("duplicate", f"prompt {index}", f"is in {times} training batches")


def _check_all_there(fates: dict[GroupKey, list[str]], cursor: int, report: AuditReport) -> None:
    """Each index below the cursor ends trained, waiting, in flight, or discarded for good."""
    last_attempt: dict[int, int] = {}
    for key in fates:
        last_attempt[key.prompt] = max(key.attempt, last_attempt.get(key.prompt, -1))
    requeued = {f"discarded: {reason}" for reason in REQUEUED}
    for index in range(cursor):
        attempts = last_attempt.get(index, -1)
        lost = [a for a in range(attempts + 1) if GroupKey(index, a) not in fates]
        if attempts < 0 or lost:
            report.add("missing", f"prompt {index}", "was dispatched and has no fate")
        elif fates[GroupKey(index, attempts)][-1] in requeued:
            report.add("missing", f"prompt {index}", "was discarded and never issued again")
    for index in sorted(i for i in last_attempt if i >= cursor):
        report.add("lineage", f"prompt {index}", f"has a fate but lies beyond the cursor ({cursor})")
