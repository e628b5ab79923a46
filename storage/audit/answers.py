"""Compares the trajectories of a batch file with their prompts, and with the limits of the run's config. The suffix of
an array's name gives its shape: `_R` for the rows of the batch, `_T` for the tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow.compute as pc

from rollflow.storage.audit.expected import BatchLimits
from rollflow.storage.audit.report import ViolationKind
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.model_input import PlacedPart
from rollflow.storage.records import Prompt, StopReason
from rollflow.storage.token_arrays import ANY_TOKEN

Found = tuple[ViolationKind, str]
Array = np.ndarray[Any, Any]
ENDINGS = (StopReason.STOP, StopReason.LENGTH)


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The values that an audit expects in the rows of a batch; None stands for a value that is not checked."""

    limits: BatchLimits | None = None
    prompts: Mapping[int, Prompt] | None = None  # maps the index of a prompt to the prompt
    held: frozenset[int] = frozenset()  # indices of the prompts that are held out from training
    # maps the tokens of a prompt that is held out from training to the prompt's id
    held_out: Mapping[tuple[int, ...], str] = field(default_factory=dict)
    vocabulary: int = ANY_TOKEN
    stops: frozenset[int] = frozenset()


NOT_ASKED = ExpectedRows()


@dataclass(frozen=True, slots=True)
class _Table:
    """The columns of a trajectory batch, as flat NumPy arrays."""

    index_R: Array
    length_R: Array  # length of the row in tokens
    first_R: Array  # position of each row's first token in the arrays that contain all tokens of the batch
    prompt_R: Array  # length of each row's prompt in tokens
    row_T: Array
    tokens_T: Array
    mask_T: Array
    logprobs_T: Array
    versions_T: Array
    endings: list[str]
    placed_R: list[tuple[PlacedPart, ...]]  # foreign parts, such as images, of each row

    @classmethod
    def of(cls, batch: TrajectoryBatch, prompts: Mapping[int, Prompt] | None) -> _Table:
        table = batch.table
        index, length = table["index"].to_numpy(), pc.list_value_length(table["tokens"]).to_numpy()
        first, mask = np.cumsum(length) - length, _flat(batch, "loss_mask")
        row = np.repeat(np.arange(len(length)), length)
        if prompts is None:  # if the prompts are unknown, a row's prompt is assumed to end at the policy's first token
            chosen = np.flatnonzero(mask)
            place = np.searchsorted(chosen, first)
            begins = np.append(chosen, len(mask))[place]
            given = np.minimum(begins - first, length)
        else:
            given = np.array([prompts[one].input.length for one in index.tolist()], dtype=np.int64)
        tokens, logprobs, versions = (_flat(batch, name) for name in ("tokens", "logprobs", "versions"))
        endings, placed = table["ending"].to_pylist(), batch.foreign_parts
        return cls(index, length, first, given, row, tokens, mask, logprobs, versions, endings, placed)

    @property
    def response_T(self) -> Array:
        """A mask over all tokens of the batch, which is true for tokens that are not in a prompt."""
        place: Array = np.arange(len(self.row_T)) - self.first_R[self.row_T]
        behind: Array = place >= self.prompt_R[self.row_T]
        return behind

    def row(self, row: int) -> Array:
        """Return the tokens of a row."""
        tokens: Array = self.tokens_T[self.first_R[row] : self.first_R[row] + self.length_R[row]]
        return tokens

    def list_placed(self, row: int, end: int) -> tuple[PlacedPart, ...]:
        """Return the foreign parts (such as images) of a row that begin before position `end`."""
        return tuple(placed for placed in self.placed_R[row] if placed.position < end)

    @property
    def foreign_T(self) -> Array:
        """A mask over all positions of the batch, which is true at the positions of foreign parts, such as images."""
        mask = np.zeros(len(self.row_T), bool)
        for first, row in zip(self.first_R.tolist(), self.placed_R, strict=True):
            for position, part in row:
                mask[first + position : first + position + part.length] = True
        return mask


