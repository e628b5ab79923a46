"""Sends batches from the rollout stage to the learner through a Ray actor, the channel.

A batch is sent as the name of a local file or, to another machine, as an Arrow buffer in Ray's object store.

A call to a dead channel actor is repeated on the new actor, so that no batch is lost or duplicated. The new actor reads
from storage the batches that the dead actor held.
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
GRACE_SECONDS = 30.0  # seconds that a call waits for a restarted channel actor, after the call's own deadline
AGAIN_SECONDS = 0.2  # seconds before a call that found the channel's actor dead is repeated


class StoredBatches:
    """Reads a run's batches from storage for the channel.

    The calling process owns the returned Arrow buffers.
    """

    def __init__(self, run: ObjectStore) -> None:
        """Create the object without reading storage, so that the actor starts even if storage does not answer."""
        self._run = run
        self._is_local = run.local_path("log") is not None

    @cached_property
    def _store(self) -> TrajectoryStore:
        return TrajectoryStore(Log(self._run))

    async def entry(self, number: int) -> int | None:
        """Find the log entry of a batch; implements `Source.entry`.

        A log in a local folder is read without a thread, because the read is faster than starting a thread.
        """
        if self._is_local:
            return self._entry(number)
        return await asyncio.to_thread(self._entry, number)

    def _entry(self, number: int) -> int | None:
        waiting = self._store.find_waiting(number)
        return None if waiting is None else waiting.entry

    async def read(self, number: int) -> Any:
        """Read a batch from storage; implements `Source.read`."""
        return ray.put(await asyncio.to_thread(self._read, number))

    def _read(self, number: int) -> pa.Buffer:
        waiting = self._store.find_waiting(number)
        if waiting is None:
            raise Missing(
                f"batch {number} does not wait to be trained on any more; a version was trained on it, or it was "
                "removed"
            )
        return self._store.read(waiting.file)


class ChannelActor:
    """Ray actor that serves a `Channel` of batches, each a file name or a reference to an Arrow buffer."""

    def __init__(self, run: ObjectStore, capacity: int, version: int, lease: Lease | None = None) -> None:
        if lease:
            lease.hold(CHANNEL)
        self.channel: Channel[Any] = Channel(capacity, StoredBatches(run), version)

    async def ping(self, seconds: float) -> None:
        """Return after `seconds`; a caller that waits for the answer gets an error if the actor dies."""
        await asyncio.sleep(seconds)

    async def put(self, number: int, payload: pa.Buffer | str, deadline: float, entry: int) -> None:
        """Put a batch into the channel, as an Arrow buffer or as the name of a file.

        The channel does not verify the batch, because the learner verifies each batch.
        """
        held = payload if isinstance(payload, str) else ray.put(payload)
        await self.channel.put(number, held, deadline, entry)

    async def lease(self, number: int, deadline: float, *, afresh: bool) -> str | list[Any]:
        """Lease a batch to the learner; return a file name, or a list with one object reference.

        The object reference is in a list, because Ray would replace a bare reference by the object.
        """
        held = await self.channel.lease(number, deadline, afresh=afresh)
        return held if isinstance(held, str) else [held]

    async def finish(self, number: int, version: int) -> None:
        """Acknowledge batch `number`, and announce the policy version that was trained on it."""
        await self.channel.ack(number)
        await self.channel.announce(version)

    async def announce(self, version: int) -> None:
        """Announce to all clients that a policy version is published."""
        await self.channel.announce(version)

    async def wait_version(self, after: int, deadline: float) -> int:
        """Wait until a policy version newer than `after` is announced, and return the newest version."""
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
    """Start the run's channel actor in the current Ray namespace, or find the actor if it is running.

    Args:
        version: this is the newest published policy version.
        placed: these are Ray's options for the actor, from `placement.actor_options`.
    """
    options = {"name": CHANNEL, "lifetime": "detached", "get_if_exists": True, "max_concurrency": 64}
    options |= placed or {"num_cpus": 0}
    return RayChannel(ray.remote(ChannelActor).options(**options).remote(run, capacity, version, lease))


class RayChannel:
    """Client of the channel's actor.

    A call waits, up to its time limit, while the channel's actor is being restarted.
    """

    def __init__(self, actor: Any = None) -> None:
        self._actor = actor

    async def put(self, number: int, payload: object, deadline: float, entry: int = 0) -> None:
        """Put a batch into the channel; if `payload` is a `Path`, only the path is sent."""
        sent = str(payload) if isinstance(payload, Path) else payload  # Ray passes a string without pickling it
        await self._wait(lambda a, left: a.put.remote(number, sent, left, entry), deadline, f"take batch {number}")

    async def wait_version(self, after: int, deadline: float) -> int:
        """Wait until a policy version newer than `after` is announced, and return the newest version."""
        return int(await self._wait(lambda a, left: a.wait_version.remote(after, left), deadline, "tell the version"))

    async def count_waiting(self) -> int:
        """Return the number of batches that the learner has not acknowledged."""
        return int(await self._wait(lambda a, _: a.count_waiting.remote(), 0, "count its batches"))

    def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
        """Lease a batch to the learner; the call blocks the calling thread until the batch arrives.

        The returned buffer is a view of shared memory.
        """
        patience = _CallDeadline(deadline, f"lease batch {number}")
        while True:
            with patience.translate_errors():
                while isinstance(leased := self._lease(number, patience, afresh=afresh), str):
                    afresh = True  # request the bytes of the batch, because its file is not on this machine
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
        """Acknowledge batch `number`, and announce the policy version trained on it; the call blocks the calling
        thread.
        """
        self._get(lambda a: a.finish.remote(number, version), f"acknowledge batch {number}")

    def announce(self, version: int) -> None:
        """Announce to all clients that a policy version is published; the call blocks the calling thread."""
        self._get(lambda a: a.announce.remote(version), f"announce version {version}")

    @property
    def actor(self) -> Any:
        """The Ray actor that is currently registered under the channel's name."""
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
    """Raised if no Ray actor is currently registered under the channel's name."""


