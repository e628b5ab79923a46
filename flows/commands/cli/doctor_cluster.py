"""Implements `rollflow doctor --cluster [RECIPE]`, which asks every node of a Ray cluster whether a run can use the
node.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Column, Table

from rollflow.flows.commands.cli.exit_codes import FAILED, OK
from rollflow.flows.config import load_recipe, override_config
from rollflow.flows.locations import store_uri
from rollflow.flows.ray_cluster import cluster
from rollflow.flows.ray_cluster.node_checks import GIB, NodeState, ask_nodes, find_faults
from rollflow.flows.ray_cluster.ray_access import check_membership
from rollflow.flows.services.reachability import check_ray, check_store_reach
from rollflow.storage.errors import ConfigError
from rollflow.tasks.actors.placement import runtime_env
from rollflow.tasks.run.config import RunConfig


def command(options: argparse.Namespace) -> int:
    """Check the nodes of the Ray cluster. Print a table row for each node and a sentence for each fault that was
    found.
    """
    config = _config(options)
    address, store = config.cluster.address, store_uri(config)
    if address == "auto":
        raise ConfigError(
            'cluster.address = "auto" means a private cluster on this machine, which `rollflow doctor` checks; to '
            "check another cluster, give its address with --set cluster.address=HOST:PORT"
        )
    check_ray(address)
    check_membership(address)
    with cluster.attached_cluster(address, "doctor"):
        check_store_reach(store, address, cluster.list_nodes())
        nodes = ask_nodes(store, runtime_env(config))
    faults = list(find_faults(nodes))
    if options.json:
        print(json.dumps({"nodes": [asdict(node) for node in nodes], "faults": faults}))
    else:
        print_nodes(nodes, faults)
    return FAILED if faults else OK


def _config(options: argparse.Namespace) -> RunConfig:
    """Return the configuration of the recipe that the user names, or the default configuration."""
    overrides = [*getattr(getattr(options, "settings", None), "overrides", ()), *options.set]
    return load_recipe(options.cluster, overrides) if options.cluster.name else override_config({}, overrides)


def print_nodes(nodes: Sequence[NodeState], faults: Sequence[str], console: Console | None = None) -> None:
    """Print a table of the cluster's nodes, and below the table the faults that were found."""
    console = console or Console(highlight=False)
    table = Table(
        Column("node", no_wrap=True, overflow="ignore"),
        "CPUs",
        "GPUs",
        Column("store", no_wrap=True, overflow="ignore"),
        "rollflow",
        "ray",
        "torch",
        "vllm",
        "clock",
        "disk free",
        box=None,
    )
    for node in nodes:
        table.add_row(node.address, f"{node.cpus:g}", f"{node.gpus:g}", *_cells(node))
    console.print(table)
    for fault in faults:
        console.print(f"✗ {fault}", style="bold red", markup=False, soft_wrap=True)
    if not faults:
        console.print(
            f"✓ a run can work on {'each of the ' if len(nodes) > 1 else ''}{len(nodes)} nodes", style="green"
        )


def _cells(node: NodeState) -> list[str]:
    report = node.report
    if report is None:
        return ["no answer", *[""] * 6]
    versions = [report.versions.get(name) or "-" for name in ("rollflow", "ray", "torch", "vllm")]
    store = "fails" if report.store else "ok"
    return [store, *versions, f"{node.clock:+.1f} s", f"{report.disk / GIB:.0f} GiB"]
