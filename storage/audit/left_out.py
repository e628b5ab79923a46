"""Checks the responses of a batch that nobody could judge and that the learner leaves out.

Arrays with the suffix `_R` have one element for each row of the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from rollflow.storage.audit.answers import ExpectedRows
from rollflow.storage.audit.report import ViolationKind
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.records import LEAST_JUDGED, LONGEST_WHY, GroupKey, Outcome, UnjudgedResponse

Found = tuple[ViolationKind, str]


def check_left_out(
    batch: TrajectoryBatch, body: BatchCommitted, asked: ExpectedRows, group_size: int
) -> Iterator[Found]:
    """Report responses that are left out although they were judged or must not be left out, and groups with too few
    judged responses. Compare the unjudged responses in the log with those in the batch file.
    """
    groups = {group.key for group in body.groups}
    recorded = [one for one in body.unjudged if one.key in groups]
    left_out_R = batch.left_out
    if not left_out_R.any() and not recorded:
        return
    pairs = zip(batch.table["index"].to_pylist(), batch.table["attempt"].to_pylist(), strict=True)
    keys_R = [GroupKey(*pair) for pair in pairs]
    yield from _check_rows(batch, left_out_R, keys_R, asked)
    found = list(_list_left_out(batch, left_out_R, keys_R))
    in_file, in_log = Counter(found), Counter(recorded)
    for wrong in [*(in_file - in_log), *(in_log - in_file)][:1]:
        what = f"response {wrong.prompt}.{wrong.attempt}.{wrong.sample}"
        yield "unjudged", f"the batch file and the log entry disagree on {what}, which nobody could judge: {wrong.why}"
    judged = Counter(keys_R[row] for row in batch.episode_rows if not left_out_R[row])
    least = min(LEAST_JUDGED, group_size)
    for key in sorted({one.key for one in found}):
        if judged[key] < least:
            what = f"{judged[key]} judged responses; responses are left out only of groups with at least {least}"
            yield "unjudged", f"group {key.prompt}.{key.attempt} has {what}"


def _check_rows(
    batch: TrajectoryBatch, left_out_R: np.ndarray, keys_R: list[GroupKey], asked: ExpectedRows
) -> Iterator[Found]:
    """Check each row that is left out, and that no branch is left out without its whole episode."""
    column = batch.optional("outcome")
    outcomes_R = [None] * len(batch) if column is None else column.to_pylist()
    reward_R, samples_R = batch.table["reward"].to_numpy(), batch.table["sample"].to_pylist()
    first_R = batch.first_rows
    for row in np.flatnonzero(left_out_R | left_out_R[first_R]).tolist():
        key = keys_R[row]
        name = f"trajectory {key.prompt}.{key.attempt}.{samples_R[row]}"
        if left_out_R[row] != left_out_R[first_R[row]]:
            yield "unjudged", f"{name} is left out without the other branches of its episode, or they without it"
        elif outcomes_R[row] != Outcome.UNJUDGED:
            yield "unjudged", f"{name} is left out, but its outcome is {outcomes_R[row]}"
        elif not np.isnan(reward_R[row]):
            yield (
                "unjudged",
                f"{name} is left out, because nobody could judge it, but it has the reward {reward_R[row]:g}",
            )
        elif not _may_leave_out(key.prompt, asked):
            yield "unjudged", f'{name} is left out, but the config has no unjudged = "leave_out" for its scorer'


def _may_leave_out(prompt: int, asked: ExpectedRows) -> bool:
    """Return whether the config leaves out the unjudged responses to a prompt; True if the config is unknown."""
    if asked.limits is None:
        return True
    if asked.prompts is None:
        return bool(asked.limits.leave_out)
    return asked.prompts[prompt].scorer in asked.limits.leave_out


def _list_left_out(
    batch: TrajectoryBatch, left_out_R: np.ndarray, keys_R: list[GroupKey]
) -> Iterator[UnjudgedResponse]:
    """Yield the record that the log must contain for each response that the batch file marks as left out."""
    samples_R, reasons_R = (batch.table[name].to_pylist() for name in ("sample", "reason"))
    for row in batch.episode_rows.tolist():
        if left_out_R[row]:
            key = keys_R[row]
            yield UnjudgedResponse(key.prompt, key.attempt, samples_R[row], reasons_R[row][:LONGEST_WHY])
