"""The audit: proves from storage alone that a run kept its invariants, or names what broke them.

It reads the log's first entry, the batch commits and the manifests, and every object they name. It trusts no process,
no cache and no metric. Kinds of violation:

- `stale`: a trajectory older than alpha allows, or with tokens from a version that did not exist yet.
- `duplicate`: a dispatch with two fates, or a prompt trained on twice.
- `missing`: a dispatched prompt without a fate, or a named object that is not there.
- `gap`: a version or batch number that was skipped.
- `altered`: bytes that are not what was committed.
- `lineage`: a manifest that does not follow from its parent and its batch.

A batch that was quarantined before anything was trained on it is no violation: its groups are discarded as corrupt
and issued again. It is named in the report.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pyarrow.compute as pc

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.entries import RunCreated, entry_path
from rollflow.storage.log.log import creation
from rollflow.storage.log.repair import cures
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.policies import Manifest, PolicyStore, Retention, manifest_path
from rollflow.storage.records import Cursor, DiscardReason, GroupKey, StoredObject
from rollflow.storage.trajectories import (
    BatchCommit,
    TrajectoryStore,
    commit_path,
    committed_editions,
    verified,
)

ISSUED_AGAIN = {f"discarded: {reason}" for reason in DiscardReason if reason.issued_again}

Commits = dict[tuple[int, int], BatchCommit]  # (number, edition) -> commit


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
    domains: Counter[str] = field(default_factory=Counter)  # domain -> groups trained on
    fates: Counter[str] = field(default_factory=Counter)  # fate -> dispatched groups
    discarded_tokens: int = 0
    surplus_tokens: int = 0  # of responses beyond those that the trained groups needed
    trained_tokens: int = 0
    objects: int = 0
    quarantined: list[str] = field(default_factory=list)  # what was voided, and why
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
        Corrupt: the log's first entry cannot be read.
    """
    config = _run_config(run)
    report = AuditReport(config["run_id"], float(config["async_ratio"]))
    store = config["store"]
    retention = Retention(store["keep_last"], store["keep_every"], store.get("state_every", 1))
    manifests = _chain(run, report)
    batches = TrajectoryStore(run)
    commits = _commits(batches, report)
    report.versions = max(len(manifests) - 1, 0)
    _check_log(run, report)
    _check_prompts(run, config["prompts"], report)
    _check_objects(run, manifests, retention, report)
    for (number, edition), commit in commits.items():
        if batches.edition(number) == edition:
            _check_batch(run, commit, report, trained=number + 1 in manifests)
    _check_lineage(batches, manifests, commits, report)
    _check_fates(batches, manifests, commits, report)
    return report


def _run_config(run: ObjectStore) -> dict[str, Any]:
    body = creation(run).body
    if not isinstance(body, RunCreated):
        raise Corrupt(f"{run.uri}: entry 0 of its log creates no run")
    return {
        "run_id": body.run_id,
        "async_ratio": body.config["async_ratio"],
        "store": body.config["store"],
        "prompts": body.prompts,
    }


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


def _commits(batches: TrajectoryStore, report: AuditReport) -> Commits:
    """All batch commits by number and edition; notes gaps, what was voided, and what else is unreadable."""
    names = committed_editions(batches.run)
    _report_gaps([number for number, edition in names if edition == 0], "batch", report)
    voids = {(void.batch, void.edition): void for void in batches.voids()}
    report.quarantined = [f"{void.file}: {void.reason}" for void in voids.values()]
    commits = {}
    for name in names:
        try:
            commits[name] = batches.record_of(*name)
        except Corrupt as error:
            if name not in voids:
                report.add("altered", commit_path(*name), str(error))
    return commits


def _check_log(run: ObjectStore, report: AuditReport) -> None:
    """Every entry follows the one before it, by its hash and by the rules."""
    try:
        for cure in cures(run):
            report.add("altered", entry_path(cure.n), cure.what)
    except Corrupt as error:
        report.add("altered", run.uri, str(error))


def _check_prompts(run: ObjectStore, prompts: list[dict[str, Any]], report: AuditReport) -> None:
    """The files of prompts that the run keeps."""
    for pin in prompts:
        if kept := pin.get("kept"):
            _check_object(PolicyStore(run), StoredObject(kept, pin["size"], pin["sha256"]), report)


