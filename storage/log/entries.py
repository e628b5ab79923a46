"""The entries of a run's log: numbered, frozen, hashed facts, which decide what the run is.

    log/0000000041.json   {"n": 41, "prev": sha256 of entry 40, "id": ..., "role": "scheduler", "claim": 37,
                           "version": 12, "batch": 14, "at": ..., "body": {"kind": "batch-committed", ...}, "seal": ...}

Each entry names the hash of the one before, so that none can be altered, swapped or inserted unseen. Its seal shows
damage to the entry itself. It carries the newest version and the number of the next batch, so that a version is found
by bisection.

An entry is small. Long lists (thousands of groups, hundreds of objects) stand in an index object,
`log_index/<sha256>.json`, which is written before the entry that names it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.log.retention import Kind
from rollflow.storage.records import Discard, GroupKey, StoredObject

Role = Literal["creator", "supervisor", "scheduler", "learner"]

FOLDER, INDEX = "log", "log_index"
LARGEST = 256 * 1024  # bytes of an entry; lists of a longer one go into its index object


class Group(NamedTuple):
    """What the log knows of a trained group; its samples are in the batch file."""

    prompt: int
    attempt: int
    started: int  # the oldest version any of its samples was started under
    newest: int  # the newest version any of its tokens came from
    tokens: int  # that the policy chose, over all samples

    @property
    def key(self) -> GroupKey:
        """The dispatch it was."""
        return GroupKey(self.prompt, self.attempt)


@dataclass(frozen=True, slots=True)
class RunCreated:
    """Entry 0. `config` is the whole config; `sources` is how many prompt sources it has."""

    run_id: str
    config: Mapping[str, Any]
    config_sha256: str
    sources: int
    prompts: tuple[Mapping[str, Any], ...] = ()  # pins: what the prompts were, by source
    policy: tuple[StoredObject, ...] = ()  # the policy folder that the run began with
    probe_tokens: tuple[int, ...] = ()  # the fixed tokens of the weight-update probe
    code_version: str = ""
    format: int = 0  # of the run's records
    own_code: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of the files of a person's own parts
    single_start: bool = False  # prompts have at most one start token, and no end token at their end
    kind: Literal["run-created"] = "run-created"


@dataclass(frozen=True, slots=True)
class Claimed:
    """A role's first entry. `under` is the supervisor's claim that the role was started by; a supervisor has none."""

    under: int | None = None
    who: str = ""
    cluster: str = ""
    host: str = ""
    process: int = 0
    kind: Literal["claimed"] = "claimed"


@dataclass(frozen=True, slots=True)
class BatchCommitted:
    """Batch `number` is there: the batch that trains version `number` into `number + 1`.

    `issued` are the prompts that were dispatched for the first time since the scheduler's last commit, in their order;
    `discards` what was given up since then.
    """

    number: int
    file: StoredObject
    rows: int
    groups: tuple[Group, ...]
    issued: tuple[int, ...]
    discards: tuple[Discard, ...] = ()
    surplus_tokens: int = 0  # of responses that were started beyond what the groups needed
    kind: Literal["batch-committed"] = "batch-committed"


@dataclass(frozen=True, slots=True)
class BatchVoided:
    """The batch of entry `entry` is not to be used: its file is not what was committed, or what it holds is not finite.

    The prompts of the latter are issued again with other seeds: the same ones might give the same again.
    """

    number: int
    entry: int
    why: str
    cause: Literal["damaged", "not-finite"] = "damaged"
    kind: Literal["batch-voided"] = "batch-voided"


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """Policy `number` exists; `batch_entry` is the entry of the batch it was trained on (None for version 0)."""

    number: int
    batch_entry: int | None
    weights: tuple[StoredObject, ...]
    state: tuple[StoredObject, ...] = ()
    probe: tuple[float, ...] = ()  # log-probs (nats) of the run's probe tokens under these weights
    metrics: Mapping[str, float] = field(default_factory=dict)
    code_version: str = ""
    kind: Literal["version-published"] = "version-published"


@dataclass(frozen=True, slots=True)
class Pruned:
    """Objects of these versions, by kind, are going to be deleted: nothing needs them any more."""

    objects: tuple[tuple[int, Kind], ...]
    kind: Literal["pruned"] = "pruned"


class Change(NamedTuple):
    """One key of a config, dotted, with its old and its new value; None stands for a missing value."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """The `config` of the run from version `version` on, which is the next one. `changes` are the keys that differ.

    `rules` says for which entries it holds.
    """

    version: int
    config: Mapping[str, Any]  # the whole config, not only what changed
    config_sha256: str
    changes: tuple[Change, ...]
    who: str = ""  # the person and machine that changed it
    kind: Literal["config-changed"] = "config-changed"


Body = Annotated[
    RunCreated | Claimed | ConfigChanged | BatchCommitted | BatchVoided | VersionPublished | Pruned,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, as it is to be written."""

    n: int
    prev: str  # sha256 of entry n - 1; "" for entry 0
    id: str  # of the append, the same through all its tries
    role: Role
    claim: int  # the entry by which the role was claimed; a claim names itself
    version: int  # the newest after this entry; -1: none
    batch: int  # the number of the next batch after this entry
    at: float  # seconds since the epoch, by its writer's clock
    body: Body


