"""The audit: proves from its log and its objects that a run kept its invariants, or names what broke them.

    entries from the first on --fold--> batches --rows against entry-->  report
                                  |--> objects of versions --size, sha256--^

It folds the log again from the entries alone. It trusts no process, no snapshot and no metric. Kinds of violation:

- `stale`: a trajectory older than alpha allows, or with tokens from a version that did not exist yet.
- `duplicate`: a dispatch with two fates, a batch that is committed twice, a sample that is in its group twice.
- `missing`: an object that is named and needed and is not there; a sample or a prompt that was left out.
- `gap`: an entry, a version or a batch whose number was skipped.
- `altered`: bytes that are not what was committed.
- `lineage`: an entry that does not follow from those before it, or from the file that it names.

It goes on after a violation (`tolerant_fold` says how far). A run may go on during its audit: a fault of an object is
checked again, and counts only if no later entry voids or prunes the object.

It also compares batches with what the caller expects of them (`expected`): the prompts that they answer, and the
limits of the run's config.

An audit begins where the newest clean one ended (`audit_checkpoints`), checks entry 0 and the newest entries again
(`recheck`), and does not read older objects again. A deep audit begins with the first entry. It reads every object that
must exist, and every other object that exists and is not pruned.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log import audit_checkpoints
from rollflow.storage.log.audit_checkpoints import Audited
from rollflow.storage.log.commits import check_batch, check_version
from rollflow.storage.log.configs import RecordedConfig, differences
from rollflow.storage.log.entries import (
    BatchCommitted,
    BatchVoided,
    ConfigChanged,
    Entry,
    Pruned,
    RunCreated,
    VersionPublished,
    Written,
    decode,
    entry_path,
)
from rollflow.storage.log.expected import NOTHING, Expected
from rollflow.storage.log.expecting import Expecting, OpenSince
from rollflow.storage.log.objects import Looked, Looking, Named
from rollflow.storage.log.reading import entries
from rollflow.storage.log.recheck import recheck
from rollflow.storage.log.report import AuditReport
from rollflow.storage.log.retention import Kind
from rollflow.storage.log.rows import Rules
from rollflow.storage.log.tolerant_fold import Refold
from rollflow.storage.objects.base import ObjectStore, first_missing
from rollflow.storage.records import StoredObject


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an audit is."""

    entries: int
    of_entries: int  # entries that the log had when the audit began
    objects: int
    of_objects: int  # objects that were found to be read so far
    bytes: int  # of the objects


def audit(
    run: ObjectStore,
    *,
    deep: bool = False,
    progress: Callable[[Progress], None] | None = None,
    expected: Expected = NOTHING,
) -> AuditReport:
    """Audit one run's storage. If nothing is wrong, store how far it came.

    Args:
        deep: from the first entry on, and every object.
        expected: what batches are compared with: the run's config and prompts.
        progress: is told after each entry and each object, in the thread that called.

    Raises:
        Missing: there is no run at this place.
        Corrupt: its first entry cannot be read, so that nothing is known of its rules.
        Unreachable: something cannot be read now.
    """
    return _Audit(run, expected, deep=deep, progress=progress).made()


