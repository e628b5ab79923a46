"""Sends and receives the messages between the process that creates sandboxes and the processes in a container. A
message consists of a JSON header, a body and file descriptors.
"""

from __future__ import annotations

import enum
import errno
import json
import os
import socket
import stat
import struct
from typing import Any

LENGTHS = struct.Struct("!II")  # length of the JSON header and length of the body, in bytes
CHUNK = 65536
# answer to an order: error number or 0, ids of the first process and the program, descriptors of channel and 3 pipes
STARTED = struct.Struct("=7i")
WARM = b"1"  # sent by a forked program that is ready for its request
LONGEST_TEXT = 1024  # largest number of bytes of an error's text


class Order(enum.Enum):
    """What the supervising process of a sandbox orders from the process that forks programs."""

    RENEW = b"r"  # fork a program in a new process namespace with a new folder
    EMPTY = b"e"  # fork a program in a new process namespace, and keep the folder
    FORK = b"f"  # fork a program in the same process namespace


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return a message as bytes."""
    return pack_text(json.dumps(header).encode(), body)


def pack_text(text: bytes, body: bytes = b"") -> bytes:
    """Return a message as bytes; `text` is its header in JSON."""
    return LENGTHS.pack(len(text), len(body)) + text + body


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes, list[int]]:
    """Receive a message as its header, body and file descriptors; exit this process if the peer is gone."""
    text, body, fds = receive_text(connection)
    return json.loads(text), body, fds


def receive_text(connection: socket.socket) -> tuple[bytes, bytes, list[int]]:
    """Receive a message as its header in JSON, body and file descriptors; exit this process if the peer is gone."""
    data, fds, _, _ = socket.recv_fds(connection, LENGTHS.size, 1)
    data += read_exactly(connection, LENGTHS.size - len(data))
    header, body = LENGTHS.unpack(data)
    return read_exactly(connection, header), read_exactly(connection, body), list(fds)


def read_regular_file(fd: int, most: int) -> bytes:
    """Read and close an open file; raise `OSError` if it is not a regular file or has more than `most` bytes."""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "the path does not name a regular file")
        data = bytearray()
        while part := os.read(fd, 16 * CHUNK):
            data += part
            if len(data) > most:
                raise OSError(errno.EFBIG, "the file is too large to be sent")
        return bytes(data)
    finally:
        os.close(fd)


def read_exactly(connection: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes from a socket; exit this process if the peer is gone."""
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), 16 * CHUNK))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)
