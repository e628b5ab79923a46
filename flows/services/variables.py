"""Checks the environment variables and resource limits of a command before it starts, and corrects a few of them.

* Requests to loopback addresses bypass HTTP proxies, in this process and in its child processes.
* An environment variable that would make a service fail raises `ConfigError`, which contains the variable, its value
  and the fix.
* A private Prefect server or Ray cluster ignores the environment variables for the user's own server or cluster
  (`drop_settings`).

Importing this module imports neither Prefect nor Ray nor MLflow.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from rollflow.flows.services.reachability import LOOPBACK, redact
from rollflow.storage.errors import ConfigError

PROXIES = tuple(name for proxy in ("http_proxy", "https_proxy", "all_proxy") for name in (proxy, proxy.upper()))
SOCKS = ("socks5", "socks5h")
SOCKET_PATH_BYTES = 107  # largest length in bytes of the path of a Unix socket
# largest length in bytes of TMPDIR that leaves enough room for the names of vLLM's sockets, which are the longest
LONGEST_TMPDIR = SOCKET_PATH_BYTES - len("/01234567-0123-0123-0123-0123456789ab")
OWN_PREFECT = ("PREFECT_API_", "PREFECT_SERVER_", "PREFECT_PROFILE", "PREFECT_CLIENT_CUSTOM_HEADERS")
OWN_RAY = (
    *("RAY_ADDRESS", "RAY_AUTH_", "RAY_NAMESPACE", "RAY_RUNTIME_ENV", "RAY_JOB_", "RAY_TMPDIR", "RAY_CLIENT_MODE"),
    *("RAY_USE_TLS", "RAY_TLS_"),
)
NEEDED_FILES, WANTED_FILES = 256, 65536


def check_variables() -> None:
    """Check the environment variables and resource limits that the services of a command inherit.

    Raises:
        ConfigError: an environment variable or a limit would make a service fail.
    """
    _check_encoding()
    _check_proxies()
    _check_temporary_folder()
    _raise_open_files()
    _check_warnings()


def create_home(home: Path) -> None:
    """Create the run home (rollflow's folder of local files) if it does not exist, and check that it is writable.

    Raises:
        ConfigError: the run home is not writable.
    """
    default = "" if os.environ.get("ROLLFLOW_HOME") else " (by default)"
    try:
        home.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=home).close()
    except OSError as error:
        reason = error.strerror or str(error)
        cure = "set ROLLFLOW_HOME to a folder that can be written"
        raise ConfigError(f"ROLLFLOW_HOME = {str(home)!r}{default} cannot be written ({reason}); {cure}") from None


def bypass_proxies(environment: MutableMapping[str, str]) -> None:
    """Add the loopback addresses to `NO_PROXY`, which all libraries used here obey, if a proxy is set."""
    if not any(environment.get(name) for name in PROXIES):
        return
    given = f"{environment.get('no_proxy', '')},{environment.get('NO_PROXY', '')}".split(",")
    hosts = [host for host in map(str.strip, given) if host and _is_readable(host)]
    value = "*" if "*" in hosts else ",".join(dict.fromkeys([*hosts, *LOOPBACK]))
    environment.update({"no_proxy": value, "NO_PROXY": value})


def give_home(environment: MutableMapping[str, str], folder: Path) -> None:
    """Set `HOME` to `folder` for a user without a home, because Prefect does not start without `HOME`."""
    if os.path.expanduser("~") == "~":
        environment["HOME"] = str(folder)


def drop_settings(environment: MutableMapping[str, str], meant_for: tuple[str, ...]) -> None:
    """Remove the environment variables for the user's own service (`OWN_PREFECT` or `OWN_RAY`), because this command
    uses a private service.
    """
    for name in [name for name in environment if name.startswith(meant_for)]:
        del environment[name]


def short_folders() -> Iterator[Path]:
    """Yield writable folders for temporary files: first the user's own, then the system's, whose paths are short."""
    for folder in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")):
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            yield Path(folder)


def _is_readable(host: str) -> bool:
    """Return whether httpx can parse an entry of the environment variable `NO_PROXY`."""
    if host.count(":") < 2 or "://" in host:
        return True
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _check_encoding() -> None:
    """Raise `ConfigError` if Python would not use UTF-8 for file names and files under the current locale."""
    if sys.getfilesystemencoding() == "utf-8":
        return
    name = next((name for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)), "LC_ALL")
    utf8 = "".join(f" with PYTHONUTF8 = {value!r}" for value in [os.environ.get("PYTHONUTF8")] if value)
    raise ConfigError(
        f"{name} = {os.environ.get(name, '')!r}{utf8}: Python would read files as {sys.getfilesystemencoding()} "
        "instead of UTF-8; set PYTHONUTF8=1, or choose a locale with UTF-8"
    )


def _check_proxies() -> None:
    for name in PROXIES:
        if not (value := os.environ.get(name)):
            continue
        url = value if "://" in value else f"http://{value}"
        try:
            scheme, host, _ = urlsplit(url).scheme, urlsplit(url).hostname, urlsplit(url).port
        except ValueError:
            scheme, host = "", None
        shown = f"{name} = {redact(url)!r}"
        if scheme not in ("http", "https", *SOCKS) or not host or any(letter.isspace() for letter in url):
            raise ConfigError(f"{shown} is not an address of a proxy; write http://host:port, or unset {name}")
        if scheme in SOCKS and find_spec("socksio") is None:
            cure = f"install the package (pip install socksio), or unset {name}"
            raise ConfigError(f"{shown} is a SOCKS proxy, which needs the Python package socksio; {cure}")


def _check_temporary_folder() -> None:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        given = os.environ.get("TMPDIR", "")
        raise ConfigError(
            f"TMPDIR = {given!r}, and every other folder for temporary files, cannot be written; set TMPDIR "
            "to a folder that can be written"
        ) from None
    if len(os.fsencode(folder)) > LONGEST_TMPDIR:
        raise ConfigError(
            f"TMPDIR = {folder!r} has {len(os.fsencode(folder))} bytes, so the paths of sockets in this "
            f"folder would be too long; set TMPDIR to a folder of at most {LONGEST_TMPDIR} bytes, such as "
            "/tmp"
        )


def _raise_open_files() -> None:
    """Raise the limit on open files of this process and its children as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < NEEDED_FILES:
        raise ConfigError(
            f"ulimit -n = {allowed}: each service of a run needs up to {NEEDED_FILES} open files; raise the "
            f"limit (ulimit -Hn {WANTED_FILES}, as root, or in limits.conf)"
        )


def _check_warnings() -> None:
    given = os.environ.get("PYTHONWARNINGS", "")
    actions = (item.strip().partition(":")[0] for item in given.split(","))
    if any(action and "error".startswith(action) for action in actions):
        raise ConfigError(
            f"PYTHONWARNINGS = {given!r} turns warnings of Prefect, Ray and torch into errors; unset PYTHONWARNINGS"
        )