def _check_objects(run: ObjectStore, manifests: dict[int, Manifest], retention: Retention, report: AuditReport) -> None:
    latest = max(manifests, default=-1)
    policies = PolicyStore(run)
    for version, manifest in manifests.items():
        for stored in (*manifest.weights, *manifest.learner):
            if retention.needed(version, latest) or run.exists(stored.path):
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
        report.domains.update(batch.domains)
        report.staleness_by_version[commit.number + 1] = staleness
        report.trained_tokens += sum(commit.response_tokens)
        report.surplus_tokens += commit.surplus_tokens


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
    batches: TrajectoryStore, manifests: dict[int, Manifest], commits: Commits, report: AuditReport
) -> None:
    """Each manifest names its parent's hash, and consumed exactly the batch that was committed for it."""
    for version, manifest in manifests.items():
        where = f"version {version}"
        if manifest.version != version:
            report.add("lineage", where, f"its manifest calls itself version {manifest.version}")
        if version == 0:
            continue
        if version - 1 in manifests and manifest.parent != PolicyStore(batches.run).manifest_sha256(version - 1):
            report.add("lineage", where, "its parent is not the version before it as it stands in storage")
        commit = commits.get((version - 1, batches.edition(version - 1)))
        if commit is None:
            quarantined = any(void.batch == version - 1 for void in batches.voids())
            what = "was quarantined after that" if quarantined else "is not in storage"
            report.add("altered" if quarantined else "missing", where, f"batch {version - 1}, its own, {what}")
            continue
        if manifest.batch != _sha256(batches.run, commit.path):
            report.add("altered", where, f"batch {version - 1} is not the one this version was trained on")
        if manifest.consumed != commit.groups or manifest.discarded != batches.discards(commit):
            report.add("lineage", where, f"its consumed or discarded groups are not those of batch {version - 1}")


def _sha256(run: ObjectStore, path: str) -> str:
    try:
        return hashlib.sha256(run.get(path)).hexdigest()
    except Missing:
        return "missing"


def _check_fates(
    batches: TrajectoryStore, manifests: dict[int, Manifest], commits: Commits, report: AuditReport
) -> None:
    """Every dispatch has exactly one fate, and every prompt below its source's cursor is accounted for."""
    if not commits:
        return
    newest = max(commits.values(), key=lambda commit: commit.order)
    unsettled = {(void.batch, void.edition) for void in batches.voids()[newest.voids :]}
    settled = {(void.batch, void.edition) for void in batches.voids()[: newest.voids]}
    fates: dict[GroupKey, list[str]] = defaultdict(list)
    for name, commit in commits.items():
        fate = "trained" if commit.number + 1 in manifests else "committed, waiting"
        for key in () if name in settled else commit.groups:
            fates[key].append("quarantined" if name in unsettled else fate)
        for discard in commit.discards:
            fates[discard.key].append(f"discarded: {discard.reason}")
            report.discarded_tokens += discard.response_tokens
    for key in newest.in_flight:
        fates[key].append("in flight")
    _check_once(fates, report)
    _check_all_there(fates, newest.cursor, report)
    _check_filtered(fates, newest.cursor, report)
    for commit in commits.values():
        if commit.cursor.sources not in (0, newest.cursor.sources):
            what = f"its cursor has {commit.cursor.sources} sources, the newest one {newest.cursor.sources}"
            report.add("lineage", f"batch {commit.number}", what)
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


def _check_all_there(fates: dict[GroupKey, list[str]], cursor: Cursor, report: AuditReport) -> None:
    """Each index below its source's cursor ends trained, waiting, in flight, or discarded for good."""
    last_attempt: dict[int, int] = {}
    for key in fates:
        last_attempt[key.prompt] = max(key.attempt, last_attempt.get(key.prompt, -1))
    for index in cursor.indices():
        attempts = last_attempt.get(index, -1)
        lost = [a for a in range(attempts + 1) if GroupKey(index, a) not in fates]
        if attempts < 0 or lost:
            report.add("missing", f"prompt {index}", "was dispatched and has no fate")
        elif fates[GroupKey(index, attempts)][-1] in ISSUED_AGAIN:
            report.add("missing", f"prompt {index}", "was discarded and never issued again")
    for index in sorted(i for i in last_attempt if not cursor.covers(i)):
        report.add("lineage", f"prompt {index}", f"has a fate but lies beyond its source's cursor {cursor.upcoming}")


def _check_filtered(fates: dict[GroupKey, list[str]], cursor: Cursor, report: AuditReport) -> None:
    """The cursor counts the groups that were filtered: by it the sources keep their shares."""
    filtered = f"discarded: {DiscardReason.FILTERED}"
    gone = [key.prompt for key, found in fates.items() if filtered in found and cursor.covers(key.prompt)]
    found = Counter(index % cursor.sources for index in gone)
    for source, counted in enumerate(cursor.filtered):
        if counted != found[source]:
            what = f"{found[source]} of its groups were filtered, the cursor counts {counted}"
            report.add("lineage", f"source {source}", what)
