"""An S3 bucket as an object store: every answer comes from the service, and a lost answer is looked up.

`create` is a conditional PUT (`If-None-Match: *`) that carries a token of its own in the object's metadata.
A PUT can succeed while its answer is lost; the repeated one is then refused, as if somebody else had been
first. So a failed `create` reads the token back: its own token means success, whatever the answer was, and
any other means `Conflict`, even over the same bytes.

Nothing is cached but the connection, which belongs to one process and one set of AWS variables. Credentials,
region and endpoint (`AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`) come by the usual AWS ways only. A request
waits 5 s to connect and 30 s for the next byte, and is tried at most six times.
"""

from __future__ import annotations

import functools
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import botocore.exceptions  # type: ignore[import-untyped]
import s3fs

from rollflow.storage.errors import ConfigError, Conflict, Missing, RollflowError, Unreachable
from rollflow.storage.objects.base import ObjectStore, checked

WRITER = "rollflow-writer"
CHECK_SECONDS = 10
BUSY_ATTEMPTS = 5

LOST = (*s3fs.core.S3_RETRYABLE_ERRORS, botocore.exceptions.ConnectionError)
FAILURES = (OSError, botocore.exceptions.BotoCoreError, *LOST)
REFUSED = {"PreconditionFailed", "412"}
BUSY = {"ConditionalRequestConflict", "OperationAborted", "409"}
UNSERVED = {
    "InternalError",
    "ServiceUnavailable",
    "SlowDown",
    "RequestTimeout",
    "NoSuchUpload",
    "500",
    "502",
    "503",
    "504",
}


@dataclass(frozen=True)
class S3Store(ObjectStore):
    """Objects below `root` ("bucket" or "bucket/prefix")."""

    root: str

    @property
    def uri(self) -> str:
        return f"s3://{self.root}"

    def child(self, prefix: str) -> S3Store:
        return S3Store(f"{self.root}/{checked(prefix)}")

    def put(self, path: str, data: bytes | memoryview) -> None:
        with self._named(path):
            _filesystem().pipe_file(self._address(path), bytes(data))

    def create(self, path: str, data: bytes | memoryview) -> None:
        body, token = bytes(data), uuid.uuid4().hex
        with self._named(path):
            for attempt in range(BUSY_ATTEMPTS):
                if self._created(path, body, token):
                    return
                time.sleep(0.1 * 2**attempt)
        raise Unreachable(
            f"{self.uri}/{path} stayed locked by other requests for {BUSY_ATTEMPTS} attempts to create it"
        )

    def get(self, path: str) -> bytes:
        with self._named(path):
            # One request, so one version of the object: parallel ranges could straddle a `put`.
            data: bytes = _filesystem().cat_file(self._address(path), max_concurrency=1)
            return data

    def exists(self, path: str) -> bool:
        try:
            with self._named(path):
                self._call("head_object", Key=self._key(path))
        except Missing:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[str]:
        top = self._prefix
        below = f"{self._key(prefix)}/" if prefix else top
        with self._named(prefix):
            keys = [*self._keys(below)]
        # A key with a trailing slash is a folder drawn by a console.
        return iter(sorted(key.removeprefix(top) for key in keys if not key.endswith("/")))

    def delete(self, path: str) -> None:
        with self._named(path):
            self._call("delete_object", Key=self._key(path))

    def check(self) -> None:
        """See the contract; at most about 15 s, also where nobody answers."""
        if not self._bucket:
            raise ConfigError(f"store.uri = {self.uri!r} names no bucket; write s3://bucket/prefix")
        try:
            with self._named("probe"):
                self._probe(f"probe-{uuid.uuid4().hex}")
        except Unreachable as error:
            raise ConfigError(
                f"store.uri = {self.uri!r} cannot be reached ({error.__cause__ or error}); "
                "check AWS_ENDPOINT_URL_S3 (or AWS_ENDPOINT_URL), AWS_REGION and the network"
            ) from error

    def _probe(self, name: str) -> None:
        hasty = functools.partial(self._call, hasty=True, timeout=CHECK_SECONDS)
        call = functools.partial(hasty, Key=self._key(name))
        call("put_object", Body=b"rollflow", IfNoneMatch="*")
        try:
            call("put_object", Body=b"rollflow", IfNoneMatch="*")
        except OSError as error:
            if _code(error) not in REFUSED:
                raise
        else:
            raise ConfigError(
                f"store.uri = {self.uri!r} lies on a service that ignores If-None-Match, so two learners could "
                "commit one version; use a service with conditional writes"
            )
        finally:
            call("head_object")
            call("delete_object")
        hasty("list_objects_v2", Prefix=self._key(name))

    def _created(self, path: str, body: bytes, token: str) -> bool:
        """Whether the object was created; False asks for another try."""
        try:
            _filesystem().pipe_file(self._address(path), body, mode="create", Metadata={WRITER: token})
        except FAILURES as error:
            writer = self._writer(path)
            if writer == token:
                return True
            if writer is not None or _code(error) in REFUSED:
                raise Conflict(f"{self.uri}/{path} exists") from error
            if _code(error) not in BUSY:
                raise
            return False
        return True

    def _writer(self, path: str) -> str | None:
        """The token of whoever wrote the object ("" for none), or None if there is no object."""
        try:
            head = self._call("head_object", Key=self._key(path))
        except FileNotFoundError:
            return None
        return str(head["Metadata"].get(WRITER, ""))

    def _keys(self, below: str) -> Iterator[str]:
        more: dict[str, Any] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=below, **more)
            yield from (entry["Key"] for entry in page.get("Contents", ()))
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _call(self, method: str, *, hasty: bool = False, **arguments: Any) -> Any:
        return _filesystem(hasty).call_s3(method, Bucket=self._bucket, **arguments)

    @property
    def _bucket(self) -> str:
        return self.root.partition("/")[0]

    @property
    def _prefix(self) -> str:
        """What every key begins with: "" or "prefix/"."""
        prefix = self.root.partition("/")[2]
        return prefix and f"{prefix}/"

    def _key(self, path: str) -> str:
        return self._prefix + checked(path)

    def _address(self, path: str) -> str:
        return f"{self.root}/{checked(path)}"

    @contextmanager
    def _named(self, path: str) -> Iterator[None]:
        """Turn the failures of a request into rollflow's errors."""
        try:
            yield
        except FAILURES as error:
            explained = _explained(error, self, path)
            if explained is None:
                raise
            raise explained from error


