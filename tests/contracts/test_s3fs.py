"""Tests the public API of s3fs that `s3_requests` uses: the open client with rollflow's limits, and the names of
errors.
"""

from __future__ import annotations

import ast
import inspect

import botocore.exceptions
import pytest
from s3fs.errors import translate_boto_error

from rollflow.storage.objects import s3_requests
from rollflow.storage.objects.s3_requests import AT_ONCE, RetryLimits, S3Connection, code_of


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> S3Connection:
    """Build a connection to an endpoint at which no server listens."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    return S3Connection(RetryLimits(connect_seconds=3.0, silence_seconds=7.0))


def test_s3_connection_has_one_client_without_retries(connection: S3Connection) -> None:
    """If each request had a new client, it would open a new connection. If the client also retried, its retries would
    multiply rollflow's retries.
    """
    first, second = (connection.wait(connection._filesystem.set_session) for _ in range(2))
    assert first is second
    config = first.meta.config
    assert config.retries == {"mode": "standard", "total_max_attempts": 1}
    assert (config.connect_timeout, config.read_timeout) == (3.0, 7.0)
    assert config.max_pool_connections == 4 * AT_ONCE


def test_s3_region_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    for name, region in (("AWS_DEFAULT_REGION", "eu-west-1"), ("AWS_REGION", "eu-central-1")):  # AWS_REGION wins
        monkeypatch.setenv(name, region)
        client = (one := S3Connection(RetryLimits())).wait(one._filesystem.set_session)
        assert client.meta.region_name == region


def test_unknown_conditional_header_is_refused_by_the_s3_client(connection: S3Connection) -> None:
    """If the client silently ignored a condition that it does not know, two writers could create the same object."""
    with pytest.raises(botocore.exceptions.ParamValidationError, match="IfNobodyDid"):
        connection.call("put_object", Bucket="bucket", Key="key", Body=b"", IfNobodyDid="*")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("NoSuchKey", FileNotFoundError),
        ("404", FileNotFoundError),
        ("NoSuchBucket", FileNotFoundError),
        ("AccessDenied", PermissionError),
        ("PreconditionFailed", OSError),
        ("SlowDown", OSError),
        ("never heard of", OSError),
    ],
)
def test_s3_error_keeps_the_error_code_of_the_service(code: str, kind: type[OSError]) -> None:
    refused = botocore.exceptions.ClientError({"Error": {"Code": code, "Message": "no"}}, "PutObject")
    found = translate_boto_error(refused)
    assert isinstance(found, kind)
    assert code_of(found) == code


def test_no_private_name_of_s3fs_is_used() -> None:
    tree = ast.parse(inspect.getsource(s3_requests))
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    of_s3fs = [node for node in taken if ast.unparse(node.value) in ("s3fs", "s3fs.core", "self._filesystem")]
    assert {node.attr for node in of_s3fs} == {"S3FileSystem", "core", "S3_RETRYABLE_ERRORS", "loop", "set_session"}
