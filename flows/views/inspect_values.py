"""Collects the information that `rollflow inspect` shows, as JSON (`--json`) or in tables."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from typing import Any

from rollflow.flows.views.config_history import list_changes, shown_changes
from rollflow.flows.views.frames.page_frames import place_page_frames
from rollflow.flows.views.turns import choose_episodes, prompt_tokens, split_turns, write_episode
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError, RollflowError
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.log.lineage import AwaitingTraining, Consumed, Fate, list_fates
from rollflow.storage.optional_columns import NAMES
from rollflow.storage.policies import PolicyVersion
from rollflow.storage.records import Cursor, GroupKey, StoredObject, Trajectory, TrajectoryGroup
from rollflow.storage.run_records.environment_figures import read_environment_uses
from rollflow.storage.run_records.episode_restarts import read_restarts
from rollflow.storage.run_records.recoveries import RecoveryLog
from rollflow.storage.run_records.sandbox_figures import list_figures, read_sandbox_uses
from rollflow.tasks.run.context import RunContext

MOST_REWARDS = 8  # largest number of token rewards of a response that are shown


def run_value(context: RunContext) -> dict[str, Any]:
    """Return the state of a run as JSON values, read from the run's log."""
    state = context.log.state
    return {
        "run": context.run_id,
        "uri": context.uri,
        "version": state.version,
        "versions": context.config.versions,
        "entries": state.n + 1,
        "batches": state.next_batch - len(state.holes),
        "waiting": sorted(state.waiting),
        "holes": list(state.holes),
        "quarantined": state.voids,
        "trajectories": state.totals.rows,
        "groups": dict(state.totals.groups),
        "tokens": dict(state.totals.tokens),
        "staleness": dict(state.totals.staleness),
        "in_flight": [[key.prompt, key.attempt] for key in state.in_flight],
        "changes": [
            {"entry": one.entry, "from_version": one.version, "who": one.who, "at": one.at}
            | {"changes": {change.key: [change.before, change.after] for change in shown_changes(one)}}
            for one in list_changes(context)
        ],
        "recoveries": [asdict(recovery) for recovery in RecoveryLog(context.store).read()],
        "sandboxes": {kind: list_figures(one) for kind, one in read_sandbox_uses(context.store).totals().items()},
        "environments": read_environment_uses(context.store).totals(),
        "episode_restarts": [asdict(restart) for restart in read_restarts(context.store)],
    }


def version_value(context: RunContext, version: PolicyVersion) -> dict[str, Any]:
    """Return a policy version as JSON values, with its training batch. The returned values say which stored objects of
    the policy version still exist.
    """
    batch = context.batches.read_commit(version.batch_entry).number if version.batch_entry is not None else None
    objects = (*version.stored_weights, *version.state)
    stored = {one.path: context.store.exists(one.path) for one in objects}
    config = context.recorded_at(version.number)
    recorded = {"config_entry": config.entry, "config_sha256": config.sha256}
    return {**asdict(version), "batch": batch, "stored": stored, **recorded}


def trajectory_value(context: RunContext, prompt: int, attempt: int, sample: int | None = None) -> dict[str, Any]:
    """Return the outcome of a group of responses as JSON values. If the group of responses was committed, its
    trajectories with their texts are included. If `sample` is given, only the trajectory of this number is included.

    Raises:
        ConfigError: the run has no such group of responses, or the group has no trajectory `sample`.
    """
    key, attempts = GroupKey(prompt, attempt), list_fates(context.log, prompt)
    check_key(key, attempts, context.log.state.cursor)
    fate = attempts[key]
    value = {"prompt": prompt, "attempt": attempt, "fate": str(fate)}
    if not isinstance(fate, Consumed | AwaitingTraining):
        return {**value, "trajectories": []}
    trajectories = trajectories_of(context, key, batch_of(context, fate), sample)
    return {**value, "trajectories": [_with_texts(context, trajectory) for trajectory in trajectories]}


def _with_texts(context: RunContext, one: Trajectory) -> dict[str, Any]:
    flat = {name: list(getattr(one, name)) for name in ("tokens", "loss_mask", "logprobs", "versions")}
    decode = context.tokenizer.decode
    chosen = [token for token, mask in zip(one.tokens, one.loss_mask, strict=True) if mask]
    texts = {"question": decode(prompt_tokens(one)), "response": decode(chosen)}
    turns = [part.value(decode) for part in split_turns(one)]
    return {**_values(one), **flat, **_optional_values(one), **texts, "turns": turns}


def _values(one: Trajectory) -> dict[str, Any]:
    found = {field.name: getattr(one, field.name) for field in fields(one) if field.name not in NAMES}
    return {**found, "reward": None} if one.left_out else found


