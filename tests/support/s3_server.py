"""Runs a moto server (an imitation of S3) on loopback that handles one write at a time.

moto checks and writes a conditional PUT in two steps, while S3 uses one step. For this reason, the server handles one
write at a time.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import moto.s3.responses
import pytest
import s3fs
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer


@contextmanager
def s3_server(
    bucket: str, address: str = "127.0.0.1", reads: Counter[str] | None = None, port: int = 0
) -> Iterator[str]:
    """Start a moto server with one bucket and yield its endpoint; `reads` counts the reads of each key.

    Objects of earlier servers in this process are deleted, because all servers of the process share one backend.
    """
    for account in s3_backends.values():
        for backend in account.values():
            backend.reset()
    one_write, counting = threading.Lock(), threading.Lock()

    def in_turn(method: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(method)
        def locked(*arguments: object, **named: object) -> object:
            with one_write:
                return method(*arguments, **named)

        return locked

    responses = moto.s3.responses.S3Response
    get_object = responses.get_object

    def counted(self: Any, *arguments: object, **named: object) -> object:
        if reads is not None:
            with counting:
                reads[self.path.removeprefix(f"/{bucket}/")] += 1
        return get_object(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(responses, "put_object", in_turn(responses.put_object))
        patch.setattr(responses, "_key_response_post", in_turn(responses._key_response_post))
        patch.setattr(responses, "get_object", counted)
        server = ThreadedMotoServer(ip_address=address, port=port, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        s3fs.S3FileSystem(key="test", secret="test", endpoint_url=endpoint, skip_instance_cache=True).mkdir(bucket)
        yield endpoint
        server.stop()


def use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the usual AWS variables, so that clients reach only this server."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
