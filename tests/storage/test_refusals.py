"""Tests of each refusal by the log's rules: an entry with a single fault is refused because of this fault, and the
state stays unchanged.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rollflow.storage.log import snapshots
from rollflow.storage.log.entries import Entry, Role, RunCreated, WrittenEntry
from rollflow.storage.log.retention import Retention
from rollflow.storage.log.rules import apply, decide
from rollflow.storage.log.state import Deposed, EntryRefused, GroupTooOld, RunState, Superseded
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import DiscardReason
from tests.support.fold_comparison import compare
from tests.support.log_actors import Learner, Scheduler, Supervisor, create_run
from tests.support.log_drawn import BODY, Json, legal
from tests.support.log_model import Model, read_log


@dataclass
class Rich:
    """A run with all kinds of log entries. Alpha is 2, the newest version is 6, batches 6 and 8 wait, and batch 7 was
    voided.
    """

    store: MemoryStore = field(default_factory=lambda: MemoryStore(uuid.uuid4().hex))
    model: Model = field(init=False)

    def __post_init__(self) -> None:
        create_run(self.store, 2, keep_last=1, keep_every=4, state_every=2)
        self.old, self.newest = (Supervisor(self.store).writer.claim for _ in range(2))
        scheduler, learner = Scheduler(self.store, self.newest), Learner(self.store, self.newest)
        learner.publish()
        for version in range(9):
            self.round(scheduler, learner, version)
        learner.void(7)
        self.model = read_log(self.store)
        self.state = learner.log.state

    def round(self, scheduler: Scheduler, learner: Learner, version: int) -> None:
        scheduler.log.follow()
        for reason in (DiscardReason.FILTERED, DiscardReason.STALE)[: 1 + version % 2]:
            scheduler.dispatch(scheduler.log.state.version)
            scheduler.discard(-1, reason)
        scheduler.commit()
        learner.log.follow()
        if version < 6:
            learner.publish()
        if version == 4:
            learner.prune()

    def entry(self, kind: str, **fields: object) -> tuple[Role, int, Json]:
        """Return a legal log entry of a kind, with the given fields in its body."""
        found = (entry for entry in legal(self.model) if entry[2]["kind"] == kind)
        return next(entry for entry in found if all(entry[2][name] == value for name, value in fields.items()))


@pytest.fixture(scope="module")
def rich() -> Rich:
    return Rich()


def decided(state: RunState, entry: tuple[Role, int, Json]) -> RunState:
    role, claim, body = entry
    return decide(state, state.n + 1, role, claim, BODY.validate_python(body))


def test_example_run_has_waiting_batches_and_deleted_versions(rich: Rich) -> None:
    compare(rich.model, rich.state)
    assert (rich.state.version, rich.state.holes, list(rich.state.waiting)) == (6, [7], [6, 8])
    assert rich.state.behind
    assert rich.state.releasable
    assert rich.model.pruned
    for entry in legal(rich.model):
        decided(rich.state, entry)


def test_supervisor_may_append_the_entry_of_a_deletion(rich: Rich) -> None:
    _, _, body = rich.entry("pruned")
    assert not rich.model.why_not("supervisor", rich.newest, body)
    assert decided(rich.state, ("supervisor", rich.newest, body)).releasable == []
    for role, claim in (("supervisor", rich.old), ("supervisor", rich.state.newest_claim("learner"))):
        assert rich.model.why_not(role, claim, body)
        with pytest.raises(Deposed):
            decided(rich.state, (role, claim, body))


Change = Callable[[Rich], tuple[Role, int, Json]]


def by(role: Role, kind: str, under: Role | None = None) -> Change:
    """Return a log entry of a kind that is legal except for its role or its claim."""
    return lambda rich: (role, rich.state.newest_claim(under or role), rich.entry(kind)[2])


def claimed(role: Role, under: Callable[[Rich], int | None], shift: int = 0) -> Change:
    """Return a claim of `role` that names another supervisor's claim, or that does not name its own entry."""
    return lambda rich: (role, rich.state.n + 1 + shift, rich.entry("claimed")[2] | {"under": under(rich)})


