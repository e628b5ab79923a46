"""Models a run's log for tests: the model has all entries so far, and rules that depend only on these entries.

The model shares no code with rollflow, and imports nothing of it. The model reads entries as JSON, remembers forever
whether each dispatch (issue of a prompt) was trained on or discarded, and decides whether an entry may follow. The
model is slow and grows without bound, so it is only for tests.

    take           reads the next entry, and checks its checksum, its previous hash, its index and the rules
    check_file     compares the rows of a batch's file with the entry that committed it
    check_story    checks the invariants of a whole log, in a second formulation

The module `fold_comparison` compares the model with the state that rollflow computes from the log (the fold).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

if TYPE_CHECKING:
    from rollflow.storage.objects import ObjectStore

Json = Mapping[str, Any]
WRITERS = {
    "run-created": {"creator"},
    "claimed": {"supervisor", "scheduler", "learner"},
    "config-changed": {"supervisor"},
    "epoch-started": {"scheduler"},
    "batch-committed": {"scheduler"},
    "batch-voided": {"scheduler", "learner"},
    "version-published": {"learner"},
    "pruned": {"learner", "supervisor"},
}
FORMED = (("groups",), ("group_size",), ("engine", "temperature"), ("engine", "max_new_tokens"))
LEFT_BEHIND = ("stale", "redundant")
AGAIN = ("stale", "redundant", "failed", "unjudged", "corrupt")  # fates after which the prompt is issued again


class GroupKey(NamedTuple):
    """A dispatch: a prompt, and the number of earlier dispatches of the prompt."""

    prompt: int
    attempt: int


class Illegal(Exception):
    """Raised if an entry may not follow."""


def need(holds: bool, why: str) -> None:
    """Raise `Illegal` unless a condition holds. Every rule of this module calls this function."""
    if not holds:
        raise Illegal(why)


def _at(config: Json, key: tuple[str, ...]) -> object:
    """Return the value of a key, and its section."""
    return config.get(key[0], {}).get(key[1]) if len(key) > 1 else config.get(key[0])


@dataclass
class Model:
    """The content of all entries so far."""

    entries: list[Json] = field(default_factory=list)
    hashes: list[str] = field(default_factory=lambda: [""])  # hashes of the entries, after an empty hash
    claims: dict[str, Json] = field(default_factory=dict)  # role -> the entry of its newest claim
    fates: dict[GroupKey, str] = field(default_factory=dict)  # every dispatch in the order of issue -> its fate
    issued: Counter[int] = field(default_factory=Counter)  # source -> number of prompts that were ever issued
    tokens: dict[GroupKey, int] = field(default_factory=dict)  # dispatch with a fate -> its number of tokens
    slow: Counter[int] = field(default_factory=Counter)  # prompt -> number of preempted dispatches
    alive: dict[int, Json] = field(default_factory=dict)  # batch number -> its entry, until it is voided
    formed: int = 0  # the number of different batch numbers that were ever committed
    voids: int = 0
    # (entry of the void, prompt) for each batch that was not finite
    rejected: list[tuple[int, int]] = field(default_factory=list)
    versions: list[Json] = field(default_factory=list)  # entries of published versions
    pruned: list[tuple[int, str]] = field(default_factory=list)

    # --- the run's creation -----------------------------------------------------------------------------------

    @property
    def created(self) -> Json:
        body: Json = self.entries[0]["body"]
        return body

    @property
    def configs(self) -> list[Json]:
        """Return all configs of the run."""
        return [one["body"]["config"] for one in self.entries if "config" in one["body"]]

    @property
    def config(self) -> Json:
        return self.configs[-1]

    @property
    def alpha(self) -> float:
        return float(self.config["async_ratio"])

    @property
    def sources(self) -> int:
        return int(self.created["sources"])

    @property
    def latest(self) -> int:
        """The newest version; -1 if there is none."""
        return len(self.versions) - 1

    # --- derived from all entries -----------------------------------------------------------------------------

    @property
    def open(self) -> list[GroupKey]:
        return [key for key, fate in self.fates.items() if fate == "open"]

    @property
    def waiting(self) -> dict[int, Json]:
        return {number: entry for number, entry in self.alive.items() if number >= self.latest}

    @property
    def holes(self) -> list[int]:
        return [number for number in range(self.formed) if number not in self.alive]

    def epochs(self, source: int) -> list[Json]:
        """Return the entries that started epochs of a source."""
        return [e for e in self.entries if e["body"]["kind"] == "epoch-started" and e["body"]["source"] == source]

    def skips(self, source: int) -> bool:
        """Return whether a source skips solved questions."""
        sections = self.entries[0]["body"]["config"].get("prompts", [])
        return source < len(sections) and bool(sections[source].get("solved_every", 1) > 1)

    def may_issue(self, source: int) -> float:
        """Return the number of prompts of a source that the epochs so far contain."""
        asked = [int(entry["body"]["asked"]) for entry in self.epochs(source)]
        return sum(asked) if self.skips(source) else math.inf

    def filtered(self, source: int) -> int:
        return sum(1 for key, fate in self.fates.items() if fate == "filtered" and key.prompt % self.sources == source)

    def stored(self) -> set[tuple[int, str]]:
        """Return the published objects, by version and kind."""
        kinds = ("weights", "state")
        return {(v, kind) for v, entry in enumerate(self.versions) for kind in kinds if entry["body"][kind]}

    def needed(self, whole: Json | None = None) -> set[tuple[int, str]]:
        """Return the objects that must exist: those of kept versions, of versions under which responses within alpha
        may have started, of versions from which a replay starts, and of versions that the deltas of these versions may
        need.
        """
        whole = whole or self.config
        config = {"keep_last": 5, "keep_every": 10, "state_every": 1, "full_every": 1} | whole.get("store", {})
        latest, full = self.latest, config["full_every"]
        kept = {v for v in range(latest + 1) if v > latest - config["keep_last"] or v % config["keep_every"] == 0}
        kept |= {v for v in range(latest + 1) if v >= latest - math.floor(whole["async_ratio"])}
        every = config["state_every"]
        bases = {max(b for b in range(v) if b % every == 0) for v in kept if v > 0}
        states = bases | {0, latest}
        chains = {v for last in kept | states for v in range(last - last % full, last + 1)}
        return {(v, "weights") for v in chains} | {(v, "state") for v in states}

    def may_be_pruned(self) -> set[tuple[int, str]]:
        """Return the objects that exist but are not needed."""
        return self.stored() - self.needed() - set(self.pruned)

    # --- one more entry ---------------------------------------------------------------------------------------

    def why_not(self, role: str, claim: int, body: Json) -> str:
        """Return why `body` may not follow; "" if it may."""
        try:
            self._check(role, claim, body)
        except Illegal as why:
            return str(why)
        return ""

    def take(self, data: bytes, read: Callable[[str], bytes]) -> None:
        """Read the next entry, as it is stored; raise `Illegal` if it may not follow."""
        tree = json.loads(data)
        plain = json.dumps({name: part for name, part in tree.items() if name != "seal"}, separators=(",", ":"))
        need(tree["seal"] == hashlib.sha256(plain.encode()).hexdigest(), "its seal")
        body = tree["body"]
        if index := tree.get("index"):
            need(hashlib.sha256(lists := read(index["path"])).hexdigest() == index["sha256"], "its index")
            body = body | json.loads(lists)
        tree["body"] = body
        need(tree["n"] == len(self.entries), "its number")
        need(tree["prev"] == self.hashes[-1], "its chain")
        self._check(tree["role"], tree["claim"], body)
        self.entries.append(tree)
        self.hashes.append(hashlib.sha256(data).hexdigest())
        self._keep(tree, body)
        need((tree["version"], tree["batch"]) == (self.latest, self.formed), "what it says of itself")

    def _check(self, role: str, claim: int, body: Json) -> None:
        kind, n = body["kind"], len(self.entries)
        need(role in WRITERS[kind], "a role that does not write this")
        if kind == "run-created":
            need(n == 0 and body["sources"] > 0, "not a creation")
            return
        need(n > 0, "nothing was created")
        if kind == "claimed":
            newest = self.claims.get("supervisor")
            need(claim == n, "claims another entry")
            if role == "supervisor":
                need(body["under"] is None, "a supervisor under another")
            else:
                need(newest is not None and body["under"] == newest["n"], "under an old supervisor")
            return
        need(role in self.claims and claim == self.claims[role]["n"], "deposed")
        {
            "config-changed": self._change,
            "epoch-started": self._start_epoch,
            "batch-committed": self._commit,
            "batch-voided": self._void,
            "version-published": self._publish,
            "pruned": self._prune,
        }[kind](body)

    def _change(self, body: Json) -> None:
        old, new = self.config, body["config"]
        need(body["version"] == len(self.versions) and len(body["changes"]) > 0, "from another version on, or nothing")
        need(new.get("versions", self.latest) >= self.latest, "takes a version back")
        need(all(old.get(key) == new.get(key) for key in ("seed", "prompts", "policy")), "what never changes")
        fixed = {"keep_every": 10, "state_every": 1, "full_every": 1}
        kept = (fixed | config["store"] for config in (old, new))
        need(len({tuple(one[name] for name in fixed) for one in kept}) == 1, "what was kept for good")
        for number, entry in self.waiting.items():
            need(all(_at(old, key) == _at(new, key) for key in FORMED), "a batch waits that was formed otherwise")
            starts = [group[2] for group in entry["body"]["groups"]]
            need(all(number - started <= new["async_ratio"] for started in starts), "a batch waits that gets too old")

    def _start_epoch(self, body: Json) -> None:
        source, skipped = body["source"], body["skipped"]
        need(0 <= source < self.sources and self.skips(source), "a source without epochs")
        earlier = self.epochs(source)
        need(body["number"] == len(earlier), "not the next epoch")
        need(body["before"] == (earlier[-1]["n"] if earlier else None), "names another entry")
        need(body["start"] == self.may_issue(source), "a gap between epochs")
        questions = body["asked"] + len(skipped)
        sizes = {one["body"]["asked"] + len(one["body"]["skipped"]) for one in earlier}
        need(body["asked"] >= 0 and questions > 0 and sizes <= {questions}, "another number of questions")
        need(skipped == sorted(set(skipped)) and set(skipped) <= set(range(questions)), "what it skips")
        need(bool(earlier) or not skipped, "nothing is solved yet")

    def _check_rates(self, body: Json) -> None:
        size, rated = self.config["group_size"], [prompt for prompt, *_ in body["rates"]]
        finished = {group[0] for group in body["groups"]}
        finished |= {key[0] for key, reason, *_ in body["discards"] if reason == "filtered"}
        need(len(rated) == len(set(rated)) and set(rated) <= finished, "a pass rate of another prompt")
        need(all(0 <= correct <= of == size for _, correct, of in body["rates"]), "an impossible pass rate")

    def _commit(self, body: Json) -> None:
        number = body["number"]
        need(number == self.formed or number in self.holes, "not a number to form")
        need(bool(body["groups"]), "no groups")
        need(body["rows"] == len(body["groups"]) * self.config["group_size"], "rows")
        self._check_rates({"rates": [], **body})
        trial = Model(self.entries, fates=dict(self.fates), issued=Counter(self.issued))
        trial.settle(body, "batch")
        for *_, started, newest, _ in body["groups"]:
            need(number - started <= self.alpha, "stale")
            need(0 <= started <= newest <= self.latest, "versions of the future")

    def settle(self, body: Json, fate: str) -> None:
        """Yield the fate (trained on, or discarded with a reason) of each dispatch in a commit, one after another."""
        for prompt in body["issued"]:
            place, source = divmod(prompt, self.sources)
            need(prompt >= 0 and place == self.issued[source], "out of its source's order")
            need(place < self.may_issue(source), "beyond the epochs of its source")
            self.issued[source] += 1
            self.fates[GroupKey(prompt, 0)] = "open"
        for key, reason, _, tokens in body["discards"]:
            self._end(GroupKey(*key), reason, tokens)
        for prompt, attempt, *_, tokens in body["groups"]:
            self._end(GroupKey(prompt, attempt), fate, tokens)

    def _end(self, key: GroupKey, fate: str, tokens: int) -> None:
        need(self.fates.get(key) == "open", f"{key} is not open")
        self.fates[key], self.tokens[key] = fate, tokens
        if fate in LEFT_BEHIND and tokens > 0:
            self.slow[key.prompt] += 1
        if fate not in ("filtered", "batch"):
            self._again(key)

    def _again(self, key: GroupKey) -> None:
        following = GroupKey(key.prompt, key.attempt + 1)
        need(following not in self.fates, f"{following} twice")
        self.fates[following] = "open"

    def _void(self, body: Json) -> None:
        there = self.waiting.get(body["number"])
        need(there is not None and there["n"] == body["entry"], "does not wait")

    def _publish(self, body: Json) -> None:
        number = body["number"]
        need(number == self.latest + 1 and bool(body["weights"]), "not the next version, or nothing")
        there = self.alive.get(number - 1)
        need((there["n"] if there is not None else None) == body["batch_entry"], "not of its batch")
        need(number == 0 or there is not None, "of no batch")
        every = self.config.get("store", {}).get("state_every", 1)
        need(number % every > 0 or bool(body["state"]), "no state where one is stored")

    def _prune(self, body: Json) -> None:
        objects = [(version, kind) for version, kind in body["objects"]]
        need(len(objects) == len(set(objects)), "twice in one")
        need(set(objects) <= self.may_be_pruned(), "needed, or not there")

    def _keep(self, entry: Json, body: Json) -> None:
        match body["kind"]:
            case "claimed":
                self.claims[entry["role"]] = entry
            case "config-changed":
                self.claims = {role: claim for role, claim in self.claims.items() if role == "supervisor"}
            case "batch-committed":
                self.settle(body, "batch")
                self.alive[body["number"]] = entry
                self.formed = max(self.formed, body["number"] + 1)
            case "batch-voided":
                self.voids += 1
                for prompt, attempt, *_ in self.alive.pop(body["number"])["body"]["groups"]:
                    self.fates[GroupKey(prompt, attempt)] = "corrupt"
                    self._again(GroupKey(prompt, attempt))
                    if body["cause"] == "not-finite":
                        self.rejected.append((entry["n"], prompt))
            case "version-published":
                self.versions.append(entry)
                for prompt, attempt, *_ in self.trained_on(self.latest):
                    self.fates[GroupKey(prompt, attempt)] = "trained"
            case "pruned":
                self.pruned += [(version, kind) for version, kind in body["objects"]]

    def trained_on(self, version: int) -> list[list[int]]:
        """Return the groups of a version's batch."""
        groups: list[list[int]] = self.alive[version - 1]["body"]["groups"] if version else []
        return groups

    def check_file(self, number: int, read: Callable[[str], bytes]) -> None:
        """Check a batch's file: its hash and, if it is an Arrow file, that its rows are those of the entry's groups."""
        body, n = self.alive[number]["body"], self.alive[number]["n"]
        data = read(body["file"]["path"])
        need(hashlib.sha256(data).hexdigest() == body["file"]["sha256"], "not the file that was committed")
        if not data.startswith(b"ARROW1"):
            return
        rows = pa.ipc.open_file(data).read_all().to_pylist()
        config = [entry["body"]["config"] for entry in self.entries[:n] if "config" in entry["body"]][-1]
        keys = [tuple(group[:2]) for group in body["groups"] for _ in range(config["group_size"])]
        need([(row["index"], row["attempt"]) for row in rows] == keys, "its rows are not those of its groups")
        need(all(number - row["started_version"] <= config["async_ratio"] for row in rows), "a row is stale")

    def check_end(self, versions: int, groups: int, open_: Collection[tuple[int, int]]) -> None:
        """Check a run that has ended: its versions, each trained on a batch of `groups` groups, and the dispatches that
        were neither trained on nor discarded.
        """
        self.check_story()
        assert self.latest == versions
        batches = [self.trained_on(version) for version in range(1, versions + 1)]
        assert [len(batch) for batch in batches] == [groups] * versions
        prompts = [prompt for batch in batches for prompt, *_ in batch]
        assert len(set(prompts)) == len(prompts), "a prompt is trained on twice"
        waiting = {key for key, fate in self.fates.items() if fate == "open"}
        assert len(set(open_)) == len(open_), "held twice"
        assert set(open_) == waiting, "lost, or made up"

    def left_behind(self, prompts: list[int]) -> dict[int, int]:
        return {prompt: self.slow[prompt] for prompt in prompts if self.slow[prompt]}

    def to_draw_anew(self) -> dict[int, int]:
        """Map each prompt that must still be trained on to the number of its batches that were not finite."""
        wanted = {key.prompt for key, fate in self.fates.items() if fate in ("open", "batch")}
        return dict(Counter(prompt for _, prompt in self.rejected if prompt in wanted))

    # --- the whole log -----------------------------------------------------------------------------------------

    def check_story(self) -> None:
        """Check the invariants of a whole log, in a second and simpler formulation."""
        histories = defaultdict[int, list[tuple[int, str]]](list)  # prompt -> its attempts and their fates, in order
        for key, fate in sorted(self.fates.items()):
            histories[key.prompt].append((key.attempt, fate))
        for history in histories.values():
            assert [attempt for attempt, _ in history] == list(range(len(history)))
            fates = [fate for _, fate in history]
            assert all(fate in AGAIN for fate in fates[:-1])
            assert fates[-1] in ("open", "batch", "trained", "filtered")
        for source in range(self.sources):
            places = [
                k.prompt // self.sources for k in self.fates if k.attempt == 0 and k.prompt % self.sources == source
            ]
            assert places == list(range(len(places)))
        for number in range(self.latest):
            assert self.versions[number + 1]["body"]["batch_entry"] == self.alive[number]["n"]
        assert len(self.pruned) == len(set(self.pruned))
        always = set.intersection(*map(self.needed, self.configs))
        assert not always & self.stored() & set(self.pruned)
        assert len({entry["id"] for entry in self.entries}) == len(self.entries)


def read_log(store: ObjectStore) -> Model:
    """Read the log of a store."""
    model = Model()
    for path in store.list("log"):
        model.take(store.get(path), store.get)
    return model


def read_run(run: Path) -> Model:
    """Read the log and the batch files of the run in a folder; raise `Illegal` with the number of a wrong entry."""
    model = Model()

    def read(path: str) -> bytes:
        return (run / path).read_bytes()

    for n, path in enumerate(sorted((run / "log").iterdir())):
        try:
            need(path.name == f"{n:010d}.json", "its name")
            model.take(path.read_bytes(), read)
        except Illegal as why:
            raise Illegal(f"{n}: {why}") from None
    for number in model.alive:
        try:
            model.check_file(number, read)
        except Illegal as why:
            raise Illegal(f"batch {number}: {why}") from None
    model.check_story()
    return model