@dataclass(frozen=True, slots=True)
class Written:
    """An entry as it stands in the log, with the hash of its bytes."""

    entry: Entry
    sha256: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """An entry's bytes, and its index object's where it needs one."""

    data: bytes
    index: StoredObject | None = None
    index_data: bytes = b""

    @property
    def sha256(self) -> str:
        """What the next entry names as `prev`."""
        return hashlib.sha256(self.data).hexdigest()


def entry_path(n: int) -> str:
    """Where entry `n` lies."""
    return f"{FOLDER}/{n:010d}.json"


def entry_number(path: str) -> int | None:
    """The number of the entry that lies at `path`; None if it is no entry's name."""
    name = path.removeprefix(f"{FOLDER}/").removesuffix(".json")
    return int(name) if name.isdecimal() and path == entry_path(int(name)) else None


def encode(entry: Entry) -> Encoded:
    """The bytes of an entry."""
    tree = _ENTRY.dump_python(entry, mode="json")
    data = sealed(tree)
    if len(data) <= LARGEST:
        return Encoded(data)
    body = tree["body"]
    long = {name: body.pop(name) for name, value in list(body.items()) if isinstance(value, list)}
    index_data = _dumps(long).encode()
    sha256 = hashlib.sha256(index_data).hexdigest()
    index = StoredObject(f"{INDEX}/{sha256}.json", len(index_data), sha256)
    tree["index"] = {"path": index.path, "size": index.size, "sha256": index.sha256}
    return Encoded(sealed(tree), index, index_data)


def decode(data: bytes, n: int, read: Callable[[str], bytes]) -> Written:
    """Parse entry `n`; `read` gives the bytes of its index object.

    Raises:
        Corrupt: it is not what was written, or not one that this version reads.
    """
    name = entry_path(n)
    try:
        tree = opened(data)
        if (index := tree.pop("index", None)) is not None:
            tree["body"] |= _index(index, read)
        entry = _ENTRY.validate_python(tree)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{error.error_count()} fields are wrong" if isinstance(error, ValidationError) else str(error)
        raise Corrupt(f"{name} is not an entry of a log: {why}") from error
    if entry.n != n:
        raise Corrupt(f"{name} is entry {entry.n}, under another name")
    return Written(entry, hashlib.sha256(data).hexdigest())


def _index(index: Mapping[str, Any], read: Callable[[str], bytes]) -> dict[str, Any]:
    try:
        data = read(index["path"])
    except Missing as error:
        raise ValueError(f"its index {index['path']} is missing") from error
    if hashlib.sha256(data).hexdigest() != index["sha256"]:
        raise ValueError(f"its index {index['path']} was altered")
    return dict(_loads(data))


def sealed(tree: Mapping[str, Any]) -> bytes:
    """JSON that shows whether it was altered: its last member is the sha256 of the others."""
    plain = _dumps(tree)
    return f'{plain[:-1]},"seal":"{hashlib.sha256(plain.encode()).hexdigest()}"}}'.encode()


def opened(data: bytes) -> dict[str, Any]:
    """What was sealed; ValueError if it was altered."""
    tree = _loads(data)
    if not isinstance(tree, dict) or tree.pop("seal", None) != hashlib.sha256(_dumps(tree).encode()).hexdigest():
        raise ValueError("it was altered")
    return tree


def _loads(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError as error:  # of bytes that nobody wrote as an entry
        raise ValueError("it is nested too deep") from error


def _dumps(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, separators=(",", ":"), allow_nan=False)


_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)