def _optional_values(one: Trajectory) -> dict[str, Any]:
    """Return the values that only some trajectories have, as JSON values."""
    convert: dict[str, Callable[[Any], Any]] = {
        "reward_parts": dict,
        "outcome": str,
        "turn_starts": list,
        "branch": lambda branch: branch._asdict(),
        "routed_experts": list,
        "kept_tokens": lambda sets: list(map(list, sets)),
        "foreign_parts": lambda placed: [{"position": position, **asdict(part)} for position, part in placed],
        "scorer_version": str,
        "token_rewards": lambda rewards: [None if math.isnan(reward) else reward for reward in rewards],
        "turn_states": list,
        "role": str,
        "left_out": bool,
    }
    return {name: convert[name](getattr(one, name)) for name in NAMES if getattr(one, name) is not None}


def describe_token_rewards(one: Trajectory) -> str:
    """Return the first token rewards, each with its token's position among the policy's tokens, and the sum of all
    token rewards.
    """
    rewards = [value for value, mask in zip(one.token_rewards or (), one.loss_mask, strict=True) if mask]
    given = [(at, value) for at, value in enumerate(rewards) if not math.isnan(value)]
    shown = ", ".join(f"{value:g} at token {at}" for at, value in given[:MOST_REWARDS])
    hidden = f", and {len(given) - MOST_REWARDS} more" if len(given) > MOST_REWARDS else ""
    return f"{shown}{hidden} (sum {sum(value for _, value in given):g})"


def describe_spans(trajectory: Trajectory) -> str:
    """Return text that says which policy version generated which tokens of a response."""
    written = [v for v, mask in zip(trajectory.versions, trajectory.loss_mask, strict=True) if mask]
    spans, start = [], 0
    for version, run in groupby(written):
        end = start + len(list(run))
        spans.append(f"{start}-{end - 1} by version {version}" if end - start > 1 else f"{start} by version {version}")
        start = end
    return ", ".join(spans)


def trajectories_of(
    context: RunContext, key: GroupKey, batch: BatchCommitted, sample: int | None
) -> Sequence[Trajectory]:
    """Return all trajectories of a group of responses, or only trajectory number `sample`. Raise `ConfigError` if the
    trajectory number `sample` does not exist.
    """
    group = next(one for one in groups_of(context, batch.file) if one.key == key)
    chosen = [one for one in group.trajectories if sample in (None, one.sample)]
    if not chosen:
        last = max(one.sample for one in group.trajectories)
        raise ConfigError(f"attempt {key.prompt}.{key.attempt} has no sample {sample}; give one from 0 to {last}")
    return chosen


def batch_of(context: RunContext, fate: Consumed | AwaitingTraining) -> BatchCommitted:
    if isinstance(fate, AwaitingTraining):
        return context.batches.read_commit(context.log.state.waiting[fate.batch].entry)
    entry = context.policies.find(fate.version).batch_entry
    assert entry is not None, "only version 0 has no batch"
    return context.batches.read_commit(entry)


def groups_of(context: RunContext, file: StoredObject) -> list[TrajectoryGroup]:
    return TrajectoryBatch.from_bytes(context.batches.read(file)).groups()


def check_key(key: GroupKey, attempts: dict[GroupKey, Fate], cursor: Cursor) -> None:
    if key in attempts:
        return
    if attempts:
        issued = ", ".join(str(k.attempt) for k in attempts)
        raise ConfigError(
            f"prompt {key.prompt} has no attempt {key.attempt}, because it was issued only as attempt {issued}"
        )
    raise ConfigError(
        f"prompt {key.prompt} was not yet issued when the newest batch was committed; the next prompt is "
        f"{next_prompts(cursor)}"
    )


def next_prompts(cursor: Cursor) -> str:
    """Return the number of the next prompt of each prompt source, as text."""
    return " or ".join(map(str, cursor.upcoming)) or "0"


def write_newest_episodes(context: RunContext) -> str:
    """Return two episodes of the newest version's batch as Markdown: the ones with the highest and the lowest reward.

    Return "" if there is no such batch, or if it cannot be read.
    """
    with contextlib.suppress(RollflowError):  # A damaged batch does not make the run fail.
        version = context.policies.find(context.policies.newest())
        if version.batch_entry is not None:
            file = context.batches.read_commit(version.batch_entry).file
            chosen = choose_episodes(TrajectoryBatch.from_bytes(context.batches.read(file)).groups())
            texts = [
                write_episode(key, found, context.tokenizer.decode, place_page_frames(context, key, found))
                for key, found in chosen
            ]
            return "\n\n".join([f"Version {version.number}, highest and lowest reward", *texts]) if texts else ""
    return ""
