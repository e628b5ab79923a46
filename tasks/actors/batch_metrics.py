"""Computes the metrics of a training batch, which are logged with the policy version trained on the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from rollflow.storage.arrow_rows import view_numbers
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.log.state import RunState
from rollflow.storage.records import Discard, Outcome
from rollflow.tasks.prompts.epochs import share_skipped
from rollflow.tasks.rollout.evaluation import safe_name
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.scorers.base import MOST_PARTS


def compute_batch_metrics(
    batch: TrajectoryBatch, commit: BatchCommitted, discards: Sequence[Discard], version: int
) -> dict[str, float]:
    """Compute the mean reward, accuracy, staleness, token counts and discards of a training batch.

    A response that could not be judged counts only in `response_tokens` and `left_out_tokens`.
    """
    every, batch = batch, batch.judged
    rewards = _read_rewards(batch)
    staleness = version - np.array(batch.table["started_version"].to_pylist())[batch.episode_rows]
    tokens = np.array([group.tokens for group in commit.groups])
    left_out = 0 if batch is every else int(tokens.sum()) - int(_count_tokens(batch).sum())
    return {
        "reward": float(rewards.mean()),
        **_compute_token_reward(batch),
        **_compute_role_rewards(batch),
        "accuracy": float(_find_correct(batch).mean()),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "response_tokens": float(tokens.sum()),
        "surplus_tokens": float(commit.surplus_tokens),
        "discarded_tokens": float(sum(d.response_tokens for d in discards)),
        **{f"discarded_{reason}": float(n) for reason, n in Counter(d.reason.value for d in discards).items()},
        "response_length": float((tokens.sum() - left_out) / batch.episodes),
        **({} if batch is every else {"left_out_tokens": float(left_out)}),
        "discarded_groups": float(len(discards)),
        **{
            f"staleness_{age}": float(count)
            for age, count in zip(*np.unique(staleness, return_counts=True), strict=True)
        },
    }


def _compute_token_reward(batch: TrajectoryBatch) -> dict[str, float]:
    """Sum the token rewards of each response, and return the mean of the sums over the batch."""
    if batch.optional("token_rewards") is None:
        return {}
    return {
        "token_reward": float((batch.episode_rewards - view_numbers(batch.table["reward"])[batch.episode_rows]).mean())
    }


def _compute_role_rewards(batch: TrajectoryBatch) -> dict[str, float]:
    """Compute the mean reward of each role, without token rewards, for at most `MOST_PARTS` roles. The reward of a role
    counts once per episode.
    """
    if batch.optional("role") is None:
        return {}
    rewards: dict[str, dict[int, float]] = {}  # role -> first row of the episode -> reward
    rows = zip(batch.roles, batch.first_rows.tolist(), batch.table["reward"].to_pylist(), strict=True)
    for role, episode, reward in rows:
        if role is not None and (role in rewards or len(rewards) < MOST_PARTS):
            rewards.setdefault(role, {})[episode] = reward
    return {f"reward_role_{safe_name(role)}": float(np.mean([*found.values()])) for role, found in rewards.items()}


def compute_domain_metrics(batch: TrajectoryBatch, domains: Collection[str]) -> dict[str, float]:
    """Compute, for each domain, the number of groups of responses in a batch and the mean of each part of the
    reward.

    In a run with several domains, the metrics of each domain include its mean reward, accuracy and response length.
    Responses that could not be judged do not count.
    """
    batch = batch.judged
    found = batch.domains
    metrics = {f"groups_{safe_name(domain)}": float(found[domain]) for domain in domains} | _compute_parts(batch)
    if len(domains) < 2:
        return metrics
    correct, rewards, lengths = _find_correct(batch), _read_rewards(batch), _count_tokens(batch)
    of_row = np.array(batch.table["domain"].to_pylist())[batch.episode_rows]
    for domain in domains:
        if (rows := of_row == domain).any():
            metrics[f"reward_{safe_name(domain)}"] = float(rewards[rows].mean())
            metrics[f"accuracy_{safe_name(domain)}"] = float(correct[rows].mean())
            metrics[f"response_length_{safe_name(domain)}"] = float(lengths[rows].mean())
    return metrics


def part_metric(domain: str, part: str) -> str:
    """Return the name of the metric for the mean of one part of the reward in a domain."""
    return f"part_{safe_name(domain)}_{safe_name(part)}"


def _compute_parts(batch: TrajectoryBatch) -> dict[str, float]:
    """Compute the mean of each part of the reward, for each domain.

    At most `MOST_PARTS` parts of the reward are included for each domain.
    """
    if (column := batch.optional("reward_parts")) is None:
        return {}
    values: dict[str, dict[str, list[float]]] = {}
    domains, parts_R = batch.table["domain"].to_pylist(), column.to_pylist()
    for domain, parts in ((domains[row], parts_R[row]) for row in batch.episode_rows):
        for part, value in parts or ():
            values.setdefault(domain, {}).setdefault(part, []).append(value)
    return {
        part_metric(domain, part): float(np.mean(of_part))
        for domain, found in values.items()
        for part, of_part in sorted(found.items(), key=lambda one: (-len(one[1]), one[0]))[:MOST_PARTS]
    }


def _count_tokens(batch: TrajectoryBatch) -> npt.NDArray[np.int64]:
    """Return, for each episode of a batch, the number of tokens that the policy sampled in all branches."""
    mask = batch.table["loss_mask"].combine_chunks()
    ends = np.cumsum(view_numbers(pc.list_value_length(mask)))
    totals = np.concatenate([[0], np.cumsum(view_numbers(mask.flatten()), dtype=np.int64)])
    counts: npt.NDArray[np.int64] = np.zeros(len(batch), np.int64)
    np.add.at(counts, batch.first_rows, np.diff(totals[np.concatenate([[0], ends])]))
    return counts[batch.episode_rows]


def compute_skip_metrics(state: RunState, config: RunConfig) -> dict[str, float]:
    """Compute, for each domain, the share of the prompts that the newest epoch skips because they are solved."""
    shares = share_skipped(state, [source.domain for source in config.prompts])
    return {f"skipped_{safe_name(domain)}": share for domain, share in shares.items()}


def _find_correct(batch: TrajectoryBatch) -> npt.NDArray[np.bool_]:
    """Return which episodes of a batch are correct.

    An episode without a recorded outcome is correct if its reward is 1.
    """
    correct: npt.NDArray[np.bool_] = _read_rewards(batch) == 1.0
    if "outcome" in batch.table.column_names:
        outcomes = batch.table["outcome"].to_pylist()
        for number, row in enumerate(batch.episode_rows):
            correct[number] = correct[number] if outcomes[row] is None else outcomes[row] == Outcome.CORRECT
    return correct


def _read_rewards(batch: TrajectoryBatch) -> npt.NDArray[np.float32]:
    """Return the reward of each episode, without its token rewards."""
    rewards: npt.NDArray[np.float32] = view_numbers(batch.table["reward"])[batch.episode_rows]
    return rewards
