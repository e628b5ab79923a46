"""Defines the entries of a run's log. Log entries are numbered and immutable, and each entry contains the hash of the
previous entry.

    log/0000000041.json   {"n": 41, "prev": sha256 of entry 40, "id": ..., "role": "scheduler", "claim": 37,
                           "version": 12, "batch": 14, "at": ..., "body": {"kind": "batch-committed", ...}, "seal": ...}

Because of these hashes, an altered, swapped or inserted entry is detected. The member `seal` is a checksum (the sha256
of the other members), which detects damage to the entry itself. Each entry contains the newest policy version and the
number of the next batch, so the log entry of a version can be found by bisection.

An entry is small. Long lists (thousands of groups, hundreds of objects) are stored in an index object,
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
from rollflow.storage.records import DELTA, Discard, GroupKey, PassRate, StoredObject, UnjudgedResponse

Role = Literal["creator", "supervisor", "scheduler", "learner"]

FOLDER, INDEX = "log", "log_index"
LARGEST = 256 * 1024  # largest size of a log entry in bytes; lists of a larger entry move to a separate object


class TrainedGroup(NamedTuple):
    """The log's record of a committed group of trajectories; the trajectories themselves are in the batch file."""

    prompt: int
    attempt: int
    started: int  # the oldest policy version under which a trajectory of the group was started
    newest: int  # the newest policy version that sampled a token of the group
    tokens: int  # the number of tokens that the policy sampled in all trajectories of the group

    @property
    def key(self) -> GroupKey:
        """The key of the dispatch (attempt to answer a prompt) that generated the group."""
        return GroupKey(self.prompt, self.attempt)


@dataclass(frozen=True, slots=True)
class SourceVersion:
    """The policy version of an earlier run with which a run begins. The field `uri` is the address of the earlier run,
    and `entry` is the log entry of the earlier run that published the version. The paths in `weights` are those in the
    earlier run; the new run has copies of these files.
    """

    uri: str
    run_id: str
    version: int
    entry: int
    weights: tuple[StoredObject, ...]


@dataclass(frozen=True, slots=True)
class RunCreated:
    """The body of log entry 0, which creates the run. The field `config` is the run's whole config, and `sources` is
    the number of prompt sources in the config.
    """

    run_id: str
    config: Mapping[str, Any]
    config_sha256: str
    sources: int
    prompts: tuple[Mapping[str, Any], ...] = ()  # one record per prompt source, which identifies the exact prompts
    policy: tuple[StoredObject, ...] = ()  # the files of the initial policy
    # tokens whose log-probs are compared after each weight update, to detect wrong weights
    probe_tokens: tuple[int, ...] = ()
    code_version: str = ""
    format: int = 0  # the format number of the run's records
    own_code: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of the user-defined code of each config section
    # true: the tokens of a prompt contain at most one start token, and no end token at the end
    single_start: bool = False
    models: tuple[StoredObject, ...] = ()  # the files of the reward models
    source_version: SourceVersion | None = None  # the version of an earlier run with which this run begins, if any
    kind: Literal["run-created"] = "run-created"


@dataclass(frozen=True, slots=True)
class Claimed:
    """The body of an entry by which a process takes a role: supervisor, scheduler or learner. The field `under` is the
    number of the entry by which the process's supervisor took its own role; None for a supervisor.
    """

    under: int | None = None
    who: str = ""
    cluster: str = ""
    host: str = ""
    process: int = 0
    kind: Literal["claimed"] = "claimed"


@dataclass(frozen=True, slots=True)
class BatchCommitted:
    """The commit of batch `number`, on which policy version `number` is trained to become policy version `number + 1`.

    The field `issued` lists, in order, the prompts that were sent to the engines for the first time since the
    scheduler's last commit. The field `discards` lists the groups of responses that were discarded since the
    scheduler's last commit. The field `rates` lists the known pass rates of the groups in the batch and of filtered
    groups. The field `unjudged` lists responses that could not be judged, with reasons: the responses that are left out
    of their groups, and one response of each group that was discarded as unjudged.
    """

    number: int
    file: StoredObject
    rows: int  # number of episodes in the batch; an episode with branches counts once
    groups: tuple[TrainedGroup, ...]
    issued: tuple[int, ...]
    discards: tuple[Discard, ...] = ()
    surplus_tokens: int = 0  # number of tokens in surplus responses that were generated and not used
    rates: tuple[PassRate, ...] = ()
    unjudged: tuple[UnjudgedResponse, ...] = ()
    kind: Literal["batch-committed"] = "batch-committed"


