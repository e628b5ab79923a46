"""Alters a finished run in many ways, for the table of `docs/audit.md`, which says which check detects each alteration.

The run is that of `tests/storage/audit/test_alterations.py`: 12 versions, alpha 1, two sources of prompts, batches of 2
groups of 4 rows. Dispatch 4.0 (the first issue of prompt 4) was discarded as stale with batch 2, and prompt 4 was
trained on as dispatch 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from rollflow.storage.records import Discard, DiscardReason, GroupKey, StopReason, Trajectory
from tests.support.forger import Forger, Groups, asked, given, longer, of_all, put

# "says": the audit reports the alteration, but not as a violation
Finder = Literal["audit", "says", "anchor", "replay"]
AUDIT: tuple[Finder, ...] = ("audit", "anchor")
ANCHOR: tuple[Finder, ...] = ("anchor",)
REPLAY: tuple[Finder, ...] = ("anchor", "replay")
SAYS: tuple[Finder, ...] = ("says", "anchor")
NOBODY: tuple[Finder, ...] = ()
B = 5  # the batch to alter, unless an alteration needs another one
NAN = float("nan")


@dataclass(frozen=True)
class Alteration:
    """An alteration: the function that makes it, and the checks that detect it."""

    part: str
    what: str
    by: tuple[Finder, ...]
    forge: Callable[[Forger], object]


def alterations_of_batches() -> Iterator[Alteration]:
    """Yield the alterations of rows of batches and of dispatches (issues of prompts)."""
    for part, table in (("prompts", PROMPTS), ("responses", RESPONSES), ("dispatches", DISPATCHES)):
        for what, by, forge in table:
            yield Alteration(part, what, by, forge)


# --- prompts -------------------------------------------------------------------------------------------------------


def _first_group(f: Forger, change: Callable[[Trajectory], Trajectory]) -> None:
    f.rows(B, lambda groups: [of_all(groups[0], change), *groups[1:]])


def _swapped_prompts(groups: Groups) -> Groups:
    one, other = (list(group.trajectories[0].tokens)[: given(group.trajectories[0])] for group in groups)
    return [of_all(groups[0], lambda row: asked(row, other)), of_all(groups[1], lambda row: asked(row, one))]


def _swapped_keys(groups: Groups) -> Groups:
    one, other = groups
    return [
        replace(other, key=one.key, prompt_id=one.prompt_id, domain=one.domain),
        replace(one, key=other.key, prompt_id=other.prompt_id, domain=other.domain),
    ]


def _swapped_responses(groups: Groups) -> Groups:
    """Swap the responses of two groups, but not their prompts."""
    one, other = groups
    prompts = [list(group.trajectories[0].tokens)[: given(group.trajectories[0])] for group in groups]
    return [
        replace(one, trajectories=tuple(asked(row, prompts[0]) for row in other.trajectories)),
        replace(other, trajectories=tuple(asked(row, prompts[1]) for row in one.trajectories)),
    ]


def _held_out(f: Forger) -> None:
    prompt = f.context.prompts().held_out()[0]
    _first_group(f, lambda row: asked(row, prompt.tokens))


def _later(f: Forger) -> None:
    prompt = f.context.prompts().prompt(1000)
    _first_group(f, lambda row: asked(row, prompt.tokens))


def _one_token(row: Trajectory) -> Trajectory:
    return replace(row, tokens=put(row.tokens, 1, row.tokens[1] + 1))


PROMPTS = (
    (
        "the prompt id of a group",
        AUDIT,
        lambda f: f.rows(B, lambda groups: [replace(groups[0], prompt_id="q/00000099"), groups[1]]),
    ),
    (
        "the domain of a group",
        AUDIT,
        lambda f: f.rows(B, lambda groups: [replace(groups[0], domain="other"), groups[1]]),
    ),
    ("one token of a prompt, in one row", AUDIT, lambda f: f.row(B, _one_token)),
    ("one token of a prompt, in all rows of its group", AUDIT, lambda f: _first_group(f, _one_token)),
    (
        "a prompt cut by one token",
        AUDIT,
        lambda f: _first_group(f, lambda row: asked(row, list(row.tokens)[: given(row) - 1])),
    ),
    ("the prompts of two groups swapped", AUDIT, lambda f: f.rows(B, _swapped_prompts)),
    ("the dispatches of two groups swapped", AUDIT, lambda f: f.rows(B, _swapped_keys)),
    ("a group that answers a held-out prompt", AUDIT, _held_out),
    ("a group that answers a prompt of a later turn", AUDIT, _later),
    (
        "the text of the questions in the file that the run keeps",
        AUDIT,
        lambda f: f.file_of_prompts(lambda data: data.replace(b"plus", b"and")),
    ),
    (
        "the answers in the file that the run keeps",
        ANCHOR,
        lambda f: f.file_of_prompts(lambda data: data.replace(b'"answer":"', b'"answer":"1')),
    ),
    ("the pin of generated prompts: the hash of what they ask", SAYS, lambda f: f.pin(1, sha256="0" * 64)),
    ("the pin of generated prompts: the package's version", SAYS, lambda f: f.pin(1, version="0.0.1")),
    ("the pin of a file: a hash that is not that of the file", AUDIT, lambda f: f.pin(0, sha256="0" * 64)),
)

# --- responses -----------------------------------------------------------------------------------------------------


def _last(row: Trajectory, **columns: object) -> Trajectory:
    """Return the row with other values at its last token."""
    changed = {name: put(getattr(row, name), len(row.tokens) - 1, value) for name, value in columns.items()}
    return replace(row, **changed)  # type: ignore[arg-type]


def _first_response(row: Trajectory, **columns: object) -> Trajectory:
    changed = {name: put(getattr(row, name), given(row), value) for name, value in columns.items()}
    return replace(row, **changed)  # type: ignore[arg-type]


def _ended(ending: str, other: StopReason) -> Callable[[Forger], None]:
    return lambda f: f.row(f.batch_with(ending), lambda row: replace(row, ending=other), ending=ending)


def _without_stop(f: Forger) -> None:
    f.row(f.batch_with(StopReason.STOP), lambda row: _last(row, tokens=5), ending=StopReason.STOP)


def _too_long(f: Forger) -> None:
    f.row(f.batch_with(StopReason.STOP), lambda row: longer(row, 9), ending=StopReason.STOP)


def _versions(row: Trajectory, versions: tuple[int, ...]) -> Trajectory:
    """Return the row with `versions` for its first tokens, and the last of these versions for all later tokens."""
    own = given(row)
    count = len(row.tokens) - own
    made = [versions[min(place, len(versions) - 1)] for place in range(count)]
    return replace(row, versions=(*[-1] * own, *made))


def _later_start(f: Forger) -> None:
    f.rows(B, lambda groups: [of_all(g, lambda row: replace(_versions(row, (B,)), started_version=B)) for g in groups])


def _samples(groups: Groups, sample: int) -> Groups:
    first = replace(groups[0].trajectories[0], sample=sample)
    return [replace(groups[0], trajectories=(first, *groups[0].trajectories[1:])), *groups[1:]]


def _even(row: Trajectory) -> Trajectory:
    return replace(row, logprobs=tuple(-5.5 if own else 0.0 for own in row.loss_mask))


def _reward(row: Trajectory) -> Trajectory:
    return replace(row, reward=1.0 - row.reward)


RESPONSES = (
    ("a token of a response masked out", AUDIT, lambda f: f.row(B, lambda row: _masked(row, given(row), False))),
    ("a token of a prompt counted as the policy's", AUDIT, lambda f: f.row(B, lambda row: _masked(row, 1, True))),
    ("an ending: cut instead of stopped", AUDIT, _ended("stop", StopReason.LENGTH)),
    ("an ending: stopped instead of cut", AUDIT, _ended("length", StopReason.STOP)),
    ("an ending: aborted", AUDIT, _ended("stop", StopReason.ABORTED)),
    ("an ending: failed", AUDIT, _ended("length", StopReason.FAILED)),
    ("a stop token replaced by another token", AUDIT, _without_stop),
    ("a response of more than `max_new_tokens`", AUDIT, _too_long),
    ("a token beyond the vocabulary", AUDIT, lambda f: f.row(B, lambda row: _first_response(row, tokens=999_999))),
    ("a negative token", AUDIT, lambda f: f.row(B, lambda row: _first_response(row, tokens=-3))),
    ("another token of the vocabulary", REPLAY, lambda f: f.row(B, lambda row: _first_response(row, tokens=77))),
    ("the responses of two groups swapped", REPLAY, lambda f: f.rows(B, _swapped_responses)),
    ("a positive log-probability", AUDIT, lambda f: f.row(B, lambda row: _first_response(row, logprobs=0.5))),
    ("a log-probability that is NaN", AUDIT, lambda f: f.row(B, lambda row: _first_response(row, logprobs=NAN))),
    ("other log-probabilities of a group", REPLAY, lambda f: _first_group(f, _even)),
    (
        "a log-probability of a token of the prompt",
        AUDIT,
        lambda f: f.row(B, lambda row: replace(row, logprobs=put(row.logprobs, 0, -1.0))),
    ),
    (
        "a version of a token of the prompt",
        AUDIT,
        lambda f: f.row(B, lambda row: replace(row, versions=put(row.versions, 0, B))),
    ),
    ("a token of a version that did not exist", AUDIT, lambda f: f.row(B, lambda row: _last(row, versions=B + 1))),
    ("a token older than its trajectory", AUDIT, lambda f: f.row(B, lambda row: _versions(row, (B - 2, B)))),
    ("a token older than the one before it", AUDIT, lambda f: f.row(B, lambda row: _versions(row, (B, B - 1)))),
    (
        "all versions of a batch, and its starts, increased by one",
        ANCHOR,
        _later_start,
    ),
    (
        "a start older than alpha allows, in rows and entry",
        AUDIT,
        lambda f: f.row(B, lambda row: replace(row, started_version=B - 2)),
    ),
    ("a reward", REPLAY, lambda f: f.row(B, _reward)),
    ("a reward that is NaN", AUDIT, lambda f: f.row(B, lambda row: replace(row, reward=NAN))),
    ("the reason of a reward", ANCHOR, lambda f: f.row(B, lambda row: replace(row, reason="right"))),
    (
        "the version of a response's scorer",
        ANCHOR,
        lambda f: f.row(B, lambda row: replace(row, scorer_version="0" * 12)),
    ),
    ("a sample that occurs twice", AUDIT, lambda f: f.rows(B, lambda groups: _samples(groups, 1))),
    ("a sample that was not requested", AUDIT, lambda f: f.rows(B, lambda groups: _samples(groups, 7))),
    (
        "a row left out",
        AUDIT,
        lambda f: f.rows(B, lambda groups: [_shorter(groups[0]), groups[1]], counts=False),
    ),
    ("the order of two rows", ANCHOR, lambda f: f.rows(B, _reordered)),
    ("the seconds of a generation", ANCHOR, lambda f: f.row(B, lambda row: replace(row, generation_seconds=9.0))),
    ("negative seconds", AUDIT, lambda f: f.row(B, lambda row: replace(row, generation_seconds=-1.0))),
)


def _masked(row: Trajectory, place: int, own: bool) -> Trajectory:
    version = row.versions[-1] if not own else row.started_version
    columns = {"loss_mask": own, "logprobs": -5.0 if own else 0.0, "versions": version if own else -1}
    changed = {name: put(getattr(row, name), place, value) for name, value in columns.items()}
    return replace(row, **changed)  # type: ignore[arg-type]


def _shorter(group: Groups | object) -> object:
    return replace(group, trajectories=group.trajectories[1:])  # type: ignore[union-attr, type-var]


def _reordered(groups: Groups) -> Groups:
    first, second, *others = groups[0].trajectories
    return [replace(groups[0], trajectories=(second, first, *others)), *groups[1:]]


# --- dispatches ----------------------------------------------------------------------------------------------------

LOST = Discard(GroupKey(4, 0), DiscardReason.STALE, 0, 21)  # the discard that batch 2 records


def _hidden(f: Forger) -> None:
    """Remove the discard `LOST`, as if the first dispatch of its prompt had been trained on."""
    f.rows(2, lambda groups: [replace(groups[0], key=GroupKey(4, 0)), *groups[1:]])
    f.batch(2, lambda body: replace(body, discards=()))


def _moved(to: int) -> Callable[[Forger], None]:
    def forge(f: Forger) -> None:
        f.batch(2, lambda body: replace(body, discards=()))
        f.batch(to, lambda body: replace(body, discards=(*body.discards, LOST)))

    return forge


def _invented(reason: DiscardReason, started: int = 0) -> Callable[[Forger], None]:
    """Add to the last batch a discard of the prompt that is in flight at the end of the run."""

    def forge(f: Forger) -> None:
        [prompt] = f.context.log.state.open
        f.batch(11, lambda body: replace(body, discards=(Discard(GroupKey(prompt, 0), reason, started, 5),)))

    return forge


def _issued(f: Forger) -> None:
    """Issue one more prompt of a source with batch 1, so that the trained prompts come one issue later."""
    f.batch(1, lambda body: replace(body, issued=(*body.issued, max(body.issued) + 1)))


def _never_ended(f: Forger) -> None:
    """Issue with the first batch a prompt that never ends, so that all other prompts have the next indices."""
    f.batch(0, lambda body: replace(body, issued=(*body.issued, 25)))


DISPATCHES = (
    ("a reason: filtered instead of stale", AUDIT, lambda f: f.discard(2, reason=DiscardReason.FILTERED)),
    ("a reason: failed instead of stale", AUDIT, lambda f: f.discard(2, reason=DiscardReason.FAILED)),
    ("a reason: redundant instead of stale", AUDIT, lambda f: f.discard(2, reason=DiscardReason.REDUNDANT)),
    ("a reason: corrupt instead of stale, without a void", AUDIT, lambda f: f.discard(2, reason=DiscardReason.CORRUPT)),
    ("a stale dispatch that was not too old", AUDIT, lambda f: f.discard(2, started_version=2)),
    ("a discard under a version that did not exist", AUDIT, lambda f: f.discard(2, started_version=3)),
    ("a discard under a negative version", AUDIT, lambda f: f.discard(2, started_version=-1)),
    ("a discard of negative length", AUDIT, lambda f: f.discard(2, response_tokens=-1)),
    ("a discard longer than a group can be", AUDIT, lambda f: f.discard(2, response_tokens=33)),
    ("the length of a discard", ANCHOR, lambda f: f.discard(2, response_tokens=30)),
    ("a discard removed, and its prompt's attempts renumbered", ANCHOR, _hidden),
    ("a discard left out", AUDIT, lambda f: f.batch(2, lambda body: replace(body, discards=()))),
    ("a discard that occurs twice", AUDIT, lambda f: f.batch(2, lambda body: replace(body, discards=(LOST, LOST)))),
    ("a discard moved to a later batch", AUDIT, _moved(3)),
    ("a discard moved to an earlier batch, when it was not yet stale", AUDIT, _moved(0)),
    ("a discard invented for a prompt in flight: stale", ANCHOR, _invented(DiscardReason.STALE)),
    ("a discard invented for a prompt in flight: stale, too new", AUDIT, _invented(DiscardReason.STALE, 11)),
    ("a discard invented for a prompt in flight: filtered", AUDIT, _invented(DiscardReason.FILTERED)),
    ("a prompt issued out of turn", AUDIT, _never_ended),
    ("a group left out of batch and entry", AUDIT, lambda f: f.rows(B, lambda groups: groups[:1])),
    (
        "a group trained on twice",
        AUDIT,
        lambda f: f.rows(B, lambda groups: [groups[0], f.groups(B - 1)[1]]),
    ),
    ("the number of rows in an entry", AUDIT, lambda f: f.batch(B, lambda body: replace(body, rows=7))),
    (
        "the number of tokens in an entry",
        AUDIT,
        lambda f: f.batch(B, lambda body: replace(body, groups=(body.groups[0]._replace(tokens=3), body.groups[1]))),
    ),
    (
        "the start of a group in an entry",
        AUDIT,
        lambda f: f.batch(B, lambda body: replace(body, groups=(body.groups[0]._replace(started=B), body.groups[1]))),
    ),
    (
        "tokens of surplus responses, with none started",
        AUDIT,
        lambda f: f.batch(B, lambda body: replace(body, surplus_tokens=9)),
    ),
    ("the file of another batch", AUDIT, lambda f: _other_file(f)),
)


def _other_file(f: Forger) -> None:
    from tests.support.log_runs import committed

    other = committed(f.store, B - 1).body.file  # type: ignore[union-attr]
    f.batch(B, lambda body: replace(body, file=other))
