"""Computes the metrics of a training batch that only episodes with several turns have."""

from __future__ import annotations

from collections import Counter

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.records import Outcome


def compute_turn_metrics(batch: TrajectoryBatch) -> dict[str, float]:
    """Compute the mean turns per episode, the mean sampled tokens per turn, and the share of episodes with each
    outcome.

    A batch without recorded turns has no metrics about turns. An episode counts once, however many branches it has.
    Episodes that could not be judged count only in the shares of outcomes.
    """
    every, batch = batch, batch.judged
    if (starts := batch.optional("turn_starts")) is None:
        return {}
    turns = sum(1 if found is None else len(found) for found in starts.to_pylist())
    tokens = batch.table["loss_mask"].combine_chunks().flatten().true_count
    found = {"turns": turns / batch.episodes, "turn_length": tokens / max(turns, 1)}
    if (outcomes := every.optional("outcome")) is not None:
        rows = zip(outcomes.to_pylist(), every.branches, strict=True)
        counts = Counter(outcome for outcome, is_branch in rows if outcome is not None and not is_branch)
        found |= {f"outcome_{outcome.value}": counts[outcome.value] / every.episodes for outcome in Outcome}
    return found