def with_body(kind: str, change: Callable[[Rich, Json], Json], **fields: object) -> Change:
    """Return a legal log entry of a kind, after `change` was applied to its body."""

    def made(rich: Rich) -> tuple[Role, int, Json]:
        role, claim, body = rich.entry(kind, **fields)
        return role, claim, body | change(rich, body)

    return made


def batch(change: Callable[[Json], Json]) -> Change:
    return with_body("batch-committed", lambda rich, body: change(body), number=7)


def issued(change: Callable[[int, int], list[int]]) -> Change:
    """Return the entry of batch 7 that issues other prompts than the next one of each source."""
    return batch(lambda body: {"issued": change(*body["issued"])})


def given_up(change: Callable[[int, int], list[list[int]]]) -> Change:
    """Return the entry of batch 7 that discards other dispatches than the first one, which is open."""

    def changed(body: Json) -> Json:
        assert body["discards"]
        return {"discards": [[key, "stale", 0, 5] for key in change(*body["discards"][0][0])]}

    return batch(changed)


def instead(key: Callable[[Rich], tuple[int, int]]) -> Change:
    """Return the entry of batch 7 with another dispatch in its first group."""
    found = lambda rich, body: {"groups": [[*key(rich), 6, 6, 7], body["groups"][1]]}  # noqa: E731
    return with_body("batch-committed", found, number=7)


def fated(fate: str) -> Callable[[Rich], tuple[int, int]]:
    return lambda rich: next(key for key, found in rich.model.fates.items() if found == fate)


def group(place: int, by: int) -> Change:
    """Return the entry of batch 7 with a changed number in its first group."""

    def changed(body: Json) -> Json:
        one = list(body["groups"][0])
        one[place] += by
        return {"groups": [one, *body["groups"][1:]]}

    return batch(changed)


def void(number: int, entry: Callable[[Rich], int]) -> Change:
    return with_body("batch-voided", lambda rich, body: {"number": number, "entry": entry(rich)}, number=6)


def publish(**fields: object) -> Change:
    return with_body("version-published", lambda rich, body: fields)


def of(number: int) -> Callable[[Rich], int]:
    """Return the entry of batch `number`."""
    return lambda rich: int(rich.model.alive[number]["n"])


def prune(*objects: tuple[int, str]) -> Change:
    return with_body("pruned", lambda rich, body: {"objects": objects})


