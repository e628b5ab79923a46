"""Tests access to a Ray cluster: a missing or wrong token, and a machine without a Ray node, are refused at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rollflow.flows.ray_cluster.ray_head import RayHead
from tests.support.certificates import make_certificates
from tests.support.waiting import RUN_SECONDS

pytestmark = pytest.mark.slow

ASK = """
import json, os, sys, time
from rollflow.flows.ray_cluster import cluster, ray_access
from rollflow.flows.services.reachability import check_ray
from rollflow.storage.errors import RollflowError

address, verb = sys.argv[1:]
if verb == "strange":  # as if no node of it ran here
    ray_access._local_nodes = lambda: {"another cluster's"}
began = time.monotonic()
try:
    check_ray(address)
    if verb == "attach":
        with cluster.attached_cluster(address, "access"):
            said = f"{len(cluster.list_nodes())} nodes"
    else:
        ray_access.check_membership(address)
        said = "member"
except RollflowError as error:
    said = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""
CURE = "set RAY_AUTH_MODE=token, and set RAY_AUTH_TOKEN_PATH to a file with the cluster's token"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """Yield a cluster with a token."""
    with RayHead(tmp_path_factory.mktemp("ray"), cpus=1) as head:
        yield head


def ask(head: RayHead, verb: str, environment: Mapping[str, str]) -> str:
    """Return the head's answer to a new process with this environment, which Ray reads at import."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", ASK, head.address, verb],
        env=kept | loopback | dict(environment),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    print(f"{verb}: {time.monotonic() - began:.1f} s")
    return str(json.loads(done.stdout.splitlines()[-1]))


def test_ray_cluster_token_grants_access(head: RayHead) -> None:
    assert ask(head, "attach", head.env) == "1 nodes"
    assert ask(head, "member", head.env) == "member"


@pytest.mark.parametrize("verb", ["attach", "member"])
def test_missing_or_wrong_ray_token_is_refused(head: RayHead, verb: str, tmp_path: Path) -> None:
    without = ask(head, verb, {})
    assert without.startswith(f"ConfigError: cluster.address = '{head.address}': the cluster requires a token; {CURE}")
    wrong = ask(head, verb, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64})
    assert wrong.startswith(
        f"ConfigError: cluster.address = '{head.address}': the cluster requires another token than the token"
    )
    assert CURE in wrong
    nowhere = ask(head, verb, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")})
    assert nowhere.startswith(f"ConfigError: cluster.address = '{head.address}'")
    assert CURE in nowhere


def test_machine_outside_the_ray_cluster_is_refused(head: RayHead) -> None:
    said = ask(head, "strange", head.env)
    assert said.startswith(
        f"ConfigError: cluster.address = '{head.address}': this machine is not one of the cluster's 1"
    )
    assert said.endswith(f"ray start --address={head.address} --num-cpus=0")


def test_certificates_grant_access_to_a_tls_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = make_certificates(tmp_path / "tls").ray
    for name, value in tls.items():
        monkeypatch.setenv(name, value)
    with RayHead(tmp_path / "ray", cpus=1) as head:
        assert ask(head, "attach", head.env | tls) == "1 nodes"
        assert "for a head with TLS set RAY_USE_TLS=1" in ask(head, "attach", head.env)