@dataclass(frozen=True, slots=True)
class EpochStarted:
    """Starts epoch `number` of a prompt source: each question of the source is asked once, except the questions in
    `skipped`.

    The prompts of the epoch have the positions from `start` to `start + asked - 1` in the prompt source. The field
    `skipped` lists the numbers of the skipped questions in ascending order.
    """

    source: int
    number: int
    start: int
    asked: int
    skipped: tuple[int, ...] = ()
    before: int | None = None  # the log entry that started the previous epoch of the prompt source
    kind: Literal["epoch-started"] = "epoch-started"

    @property
    def end(self) -> int:
        """The position in the prompt source after the epoch's last prompt."""
        return self.start + self.asked


@dataclass(frozen=True, slots=True)
class BatchVoided:
    """Revokes the batch that log entry `entry` committed, because its file is damaged or a value is NaN or infinite.

    After a NaN or an infinity, the batch's prompts are issued again with other seeds, because the same seeds might give
    the same value again.
    """

    number: int
    entry: int
    why: str
    cause: Literal["damaged", "not-finite"] = "damaged"
    kind: Literal["batch-voided"] = "batch-voided"


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """Publishes policy version `number`, which was trained on the batch that log entry `batch_entry` committed (None
    for version 0).

    The field `weights` names the weight files, with their sizes and hashes. A weight file is stored whole at its path,
    or as a delta, which `deltas` lists. The path of a delta is the path of the weight file and ".delta". The delta is
    the difference to the file of the same name of policy version `number - 1`. A log entry without deltas is stored
    without the field `deltas`.
    """

    number: int
    batch_entry: int | None
    weights: tuple[StoredObject, ...]
    state: tuple[StoredObject, ...] = ()
    probe: tuple[float, ...] = ()  # log-probs (nats) of the run's `probe_tokens` under these weights
    metrics: Mapping[str, float] = field(default_factory=dict)
    code_version: str = ""
    deltas: tuple[StoredObject, ...] = ()
    kind: Literal["version-published"] = "version-published"

    @property
    def stored_weights(self) -> tuple[StoredObject, ...]:
        """The stored objects that hold the weights: for each weight file its delta, or the whole file."""
        deltas = {stored.path.removesuffix(DELTA): stored for stored in self.deltas}
        return tuple(deltas.get(stored.path, stored) for stored in self.weights)


@dataclass(frozen=True, slots=True)
class Pruned:
    """Announces that stored objects, listed by policy version and kind, will be deleted because the run does not need
    them."""

    objects: tuple[tuple[int, Kind], ...]
    kind: Literal["pruned"] = "pruned"


class Change(NamedTuple):
    """A changed key of the config (dotted), with the old and the new value; None stands for a missing value."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """Changes the run's config, beginning with `version`, the next policy version to be trained. The field `changes`
    lists the config keys that differ.

    The module `rules` says to which log entries a changed config applies.
    """

    version: int
    config: Mapping[str, Any]  # the whole new config
    config_sha256: str
    changes: tuple[Change, ...]
    who: str = ""  # the user who changed the config, and the machine on which it was changed
    kind: Literal["config-changed"] = "config-changed"


Body = Annotated[
    RunCreated | Claimed | ConfigChanged | EpochStarted | BatchCommitted | BatchVoided | VersionPublished | Pruned,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of one log entry."""

    n: int
    prev: str  # sha256 of the previous log entry; "" for log entry 0
    id: str  # the id of the append, which stays the same if the append is retried
    role: Role
    # number of the log entry by which the writer claimed its role; an entry that claims a role contains its own number
    claim: int
    version: int  # the newest policy version after this log entry; -1 if there is none
    batch: int  # the number of the next batch after this log entry
    at: float  # seconds since the epoch, by the clock of the process that wrote the log entry
    body: Body


@dataclass(frozen=True, slots=True)
class WrittenEntry:
    """A stored log entry, with the hash of the entry's bytes."""

    entry: Entry
    sha256: str