NEVER = "to prune"
REFUSALS: dict[str, tuple[Change, str]] = {
    # roles
    "a learner commits": (
        by("learner", "batch-committed"),
        "a learner must not append an entry of kind batch-committed",
    ),
    "a supervisor voids": (
        by("supervisor", "batch-voided"),
        "a supervisor must not append an entry of kind batch-voided",
    ),
    "a scheduler publishes": (
        by("scheduler", "version-published"),
        "a scheduler must not append an entry of kind version-published",
    ),
    "a scheduler prunes": (by("scheduler", "pruned"), "a scheduler must not append an entry of kind pruned"),
    "a creator claims": (claimed("creator", lambda rich: None), "a creator must not append an entry of kind claimed"),
    "a scheduler creates": (
        lambda rich: ("scheduler", 0, {**rich.model.created}),
        "must not append an entry of kind run-created",
    ),
    "a run is created again": (lambda rich: ("creator", 0, {**rich.model.created}), "a run can be created only once"),
    # claims
    "a claim of the entry before": (
        claimed("supervisor", lambda rich: None, -1),
        "a claim to a role must name its own log entry",
    ),
    "a claim of the entry behind": (
        claimed("supervisor", lambda rich: None, 1),
        "a claim to a role must name its own log entry",
    ),
    "a supervisor under one": (claimed("supervisor", lambda rich: rich.newest), "under the newest supervisor"),
    "under an old supervisor": (
        claimed("scheduler", lambda rich: rich.old),
        r"newest supervisor \(a supervisor",
    ),
    "under none": (claimed("learner", lambda rich: None), "the learner must be claimed under the newest supervisor"),
    "a role of before": (
        by("scheduler", "batch-committed", "supervisor"),
        r"another scheduler now \(scheduler, process 0",
    ),
    "another role's claim": (by("learner", "pruned", "scheduler"), r"another learner now \(.*\); this learner stops"),
    # batches
    "a batch too far": (batch(lambda body: {"number": 10}), "batch 10 cannot be formed now"),
    "a batch that waits": (batch(lambda body: {"number": 8}), "batch 8 cannot be formed now"),
    "a batch that was trained on": (batch(lambda body: {"number": 5}), "batch 5 cannot be formed now"),
    "a batch of nothing": (batch(lambda body: {"groups": [], "rows": 0}), "batch 7 has no group"),
    "a row too many": (batch(lambda body: {"rows": 7}), "batch 7 has 7 rows; 2 groups of 3 responses need 6"),
    "a row too few": (batch(lambda body: {"rows": 5}), "batch 7 has 5 rows"),
    "a group too many": (batch(lambda body: {"groups": body["groups"] * 2}), "batch 7 has 6 rows"),
    "a prompt is passed over": (issued(lambda one, two: [one + 2, two]), "is not the next prompt of source 0"),
    "a prompt is issued twice": (issued(lambda one, two: [one, two, two]), "is not the next prompt of source 1"),
    "a prompt is issued again": (issued(lambda one, two: [one - 2, two]), "is not the next prompt of source 0"),
    "a prompt is not issued": (issued(lambda one, two: [one]), "attempt 0 of prompt .* is not open"),
    "a prompt below zero": (issued(lambda one, two: [-2]), "is not the next prompt of source 0"),
    "given up twice": (given_up(lambda *key: [[*key], [*key]]), "is not open"),
    "another attempt given up": (given_up(lambda prompt, _: [[prompt, 9]]), "attempt 9 of prompt .* is not open"),
    "trained and given up": (batch(lambda body: {"discards": [[body["groups"][0][:2], "stale", 0, 5]]}), "is not open"),
    "a group twice": (batch(lambda body: {"groups": [body["groups"][0]] * 2}), "is not open"),
    "a group that was trained on": (instead(fated("trained")), "is not open"),
    "a group that waits": (instead(fated("batch")), "is not open"),
    "a group that was filtered": (instead(fated("filtered")), "is not open"),
    "a group that was left behind": (instead(fated("stale")), "is not open"),
    "a group of the voided batch": (instead(fated("corrupt")), "is not open"),
    "a group that was never issued": (instead(lambda rich: (1_000, 0)), "is not open"),
    "a group that is too old": (group(2, -2), "version 4, but with async_ratio = 2 batch 7 takes only groups that"),
    "tokens of before the start": (group(3, -1), "tokens of versions that do not exist"),
    "tokens of the future": (group(3, 1), "tokens of versions that do not exist"),
    # voids
    "a void of another entry": (void(6, lambda rich: 1), "batch 6 cannot be voided: it was trained on or formed again"),
    "a void of what was trained on": (void(5, of(5)), "batch 5 cannot be voided: it was trained on or formed again"),
    "a void of a hole": (void(7, of(6)), "batch 7 cannot be voided: it was trained on or formed again"),
    # versions
    "a version too far": (publish(number=9), "version 9 cannot follow version 6"),
    "a version again": (publish(number=6), "version 6 cannot follow version 6"),
    "a version without weights": (publish(weights=[]), "version 7 has no weights"),
    "of another batch": (publish(batch_entry=1), "version 7 names another batch than the one"),
    "of no batch": (publish(batch_entry=None), "version 7 names another batch than the one"),
    # retention: alpha raises keep_last from 1 to 3; every fourth version is kept, and every second has state
    "the newest weights": (prune((6, "weights")), "the weights of version 6 must not be pruned"),
    "the newest state": (prune((6, "state")), "the state of version 6 must not be pruned"),
    "weights within alpha": (prune((4, "weights")), "version 4 must not be pruned"),
    "the weights of a base": (prune((2, "weights")), "version 2 must not be pruned"),
    "never published": (prune((7, "weights")), f"version 7 has no weights {NEVER}"),
    "no such version": (prune((-1, "state")), f"version -1 has no state {NEVER}"),
    "never stored": (prune((5, "state")), f"version 5 has no state {NEVER}"),
    "pruned before": (prune((1, "weights")), f"version 1 has no weights {NEVER}"),
    "pruned twice": (prune((3, "weights"), (3, "weights")), f"version 3 has no weights {NEVER}"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_invalid_log_entry_leaves_the_state_unchanged(rich: Rich, name: str) -> None:
    change, why = REFUSALS[name]
    role, claim, body = change(rich)
    before = snapshots.to_bytes(rich.state)
    with pytest.raises(EntryRefused, match=why):
        decided(rich.state, (role, claim, body))
    assert snapshots.to_bytes(rich.state) == before
    assert rich.model.why_not(role, claim, body)


def test_invalid_log_entry_raises_the_error_type_of_its_cause(rich: Rich) -> None:
    """A process that was replaced must stop. A group that is too old is issued again. Any other refusal is an error."""
    kinds = {name: type(refused(rich, change)) for name, (change, _) in REFUSALS.items()}
    assert {name for name, kind in kinds.items() if kind is GroupTooOld} == {"a group that is too old"}
    assert {name for name, kind in kinds.items() if kind is Superseded} == {
        "a supervisor under one",
        "under an old supervisor",
        "under none",
    }
    assert {name for name, kind in kinds.items() if kind is Deposed} == {"a role of before", "another role's claim"}


def refused(rich: Rich, change: Change) -> EntryRefused:
    with pytest.raises(EntryRefused) as caught:
        decided(rich.state, change(rich))
    return caught.value


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"n": 30}, "entry 30 cannot follow entry"),
        ({"n": 3}, "entry 3 cannot follow entry"),
        ({"prev": "0" * 64}, "names another hash"),
        ({"version": 7}, r"the log entry names \(version, next batch\) = \(7, 9\), but"),
        ({"batch": 8}, r"the log entry names \(version, next batch\) = \(6, 8\), but"),
        ({"claim": 1}, "a claim to a role must name its own log entry"),
    ],
)
def test_misplaced_log_entry_is_refused(rich: Rich, change: dict[str, Any], why: str) -> None:
    state = rich.state
    _, claim, body = rich.entry("claimed")
    entry = Entry(state.n + 1, state.sha256, "id", "supervisor", claim, 6, 9, 0.0, BODY.validate_python(body))
    after = apply(state, WrittenEntry(entry, "its hash"))
    assert (after.n, after.sha256, after.version, after.next_batch) == (state.n + 1, "its hash", 6, 9)
    before = snapshots.to_bytes(state)
    with pytest.raises(EntryRefused, match=why):
        apply(state, WrittenEntry(replace(entry, **change), "its hash"))
    assert snapshots.to_bytes(state) == before


