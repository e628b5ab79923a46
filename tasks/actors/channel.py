"""The channel in a Ray actor. Each run has one such actor, which owns the batches in the channel.

A batch is sent as an Arrow buffer or as the name of a local file. A learner that receives the name of a local file
memory-maps the file. A learner on a machine without the batch's file asks the channel for the bytes. The channel's
actor itself puts each buffer into Ray's object store, because Ray loses an object when the process that put it ends.
The channel's actor returns an object reference, so that the learner reads the buffer from shared memory without a copy.

A client repeats a call that finds the channel's actor dead, on the new actor of the same name. Repeating a call to the
channel neither loses nor duplicates a batch. A restarted channel reads missing batches from storage.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import ray

from rollflow.storage.channel import Channel
from rollflow.storage.errors import Missing, Unreachable
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.actors.lease import Lease

CHANNEL = "channel"
GRACE_SECONDS = 30.0  # seconds that a call waits, after its own deadline, for a restarted channel
AGAIN_SECONDS = 0.2  # seconds before a call to a dead actor is repeated


class StoredBatches:
    """Implements the channel's `Source` from the run's log; the calling process owns the returned Arrow buffers."""

    def __init__(self, run: ObjectStore) -> None:
        """Prepare without reading storage, so that the actor starts even while storage does not answer."""
        self._run = run
        self._is_local = run.local_path("log") is not None

    @cached_property
    def _store(self) -> TrajectoryStore:
        return TrajectoryStore(Log(self._run))

    async def entry(self, number: int) -> int | None:
        """Find the batch's log entry; implements `Source.entry`.

        A log in a local folder is read without a thread, because the lookup is quicker than starting a thread.
        """
        if self._is_local:
            return self._entry(number)
        return await asyncio.to_thread(self._entry, number)

    def _entry(self, number: int) -> int | None:
        waiting = self._store.find_waiting(number)
        return None if waiting is None else waiting.entry

    async def read(self, number: int) -> Any:
        """Read the batch; implements `Source.read`."""
        return ray.put(await asyncio.to_thread(self._read, number))

    def _read(self, number: int) -> pa.Buffer:
        waiting = self._store.find_waiting(number)
        if waiting is None:
            raise Missing(f"batch {number} no longer waits to be trained on")
        return self._store.read(waiting.file)


class ChannelActor:
    """Serves a `Channel` of batches, each a file name or a reference to an Arrow buffer that this actor owns."""

    def __init__(self, run: ObjectStore, capacity: int, version: int, lease: Lease | None = None) -> None:
        if lease:
            lease.hold(CHANNEL)
        self.channel: Channel[Any] = Channel(capacity, StoredBatches(run), version)

    async def ping(self, seconds: float) -> None:
        """Answer after `seconds`; Ray raises an error at the waiting caller if the actor dies."""
        await asyncio.sleep(seconds)

    async def put(self, number: int, payload: pa.Buffer | str, deadline: float, entry: int) -> None:
        """Put a batch into the channel, as `Channel.put` does; `payload` is a buffer or a file name.

        The channel does not check a batch, because the learner compares each batch with its commit.
        """
        held = payload if isinstance(payload, str) else ray.put(payload)
        await self.channel.put(number, held, deadline, entry)

    async def lease(self, number: int, deadline: float, *, afresh: bool) -> str | list[Any]:
        """Lease a batch, as `Channel.lease` does; return a file name, or an object reference in a list.

        The object reference is in a list, because Ray would replace a bare reference by its object.
        """
        held = await self.channel.lease(number, deadline, afresh=afresh)
        return held if isinstance(held, str) else [held]

    async def finish(self, number: int, version: int) -> None:
        """Acknowledge batch `number` and announce the policy version that was trained on it."""
        await self.channel.ack(number)
        await self.channel.announce(version)

    async def announce(self, version: int) -> None:
        """Announce a policy version, as `Channel.announce` does."""
        await self.channel.announce(version)

    async def wait_version(self, after: int, deadline: float) -> int:
        """Wait for a version, as `Channel.wait_version` does."""
        return await self.channel.wait_version(after, deadline)

    async def count_waiting(self) -> int:
        """Return the number of batches that the learner has not acknowledged."""
        return self.channel.waiting


def start_channel(
    run: ObjectStore,
    capacity: int,
    version: int,
    lease: Lease | None = None,
    placed: Mapping[str, Any] | None = None,
) -> RayChannel:
    """Start the run's channel actor in the current Ray namespace, or find the running one.

    Args:
        version: the newest published version.
        placed: Ray's options for the actor, from `placement.actor_options`.
    """
    options = {"name": CHANNEL, "lifetime": "detached", "get_if_exists": True, "max_concurrency": 64}
    options |= placed or {"num_cpus": 0}
    return RayChannel(ray.remote(ChannelActor).options(**options).remote(run, capacity, version, lease))


class RayChannel:
    """A client of the channel; if the channel's actor is dead, a call waits until its time limit for the new actor."""

    def __init__(self, actor: Any = None) -> None:
        self._actor = actor

    async def put(self, number: int, payload: object, deadline: float, entry: int = 0) -> None:
        """Put a batch into the channel, as `Channel.put` does; of a `Path`, only the file's name is sent."""
        sent = str(payload) if isinstance(payload, Path) else payload  # Ray passes strings without pickling
        await self._wait(lambda a, left: a.put.remote(number, sent, left, entry), deadline, f"take batch {number}")

    async def wait_version(self, after: int, deadline: float) -> int:
        """Wait for a version, as `Channel.wait_version` does."""
        return int(await self._wait(lambda a, left: a.wait_version.remote(after, left), deadline, "tell the version"))

    async def count_waiting(self) -> int:
        """Return the number of batches that the learner has not acknowledged."""
        return int(await self._wait(lambda a, _: a.count_waiting.remote(), 0, "count its batches"))

    def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
        """Lease a batch, as `Channel.lease` does; the call blocks its thread until the batch arrives.

        The returned buffer is a view of shared memory.
        """
        patience = _CallDeadline(deadline, f"lease batch {number}")
        while True:
            with patience.translate_errors():
                while isinstance(leased := self._lease(number, patience, afresh=afresh), str):
                    afresh = True  # request the bytes, because the file is not on this machine
                return leased
            self._actor, afresh = None, True  # the actor may have lost its copy of the batch
            time.sleep(AGAIN_SECONDS)

    def _lease(self, number: int, patience: _CallDeadline, *, afresh: bool) -> pa.Buffer | str:
        """Return the bytes of a batch, or the name of the batch's file if this machine cannot memory-map the file."""
        held = ray.get(self.actor.lease.remote(number, patience.own, afresh=afresh), timeout=patience.left)
        if isinstance(held, str):
            try:
                return pa.memory_map(held).read_buffer()
            except OSError:
                return held
        return ray.get(held[0], timeout=patience.left)

    def finish(self, number: int, version: int) -> None:
        """Acknowledge batch `number` and announce the version trained on it; the call blocks its thread."""
        self._get(lambda a: a.finish.remote(number, version), f"acknowledge batch {number}")

    def announce(self, version: int) -> None:
        """Announce a policy version, as `Channel.announce` does; the call blocks its thread."""
        self._get(lambda a: a.announce.remote(version), f"announce version {version}")

    @property
    def actor(self) -> Any:
        """The actor that currently has the channel's name."""
        actor = self._actor  # another thread may set `self._actor` to None
        if actor is None:
            try:
                actor = self._actor = ray.get_actor(CHANNEL)
            except ValueError as error:
                raise _ChannelAway(str(error)) from error
        return actor

    async def _wait(self, call: Callable[[Any, float], Any], deadline: float, what: str) -> Any:
        patience = _CallDeadline(deadline, what)
        while True:
            with patience.translate_errors():
                async with asyncio.timeout(patience.left):
                    return await call(self.actor, patience.own)
            self._actor = None
            await asyncio.sleep(AGAIN_SECONDS)

    def _get(self, call: Callable[[Any], Any], what: str) -> None:
        patience = _CallDeadline(0, what)
        while True:
            with patience.translate_errors():
                ray.get(call(self.actor), timeout=patience.left)
                return
            self._actor = None
            time.sleep(AGAIN_SECONDS)