@dataclass(frozen=True, slots=True)
class EncodedEntry:
    """The bytes of a log entry, and the entry's index object, which contains long lists, if there is one."""

    data: bytes
    index: StoredObject | None = None
    index_data: bytes = b""

    @property
    def sha256(self) -> str:
        """The hash of the log entry, which the next log entry contains as `prev`."""
        return hashlib.sha256(self.data).hexdigest()


def entry_path(n: int) -> str:
    """Return the path of log entry `n`."""
    return f"{FOLDER}/{n:010d}.json"


def entry_number(path: str) -> int | None:
    """Return the number of the log entry that is stored at `path`; return None if no log entry has such a path."""
    name = path.removeprefix(f"{FOLDER}/").removesuffix(".json")
    return int(name) if name.isdecimal() and path == entry_path(int(name)) else None


def encode(entry: Entry) -> EncodedEntry:
    """Encode a log entry as bytes; the lists of a large log entry move to a separate index object."""
    tree = _ENTRY.dump_python(entry, mode="json")
    # an empty field is left out, because earlier releases did not write these fields
    for name in ("unjudged", "deltas", "source_version"):
        if not tree["body"].get(name, True):
            del tree["body"][name]
    data = seal_tree(tree)
    if len(data) <= LARGEST:
        return EncodedEntry(data)
    body = tree["body"]
    long = {name: body.pop(name) for name, value in list(body.items()) if isinstance(value, list)}
    index_data = _dumps(long).encode()
    sha256 = hashlib.sha256(index_data).hexdigest()
    index = StoredObject(f"{INDEX}/{sha256}.json", len(index_data), sha256)
    tree["index"] = {"path": index.path, "size": index.size, "sha256": index.sha256}
    return EncodedEntry(seal_tree(tree), index, index_data)


def decode(data: bytes, n: int, read: Callable[[str], bytes]) -> WrittenEntry:
    """Parse `data`, the bytes of log entry `n`; the function `read` loads the entry's index object, if there is one.

    Raises:
        Corrupt: the bytes of the log entry were altered, or this release of rollflow cannot read them.
    """
    name = entry_path(n)
    try:
        tree = open_sealed(data)
        if (index := tree.pop("index", None)) is not None:
            tree["body"] |= _index(index, read)
        entry = _ENTRY.validate_python(tree)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = (
            f"{error.error_count()} fields of the entry are invalid"
            if isinstance(error, ValidationError)
            else str(error)
        )
        raise Corrupt(f"{name} is not an entry of a log: {why}") from error
    if entry.n != n:
        raise Corrupt(f"{name} should contain log entry {n}, but contains entry {entry.n}")
    return WrittenEntry(entry, hashlib.sha256(data).hexdigest())


def _index(index: Mapping[str, Any], read: Callable[[str], bytes]) -> dict[str, Any]:
    try:
        data = read(index["path"])
    except Missing as error:
        raise ValueError(f"the object {index['path']}, which lists the groups of the entry, is missing") from error
    if hashlib.sha256(data).hexdigest() != index["sha256"]:
        raise ValueError(f"the object {index['path']}, which lists the groups of the entry, was altered")
    return dict(_loads(data))


def seal_tree(tree: Mapping[str, Any]) -> bytes:
    """Encode a mapping as JSON, and add the sha256 of the encoded members as the last member."""
    plain = _dumps(tree)
    return f'{plain[:-1]},"seal":"{hashlib.sha256(plain.encode()).hexdigest()}"}}'.encode()


def open_sealed(data: bytes) -> dict[str, Any]:
    """Decode JSON that ends with the sha256 of its members; raise `ValueError` if the JSON was altered."""
    tree = _loads(data)
    if not isinstance(tree, dict) or tree.pop("seal", None) != hashlib.sha256(_dumps(tree).encode()).hexdigest():
        raise ValueError("the object was altered: the checksum that it contains (seal) does not match its content")
    return tree


def _loads(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError as error:  # rollflow writes no entry that is nested this deep
        raise ValueError("the JSON of the object is nested too deeply to be read") from error


def _dumps(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, separators=(",", ":"), allow_nan=False)


_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)
