"""Create a bucket that keeps old versions, on a server whose conditional writes are atomic.

    python infra/bucket.py BUCKET
    python infra/bucket.py BUCKET --undelete PREFIX     # restores deleted objects below the prefix

A run's log depends on one guarantee of its store: if several writers create the same object at the same time, exactly
one of them succeeds. Some S3 servers check `If-None-Match` in one step and write in another step, so two writers can
succeed. This script lets many writers race, and exits with code 1 if two of them win. The usual AWS variables name the
server. If the script runs again, it changes nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

WRITERS, ROUNDS = 16, 8
START_SECONDS = 120.0
REFUSED = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")


def create(client: Any, bucket: str) -> None:
    """Create the bucket and turn versioning on. If the server is still starting, wait for it."""
    limit = time.monotonic() + START_SECONDS
    while True:
        try:
            if bucket not in [found["Name"] for found in client.list_buckets()["Buckets"]]:
                client.create_bucket(Bucket=bucket)
            client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
            return
        except (ConnectionError, HTTPClientError, ClientError):
            if time.monotonic() > limit:
                raise
            time.sleep(1.0)


def race(client: Any, bucket: str) -> int:
    """Let many writers create the same object at the same time, and return how many succeeded. Delete the object."""
    key, start = f"race-{uuid.uuid4().hex}", Barrier(WRITERS)

    def write(number: int) -> bool:
        start.wait()
        try:
            client.put_object(Bucket=bucket, Key=key, Body=b"%d" % number, IfNoneMatch="*")
        except ClientError as error:
            if error.response["Error"]["Code"] not in REFUSED:
                raise
            return False
        return True

    with ThreadPoolExecutor(WRITERS) as pool:
        won = sum(pool.map(write, range(WRITERS)))
    for version in client.list_object_versions(Bucket=bucket, Prefix=key).get("Versions", ()):
        client.delete_object(Bucket=bucket, Key=key, VersionId=version["VersionId"])
    return won


def undelete(client: Any, bucket: str, prefix: str) -> int:
    """Remove the delete markers that hide objects below a prefix, and return the number of restored objects."""
    pages = client.get_paginator("list_object_versions").paginate(Bucket=bucket, Prefix=prefix)
    hidden = [marker for page in pages for marker in page.get("DeleteMarkers", ()) if marker["IsLatest"]]
    for marker in hidden:
        client.delete_object(Bucket=bucket, Key=marker["Key"], VersionId=marker["VersionId"])
    return len(hidden)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bucket")
    parser.add_argument("--undelete", metavar="PREFIX")
    given = parser.parse_args()
    bucket = given.bucket
    client = boto3.client("s3", config=Config(max_pool_connections=WRITERS))
    if given.undelete is not None:
        print(f"{undelete(client, bucket, given.undelete)} objects of {bucket}/{given.undelete} are back")
        return 0
    create(client, bucket)
    won = [race(client, bucket) for _ in range(ROUNDS)]
    if any(count != 1 for count in won):
        print(
            f"the S3 server is not fit for rollflow: of {WRITERS} writers that created one object at once, {max(won)} "
            "succeeded, not 1; use another server or version",
            file=sys.stderr,
        )
        return 1
    print(f"bucket {bucket}: versioned, and conditional writes are atomic ({ROUNDS} races of {WRITERS} writers)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
