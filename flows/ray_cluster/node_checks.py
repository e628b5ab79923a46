"""Asks every node of a Ray cluster for its packages, clock and hardware, and reports faults that would make a run fail.
A node that does not answer in time, or has no rollflow, is reported as faulty.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollflow.flows.ray_cluster import cluster
from rollflow.storage.errors import RollflowError
from rollflow.tasks.actors.node_report import NodeReport, NodeReporter, read_versions

# seconds to wait for the answer of a Ray node, enough for a worker's start and imports on a slow machine
ANSWER_SECONDS = 120.0
CLOCK_TRIES = 5
CLOCK_SECONDS = 30.0  # tolerated difference between a node's clock and this machine's clock, in seconds
GIB = 2**30
LEAST_DISK = 5 * GIB
# packages whose versions must be equal on every Ray node; other packages matter only on nodes with CPUs
EVERYWHERE = ("python", "rollflow", "ray")


@dataclass(frozen=True, slots=True)
class NodeState:
    """The state of a Ray node, as the node reported it. `clock` is the number of seconds by which the node's clock is
    ahead of this machine's clock.

    If the node did not answer, `report` is None and `silent` is the reason.
    """

    address: str
    cpus: float
    gpus: float
    report: NodeReport | None = None
    clock: float = 0.0
    silent: str = ""


def ask_nodes(store: str, runtime_env: Mapping[str, Any]) -> list[NodeState]:
    """Ask all living nodes of the connected Ray cluster for their state, in parallel."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = []
    for node in sorted(cluster.living_nodes(), key=lambda node: str(node["NodeManagerAddress"])):
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": there, **runtime_env}
        actor = ray.remote(NodeReporter).options(**options).remote()
        asked.append((node, actor, actor.report.remote(store)))
    return [_read_node(node, actor, report) for node, actor, report in asked]


def _read_node(node: Mapping[str, Any], actor: Any, report: Any) -> NodeState:
    resources = node["Resources"]
    state = NodeState(str(node["NodeManagerAddress"]), resources.get("CPU", 0.0), resources.get("GPU", 0.0))
    try:
        found = cluster.call_within(report, ANSWER_SECONDS, f"node {state.address}")
        clock = min((_measure_clock(actor) for _ in range(CLOCK_TRIES)), key=lambda offset: offset[0])[1]
        return NodeState(state.address, state.cpus, state.gpus, found, clock)
    except RollflowError as error:
        return NodeState(state.address, state.cpus, state.gpus, silent=str(error))
    finally:
        cluster.kill(actor)


def _measure_clock(actor: Any) -> tuple[float, float]:
    """Return the duration of a call to a Ray node in seconds, and a lower bound of the seconds by which the node's
    clock is ahead.
    """
    sent, began = time.time(), time.monotonic()
    there = cluster.call_within(actor.clock.remote(), ANSWER_SECONDS, "the clock of a node")
    took = time.monotonic() - began
    ahead = there - (sent + took / 2)
    return took, max(0.0, abs(ahead) - took / 2) * (1 if ahead > 0 else -1)


def find_faults(nodes: Sequence[NodeState], here: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield a sentence for each fault of a Ray node, which describes the fault and its fix.

    Args:
        here: the versions of the packages on this machine.
    """
    here = read_versions() if here is None else here
    usual = _usual_versions(nodes, here)
    for node in nodes:
        if node.report is None:
            cure = f"install rollflow {here['rollflow']} on that node, or remove the node from the cluster"
            yield f"{node.address} did not answer ({node.silent}); {cure}"
            continue
        yield from _version_faults(node, node.report, here, usual)
        if node.report.store:
            yield (f"{node.address}: {node.report.store}; give the node credentials in its own environment, or a role")
        if abs(node.clock) > CLOCK_SECONDS:
            direction = "ahead of" if node.clock > 0 else "behind"
            yield (
                f"{node.address}: the node's clock is {abs(node.clock):.0f} s {direction} this machine's clock; "
                "switch on NTP on both machines (timedatectl set-ntp true)"
            )
        if node.gpus > node.report.gpus:
            yield (
                f"{node.address}: Ray offers {node.gpus:g} GPUs, but the node has {node.report.gpus} devices "
                "(/dev/nvidia*); install the node's GPU driver, or start Ray on the node with "
                f"--num-gpus={node.report.gpus}"
            )
        if not node.report.cache:
            yield (
                f"{node.address}: the node has no folder that can be written for downloaded files; set "
                "ROLLFLOW_HOME on the node to such a folder"
            )
        elif node.report.disk < LEAST_DISK:
            yield (
                f"{node.address}: only {node.report.disk / GIB:.1f} GiB are free at {node.report.cache}, and a "
                f"run may download {LEAST_DISK // GIB} GiB; free space, or set ROLLFLOW_HOME on the node to a "
                "folder on a larger disk"
            )


def _usual_versions(nodes: Sequence[NodeState], here: Mapping[str, str]) -> dict[str, str]:
    """Return the most frequent version of each package on the nodes that may run Ray actors. If two versions are
    equally frequent, prefer this machine's version.
    """
    usual = {}
    for name in here:
        found = [node.report.versions.get(name, "") for node in nodes if node.report and node.cpus]
        counted = Counter([*found, here[name]] if here[name] in found else found)
        usual[name] = counted.most_common(1)[0][0] if counted else here[name]
    return usual


def _version_faults(
    node: NodeState, report: NodeReport, here: Mapping[str, str], usual: Mapping[str, str]
) -> Iterator[str]:
    """Yield a sentence for each package whose version on a Ray node differs from the expected version. A node without
    CPUs runs no Ray actors, so only its packages in `EVERYWHERE` are compared.
    """
    for name in here:
        wanted = here[name] if name in EVERYWHERE else usual[name]
        found = report.versions.get(name, "")
        if found != wanted and (name in EVERYWHERE or node.cpus):
            where = "here" if name in EVERYWHERE else "on most nodes"
            has, cure = found or "not installed", f"install {name} {wanted}" if wanted else f"uninstall {name}"
            yield f"{node.address}: {name} is {has}, and {wanted or 'not installed'} {where}; {cure} on the node"