def check_rows(batch: TrajectoryBatch, asked: ExpectedRows) -> Iterator[Found]:
    """Report rows of a batch that do not answer their prompts, or that violate limits of the run's config.

    The caller must first check with the module `rows` that all list columns of a row have the same length.
    """
    replaces = asked.limits is not None and asked.limits.replaces_prompts
    table = _Table.of(batch, None if replaces else asked.prompts)
    if asked.prompts is not None:
        wrong = list(_check_prompts(batch, table, asked.prompts, asked, replaces=replaces))
        yield from wrong
        if wrong:
            return
    yield from _check_tokens(table, asked)
    if asked.limits is not None:
        yield from _check_responses(table, asked.limits)
        yield from _check_times(batch, table, asked.limits)
        yield from _check_rewards(batch, asked.limits)


def _check_prompts(
    batch: TrajectoryBatch, table: _Table, prompts: Mapping[int, Prompt], asked: ExpectedRows, *, replaces: bool
) -> Iterator[Found]:
    """Check that each row names its prompt and begins with the prompt's tokens, and that the prompt is not held out. If
    `replaces` is true, the environment may have replaced the tokens of the prompt.
    """
    names = zip(batch.table["prompt_id"].to_pylist(), batch.table["domain"].to_pylist(), strict=True)
    reported: set[int] = set()
    for row, (index, name) in enumerate(zip(table.index_R.tolist(), names, strict=True)):
        prompt = prompts[index]
        if index in reported:
            continue  # report at most one violation for each group of responses
        if name != (prompt.id, prompt.domain):
            reported.add(index)
            yield (
                "lineage",
                f"a row of prompt {index} names the id and domain {name}, but the prompt has "
                f"{(prompt.id, prompt.domain)}",
            )
        elif not replaces and not _begins_with(table, row, prompt):
            reported.add(index)
            other = _name_other_prompt(table.row(row), asked.held_out)
            yield "lineage", f"a row of prompt {index} begins with {other} instead of the tokens of that prompt"
        elif index in asked.held:
            reported.add(index)
            yield "lineage", f"a row was trained on for prompt {index}, which is held out for evaluation"


def _begins_with(table: _Table, row: int, prompt: Prompt) -> bool:
    """Return whether a row begins with the tokens and foreign parts of a prompt."""
    begins = np.array_equal(table.row(row)[: prompt.input.length], prompt.input.flat.array)
    return begins and table.list_placed(row, prompt.input.length) == prompt.input.placed


def _name_other_prompt(tokens_T: Array, held_out: Mapping[tuple[int, ...], str]) -> str:
    """Name the held-out prompt that a row answers instead of the expected prompt; return "other tokens" if there is
    none."""
    found = tuple(tokens_T.tolist())
    for length in sorted({len(tokens) for tokens in held_out}, reverse=True):
        if found[:length] in held_out:
            return f"the held-out prompt {held_out[found[:length]]}"
    return "other tokens"


def _check_tokens(table: _Table, asked: ExpectedRows) -> Iterator[Found]:
    """Check that all tokens are in the vocabulary, and that only tokens sampled by the policy have a log-prob and a
    policy version."""
    most = asked.vocabulary
    tokens = table.tokens_T[~table.foreign_T]
    if tokens.size and (tokens.min() < 0 or tokens.max() >= most):
        yield "lineage", f"a row has a token outside of the policy's vocabulary of {most} tokens"
    given_T = ~table.mask_T
    if (table.logprobs_T[given_T] != 0.0).any() or (table.versions_T[given_T] != -1).any():
        yield "lineage", "a token that the policy did not sample has a log-probability or a version"
    if (table.mask_T & ~table.response_T).any():
        yield "lineage", "a token of a prompt is marked as sampled by the policy"
    chosen_row, chosen_version = table.row_T[table.mask_T], table.versions_T[table.mask_T]
    if ((np.diff(chosen_version) < 0) & (np.diff(chosen_row) == 0)).any():
        yield "stale", "a token was sampled by an older version than the token before it"
    if unknown := set(table.endings) - set(ENDINGS):
        yield "lineage", f"a trajectory has the ending {min(unknown)!r}; known endings: {', '.join(ENDINGS)}"
    if asked.stops and not (asked.limits and (asked.limits.made_up or not asked.limits.single_turn)):
        yield from _check_stops(table, asked.stops)


