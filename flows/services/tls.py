"""Reads the TLS settings for the user's own Ray cluster, Prefect server and MLflow server, and reports errors in the
settings.

    Ray      RAY_USE_TLS, RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT
    Prefect  PREFECT_API_SSL_CERT_FILE, PREFECT_API_TLS_INSECURE_SKIP_VERIFY (also in a Prefect profile)
    MLflow   MLFLOW_TRACKING_SERVER_CERT_PATH, MLFLOW_TRACKING_INSECURE_TLS

This module imports no service's library; each library reads the same settings itself.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

from rollflow.storage.errors import ConfigError

RAY_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
# setting with an address -> settings for its TLS: a file of certificates, and a switch that disables verification
HTTP_SETTINGS = {
    "PREFECT_API_URL": ("PREFECT_API_SSL_CERT_FILE", "PREFECT_API_TLS_INSECURE_SKIP_VERIFY"),
    "tracking.uri": ("MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_INSECURE_TLS"),
}
YES = ("1", "true", "yes", "on", "t", "y")


def uses_tls(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether Ray uses TLS in a process with the given environment variables."""
    return environment.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def ray_context() -> ssl.SSLContext:
    """Return the SSL context for connections to a Ray cluster.

    Raises:
        ConfigError: an environment variable is missing, or the file that it names cannot be used.
    """
    for name in RAY_FILES:
        if not (path := os.environ.get(name)):
            raise ConfigError(
                f"RAY_USE_TLS = {os.environ['RAY_USE_TLS']!r}, but {name} is not set; set {name} to a PEM file"
            )
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{name} = {path!r} cannot be read; set {name} to a PEM file")
    certificate, key, authority = (os.environ[name] for name in RAY_FILES)
    try:
        context = ssl.create_default_context(cafile=authority)
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ConfigError(
            f"the TLS files in {', '.join(RAY_FILES)} cannot be used ({error.reason or error}); give a "
            "certificate, its key and the certificate of its authority"
        ) from None
    context.set_alpn_protocols(["h2"])
    # Like Ray, verify the certificate's authority but not the host name, because Ray nodes have addresses and no names.
    context.check_hostname = False
    return context


def http_context(key: str, setting: Callable[[str], str]) -> ssl.SSLContext:
    """Return the SSL context for requests to an HTTPS address; `key` is the setting that contains the address.

    Args:
        setting: a function that returns the value of a setting, or "" if it is not set.

    Raises:
        ConfigError: the files of certificates cannot be read.
    """
    file, switch = HTTP_SETTINGS[key]
    if setting(switch).lower() in YES:
        return ssl._create_unverified_context()
    path = setting(file)
    try:
        folder = path if path and Path(path).is_dir() else None
        return ssl.create_default_context(cafile=None if folder else path or None, capath=folder)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{file} = {path!r} contains no valid certificates ({error.strerror or error}); name a file with "
            "certificates"
        ) from None