class _ChannelAway(Exception):
    """Raised if no actor currently has the channel's name."""


LOST = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, _ChannelAway)


class _CallDeadline:
    """The time limit of one call: the call's own deadline plus a grace period for a restart of the channel's actor."""

    def __init__(self, deadline: float, what: str) -> None:
        self._deadline, self._what = deadline, what
        self._until = time.monotonic() + deadline + GRACE_SECONDS

    @property
    def left(self) -> float:
        """Seconds until the call fails."""
        return max(0.0, self._until - time.monotonic())

    @property
    def own(self) -> float:
        """Number of seconds that the channel's actor itself may wait."""
        return min(self._deadline, self.left)

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translate Ray's errors; ignore the loss of the actor or of a batch until the call's time limit."""
        waited = self._deadline + GRACE_SECONDS
        try:
            yield
        except ray.exceptions.RayTaskError as error:  # includes a `TimeoutError` that the channel itself raised
            raise _unwrap(error) from None
        except (ray.exceptions.GetTimeoutError, TimeoutError) as error:
            raise Unreachable(f"the channel actor did not {self._what} within {waited:g} s") from error
        except LOST as error:
            if not self.left:
                raise Unreachable(f"no channel actor existed to {self._what} within {waited:g} s: {error}") from error


def _unwrap(error: ray.exceptions.RayTaskError) -> Exception:
    """Return the exception that the actor raised, without Ray's wrapper."""
    cause = error.cause
    return cause if isinstance(cause, Exception) else error


class BatchFeed(Protocol):
    """The part of the channel that the learner uses; see `RayChannel`."""

    def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer: ...

    def finish(self, number: int, version: int) -> None: ...

    def announce(self, version: int) -> None: ...
