"""Checks the counts, discard reasons and object paths in a log entry against the config that applies to the entry. The
log's own rules check only a few config keys, so they may accept entries of a process that ran with another config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rollflow.storage.audit.expected import BatchLimits
from rollflow.storage.audit.report import ViolationKind
from rollflow.storage.log.entries import BatchCommitted, RunCreated, VersionPublished, entry_path
from rollflow.storage.log.state import RunState
from rollflow.storage.records import LEAST_JUDGED, Discard, DiscardReason, GroupKey, StoredObject

Found = tuple[ViolationKind, str]
LEFT_BEHIND = (DiscardReason.STALE, DiscardReason.REDUNDANT)
HIGHEST_PROBE = 1e-4  # largest valid log-prob (nats); by rounding, a token of probability 1 may have a log-prob above 0


def check_batch(body: BatchCommitted, claim: int, after: RunState, limits: BatchLimits | None) -> Iterator[Found]:
    """Report the faults in the log entry that commits a batch; `after` is the run's state after the commit."""
    if not body.file.path.startswith(f"trajectories/{body.number:08d}-{claim}-"):
        yield (
            "lineage",
            (
                f"the entry of batch {body.number} names the file {body.file.path}, which this writer did not "
                "write for this batch"
            ),
        )
    for discard in body.discards:
        yield from _check_discard(discard, after)
    yield from _check_unjudged(body, after, limits)
    if limits is None:
        return
    if len(body.groups) != limits.groups:
        yield (
            "lineage",
            f"batch {body.number} has {len(body.groups)} groups, but the config says groups = {limits.groups}",
        )
    most = limits.bound_tokens(len(body.groups) * limits.redundant_responses)
    if not 0 <= body.surplus_tokens <= most:
        what = (
            f"redundant_responses = {limits.redundant_responses} responses of at most "
            f"{limits.bound_tokens(1):g} tokens for each group"
        )
        yield (
            "lineage",
            (
                f"batch {body.number} counts {body.surplus_tokens} tokens of surplus responses, but the config "
                f"allows only {what}"
            ),
        )
    for group in body.groups:
        yield from _check_length(group.key, group.tokens, limits.bound_tokens(limits.group_size))
    for discard in body.discards:
        yield from _check_against(discard, after, limits)


def _check_discard(discard: Discard, after: RunState) -> Iterator[Found]:
    """Check that a discarded group of responses was started under an existing policy version, and has no negative token
    count."""
    if not 0 <= discard.started_version <= after.version or discard.response_tokens < 0:
        what = f"a start under version {discard.started_version} and {discard.response_tokens} response tokens"
        yield (
            "lineage",
            f"dispatch {_name(discard.key)} was discarded as {discard.reason} with impossible values: {what}",
        )


def _check_unjudged(body: BatchCommitted, after: RunState, limits: BatchLimits | None) -> Iterator[Found]:
    """Check that each unjudged response belongs to a group of this log entry, and that the group may have unjudged
    responses.
    """
    reasons = {one.key: one.reason for one in body.discards} if body.unjudged else {}
    committed = {group.key for group in body.groups} if body.unjudged else set()
    samples: dict[GroupKey, list[int]] = {}
    for one in body.unjudged:
        samples.setdefault(one.key, []).append(one.sample)
        if one.key not in committed and reasons.get(one.key) not in (DiscardReason.FILTERED, DiscardReason.UNJUDGED):
            what = f"an unjudged response of dispatch {_name(one.key)}, which it neither commits nor discards as such"
            yield "unjudged", f"the entry of batch {body.number} has {what}"
    most = max(0, after.group_size - LEAST_JUDGED)
    responses = limits.group_size + limits.redundant_responses if limits else math.inf
    for key, numbers in samples.items():
        name, reason = _name(key), reasons.get(key)
        if len({*numbers}) < len(numbers) or min(numbers) < 0 or max(numbers) >= responses:
            yield "unjudged", f"dispatch {name} has no such unjudged responses: {numbers}"
        elif len(numbers) > _bound_unjudged(reason, most, limits):
            yield "unjudged", f"dispatch {name} has too many unjudged responses: {numbers}"
        elif reason is DiscardReason.FILTERED and limits and not (limits.leave_out or limits.removes):
            what = 'the config has no unjudged = "leave_out"'
            yield "unjudged", f"dispatch {name} was discarded as filtered with unjudged responses, but {what}"


