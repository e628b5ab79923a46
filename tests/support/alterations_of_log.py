"""Alters versions, the first log entry, the log and the files beside the log of a finished run, for the table of
`docs/audit.md`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rollflow.storage.log.entries import BatchVoided, Claimed, Entry, Pruned, VersionPublished, entry_path
from tests.support.alterations import ANCHOR, AUDIT, NOBODY, REPLAY, SAYS, Alteration, B, Finder, alterations_of_batches
from tests.support.forger import Forger
from tests.support.log_runs import committed, published, read

APPENDED: tuple[Finder, ...] = ("audit",)  # an anchor proves nothing about log entries that follow it
V = 6  # the version to alter


def all_alterations() -> list[Alteration]:
    """Return all alterations of the table in `docs/audit.md`."""
    return [*alterations_of_batches(), *_others()]


def _others() -> Iterator[Alteration]:
    for part, table in (("versions", VERSIONS), ("beginning", BEGINNING), ("log", LOG), ("beside the log", BESIDE)):
        for what, by, forge in table:
            yield Alteration(part, what, by, forge)


# --- versions ------------------------------------------------------------------------------------------------------


def _floats(data: bytes) -> int:
    """Return the offset of the numbers in a safetensors file."""
    return 8 + int.from_bytes(data[:8], "little")


def _patched(value: bytes) -> Callable[[bytes], bytes]:
    def patch(data: bytes) -> bytes:
        start = _floats(data)
        return data[:start] + value + data[start + len(value) :]

    return patch


def _weights_of(version: int) -> Callable[[Forger], bytes]:
    return lambda f: f.store.get(published(f.store, version).body.weights[0].path)  # type: ignore[union-attr, no-any-return]


def _named(f: Forger, version: int) -> None:
    other = published(f.store, version).body.weights  # type: ignore[union-attr]
    f.version(V, lambda body: replace(body, weights=other))


def _trained_on_another(f: Forger) -> None:
    other = committed(f.store, V).n
    f.version(V, lambda body: replace(body, batch_entry=other))


def _gone(kind: str) -> Callable[[Forger], None]:
    def forge(f: Forger) -> None:
        f.store.delete(getattr(published(f.store, 12).body, kind)[0].path)

    return forge


VERSIONS = (
    ("the objects of another version", AUDIT, lambda f: _named(f, V - 1)),
    (
        "the weights of another version, as its own",
        REPLAY,
        lambda f: f.weights(V, lambda _: _weights_of(V - 1)(f)),
    ),
    ("one weight", REPLAY, lambda f: f.weights(V, _patched(b"\0\0\0\x3f"))),
    ("a weight that is NaN", AUDIT, lambda f: f.weights(V, _patched(b"\0\0\xc0\x7f"))),
    ("a weight that is infinite", AUDIT, lambda f: f.weights(V, _patched(b"\0\0\x80\xff"))),
    ("weights that are no safetensors file", AUDIT, lambda f: f.weights(V, lambda _: b"words, and no weights")),
    ("the learner's state", REPLAY, lambda f: f.weights(12, _patched(b"\0\0\0\x3f"), "state")),
    ("an entry without learner's state", AUDIT, lambda f: f.version(V, lambda body: replace(body, state=()))),
    ("an entry without weights", AUDIT, lambda f: f.version(V, lambda body: replace(body, weights=()))),
    ("missing learner's state", ("audit",), _gone("state")),
    ("missing weights", ("audit",), _gone("weights")),
    ("the batch that a version was trained on", AUDIT, _trained_on_another),
    ("the number of a version", AUDIT, lambda f: f.version(V, lambda body: replace(body, number=V + 1))),
    (
        "a positive log-probability of the probe",
        AUDIT,
        lambda f: f.version(V, lambda body: replace(body, probe=(0.5, *body.probe[1:]))),
    ),
    (
        "a log-probability of the probe",
        ANCHOR,
        lambda f: f.version(V, lambda body: replace(body, probe=(-1.5, *body.probe[1:]))),
    ),
    (
        "the metrics of a version",
        ANCHOR,
        lambda f: f.version(V, lambda body: replace(body, metrics={**body.metrics, "reward": 0.99})),
    ),
    ("the version of the code", ANCHOR, lambda f: f.version(V, lambda body: replace(body, code_version="9.9"))),
)

# --- the run's beginning -------------------------------------------------------------------------------------------


def _alpha(alpha: float) -> Callable[[Forger], None]:
    return lambda f: f.config({"async_ratio": alpha})


def _longest(tokens: int) -> Callable[[Forger], None]:
    return lambda f: f.config({"engine": {"max_new_tokens": tokens}})


def _vocabulary(by: int) -> Callable[[Forger], None]:
    def forge(f: Forger) -> None:
        size = json.loads(f.store.get("policy/config.json"))["vocab_size"]
        f.policy("config.json", vocab_size=size + by)

    return forge


def _tokenizer(f: Forger) -> None:
    """Swap two tokens of the prompts."""
    tree = json.loads(f.store.get("policy/tokenizer.json"))
    vocabulary = tree["model"]["vocab"]
    one, other = (name for name, number in sorted(vocabulary.items(), key=lambda one: one[1]) if name in ("0", "1"))
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    f.begun_with("policy/tokenizer.json", json.dumps(tree).encode())


def _first_weights(f: Forger) -> None:
    path = "policy/model.safetensors"
    f.begun_with(path, _patched(b"\0\0\0\x3f")(f.store.get(path)))


def _stop(f: Forger) -> None:
    for name in ("config.json", "generation_config.json"):
        f.policy(name, eos_token_id=7)


BEGINNING = (
    ("alpha, far above the true value, with a stale discard on record", AUDIT, _alpha(99.0)),
    ("alpha, a little above the true value", ANCHOR, _alpha(1.5)),
    ("alpha, below the true value", AUDIT, _alpha(0.0)),
    ("the seed, with generated prompts", SAYS, lambda f: f.config({"seed": 1})),
    ("`groups`", AUDIT, lambda f: f.config({"groups": 4})),
    ("`group_size`", AUDIT, lambda f: f.config({"group_size": 8})),
    ("`max_new_tokens`, below the true value", AUDIT, _longest(6)),
    ("`max_new_tokens`, above the true value, with a response that was cut", AUDIT, _longest(16)),
    ("the vocabulary, below the true size", AUDIT, _vocabulary(-200)),
    ("the vocabulary, above the true size", REPLAY, _vocabulary(200)),
    ("a filter that would have removed groups that were trained on", AUDIT, lambda f: _filter(f, 0.6)),
    ("extra groups, which allow no stale discard", AUDIT, lambda f: f.config({"rollout": {"redundant_groups": 2}})),
    (
        "the start of a response: its oldest token",
        ANCHOR,
        lambda f: f.config({"rollout": {"staleness_from": "oldest-token"}}),
    ),
    ("the learning rate", REPLAY, lambda f: f.config({"train": {"learning_rate": 0.5}})),
    ("the temperature", REPLAY, lambda f: f.config({"engine": {"temperature": 0.5}})),
    ("the number of versions to train", ANCHOR, lambda f: f.config({"versions": 13})),
    (
        "a config that does not match its hash",
        AUDIT,
        lambda f: f.creation(lambda body: replace(body, config={**body.config, "seed": 1})),
    ),
    ("an invalid config", (*SAYS, "replay"), lambda f: f.config({"engine": {"kind": "none"}})),
    ("which versions keep their objects", AUDIT, lambda f: f.config({"store": {"keep_last": 12}})),
    ("the run's id", ANCHOR, lambda f: f.creation(lambda body: replace(body, run_id="other"))),
    ("the number of sources", AUDIT, lambda f: f.creation(lambda body: replace(body, sources=3))),
    (
        "the tokens of the probe",
        ANCHOR,
        lambda f: f.creation(lambda body: replace(body, probe_tokens=(7, *body.probe_tokens[1:]))),
    ),
    ("the tokenizer", AUDIT, _tokenizer),
    ("the stop token of the policy", AUDIT, _stop),
    ("the weights that the run began with", ANCHOR, _first_weights),
    (
        "the hashes of user-defined code",
        ANCHOR,
        lambda f: f.creation(lambda body: replace(body, own_code={"own.py": "0" * 64})),
    ),
)


def _filter(f: Forger, mean: float) -> None:
    f.config({"rollout": {"filter": {"min_mean": mean, "max_mean": None, "min_std": None, "max_consecutive": 1000}}})


# --- the log -------------------------------------------------------------------------------------------------------


def _claims(change: Callable[[Claimed], Claimed]) -> Callable[[Forger], None]:
    def changed(entry: Entry) -> Entry:
        return replace(entry, body=change(entry.body)) if isinstance(entry.body, Claimed) else entry

    return lambda f: f.log(lambda entries: [*map(changed, entries)])


def _batch_entry(**change: Any) -> Callable[[Forger], None]:
    return lambda f: f.entry(committed(f.store, B).n, lambda one: replace(one, **change))


def _inserted(body: Callable[[Forger], Any], role: str = "learner") -> Callable[[Forger], None]:
    """Append one more entry by the newest learner."""

    def forge(f: Forger) -> None:
        last = published(f.store, 12)
        f.log(lambda entries: [*entries, replace(entries[-1], role=role, claim=last.claim, body=body(f))])

    return forge


def _cut(f: Forger) -> None:
    f.log(lambda entries: entries[: published(f.store, 12).n])


def _cut_by_one(f: Forger) -> None:
    """Cut off the newest entry, which records pruning."""
    f.log(lambda entries: entries[:-1])


def _stray(f: Forger) -> None:
    f.store.put(entry_path(9_000), f.store.get(entry_path(3)))


def _without(n: Callable[[Forger], int]) -> Callable[[Forger], None]:
    def forge(f: Forger) -> None:
        left_out = n(f)
        f.log(lambda entries: [one for one in entries if one.n != left_out])

    return forge


LOG = (
    ("the claimant of a role", ANCHOR, _claims(lambda body: replace(body, host="elsewhere", process=1))),
    ("the cluster of one claim", AUDIT, _claims(lambda body: replace(body, cluster="other") if body.under else body)),
    ("a claim left out", AUDIT, _without(lambda f: next(e.n for e in read(f.store) if isinstance(e.body, Claimed)))),
    ("an entry under another claim", AUDIT, _batch_entry(claim=1)),
    ("an entry of another role", AUDIT, _batch_entry(role="learner")),
    ("the id of an entry", ANCHOR, _batch_entry(id="other")),
    ("the time of an entry", ANCHOR, _batch_entry(at=1.0)),
    ("the newest version that an entry names", AUDIT, _batch_entry(version=99)),
    ("the next batch that an entry names", AUDIT, _batch_entry(batch=99)),
    ("an entry left out", AUDIT, _without(lambda f: committed(f.store, B).n)),
    ("two entries swapped", AUDIT, lambda f: f.log(_swapped)),
    ("the end of the log cut off, from before a pruning", AUDIT, _cut),
    ("the newest entry cut off", ANCHOR, _cut_by_one),
    ("a stray entry after a long gap", ("audit",), _stray),
    (
        "a void of a batch that was trained on",
        APPENDED,
        _inserted(lambda f: BatchVoided(B, committed(f.store, B).n, "so")),
    ),
    ("a pruning of what is needed", APPENDED, _inserted(lambda f: Pruned(((12, "weights"),)))),
    ("a version published twice", APPENDED, _inserted(lambda f: published(f.store, 12).body)),
    ("a version without a batch", APPENDED, _inserted(lambda f: _made(f))),
)


def _made(f: Forger) -> VersionPublished:
    body = published(f.store, 12).body
    assert isinstance(body, VersionPublished)
    return replace(body, number=13, batch_entry=None)


def _swapped(entries: list[Entry]) -> list[Entry]:
    n = next(one.n for one in entries if isinstance(one.body, VersionPublished) and one.body.number == V)
    return [*entries[: n - 1], entries[n], entries[n - 1], *entries[n + 1 :]]


# --- files beside the log ------------------------------------------------------------------------------------------


def _evaluation(f: Forger) -> None:
    one = {"version": 0, "accuracy": 1.0, "reward": 1.0, "responses": 4, "mean_tokens": 3.0, "pinned": True}
    f.store.put("evaluations/00000000.json", json.dumps(one).encode())


BESIDE = (
    ("an evaluation", NOBODY, _evaluation),
    ("a recovery", NOBODY, lambda f: f.store.put("recoveries/00000000.json", b"{}")),
    ("seconds of a weight update", NOBODY, lambda f: f.store.put("updates/00000003.json", b"{}")),
    ("CPU seconds", NOBODY, lambda f: f.store.put("usage/other.json", b"{}")),
    ("the status", NOBODY, lambda f: f.store.put("status.json", b"{}")),
    ("the summary", NOBODY, lambda f: f.store.put("summary.json", b"{}")),
)


def table() -> str:
    """Return the rows of the table in the documentation."""
    lines, part = [], ""
    for one in all_alterations():
        first = f"**{one.part}**" if one.part != part else ""
        part = one.part
        seen = "yes" if "audit" in one.by else "says so" if "says" in one.by else "no"
        again = "yes" if "replay" in one.by else "" if "audit" in one.by else "no"
        lines.append(f"| {first} | {one.what} | {seen} | {'yes' if 'anchor' in one.by else 'no'} | {again} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
