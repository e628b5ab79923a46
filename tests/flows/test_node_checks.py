"""Tests that `rollflow doctor --cluster` prints a sentence with a fix for each fault of a node, and none for a healthy
cluster.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.cli.doctor_cluster import print_nodes
from rollflow.flows.ray_cluster.node_checks import NodeState, find_faults
from rollflow.flows.ray_cluster.ray_head import RayHead, RayNode
from rollflow.flows.services.process import free_port
from rollflow.tasks.actors.node_report import NodeReport, NodeReporter, read_versions
from tests.support.waiting import RUN_SECONDS

HERE = {"python": "3.11.9", "rollflow": "0.4", "ray": "2.60", "torch": "2.13", "vllm": "0.20", "pyarrow": "25"}
REPORT = NodeReport("a", HERE, gpus=2, disk=50 << 30, cache="/home/a/fetched", store="")
SOUND = NodeState("10.0.0.1", 8.0, 2.0, REPORT, clock=0.2)


def other(**changes: Any) -> NodeState:
    """Build a second node with another report."""
    return dataclasses.replace(SOUND, address="10.0.0.2", report=dataclasses.replace(REPORT, **changes))


def versions(**changes: str) -> NodeState:
    return other(versions=HERE | changes)


def test_healthy_cluster_has_no_faults() -> None:
    assert list(find_faults([SOUND, other()], HERE)) == []


FAULTS: list[tuple[NodeState, str]] = [
    (versions(rollflow="0.3"), "10.0.0.2: rollflow is 0.3, and 0.4 here; install rollflow 0.4 on the node"),
    (versions(python="3.12.1"), "10.0.0.2: python is 3.12.1, and 3.11.9 here; install python 3.11.9 on the node"),
    (versions(pyarrow=""), "10.0.0.2: pyarrow is not installed, and 25 on most nodes; install pyarrow 25 on the node"),
    (versions(vllm="0.19"), "10.0.0.2: vllm is 0.19, and 0.20 on most nodes; install vllm 0.20 on the node"),
    (
        other(store="store.uri = 's3://b' cannot be reached (timeout); check AWS_REGION"),
        "10.0.0.2: store.uri = 's3://b' cannot be reached (timeout); check AWS_REGION; give the node "
        "credentials in its own environment, or a role",
    ),
    (
        dataclasses.replace(other(), clock=-90.0),
        "10.0.0.2: the node's clock is 90 s behind this machine's clock; switch on NTP on both "
        "machines (timedatectl set-ntp true)",
    ),
    (
        other(gpus=0),
        "10.0.0.2: Ray offers 2 GPUs, but the node has 0 devices (/dev/nvidia*); install the node's GPU driver, or "
        "start Ray on the node with --num-gpus=0",
    ),
    (
        other(disk=1 << 30),
        "10.0.0.2: only 1.0 GiB are free at /home/a/fetched, and a run may download 5 GiB; free space, or set "
        "ROLLFLOW_HOME on the node to a folder on a larger disk",
    ),
    (
        other(cache="", disk=0),
        "10.0.0.2: the node has no folder that can be written for downloaded files; set ROLLFLOW_HOME on "
        "the node to such a folder",
    ),
    (
        dataclasses.replace(other(), report=None, silent="waited 120 s for node 10.0.0.2"),
        "10.0.0.2 did not answer (waited 120 s for node 10.0.0.2); install rollflow 0.4 on that node, or "
        "remove the node from the cluster",
    ),
]


@pytest.mark.parametrize(("node", "sentence"), FAULTS, ids=[sentence[:40] for _, sentence in FAULTS])
def test_each_node_fault_gets_a_one_sentence_error(node: NodeState, sentence: str) -> None:
    assert list(find_faults([SOUND, node, dataclasses.replace(SOUND, address="10.0.0.3")], HERE)) == [sentence]


def test_cluster_check_accepts_nodes_without_cpus_and_vllm() -> None:
    host = dataclasses.replace(versions(vllm="", torch=""), cpus=0.0, gpus=0.0)
    assert list(find_faults([SOUND, host], HERE)) == []


def test_cluster_check_accepts_a_local_machine_without_vllm() -> None:
    assert list(find_faults([SOUND, other()], HERE | {"vllm": "", "torch": "2.13+cpu"})) == []


def test_cluster_check_table_has_a_row_for_each_node(capsys: pytest.CaptureFixture[str]) -> None:
    silent = dataclasses.replace(SOUND, address="10.0.0.9", report=None, silent="no")
    # a long address, which a narrow terminal must show in full
    far = dataclasses.replace(SOUND, address="192.168.100.101")
    print_nodes([SOUND, silent, far], ["10.0.0.9 did not answer"], Console(width=80))
    shown = capsys.readouterr().out
    assert "10.0.0.1 " in shown
    assert "192.168.100.101 " in shown
    assert "no answer" in shown
    assert shown.rstrip().endswith("✗ 10.0.0.9 did not answer")


def test_node_report_has_store_and_package_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    found = NodeReporter().report(str(tmp_path / "store"))
    assert found.store == ""
    assert found.versions == read_versions()
    assert found.cache.startswith(str(tmp_path / "home"))
    (tmp_path / "file").touch()
    assert "cannot be written" in NodeReporter().report(str(tmp_path / "file/store")).store
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "file/home"))
    assert NodeReporter().report(str(tmp_path / "store")).cache == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], 'cluster.address = "auto" means a private cluster on this machine'),
        (["--set", "cluster.address=ray://x"], "cluster.address = 'ray://x' is not an address of a Ray head"),
        (["--set", f"cluster.address=127.0.0.1:{free_port()}"], "does not answer (Connection refused)"),
    ],
)
def test_unreachable_cluster_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--cluster", *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.slow
def test_every_node_of_a_real_cluster_is_checked(tmp_path: Path) -> None:
    head = RayHead(tmp_path / "ray", cpus=1)

    def doctor(store: str) -> Any:
        environment = {**os.environ, **head.env, "ROLLFLOW_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "rollflow.flows.commands.cli", "doctor", "--cluster", "--json"]
        settings = ["--set", f"cluster.address={head.address}", "--set", f"store.uri={store}"]
        done = subprocess.run(
            [*command, *settings], env=environment, capture_output=True, text=True, timeout=RUN_SECONDS
        )
        assert done.returncode in (0, 1), done.stderr
        return done.returncode, json.loads(done.stdout)

    with head, RayNode(head, cpus=0) as _:
        code, found = doctor(str(tmp_path / "store"))
        assert (code, found["faults"]) == (0, [])
        assert sorted(node["cpus"] for node in found["nodes"]) == [0.0, 1.0]
        assert all(abs(node["clock"]) < RUN_SECONDS for node in found["nodes"])
        code, found = doctor("s3://nobody/store")
    assert code == 1
    assert len(found["faults"]) == 2
    assert all("store.uri = 's3://nobody/store'" in fault for fault in found["faults"])
