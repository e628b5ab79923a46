"""The metrics of a batch, which are published with the policy version that was trained on the batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.records import Discard

UNSAFE = re.compile(r"[^\w.-]")  # characters that a metric's name may not contain


def compute_batch_metrics(
    batch: TrajectoryBatch, commit: BatchCommitted, discards: Sequence[Discard], version: int
) -> dict[str, float]:
    """Compute the metrics of a batch."""
    rewards = np.array(batch.table["reward"].to_pylist(), dtype=np.float32)
    staleness = version - np.array(batch.table["started_version"].to_pylist())
    tokens = np.array([group.tokens for group in commit.groups])
    return {
        "reward": float(rewards.mean()),
        "accuracy": float((rewards == 1.0).mean()),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "response_tokens": float(tokens.sum()),
        "surplus_tokens": float(commit.surplus_tokens),
        "discarded_tokens": float(sum(d.response_tokens for d in discards)),
        **{f"discarded_{reason}": float(n) for reason, n in Counter(d.reason.value for d in discards).items()},
        "response_length": float(tokens.sum() / len(batch)),
        "discarded_groups": float(len(discards)),
        **{
            f"staleness_{age}": float(count)
            for age, count in zip(*np.unique(staleness, return_counts=True), strict=True)
        },
    }


def count_domain_groups(batch: TrajectoryBatch, domains: Iterable[str]) -> dict[str, float]:
    """Count a batch's groups in each of the run's domains.

    Summed over many batches, the numbers of groups per domain approach the configured shares.
    """
    found = batch.domains
    return {f"groups_{UNSAFE.sub('_', domain)}": float(found[domain]) for domain in domains}