class _Audit:
    """One audit."""

    def __init__(
        self, store: ObjectStore, expected: Expected, *, deep: bool, progress: Callable[[Progress], None] | None
    ) -> None:
        self.store, self.deep, self.progress = store, deep, progress
        snapshots = audit_checkpoints.snapshots(store)  # before the log is read: what they were made of is there
        newest, self.others = audit_checkpoints.newest(store, thorough=expected.is_thorough)
        self.witnesses = {witness.n: witness for witness in [*snapshots, *self.others]}
        begun = Audited() if deep else newest
        self.begun_at = begun.state.n
        self.report = replace(begun.report, since=self.begun_at + 1)
        self.expecting = Expecting(expected, self.report)
        if self.begun_at >= 0:
            self.expecting.resume_config(store, begun.state)
            self.report.violations += recheck(store, begun)
        self.first, self.opened = begun.first, OpenSince(begun.opened)
        self.fold = Refold(store, begun.state, self.report.add)
        self.rows, self.responses = begun.rows, begun.responses
        self.latest = begun.state.version  # of what was read; the fold may have ended before
        self.most = begun.state.version  # that so many entries can have published, with those that are lost
        self.read_to = begun.state.n
        self.outcomes: dict[int, int | None] = {}  # entry of a batch -> the version trained on it; None: voided
        self.objects: dict[tuple[int, Kind], tuple[int, tuple[StoredObject, ...]]] = {}  # unpruned -> entry, objects
        self.doubts: list[Named] = []
        self.told = Progress(0, first_missing(store, entry_path, self.report.since) if progress else 0, 0, 0, 0)

    def made(self) -> AuditReport:
        with Looking(self.store, self._take) as looking:
            self._read_log(looking)
            self._look_at_versions(looking)
            looking.finish()
        self._accuse()
        self.fold.close()
        self._hear_the_others()
        self.report.close(self.fold.state)
        self.report.overdue = [] if self.fold.missed else self.opened.list_overdue(self.fold.state)
        self._leave_word()
        return self.report

    def _leave_word(self) -> None:
        if not self.report.clean and self.deep:
            audit_checkpoints.withdraw(self.store, self.others)
        if self.report.clean and self.fold.state.n > self.begun_at:
            told = self.fold.state, self.report, self.rows, self.responses, self.first, self.opened.batches
            audit_checkpoints.keep(self.store, Audited(*told, thorough=self.expecting.is_thorough))

    # --- entries ------------------------------------------------------------------------------------------------

    def _read_log(self, looking: Looking) -> None:
        found = entries(self.store, self.report.since, to_the_last=True)
        for written, _, counts in self.fold.over(found):
            if not self.responses and (written.entry.n > 0 or not counts):
                break  # the first entry is lost
            self._note(written, counts, looking)
            self._tell(entries=self.told.entries + 1)
        if self.fold.state.n < 0:
            raise Missing(f"there is no run at {self.store.uri}")
        if not self.responses:
            raise Corrupt(f"{self.store.uri}: {self.report.violations[0].what}; nothing is known of this run")

    def _note(self, written: Written, counts: bool, looking: Looking) -> None:
        """Note the objects that an entry names; `counts` is false if the entry itself is not to be believed."""
        entry, n = written.entry, written.entry.n
        self._hear(n, written.sha256)
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
            case BatchCommitted():
                self._check(entry, counts)
                named = Named(entry.body.file, n, "batch", newest, batch=entry.body)
                self._ask(named, looking)
            case VersionPublished():
                self._check(entry, counts)
                self._note_version(entry.body, n, counts)
            case BatchVoided() if counts:
                self.opened.note(self.fold.state)
                self.report.quarantined.append(f"{entry_path(entry.body.entry)}: {entry.body.why}")
                self._settle(entry.body.entry, None)
            case Pruned() if counts:
                for version, kind in entry.body.objects:
                    self.objects.pop((version, kind), None)

    def _begin(self, body: RunCreated, looking: Looking) -> None:
        """Take what entry 0 says: the config, and the objects that the run was prepared with."""
        self._take_config(body, 0)
        limits = self.expecting.limits
        if limits and {body.sources, len(body.prompts) or body.sources} != {limits.sources}:
            told = f"{body.sources} sources and {len(body.prompts)} pins"
            what = f"it has {told}, its config has {limits.sources} [[prompts]]"
            self.report.add("lineage", entry_path(0), what)
        for stored in (*self._prompts(body), *body.policy):
            self._ask(Named(stored, 0, "run"), looking)

    def _change(self, body: ConfigChanged, n: int) -> None:
        """Take a config change, and compare its list of changed keys with the config before."""
        self._take_config(body, n)
        before = self.fold.state.config_at(n - 1)
        with contextlib.suppress(Corrupt, Missing):  # an entry that cannot be read is reported at its own place
            told = RecordedConfig.of(decode(self.store.get(entry_path(before)), before, self.store.get).entry)
            if differences(told.config, body.config) != body.changes:
                self.report.add(
                    "lineage", entry_path(n), f"its changes are not those from the config of entry {before}"
                )

    def _take_config(self, body: RunCreated | ConfigChanged, n: int) -> None:
        """Check batches against this config from entry `n` on."""
        self.expecting.take_config(body.config)
        self.responses = self.fold.state.group_size + self._extra_responses(body.config, n)
        if hashlib.sha256(json.dumps(body.config, sort_keys=True).encode()).hexdigest() != body.config_sha256:
            self.report.add("altered", entry_path(n), "the config is not the one whose hash stands beside it")

    def _extra_responses(self, config: Mapping[str, Any], n: int) -> int:
        """How many responses to a prompt are started beyond those that are kept; 0 if the config does not say it."""
        rollout = config.get("rollout", {})
        extra = rollout.get("extra_responses", 0) if isinstance(rollout, Mapping) else None
        if isinstance(extra, int) and extra >= 0:
            return extra
        self.report.add(
            "lineage", entry_path(n), f"its config says rollout = {rollout!r}, no number of extra responses"
        )
        return 0

    def _prompts(self, body: RunCreated) -> Iterator[StoredObject]:
        """Files of prompts that the run keeps."""
        for pin in body.prompts:
            described = pin.get("kept"), pin.get("size"), pin.get("sha256")
            match described:
                case (None | "", _, _):
                    pass
                case (str(path), int(size), str(sha256)):
                    yield StoredObject(path, size, sha256)
                case _:
                    what = f"it describes a file of prompts by path, size and hash {described!r}"
                    self.report.add("lineage", entry_path(0), what)

    def _check(self, entry: Entry, counts: bool) -> None:
        """Compare an entry with the config, if the entry and all before it can be trusted."""
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

    def _note_version(self, body: VersionPublished, n: int, counts: bool) -> None:
        own: dict[Kind, tuple[StoredObject, ...]] = {"weights": body.weights, "state": body.state}
        for kind, objects in own.items():
            if counts or (body.number, kind) not in self.objects:  # else it is told of a version that is there
                self.objects[body.number, kind] = n, objects
        if body.batch_entry is not None and counts:
            self._settle(body.batch_entry, body.number)

    def _settle(self, batch: int, version: int | None) -> None:
        """The batch of entry `batch` was trained on, or (None) voided."""
        self.outcomes[batch] = version
        self._count(batch)

    def _count(self, batch: int) -> None:
        """Count a batch's rows, once they are read and it is known what became of the batch."""
        if batch in self.outcomes and batch in self.rows:
            rows, version = self.rows.pop(batch), self.outcomes.pop(batch)
            if version is not None:
                self.report.trained(version, rows)

    # --- objects ------------------------------------------------------------------------------------------------

    def _look_at_versions(self, looking: Looking) -> None:
        """Look at the objects that retention needs, and at others that are there and were not pruned."""
        retention = self.fold.state.retention
        for (version, kind), (n, objects) in self.objects.items():
            needed = retention.needed(kind, version, self.latest)
            for stored in objects:
                self._ask(Named(stored, n, kind, version, needed), looking)

    def _ask(self, named: Named, looking: Looking) -> None:
        self.told = replace(self.told, of_objects=self.told.of_objects + 1)
        if named.rules is None:  # otherwise the rules are those of its entry, and it is checked again
            state = self.fold.state
            rules = Rules(state.alpha, state.group_size, self.responses, self.expecting.expect_rows(named.batch))
            named = replace(named, rules=rules)
        looking.add(named)

    def _take(self, looked: Looked) -> None:
        """Take what was found out about an object; if something is wrong, it will be looked at again."""
        self.report.bytes += looked.size
        if looked.violations:
            self.doubts.append(looked.named)
        else:
            self.report.objects += looked.there
        if looked.rows is not None and not looked.violations:
            self.rows[looked.named.entry] = looked.rows
            self._count(looked.named.entry)
        self._tell(objects=self.told.objects + 1, bytes=self.report.bytes)

    def _accuse(self) -> None:
        """Look again at what was found wrong, and name it unless an entry excuses it, even a new one."""
        again: list[Looked] = []
        doubts, self.doubts = self.doubts, []
        with Looking(self.store, again.append) as looking:
            for named in doubts:
                self._ask(named, looking)
            looking.finish()
        voided, pruned = self._since() if doubts else (set(), set())
        voided |= {batch for batch, version in self.outcomes.items() if version is None}
        for looked in again:
            named = looked.named
            if not looked.violations:
                self._take(looked)
            elif named.entry not in voided and (named.version, named.kind) not in pruned:
                self.report.violations += looked.violations

    def _since(self) -> tuple[set[int], set[tuple[int, str]]]:
        """Entries of batches that were voided, and objects that were pruned, since the log was read."""
        voided, pruned = set[int](), set[tuple[int, str]]()
        later = Refold(self.store, self.fold.state, lambda kind, where, what: None, lost=self.fold.lost)
        for written, _, counts in later.over(entries(self.store, self.fold.state.n + 1)):
            match written.entry.body:
                case BatchVoided() as body if counts:
                    voided.add(body.entry)
                case Pruned() as body if counts:
                    pruned.update(body.objects)
        return voided, pruned

    # --- witnesses, progress ------------------------------------------------------------------------------------

    def _hear(self, n: int, sha256: str) -> None:
        """Compare entry `n` with what snapshots and older audits say of it."""
        witness = self.witnesses.pop(n, None)
        if witness and not sha256.startswith(witness.sha256) and audit_checkpoints.is_sound(self.store, witness):
            self.report.add("altered", entry_path(n), f"{witness.path} was made of another entry {n}")

    def _hear_the_others(self) -> None:
        """Check whether entries that snapshots or older audits have seen are gone from the log's end."""
        end = self.fold.state.n
        beyond = [
            witness
            for n, witness in self.witnesses.items()
            if n > end and audit_checkpoints.is_sound(self.store, witness)
        ]
        if beyond:
            newest = max(beyond, key=lambda witness: witness.n)
            what = f"the log ends with entry {end}, {newest.path} was made when there was an entry {newest.n}"
            self.report.add("gap", entry_path(end + 1), what)

    def _tell(self, **changed: int) -> None:
        if self.progress is not None:
            self.told = replace(self.told, **changed)
            self.progress(self.told)
