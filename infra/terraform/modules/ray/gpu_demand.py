"""Reports to CloudWatch how many GPUs actors of the Ray cluster wait for, and how many they use or wait for.

    gpu_demand.py ADDRESS NAMESPACE

Requests that only a train machine can serve (bundles that ask for "train") are left out, because more rollout machines
do not help them.
"""

from __future__ import annotations

import sys

import botocore.session
from ray.autoscaler.v2.schema import ClusterStatus
from ray.autoscaler.v2.sdk import get_cluster_status


def count_gpus(status: ClusterStatus) -> dict[str, float]:
    """Return the metrics by name."""
    demands = status.resource_demands
    waiting = sum(
        bundle.bundle.get("GPU", 0.0) * bundle.count
        for demand in [*demands.placement_group_demand, *demands.ray_task_actor_demand]
        for bundle in demand.bundles_by_count
        if "train" not in bundle.bundle
    )
    used = sum(usage.used for usage in status.cluster_resource_usage if usage.resource_name == "GPU")
    return {"GpusWaiting": waiting, "GpusWanted": used + waiting}


if __name__ == "__main__":
    address, namespace = sys.argv[1:]
    metrics = [{"MetricName": name, "Value": value} for name, value in count_gpus(get_cluster_status(address)).items()]
    client = botocore.session.get_session().create_client("cloudwatch")
    client.put_metric_data(Namespace=namespace, MetricData=metrics)