# --- the beginning of a run --------------------------------------------------------------------------------------

CREATION = {"async_ratio": 1.5, "group_size": 4}


def created(config: dict[str, Any], sources: int = 1) -> RunState:
    return decide(RunState(), 0, "creator", 0, RunCreated("test", config, "", sources))


def test_first_log_entry_must_create_a_run_with_prompt_sources() -> None:
    with pytest.raises(EntryRefused, match="the first entry of a log must create the run"):
        decided(RunState(), ("supervisor", 0, {"kind": "claimed"}))
    with pytest.raises(EntryRefused, match="a run needs at least one prompt source"):
        created(CREATION, sources=0)
    state = created(CREATION, sources=2)
    assert (state.n, state.run_id, state.alpha, state.group_size) == (0, "test", 1.5, 4)
    assert (state.issued, state.filtered, state.version, state.next_batch) == ([0, 0], [0, 0], -1, 0)


@pytest.mark.parametrize("role", ["scheduler", "learner"])
@pytest.mark.parametrize("under", [None, -1, 0])
def test_role_cannot_be_claimed_without_a_supervisor(role: Role, under: int | None) -> None:
    with pytest.raises(Deposed, match=r"newest supervisor \(none\)"):
        decided(created(CREATION), (role, 1, {"kind": "claimed", "under": under}))


