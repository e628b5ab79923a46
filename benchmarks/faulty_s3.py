"""Starts an S3 server that sometimes corrupts its answers, for runs of other processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.s3_server import s3_server

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
KINDS = (Fault.THROTTLE, Fault.ERROR, Fault.RESET, Fault.LOST, Fault.TRUNCATED)
SHARE = 0.02  # the fraction of all answers that are corrupted


@contextmanager
def faulty_s3(bucket: str, seed: int) -> Iterator[str]:
    """Yield the endpoint with corrupted answers. This process, which only watches the run, uses the server directly."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # at a lower level, werkzeug would print every request
    rates = dict.fromkeys(KINDS, SHARE / len(KINDS))
    with s3_server(bucket) as endpoint, FaultyProxy(endpoint, rates, seed) as proxy:
        before = {name: os.environ.get(name) for name in (*KEYS, "AWS_ENDPOINT_URL_S3")}
        os.environ |= {**KEYS, "AWS_ENDPOINT_URL_S3": endpoint}
        try:
            yield proxy.endpoint
        finally:
            print(f"  faults: {', '.join(f'{f.name} {n}' for f, n in proxy.faults.items())}", flush=True)
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
