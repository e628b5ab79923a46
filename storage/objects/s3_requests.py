"""Sends requests to S3, and retries each request within limits until it is answered in full. Before each retry there is
a random pause, whose upper limit doubles with each try.

A request is retried if it was throttled, timed out, lost its connection, failed in the server or was answered
incompletely. A caller must ensure that its requests are idempotent, or must detect after a failure that an earlier try
has succeeded. Credentials, region and endpoint come from the standard AWS environment variables and files.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import botocore.exceptions  # type: ignore[import-untyped]
import s3fs
from fsspec.asyn import sync
from s3fs.errors import translate_boto_error

Answer = TypeVar("Answer")

# size in bytes of one part of an object; S3 accepts at most 10,000 parts, each of at least 5 MiB
PART_BYTES = 8 * 2**20
AT_ONCE = 8  # number of parts of objects that a process transfers at a time
LATE_SECONDS = 5.0  # a request that has waited this many seconds for an answer is reported as late

WRONG = botocore.exceptions.FlexibleChecksumError  # raised if a body does not match the service's checksum
LOST = (*s3fs.core.S3_RETRYABLE_ERRORS, botocore.exceptions.ConnectionError, TimeoutError, ConnectionError, WRONG)
FAILURES = (OSError, botocore.exceptions.BotoCoreError, *LOST)
REFUSED = {"PreconditionFailed", "412"}
UNSERVED = {
    "BadDigest",
    "BandwidthLimitExceeded",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",
    "409",
    "429",
    "500",
    "502",
    "503",
    "504",
}

# HTTP statuses after which a request is retried, whatever error code the service gives
BUSY = (429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """The retry limits of a request. A try of the request begins at most `seconds` after the first try, not counting
    the pause before the try.
    """

    tries: int = 12
    seconds: float = 180.0
    try_seconds: float = 60.0  # longest time of one try of a request, including the transfer of the whole body
    connect_seconds: float = 5.0
    silence_seconds: float = 20.0  # longest time, in seconds, without receiving any bytes of an answer
    pause_seconds: float = 0.2  # upper limit of the pause after the first failed try
    longest_pause_seconds: float = 10.0

    def with_seconds(self, seconds: float) -> RetryLimits:
        """Return a copy of the retry limits with `seconds` as the time limit, and without a limit on the number of
        tries."""
        return replace(self, tries=sys.maxsize, seconds=seconds)

    def pause(self, tried: int) -> float:
        """Return a random pause (seconds) after `tried` failed tries, so that many clients do not retry at the same
        moment."""
        return random.uniform(0.0, min(self.longest_pause_seconds, self.pause_seconds * 2.0 ** min(tried - 1, 30)))


PATIENT = RetryLimits()
HASTY = RetryLimits(tries=1, try_seconds=10.0, connect_seconds=3.0, silence_seconds=5.0)


def get_connection(patience: RetryLimits | None = None) -> S3Connection:
    """Return the connection of this process to the S3 service. A forked process gets a new connection, because threads
    do not survive a fork.
    """
    variables = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    return _connection(os.getpid(), variables, patience or PATIENT)


@functools.lru_cache(maxsize=8)
def _connection(pid: int, variables: tuple[tuple[str, str], ...], patience: RetryLimits) -> S3Connection:
    return S3Connection(patience)


class S3Connection:
    """Sends requests. The methods `call` and `wait` block the calling thread; all other methods run in the connection's
    event loop."""

    def __init__(self, patience: RetryLimits) -> None:
        self.patience = patience
        timeouts = {"connect_timeout": patience.connect_seconds, "read_timeout": patience.silence_seconds}
        region = os.environ.get("AWS_REGION")  # botocore itself reads AWS_DEFAULT_REGION only
        self._filesystem = s3fs.S3FileSystem(
            client_kwargs={"region_name": region} if region else {},
            use_listings_cache=False,
            skip_instance_cache=True,
            config_kwargs={
                **timeouts,
                "retries": {"mode": "standard", "total_max_attempts": 1},
                "max_pool_connections": 4 * AT_ONCE,
            },
        )
        self._gate = asyncio.Semaphore(AT_ONCE)
        # start (monotonic seconds) and method of each pending request
        self._asked: dict[object, tuple[float, str]] = {}

    def wait(self, work: Callable[..., Coroutine[Any, Any, Answer]], *arguments: Any) -> Answer:
        """Run the coroutine `work` in the connection's event loop, and block the calling thread until the coroutine
        ends."""
        found: Answer = sync(self._filesystem.loop, work, *arguments)
        return found

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Send one request to S3, and block the calling thread until the request is answered."""
        return self.wait(functools.partial(self.ask, method, **arguments))

    @property
    def late(self) -> str:
        """A description of the oldest pending request if the answer is late, else ""; any thread may read this
        property."""
        now = time.monotonic()
        began, method = min(list(self._asked.values()), default=(now, ""))
        return f"object storage: no answer to {method} for {now - began:.0f} s" if now - began > LATE_SECONDS else ""

    async def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Send one request to S3, and retry until the request is answered; the answer's body is read in full."""
        token = object()
        self._asked[token] = time.monotonic(), method
        try:
            return await self._ask(method, arguments)
        finally:
            del self._asked[token]

    async def _ask(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        tried, began = 0, time.monotonic()
        while True:
            tried += 1
            try:
                async with asyncio.timeout(self.patience.try_seconds):
                    return await self._answer(method, arguments)
            except FAILURES as error:
                late = time.monotonic() - began > self.patience.seconds
                if not is_transient(error) or late or tried == self.patience.tries:
                    error.add_note(f"{tried} tries in {time.monotonic() - began:.0f} s")
                    raise
            await asyncio.sleep(self.patience.pause(tried))

    async def _answer(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        client = await self._filesystem.set_session()  # `set_session` returns the session that is already open
        try:
            answer: dict[str, Any] = await getattr(client, method)(**arguments)
        except botocore.exceptions.ClientError as error:
            raise translate_boto_error(error) from error
        if "Body" not in answer:
            return answer
        async with answer["Body"] as stream:
            body = await stream.read()
        if len(body) != answer["ContentLength"]:
            raise ConnectionError(
                f"the connection broke: only {len(body)} of the object's {answer['ContentLength']} bytes were received"
            )
        return {**answer, "Body": body}

    async def upload(self, target: dict[str, str], parts: Sequence[memoryview], **described: Any) -> None:
        """Write an object to S3; `described` contains further arguments of the request (`Metadata`, `IfNoneMatch`)."""
        condition = {name: value for name, value in described.items() if name != "Metadata"}
        if sum(map(len, parts)) <= PART_BYTES:
            await self.ask("put_object", **target, Body=b"".join(parts), **described)
            return
        begun = await self.ask("create_multipart_upload", **target, Metadata=described["Metadata"])
        upload = {**target, "UploadId": begun["UploadId"]}
        tasks = [
            asyncio.create_task(self._part(upload, n, cut)) for n, cut in enumerate(cut_parts(parts, PART_BYTES), 1)
        ]
        try:
            listed = {"Parts": await asyncio.gather(*tasks)}
            await self.ask("complete_multipart_upload", **upload, MultipartUpload=listed, **condition)
        except FAILURES:
            await _await_end(tasks)
            await self._abort(upload)
            raise

    async def _part(self, upload: dict[str, str], number: int, cut: list[memoryview]) -> dict[str, Any]:
        async with self._gate:
            answer = await self.ask("upload_part", **upload, PartNumber=number, Body=b"".join(cut))
        return {"PartNumber": number, "ETag": answer["ETag"]}

    async def _abort(self, upload: dict[str, str]) -> None:
        """Try to abort an upload. Errors of aborting an upload are ignored, because garbage collection removes the
        upload later."""
        try:
            await self.ask("abort_multipart_upload", **upload)
        except FAILURES:
            return

    async def download(self, target: dict[str, str], take: Callable[[bytes], object]) -> dict[str, str]:
        """Download an object: pass its bytes to the function `take` in order, and return the object's metadata."""
        try:
            first = await self.ask("get_object", **target, Range=f"bytes=0-{PART_BYTES - 1}")
        except OSError as error:
            if code_of(error) not in ("InvalidRange", "416"):
                raise
            # S3 rejects a range request for an empty object, so the request is repeated without a range
            first = await self.ask("get_object", **target)
        await asyncio.to_thread(take, first["Body"])
        size = int(first.get("ContentRange", "/0").rpartition("/")[2])
        rest = (self._range(target, start, size, first["ETag"]) for start in range(PART_BYTES, size, PART_BYTES))
        ahead = deque(map(asyncio.create_task, islice(rest, AT_ONCE)))
        try:
            while ahead:
                body = await ahead[0]
                ahead.popleft()
                ahead.extend(map(asyncio.create_task, islice(rest, 1)))
                await asyncio.to_thread(take, body)
        finally:
            await _await_end(ahead)
            for unused in rest:
                unused.close()
        return dict(first["Metadata"])

    async def _range(self, target: dict[str, str], start: int, size: int, etag: str) -> bytes:
        """Read one more part of an object; the S3 service refuses the request if the object was replaced after the
        first part was read.
        """
        stop = min(start + PART_BYTES, size)
        async with self._gate:
            answer = await self.ask("get_object", **target, Range=f"bytes={start}-{stop - 1}", IfMatch=etag)
        return bytes(answer["Body"])


async def _await_end(tasks: Any) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def cut_parts(parts: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Split buffers into pieces of `size` bytes without copying them; the last piece may be shorter."""
    run: list[memoryview] = []
    room = size
    for part in parts:
        while len(part) >= room:
            yield [*run, part[:room]]
            part, run, room = part[room:], [], size
        if len(part):
            run.append(part)
            room -= len(part)
    if run:
        yield run


def code_of(error: BaseException | None) -> str:
    """Return the error code with which the S3 service answered, or "" if there was no answer."""
    response = getattr(getattr(error, "__cause__", None), "response", None)
    return str(response["Error"].get("Code", "")) if response else ""


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status of a failed request; return None if there was no answer."""
    response = getattr(error.__cause__, "response", None)
    return response["ResponseMetadata"].get("HTTPStatusCode") if response else None


def is_transient(error: Exception) -> bool:
    """Return whether a failed request may succeed if it is repeated."""
    return isinstance(error, LOST) or code_of(error) in UNSERVED or _status_of(error) in BUSY
