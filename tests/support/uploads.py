"""Makes unfinished multipart uploads to a moto server in this process, as a killed or a slow writer leaves them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from moto.s3.models import s3_backends

from rollflow.storage.objects.s3 import S3Store

BUCKET = "uploads"
PART = 1000  # the size of a part in bytes


def uploads() -> dict[str, Any]:
    """Return the uploads in the server's memory, by id."""
    [backend] = [backend for account in s3_backends.values() for backend in account.values()]
    found: dict[str, Any] = backend.buckets[BUCKET].multiparts
    return found


def begun(run: S3Store, key: str, parts: int = 1) -> str:
    """Start an upload of this many parts (one part may be small) without completing it, and return its id."""
    upload: str = run._call("create_multipart_upload", Key=run._key(key))["UploadId"]
    for number in range(1, parts + 1):
        run._call("upload_part", Key=run._key(key), UploadId=upload, PartNumber=number, Body=b"x" * PART)
    return upload


def ended(run: S3Store, key: str, upload: str) -> None:
    """Complete the upload."""
    parts = run._call("list_parts", Key=run._key(key), UploadId=upload)["Parts"]
    listed = {"Parts": [{name: part[name] for name in ("PartNumber", "ETag")} for part in parts]}
    run._call("complete_multipart_upload", Key=run._key(key), UploadId=upload, MultipartUpload=listed)


def grow_old(*uploaded: str) -> None:
    """Make these uploads look eight days old."""
    for upload in uploaded:
        for part in uploads()[upload].parts.values():
            part.last_modified -= timedelta(days=8)