def _check_stops(table: _Table, stops: frozenset[int]) -> Iterator[Found]:
    """Check that each response that ended with `StopReason.STOP` has a stop token as its last sampled token.

    The caller must not check episodes with several turns, because a stop string may have ended the last turn without a
    stop token.
    """
    chosen_T = np.flatnonzero(table.mask_T)
    last_R = np.searchsorted(chosen_T, table.first_R + table.length_R) - 1
    for row, (ending, last) in enumerate(zip(table.endings, last_R.tolist(), strict=True)):
        token = int(table.tokens_T[chosen_T[last]]) if last >= 0 else -1
        if ending == StopReason.STOP and token not in stops:
            yield (
                "lineage",
                (
                    f"a response to prompt {table.index_R[row]} has the ending `stop`, but does not end with a stop "
                    "token"
                ),
            )
            return


def _check_responses(table: _Table, limits: BatchLimits) -> Iterator[Found]:
    """Check that no response exceeds `max_new_tokens`, and that each response that ended with `StopReason.LENGTH` has
    `max_new_tokens` tokens.

    In an episode with several turns, a response that ended with `StopReason.LENGTH` may be shorter than
    `max_new_tokens`.
    """
    response_R = table.length_R - table.prompt_R
    if (response_R > limits.max_new_tokens).any():
        yield "lineage", f"a response has {response_R.max()} tokens, more than max_new_tokens = {limits.max_new_tokens}"
    cut_R = np.array([ending == StopReason.LENGTH for ending in table.endings], dtype=bool)
    if limits.single_turn and (response_R[cut_R] < limits.max_new_tokens).any():
        least, most = response_R[cut_R].min(), limits.max_new_tokens
        yield "lineage", f"a response has the ending `length` after {least} tokens, although max_new_tokens is {most}"
    if (response_R < 1).any():
        yield "lineage", "a trajectory has no response tokens"
    if limits.single_turn and (table.response_T & ~table.mask_T).any():
        yield (
            "lineage",
            "a response contains a token that the policy did not sample, but the environment has only one turn",
        )


def _check_times(batch: TrajectoryBatch, table: _Table, limits: BatchLimits) -> Iterator[Found]:
    """Check that times are finite and not negative. If the config requires it, also check that each trajectory's start
    version is that of its oldest token.
    """
    if limits.oldest_token:
        yield from _check_starts(batch, table)
    for name in ("generation_seconds", "reward_seconds"):
        seconds = batch.table[name].to_numpy()
        if not (np.isfinite(seconds) & (seconds >= 0)).all():
            yield "lineage", f"the {name} of a trajectory is negative or not finite"


def _check_starts(batch: TrajectoryBatch, table: _Table) -> Iterator[Found]:
    """Check that the start version of each trajectory is the oldest policy version that sampled one of the trajectory's
    tokens."""
    oldest_R = np.full(len(table.length_R), np.iinfo(np.int32).max, dtype=np.int64)
    np.minimum.at(oldest_R, table.row_T[table.mask_T], table.versions_T[table.mask_T])
    started_R = batch.table["started_version"].to_numpy()
    spoken = np.unique(table.row_T[table.mask_T])
    if (started_R[spoken] != oldest_R[spoken]).any():
        yield "stale", "a trajectory's start version is not the version of its oldest token, as the config requires"


def _check_rewards(batch: TrajectoryBatch, limits: BatchLimits) -> Iterator[Found]:
    """Check that the filter in the run's config would have kept every group of the batch, given the group's rewards."""
    judged = batch.judged
    index = judged.table["index"].to_numpy()[judged.episode_rows].tolist()
    for prompt, group in groupby(zip(index, judged.episode_rewards.tolist(), strict=True), key=lambda one: one[0]):
        why = limits.filtered([reward for _, reward in group])
        if why is not None:
            yield "lineage", f"group {prompt} was trained on, although the config's filter removes it: {why}"
            return


def _flat(batch: TrajectoryBatch, name: str) -> Array:
    values: Array = pc.list_flatten(batch.table[name]).to_numpy()
    return values