def _filesystem(hasty: bool = False) -> Any:
    """The connection of this process: one made before a fork has no thread behind it any more."""
    variables = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    return _connection(os.getpid(), variables, hasty)


@functools.lru_cache(maxsize=8)
def _connection(pid: int, variables: tuple[tuple[str, str], ...], hasty: bool) -> Any:
    patience = {"connect_timeout": 3, "read_timeout": 5} if hasty else {"connect_timeout": 5, "read_timeout": 30}
    retries = {"mode": "standard", "total_max_attempts": 1 if hasty else 3}
    filesystem = s3fs.S3FileSystem(
        use_listings_cache=False,
        skip_instance_cache=True,
        config_kwargs={**patience, "retries": retries, "max_pool_connections": 32},
    )
    # botocore repeats a request that failed; s3fs, on top, one whose body broke off on the way.
    filesystem.retries = 1 if hasty else 2
    return filesystem


def _code(error: BaseException | None) -> str:
    """The service's own word for a failure, or "" where it gave no answer."""
    response = getattr(getattr(error, "__cause__", None), "response", None)
    return str(response["Error"].get("Code", "")) if response else ""


def _explained(error: Exception, store: S3Store, path: str) -> RollflowError | None:
    """What a failed request means to its caller; None where the error itself says it."""
    where, code = f"store.uri = {store.uri!r}", _code(error)
    bucket = store.root.partition("/")[0]
    if isinstance(error, LOST) or code in UNSERVED:
        return Unreachable(f"object storage did not answer for {store.uri}/{path} within its timeouts: {error}")
    if code == "NoSuchBucket":
        return ConfigError(f"{where} names a bucket that does not exist; create {bucket!r} or name another")
    if isinstance(error, FileNotFoundError):
        return Missing(f"there is no object {store.uri}/{path}")
    if isinstance(error, PermissionError):
        return ConfigError(
            f"{where} denies access ({error}); check AWS_PROFILE or AWS_ACCESS_KEY_ID and what the bucket's policy "
            "lets this user read, write, list and delete"
        )
    if isinstance(error, botocore.exceptions.BotoCoreError):
        return ConfigError(f"{where} cannot be used ({error}); set the AWS credentials (AWS_PROFILE) and the address")
    return None
