"""Stores objects in an S3 bucket. No object is cached, and every read is checked against the sha256 in the object's
metadata.

The method `create` is a conditional write (`If-None-Match: *`) that stores a random id in the object's metadata. A
write can succeed although the service's answer is lost, so `create` reads the object's metadata after a failed write.
If the object has the id of this write, the write has succeeded. If the object has another id, `create` raises
`Conflict`, even if the bytes are the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import botocore.exceptions  # type: ignore[import-untyped]

from rollflow.storage.errors import ConfigError, Conflict, Corrupt, Missing, RollflowError, StoreFailed, Unreachable
from rollflow.storage.objects.base import (
    Data,
    ObjectStat,
    ObjectStore,
    UnfinishedWrite,
    check_path,
    hash_pieces,
    split_buffers,
)
from rollflow.storage.objects.disk import CURES, raise_store_failed
from rollflow.storage.objects.s3_requests import (
    FAILURES,
    HASTY,
    PATIENT,
    REFUSED,
    WRONG,
    S3Connection,
    code_of,
    get_connection,
    is_transient,
)
from rollflow.storage.objects.translation import ErrorTranslator

WRITER, SHA256 = "rollflow-writer", "rollflow-sha256"
READS = 3  # number of times that an object is read; if its bytes never match their hash, the object is corrupt
FULL = ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507")
SKEWED = "RequestTimeTooSkewed"


@dataclass(frozen=True)
class S3Store(ObjectStore):
    """An object store that contains the objects of an S3 bucket below `root` ("bucket" or "bucket/prefix"). Requests to
    S3 are retried for `patience` seconds."""

    root: str
    patience: float | None = field(default=None, compare=False)  # seconds to retry; None: as in `s3_requests.PATIENT`

    @property
    def uri(self) -> str:
        return f"s3://{self.root}"

    def child(self, prefix: str) -> S3Store:
        return S3Store(f"{self.root}/{check_path(prefix)}", self.patience)

    def put(self, path: str, data: Data) -> str:
        parts, token = split_buffers(data), uuid.uuid4().hex
        sha256 = hash_pieces(parts)
        with self._translate_errors(path):
            try:
                self._write(path, parts, {WRITER: token, SHA256: sha256})
            except FAILURES:
                if self._writer(path) != token:
                    raise
        return sha256

    def create(self, path: str, data: Data) -> None:
        parts, token = split_buffers(data), uuid.uuid4().hex
        with self._translate_errors(path):
            try:
                self._write(path, parts, {WRITER: token, SHA256: hash_pieces(parts)}, IfNoneMatch="*")
            except FAILURES as error:
                writer = self._writer(path)
                if writer == token:
                    return
                if writer is not None or code_of(error) in REFUSED:
                    raise Conflict(
                        f"{self.uri}/{path} exists already, and an existing object is never overwritten"
                    ) from error
                raise

    def get(self, path: str) -> bytes:
        parts: list[bytes] = []
        self._read(path, parts.clear, parts.append)
        return b"".join(parts)

    def fetch(self, path: str, file: Path) -> str:
        with raise_store_failed(file), open(file, "xb") as copy:

            def again() -> None:
                copy.seek(0)
                copy.truncate()

            return self._read(path, again, copy.write)

    def stat(self, path: str) -> ObjectStat:
        with self._translate_errors(path):
            head = self._call("head_object", Key=self._key(path))
        return ObjectStat(head["ContentLength"], head["LastModified"].timestamp())

    def exists(self, path: str) -> bool:
        try:
            with self._translate_errors(path):
                self._call("head_object", Key=self._key(path))
        except Missing:
            return False
        return True

    def list(self, prefix: str = "", after: str = "") -> Iterator[str]:
        top = self._prefix
        below = f"{self._key(prefix)}/" if prefix else top
        with self._translate_errors(prefix):
            keys = [*self._keys(below, after)]
        # A key with a trailing slash is an empty folder that a web console created.
        return iter(sorted(key.removeprefix(top) for key in keys if not key.endswith("/")))

    def folders(self, prefix: str) -> Sequence[str]:
        below = f"{self._key(prefix)}/"
        with self._translate_errors(prefix):
            pages = self._pages("list_objects_v2", ["ContinuationToken"], Prefix=below, Delimiter="/")
            keys = [folder["Prefix"] for page in pages for folder in page.get("CommonPrefixes", ())]
        return sorted(key.removeprefix(below).rstrip("/") for key in keys)

    def delete(self, path: str) -> None:
        with self._translate_errors(path):
            self._call("delete_object", Key=self._key(path))

    def list_unfinished(self) -> Iterator[UnfinishedWrite]:
        """List the unfinished multipart uploads that have parts; an upload without parts occupies no storage."""
        with self._translate_errors("uploads"):
            pages = self._pages("list_multipart_uploads", ["KeyMarker", "UploadIdMarker"], Prefix=self._prefix)
            for upload in [upload for page in pages for upload in page.get("Uploads", ())]:
                parts = self._parts(upload)
                if parts:
                    touched = max(
                        stamp.timestamp() for stamp in (upload["Initiated"], *(p["LastModified"] for p in parts))
                    )
                    name = upload["Key"].removeprefix(self._prefix)
                    yield UnfinishedWrite(name, sum(part["Size"] for part in parts), touched, upload["UploadId"])

    def _parts(self, upload: dict[str, Any]) -> Sequence[dict[str, Any]]:
        which = {name: upload[name] for name in ("Key", "UploadId")}
        try:
            return [
                part
                for page in self._pages("list_parts", ["PartNumberMarker"], **which)
                for part in page.get("Parts", ())
            ]
        except FileNotFoundError:  # the upload ended while uploads were listed
            return []

    def discard(self, left: UnfinishedWrite) -> None:
        with self._translate_errors(left.name), contextlib.suppress(FileNotFoundError):
            self._call("abort_multipart_upload", Key=self._key(left.name), UploadId=left.token)

    @property
    def waits(self) -> str:
        return self._connection.late

    def check(self) -> None:
        """Check the store as `ObjectStore.check` does, in at most about 15 seconds even if the S3 service does not
        answer."""
        if not self._bucket:
            raise ConfigError(f"store.uri = {self.uri!r} does not name a bucket; write s3://bucket/prefix")
        try:
            with self._translate_errors("probe"):
                self._probe(f"probe-{uuid.uuid4().hex}")
        except Unreachable as error:
            cause = error.__cause__ or error
            raise ConfigError(
                f"the object storage of store.uri = {self.uri!r} cannot be reached "
                f"({str(cause) or type(cause).__name__}); check AWS_ENDPOINT_URL_S3 "
                "(or AWS_ENDPOINT_URL), AWS_REGION and the network"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"the object storage of store.uri = {self.uri!r} refuses a request that a run needs ({error}); "
                "check AWS_REGION, the endpoint address and the features of the service"
            ) from error

    def _probe(self, name: str) -> None:
        def call(method: str, **arguments: Any) -> None:
            get_connection(HASTY).call(method, Bucket=self._bucket, **arguments)

        key = self._key(name)
        call("put_object", Key=key, Body=b"rollflow", IfNoneMatch="*")
        try:
            call("put_object", Key=key, Body=b"rollflow", IfNoneMatch="*")
        except OSError as error:
            if code_of(error) not in REFUSED:
                raise
        else:
            raise ConfigError(
                f"the object storage of store.uri = {self.uri!r} ignores If-None-Match, so two learners could "
                "commit the same version; use a service with conditional writes"
            )
        finally:
            call("head_object", Key=key)
            call("delete_object", Key=key)
        call("list_objects_v2", Prefix=key)

    def _write(self, path: str, parts: Sequence[memoryview], metadata: dict[str, str], **condition: str) -> None:
        here = self._connection
        here.wait(lambda: here.upload(self._target(path), parts, Metadata=metadata, **condition))

    def _read(self, path: str, begin: Callable[[], object], take: Callable[[bytes], object]) -> str:
        """Read the object, several times if necessary, until its bytes match the stored sha256; return the sha256.

        The function `begin` is called before each attempt to read the object, and `take` is called with each part of
        the object.
        """
        here = self._connection
        for _ in range(READS):
            read = hashlib.sha256()
            begin()

            def taken(part: bytes, read: Any = read) -> None:
                read.update(part)
                take(part)

            try:
                with self._translate_errors(path):
                    metadata = here.wait(here.download, self._target(path), taken)
            except OSError as error:
                if code_of(error) not in REFUSED:
                    raise
                continue  # the object was replaced while its parts were read
            if metadata.get(SHA256, read.hexdigest()) == read.hexdigest():
                return read.hexdigest()
        raise Corrupt(f"{self.uri}/{path} does not contain what was written (the sha256 differs in {READS} reads)")

    def _writer(self, path: str) -> str | None:
        """Return the id that the object's writer stored in the metadata ("" if there is none); return None if there is
        no object."""
        try:
            head = self._call("head_object", Key=self._key(path))
        except FileNotFoundError:
            return None
        return str(head["Metadata"].get(WRITER, ""))

    def _keys(self, below: str, after: str = "") -> Iterator[str]:
        more = {"StartAfter": self._key(after)} if after else {}
        for page in self._pages("list_objects_v2", ["ContinuationToken"], Prefix=below, **more):
            yield from (entry["Key"] for entry in page.get("Contents", ()))

    def _pages(self, method: str, markers: Sequence[str], **arguments: Any) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {}
        while True:
            page = self._call(method, **arguments, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            more = {marker: page[f"Next{marker}"] for marker in markers}

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._connection.call(method, Bucket=self._bucket, **arguments)

    @property
    def _connection(self) -> S3Connection:
        return get_connection(None if self.patience is None else PATIENT.with_seconds(self.patience))

    @property
    def _bucket(self) -> str:
        return self.root.partition("/")[0]

    @property
    def _prefix(self) -> str:
        """The prefix of every S3 key in this store: "" or "prefix/"."""
        prefix = self.root.partition("/")[2]
        return prefix and f"{prefix}/"

    def _key(self, path: str) -> str:
        return self._prefix + check_path(path)

    def _target(self, path: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._key(path)}

    def _translate_errors(self, path: str) -> ErrorTranslator:
        """Turn the errors of an S3 request into rollflow's errors."""
        return ErrorTranslator(
            lambda error: _translate_error(error, self, path) if isinstance(error, FAILURES) else None
        )


