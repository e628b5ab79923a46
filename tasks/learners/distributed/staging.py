"""Lets all ranks of a sharded learner store the checkpoint files of a policy version at the same time.

    first rank: ask --> gather, on rank r --> next file, for rank r + 1 ....... r's report --> the version's log entry
    rank r:     ....... gather --> put --> report size and sha256

- Rank n modulo the number of ranks stores file n. The first rank stores all files with states of random generators.
- A rank holds at most `HELD` files in memory, or one file that is larger than `shard_bytes`.
- The log entry of a policy version names a file only after the storing rank has reported its size and sha256.
- A rank that waits for a slow object store reports that it waits, so that the wait does not count as a hang. If a rank
  reports nothing for `train.rank_seconds` seconds, `put` raises `RankLost`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import count
from threading import BoundedSemaphore, Lock

from torch.distributed import Store  # type: ignore[attr-defined]

from rollflow.storage import errors
from rollflow.storage.errors import ConfigError, RollflowError
from rollflow.storage.objects.base import Data, ObjectStore
from rollflow.storage.policies import put_object
from rollflow.storage.records import StoredObject
from rollflow.tasks.learners.distributed.gloo_ranks import GlooRanks
from rollflow.tasks.learners.distributed.rank_protocol import Place, SendFile
from rollflow.tasks.learners.distributed.ranks import RankLost

HELD = 2  # number of files in a rank's memory: one file is gathered while another is stored
TIMES = 4  # number of reports that a waiting rank sends in `train.rank_seconds` seconds
POLL_SECONDS = 0.02


class Staging:
    """Assigns the checkpoint files of a policy version to ranks, and waits until the files are stored.

    Only the first rank has a `Staging` object. Several threads may call `put` at the same time.
    """

    def __init__(
        self, ranks: GlooRanks, sizes: Mapping[str, tuple[int, bool]], most: int, gather: Callable[[SendFile], Data]
    ) -> None:
        """Assign each file to a rank.

        `sizes` maps each file to a pair: its size in bytes, and False if only the first rank can store the file. A rank
        that holds a file larger than `most` bytes holds no other file.
        """
        self._ranks, self._sizes, self._most, self._gather = ranks, sizes, most, gather
        self._places = {file: n % ranks.count if sizes[file][1] else 0 for n, file in enumerate(sizes)}
        self._rooms = [_FileSlots() for _ in range(ranks.count)]

    @property
    def movers(self) -> int:
        """Number of files that all ranks together store at the same time."""
        return HELD * self._ranks.count

    def put(self, file: str, store: ObjectStore, path: str) -> StoredObject:
        """Store a file from the rank to which the file is assigned, and wait until the file is stored.

        Raises:
            RollflowError: the object store raised this error on the rank that stores the file.
            RankLost: the rank that stores the file ended, or reported nothing for `train.rank_seconds` seconds.
        """
        to = self._places[file]
        with self._rooms[to].reserve(alone=self._sizes[file][0] > self._most):
            if not to:
                return put_object(store, path, self._gather(SendFile(file)))
            place = Place(store, path, next(_numbers))
            self._gather(SendFile(file, to, place))
            return self._wait_stored(to, place)

    def _wait_stored(self, to: int, place: Place) -> StoredObject:
        stored = self._wait_answer(to, place)
        if not place.store.exists(stored.path):
            cure = "set store.uri to a store that all machines of the run can reach (s3://, or a shared folder)"
            raise ConfigError(f"rank {to} has stored {stored.path}, but the first rank cannot find this object; {cure}")
        return stored

    def _wait_answer(self, to: int, place: Place) -> StoredObject:
        """Wait until rank `to` reports that it stored the file at `place`."""
        store, answer, waits = self._ranks.store, _answer_key(place), _waiting_key(place)
        said, since = b"", time.monotonic()
        while not store.check([answer]):
            self._ranks.check()
            if store.check([waits]) and (now := store.get(waits)) != said:
                said, since = now, time.monotonic()
            if time.monotonic() - since > self._ranks.seconds:
                raise RankLost(
                    f"rank {to} gave no sign of storing {place.path} for {self._ranks.seconds:g} s "
                    "(train.rank_seconds)",
                    to,
                )
            time.sleep(POLL_SECONDS)
        found = json.loads(store.get(answer))
        for key in (answer, waits):
            store.delete_key(key)
        if "error" in found:
            raise _error_types()[found["error"]](found["says"])
        return StoredObject(place.path, found["size"], found["sha256"])


def stage(ranks: GlooRanks, place: Place, data: Data) -> None:
    """Store a file from a rank other than the first, and report its size and SHA-256, or an error, to the first
    rank."""
    store: Store = ranks.store
    with ThreadPoolExecutor(1, "staging") as thread:
        job = thread.submit(put_object, place.store, place.path, data)
        for times in count(1):
            if not wait([job], ranks.seconds / TIMES).not_done:
                break
            store.set(_waiting_key(place), str(times))
    try:
        found = job.result()
        told = {"size": found.size, "sha256": found.sha256}
    except RollflowError as error:
        told = {"error": type(error).__name__, "says": str(error)}
    store.set(_answer_key(place), json.dumps(told))


class _FileSlots:
    """Limits how many gathered files a rank has in memory: `HELD` files of ordinary size, or one large file."""

    def __init__(self) -> None:
        self._free, self._door = BoundedSemaphore(HELD), Lock()

    @contextmanager
    def reserve(self, *, alone: bool) -> Iterator[None]:
        """Reserve a rank's memory for one file during a `with` block. With `alone`, the rank has no other file in
        memory."""
        places = HELD if alone else 1
        with self._door:  # one caller at a time acquires slots, so that two callers cannot deadlock
            for _ in range(places):
                self._free.acquire()
        try:
            yield
        finally:
            self._free.release(places)


_numbers = count()


def _answer_key(place: Place) -> str:
    """Return the key of the TCP store under which a rank reports the file that it stored."""
    return f"stored/{place.number}"


def _waiting_key(place: Place) -> str:
    """Return the key of the TCP store under which a rank reports that it is still waiting for the object store."""
    return f"storing/{place.number}"


def _error_types() -> Mapping[str, type[RollflowError]]:
    """Return the error classes that a rank can report to the first rank, by class name."""
    found = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    return {name: kind for name, kind in found.items() if issubclass(kind, RollflowError)}
