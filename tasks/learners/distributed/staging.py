"""The ranks of a sharded learner store the files of a version, all at the same time.

    first rank: ask --> gather, on rank r --> next file, for rank r + 1 ....... r's report --> the version's log entry
    rank r:     ....... gather --> put --> report size and sha256

- The files are the same as one rank stores: the same names, the same bytes, for any number of ranks. File n goes to
  rank n modulo ranks. Files with the first rank's random generators stay on the first rank.
- A rank holds `HELD` files at most, and only one if that is larger than `shard_bytes`.
- A log entry names a file only after the rank that stored it has reported its size and sha256.
- A slow store does not count as a hang: a rank that waits for the store reports so again and again. A rank that is
  silent for `train.rank_seconds` is named.
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

HELD = 2  # files that a rank holds at a time: one is gathered while another is stored
TIMES = 4  # reports of a waiting rank within `train.rank_seconds`
POLL_SECONDS = 0.02


class Staging:
    """The first rank's side; several threads may call `put`."""

    def __init__(
        self, ranks: GlooRanks, sizes: Mapping[str, tuple[int, bool]], most: int, gather: Callable[[SendFile], Data]
    ) -> None:
        """Place each file on a rank. `sizes` as `ShardedLearner.sizes`; `most`: bytes that a file should not exceed."""
        self._ranks, self._sizes, self._most, self._gather = ranks, sizes, most, gather
        self._places = {file: n % ranks.count if sizes[file][1] else 0 for n, file in enumerate(sizes)}
        self._rooms = [_FileSlots() for _ in range(ranks.count)]

    @property
    def movers(self) -> int:
        """Number of files that are stored at a time."""
        return HELD * self._ranks.count

    def put(self, file: str, store: ObjectStore, path: str) -> StoredObject:
        """Have a rank store a file, and wait until it has.

        Raises:
            RollflowError: the store raised it on that rank.
            Lost: the rank is silent.
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
            cure = "set store.uri to one that all machines of the run see (s3://, or a folder that they share)"
            raise ConfigError(f"rank {to} stored {stored.path}, and the first rank does not find it there; {cure}")
        return stored

    def _wait_answer(self, to: int, place: Place) -> StoredObject:
        """Wait for the report of rank `to`."""
        store, answer, waits = self._ranks.store, _answer_key(place), _waiting_key(place)
        said, since = b"", time.monotonic()
        while not store.check([answer]):
            self._ranks.check()
            if store.check([waits]) and (now := store.get(waits)) != said:
                said, since = now, time.monotonic()
            if time.monotonic() - since > self._ranks.seconds:
                raise RankLost(f"rank {to} reported nothing about {place.path} for {self._ranks.seconds:g} s", to)
            time.sleep(POLL_SECONDS)
        found = json.loads(store.get(answer))
        for key in (answer, waits):
            store.delete_key(key)
        if "error" in found:
            raise _error_types()[found["error"]](found["says"])
        return StoredObject(place.path, found["size"], found["sha256"])


def stage(ranks: GlooRanks, place: Place, data: Data) -> None:
    """Store a file on a rank other than the first; report size and sha256, or the store's error."""
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
    """The files that a rank may hold: `HELD` files, or one that is large."""

    def __init__(self) -> None:
        self._free, self._door = BoundedSemaphore(HELD), Lock()

    @contextmanager
    def reserve(self, *, alone: bool) -> Iterator[None]:
        """Reserve space for one file during the block."""
        places = HELD if alone else 1
        with self._door:  # one caller takes all its places before another starts
            for _ in range(places):
                self._free.acquire()
        try:
            yield
        finally:
            self._free.release(places)


_numbers = count()


def _answer_key(place: Place) -> str:
    """Return the store key under which a rank reports what it stored."""
    return f"stored/{place.number}"


def _waiting_key(place: Place) -> str:
    """Return the store key under which a rank reports that it waits for the object store."""
    return f"storing/{place.number}"


def _error_types() -> Mapping[str, type[RollflowError]]:
    """Return the errors that a rank can report, by name."""
    found = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    return {name: kind for name, kind in found.items() if issubclass(kind, RollflowError)}