def _translate_error(error: Exception, store: S3Store, path: str) -> RollflowError | None:
    """Return rollflow's error for a failed S3 request; return None if the original error is clear enough."""
    where, code = f"store.uri = {store.uri!r}", code_of(error)
    bucket = store.root.partition("/")[0]
    if isinstance(error, WRONG):
        return Corrupt(f"{store.uri}/{path} does not contain what was written ({error})")
    if is_transient(error) or code == "NoSuchUpload":
        tried = "; ".join(getattr(error, "__notes__", ()))
        return Unreachable(
            f"object storage did not answer a request for {store.uri}/{path} ({tried}): {error or type(error)}"
        )
    if code == "NoSuchBucket":
        return ConfigError(f"{where} names a bucket that does not exist; create {bucket!r} or name another")
    if isinstance(error, FileNotFoundError) and code:
        return Missing(f"there is no object {store.uri}/{path}")
    if code in FULL:
        return StoreFailed(
            f"{where} accepts no more writes ({error}), and nothing was committed; free space in the "
            "storage, then resume the run"
        )
    if code == SKEWED:
        return ConfigError(
            f"{where} refuses requests because this machine's clock is wrong ({error}); set the clock, then "
            "resume the run"
        )
    if isinstance(error, PermissionError):
        return ConfigError(
            f"{where} denies access ({error}); check AWS_PROFILE or AWS_ACCESS_KEY_ID, and check that the "
            "bucket's policy lets this user read, write, list and delete"
        )
    if isinstance(error, botocore.exceptions.BotoCoreError):
        return ConfigError(
            f"{where} cannot be used ({error}); set the AWS credentials (AWS_PROFILE) and the endpoint address"
        )
    if isinstance(error, OSError) and not code and error.errno not in CURES:
        return Unreachable(f"{store.uri}/{path} cannot be read now ({error}); the object may be intact")
    return None