def _bound_unjudged(reason: DiscardReason | None, most: int, limits: BatchLimits | None) -> int:
    """Return the largest number of unjudged responses that a group discarded for this reason may have."""
    if reason is DiscardReason.UNJUDGED:
        return 1
    may_be_removed = reason is DiscardReason.FILTERED and (limits is None or limits.removes)
    return max(most, int(may_be_removed))  # a removed environment is recorded as one unjudged response


def _check_against(discard: Discard, after: RunState, limits: BatchLimits) -> Iterator[Found]:
    """Check that the config allows the reason for which a group of responses was discarded. If the group was discarded
    as stale or redundant, also check that the group was too old.
    """
    name = _name(discard.key)
    if discard.reason not in limits.reasons:
        known = ", ".join(sorted(limits.reasons)) or "none"
        yield (
            "lineage",
            f"dispatch {name} was discarded as {discard.reason}; the run's config allows only these reasons: {known}",
        )
    if discard.reason in LEFT_BEHIND and discard.started_version >= after.next_batch - after.alpha:
        what = f"batch {after.next_batch} would still accept a start under version {discard.started_version}"
        yield "lineage", f"dispatch {name} was discarded as {discard.reason}, but at async_ratio {after.alpha:g} {what}"
    responses = limits.group_size + limits.redundant_responses
    yield from _check_length(discard.key, discard.response_tokens, limits.bound_tokens(responses))


def _check_length(key: GroupKey, tokens: int, most: float) -> Iterator[Found]:
    if tokens > most:
        yield "lineage", f"dispatch {_name(key)} has {tokens} response tokens; the config allows at most {most:g}"


def check_version(body: VersionPublished, claim: int) -> Iterator[Found]:
    """Report faults in the log entry of a policy version: wrong object paths, or impossible log-probs of the probe
    tokens.
    """
    own = f"policies/{body.number:08d}/{claim}/"
    for stored in (*body.weights, *body.deltas, *body.state):
        if not stored.path.startswith(own):
            yield (
                "lineage",
                f"version {body.number} names the object {stored.path}, which is not in the version's folder {own}",
            )
    if not all(math.isfinite(value) and value <= HIGHEST_PROBE for value in body.probe):
        yield "lineage", f"version {body.number} has a log-probability of the probe that is positive or not finite"


def _name(key: GroupKey) -> str:
    return f"{key.prompt}.{key.attempt}"


def list_prompt_files(body: RunCreated, report: Callable[[ViolationKind, str, str], None]) -> Iterator[StoredObject]:
    """Yield the prompt files that are stored with a run; call `report` for a file that is described invalidly."""
    held_out = [pin["held_out"] for pin in body.prompts if isinstance(pin.get("held_out"), Mapping)]
    sets = [one for pin in body.prompts for one in dict(pin.get("evaluation_sets") or {}).values()]
    for pin in (*body.prompts, *held_out, *sets):
        described = pin.get("kept"), pin.get("size"), pin.get("sha256")
        match described:
            case (None | "", _, _):
                pass
            case (str(path), int(size), str(sha256)):
                yield StoredObject(path, size, sha256)
            case _:
                what = f"the entry describes a prompt file by an invalid path, size and hash: {described!r}"
                report("lineage", entry_path(0), what)


def describe_altered_copies(body: RunCreated) -> Iterator[str]:
    """Describe the weight files of which the run has no identical copy, if the run begins with a policy version of an
    earlier run.
    """
    copies = {(Path(stored.path).name, stored.size, stored.sha256) for stored in body.policy}
    source = body.source_version
    for stored in source.weights if source else ():
        if source and (Path(stored.path).name, stored.size, stored.sha256) not in copies:
            yield f"the run begins with version {source.version} of {source.uri}, but has no copy of its {stored.path}"
