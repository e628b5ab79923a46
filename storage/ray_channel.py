"""The channel in a Ray actor: one per run, named, owner of the batches it holds.

Payloads cross as Arrow buffers. The actor puts them into Ray's object store itself (an object put by a process
that exits would be lost), and hands out references, so that the learner reads shared memory without a copy.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import ray

from rollflow.storage.channel import Channel
from rollflow.storage.errors import Unreachable
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.trajectories import TrajectoryStore

CHANNEL = "channel"
GRACE_SECONDS = 15.0  # what a call may take beyond its own deadline before its actor counts as unreachable


class ChannelActor:
    """`Channel` over references to Arrow buffers that this actor owns."""

    def __init__(self, run: ObjectStore, capacity: int, version: int) -> None:
        store = TrajectoryStore(run)

        def refill(number: int) -> Any:
            return ray.put(store.read(number)[1]) if store.committed(number) else None

        self.channel: Channel[Any] = Channel(capacity, refill, version)

    async def put(self, number: int, payload: pa.Buffer, deadline: float) -> None:
        """See `Channel.put`."""
        await self.channel.put(number, ray.put(payload), deadline)

    async def lease(self, number: int, deadline: float) -> list[Any]:
        """See `Channel.lease`; a list, so that Ray passes the reference and not the bytes."""
        return [await self.channel.lease(number, deadline)]

    async def finish(self, number: int, version: int) -> None:
        """Acknowledge batch `number` and announce the version it made."""
        await self.channel.ack(number)
        await self.channel.announce(version)

    async def announce(self, version: int) -> None:
        """See `Channel.announce`."""
        await self.channel.announce(version)

    async def wait_version(self, after: int, deadline: float) -> int:
        """See `Channel.wait_version`."""
        return await self.channel.wait_version(after, deadline)

    async def waiting(self) -> int:
        """Batches held and not acknowledged."""
        return self.channel.waiting


def start_channel(run: ObjectStore, capacity: int, version: int) -> RayChannel:
    """Start (or find) the run's channel actor in the current Ray namespace."""
    options = {"name": CHANNEL, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0, "max_concurrency": 64}
    return RayChannel(ray.remote(ChannelActor).options(**options).remote(run, capacity, version))


class RayChannel:
    """The channel as its clients see it; every wait is bounded."""

    def __init__(self, actor: Any = None) -> None:
        self.actor = actor if actor is not None else ray.get_actor(CHANNEL)

    async def put(self, number: int, payload: object, deadline: float) -> None:
        """See `Channel.put`."""
        await self._wait(self.actor.put.remote(number, payload, deadline), deadline, f"put batch {number}")

    async def wait_version(self, after: int, deadline: float) -> int:
        """See `Channel.wait_version`."""
        return int(await self._wait(self.actor.wait_version.remote(after, deadline), deadline, "news of a version"))

    async def waiting(self) -> int:
        """See `Channel.waiting`."""
        return int(await self._wait(self.actor.waiting.remote(), 0, "count its batches"))

    def lease(self, number: int, deadline: float) -> pa.Buffer:
        """See `Channel.lease`; blocks, for the learner's thread. The buffer is a view of shared memory."""
        [ref] = self._get(self.actor.lease.remote(number, deadline), deadline, f"lease batch {number}")
        return self._get(ref, GRACE_SECONDS, f"fetch batch {number}")

    def finish(self, number: int, version: int) -> None:
        """Acknowledge batch `number` and announce the version it made; blocks."""
        self._get(self.actor.finish.remote(number, version), 0, f"acknowledge batch {number}")

    def announce(self, version: int) -> None:
        """See `Channel.announce`; blocks."""
        self._get(self.actor.announce.remote(version), 0, f"announce version {version}")

    @staticmethod
    async def _wait(ref: Any, deadline: float, what: str) -> Any:
        try:
            async with asyncio.timeout(deadline + GRACE_SECONDS):
                return await ref
        except ray.exceptions.RayTaskError as error:  # a TimeoutError of the channel's own is one of these
            raise _cause(error) from None
        except TimeoutError as error:
            raise Unreachable(f"the channel actor did not {what} within {deadline + GRACE_SECONDS:g} s") from error
        except ray.exceptions.RayActorError as error:
            raise Unreachable(f"the channel actor died while asked to {what}: {error}") from error

    @staticmethod
    def _get(ref: Any, deadline: float, what: str) -> Any:
        try:
            return ray.get(ref, timeout=deadline + GRACE_SECONDS)
        except ray.exceptions.GetTimeoutError as error:
            raise Unreachable(f"the channel actor did not {what} within {deadline + GRACE_SECONDS:g} s") from error
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None
        except ray.exceptions.RayActorError as error:
            raise Unreachable(f"the channel actor died while asked to {what}: {error}") from error


def _cause(error: ray.exceptions.RayTaskError) -> Exception:
    """The exception the actor raised, without Ray's wrapping."""
    cause = error.cause
    return cause if isinstance(cause, Exception) else error