def test_process_without_a_claim_cannot_append_to_the_log() -> None:
    for claim in (-1, 0):
        with pytest.raises(Deposed):
            decided(created(CREATION), ("learner", claim, {"kind": "pruned", "objects": []}))


def test_version_0_has_no_batch_and_version_1_has_one(rich: Rich) -> None:
    weights = [{"path": "w", "size": 1, "sha256": "0"}]
    state = created(CREATION)
    state = decided(state, ("supervisor", 1, {"kind": "claimed"}))
    state = decided(state, ("learner", 2, {"kind": "claimed", "under": 1}))
    version = {"kind": "version-published", "number": 0, "batch_entry": None, "weights": weights}
    stateless, version = version, version | {"state": weights}
    with pytest.raises(EntryRefused, match="version 0 must not name a batch"):
        decided(state, ("learner", 2, version | {"batch_entry": 0}))
    with pytest.raises(EntryRefused, match="version 1 cannot follow version -1"):
        decided(state, ("learner", 2, version | {"number": 1}))
    with pytest.raises(EntryRefused, match="version 0 must store the learner's state"):
        decided(state, ("learner", 2, stateless))
    state = decided(state, ("learner", 2, version))
    assert state.held == {0: {"weights": 3, "state": 3}}
    for entry in (None, 3):
        with pytest.raises(EntryRefused, match="version 1 names another batch than the one"):
            decided(state, ("learner", 2, version | {"number": 1, "batch_entry": entry}))


@pytest.mark.parametrize(
    ("alpha", "store", "window"),
    [(0, {}, (5, 10, 1)), (0.5, {"keep_last": 1}, (1, 10, 1)), (2.5, {"keep_last": 2, "keep_every": 3}, (3, 3, 1)),
     (2, {"keep_last": 4, "state_every": 7, "uri": "memory://x"}, (4, 10, 7)), (6, {}, (7, 10, 1))],
)  # fmt: skip
def test_retention_follows_config_and_alpha(alpha: float, store: dict[str, Any], window: tuple[int, int, int]) -> None:
    kept = created({"async_ratio": alpha, "group_size": 1, "store": store}).retention
    assert (kept.keep_last, kept.keep_every, kept.state_every) == window
    assert created({"async_ratio": 1, "group_size": 1}).retention == Retention()


@pytest.mark.parametrize(("alpha", "ahead", "taken"), [
    (0, 0, True), (0, 1, False), (0.5, 0, True), (0.5, 1, False), (1, 1, True), (1, 2, False),
    (2.5, 2, True), (2.5, 3, False),
])  # fmt: skip
def test_batch_with_a_group_older_than_alpha_is_refused(alpha: float, ahead: int, taken: bool) -> None:
    """Version 0 is the newest one, so the groups of batch `ahead` have the staleness `ahead`."""
    store = MemoryStore(uuid.uuid4().hex)
    create_run(store, 9, keep_last=1)
    supervisor = Supervisor(store)
    scheduler, learner = Scheduler(store, supervisor.writer.claim), Learner(store, supervisor.writer.claim)
    learner.publish()
    scheduler.log.follow()
    for _ in range(ahead):
        scheduler.commit()
    state = scheduler.log.state.copy()
    state.alpha = alpha
    model = read_log(store)
    entry = next(entry for entry in legal(model) if entry[2]["kind"] == "batch-committed")
    if taken:
        assert decided(state, entry).waiting[ahead].groups[0].started == 0
    else:
        with pytest.raises(GroupTooOld):
            decided(state, entry)


def test_group_started_before_version_0_is_refused() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    create_run(store, 9)
    supervisor = Supervisor(store)
    learner, scheduler = Learner(store, supervisor.writer.claim), Scheduler(store, supervisor.writer.claim)
    learner.publish()
    scheduler.dispatch(-1)
    scheduler.dispatch(-1)
    with pytest.raises(EntryRefused, match="tokens of versions that do not exist"):
        scheduler.commit()
