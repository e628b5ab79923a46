"""Checks that the services in a run's config answer, by HTTP requests and sockets. Each function `check_*` returns or
raises `ConfigError` within about ten seconds. The message is one sentence with the config key, its value (without
secrets) and the fix. This module imports neither Prefect nor Ray nor MLflow.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from rollflow.flows.services.profile import prefect_setting
from rollflow.flows.services.tls import HTTP_SETTINGS, http_context, ray_context, uses_tls
from rollflow.storage.errors import ConfigError

CHECK_SECONDS = 8.0
# bytes with which a client opens an HTTP/2 connection, followed by an empty SETTINGS frame
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
SETTINGS_FRAME = 4
LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULT_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}


def redact(uri: str) -> str:
    """Return the URI without its user name, password, query and fragment."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # the text is not a valid URI, but may contain a secret
        return "<not a URI>"
    # the URI has a wrong number of slashes, so its password could not be found
    if not parts.netloc and parts.scheme.startswith(("http", "socks")):
        return f"{parts.scheme}:{parts.path.rpartition('@')[2]}"
    if not parts.scheme or not (parts.netloc or parts.query or parts.fragment):
        return uri
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def check_prefect(api_url: str) -> None:
    """Check that a Prefect API answers at `api_url`."""
    # The answer's body is checked, because Prefect's web pages answer any path with HTTP 200.
    _check_http("PREFECT_API_URL", api_url, b"true", "a Prefect API (its address ends in /api)", PREFECT_CURE)


def check_prefect_database(url: str) -> None:
    """Check that the database of a private Prefect server accepts a connection; do nothing for SQLite."""
    if not url.startswith("postgresql+asyncpg://"):
        return
    import asyncio

    from asyncpg import InterfaceError, PostgresError, connect

    async def enter() -> None:
        await (await connect(url.replace("+asyncpg", "", 1), timeout=CHECK_SECONDS)).close()

    try:
        asyncio.run(enter())
    except (OSError, TimeoutError, ValueError, InterfaceError, PostgresError) as error:
        reason = f"{error}".partition("\n")[0] or type(error).__name__
        raise ConfigError(f"--database {redact(url)!r}: {reason}; {DATABASE_CURE}") from None


DATABASE_CURE = "start the database, correct the address, or set PGPASSWORD to the password"
PREFECT_CURE = "start the Prefect server, correct the address, or unset PREFECT_API_URL to use a private server"
MLFLOW_CURE = "start the MLflow server, correct the address, or remove the address to use SQLite in the run home"
TLS_CURE = (
    "unset RAY_USE_TLS for a head without TLS, or correct RAY_TLS_CA_CERT, RAY_TLS_SERVER_CERT and RAY_TLS_SERVER_KEY"
)
RAY_CURE = (
    'start the Ray head (ray start --head), correct the address, or set the address to "auto" for a private cluster'
)


def check_mlflow(uri: str) -> None:
    """Check that an MLflow server answers at `uri`, or that the local store at `uri` can be written."""
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme in ("http", "https"):
        _check_http("tracking.uri", uri, b"OK", "an MLflow server", MLFLOW_CURE)
    elif scheme in ("sqlite", "file", ""):
        path = uri.partition(":///")[2] if scheme == "sqlite" else uri.removeprefix("file:").removeprefix("//")
        check_folder("tracking.uri", uri, Path(path).absolute().parent)
    elif scheme in DEFAULT_PORTS:
        _check_database(uri, DEFAULT_PORTS[scheme])
    elif scheme not in ("databricks", "databricks-uc"):
        raise ConfigError(
            f"tracking.uri = {redact(uri)!r} is not an address that MLflow supports; use http(s)://... or sqlite:///..."
        )


