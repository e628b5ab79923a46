"""The metrics of a batch, which are published with the policy version that was trained on the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.records import Discard, Outcome
from rollflow.tasks.rollout.evaluation import safe_name


def compute_batch_metrics(
    batch: TrajectoryBatch, commit: BatchCommitted, discards: Sequence[Discard], version: int
) -> dict[str, float]:
    """Compute the metrics of a batch."""
    rewards = np.array(batch.table["reward"].to_pylist(), dtype=np.float32)
    staleness = version - np.array(batch.table["started_version"].to_pylist())
    tokens = np.array([group.tokens for group in commit.groups])
    return {
        "reward": float(rewards.mean()),
        "accuracy": float(_find_correct(batch).mean()),
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


def compute_domain_metrics(batch: TrajectoryBatch, domains: Collection[str]) -> dict[str, float]:
    """Compute each domain's number of groups in a batch and, with several domains, its mean reward and accuracy.

    Summed over many batches, the numbers of groups per domain approach the configured shares. A domain without a group
    in the batch has no reward and no accuracy.
    """
    found = batch.domains
    metrics = {f"groups_{safe_name(domain)}": float(found[domain]) for domain in domains}
    if len(domains) < 2:
        return metrics
    correct, rewards = _find_correct(batch), batch.table["reward"].to_numpy()
    of_row = np.array(batch.table["domain"].to_pylist())
    for domain in domains:
        if (rows := of_row == domain).any():
            metrics[f"reward_{safe_name(domain)}"] = float(rewards[rows].mean())
            metrics[f"accuracy_{safe_name(domain)}"] = float(correct[rows].mean())
    return metrics


def _find_correct(batch: TrajectoryBatch) -> npt.NDArray[np.bool_]:
    """Return which rows are correct: by their outcome or, in rows without an outcome, by a reward of 1."""
    correct: npt.NDArray[np.bool_] = np.array(batch.table["reward"].to_pylist(), dtype=np.float32) == 1.0
    if "outcome" in batch.table.column_names:
        for row, outcome in enumerate(batch.table["outcome"].to_pylist()):
            correct[row] = correct[row] if outcome is None else outcome == Outcome.CORRECT
    return correct
