"""Checks whether a Ray cluster admits this machine: whether the token and TLS are accepted, and whether the cluster has
a node on this machine. The access checks run before Ray connects, because Ray's own error comes after a minute and
names neither the token nor the node.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from rollflow.storage.errors import ConfigError, Unreachable

ANSWER_SECONDS = 10.0
TOKEN_CURE = (
    "set RAY_AUTH_MODE=token, and set RAY_AUTH_TOKEN_PATH to a file with the cluster's token (`ray "
    "get-auth-token` prints the token on the cluster's head)"
)


def check_token(address: str) -> None:
    """Check that the Ray head at `address` accepts this process's token.

    Raises:
        ConfigError: the Ray head rejects the token.
        Unreachable: the Ray head gives no answer.
    """
    _ask_head(address, nodes=False)


def check_membership(address: str) -> None:
    """Check that a Ray driver can run on this machine, which must be a node of the Ray cluster, with or without CPUs.

    Raises:
        ConfigError: the Ray cluster has no node on this machine, or its head rejects the token.
        Unreachable: the Ray head gives no answer.
    """
    found = _ask_head(address, nodes=True)
    if not found & _local_nodes():
        raise ConfigError(
            f"cluster.address = {address!r}: this machine is not one of the cluster's {len(found)} nodes; "
            f"let the machine join the cluster, without CPUs if you like: ray start --address={address} "
            "--num-cpus=0"
        )


def _ask_head(address: str, *, nodes: bool) -> set[str]:
    """Send a request to the Ray head; if `nodes` is true, return the ids of the living Ray nodes, otherwise an empty
    set.
    """
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_pb2, gcs_service_pb2, gcs_service_pb2_grpc
    from ray.exceptions import RayError

    try:
        with contextlib.closing(init_grpc_channel(address)) as channel:
            stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            known = stub.GetClusterId(gcs_service_pb2.GetClusterIdRequest(), timeout=ANSWER_SECONDS)
            if not nodes:
                return set()
            identity = [("ray_cluster_id", known.cluster_id.hex())]
            request = gcs_service_pb2.GetAllNodeInfoRequest()
            answer = stub.GetAllNodeInfo(request, timeout=ANSWER_SECONDS, metadata=identity)
            alive = gcs_pb2.GcsNodeInfo.GcsNodeState.ALIVE
            return {node.node_id.hex() for node in answer.node_info_list if node.state == alive}
    except grpc.RpcError as error:
        raise _refusal(address, error) from None
    # Ray raises these errors if, for example, RAY_AUTH_MODE requires a token and this process has none.
    except (RayError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cluster.address = {address!r}: {' '.join(str(error).split())}; {TOKEN_CURE}") from None


def _refusal(address: str, error: Any) -> ConfigError | Unreachable:
    """Return the error for a gRPC call that the Ray head at `address` refused."""
    import grpc

    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        which = "another token than the token of this process" if _has_token() else "a token"
        return ConfigError(f"cluster.address = {address!r}: the cluster requires {which}; {TOKEN_CURE}")
    return Unreachable(f"the Ray head at {address} does not answer ({error.details()})")


def _has_token() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _local_nodes() -> set[str]:
    """Return the ids of the Ray nodes on this machine; a Ray driver connects to one of these nodes."""
    from ray._private.services import find_node_ids

    return set(find_node_ids())