def check_ray(address: str) -> None:
    """Check that a Ray head answers at `address`; do nothing for "auto", which means a private Ray cluster."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address.startswith("ray://") or not host or not port.isdigit():
        raise ConfigError(
            f'cluster.address = {address!r} is not an address of a Ray head; write "host:port" (the port is '
            'usually 6379) or "auto"'
        )
    try:
        spoken = speaks_http2(host, int(port), seconds=CHECK_SECONDS, raising=True)
    except ssl.SSLError as error:
        raise ConfigError(
            f"cluster.address = {address!r} and RAY_USE_TLS = {os.environ['RAY_USE_TLS']!r}: TLS with the "
            f"Ray head failed ({error.reason or error}); {TLS_CURE}"
        ) from error
    except OSError as error:
        raise ConfigError(f"cluster.address = {address!r} does not answer ({_reason(error)}); {RAY_CURE}") from error
    if not spoken and uses_tls():  # the Ray head closes a connection if it does not trust the client's certificate
        raise ConfigError(
            f"cluster.address = {address!r} and RAY_USE_TLS = {os.environ['RAY_USE_TLS']!r}: the server at "
            "this address is not a Ray head, or accepts no certificate such as RAY_TLS_SERVER_CERT; "
            f"{TLS_CURE}"
        )
    if not spoken:
        raise ConfigError(
            f"cluster.address = {address!r}: the server at this address is not a Ray head without TLS; "
            f"{RAY_CURE}; for a head with TLS set RAY_USE_TLS=1 and the certificates on this machine"
        )


def check_store_reach(uri: str, address: str, nodes: Iterable[str] = ()) -> None:
    """Raise `ConfigError` if the run's store is a local folder but the Ray head or one of the cluster's `nodes` is
    another machine.
    """
    scheme, sep, _ = uri.partition("://")
    if address == "auto" or (sep and scheme != "file"):
        return
    away = [node for node in (address.rpartition(":")[0], *nodes) if not is_local(node)]
    if away:
        raise ConfigError(
            f"store.uri = {uri!r} is a folder of this machine, which {', '.join(sorted(set(away)))} of "
            f'cluster.address = {address!r} cannot read; use s3://bucket/prefix, or cluster.address = "auto"'
        )


def is_local(host: str) -> bool:
    """Return whether a host name or address belongs to this machine."""
    import psutil

    own = {one.address.partition("%")[0] for found in psutil.net_if_addrs().values() for one in found}
    try:
        return all(str(found[4][0]).partition("%")[0] in own for found in socket.getaddrinfo(host, None))
    except OSError:
        return True  # the host name does not exist, which another check reports


def http_answers(url: str, *, seconds: float) -> bool:
    """Return whether an HTTP GET of `url` succeeds."""
    try:
        with _open(url, seconds) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def speaks_http2(host: str, port: int, *, seconds: float, raising: bool = False) -> bool:
    """Return whether a server speaks HTTP/2, as a Ray head does; connect with TLS if Ray uses TLS in this process."""
    try:
        with socket.create_connection((host, port), timeout=seconds) as connection:
            peer = ray_context().wrap_socket(connection) if uses_tls() else connection
            peer.sendall(HTTP2_PREFACE)
            answer = peer.recv(9)
    except ConnectionResetError:  # the server listens, but does not speak HTTP/2
        return False
    except OSError:
        if raising:
            raise
        return False
    return len(answer) == 9 and answer[3] == SETTINGS_FRAME


def _open(url: str, seconds: float, key: str = "") -> http.client.HTTPResponse:
    # Requests to loopback must not go through a proxy from the environment.
    handlers: list[urllib.request.BaseHandler] = []
    if urlsplit(url).hostname in LOOPBACK:
        handlers.append(urllib.request.ProxyHandler({}))
    if key and url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=http_context(key, prefect_setting)))
    opener = urllib.request.build_opener(*handlers)
    response: http.client.HTTPResponse = opener.open(url, timeout=seconds)
    return response


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no answer in {CHECK_SECONDS:.0f} s"
    return cause.strerror or str(cause) if isinstance(cause, OSError) else str(cause)


def _check_http(key: str, url: str, healthy: bytes, kind: str, cure: str) -> None:
    # The URL is fetched without credentials: a health page needs none, and urllib would add them to the host name.
    shown = redact(url)
    try:
        with _open(shown.rstrip("/") + "/health", CHECK_SECONDS, key) as response:
            body = response.read(64).strip()
    except urllib.error.HTTPError as error:
        # The server works, but requires credentials; the service's own client sends them later.
        if error.code in (401, 403):
            return
        body = b""
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            cure = f"set {HTTP_SETTINGS[key][0]} to the certificates of the server's authority"
        raise ConfigError(f"{key} = {shown!r} does not answer ({_reason(error)}); {cure}") from error
    if body != healthy:
        raise ConfigError(f"{key} = {shown!r}: the server at this address is not {kind}; {cure}")


def check_folder(key: str, uri: str, folder: Path) -> None:
    """Check that a folder is writable or can be created."""
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise ConfigError(f"{key} = {redact(uri)!r} cannot be written ({nearest}); name a folder that can be written")


def _check_database(uri: str, default_port: int) -> None:
    parts = urlsplit(uri)
    try:
        socket.create_connection((parts.hostname or "localhost", parts.port or default_port), CHECK_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"tracking.uri = {redact(uri)!r} does not answer ({_reason(error)}); {MLFLOW_CURE}"
        ) from error
