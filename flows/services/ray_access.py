"""Whether a Ray cluster lets this machine in: token, TLS, and a node of its own; asked before Ray itself is.

Ray repeats a call that was refused for a minute, and looks for a node of this machine for another, and then names
neither the token nor the node. So the head is asked once for the cluster's id and its nodes, with what this process
has: `RAY_AUTH_MODE` and its token, `RAY_USE_TLS` and its certificates.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from rollflow.storage.errors import ConfigError, Unreachable

ANSWER_SECONDS = 10.0
TOKEN_CURE = (
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the cluster's token (on its head "
    "`ray get-auth-token` prints it)"
)


def check_token(address: str) -> None:
    """Check that the head at `address` takes this process's token.

    Raises:
        ConfigError: it does not.
        Unreachable: it gives no answer.
    """
    _ask(address, nodes=False)


def check_membership(address: str) -> None:
    """Check that a driver may run on this machine: Ray needs a node on it, with or without CPUs.

    Raises:
        ConfigError: there is no node, or the head refuses.
        Unreachable: it gives no answer.
    """
    found = _ask(address, nodes=True)
    if not found & _local_nodes():
        raise ConfigError(
            f"cluster.address = {address!r}: this machine is none of the cluster's {len(found)} nodes; let it join, "
            f"without CPUs if you like: ray start --address={address} --num-cpus=0"
        )


def _ask(address: str, *, nodes: bool) -> set[str]:
    """Return the ids of the living nodes, if these are asked for."""
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
    except (RayError, RuntimeError, ValueError) as error:  # of a token that is asked for by RAY_AUTH_MODE alone
        raise ConfigError(f"cluster.address = {address!r}: {' '.join(str(error).split())}; {TOKEN_CURE}") from None


def _refusal(address: str, error: Any) -> ConfigError | Unreachable:
    """Return the error for what gRPC says."""
    import grpc

    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        which = "another token than this process has" if _has_token() else "a token"
        return ConfigError(f"cluster.address = {address!r} asks for {which}; {TOKEN_CURE}")
    return Unreachable(f"the Ray head at {address} gives no answer ({error.details()})")


def _has_token() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _local_nodes() -> set[str]:
    """Return the ids of the Ray nodes that run on this machine: a driver is connected to one of them."""
    from ray._private.services import find_node_ids

    return set(find_node_ids())
