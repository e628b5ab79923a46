"""A moto server on loopback that takes one write at a time.

It checks and writes a conditional PUT in two steps where S3 does it in one, so writes take turns here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import moto.s3.responses
import pytest
import s3fs
from moto.server import ThreadedMotoServer


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """The endpoint of a moto server with one bucket."""
    one_write = threading.Lock()

    def in_turn(method: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(method)
        def locked(*arguments: object, **named: object) -> object:
            with one_write:
                return method(*arguments, **named)

        return locked

    responses = moto.s3.responses.S3Response
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(responses, "put_object", in_turn(responses.put_object))
        patch.setattr(responses, "_key_response_post", in_turn(responses._key_response_post))
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        s3fs.S3FileSystem(key="test", secret="test", endpoint_url=endpoint, skip_instance_cache=True).mkdir(bucket)
        yield endpoint
        server.stop()


def use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach the server by the usual AWS variables only."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
