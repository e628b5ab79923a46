"""Encodes, sends and receives the messages between rollflow and the worker processes of an environment. A message is a
JSON object in one line or one packet."""

from __future__ import annotations

import array
import json
import socket
from typing import Any

MARK = "ROLLFLOW_GUEST"  # environment variable that marks all worker processes of one environment
LONGEST_LINE = 1 << 24  # largest number of bytes of a message on an episode's socket
LONGEST_PACKET = 1 << 16  # largest number of bytes of a message on the control socket
LONGEST_TEXT = 1 << 20  # largest number of characters of an observation or of a tool's result
LONGEST_ERROR = 500  # largest number of characters of an error message
LARGEST_SNAPSHOT = 1 << 23  # largest number of bytes of a snapshot

Fields = dict[str, Any]


class EnvironmentFault(Exception):
    """Raised if an environment must be corrected by its user, because no policy can have caused the error."""


def pack_line(fields: Fields) -> bytes:
    """Return a message as a line."""
    return json.dumps(fields).encode() + b"\n"


def pack_packet(fields: Fields) -> bytes:
    """Return a message as a packet."""
    return json.dumps(fields).encode()


def send_packet(connection: socket.socket, fields: Fields, fds: tuple[int, ...] = ()) -> None:
    """Send a packet with file descriptors."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([pack_packet(fields)], rights)


def receive_packet(connection: socket.socket) -> tuple[Fields, list[int]]:
    """Receive a packet with at most one file descriptor.

    Raises:
        EOFError: the process at the other end is gone.
    """
    data, ancillary, _, _ = connection.recvmsg(LONGEST_PACKET, socket.CMSG_SPACE(array.array("i", [0]).itemsize))
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content)
    if not data:
        raise EOFError
    return json.loads(data), list(fds)


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an error in one line."""
    said = " ".join(str(error).split())
    return (type(error).__name__ + (": " + said if said else ""))[:LONGEST_ERROR]
