"""Defines the rules of a run's log. A run's state is computed by applying the log's entries in order. The function
`apply` alone decides which entry may come next.

    state = apply(state, entry)        a pure function; `EntryRefused` says why an entry cannot follow

A writer applies an entry before appending it. A reader applies each entry in turn, and stops at a refused entry.
The rules keep these invariants:

- One writer: an entry is valid only under the newest claim of the writer's role. A role is claimed under the newest
  supervisor's claim, and on that supervisor's cluster. The claim of a learner or a scheduler stays valid when a new
  supervisor takes over.
- Exactly once: a dispatch (attempt to answer a prompt) is *open* from its issue until it is committed or discarded. The
  prompts of a source are issued in order. A discarded prompt is issued again, as the next attempt, if the discard
  reason allows another attempt.
- Epochs: a source that skips solved questions issues no prompt beyond the end of its newest epoch. Its epochs follow
  each other without a gap, and each epoch asks or skips the same number of questions.
- Freshness: every group of batch b was started under a version >= b - alpha (alpha is the config key `async_ratio`),
  and no token of the group comes from a version that did not exist when the batch was committed.
- Order: version v is trained on batch v - 1, as committed by the newest entry of that batch. A batch that was trained
  on cannot be voided.
- Config: a changed config applies to all later entries until the next change. Version v is trained under the config
  that applies to the version's entry, and batch b is formed under the config that applies to the batch's entry. A
  change ends the claims of scheduler and learner, so their processes must claim the roles again, and read the new
  config, before they append another entry. A waiting batch is trained under the new config. So the keys in `FORMED`, by
  which batches are formed, cannot change while a batch waits, and the new alpha must allow the versions under which the
  waiting batch's groups were started. No version is withdrawn. The keys in `FIXED` never change, because earlier
  entries depend on them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from rollflow.storage.log.entries import (
    BatchCommitted,
    BatchVoided,
    Body,
    Claimed,
    ConfigChanged,
    EpochStarted,
    Pruned,
    Role,
    RunCreated,
    TrainedGroup,
    VersionPublished,
    WrittenEntry,
)
from rollflow.storage.log.fates import check_rates, close_dispatch, count_trained, follow_discard, issue_prompt
from rollflow.storage.log.retention import KINDS, Retention
from rollflow.storage.log.state import (
    NOBODY,
    Claim,
    CommittedBatch,
    ConfigPlace,
    Deposed,
    EntryRefused,
    EpochPlace,
    GroupTooOld,
    RunState,
    Superseded,
)
from rollflow.storage.records import DELTA, DiscardReason, StoredObject

WRITERS: Mapping[type, tuple[Role, ...]] = {  # the roles that may append each kind of log entry
    RunCreated: ("creator",),
    Claimed: ("supervisor", "scheduler", "learner"),
    ConfigChanged: ("supervisor",),
    EpochStarted: ("scheduler",),
    BatchCommitted: ("scheduler",),
    BatchVoided: ("scheduler", "learner"),
    VersionPublished: ("learner",),
    Pruned: ("learner", "supervisor"),
}
FIXED = ("seed", "prompts", "policy")  # config keys that never change during a run
# config keys that determine how a batch of trajectories is formed
FORMED = ("groups", "group_size", "engine.temperature", "engine.max_new_tokens")


def apply(state: RunState, written: WrittenEntry) -> RunState:
    """Return the run's state after one more log entry; the argument `state` is not changed.

    Raises:
        EntryRefused: the rules do not allow this log entry after `state`.
    """
    entry = written.entry
    _need(entry.n == state.n + 1, f"entry {entry.n} cannot follow entry {state.n}")
    _need(entry.prev == state.sha256, f"entry {entry.n} names another hash of entry {state.n} than that entry has")
    after = decide(state, entry.n, entry.role, entry.claim, entry.body)
    head, expected = (entry.version, entry.batch), (after.version, after.next_batch)
    _need(head == expected, f"the log entry names (version, next batch) = {head}, but {expected} follows from the log")
    after.sha256 = written.sha256
    return after


def decide(state: RunState, n: int, role: Role, claim: int, body: Body) -> RunState:
    """Return the run's state after log entry `n` with the given body; the caller sets the state's hash. Raises the
    errors of `apply`.
    """
    _need(role in WRITERS[type(body)], f"a {role} must not append an entry of kind {body.kind}")
    after = state.copy()
    after.n = n
    if isinstance(body, RunCreated):
        _create(after, body)
        return after
    _need(state.n >= 0, "the first entry of a log must create the run")
    if isinstance(body, Claimed):
        _claim(after, role, claim, body)
        return after
    if role not in state.claims or claim != state.claims[role].entry:
        raise build_deposed(state, role)
    match body:
        case ConfigChanged():
            _change(after, body)
        case EpochStarted():
            _start_epoch(after, body)
        case BatchCommitted():
            _commit(after, body)
        case BatchVoided():
            _void(after, body)
        case VersionPublished():
            _publish(after, body)
        case Pruned():
            _prune(after, body)
    return after


def with_file(after: RunState, body: Body, file: StoredObject) -> tuple[RunState, Body]:
    """Set the hash of a batch's file in the run's state and in the body of the batch's log entry. The rules of the log
    do not read the hash of a batch's file, so the hash may be set last.
    """
    assert isinstance(body, BatchCommitted), "only the commit of a batch has a file"
    waiting = after.waiting | {body.number: replace(after.waiting[body.number], file=file)}
    return replace(after, waiting=waiting), replace(body, file=file)


def build_deposed(state: RunState, role: Role) -> Deposed:
    """Return the error for a process whose role was claimed by a newer process."""
    if role not in state.claims and len(state.configs) > 1:
        return Deposed(f"the run's config was changed; this {role} has the previous config, and stops")
    return Deposed(f"the run has another {role} now ({_who(state, role)}); this {role} stops")


# --- one rule for each kind of log entry -----------------------------------------------------------------------


def _create(s: RunState, body: RunCreated) -> None:
    _need(s.n == 0, "a run can be created only once")
    _need(body.sources > 0, "a run needs at least one prompt source")
    s.run_id, s.configs, s.fixed = body.run_id, (ConfigPlace(0, 0),), _hash_fixed(body.config)
    _configure(s, body.config)
    s.issued, s.filtered = [0] * body.sources, [0] * body.sources
    s.epochs = {source: EpochPlace() for source in range(body.sources) if _skips_solved(body.config, source)}


def _skips_solved(config: Mapping[str, Any], source: int) -> bool:
    """Return whether a prompt source skips solved questions, according to a config; a config of an older run may lack
    the key."""
    prompts = config.get("prompts")
    section = prompts[source] if isinstance(prompts, list | tuple) and source < len(prompts) else None
    every = section.get("solved_every", 1) if isinstance(section, Mapping) else 1
    return isinstance(every, int) and every > 1


def _change(s: RunState, body: ConfigChanged) -> None:
    _need(
        body.version == s.version + 1,
        f"a config change cannot begin at version {body.version}, because the next version is {s.version + 1}",
    )
    _need(bool(body.changes), "the config change lists no changed key")
    _need(_hash_fixed(body.config) == s.fixed, f"the config keys {', '.join(FIXED)} can never change")
    versions = body.config.get("versions", s.version)
    _need(versions >= s.version, f"the config says versions = {versions}, but version {s.version} is already published")
    formed, every = s.formed, replace(s.retention, keep_last=1)
    _configure(s, body.config)
    _need(
        every == replace(s.retention, keep_last=1),
        "the config keys store.keep_every, store.state_every and store.full_every can never change",
    )
    for number, batch in s.waiting.items():
        differing = [key for key in FORMED if formed[key] != s.formed[key]]
        _need(
            not differing,
            f"batch {number} waits for the learner, and was formed with another value of {', '.join(differing)}",
        )
        oldest = min(group.started for group in batch.groups)
        _need(
            oldest >= number - s.alpha,
            f"batch {number} waits for the learner, and is too old for async_ratio = {s.alpha:g}",
        )
    s.configs = (*s.configs, ConfigPlace(s.n, body.version))
    s.claims = {role: claim for role, claim in s.claims.items() if role == "supervisor"}
    _forget_kept(s)


def _hash_fixed(config: Mapping[str, Any]) -> str:
    """Return a hash of the config keys that must never change during a run (`FIXED`)."""
    part = {name: config.get(name) for name in FIXED}
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()


def _configure(s: RunState, config: Mapping[str, Any]) -> None:
    """Copy the values that the log's rules need from a config into the run's state."""
    alpha = float(config["async_ratio"])
    _need(
        math.isfinite(alpha) and alpha >= 0,
        f"the config says async_ratio = {alpha:g}, which is not a finite number of 0 or more",
    )
    store = config.get("store", {})
    known = {
        name: _number(store, name) for name in ("keep_last", "keep_every", "state_every", "full_every") if name in store
    }
    # engines may still fetch the newest `capacity` policy versions
    rules, capacity = Retention(**known), int(alpha) + 1
    s.alpha, s.group_size, s.formed = (
        alpha,
        _number(config, "group_size"),
        {key: _get(config, key) for key in FORMED},
    )
    s.retention = replace(rules, keep_last=max(rules.keep_last, capacity))


def _get(config: Mapping[str, Any], key: str) -> object:
    """Return the value of a dotted key in a config; None if the key is missing."""
    section, _, name = key.rpartition(".")
    found = config.get(section) if section else config
    return found.get(name) if isinstance(found, Mapping) else None


def _number(section: Mapping[str, object], key: str) -> int:
    """Return an integer from a config; refuse the log entry if the integer is below 1."""
    value = section[key]
    _need(
        isinstance(value, int) and value > 0,
        f"the config says {key} = {value!r}, which is not a whole number of 1 or more",
    )
    assert isinstance(value, int)
    return value


def _claim(s: RunState, role: Role, claim: int, body: Claimed) -> None:
    _need(claim == s.n, "a claim to a role must name its own log entry")
    newest, under = s.claims.get("supervisor"), None if role == "supervisor" else s.newest_claim("supervisor")
    elsewhere = under is not None and newest is not None and body.cluster != newest.cluster
    if body.under != under or under == NOBODY or elsewhere:
        raise Superseded(f"the {role} must be claimed under the newest supervisor ({_who(s, 'supervisor')})")
    s.claims[role] = Claim(s.n, body.under, body.who, body.cluster, body.host, body.process)


def _start_epoch(s: RunState, body: EpochStarted) -> None:
    last = s.epochs.get(body.source)
    if last is None:
        raise EntryRefused(
            f"source {body.source} cannot start an epoch, as only sources that skip solved questions have epochs"
        )
    before = None if last.entry == NOBODY else last.entry
    _need(
        (body.number, body.start, body.before) == (last.number + 1, last.end, before),
        f"epoch {body.number} of source {body.source} does not follow epoch {last.number}",
    )
    skipped, questions = body.skipped, body.asked + len(body.skipped)
    _need(
        body.asked >= 0
        and questions > 0
        and (not skipped if before is None else questions == last.asked + last.skipped),
        f"epoch {body.number} of source {body.source} asks {body.asked} questions and skips {len(skipped)}",
    )
    _need(
        all(0 <= one < questions for one in skipped) and all(a < b for a, b in pairwise(skipped)),
        f"epoch {body.number} of source {body.source} skips questions that do not exist, or lists them unsorted",
    )
    s.epochs[body.source] = EpochPlace(s.n, body.number, body.end, body.asked, len(skipped))


def _commit(s: RunState, body: BatchCommitted) -> None:
    number = body.number
    _need(number == s.next_batch or number in s.holes, f"batch {number} cannot be formed now")
    _need(len(body.groups) > 0, f"batch {number} has no group")
    _need(
        body.rows == len(body.groups) * s.group_size,
        f"batch {number} has {body.rows} rows; {len(body.groups)} groups of {s.group_size} responses "
        f"need {len(body.groups) * s.group_size}",
    )
    for prompt in body.issued:
        issue_prompt(s, prompt)
    check_rates(s, body)
    for discard in body.discards:
        close_dispatch(s, *discard.key)
        s.totals.count(discard.reason, discard.response_tokens)
        follow_discard(s, discard)
    for group in body.groups:
        _check_fresh(s, number, group)
        close_dispatch(s, group.prompt, group.attempt)
    behind = {group.prompt: s.behind.pop(group.prompt) for group in body.groups if group.prompt in s.behind}
    s.waiting[number] = CommittedBatch(s.n, body.file, body.rows, body.groups, body.surplus_tokens, behind)
    if number in s.holes:
        s.holes.remove(number)
    else:
        s.next_batch += 1


def _check_fresh(s: RunState, number: int, group: TrainedGroup) -> None:
    if group.started < number - s.alpha:
        raise GroupTooOld(
            f"group {group.key} was started under version {group.started}, but with async_ratio = {s.alpha:g} "
            f"batch {number} takes only groups that were started under version {number - s.alpha:g} or newer"
        )
    if not 0 <= group.started <= group.newest <= s.version:
        raise EntryRefused(f"group {group.key} has tokens of versions that do not exist")


def _void(s: RunState, body: BatchVoided) -> None:
    waiting = s.waiting.get(body.number)
    _need(
        waiting is not None and waiting.entry == body.entry,
        f"batch {body.number} cannot be voided: it was trained on or formed again",
    )
    assert waiting is not None
    for group in waiting.groups:
        s.totals.count(DiscardReason.CORRUPT, group.tokens)
        s.open[group.prompt] = group.attempt + 1
    if body.cause == "not-finite":
        s.not_finite += 1
        s.redraws |= {group.prompt: s.redraws.get(group.prompt, 0) + 1 for group in waiting.groups}
    s.behind |= waiting.behind
    del s.waiting[body.number]
    s.holes = sorted([*s.holes, body.number])
    s.voids += 1


def _publish(s: RunState, body: VersionPublished) -> None:
    number = body.number
    _need(number == s.version + 1, f"version {number} cannot follow version {s.version}")
    _need(bool(body.weights), f"version {number} has no weights")
    if number == 0:
        _need(body.batch_entry is None, "version 0 must not name a batch")
    else:
        batch = s.waiting.pop(number - 1, None)
        _need(
            batch is not None and batch.entry == body.batch_entry,
            f"version {number} names another batch than the one it must be trained on",
        )
        assert batch is not None
        count_trained(s.totals, number - 1, batch)
        for group in batch.groups if s.redraws else ():
            s.redraws.pop(group.prompt, None)
    stateful = bool(body.state) or not s.retention.stores_state(number)
    _check_deltas(s, body)
    _need(stateful, f"version {number} must store the learner's state, because store.state_every requires it")
    s.version, s.published, s.not_finite = number, s.n, 0
    s.held[number] = dict.fromkeys(KINDS if body.state else KINDS[:1], s.n)
    _forget_kept(s)


def _check_deltas(s: RunState, body: VersionPublished) -> None:
    """Check that each delta belongs to a weight file, and that a full version has no delta."""
    number, paths = body.number, [stored.path for stored in body.deltas]
    known = {stored.path + DELTA for stored in body.weights}
    _need(
        known.issuperset(paths) and len({*paths}) == len(paths), f"version {number} has a delta without a weight file"
    )
    full = s.retention.full_before(number) == number
    _need(not (paths and full), f"version {number} must store its weights whole, because store.full_every requires it")


def _prune(s: RunState, body: Pruned) -> None:
    for version, kind in body.objects:
        _need(kind in s.held.get(version, {}), f"version {version} has no {kind} to prune")
        _need(
            not s.retention.is_needed(kind, version, s.version),
            f"the {kind} of version {version} must not be pruned, because the run still needs it",
        )
        del s.held[version][kind]
    s.held = {version: kinds for version, kinds in s.held.items() if kinds}


def _forget_kept(s: RunState) -> None:
    """Remove from the run's state those objects of old policy versions that are kept forever."""
    oldest = s.version - s.retention.window
    for version in [version for version in s.held if version < oldest]:
        left = {k: n for k, n in s.held[version].items() if not s.retention.is_needed(k, version, s.version)}
        if left:
            s.held[version] = left
        else:
            del s.held[version]


def _who(state: RunState, role: Role) -> str:
    claim = state.claims.get(role)
    return f"{claim.who or role}, process {claim.process} on {claim.host}" if claim else "none"


def _need(holds: bool, why: str) -> None:
    if not holds:
        raise EntryRefused(why)