LOST = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, _ChannelAway)


class _CallDeadline:
    """Time limit of one call to the channel's actor: the call's own deadline, plus time to restart the actor."""

    def __init__(self, deadline: float, what: str) -> None:
        self._deadline, self._what = deadline, what
        self._until = time.monotonic() + deadline + GRACE_SECONDS

    @property
    def left(self) -> float:
        """Seconds until the call fails."""
        return max(0.0, self._until - time.monotonic())

    @property
    def own(self) -> float:
        """Number of seconds that the channel's actor may wait before it answers the call."""
        return min(self._deadline, self.left)

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translate Ray's errors into rollflow's errors.

        The loss of the actor or of a batch is ignored until the call's time limit.
        """
        waited = self._deadline + GRACE_SECONDS
        try:
            yield
        # This error may be a `TimeoutError` that the channel itself raised.
        except ray.exceptions.RayTaskError as error:
            raise _unwrap(error) from None
        except (ray.exceptions.GetTimeoutError, TimeoutError) as error:
            raise Unreachable(f"the channel actor did not {self._what} within {waited:g} s") from error
        except LOST as error:
            if not self.left:
                raise Unreachable(
                    f"no channel actor was running that could {self._what} within {waited:g} s: {error}"
                ) from error


def _unwrap(error: ray.exceptions.RayTaskError) -> Exception:
    """Return the exception that a Ray actor raised, without Ray's wrapper."""
    cause = error.cause
    return cause if isinstance(cause, Exception) else error


class BatchFeed(Protocol):
    """The methods of the channel that the learner calls; `RayChannel` implements them."""

    def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer: ...

    def finish(self, number: int, version: int) -> None: ...

    def announce(self, version: int) -> None: ...
