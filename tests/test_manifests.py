"""Tests of the manifests of `infra/`: kustomize builds them, objects match their schemas, and references exist.

Kubernetes' schemas come from the package kubernetes-validate. KubeRay's schema is not in this repository: to check the
Ray cluster, too, set ROLLFLOW_KUBERAY_CRD to the file `ray.io_rayclusters.yaml` of its release.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.compose import secrets
from tests.support.machines import REPOSITORY

KUBERAY = REPOSITORY / "infra" / "kuberay"
KUBERNETES = "1.33"
CRD = os.environ.get("ROLLFLOW_KUBERAY_CRD", "")
OVERLAYS = ("cpu", "gpu")

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which has kustomize, is not installed"
)


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the objects of an overlay, with secrets of `infra/secrets.sh`."""
    folder = tmp_path_factory.mktemp("kuberay") / "kuberay"
    shutil.copytree(KUBERAY, folder)
    lines = [f"{name}={value}\n" for name, value in {**secrets(), "RAY_TOKEN": "the token"}.items()]
    (folder / "base" / "secrets.env").write_text("".join(lines))
    command = ["kubectl", "kustomize", str(folder / request.param)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return [*yaml.safe_load_all(made.stdout)]


def named(objects: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """Return the one object of a kind, or of a kind and a name."""
    (found,) = (one for one in objects if one["kind"] == kind and name in ("", one["metadata"]["name"]))
    return found


def pods(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the spec of each kind of pod."""
    for one in objects:
        spec = one.get("spec", {})
        groups = [spec, spec.get("headGroupSpec", {}), *spec.get("workerGroupSpecs", ())]
        yield from (group["template"]["spec"] for group in groups if "template" in group)


def test_manifest_objects_match_kubernetes_schemas(objects: list[dict[str, Any]]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed (make install)")
    own = [one for one in objects if one["kind"] != "RayCluster"]
    assert len(own) > 8
    for one in own:
        validate.validate(one, KUBERNETES, strict=True)


def test_ray_cluster_pods_match_kubernetes_schemas(objects: list[dict[str, Any]]) -> None:
    """The pods of a RayCluster must match Kubernetes' pod schema."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed (make install)")
    for spec in pods(objects):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.skipif(
    not CRD, reason="ROLLFLOW_KUBERAY_CRD names no file (ray.io_rayclusters.yaml of KubeRay 1.6 or later)"
)
def test_ray_cluster_matches_its_schema(objects: list[dict[str, Any]]) -> None:
    import jsonschema

    versions = yaml.load(Path(CRD).read_text(), Loader=yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = (version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1")
    jsonschema.validate(named(objects, "RayCluster"), _closed(schema))


def test_secrets_and_settings_of_the_manifests_exist(objects: list[dict[str, Any]]) -> None:
    """Every key that a container reads is in a secret or config map of the overlay. No container contains a secret."""
    kept = {one["metadata"]["name"]: {*one["data"]} for one in objects if one["kind"] in ("Secret", "ConfigMap")}
    asked = set()
    for container in (container for pod in pods(objects) for container in pod["containers"]):
        assert all(source["configMapRef"]["name"] in kept for source in container.get("envFrom", ()))
        for variable in container.get("env", ()):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference:
                asked.add((reference["name"], reference["key"]))
            else:
                assert not any(word in variable["name"] for word in ("PASSWORD", "SECRET", "TOKEN")), variable
    assert {(name, key) for name, key in asked if key not in kept.get(name, ())} == set()
    assert {key for name, key in asked if name == "secrets"} == kept["secrets"] - {"RAY_TOKEN"}


def test_ray_cluster_manifest_has_the_ray_token(objects: list[dict[str, Any]]) -> None:
    options = named(objects, "RayCluster")["spec"]["authOptions"]
    kept = named(objects, "Secret", options["secretName"])["data"]["auth_token"]
    assert options["mode"] == "token"
    assert base64.b64decode(kept) == b"the token"


def test_services_of_the_manifests_select_pods(objects: list[dict[str, Any]]) -> None:
    labels = [
        one["spec"]["template"]["metadata"]["labels"] for one in objects if one["kind"] in ("Deployment", "StatefulSet")
    ]
    services = [one["spec"]["selector"] for one in objects if one["kind"] == "Service"]
    assert len(services) == 3
    assert all(any(selector.items() <= one.items() for one in labels) for selector in services)


def test_containers_of_the_manifests_have_no_privileges(objects: list[dict[str, Any]]) -> None:
    for pod in pods(objects):
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"], container["name"]


def test_kustomize_overlay_sets_images_and_gpus(objects: list[dict[str, Any]], request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["objects"]
    images = {container["image"] for pod in pods(objects) for container in pod["containers"]}
    assert images == {"postgres:17", f"registry.example.com/rollflow:{kind}"}
    groups = named(objects, "RayCluster")["spec"]["workerGroupSpecs"]
    roles = {group["groupName"]: group.get("labels", {}).get("role") for group in groups}
    assert roles == {"cpu": {"workers": None}, "gpu": {"rollout": "rollout", "train": "train"}}[kind]
    for group in groups:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert ("nvidia.com/gpu" in limits) == (kind == "gpu")


def test_ray_version_of_the_manifests_is_the_pinned_one(objects: list[dict[str, Any]]) -> None:
    pins = (REPOSITORY / "infra/constraints-cpu.txt").read_text().split()
    assert f"ray=={named(objects, 'RayCluster')['spec']['rayVersion']}" in pins


def _closed(schema: Any) -> Any:
    """Return the schema with strict validation, as a server applies it: unknown fields are refused."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if "properties" in schema and "metadata" not in schema["properties"] and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed
