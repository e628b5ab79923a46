"""Audits a run: checks the run's log and stored objects, and reports every violation of the run's invariants.

    entries in order --fold--> batches --compare rows with entry-->  report
                        |--> objects of versions --size, sha256--^

The audit computes the run's state again from the log entries alone, and trusts no process, snapshot or metric. Kinds of
violation:

- `stale`: a trajectory is older than `async_ratio` allows, or has tokens from a version that did not exist yet.
- `duplicate`: a dispatch (attempt to answer a prompt) ended twice, a batch is committed twice, or a group contains a
  sample twice.
- `missing`: an object that a log entry names and the run needs does not exist, or a sample or a prompt was left out.
- `gap`: the number of an entry, a version or a batch was skipped.
- `altered`: the bytes of an object differ from the committed bytes.
- `lineage`: an entry contradicts earlier entries, or contradicts the file that the entry names.

The audit continues after a violation (see `tolerant_fold`). The run may continue during its audit. So a faulty object
is checked again at the end, and is reported only if no later entry voids or prunes the object.

The audit also compares batches with the caller's expectations (`expected`): the prompts that the rows answer, and the
limits of the run's config.

An audit begins where the newest audit without violations ended (see the module `checkpoints`). It checks entry 0 and
the newest entries again (`recheck`), but reads no older object again. A deep audit begins with entry 0. A deep audit
reads every object that must exist, and every other object that exists and is not pruned.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollflow.storage.audit import checkpoints
from rollflow.storage.audit.checkpoints import AuditCheckpoint
from rollflow.storage.audit.commits import check_batch, check_version, describe_altered_copies, list_prompt_files
from rollflow.storage.audit.deltas import DeltaChains
from rollflow.storage.audit.expected import NOTHING, Expected
from rollflow.storage.audit.expecting import Expecting, OpenSince
from rollflow.storage.audit.objects import NamedObject, ObjectChecks, ObjectFinding
from rollflow.storage.audit.recheck import recheck
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.audit.rows import Rules
from rollflow.storage.audit.tolerant_fold import TolerantFold
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.configs import RecordedConfig, diff_trees
from rollflow.storage.log.entries import (
    BatchCommitted,
    BatchVoided,
    ConfigChanged,
    Entry,
    EpochStarted,
    Pruned,
    RunCreated,
    VersionPublished,
    WrittenEntry,
    decode,
    entry_path,
)
from rollflow.storage.log.reading import read_entries
from rollflow.storage.log.retention import Kind
from rollflow.storage.objects.base import ObjectStore, first_missing
from rollflow.storage.records import StoredObject


@dataclass(frozen=True, slots=True)
class AuditProgress:
    """The progress of an audit."""

    entries: int
    of_entries: int  # the number of log entries when the audit began
    objects: int
    of_objects: int  # the number of stored objects that the audit must read, as far as is known
    bytes: int  # total size in bytes of the objects that were read so far


def audit(
    run: ObjectStore,
    *,
    deep: bool = False,
    progress: Callable[[AuditProgress], None] | None = None,
    expected: Expected = NOTHING,
) -> AuditReport:
    """Audit one run's storage. If the audit found no violation, store the number of the last log entry, so that the
    next audit continues after this entry.

    Args:
        deep: if true, the audit begins with log entry 0 and reads every stored object.
        expected: the limits of the config, and the prompts, with which batches are compared.
        progress: a function that is called in the caller's thread after each log entry and each stored object.

    Raises:
        Missing: the storage contains no run.
        Corrupt: log entry 0 cannot be read, so the run's rules are unknown.
        Unreachable: a stored object cannot be read now, because the store does not answer.
    """
    return _Audit(run, expected, deep=deep, progress=progress).build_report()


class _Audit:
    """The state of one audit while it runs."""

    def __init__(
        self, store: ObjectStore, expected: Expected, *, deep: bool, progress: Callable[[AuditProgress], None] | None
    ) -> None:
        self.store, self.deep, self.progress = store, deep, progress
        # snapshots are listed before the log is read, so that the log contains all entries that the snapshots name
        snapshots = checkpoints.list_snapshots(store)
        newest, self.others = checkpoints.find_newest(store, thorough=expected.is_thorough)
        self.witnesses = {witness.n: witness for witness in [*snapshots, *self.others]}
        begun = AuditCheckpoint() if deep else newest
        self.begun_at = begun.state.n
        self.report = replace(begun.report, since=self.begun_at + 1)
        self.expecting = Expecting(expected, self.report)
        if self.begun_at >= 0:
            self.expecting.resume_config(store, begun.state)
            self.report.violations += recheck(store, begun)
        self.first, self.opened = begun.first, OpenSince(begun.opened)
        self.fold = TolerantFold(store, begun.state, self.report.add)
        self.rows, self.responses = begun.rows, begun.responses
        self.latest = begun.state.version  # the newest policy version in any log entry that was read, valid or not
        # upper limit of the newest version, because each lost log entry may have published a version
        self.most = begun.state.version
        self.read_to = begun.state.n
        # maps a batch's log entry to the version that was trained on the batch, or to None if the batch was voided
        self.outcomes: dict[int, int | None] = {}
        # maps a batch's entry to the entry of the version trained on it, and to the number of left-out responses
        self.told_left_out: dict[int, tuple[int, float]] = {}
        # maps a version and a kind of its unpruned objects to the log entry that names them, and to the objects
        self.objects: dict[tuple[int, Kind], tuple[int, tuple[StoredObject, ...]]] = {}
        self.doubts: list[NamedObject] = []
        self.chains = DeltaChains(store)
        self.told = AuditProgress(0, first_missing(store, entry_path, self.report.since) if progress else 0, 0, 0, 0)

    def build_report(self) -> AuditReport:
        with ObjectChecks(self.store, self._take) as looking:
            self._read_log(looking)
            self._look_at_versions(looking)
            looking.finish()
        self._recheck_and_report()
        self.fold.close()
        self._hear_the_others()
        self.report.close(self.fold.state)
        self.report.overdue = [] if self.fold.missed else self.opened.list_overdue(self.fold.state)
        self._save_checkpoint()
        return self.report

    def _save_checkpoint(self) -> None:
        if not self.report.clean and self.deep:
            checkpoints.withdraw(self.store, self.others)
        if self.report.clean and self.fold.state.n > self.begun_at:
            told = self.fold.state, self.report, self.rows, self.responses, self.first, self.opened.batches
            checkpoints.keep(self.store, AuditCheckpoint(*told, thorough=self.expecting.is_thorough))

    # --- checks of log entries ----------------------------------------------------------------------------------

    def _read_log(self, looking: ObjectChecks) -> None:
        found = read_entries(self.store, self.report.since, to_the_last=True)
        for written, _, counts in self.fold.over(found):
            if not self.responses and (written.entry.n > 0 or not counts):
                break  # entry 0 is lost
            self._note(written, counts, looking)
            self._tell(entries=self.told.entries + 1)
        if self.fold.state.n < 0:
            raise Missing(f"there is no run in {self.store.uri}; check the path or URI of the run")
        if not self.responses:
            raise Corrupt(
                f"nothing is known about the run in {self.store.uri}, because its first entry cannot be used: "
                f"{self.report.violations[0].what}"
            )

    def _note(self, written: WrittenEntry, counts: bool, looking: ObjectChecks) -> None:
        """Record the stored objects that a log entry names; `counts` is false if the log entry itself is not
        trusted."""
        entry, n = written.entry, written.entry.n
        self._check_witness(n, written.sha256)
        newest = entry.version if self.fold.missed and counts else self.fold.state.version
        self.most += n - self.read_to - 1 + isinstance(entry.body, VersionPublished)
        self.read_to = n
        self.latest = max(self.latest, min(newest, self.most))
        match entry.body:
            case RunCreated() if n == 0:
                self.first = written.sha256
                self._begin(entry.body, looking)
            case ConfigChanged() if counts:
                self._change(entry.body, n)
            case EpochStarted() if counts:
                self.expecting.check_epoch(self.store, n, entry.body)
            case BatchCommitted():
                self._check(entry, counts)
                named = NamedObject(entry.body.file, n, "batch", newest, batch=entry.body)
                self._ask(named, looking)
            case VersionPublished():
                self._check(entry, counts)
                self._note_version(entry, entry.body, counts)
            case BatchVoided() if counts:
                self.opened.note(self.fold.state)
                self.report.quarantined.append(f"{entry_path(entry.body.entry)}: {entry.body.why}")
                self._settle(entry.body.entry, None)
            case Pruned() if counts:
                for version, kind in entry.body.objects:
                    self.objects.pop((version, kind), None)

    def _begin(self, body: RunCreated, looking: ObjectChecks) -> None:
        """Use the config that is recorded in log entry 0, and check the stored objects that log entry 0 names."""
        self._take_config(body, 0)
        limits = self.expecting.limits
        if limits and {body.sources, len(body.prompts) or body.sources} != {limits.sources}:
            told = f"{body.sources} sources and {len(body.prompts)} pins"
            what = f"the run was created with {told}, but its config has {limits.sources} [[prompts]] sections"
            self.report.add("lineage", entry_path(0), what)
        for what in describe_altered_copies(body):
            self.report.add("lineage", entry_path(0), what)
        for stored in (*list_prompt_files(body, self.report.add), *body.policy, *body.models):
            self._ask(NamedObject(stored, 0, "run"), looking)

    def _change(self, body: ConfigChanged, n: int) -> None:
        """Use the config that is recorded in a `ConfigChanged` entry of the log, and check the entry's list of changed
        keys."""
        self._take_config(body, n)
        before = self.fold.state.config_at(n - 1)
        with contextlib.suppress(Corrupt, Missing):  # an unreadable log entry is reported elsewhere
            told = RecordedConfig.of(decode(self.store.get(entry_path(before)), before, self.store.get).entry)
            if diff_trees(told.config, body.config) != body.changes:
                self.report.add(
                    "lineage",
                    entry_path(n),
                    f"the entry's list of changed keys does not match its config and the config of entry {before}",
                )

    def _take_config(self, body: RunCreated | ConfigChanged, n: int) -> None:
        """Check the batches that were committed after log entry `n` against the given config."""
        self.expecting.take_config(body.config)
        self.responses = self.fold.state.group_size + self._redundant_responses(body.config, n)
        if hashlib.sha256(json.dumps(body.config, sort_keys=True).encode()).hexdigest() != body.config_sha256:
            self.report.add(
                "altered", entry_path(n), "the entry's config does not match the entry's hash of the config"
            )

    def _redundant_responses(self, config: Mapping[str, Any], n: int) -> int:
        """Return how many responses per prompt a config starts in addition to the needed ones (`redundant_responses`),
        0 by default."""
        rollout = config.get("rollout", {})
        known = rollout if isinstance(rollout, Mapping) else {"redundant_responses": None}
        redundant = known.get("redundant_responses", known.get("extra_responses", 0))  # an earlier name of the key
        if isinstance(redundant, int) and redundant >= 0:
            return redundant
        self.report.add(
            "lineage",
            entry_path(n),
            f"the entry's config has rollout = {rollout!r}, without a valid number of redundant responses",
        )
        return 0

    def _check(self, entry: Entry, counts: bool) -> None:
        """Compare a log entry with the run's config, if this log entry and all earlier entries can be trusted."""
        state, body = self.fold.state, entry.body
        if self.fold.missed or not counts:
            return
        if isinstance(body, VersionPublished):
            wrong = check_version(body, entry.claim)
        else:
            assert isinstance(body, BatchCommitted)
            wrong = check_batch(body, entry.claim, state, self.expecting.limits)
            self.opened.commit(body, state)
        for kind, what in wrong:
            self.report.add(kind, entry_path(entry.n), what)

    def _note_version(self, entry: Entry, body: VersionPublished, counts: bool) -> None:
        n = entry.n
        own: dict[Kind, tuple[StoredObject, ...]] = {"weights": body.stored_weights, "state": body.state}
        for kind, objects in own.items():
            # an untrusted log entry must not replace a known policy version
            if counts or (body.number, kind) not in self.objects:
                self.objects[body.number, kind] = n, objects
        if counts:
            self.chains.note(entry)
        if body.batch_entry is not None and counts:
            self.told_left_out[body.batch_entry] = n, body.metrics.get("left_out_responses", 0.0)
            self._settle(body.batch_entry, body.number)

    def _settle(self, batch: int, version: int | None) -> None:
        """Record that policy version `version` was trained on the batch that log entry `batch` committed; if `version`
        is None, record that the batch was voided.
        """
        self.outcomes[batch] = version
        self._count(batch)

    def _count(self, batch: int) -> None:
        """Count the rows of a batch, as soon as the rows were read and the batch was trained on or voided."""
        if batch in self.outcomes and batch in self.rows:
            rows, version = self.rows.pop(batch), self.outcomes.pop(batch)
            n, told = self.told_left_out.pop(batch, (-1, 0.0))
            if version is not None:
                self.report.count_trained(version, rows)
                if told != rows.left_out:
                    what = f"its batch has {rows.left_out} unjudged responses to leave out"
                    self.report.add("unjudged", entry_path(n), f"the learner left out {told:g} responses, but {what}")

    # --- checks of stored objects -------------------------------------------------------------------------------

    def _look_at_versions(self, looking: ObjectChecks) -> None:
        """Check the stored objects of all policy versions that were not pruned; only objects that the retention rules
        require must exist."""
        retention = self.fold.state.retention
        for (version, kind), (n, objects) in self.objects.items():
            needed = retention.is_needed(kind, version, self.latest)
            for stored in objects:
                self._ask(NamedObject(stored, n, kind, version, needed), looking)

    def _ask(self, named: NamedObject, looking: ObjectChecks) -> None:
        self.told = replace(self.told, of_objects=self.told.of_objects + 1)
        # if an object is checked a second time, keep the rules that applied to the object's log entry
        if named.rules is None:
            state = self.fold.state
            asked, rated = self.expecting.expect_rows(named.batch), bool(state.epochs)
            rules = Rules(state.alpha, state.group_size, self.responses, asked, rated=rated)
            named = replace(named, rules=rules)
        looking.add(named)

    def _take(self, looked: ObjectFinding) -> None:
        """Record the result of checking a stored object; a faulty object is checked again when the audit ends."""
        self.report.bytes += looked.size
        if looked.violations:
            self.doubts.append(looked.named)
        else:
            self.report.objects += looked.there
        if looked.rows is not None and not looked.violations:
            self.rows[looked.named.entry] = looked.rows
            self._count(looked.named.entry)
        self._tell(objects=self.told.objects + 1, bytes=self.report.bytes)

    def _recheck_and_report(self) -> None:
        """Check faulty objects again, because an entry written during the audit may have voided or pruned them; report
        the rest.
        """
        again: list[ObjectFinding] = []
        doubts, self.doubts = self.doubts, []
        with ObjectChecks(self.store, again.append) as looking:
            for named in doubts:
                self._ask(named, looking)
            looking.finish()
        limits = self.expecting.limits is not None
        wrong = [*self.chains.check(lambda version: (version, "weights") in self.objects, finite=limits)]
        voided, pruned = self._since() if doubts or wrong else (set(), set())
        voided |= {batch for batch, version in self.outcomes.items() if version is None}
        for looked in again:
            named = looked.named
            if not looked.violations:
                self._take(looked)
            elif self.chains.is_replaced(named.version, named.stored):
                self.report.objects += 1
            elif named.entry not in voided and (named.version, named.kind) not in pruned:
                self.report.violations += looked.violations
        known = {violation.where for violation in self.report.violations}
        for version, violation in wrong:
            if (version, "weights") not in pruned and violation.where not in known:
                self.report.violations.append(violation)

    def _since(self) -> tuple[set[int], set[tuple[int, str]]]:
        """Return the batches that were voided and the objects that were pruned after the audit read the log."""
        voided, pruned = set[int](), set[tuple[int, str]]()
        later = TolerantFold(self.store, self.fold.state, lambda kind, where, what: None, lost=self.fold.lost)
        for written, _, counts in later.over(read_entries(self.store, self.fold.state.n + 1)):
            match written.entry.body:
                case BatchVoided() as body if counts:
                    voided.add(body.entry)
                case Pruned() as body if counts:
                    pruned.update(body.objects)
        return voided, pruned

    # --- checks against older audits, and progress --------------------------------------------------------------

    def _check_witness(self, n: int, sha256: str) -> None:
        """Compare the hash of log entry `n` with the hashes that snapshots and older audits have recorded."""
        witness = self.witnesses.pop(n, None)
        if witness and not sha256.startswith(witness.sha256) and checkpoints.is_sound(self.store, witness):
            self.report.add("altered", entry_path(n), f"{witness.path} was made from an entry {n} with another hash")

    def _hear_the_others(self) -> None:
        """Report a violation if the log ends before a log entry that a snapshot or an older audit has recorded."""
        end = self.fold.state.n
        beyond = [
            witness for n, witness in self.witnesses.items() if n > end and checkpoints.is_sound(self.store, witness)
        ]
        if beyond:
            newest = max(beyond, key=lambda witness: witness.n)
            what = f"the log ends with entry {end}, but {newest.path} was made when the log had entry {newest.n}"
            self.report.add("gap", entry_path(end + 1), what)

    def _tell(self, **changed: int) -> None:
        if self.progress is not None:
            self.told = replace(self.told, **changed)
            self.progress(self.told)
