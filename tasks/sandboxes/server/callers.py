"""Checks the token of an HTTP request, and reads the request's body within limits."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from dataclasses import dataclass, field

from fastapi import Request

KEY_HEADERS = ("x-key", "x-api-key")  # HTTP headers in which clients of ROCK send a token


class TooLarge(Exception):
    """Raised if the body of a request is too large."""


class TooSlow(Exception):
    """Raised if the body of a request arrives too slowly."""


@dataclass(frozen=True)
class Refusal:
    """The HTTP status and the reason with which a request is rejected before its body is read."""

    status: int
    reason: str
    headers: dict[str, str] = field(default_factory=dict)


def refuse_caller(request: Request, token: str | None) -> Refusal | None:
    """Return a refusal if the request lacks the server's token, or comes from a web page to a server without a token;
    otherwise return None.
    """
    if token is None:
        page = "a web page sent the request; pages may not run programs"
        return Refusal(403, page) if "origin" in request.headers else None
    keys = [request.headers.get(name, "") for name in KEY_HEADERS]
    if has_token(request.headers.get("authorization", ""), token) or any(is_token(key, token) for key in keys):
        return None
    reason = "the request has no valid token; send it as Authorization: Bearer TOKEN"
    return Refusal(401, reason, {"WWW-Authenticate": "Bearer"})


def has_token(header: str, token: str) -> bool:
    """Return whether an Authorization header contains the token, as Bearer or as the password of Basic."""
    kind, _, value = header.partition(" ")
    if kind.lower() == "basic":
        try:
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return False
    elif kind.lower() != "bearer":
        return False
    return is_token(value, token)


def is_token(value: str, token: str) -> bool:
    """Return whether a text equals the token, comparing in constant time."""
    return hmac.compare_digest(value.strip().encode(), token.encode())


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """Read a body.

    Raises:
        TooLarge: the request's body has more than `most` bytes.
        TooSlow: the request's body was not complete after `seconds`.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise TooLarge(f"the body of the request has more than {most} bytes")
    except TimeoutError:
        raise TooSlow(f"the body of the request was not complete after {seconds:g} s") from None
    return bytes(data)
