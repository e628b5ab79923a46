"""Tests TLS and tokens of a user's services: each service uses its own settings, and missing settings give a
one-sentence error.
"""

from __future__ import annotations

import contextlib
import http.server
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollflow.flows.services import profile
from rollflow.flows.services.reachability import check_mlflow, check_prefect, check_ray
from rollflow.flows.services.variables import OWN_PREFECT, OWN_RAY, drop_settings
from rollflow.storage.errors import ConfigError
from tests.support.certificates import Certificates, make_certificates

Check = Callable[[str], None]
SETTINGS: list[tuple[Check, str, str, str, bytes]] = [
    (check_prefect, "PREFECT_API_URL", "PREFECT_API_SSL_CERT_FILE", "PREFECT_API_TLS_INSECURE_SKIP_VERIFY", b"true"),
    (check_mlflow, "tracking.uri", "MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_INSECURE_TLS", b"OK"),
]
SETTINGS_FRAME = bytes(3) + b"\x04" + bytes(5)  # the first bytes that an HTTP/2 server sends


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the machine's own settings."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    for _, _, file, switch, _ in SETTINGS:
        monkeypatch.delenv(file, raising=False)
        monkeypatch.delenv(switch, raising=False)


@contextlib.contextmanager
def listening(certificates: Certificates | None, answer: bytes, *, plain_http: bool = True) -> Iterator[int]:
    """Yield a loopback server, with TLS if it has certificates; it gives the same answer on every path."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            if plain_http:
                return super().handle_one_request()
            self.rfile.read(24)  # the client's preface
            self.wfile.write(answer)
            self.close_connection = True
            return None

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign,assignment]
    if certificates:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.certificate, certificates.key)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("check", "key", "file", "switch", "healthy"), SETTINGS, ids=["prefect", "mlflow"])
def test_https_connections_use_each_services_own_settings(
    check: Check,
    key: str,
    file: str,
    switch: str,
    healthy: bytes,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with listening(certificates, healthy) as port:
        address = f"https://127.0.0.1:{port}/api"
        cure = f"{key} = .*certificate verify failed.*; set {file} to the certificates of the server's authority"
        with pytest.raises(ConfigError, match=cure):
            check(address)
        monkeypatch.setenv(file, str(certificates.authority))
        check(address)
        monkeypatch.setenv(file, str(tmp_path / "nothing"))
        with pytest.raises(ConfigError, match=f"{file} = '.*nothing' contains no valid certificates .*; name a file"):
            check(address)
        monkeypatch.delenv(file)
        monkeypatch.setenv(switch, "true")
        check(address)


def test_tls_settings_of_a_prefect_profile_are_used(certificates: Certificates, tmp_path: Path) -> None:
    (tmp_path / "profiles.toml").write_text(
        f'active = "team"\n[profiles.team]\nPREFECT_API_SSL_CERT_FILE = "{certificates.authority}"\n'
    )
    assert profile.prefect_setting("PREFECT_API_SSL_CERT_FILE") == str(certificates.authority)
    with listening(certificates, b"true") as port:
        check_prefect(f"https://127.0.0.1:{port}/api")


def test_ray_head_with_tls_needs_client_certificates(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with listening(certificates, SETTINGS_FRAME, plain_http=False) as port:
        address = f"127.0.0.1:{port}"
        with pytest.raises(
            ConfigError, match="for a head with TLS set RAY_USE_TLS=1 and the certificates on this machine"
        ):
            check_ray(address)
        for name, value in certificates.ray.items():
            monkeypatch.setenv(name, value)
        check_ray(address)
        other = make_certificates(tmp_path / "other")
        monkeypatch.setenv("RAY_TLS_CA_CERT", str(other.authority))
        with pytest.raises(
            ConfigError, match=r"TLS with the Ray head failed .*; unset RAY_USE_TLS for a head without TLS, or correct"
        ):
            check_ray(address)


def test_ray_head_without_tls_is_refused_if_tls_is_set(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in certificates.ray.items():
        monkeypatch.setenv(name, value)
    with (
        listening(None, SETTINGS_FRAME, plain_http=False) as port,
        pytest.raises(
            ConfigError,
            match=r"RAY_USE_TLS = '1': TLS with the Ray head failed .*; unset RAY_USE_TLS for a head without",
        ),
    ):
        check_ray(f"127.0.0.1:{port}")


def test_error_names_a_ray_head_that_rejects_the_certificate(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head closes the connection of a client whose certificate another authority signed, without an answer."""
    for name, value in certificates.ray.items():
        monkeypatch.setenv(name, value)
    with (
        listening(certificates, b"", plain_http=False) as port,
        pytest.raises(ConfigError, match=r"RAY_USE_TLS = '1': .*accepts no certificate such as RAY_TLS_SERVER_CERT; "),
    ):
        check_ray(f"127.0.0.1:{port}")


@pytest.mark.parametrize("name", ["RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"])
def test_error_names_missing_certificates(
    name: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in certificates.ray.items():
        monkeypatch.setenv(variable, value)
    with listening(certificates, SETTINGS_FRAME, plain_http=False) as port:
        monkeypatch.setenv(name, "/nothing.pem")
        with pytest.raises(ConfigError, match=f"{name} = '/nothing.pem' cannot be read; set .* to a PEM file"):
            check_ray(f"127.0.0.1:{port}")
        monkeypatch.delenv(name)
        with pytest.raises(ConfigError, match=f"RAY_USE_TLS = '1', but {name} is not set; set .* to a PEM file"):
            check_ray(f"127.0.0.1:{port}")


def test_private_services_ignore_tls_settings_of_other_servers() -> None:
    """A private Ray cluster has its own token and no TLS; MLflow's settings are kept."""
    given = dict.fromkeys(
        [
            *("RAY_USE_TLS", "RAY_TLS_CA_CERT", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "PREFECT_API_AUTH_STRING"),
            *("PREFECT_API_SSL_CERT_FILE", "PREFECT_API_TLS_INSECURE_SKIP_VERIFY", "MLFLOW_TRACKING_TOKEN"),
            *("MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_PASSWORD", "RAY_enable_metrics_collection"),
        ],
        "x",
    )
    own_ray, own_prefect = dict(given), dict(given)
    drop_settings(own_ray, OWN_RAY)
    drop_settings(own_prefect, OWN_PREFECT)
    assert {name for name in given if name not in own_ray} == {
        name for name in given if name.startswith(("RAY_USE", "RAY_TLS", "RAY_AUTH"))
    }
    assert {name for name in given if name not in own_prefect} == {name for name in given if name.startswith("PREFECT")}
